"""Remarks on compared methods whose recipes also differ in the clients' weights or in the evaluated model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcfed.errors import first_of

SHOWN = 4
"""Maximum number of labels that a remark lists for a value."""


def unlike(labelled: Sequence[tuple[str, Mapping[str, Any]]], *, equal_clients: bool = False) -> list[str]:
    """Return a remark if clients' weights differ between methods, and another if the evaluated models do.

    Args:
        labelled: (label, resolved recipe) pairs; recipes with the same label belong to one method. Recipes without
            ``weights`` have no part in the first remark.
        equal_clients: whether all clients are known to have equally many samples: the weights are then equal, and there
            is no remark on them.
    """
    lines = []
    weights = _by_value((label, value) for label, recipe in labelled if (value := recipe.get("weights")) is not None)
    models = _by_value((label, (recipe.get("evaluate") or {}).get("model", "last")) for label, recipe in labelled)
    if len(weights) > 1 and not equal_clients:
        lines.append(f"clients' weights differ between methods: {_shown(weights)}; set weights to compare the methods")
    if len(models) > 1:
        lines.append(f"evaluated models differ between methods: {_shown(models)} (evaluate.model)")
    return lines


def _by_value(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[str]]:
    """Return value → labels that have it; empty if all labels have the same values, as cases of an experiment may."""
    found: dict[str, list[str]] = {}
    values: dict[str, set[str]] = {}
    for label, value in pairs:
        values.setdefault(label, set()).add(str(value))
        if label not in found.setdefault(str(value), []):
            found[str(value)].append(label)
    return {} if len({frozenset(of) for of in values.values()}) < 2 else found


def _shown(found: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} for {first_of(labels, SHOWN)}" for value, labels in found.items())
