"""Random streams of data preparation: each purpose has its own, so that one never shifts another."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Return the Philox generator of (seed, purpose); `seed` is a non-negative integer of any size."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(purpose.encode())])))
