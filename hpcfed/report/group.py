"""Runs that differ only in their seed are repetitions of one experiment: grouped, named, and compared by recipe."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcfed.report.read import Run

NOT_THE_EXPERIMENT = ("seed", "seeds", "name", "output", "observers", "checkpoint", "watchdog")
ABSENT = "–"
FEDAVG_PARTS = ("plain", "none", "step")
PAPER_NAMES = {
    "fedavg": "FedAvg",
    "fedavgm": "FedAvg-M",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "scaffold": "SCAFFOLD",
    "scaffold-exp": "SCAFFOLD-ExP",
    "fedadagrad": "FedAdagrad",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedexp": "FedExP",
    "fedexp-m": "FedExP-M",
    "feddyn": "FedDyn",
    "fedsplit": "FedSplit",
    "dsgd": "distributed SGD",
}


@dataclass(frozen=True)
class Group:
    """Repetitions of one experiment; `label` is unique in a report."""

    label: str
    runs: tuple[Run, ...]

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe that the runs share, with the first one's seed, name and output."""
        return self.runs[0].recipe

    @property
    def seeds(self) -> str:
        separator = "; " if any("," in run.seed for run in self.runs) else ", "
        return separator.join(run.seed for run in self.runs)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs whose recipes are equal but for `NOT_THE_EXPERIMENT`, in order of appearance.

    A label is the method's name; where several groups have the same method, recipe keys tell them apart.
    """
    repetitions: dict[str, list[Run]] = {}
    for run in runs:
        repetitions.setdefault(_experiment(run.recipe), []).append(run)
    recipes = [group[0].recipe for group in repetitions.values()]
    return [Group(label, tuple(group)) for label, group in zip(_labels(recipes), repetitions.values(), strict=True)]


def differences(mappings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the dotted keys whose values are not the same in all mappings, with one value in text per mapping."""
    flat = [flatten(mapping) for mapping in mappings]
    keys = dict.fromkeys(key for entry in flat for key in entry)
    values = {key: [entry.get(key, ABSENT) for entry in flat] for key in keys}
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return ``{"local.lr": "0.1", …}``: dotted keys, values in text; null counts as absent."""
    flat: dict[str, str] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def method_name(recipe: Mapping[str, Any]) -> str:
    """Name the method as its paper does: ``FedExP``, ``prox + fedexp``, ``FedProx + GeL (remaining)``."""
    algorithm = recipe.get("algorithm")
    if not isinstance(algorithm, Mapping):
        return str(algorithm)
    parts = [str(algorithm[part]) for part in ("local", "normalize", "server") if algorithm.get(part)]
    factory = str(algorithm.get("factory", "")).rpartition(".")[2]  # the last module and the function
    named = [part for part in parts if part not in FEDAVG_PARTS]
    name = str(algorithm.get("name") or factory or " + ".join(named) or "fedavg")
    guess = recipe.get("guess") or "none"
    return PAPER_NAMES.get(name, name) + ("" if guess == "none" else f" + GeL ({guess})")


def experiment_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe without what may differ between the repetitions of one experiment."""
    return {key: value for key, value in recipe.items() if key not in NOT_THE_EXPERIMENT}


def _experiment(recipe: Mapping[str, Any]) -> str:
    return json.dumps(experiment_recipe(recipe), sort_keys=True, default=str)


def _labels(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    methods = [method_name(recipe) for recipe in recipes]
    labels = list(methods)
    for method, count in Counter(methods).items():
        if count > 1:
            same = [index for index, name in enumerate(methods) if name == method]
            apart = differences([experiment_recipe(recipes[index]) for index in same])
            for position, index in enumerate(same):
                labels[index] = _label(method, {key: values[position] for key, values in apart.items()})
    return _numbered(labels)


def _label(method: str, values: Mapping[str, str]) -> str:
    shown = [f"{key.rpartition('.')[2]} {_shortened(value)}" for key, value in values.items() if value != ABSENT][:3]
    return f"{method} ({', '.join(shown)})" if shown else method


def _shortened(value: str, length: int = 16) -> str:
    """Keep the end of a long value: paths and hashes that differ mostly differ there."""
    return value if len(value) <= length else "…" + value[-length:]


def _numbered(labels: Sequence[str]) -> list[str]:
    """Tell apart the labels that three keys could not."""
    totals, seen = Counter(labels), Counter[str]()
    unique = []
    for label in labels:
        seen[label] += 1
        unique.append(f"{label} #{seen[label]}" if totals[label] > 1 else label)
    return unique
