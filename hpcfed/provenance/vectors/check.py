"""Comparison of conformance vectors in a file, from hpcfed or another framework, with vectors computed here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcfed.errors import InputError
from hpcfed.io.text import parse_json, read_text
from hpcfed.provenance.vectors.trajectory import FORMAT, VERSION, vectors

TOLERANCE = 1e-12
"""Largest difference, relative to the largest parameter, that another order of float64 additions can explain."""


class Agreement(NamedTuple):
    """Distance between a trajectory in a file and the trajectory computed here.

    Attributes:
        method: name of the method or case.
        difference: largest difference of a parameter in any round, divided by the largest parameter of that round's
            model; inf if cohorts or minibatches differ.
        round: the round of this difference, from 1; 0 if no model differs.
    """

    method: str
    difference: float
    round: int

    @property
    def holds(self) -> bool:
        """Whether the difference is within `TOLERANCE`."""
        return self.difference <= TOLERANCE


def read_vectors(path: Path) -> dict[str, Any]:
    """Return the content of a file of conformance vectors.

    Raises:
        InputError: the file cannot be read, or has another format or version.
    """
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise InputError("vectors cannot be read", where=str(path), got=str(error)) from None
    if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        expected = f'"format": "{FORMAT}", "version": {VERSION}'
        raise InputError("not a file of vectors", where=str(path), expected=expected)
    return content


def agreements(path: Path) -> Iterator[Agreement]:
    """Compare the trajectories in a file with those computed here; yield an `Agreement` for each method and case.

    Raises:
        InputError: the file has no vectors or malformed ones, an unknown method or case, or another ``problem``.
    """
    recorded = read_vectors(path)
    for key in ("methods", "cases"):
        if not isinstance(recorded.get(key) or {}, dict):
            raise InputError(f"malformed vectors: {key}", where=str(path), expected="a mapping by name")
    here = vectors(recorded.get("methods") or (), recorded.get("cases") or ())
    if recorded.get("problem") != here["problem"]:
        raise InputError("the vectors are of another problem", where=str(path))
    for what, kind, largest in (("method", "methods", _largest), ("case", "cases", _largest_of_models)):
        for name, own in (recorded.get(kind) or {}).items():
            if name not in here[kind]:
                raise InputError(f"no {what} {name!r}", where=str(path))
            try:
                yield Agreement(name, *largest(own, here[kind][name]))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise InputError(f"malformed vectors of {name}", where=str(path), got=repr(error)) from None


def _largest(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[float, int]:
    """Return a method's largest difference over its rounds, relative to the largest parameter, and its round.

    The difference is inf if a round has another cohort or other minibatches. The round is 0 if no model differs.
    """
    worst, at = 0.0, 0
    for row, own in zip(recorded["rounds"], here["rounds"], strict=True):
        for key in ("cohort", "batches"):
            if row[key] != own[key]:
                return math.inf, own["round"]
        difference = _apart(row["w"], own["w"])
        if not difference <= worst:
            worst, at = difference, own["round"]
    return worst, at


def _largest_of_models(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[float, int]:
    """Return a case's largest difference over its rounds, relative to the largest parameter, and its round.

    The round is 0 if no model differs.
    """
    rounds = zip(recorded["w"], here["w"], strict=True)
    apart = [(_apart(found, wanted), number) for number, (found, wanted) in enumerate(rounds, 1)]
    worst, number = max(apart, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
    return worst, number if worst else 0


def _apart(recorded: Any, here: Any) -> float:
    """Return the largest difference between the parameters of two models, relative to the largest one of `here`."""
    found, wanted = list(_numbers(recorded)), list(_numbers(here))
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True)) / max(map(abs, wanted))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _numbers(value[key])
    elif isinstance(value, list):
        for entry in value:
            yield from _numbers(entry)
    else:
        yield float(value)
