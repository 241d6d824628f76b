"""Groups of runs that differ only in their seed, one run per seed: grouping and labels."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcfed import algorithms
from hpcfed.lab.report.read import Run
from hpcfed.run_folder.identity import FREE, NOT_OF_THE_RESULT

NOT_THE_EXPERIMENT = ("seed", "seeds", "secret_commitment", "name", *NOT_OF_THE_RESULT)
CODE = "code "
"""Prefix of the keys that stand for files of the user's code."""
ABSENT = "–"
LONGEST_NAME, MAX_VALUE = 60, 24
FEDAVG_PARTS = ("plain", "none", "step")
LISTS = ("updates", "means", "down")
"""Keys of the recipe with a list of parts."""


@dataclass(frozen=True)
class Group:
    """Repetitions of one experiment, one run per seed; `label` is unique in a report.

    `repeats` are further runs of seeds that `runs` has already. Statistics ignore them: they repeat the same numbers up
    to rounding, so standard deviations would become too small.
    """

    label: str
    runs: tuple[Run, ...]
    repeats: tuple[Run, ...] = ()

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe that the runs share, with the seed, name and output of the first run."""
        return self.runs[0].recipe

    @property
    def seeds_in_text(self) -> str:
        """The seeds as part of a sentence: ``seed 0``, ``seeds 0, 1``."""
        return f"{'seed' if len(self.runs) == 1 else 'seeds'} {self.seeds}"

    @property
    def seeds(self) -> str:
        return joined([run.seed for run in self.runs])


def joined(seeds: Sequence[str]) -> str:
    """Return seeds as text: ``0, 1``; ``model 0, cohort 1, batches 2; model 1, …``."""
    return ("; " if any("," in seed for seed in seeds) else ", ").join(seeds)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Return groups of runs with equal `settings`, in order of appearance, each with a unique label.

    If runs of a group have the same seed, the one with the most rounds counts (the first, if several have as many); the
    others become `repeats`.
    """
    repetitions: dict[str, list[Run]] = {}
    for run in runs:
        repetitions.setdefault(json.dumps(settings(run), sort_keys=True, default=str), []).append(run)
    groups = [_one_per_seed(found) for found in repetitions.values()]
    labels = _labels([found for found, _ in groups])
    return [Group(label, *found) for label, found in zip(labels, groups, strict=True)]


