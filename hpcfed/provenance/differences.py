"""Differences between a round computed here and its recorded row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hpcfed.run_folder.certificate import VARYING_COLUMNS
from hpcfed.run_folder.rounds import line_of

CONTINUOUS = ("local_loss", "mean_delta_sq", "delta_sq", "server_lr", "train_loss", "test_loss")
"""Columns compared within a tolerance; their relative differences measure how far two rounds are apart."""
ROUNDED = ("hash", "unit", "attempts", "method")
"""Columns that may change entirely if the last bits of the model do; not compared within a tolerance."""
NEAR = 0.01
"""Largest difference of accuracies and metrics that rounding can explain: a few samples cross a decision boundary."""
TOLERANCE = {"float32": 1e-3, "float64": 1e-9}
"""``dtype`` of the recipe → the largest relative tolerance for one round on a machine that computes other bits."""
MARGIN = 256
"""Tolerance of a round, as a multiple of the change of its result if the last bits of its initial model change: on
another machine every operation of the round may round differently, not the initial model alone.
"""
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}


NESTED = ("clients", "apart")
"""Columns with a mapping of scores, whose metrics may be others than those computed here."""


def is_score(column: str) -> bool:
    """Whether a column of the record is a score, that is, a result of an evaluation."""
    return column.startswith(("test_", "train_")) or column.partition(".")[0] in NESTED


class Difference(NamedTuple):
    """A column in which a round's recorded row differs from the row computed here, or from another run's row."""

    column: str
    recorded: Any
    here: Any

    @property
    def is_score(self) -> bool:
        """Whether the column is a score (see the function `is_score`)."""
        return is_score(self.column)

    @property
    def relative(self) -> float:
        """Relative difference |a − b| / max(|a|, |b|) of the two values a and b; inf if one of them is not a number."""
        if not all(isinstance(value, int | float) for value in (self.recorded, self.here)):
            return math.inf
        return abs(self.recorded - self.here) / max(abs(self.recorded), abs(self.here))

    def __str__(self) -> str:
        if math.isinf(self.relative):
            return f"{self.column}: {_short(self.recorded)} recorded, {_short(self.here)} here"
        return f"{self.column}: {self.recorded:.9g} recorded, {self.here:.9g} here (relative {self.relative:.1e})"


def in_bits(recorded: Mapping[str, Any], row: Mapping[str, Any], *, scores_may_lack: bool = True) -> list[Difference]:
    """Return the bitwise differences between a recorded row and another row, ``hash`` first.

    The columns in both rows are compared, except `VARYING_COLUMNS`, such as times. With `scores_may_lack`, a score that
    is None in one of the rows is no difference, since ``evaluate`` may have changed between the two.
    """
    recorded, here = _flat_alike(recorded, json.loads(line_of(row)))
    found = [Difference(key, recorded[key], here[key]) for key in recorded.keys() & here.keys() - set(VARYING_COLUMNS)]
    differing = [one for one in found if one.recorded != one.here]
    if scores_may_lack:
        differing = [one for one in differing if not (one.is_score and None in (one.recorded, one.here))]
    return sorted(differing, key=lambda one: (one.column != "hash", one.column not in CONTINUOUS, one.column))


def from_record(recorded: Mapping[str, Any], row: Mapping[str, Any]) -> list[Difference]:
    """Return the bitwise differences between a recorded row and the row computed here, ``hash`` first.

    Columns are compared as in `in_bits` if they have a recorded value; a score that is None in `row` then differs.
    """
    return [one for one in in_bits(recorded, row, scores_may_lack=False) if one.recorded is not None]


def not_computed(recorded: Mapping[str, Any], row: Mapping[str, Any]) -> set[str]:
    """Return columns with a recorded value that the computed row does not have, such as an earlier recipe's metrics."""
    recorded, row = _flat_alike(recorded, row)
    found = {key for key in recorded.keys() - row.keys() - {*VARYING_COLUMNS} if recorded[key] is not None}
    return {".".join(key.split(".")[:4]) if key.startswith(f"{NESTED[0]}.") else key for key in found}  # no statistics


def lacking(recorded: Mapping[str, Any], row: Mapping[str, Any]) -> set[str]:
    """Return the columns that have a value in the computed row, but none in the recorded one."""
    recorded, here = _flat_alike(recorded, json.loads(line_of(row)))  # null for what is not finite
    return {key for key in here.keys() - {*VARYING_COLUMNS} if here[key] is not None and recorded.get(key) is None}


def _flat_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two rows; a `NESTED` column that both have as a mapping is a column for each number in it."""
    both = [key for key in NESTED if all(isinstance(row.get(key), Mapping) for row in (one, other))]
    first, second = ({key: value for key, value in row.items() if key not in both} for row in (one, other))
    for key in both:
        first |= dict(_numbers_in(one[key], key))
        second |= dict(_numbers_in(other[key], key))
    return first, second


def _numbers_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _numbers_in(inner, f"{name}.{key}")


def beyond(recorded: Mapping[str, Any], row: Mapping[str, Any], tolerance: float) -> list[Difference]:
    """Return the differences between two rows that rounding cannot explain; columns `ROUNDED` are left out.

    Rounding explains relative differences up to `tolerance` in the columns `CONTINUOUS`, differences up to `NEAR` (or
    `tolerance`, if larger) in other scores, and none in any other column.
    """
    return [one for one in from_record(recorded, row) if one.column not in ROUNDED and not _is_near(one, tolerance)]


def _is_near(one: Difference, tolerance: float) -> bool:
    if one.column in CONTINUOUS:
        return one.relative <= tolerance
    if not one.is_score:
        return False
    pairs = _numbers(one.recorded, one.here)
    return pairs is not None and all(abs(a - b) <= max(NEAR, tolerance) * max(abs(a), abs(b), 1) for a, b in pairs)


def _numbers(one: Any, other: Any) -> list[tuple[float, float]] | None:
    """Return the pairs of corresponding numbers in two JSON values; None if their keys, lengths or texts differ."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return [(one, other)]
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        inner = [_numbers(one[key], other[key]) for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        inner = [_numbers(*pair) for pair in zip(one, other, strict=True)]
    else:
        return [] if one == other else None
    return None if None in inner else [pair for own in inner if own is not None for pair in own]


def largest(recorded: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the largest relative difference of the `CONTINUOUS` columns; 0 if all are equal."""
    return max((one.relative for one in in_bits(recorded, row) if one.column in CONTINUOUS), default=0.0)


def tolerance_from(changed: float, dtype: str) -> float:
    """Return the relative tolerance for one round: `MARGIN` times `changed`, within limits that depend on `dtype`.

    Args:
        changed: largest relative difference of the columns `CONTINUOUS` after a change in the last bits of a round's
            initial model.
        dtype: ``dtype`` of the recipe.
    """
    return min(TOLERANCE[dtype], MARGIN * max(changed, EPSILON[dtype]))


def of_drawn_model(tolerance: float, dtype: str) -> float:
    """Return `tolerance` for round 1: enlarged for float64, since the initial model is drawn in float32 even then."""
    return min(TOLERANCE["float32"], tolerance * EPSILON["float32"] / EPSILON[dtype])


def own_doubts(environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if ``environment.json`` says that the run may not be reproducible bit for bit, with its reason."""
    if environment.get("bitwise") is False:
        yield f"its record says bitwise: false: {environment.get('bitwise_why_not')}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
