"""The record of a run, ``metrics.jsonl``, with one JSON object for each round: formatting, reading, and columns.

An incomplete last line, left by a run that is going on or was killed, is not read. A number that is not finite is null
in the file and nan in a column; older versions wrote ``NaN``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcfed.errors import EnvironmentFailure, InputError, counted, first_of
from hpcfed.io.text import Malformed, lines_of, open_file, parse_json
from hpcfed.run_folder.files import RESULT, read_mapping

RECORD = "metrics.jsonl"
MOST_NAMED = 3
"""Maximum number of runs or clients that a warning names."""
METRICS = (
    "local_loss",
    "train_loss",
    "train_accuracy",
    "test_loss",
    "test_accuracy",
    "server_lr",
    "params_up",
    "params_down",
    "bytes_up",
    "bytes_down",
    "gradients",
    "imbalance",
)
PHASES = ("local", "wait", "reduce", "server", "evaluate")
TIMERS = (*PHASES, "total")
NUMBERS = (*METRICS, *(f"seconds.{timer}" for timer in TIMERS))
"""Columns that every record has, nan if a round's object lacks them."""
COLUMNS = (*NUMBERS, "round", "params", "attempts", "never_drawn", "delta_sq", "mean_delta_sq", "epsilon",
           "seconds.convert", "seconds.cpu")  # fmt: skip
"""Columns that a record may have with any method and any data; docs/record.md explains them."""
RESTORE = "restore the file, or run again in another folder"
OWN_RECORD = "restore the run's own record"
MAX_DEPTH = 8
"""Most levels of nested objects that become columns."""


def line_of(row: Mapping[str, Any]) -> str:
    """Return a round's line of the record: standard JSON, with null for numbers that are not finite."""
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except ValueError:  # rare, and searching every row takes longer
        return json.dumps(finite(row), allow_nan=False) + "\n"


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a record; that of round t has index t − 1.

    Raises:
        InputError: the file does not exist, cannot be read, or is damaged.
    """
    return list(iterate_rounds(path))


def iterate_rounds(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a record, round after round, without holding all of them in memory.

    Raises:
        InputError: the file does not exist, cannot be read, or has a damaged line, which the message names.
    """
    try:
        with open_file(path) as file:
            yield from parse_rounds(complete(lines_of(file)), path)
    except FileNotFoundError:
        raise InputError("no such file", where=str(path), remedy="name the output folder of a run") from None
    except OSError as error:
        raise InputError(error.strerror or "cannot be read", where=str(path)) from error
    except Malformed as error:
        raise InputError(str(error), where=str(path), remedy=OWN_RECORD) from None


