"""Small IDX folders in exactly the published format, made from seeded random images."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

SAMPLES = {"train": 60, "t10k": 20}


def idx_bytes(array: np.ndarray) -> bytes:
    """Return an array of uint8 as IDX: magic 0x0000 08 ndim, big-endian sizes, data."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx_folder(folder: Path, *, end: str = "", joint: str = "-", seed: int = 0) -> dict[str, np.ndarray]:
    """Write the four files of a small MNIST relative and return their arrays by the files' first words."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    arrays = {}
    for part, count in SAMPLES.items():
        arrays[f"{part}-images"] = rng.integers(0, 256, (count, 5, 4), dtype=np.uint8)
        arrays[f"{part}-labels"] = rng.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        data = idx_bytes(array)
        path = folder / f"{name}{joint}idx{array.ndim}-ubyte{end}"
        path.write_bytes(gzip.compress(data) if end == ".gz" else data)
    return arrays
