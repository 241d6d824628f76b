"""The record of a run that goes on from a checkpoint: cut to the checkpoint's rounds."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path

from hpcfed.errors import InputError
from hpcfed.io.atomic import write_whole
from hpcfed.run_folder.code import FRESH
from hpcfed.run_folder.rounds import parse_rounds

OF_THE_END = ("result.json", "model.safetensors", "model-evaluated.safetensors")
"""Files that a run leaves when it ends."""


def cut(folder: Path, done: int, state: str | None) -> None:
    """Cut the record to `done` rounds, and remove what the run left at its end.

    Args:
        state: hash of the checkpoint's model and server state, which the record of round `done` must have.

    Raises:
        InputError: the record has fewer rounds, is damaged, or is another run's.
        OSError: as the system reports it.
    """
    _cut_rounds(folder / "metrics.jsonl", done, state)
    if (folder / "clients.csv").exists():
        _cut_clients(folder / "clients.csv", done)
    for name in OF_THE_END:
        (folder / name).unlink(missing_ok=True)


def _cut_rounds(path: Path, done: int, state: str | None) -> None:
    lines: list[bytes] = []
    with suppress(FileNotFoundError), path.open("rb") as record:
        lines = [line for line in islice(record, done) if line.endswith(b"\n")]
    if len(lines) < done:
        raise InputError(
            "the record holds fewer rounds than the checkpoint",
            where=str(path),
            expected=f"at least {done}",
            got=str(len(lines)),
            remedy=FRESH,
        )
    (last,) = deque(parse_rounds(lines, path), maxlen=1)  # raises on damage, which would stay for good
    if state is not None and last.get("hash") != state:
        what = "the record is of another run than the checkpoint"
        raise InputError(what, where=str(path), expected=f"hash {state}", got=str(last["hash"]), remedy=FRESH)
    write_whole(path, b"".join(lines))


def _cut_clients(path: Path, done: int) -> None:
    """Cut ``clients.csv`` after the last row of the `done` rounds; its last row may be incomplete."""
    with path.open("r+b") as table:
        kept = len(table.readline())
        for row in table:
            round = row.partition(b",")[0]
            if not (row.endswith(b"\n") and round.isdigit() and int(round) <= done):
                break
            kept += len(row)
        table.truncate(kept)