def complete(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a record, the last one if only its newline is missing; none that is written meanwhile."""
    for line in lines:
        whole = line.endswith(b"\n")
        if whole or (line.strip() and _is_json(line)):
            yield line
        if not whole:
            return


def parse_rounds(lines: Iterable[bytes], path: Path, first: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the objects of consecutive lines, one for each round from `first` on.

    Raises:
        InputError: a line is not a JSON object, or belongs to another round.
    """
    for number, line in enumerate(lines, start=first):
        where = f"{path}, line {number}"
        try:
            row = parse_json(line.decode())
        except ValueError as error:
            raise InputError("not JSON", where=where, remedy=RESTORE) from error
        if not isinstance(row, dict) or row.get("round") != number:
            got = f"round {_shortened(row.get('round'))}" if isinstance(row, dict) else type(row).__name__
            raise InputError("rounds out of order", where=where, expected=f"an object with round {number}", got=got)
        yield row


def numbers_of(row: Mapping[str, Any], path: Path) -> dict[str, float]:
    """Return all numbers in a round's object by dotted names, such as ``clients.global.test.loss.mean``.

    `NUMBERS` are always there, nan if the object lacks them. Lists and text are left out. null becomes nan.

    Raises:
        InputError: one of `NUMBERS` or of the recipe's metrics is neither a number nor null, a number exceeds float64,
            or ``seconds`` is not an object.
    """
    where = f"{path}, line {row.get('round')}"
    if not isinstance(row.get("seconds") or {}, Mapping):
        raise InputError("seconds", where=where, expected="an object", got=_shortened(row["seconds"]))
    found = dict.fromkeys(NUMBERS, math.nan)
    for name, value in _leaves(row, ""):
        if name == "round":
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        must_be = name in NUMBERS or (is_own(name) and not isinstance(value, list))  # but a matrix
        if is_number:
            found[name] = _checked(value, name, where)
        elif value is None and must_be:
            found[name] = math.nan
        elif must_be:
            raise InputError(name, where=where, expected="a number or null", got=_shortened(value))
    return found


class Columns(dict[str, list[float]]):
    """Columns of a record by name, in the order of `add`, one entry per round; nan for a value that a round lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0

    def add(self, numbers: Mapping[str, float]) -> None:
        """Append a round."""
        for name in numbers:
            if name not in self:
                self[name] = [math.nan] * self.rounds
        for name, column in self.items():
            column.append(numbers.get(name, math.nan))
        self.rounds += 1


def columns_of(rows: Iterable[Mapping[str, Any]], path: Path) -> Columns:
    """Return the columns of a record's rounds, without those of matrices, which are null where none was measured."""
    columns, matrices = Columns(), set()
    for row in rows:
        columns.add(numbers_of(row, path))
        matrices |= {name for name, value in row.items() if isinstance(value, list)}
    for name in matrices & columns.keys():
        del columns[name]
    return columns


def interval_of(name: str, evaluate: Mapping[str, Any]) -> int:
    """Return the number of rounds from one evaluation of a column to the next, by ``evaluate``; 1 for other columns.

    A run also evaluates its last round. If it then continued with more rounds, comparisons leave out that score, which
    an uninterrupted run does not have; hence this function.
    """
    part, _, _ = name.replace(".", "_").partition("_")
    section = {"test": evaluate, "train": evaluate.get("train"), "clients": evaluate.get("clients")}.get(part)
    every = section.get("every") if isinstance(section, Mapping) else None
    return every if isinstance(every, int) and every > 0 else 1


def lacks_score(name: str, value: float, round: int, recipe: Mapping[str, Any]) -> bool:
    """Return whether the `value` of a test or training column is missing, nan, in a `round` that was evaluated.

    It was then not finite or undefined; of a run's last round, an earlier value does not stand for it. The last round
    of `recipe`, a resolved one as plain data, is always evaluated; one in which ``stop`` or a signal ended the run only
    if ``evaluate`` names it.
    """
    if not (name.startswith(("test_", "train_")) and math.isnan(value)):
        return False
    return round == recipe.get("rounds") or round % interval_of(name, recipe.get("evaluate") or {}) == 0


def skipped_in(row: Mapping[str, Any]) -> list[int]:
    """Return the clients whose updates a round left out, from ``skipped`` in its row; `why_skipped` says why."""
    found = row.get("skipped")
    return [client for client in found if isinstance(client, int)] if isinstance(found, list) else []


def why_skipped(*, masked: bool, skips: bool) -> str:
    """Return the reason, as text, for which rounds left out updates.

    Args:
        masked: whether the recipe has ``secure_aggregation``.
        skips: whether it has ``on_bad_client: skip``.
    """
    if masked:
        failed = " or failed" if skips else ""
        return f"clients dropped out{failed}, or too few were left to open the sum (secure_aggregation)"
    return "updates were left out (on_bad_client: skip)"


def skipped_in_words(skipped: Mapping[int, int], rounds: int, *, masked: bool, skips: bool) -> str:
    """Return why rounds left out updates, and of which clients in how many of the rounds.

    Args:
        skipped: client → number of rounds.
        rounds: number of all rounds.
        masked, skips: as for `why_skipped`.
    """
    whose = first_of([f"client {client} in {count:,}" for client, count in sorted(skipped.items())], MOST_NAMED)
    return f"{why_skipped(masked=masked, skips=skips)}, of {counted(rounds, 'round')}: {whose}"


def is_own(name: str) -> bool:
    """Whether a column is one of the recipe's metrics (``evaluate.metrics``)."""
    return name.startswith(("test_", "train_")) and name not in METRICS


def no_rounds(folder: Path) -> InputError:
    """Return the error of a run without rounds: it is in its first one, or ended before that, for the reason given."""
    result = read_mapping(folder / RESULT)
    if result.get("rounds") != 0 or not result.get("status"):
        return InputError("no rounds yet", where=str(folder / RECORD), remedy="wait for the run's first round")
    return InputError(f"no rounds: {result['status']}: {result.get('message')}", where=str(folder / RECORD))


def count_rounds(path: Path) -> int:
    """Return the number of rounds in a record, that is, of complete lines; 0 if the file does not exist.

    Raises:
        InputError: a line is longer than any round's.
        EnvironmentFailure: the file cannot be read.
        PermissionError: reading is not permitted.
    """
    if not path.is_file():
        return 0
    try:
        with path.open("rb") as record:
            return sum(line.endswith(b"\n") for line in lines_of(record))
    except PermissionError:
        raise
    except Malformed as error:
        raise InputError(str(error), where=str(path), remedy=OWN_RECORD) from None
    except OSError as error:
        raise EnvironmentFailure("cannot be read", where=str(path), got=error.strerror or str(error)) from error


def _leaves(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in METRICS and prefix.count(".") < MAX_DEPTH:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def finite(value: Any) -> Any:
    """Return a JSON value with null for each number that is not finite, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def _checked(value: int | float, name: str, where: str) -> int | float:
    try:
        return value if math.isfinite(value) else math.nan
    except OverflowError:
        expected = "a number that float64 holds"
        raise InputError(name, where=where, expected=expected, got=_shortened(value)) from None


def _shortened(value: Any, length: int = 40) -> str:
    text = f"a {type(value).__name__}" if isinstance(value, dict | list) else json.dumps(value)
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line.decode())
    except ValueError:
        return False
    return True
