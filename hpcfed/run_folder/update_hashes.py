"""``update-hashes.bin``: the hash of each client's update, written if the recipe has ``update_hashes: true``.

Little-endian uint64, one for each member of each round's cohort, in the order of ``cohort`` in ``metrics.jsonl``, round
after round; 0 for a client that was skipped. The file has no header: 8 bytes for each client of each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpcfed.errors import InputError

UPDATE_HASHES = "update-hashes.bin"
KIND = np.dtype("<u8")


def bytes_of_update_hashes(path: Path, count: int) -> int:
    """Return the number of bytes of the file's first `count` hashes.

    Raises:
        InputError: the file has fewer.
    """
    found, wanted = path.stat().st_size if path.exists() else 0, count * KIND.itemsize
    if found < wanted:
        remedy = "restore the file, or choose another output"
        raise InputError(
            "hashes are missing", where=str(path), expected=f"{wanted} bytes", got=str(found), remedy=remedy
        )
    return wanted


def read_update_hashes(path: Path, sizes: Sequence[int], round: int) -> np.ndarray | None:
    """Return the hashes of a round's S updates, (S,) uint64; None if the file does not exist or ends before them.

    Args:
        path: path of ``update-hashes.bin``.
        sizes: cohort size of each round, from the first one on.
        round: the round, from 1.
    """
    try:
        with path.open("rb") as file:
            file.seek(sum(sizes[: round - 1]) * KIND.itemsize)
            data = file.read(sizes[round - 1] * KIND.itemsize)
    except FileNotFoundError:
        return None
    return np.frombuffer(data, KIND) if len(data) == sizes[round - 1] * KIND.itemsize else None
