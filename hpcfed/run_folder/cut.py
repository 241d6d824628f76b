"""The record of a run that goes on from a checkpoint: cut to the checkpoint's rounds."""

from __future__ import annotations

import os
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hpcfed.errors import InputError, shown
from hpcfed.io.atomic import write_whole
from hpcfed.run_folder.code import FRESH
from hpcfed.run_folder.files import CERTIFICATE, PRIVATE, SIGNATURE
from hpcfed.run_folder.rounds import RECORD, RESTORE, count_rounds, iterate_rounds, parse_rounds
from hpcfed.run_folder.update_hashes import UPDATE_HASHES, cut_update_hashes

MODELS = ("model.safetensors", "model-evaluated.safetensors")
OF_THE_END = ("result.json", *MODELS, CERTIFICATE, SIGNATURE)
"""Files that a run leaves when it ends."""
COLUMNS = b"round,client,model,split,"
"""Beginning of the header of ``clients.csv``."""
DIGITS = 18
"""Maximum digits of a round number in ``clients.csv``."""


def cut(folder: Path, done: int, state: str | None, *, update_hashes: bool = False) -> None:
    """Cut the record to `done` rounds, and remove what the run left at its end.

    Args:
        state: hash of the checkpoint's model and server state, which the record of round `done` must have.
        update_hashes: whether the run records a hash of each client's update.

    Raises:
        InputError: the record has fewer rounds, is damaged, or is another run's.
        OSError: as the system reports it.
    """
    clients = folder / "clients.csv"
    kept = _bytes_of_clients(clients, folder / RECORD, done) if clients.exists() else None
    members = _cut_rounds(folder / RECORD, done, state)
    if update_hashes:
        cut_update_hashes(folder / UPDATE_HASHES, members)
    if kept is not None:
        os.truncate(clients, kept)
    for name in OF_THE_END:
        (folder / name).unlink(missing_ok=True)
    for entry in (folder / "private").glob("*"):
        if PRIVATE.fullmatch(entry.name):
            entry.unlink()


def _cut_rounds(path: Path, done: int, state: str | None) -> int:
    """Cut the record, and return Σ |S| over its rounds."""
    found = count_rounds(path)
    if found < done:
        raise InputError(
            "the record holds fewer rounds than the checkpoint",
            where=str(path),
            expected=f"at least {done}",
            got=str(found),
            remedy=FRESH,
        )
    members, last = 0, dict[str, Any]()
    with path.open("rb") as record:
        for last in parse_rounds(islice(record, done), path):  # raises on damage, which would stay for good
            cohort = last.get("cohort")
            members += len(cohort) if isinstance(cohort, list) else 0
    if state is not None and last.get("hash") != state:
        what = "the record is of another run than the checkpoint"
        raise InputError(what, where=str(path), expected=f"hash {state}", got=str(last["hash"]), remedy=FRESH)
    with path.open("rb") as record:
        write_whole(path, islice(record, done))
    return members


def _bytes_of_clients(path: Path, record: Path, done: int) -> int:
    """Return the bytes of ``clients.csv`` up to the last row of the `done` rounds; its last row may be incomplete.

    Raises:
        InputError: its header is not a run's, or its text is not UTF-8; or it holds no row, but the record says that
            clients were evaluated in these rounds.
    """
    with path.open("rb") as table:
        header = table.readline()
        if not header.endswith(b"\n") and (header.startswith(COLUMNS) or COLUMNS.startswith(header)):
            if any(row.get("clients") is not None for row in islice(iterate_rounds(record), done)):
                raise InputError("rows of rounds that evaluated clients are gone", where=str(path), remedy=RESTORE)
            return 0  # the job was killed while it wrote the header
        if not header.startswith(COLUMNS) or header.endswith(b"\r\n"):
            expected, got = f"a header that begins with {COLUMNS.decode()}", shown(header.decode(errors="replace"))
            raise InputError("not a run's table", where=str(path), expected=expected, got=got, remedy=RESTORE)
        kept = 0
        for line, row in enumerate(chain([header], table), start=1):
            round = row.partition(b",")[0]
            is_kept = row.endswith(b"\n") and round.isdigit() and len(round) <= DIGITS and int(round) <= done
            if not is_kept and line > 1:
                break
            try:
                row.decode()
            except UnicodeDecodeError:
                raise InputError("not UTF-8 text", where=f"{path}, line {line}", remedy=RESTORE) from None
            kept += len(row)
    return kept
