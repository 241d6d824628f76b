"""Run folders, read from disk: the recipe, the environment, how the run ended, and one column of numbers per metric.

A run may still be going: then its record may end in half a line, and it has no ``result.json`` yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.errors import InputError, shown
from hpcfed.report.clients import Clients, read_clients
from hpcfed.text import LARGEST, LONGEST, Malformed, parse_json, parse_yaml, read_text

METRICS = (
    "local_loss",
    "train_loss",
    "train_accuracy",
    "test_loss",
    "test_accuracy",
    "server_lr",
    "params_up",
    "params_down",
    "gradients",
    "imbalance",
)
PHASES = ("local", "wait", "reduce", "server", "evaluate")
TIMERS = (*PHASES, "total")
SECTIONS = ("algorithm", "local", "model", "loss", "cohort", "evaluate", "stop", "checkpoint")
WORDS = ("name", "factory", "optimizer", "model")
"""What is text in any section that has it."""
RECIPE, RECORD, CLIENTS = "recipe.yaml", "metrics.jsonl", "clients.csv"


@dataclass(frozen=True)
class Run:
    """One run folder. T is the number of rounds recorded so far; round t is entry t − 1 of every column."""

    folder: Path
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]  # empty when the run recorded none
    status: str  # finished, stopped, diverged, failed; unfinished: no result yet, or one that is older than the record
    columns: Mapping[str, np.ndarray]  # name, or "seconds.timer" -> (T,) float64, nan where the record says null
    clients: Clients | None  # how well each client was served at last, where the recipe asked for that

    @property
    def num_rounds(self) -> int:
        return len(self.columns["gradients"])

    @property
    def seed(self) -> str:
        """The seed in words: ``0``, or ``model 0, cohort 1, batches 2`` where the streams have their own."""
        seed = self.recipe.get("seed", "–")
        if not isinstance(seed, Mapping):
            return str(seed)
        values = {str(value) for value in seed.values()}
        return values.pop() if len(values) == 1 else ", ".join(f"{stream} {value}" for stream, value in seed.items())

    def column(self, name: str) -> np.ndarray:
        """Return a column (T,): a metric, ``round``, ``seconds.<timer>``, ``params`` (sent up plus sent down), or
        ``seconds`` (since the first round began, waits in a queue left out); nan where the record does not have it.
        """
        if name == "round":
            return np.arange(1, self.num_rounds + 1, dtype=np.float64)
        if name == "params":
            return self.columns["params_up"] + self.columns["params_down"]
        if name == "seconds":
            return np.cumsum(self.columns["seconds.total"])
        found = self.columns.get(name)
        return np.full(self.num_rounds, np.nan) if found is None else found

    @property
    def own_metrics(self) -> list[str]:
        """The columns of the recipe's own metrics, those of the test set and of the training set."""
        return [name for name in self.columns if _is_own(name)]


def read_runs(folders: list[Path]) -> list[Run]:
    """Read every folder given; one that holds run folders stands for them. A folder named twice is read once.

    Raises InputError: not a run folder, no rounds yet, a file that is damaged.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        try:
            runs = _run_folders(folder)
        except OSError as error:
            raise InputError(error.strerror or "cannot be read", where=str(folder)) from error
        for run in runs:
            found.setdefault(run.resolve(), run)
    return [read_run(folder) for folder in found.values()]


def is_run_folder(folder: Path) -> bool:
    return (folder / RECIPE).is_file() and (folder / RECORD).is_file()


def _run_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise InputError(what, where=str(folder), remedy="name the output folder of a run")
    if (folder / RECIPE).exists() or (folder / RECORD).exists():
        return [folder]
    inside = sorted(child for child in folder.iterdir() if is_run_folder(child))
    if not inside:
        raise InputError(
            "not a run folder",
            where=str(folder),
            expected=f"{RECIPE} and {RECORD} in it, or run folders",
            remedy="name the output folder of a run",
        )
    return inside


def read_run(folder: Path) -> Run:
    """Read one run folder, finished or not.

    Raises InputError: a file of it is missing or damaged, or no round is recorded yet.
    """
    recipe = read_recipe(folder / RECIPE)
    columns = read_record(folder / RECORD)
    result = read_json(folder / "result.json")
    return Run(
        folder=folder,
        recipe=recipe,
        environment=read_json(folder / "environment.json"),
        status=run_status(result, len(columns["gradients"])),
        columns=columns,
        clients=read_clients(folder / CLIENTS),
    )


def read_record(path: Path) -> dict[str, np.ndarray]:
    """Read ``metrics.jsonl`` into columns (T,), one per metric and ``seconds.<timer>``.

    A last line without its newline that is no JSON yet is being written, and left out.
    Raises InputError naming the line: malformed, out of order, or a value that is no number.
    """
    rows = [_numbers(row, f"{path}, line {number}") for number, row in enumerate(_rows(path), start=1)]
    if not rows:
        raise InputError("no rounds yet", where=str(path), remedy="wait for the run's first round")
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, math.nan) for row in rows], dtype=np.float64) for name in names}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rounds of ``metrics.jsonl`` as they were written, with the same checks as `read_record`."""
    rows = _rows(path)
    for number, row in enumerate(rows, start=1):
        _numbers(row, f"{path}, line {number}")
    return rows


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = _read_text(path).split("\n")
    unfinished = lines.pop()
    if unfinished.strip() and _is_json(unfinished):
        lines.append(unfinished)
    return [_row(line, f"{path}, line {number}", number) for number, line in enumerate(lines, start=1)]


