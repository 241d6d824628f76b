"""Checks of a user's method: types, names, shapes and dtypes of everything it returns.

The gaps between parameters (`hpcfed.models.flat`) of the vectors that it returns are set to 0: they are in every norm
and sum, so that random numbers of a method in them would be in its step size and in no parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor, float64

from hpcfed.errors import InputError
from hpcfed.types import (
    LocalMethod,
    LocalResult,
    Means,
    Method,
    RoundContext,
    ServerUpdate,
    State,
    Tilt,
    Update,
)
from hpcfed.user_code.blame import defined_at

Signature = dict[str, tuple[tuple[int, ...], Any]]
"""Name → shape and type of the tensors of a state."""


def checked(method: Method, gaps: Tensor) -> Method:
    """Return the method with parts whose results are checked.

    Args:
        gaps: entries of a vector (d,) that no parameter has, int64, on the clients' device.
    """
    return replace(
        method,
        local=cast("LocalMethod", _CheckedLocal(method.local, gaps)),
        server=_CheckedServer(method.server, gaps.cpu()),
        normalize=None if method.normalize is None else _CheckedNormalization(method.normalize, gaps),
    )


class _Checked:
    def __init__(self, part: Any, gaps: Tensor):
        self._part, self._gaps = part, gaps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def _refuse(self, name: str, what: str, expected: str, got: str) -> None:
        where = ": ".join(filter(None, (defined_at(self._part, name), f"{type(self._part).__name__}.{name}")))
        raise InputError(what, where=where, expected=expected, got=got, remedy="correct it there")

    def _check_kind(self, name: str, answer: Any, kind: type) -> None:
        if not isinstance(answer, kind):
            expected = f"a {kind.__name__}" if kind is not Mapping else "a mapping of names to tensors"
            self._refuse(name, "its answer", expected, f"a {type(answer).__name__}")

    def _signature(self, name: str, state: State) -> Signature:
        self._check_kind(name, state, Mapping)
        tensors: Mapping[str, Any] = state
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                self._refuse(name, f"its {key!r}", "a tensor", f"a {type(value).__name__}")
        return {key: (tuple(value.shape), value.dtype) for key, value in state.items()}

    def _check_state(self, name: str, state: State, like: Signature) -> None:
        """Refuse a next state whose names, shapes or types differ from the first one's."""
        found = self._signature(name, state)
        for key in sorted(found.keys() | like.keys()):
            if found.get(key) != like.get(key):
                self._refuse(name, f"its state {key!r}", _named(like.get(key)), _named(found.get(key)))

    def _closed(self, vector: Tensor) -> Tensor:
        """Return a vector (d,) with its gaps set to 0, in place where its memory allows it."""
        if vector.requires_grad or not vector.is_contiguous():
            return vector.detach().index_fill(0, self._gaps, 0)
        return vector.index_fill_(0, self._gaps, 0)

    def _check_vector(self, name: str, what: str, vector: object, like: Tensor, dtype: Any) -> None:
        expected = (tuple(like.shape), dtype)
        if not isinstance(vector, Tensor):
            self._refuse(name, what, _named(expected), f"a {type(vector).__name__}")
        elif (tuple(vector.shape), vector.dtype) != expected:
            self._refuse(name, what, _named(expected), _named((tuple(vector.shape), vector.dtype)))


class _CheckedLocal(_Checked):
    _state: Signature | None = None
    _shared: Signature | None = None

    def begin(self, w: Tensor) -> State:
        state = self._part.begin(w)
        self._state = self._signature("begin", state)
        return state

    def begin_shared(self, w: Tensor) -> State:
        state = self._part.begin_shared(w)
        self._shared = self._signature("begin_shared", state)
        return state

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        tilt = self._part.tilt(w, shared, client, context)
        self._check_kind("tilt", tilt, Tilt)
        vectors = {"shift": tilt.shift, "anchor": tilt.anchor, "offset": tilt.offset}
        for what, vector in vectors.items():
            if vector is not None:
                self._check_vector("tilt", f"its {what}", vector, w, w.dtype)
        if (tilt.offset is not None or tilt.radius) and not self._part.evaluates_elsewhere:
            self._refuse("tilt", "its offset or radius", "a rule with evaluates_elsewhere = True", "False")
        if not isinstance(tilt.mu, int | float):
            self._refuse("tilt", "its mu", "a number", f"a {type(tilt.mu).__name__}")
        return replace(tilt, **{what: self._closed(vector) for what, vector in vectors.items() if vector is not None})

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        update = self._part.report(local, w, shared, client, context)
        self._check_kind("report", update, Update)
        self._check_kind("report", update.scalars, Mapping)
        if update.delta is not None:
            self._check_vector("report", "its delta", update.delta, w, w.dtype)
        self._signature("report", update.vectors)
        delta = None if update.delta is None else self._closed(update.delta)
        fitting = {name: self._closed(vector) for name, vector in update.vectors.items() if vector.shape == w.shape}
        return replace(update, delta=delta, vectors={**update.vectors, **fitting})

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State | None:
        state = self._part.next_state(sent, local, w, shared, client, context)
        if state is not None and self._state is not None:
            self._check_state("next_state", state, self._state)
        return state

    def share(self, shared: State, means: Means) -> State:
        state = self._part.share(shared, means)
        if self._shared is not None:
            self._check_state("share", state, self._shared)
        return state


class _CheckedServer(_Checked):
    _state: Signature | None = None

    def begin(self, w: Tensor) -> State:
        state = self._part.begin(w)
        self._state = self._signature("begin", state)
        return state

    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        update = self._part.step(w, state, means, context)
        self._check_kind("step", update, ServerUpdate)
        self._check_vector("step", "its w", update.w, w, float64)
        if self._state is not None:
            self._check_state("step", update.state, self._state)
        if update.server_lr is not None and not isinstance(update.server_lr, int | float):
            self._refuse("step", "its server_lr", "a number or None", f"a {type(update.server_lr).__name__}")
        for name, number in update.metrics.items():
            if not isinstance(number, int | float):
                self._refuse("step", f"its metric {name!r}", "a number", f"a {type(number).__name__}")
        return replace(update, w=self._closed(update.w))


class _CheckedNormalization(_Checked):
    def factors(self, effective_steps: np.ndarray, steps: np.ndarray, shares: np.ndarray, prox_mu: float) -> np.ndarray:
        factors = self._part.factors(effective_steps, steps, shares, prox_mu)
        if np.shape(factors) != steps.shape:
            self._refuse("factors", "its answer", f"shape {steps.shape}", f"shape {np.shape(factors)}")
        if not all(map(math.isfinite, np.asarray(factors, dtype=float))):
            self._refuse("factors", "its answer", "finite numbers", str(factors))
        return np.asarray(factors, dtype=float)


def _named(signature: tuple[tuple[int, ...], Any] | None) -> str:
    """Describe a tensor's shape and type in words."""
    return "none" if signature is None else f"a tensor of shape {signature[0]} in {signature[1]}"
