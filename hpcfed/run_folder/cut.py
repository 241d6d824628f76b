"""The record of a run that goes on from a checkpoint: cut to the checkpoint's rounds."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from hpcfed.errors import InputError
from hpcfed.io.atomic import write_whole
from hpcfed.run_folder.code import FRESH
from hpcfed.run_folder.files import CERTIFICATE, PRIVATE, SIGNATURE
from hpcfed.run_folder.rounds import RECORD, count_rounds, parse_rounds
from hpcfed.run_folder.update_hashes import UPDATE_HASHES, cut_update_hashes

MODELS = ("model.safetensors", "model-evaluated.safetensors")
OF_THE_END = ("result.json", *MODELS, CERTIFICATE, SIGNATURE)
"""Files that a run leaves when it ends."""
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
    members = _cut_rounds(folder / RECORD, done, state)
    if update_hashes:
        cut_update_hashes(folder / UPDATE_HASHES, members)
    if (folder / "clients.csv").exists():
        _cut_clients(folder / "clients.csv", done)
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


def _cut_clients(path: Path, done: int) -> None:
    """Cut ``clients.csv`` after the last row of the `done` rounds; its last row may be incomplete."""
    with path.open("r+b") as table:
        kept = len(table.readline())
        for row in table:
            round = row.partition(b",")[0]
            if not (row.endswith(b"\n") and round.isdigit() and len(round) <= DIGITS and int(round) <= done):
                break
            kept += len(row)
        table.truncate(kept)