def parse_row(line: str, path: Path, number: int) -> dict[str, float]:
    """Return the numbers of one line of the record, nan for null; `number` is both the line and the round it must hold.

    Raises InputError: it is malformed, out of order, or holds a value that is no number.
    """
    where = f"{path}, line {number}"
    return _numbers(_row(line, where, number), where)


def _row(line: str, where: str, number: int) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise InputError("not JSON", where=where, remedy="cut the file before this line and resume the run") from error
    if not isinstance(row, dict) or row.get("round") != number:
        got = f"round {shown(row.get('round'))}" if isinstance(row, dict) else type(row).__name__
        raise InputError("rounds out of order", where=where, expected=f"an object with round {number}", got=got)
    return row


def _numbers(row: Mapping[str, Any], where: str) -> dict[str, float]:
    seconds = row.get("seconds") or {}
    if not isinstance(seconds, dict):
        raise InputError("seconds", where=where, expected="an object", got=shown(seconds))
    values = {name: row.get(name) for name in METRICS} | {f"seconds.{timer}": seconds.get(timer) for timer in TIMERS}
    values |= {name: value for name, value in row.items() if _is_own(name)}
    return {name: _number(value, name, where) for name, value in values.items()}


def _is_own(name: str) -> bool:
    return name.startswith(("test_", "train_")) and name not in METRICS


def _number(value: Any, name: str, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(name, where=where, expected="a number or null", got=shown(value))
    return float(value)


def run_status(result: Mapping[str, Any], num_rounds: int) -> str:
    """How the run ended. A run that was resumed has outgrown its old result, unless it diverged and cannot resume."""
    status, rounds = str(result.get("status", "unfinished")), result.get("rounds")
    outgrown = status != "diverged" and isinstance(rounds, int) and rounds < num_rounds
    return "unfinished" if outgrown else status


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a run's resolved recipe as plain data.

    Raises InputError: there is none, or it is damaged.
    """
    try:
        recipe = parse_yaml(_read_text(path, LONGEST))
    except Malformed as error:
        raise InputError("not YAML", where=str(path), got=str(error), remedy="restore the run's own recipe") from error
    if not isinstance(recipe, dict):
        raise InputError("not a recipe", where=str(path), expected="keys and values", got=type(recipe).__name__)
    for key in SECTIONS:
        section = recipe.get(key) or {}
        if not isinstance(section, dict) or not all(isinstance(section.get(word) or "", str) for word in WORDS):
            raise InputError(f"not a recipe: {key}", where=str(path), expected="a section", got=shown(section))
    return recipe


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`, empty when there is no such file.

    Raises InputError: it holds something else.
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


def _read_text(path: Path, most: int = LARGEST) -> str:
    try:
        return read_text(path, most)
    except FileNotFoundError as error:
        raise InputError("no such file", where=str(path), remedy="name the output folder of a run") from error
    except OSError as error:
        raise InputError(error.strerror or "cannot be read", where=str(path)) from error
    except Malformed as error:
        raise InputError("not text", where=str(path), got=str(error), remedy="restore the run's own file") from error


def _is_json(line: str) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True
