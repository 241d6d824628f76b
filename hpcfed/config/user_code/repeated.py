"""Repetition of calls of a user's functions: copies of their arguments, and hashes of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import xxhash
from torch import Tensor, strided, uint8

from hpcfed.types import Means, ServerUpdate, State, Update

NOT_COMPARED = "metrics"
"""The part of a server's answer that may differ between two calls: numbers of the record, such as seconds."""


def with_own_containers(argument: Any) -> Any:
    """Return an argument with mappings and arrays of its own: what a call puts into them, no other call sees."""
    if isinstance(argument, np.ndarray):
        return argument.copy()
    if isinstance(argument, Mapping):
        return dict(argument)
    if isinstance(argument, Update):
        return replace(argument, vectors=dict(argument.vectors), scalars=dict(argument.scalars))
    if isinstance(argument, Means):
        own = {name: numbers.copy() for name, numbers in argument.client_scalars.items()}
        return replace(argument, vectors=dict(argument.vectors), scalars=dict(argument.scalars), client_scalars=own)
    return argument


def lost_assignment(before: State, after: State, answer: object) -> str | None:
    """Return a name whose tensor a call has replaced in a mapping, without returning it; None if there is none."""
    returned = answer.state if isinstance(answer, ServerUpdate) else answer
    kept = returned if isinstance(returned, Mapping) else {}
    changed = (name for name in sorted(before.keys() | after.keys()) if before.get(name) is not after.get(name))
    return next((name for name in changed if kept.get(name) is not after.get(name)), None)


def hashes_of(answer: object, gaps: Tensor) -> dict[str, int]:
    """Return hashes of the tensors and numbers of an answer by their names in it; empty for an answer of another kind.

    Args:
        gaps: entries of a vector (d,) that do not count.
    """
    if is_dataclass(answer) and not isinstance(answer, type):
        found = {one.name: getattr(answer, one.name) for one in fields(answer) if one.name != NOT_COMPARED}
    elif isinstance(answer, np.ndarray | list | tuple):
        with suppress(RuntimeError, TypeError, ValueError):
            return {"array": xxhash.xxh3_64_intdigest(np.array(answer, dtype=float).tobytes())}
        return {}
    elif isinstance(answer, Tensor):
        found = {"vector": answer}
    else:
        found = dict(answer) if isinstance(answer, Mapping) else {}
    hashes: dict[str, int] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            hashes |= {f"{name} {inner!r}": number for inner, number in hashes_of(value, gaps).items()}
        elif isinstance(value, Tensor) and value.layout is strided and not value.is_meta:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
            if value.dim() == 1 and len(gaps) and len(value) > gaps.max():
                flat = flat.index_fill(0, gaps.cpu(), 0)
            hashes[str(name)] = xxhash.xxh3_64_intdigest(flat.view(uint8).numpy().data)
        elif isinstance(value, int | float):
            number = value.hex() if isinstance(value, float) else hex(value)
            hashes[str(name)] = xxhash.xxh3_64_intdigest(number.encode())
    return hashes
