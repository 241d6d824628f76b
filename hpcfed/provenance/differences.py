"""Comparison of a round computed here with its row of a record, and of the environments of two runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hpcfed.run_folder.certificate import VARYING_COLUMNS
from hpcfed.run_folder.rounds import line_of

CONTINUOUS = ("local_loss", "mean_delta_sq", "delta_sq", "server_lr", "train_loss", "test_loss")
"""Columns that show by how much two rounds differ, and that a tolerance applies to."""
PROCESSOR = ("device", "instruction set", "library settings", "processor", "threads per rank")
"""Facts that ``bits: portable`` does not depend on."""
TOLERANCE = {"float32": 1e-3, "float64": 1e-9}
"""Relative difference of single rounds on machines of other bits, by the recipe's ``dtype``."""
KINDS = (("device", "device"), ("instruction set", "instructions"), ("library settings", "library_settings"))
"""Facts of every rank, and their keys."""
PACKAGES = ("torch", "numpy")
"""Packages whose version decides the last bits."""


class Difference(NamedTuple):
    """A column of a round in which two records differ."""

    column: str
    recorded: Any
    here: Any

    @property
    def relative(self) -> float:
        """|a − b| / max(|a|, |b|); inf where one is no number."""
        if not all(isinstance(value, int | float) for value in (self.recorded, self.here)):
            return math.inf
        return abs(self.recorded - self.here) / max(abs(self.recorded), abs(self.here))

    def __str__(self) -> str:
        if math.isinf(self.relative):
            return f"{self.column}: {_short(self.recorded)} recorded, {_short(self.here)} here"
        return f"{self.column}: {self.recorded:.9g} recorded, {self.here:.9g} here (relative {self.relative:.1e})"


def in_bits(recorded: Mapping[str, Any], row: Mapping[str, Any]) -> list[Difference]:
    """Return the columns in which a round differs from its record, ``hash`` first.

    What was measured does not count; nor a score that one of the two lacks, since ``evaluate`` may have changed.
    """
    here = json.loads(line_of(row))
    found = [Difference(key, recorded[key], here[key]) for key in recorded.keys() & here.keys() - set(VARYING_COLUMNS)]
    differing = [one for one in found if one.recorded != one.here and not _is_absent_score(one)]
    return sorted(differing, key=lambda one: (one.column != "hash", one.column not in CONTINUOUS, one.column))


def beyond(recorded: Mapping[str, Any], row: Mapping[str, Any], tolerance: float) -> list[Difference]:
    """Return the `CONTINUOUS` columns of relative difference above the tolerance, and another cohort."""
    found = [one for one in in_bits(recorded, row) if one.column in (*CONTINUOUS, "cohort")]
    return [one for one in found if one.column == "cohort" or one.relative > tolerance]


def largest(recorded: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return the largest relative difference of the `CONTINUOUS` columns; 0 if they agree."""
    return max((one.relative for one in in_bits(recorded, row) if one.column in CONTINUOUS), default=0.0)


def of_environments(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between two ``environment.json`` that may change last bits, as words.

    Between two runs of ``bits: portable`` neither the processor nor the threads do.
    """
    portable = {recorded.get("bits"), here.get("bits")} == {"portable"}
    for name, then, now in _facts(recorded, here):
        if then is not None and then != now and not (portable and name in PROCESSOR):
            yield f"{name}: {then} there, {now} here"


def _facts(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield "hpcfed", recorded.get("hpcfed"), here.get("hpcfed")
    for package in PACKAGES:
        then, now = ((one.get("packages") or {}).get(package) for one in (recorded, here))
        yield package, then, now
    for name, key in KINDS:
        yield name, _all_ranks(recorded, key), _all_ranks(here, key)
    yield "processor", recorded.get("cpu"), here.get("cpu")
    yield "threads per rank", recorded.get("threads_per_rank"), here.get("threads_per_rank")
    if recorded.get("bitwise") is False and recorded.get("ranks") != here.get("ranks"):
        yield f"ranks ({recorded.get('bitwise_why_not')})", recorded.get("ranks"), here.get("ranks")


def _all_ranks(environment: Mapping[str, Any], key: str) -> str | None:
    found = sorted({str(entry[key] or "none") for entry in environment.get("per_rank") or () if key in entry})
    return ", ".join(found) or None


def _is_absent_score(one: Difference) -> bool:
    is_score = one.column.startswith(("test_", "train_")) or one.column == "clients"
    return is_score and None in (one.recorded, one.here)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