def _one_per_seed(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Return an experiment's runs in two parts: one run per seed, which counts, and the repeats."""
    counted: dict[str, Run] = {}
    for run in runs:
        if run.seed not in counted or run.num_rounds > counted[run.seed].num_rounds:
            counted[run.seed] = run
    kept = tuple(counted.values())
    return kept, tuple(run for run in runs if not any(run is one for one in kept))


def differences(mappings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the keys whose values differ between mappings: dotted key → its value in each mapping, as text."""
    flat = [flatten(mapping) for mapping in mappings]
    keys = dict.fromkeys(key for entry in flat for key in entry)
    values = {key: [entry.get(key, ABSENT) for entry in flat] for key in keys}
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested mapping as a flat one, dotted key → text: ``{"local.lr": "0.1", …}``; None counts as absent."""
    flat: dict[str, str] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def method_of(run: Run) -> str:
    """Return the name of a run's method; for a user-defined method, its recorded title if there is one."""
    return method_name(run.recipe, str(run.environment.get("method") or ""))


def method_name(recipe: Mapping[str, Any], title: str = "") -> str:
    """Return a method's name, ``FedExP`` or ``FedProx + GeL (remaining)``; if unnamed, its parts, ``prox + fedexp``.

    A local step from the user's code is appended: ``FedAvg + samstep:step``. A user-defined method is named by `title`,
    or by its factory if `title` is "".
    """
    algorithm = recipe.get("algorithm")
    if not isinstance(algorithm, Mapping):
        return str(algorithm)
    parts = [str(algorithm[part]) for part in ("local", "normalize", "server") if algorithm.get(part)]
    factory = str(algorithm.get("factory") or "")
    own = factory and (_printable(title) or factory.rpartition(".")[2])  # else the last module and the function
    named = [part for part in parts if part not in FEDAVG_PARTS]
    name = str(algorithm.get("name") or own or " + ".join(named) or "fedavg")
    guess = recipe.get("guess") or "none"
    local = recipe.get("local")
    step = _printable(str(local.get("step") or "")) if isinstance(local, Mapping) else ""
    added = f" + {step}" if step else "" if guess == "none" else f" + GeL ({guess})"
    return algorithms.titles().get(name, name) + added


def name_of(runs: Sequence[Run]) -> str | None:
    """Return the name that all runs share, if need be after removing the seed from its end; None if they share none."""
    names = {str(run.recipe.get("name") or "") for run in runs}
    if len(names) > 1:
        names = {_without_seed(str(run.recipe.get("name") or ""), run.seed) for run in runs}
    return _printable(names.pop()) or None if len(names) == 1 else None


def experiment_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe without the keys that may differ between repetitions of one experiment."""
    return {key: value for key, value in recipe.items() if key not in NOT_THE_EXPERIMENT}


def settings(run: Run) -> dict[str, Any]:
    """Return the settings that a run shares with all repetitions of its experiment: keys of the recipe, and ``code
    mine.py`` → hash for each file of the user's code.
    """
    return {f"{CODE}{file}": text for file, text in run.code.items()} | experiment_recipe(run.recipe)


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return a label for each group.

    The label is the method's name; or, if run names differ between groups, run name and method: ``pooled (FedAvg)``;
    or the run name alone, ``pooled``, if all groups have one method or the name contains it. To labels that are still
    equal, the code files and recipe keys in which the groups differ are added; keys that cannot change a model (`FREE`)
    are added only if the labels would be equal without them.
    """
    methods, names = [method_of(group[0]) for group in groups], [name_of(group) for group in groups]
    if len({name for name in names if name}) < 2:
        names = [None] * len(groups)
    labels = [_label(method, name, methods) for method, name in zip(methods, names, strict=True)]
    for left_out in (FREE, ()):
        for label, count in Counter(labels).items():
            if count > 1:
                same = [index for index, other in enumerate(labels) if other == label]
                apart = differences([settings(groups[index][0]) for index in same])
                if "data" in apart:
                    apart.pop("data_content", None)
                apart = {key: values for key, values in apart.items() if key.partition(".")[0] not in left_out}
                apart = {key: _parts_apart(values) if key in LISTS else values for key, values in apart.items()}
                for position, index in enumerate(same):
                    labels[index] = _with_keys(label, {key: values[position] for key, values in apart.items()})
    return _numbered(labels)


def _label(method: str, name: str | None, methods: Sequence[str]) -> str:
    if name is None or _letters(name) == _letters(method):
        return method
    if _letters(method) in _letters(name):
        return method if methods.count(method) == 1 else name
    return name if len(set(methods)) == 1 else f"{name} ({method})"


def _letters(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def _without_seed(name: str, seed: str) -> str:
    return re.sub(rf"[-_. ]*(?:seed|s)?[-_. =]*{re.escape(seed)}$", "", name)


def _printable(text: str) -> str:
    """Return the text without unprintable characters, cut to `LONGEST_NAME` characters."""
    return "".join(character for character in text if character.isprintable()).strip()[:LONGEST_NAME]


def _with_keys(label: str, values: Mapping[str, str]) -> str:
    shown = [_in_words(key, value) for key, value in values.items() if value != ABSENT][:3]
    return f"{label} ({', '.join(shown)})" if shown else label


def _parts_apart(values: list[str]) -> list[str]:
    """Return lists of parts as text: the parts' names, and the arguments by which lists of the same names differ."""
    lists = [_parts(value) for value in values]
    known = [parts for parts in lists if parts is not None]
    if len(known) < len(lists):
        return values
    found = []
    for parts in known:
        names = [name for name, _ in parts]
        of_same_names = [other for other in known if [name for name, _ in other] == names]
        differing = [
            f"{key} {value}"
            for place, (_, arguments) in enumerate(parts)
            for key, value in arguments.items()
            if any(other[place][1].get(key) != value for other in of_same_names)
        ]
        found.append(" ".join([" + ".join(names), *differing]) or ABSENT)
    return found


def _parts(value: str) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Return (name, arguments) of each part in a list of the recipe, from its text; None if it is no such list."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    entries = [] if value == ABSENT else json.loads(value)
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, Mapping):
            return None
        name, arguments = (entry["factory"], entry.get("args")) if "factory" in entry else next(iter(entry.items()))
        found.append((str(name), arguments if isinstance(arguments, Mapping) else {}))
    return found


def _in_words(key: str, value: str) -> str:
    if key in LISTS and not value.startswith("["):
        return _shortened(value, 2 * MAX_VALUE)
    return f"{key} {value}" if key.startswith(CODE) else f"{key.rpartition('.')[2]} {_shortened(value)}"


def _shortened(value: str, length: int = MAX_VALUE) -> str:
    """Return a number with four digits, a path's last component, or the end of a long text, where such texts usually
    differ.
    """
    if re.fullmatch(r"-?\d+\.\d+(e[-+]?\d+)?", value):
        return f"{float(value):.4g}"
    value = value.rstrip("/").rpartition("/")[2] or value
    return value if len(value) <= length else "…" + value[-length:]


def _numbered(labels: Sequence[str]) -> list[str]:
    """Return the labels, with ``#1``, ``#2``, … appended to equal ones."""
    totals, seen = Counter(labels), Counter[str]()
    unique = []
    for label in labels:
        seen[label] += 1
        unique.append(f"{label} #{seen[label]}" if totals[label] > 1 else label)
    return unique
