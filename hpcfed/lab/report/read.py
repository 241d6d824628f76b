"""Run folders read from disk: recipe, environment, status, and the record's columns of numbers.

A run may still be in progress: its record may end in half a line, and ``result.json`` may be missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from hpcfed.config.metrics import a_metric, larger_is_better, listed
from hpcfed.errors import InputError, shown
from hpcfed.io.text import MAX_JSON_BYTES, MAX_YAML_LENGTH, Malformed, parse_json, parse_yaml, read_text
from hpcfed.lab.frame import record
from hpcfed.lab.report.clients import Clients, read_clients
from hpcfed.run_folder import code
from hpcfed.run_folder.files import CLIENTS, RECIPE, RESULT
from hpcfed.run_folder.rounds import RECORD, count_rounds, is_own, no_rounds

if TYPE_CHECKING:
    import pandas as pd

SWEEP = "sweep.yaml"
SECTIONS = ("algorithm", "local", "model", "loss", "cohort", "evaluate", "stop", "checkpoint")
WORDS = ("name", "factory", "optimizer", "model")
"""Keys that hold text in every section that has them."""
HASH_DIGITS = 8
"""Number of digits that are kept of a file's hash."""


@dataclass(frozen=True)
class Run:
    """The content of one run folder; T is the number of rounds recorded so far."""

    folder: Path
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]  # empty when the run recorded none
    code: Mapping[str, str]  # the user's files → hash, and later hashes with their first round; empty if not recorded
    status: str  # finished, stopped, diverged, failed; unfinished: no result, or one older than the record
    record: pd.DataFrame  # T rows by round; a float64 column per name, such as "seconds.total"; nan for null
    clients: Clients | None  # the last evaluation of clients, if the recipe asked for it
    skipped: Mapping[int, int] = field(default_factory=dict)  # client -> number of rounds that left its update out

    @property
    def num_rounds(self) -> int:
        return len(self.record)

    @property
    def seed(self) -> str:
        """The seed as text: ``0``, or ``model 0, cohort 1, batches 2`` if the random streams have separate seeds."""
        seed = self.recipe.get("seed", "–")
        if not isinstance(seed, Mapping):
            return str(seed)
        values = {str(value) for value in seed.values()}
        return values.pop() if len(values) == 1 else ", ".join(f"{stream} {value}" for stream, value in seed.items())

    def column(self, name: str) -> np.ndarray:
        """Return a column of the record, (T,), or one computed from it; nan if the record does not have it.

        Computed are ``round``, ``params`` (sent up plus sent down) and ``seconds`` (since the first round began,
        without waits in a queue).
        """
        if name == "params":
            return self.column("params_up") + self.column("params_down")
        if name == "seconds":
            return np.cumsum(self.column("seconds.total"))
        if name == "round":
            return self.record.index.to_numpy(np.float64)
        return self.record[name].to_numpy(np.float64) if name in self.record else np.full(self.num_rounds, np.nan)

    def left_out(self, column: str) -> tuple[str, ...]:
        """Return the clients, by number as text, whose data does not count in `column` because of ``cohort.without``.

        A common test set belongs to no client: its scores leave out none.
        """
        if column.startswith("test_"):
            numbers = {name.split(".")[1] for name in self.record if name.startswith("apart.")}
            return tuple(sorted(numbers, key=lambda number: (len(number), number)))
        without = (self.recipe.get("cohort") or {}).get("without")
        if not column.startswith("train_") or not isinstance(without, Mapping) or without.get("evaluate") == "all":
            return ()
        clients = without.get("clients")
        return tuple(map(str, clients)) if isinstance(clients, list) else ()

    def larger_is_better(self, metric: str) -> bool | None:
        """Return whether larger is better for a metric of the recipe's ``evaluate.metrics``; None if not known."""
        try:
            return larger_is_better(a_metric(listed((self.recipe.get("evaluate") or {}).get("metrics"))[metric]))
        except (AttributeError, KeyError, TypeError, ValueError):  # a record that was changed by hand
            return None

    def num_samples(self, column: str) -> int | None:
        """Return the number of samples behind the scores in a ``test_`` or ``train_`` column; None if not recorded."""
        part, recorded = column.partition("_")[0], self.environment.get("evaluated_samples")
        if isinstance(recorded, Mapping) and type(count := recorded.get(part)) is int:
            return count
        return self.clients.num_samples if self.clients is not None and self.clients.split == part else None

    @property
    def own_metrics(self) -> list[str]:
        """Columns of the metrics in ``evaluate.metrics`` other than accuracy and loss, on test and on training set."""
        return [name for name in self.record if is_own(name)]


