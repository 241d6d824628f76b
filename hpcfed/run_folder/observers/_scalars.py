"""The scalars of a round's row, for loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, value) of the numbers in a row: ``test_accuracy``, …, ``seconds/local``; no lists and no nulls."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "round":
            yield f"{prefix}{name}", float(value)
