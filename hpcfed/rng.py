"""Counter-based random streams: who draws what depends on (seed, purpose, round, client) and on nothing else.

A stream is addressed, not advanced: the same four numbers give the same draws on any rank, in any order, after any
number of other draws, and after a resume. Philox-4x64 is keyed by (seed, purpose); round and client are the upper
words of its 256-bit counter, which leaves 2^128 draws to each stream.

Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every result: never renumber."""

    MODEL = 1
    COHORT = 2
    BATCHES = 3
    BUDGET = 4
    DROPOUT = 5
    AUGMENT = 6
    TUNING_BATCHES = 7
    TUNING_DROPOUT = 8


def stream(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return the generator of one (seed, purpose, round, client)."""
    counter = np.array([0, 0, round, client], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, purpose], dtype=np.uint64), counter=counter))


def torch_seed(seed: int, purpose: Purpose, round: int = 0, client: int = 0) -> int:
    """Return a 63-bit seed for torch's generators (initial parameters, dropout), drawn from the stream."""
    return int(stream(seed, purpose, round, client).integers(2**63))
