"""Counter-based random streams, each determined by (seed, purpose, round, client) alone.

A stream is addressed, not advanced: the same four numbers give the same draws on any rank, in any order, after any
number of other draws, and after a resume. Philox-4x64 is keyed by (seed, purpose); round and client are the upper
words of its 256-bit counter, which leaves 2^128 draws to each stream; where several parts of a list draw, the place in
it is the word below, and 2^64 draws are left.

A seed of 64 bits or more is a secret one (`hpcfed.config.secret`). Philox then has a key of 128 bits that SHAKE-256
derives from it for each purpose, and the noise of `normals` is SHAKE-256's own output. Philox is a statistical
generator: no attack on it is known, and none was ever ruled out. SHAKE-256 is a cryptographic one.

Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; FIPS 202 on SHAKE-256.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from hashlib import shake_256
from typing import Any, cast

import numpy as np
from numpy.random.bit_generator import ISeedSequence


class Purpose(IntEnum):
    """Purpose of a random stream. The numbers are part of every result: never renumber."""

    MODEL = 1
    COHORT = 2
    BATCHES = 3
    BUDGET = 4
    DROPOUT = 5
    AUGMENT = 6
    TUNING_BATCHES = 7
    TUNING_DROPOUT = 8
    TILT = 9
    REPORT = 10
    NEXT_STATE = 11
    SERVER_STEP = 12
    LOCAL_STEP = 13
    BEGIN = 14
    EVALUATION = 15
    SHARE = 16
    FACTORS = 17
    SENTINEL = 18
    UPDATES = 19
    MEANS = 20
    PERSONAL = 24
    MASKS = 25
    DROPOUTS = 26
    DOWN = 27
    SELF_MASKS = 28


LEAST_SECRET = 2**64
"""Seeds from here on are secret."""
BLOCK = 1 << 16
"""Numbers that one call of SHAKE-256 gives."""
LARGEST_NORMAL = 8.25
"""Bound on the size of all that `normals` returns."""


class _Key(ISeedSequence):
    """Passes Philox its key unchanged; with ``key=``, numpy would first draw a seed from the system, and drop it."""

    def __init__(self, seed: int, purpose: Purpose):
        if seed < LEAST_SECRET:
            self._words = np.array([seed, purpose], dtype=np.uint64)
        else:
            self._words = np.frombuffer(_bytes_of(seed, purpose).digest(16), dtype="<u8").astype(np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return self._words


_key = lru_cache(maxsize=64)(_Key)


def stream(seed: int, purpose: Purpose, round: int = 0, client: int = 0, place: int = 0) -> np.random.Generator:
    """Return the generator of one (seed, purpose, round, client); of several in a list that of one `place`."""
    counter = np.array([0, place, round, client], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(cast(Any, _key(seed, purpose)), counter=counter))


class Streams:
    """The streams of one (seed, purpose), one at a time: a generator is moved to another address, not made anew.

    That takes a quarter of the time, which small clients notice.
    """

    def __init__(self, seed: int, purpose: Purpose):
        self._generator = stream(seed, purpose)
        self._state: Any = self._generator.bit_generator.state

    def at(self, round: int, client: int) -> np.random.Generator:
        """Return what ``stream(seed, purpose, round, client)`` does; valid until the next call."""
        self._state["state"]["counter"][2:] = round, client
        self._generator.bit_generator.state = self._state
        return self._generator


def torch_seed(seed: int, purpose: Purpose, round: int = 0, client: int = 0, place: int = 0) -> int:
    """Return a 63-bit seed for torch's generators (initial parameters, dropout), drawn from the stream."""
    return int(stream(seed, purpose, round, client, place).integers(2**63))


def normals(seed: int, purpose: Purpose, round: int, client: int, place: int, size: int) -> np.ndarray:
    """Return standard normal numbers, (size,) float64, of one address: Φ⁻¹((k + ½) / 2^52), k of 52 random bits.

    None is beyond 8.21, where 2^-53 of the distribution lie on each side. With a secret seed the bits are SHAKE-256's.
    """
    from scipy.special import ndtri

    if seed < LEAST_SECRET:
        words = stream(seed, purpose, round, client, place).bit_generator.random_raw(size)
    else:
        firsts = range(0, size, BLOCK)
        address = seed, purpose, round, client, place
        pieces = [_bytes_of(*address, first // BLOCK).digest(8 * min(BLOCK, size - first)) for first in firsts]
        words = np.frombuffer(b"".join(pieces), dtype="<u8").astype(np.uint64)
    return np.asarray(ndtri(((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52))


def _bytes_of(seed: int, *address: int) -> Any:
    """Return SHAKE-256 of a secret seed and an address."""
    words = b"".join(number.to_bytes(8, "little") for number in address)
    return shake_256(b"hpcfed stream" + seed.to_bytes(32, "little") + words)