def find_runs(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return two lists of the run folders at or in `folders`, each once: those with rounds, and those without any yet.

    A run folder that is itself one of `folders` is in the first list even without rounds; `read_run` then fails.

    Raises InputError: there is no run, or none has rounds.
    """
    found: dict[Path, Path] = {}
    waiting: dict[Path, Path] = {}
    for folder in folders:
        for run in run_folders(folder):
            has_rounds = run == folder or count_rounds(run / RECORD)  # a folder the user named fails when it is read
            (found if has_rounds else waiting).setdefault(run.resolve(), run)
    if waiting and not found:
        if all(run_status(read_json(run / RESULT), 0) != "unfinished" for run in waiting.values()):
            raise no_rounds(next(iter(waiting.values())))
        remedy = "wait for the first round of one"
        raise InputError("no rounds yet", where=", ".join(map(str, folders)), got=f"{len(waiting)} runs", remedy=remedy)
    return list(found.values()), [run for key, run in waiting.items() if key not in found]


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders at or in a folder: the folder itself if it is a run, and its seeds' runs; else the runs in
    it, one per seed, or those of a sweep, a study or a paper's experiment.

    A folder counts as a run as soon as it has a recipe.

    Raises InputError: the folder is missing, cannot be read, or has no run.
    """
    try:
        if not folder.is_dir():
            what = "not a folder" if folder.exists() else "no such folder"
            raise InputError(what, where=str(folder), remedy="name the output folder of a run")
        if (folder / RECIPE).exists() or (folder / RECORD).exists():
            return [folder, *_seeds_in(folder)]
        sweeps = [place for place in (folder, folder / "sweep") if (place / SWEEP).is_file()]
        place = sweeps[0] / "runs" if sweeps else folder
        inside = [run for child in _folders_in(place) for run in _runs_at(child)]
    except OSError as error:
        raise InputError(error.strerror or "cannot be read", where=str(folder)) from error
    if not inside:
        raise InputError(
            "not a run folder",
            where=str(folder),
            expected=f"{RECIPE} and {RECORD} in it, or run folders",
            remedy="name the output folder of a run",
        )
    return inside


def is_run_folder(folder: Path) -> bool:
    return (folder / RECIPE).is_file() and (folder / RECORD).is_file()


def _is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file()


def _runs_at(folder: Path) -> list[Path]:
    """Return `folder` if it is a run, and its runs ``seed-…``: it is both if seeds were added later."""
    return [*([folder] if _is_run(folder) else []), *_seeds_in(folder)]


def _seeds_in(folder: Path) -> list[Path]:
    """Return the runs ``seed-…`` in a folder, one per entry of the recipe's ``seeds``."""
    return [child for child in _folders_in(folder) if child.name.startswith("seed-") and _is_run(child)]


def _folders_in(folder: Path) -> list[Path]:
    """Return a folder's subfolders, hidden ones excluded, in natural order: ``seed-2`` before ``seed-10``.

    Empty if the folder does not exist.
    """
    if not folder.exists():
        return []
    inside = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    return sorted(inside, key=lambda child: _by_value(child.name))


def _by_value(name: str) -> tuple[list[str | float], str]:
    """Return a name's sort key: its texts and numbers in alternation, so that numbers sort by value."""
    parts: list[str | float] = [*re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", name)]
    parts[1::2] = map(float, parts[1::2])
    return parts, name


def read_run(folder: Path) -> Run:
    """Return the content of a run folder, finished or not.

    Raises InputError: a file is missing or damaged, or no round is recorded yet.
    """
    recipe = read_recipe(folder / RECIPE)
    skipped = Counter[int]()
    numbers = record(folder / RECORD, recipe.get("evaluate"), skipped)
    result = read_json(folder / "result.json")
    return Run(
        folder=folder,
        recipe=recipe,
        environment=read_json(folder / "environment.json"),
        code=read_code(folder / code.CODE_FILE),
        status=run_status(result, len(numbers)),
        record=numbers,
        clients=read_clients(folder / CLIENTS),
        skipped=skipped,
    )


def run_status(result: Mapping[str, Any], num_rounds: int) -> str:
    """Return a run's status from `result`, the content of ``result.json``, and the number of recorded rounds.

    ``unfinished`` if `result` is empty, has fewer rounds than the record because the run was resumed, or has some
    though the record has none. A diverged run stays ``diverged``: it cannot be resumed.
    """
    status, rounds = str(result.get("status", "unfinished")), result.get("rounds")
    outgrown = status != "diverged" and isinstance(rounds, int) and rounds < num_rounds
    is_of_another = not num_rounds and rounds != 0
    return "unfinished" if outgrown or is_of_another else status


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a run's resolved recipe as plain data.

    Raises InputError: the file is missing or damaged.
    """
    try:
        recipe = parse_yaml(_read_text(path, MAX_YAML_LENGTH))
    except Malformed as error:
        raise InputError("not YAML", where=str(path), got=str(error), remedy="restore the run's own recipe") from error
    if not isinstance(recipe, dict):
        raise InputError("not a recipe", where=str(path), expected="keys and values", got=type(recipe).__name__)
    for key in SECTIONS:
        section = recipe.get(key) or {}
        if not isinstance(section, dict) or not all(isinstance(section.get(word) or "", str) for word in WORDS):
            raise InputError(f"not a recipe: {key}", where=str(path), expected="a section", got=shown(section))
    return recipe


def mixed_code(codes: Iterable[Mapping[str, str]]) -> str:
    """Return the first file of the user's code that differs between runs, with its hashes, as text; "" if none does.

    `codes` has the result of `read_code` for each run.
    """
    hashes: dict[str, dict[str, None]] = {}
    for one in codes:
        for file, digest in one.items():
            hashes.setdefault(file, {})[digest] = None
    mixed = (f"{file} {' or '.join(found)}" for file, found in sorted(hashes.items()) if len(found) > 1)
    return next(mixed, "")


def read_code(path: Path) -> dict[str, str]:
    """Return the user's code of a run: file → hash, or ``ab12cd34, then 56ef78ab from round 6`` if the file changed.

    Empty if the run used no code of the user, or recorded none.

    Raises InputError: the file `path` is damaged.
    """
    try:
        content = code.CodeFile.model_validate(read_json(path) or code.NO_CODE)
    except ValidationError as error:
        raise InputError("not a record of code", where=str(path), remedy="restore the run's own file") from error
    hashes: dict[str, list[str]] = {}
    last: dict[str, str] = {}
    for part in [*content.before, content]:
        for source in part.files.values():
            digest, seen = source.hash[:HASH_DIGITS], hashes.setdefault(source.file, [])
            if last.get(source.file) != digest:
                seen.append(f"then {digest} from round {part.since}" if seen else digest)
                last[source.file] = digest
    return {name: ", ".join(seen) for name, seen in sorted(hashes.items())}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; empty if there is no such file.

    Raises InputError: the file holds no JSON object.
    """
    if not path.exists():
        return {}
    try:
        content = parse_json(_read_text(path))
    except ValueError as error:
        raise InputError("not JSON", where=str(path), got=str(error), remedy="remove the file") from error
    if not isinstance(content, dict):
        raise InputError("not a JSON object", where=str(path), got=type(content).__name__, remedy="remove the file")
    return content


def _read_text(path: Path, most: int = MAX_JSON_BYTES) -> str:
    try:
        return read_text(path, most)
    except FileNotFoundError as error:
        raise InputError("no such file", where=str(path), remedy="name the output folder of a run") from error
    except OSError as error:
        raise InputError(error.strerror or "cannot be read", where=str(path)) from error
    except Malformed as error:
        raise InputError("not text", where=str(path), got=str(error), remedy="restore the run's own file") from error
