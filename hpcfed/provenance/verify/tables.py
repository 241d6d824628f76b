"""A run's tables, ``clients.csv`` and ``update-hashes.bin``, compared with computed rounds. Read on rank 0 alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from hpcfed.config.metrics import UNMEASURED_COLUMNS
from hpcfed.errors import InputError
from hpcfed.evaluation.per_client import ClientScores
from hpcfed.io.text import Malformed, lines_of, open_file
from hpcfed.provenance.differences import NEAR
from hpcfed.provenance.recorded import RecordedRun
from hpcfed.provenance.verify.recompute import RoundAgain
from hpcfed.run_folder.certificate import Fault
from hpcfed.run_folder.files import CLIENTS
from hpcfed.run_folder.rounds import RESTORE
from hpcfed.run_folder.update_hashes import KIND, UPDATE_HASHES

BOUNDARY = 2
"""Number of a client's samples that rounding alone may move across a decision boundary."""


class RecordedTables:
    """The recorded ``clients.csv`` and ``update-hashes.bin`` of a run, for comparison with computed rounds.

    Args:
        run: the recorded run.

    Attributes:
        unknown: columns of ``clients.csv`` that have values but were not computed here.
    """

    def __init__(self, run: RecordedRun):
        self._run, self.unknown = run, set[str]()
        self._ends = np.cumsum([len(row["cohort"]) for row in run.rows]) * KIND.itemsize
        self._columns, self._places = _index(run.folder / CLIENTS)

    def has_clients(self, round: int) -> bool:
        """Whether ``clients.csv`` has rows of a round."""
        return round in self._places

    def faults_of_sizes(self) -> Iterator[Fault]:
        """Yield a fault for each table that has rows of unrecorded rounds, or another size than the record implies."""
        beyond = [round for round in self._places if not 1 <= round <= len(self._run.rows)]
        if beyond:
            yield Fault(CLIENTS, f"has round {beyond[0]}, which is not recorded")
        path = self._run.folder / UPDATE_HASHES
        if path.exists():
            expected = int(self._ends[-1]) if self._run.recipe.update_hashes else 0
            if path.stat().st_size != expected:
                yield Fault(UPDATE_HASHES, f"has {path.stat().st_size} bytes, {expected} by the recipe and the record")

    def faults(self, round: int, here: RoundAgain, tolerance: float | None = None) -> list[Fault]:
        """Compare a round's recorded rows with the computed ones; return at most one fault for each table.

        Args:
            round: the round, from 1.
            here: the round as computed here.
            tolerance: relative tolerance of scores; update hashes are then not compared, since they only show equality.
                None: all bits are compared.
        """
        found = list[Fault]()
        if here.clients is not None and self._columns:
            found += self._of_clients(round, here.clients, tolerance)
        hashes = self._run.folder / UPDATE_HASHES
        if tolerance is None and here.update_hashes is not None and hashes.exists():
            own = here.update_hashes.astype(KIND).tobytes()
            with hashes.open("rb") as file:
                file.seek(int(self._ends[round - 1]) - len(own))
                if file.read(len(own)) != own:
                    found.append(Fault(UPDATE_HASHES, f"another hash of an update of round {round}"))
        return found

    def _of_clients(self, round: int, scores: ClientScores, tolerance: float | None) -> Iterator[Fault]:
        kept = [*self._rows(round)]
        if not kept and self._run.rows[round - 1].get("clients") is None:  # a score that the record lacks, too
            return
        here = [dict(zip(scores.columns, map(str, row), strict=True)) for row in scores.rows(round)]
        if len(kept) != len(here):
            yield Fault(CLIENTS, f"has {len(kept)} rows of round {round}, not {len(here)}")
            return
        measured = self._metrics_of(round) | {*UNMEASURED_COLUMNS}
        for number, (own, other) in enumerate(zip(kept, here, strict=True), start=1):
            self.unknown |= {name for name in own.keys() - other.keys() if own[name]}
            for name in own.keys() & other.keys():
                if not own[name] and name not in measured:  # since `evaluate.metrics` has it
                    continue
                if own[name] != other[name] and not (tolerance and _is_near(name, own[name], other, tolerance)):
                    values = f"{own[name]} recorded, {other[name]} here"
                    yield Fault(CLIENTS, f"row {number} of round {round}: {name} {values}")
                    return

    def _metrics_of(self, round: int) -> set[str]:
        """Return the metrics that a round's row of the record has over clients."""
        models = self._run.rows[round - 1].get("clients")
        splits = [split for one in models.values() for split in one.values()] if isinstance(models, Mapping) else []
        return {metric for split in splits for metric in split}

    def _rows(self, round: int) -> Iterator[Mapping[str, str]]:
        if round not in self._places:
            return
        start, count = self._places[round]
        with open_file(self._run.folder / CLIENTS) as file:
            file.seek(start)
            text = b"".join(file.readline() for _ in range(count)).decode(errors="replace")
        yield from csv.DictReader(io.StringIO(text, newline=""), fieldnames=self._columns)


def _is_near(name: str, recorded: str, here: Mapping[str, str], tolerance: float) -> bool:
    """Whether rounding explains a difference: up to `tolerance` in a loss, `NEAR` or `BOUNDARY` samples in a metric."""
    if name in UNMEASURED_COLUMNS:
        return False
    try:
        one, other, size = float(recorded), float(here[name]), int(here["n"])
    except ValueError:  # one of them is undefined
        return False
    apart = tolerance if name == "loss" else max(NEAR, BOUNDARY / size)
    return abs(one - other) <= apart * max(abs(one), abs(other), 1)


def _index(path: Path) -> tuple[list[str], dict[int, tuple[int, int]]]:
    """Return the columns of ``clients.csv``, and round → (byte offset, number) of its rows; both empty without a file.

    Raises:
        InputError: the file cannot be read, has a column twice, or its rows are not in the order of rounds.
    """
    places: dict[int, tuple[int, int]] = {}
    if not path.is_file():
        return [], places
    try:
        with open_file(path) as file:
            lines = lines_of(file)
            header = next(lines, b"")
            columns = next(csv.reader([header.decode(errors="replace")]), [])
            if len(columns) > len({*columns}):  # readers differ in which of the two they take
                raise Malformed("a column twice")
            position, last = len(header), 0
            for line in lines:
                digits = line.partition(b",")[0]
                round = int(digits) if digits.isdigit() and len(digits) < 19 else -1
                if round < last:
                    raise Malformed("rows out of order")
                start, count = places.get(round, (position, 0))
                places[round], last = (start, count + 1), round
                position += len(line)
    except (OSError, Malformed) as error:
        raise InputError("not a run's table", where=str(path), got=str(error), remedy=RESTORE) from None
    return columns, places
