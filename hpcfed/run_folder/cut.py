"""Cuts the record of a run that goes on from a checkpoint to the rounds that the checkpoint contains."""

from __future__ import annotations

import io
import os
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any

from hpcfed.config.metrics import ROW_KEYS
from hpcfed.errors import InputError, shown
from hpcfed.io.atomic import write_whole
from hpcfed.io.text import LONGEST_LINE
from hpcfed.run_folder.code import FRESH
from hpcfed.run_folder.files import CERTIFICATE, CLIENTS, EVALUATED, PRIVATE_FILES, RESULT, SIGNATURE
from hpcfed.run_folder.rounds import RECORD, RESTORE, count_rounds, parse_rounds
from hpcfed.run_folder.update_hashes import UPDATE_HASHES, bytes_of_update_hashes

MODELS = ("model.safetensors", EVALUATED)
OF_THE_END = (RESULT, *MODELS, CERTIFICATE, SIGNATURE)
"""Files that a run leaves when it ends."""
HEADER = "".join(f"{name}," for name in ROW_KEYS).encode()
"""Beginning of the header of ``clients.csv``."""
MAX_DIGITS = 18
"""Maximum digits of a round number in ``clients.csv``."""


def cut(folder: Path, done: int, state: str | None, *, client_rows: int = 0, update_hashes: bool = False) -> None:
    """Cut the record and its tables to the first `done` rounds, and remove the files of the run's end (`OF_THE_END`).

    On an InputError nothing has been changed.

    Args:
        folder: the run folder.
        done: number of rounds in the checkpoint.
        state: hash of the checkpoint's model and server state, which the record of round `done` must have.
        client_rows: number of rows that an evaluation writes to ``clients.csv`` for each model.
        update_hashes: whether the run records a hash of each client's update.

    Raises:
        InputError: the record or a table has fewer rounds, is damaged, or belongs to another run.
        OSError: a file cannot be read or written.
    """
    record, clients, hashes = folder / RECORD, folder / CLIENTS, folder / UPDATE_HASHES
    members, models = _count(record, done, state)
    kept = {clients: _bytes_of_clients(clients, done, models * client_rows)}
    if update_hashes:
        kept[hashes] = bytes_of_update_hashes(hashes, members)
    with record.open("rb") as lines:
        write_whole(record, islice(lines, done))
    for path, size in kept.items():
        if path.exists():
            os.truncate(path, size)
    for name in OF_THE_END:
        (folder / name).unlink(missing_ok=True)
    for entry in (folder / "private").glob("*"):
        if PRIVATE_FILES.fullmatch(entry.name):
            entry.unlink()


def _count(path: Path, done: int, state: str | None) -> tuple[int, int]:
    """Check the record's first `done` rounds; return their sums of cohort sizes, and of models in ``clients``."""
    found = count_rounds(path)
    if found < done:
        raise InputError(
            "the record holds fewer rounds than the checkpoint",
            where=str(path),
            expected=f"at least {done}",
            got=str(found),
            remedy=FRESH,
        )
    members, models, last = 0, 0, dict[str, Any]()
    with path.open("rb") as record:
        for last in parse_rounds(islice(record, done), path):
            cohort, clients = last.get("cohort"), last.get("clients")
            members += len(cohort) if isinstance(cohort, list) else 0
            models += len(clients) if isinstance(clients, dict) else 0
    if state is not None and last.get("hash") != state:
        what = "the record is of another run than the checkpoint"
        raise InputError(what, where=str(path), expected=f"hash {state}", got=str(last["hash"]), remedy=FRESH)
    return members, models


def _bytes_of_clients(path: Path, done: int, expected: int) -> int:
    """Return the number of bytes of ``clients.csv`` up to the last row of the first `done` rounds.

    Raises:
        InputError: these rounds have fewer than `expected` whole rows, the header is not a run's, or the text is not
            UTF-8.
    """
    kept = lines = 0
    with path.open("rb") if path.exists() else io.BytesIO() as table:
        header = table.readline(LONGEST_LINE)
        is_torn = not header.endswith(b"\n") and (header.startswith(HEADER) or HEADER.startswith(header))
        if not is_torn and (not header.startswith(HEADER) or header.endswith(b"\r\n")):
            wanted, got = f"a header that begins with {HEADER.decode()}", shown(header.decode(errors="replace"))
            raise InputError("not a run's table", where=str(path), expected=wanted, got=got, remedy=RESTORE)
        rows = takewhile(lambda row: _is_row(row, done), table)
        for lines, line in enumerate(() if is_torn else chain([header], rows), start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                raise InputError("not UTF-8 text", where=f"{path}, line {lines}", remedy=RESTORE) from None
            kept += len(line)
    if expected and lines <= expected:
        wanted, got = f"{1 + expected} whole ones up to round {done}", f"the first {lines}"
        raise InputError("lines are missing or damaged", where=str(path), expected=wanted, got=got, remedy=RESTORE)
    return kept


def _is_row(line: bytes, done: int) -> bool:
    """Whether a line of ``clients.csv`` is complete and of one of the first `done` rounds."""
    round = line.partition(b",")[0]
    return line.endswith(b"\n") and round.isdigit() and len(round) <= MAX_DIGITS and int(round) <= done
