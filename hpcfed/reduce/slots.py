"""The slots of a round's buffer, fields of 8 bytes for each client and each rank, and what all ranks read of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from torch import Tensor

RANK_SLOT = np.dtype(
    [("hash", "i8"), ("requests", "i8"), ("written", "i8"), ("local_seconds", "f8"), ("idle_seconds", "f8")]
)
"""Flags of a rank, for all others."""
DONE, FAILED, SKIPPED = 1, 2, 3
"""Status of a cohort member; 0: not reached."""


@cache
def client_slot(
    num_vectors: int, num_scalars: int = 0, *, hashed: bool = False, watched: bool = False
) -> np.dtype[np.void]:
    """Return the fields of a cohort member: ``bounds`` on the largest entry of each of V vectors, K own ``scalars``.

    Where updates are `hashed`, 8 bytes more; where some are trained once more (`watched`), two hashes.
    """
    common = [("status", "i8"), ("steps", "i8"), ("delta_sq", "f8"), ("loss_sum", "f8")]
    own = [("bounds", "f8", (num_vectors,)), ("scalars", "f8", (num_scalars,))]
    hashes = [*([("hash", "u8")] if hashed else []), *([("again", "u8", (2,))] if watched else [])]
    return np.dtype([*common, *own, *hashes])


@dataclass(frozen=True)
class Sums:
    """Result of a reduction, the same on every rank.

    Attributes:
        vectors: Σ c_i v_i / |S| of each named vector, (d,) or of another length, float64, where the server is.
        bounds: of each vector, (S,) float64 by place in the cohort, a bound on every client's largest entry.
        status, steps: (S,) int64, by place in the cohort. A status is DONE, FAILED, SKIPPED, or 0 where a rank stopped
            early.
        delta_sq, loss_sum: (S,) float64; ‖Δ_i‖² is 0 where no Δ_i is reported.
        scalars: (S,) float64 of each named scalar.
        update_hashes: (S,) uint64, of each client's update, 0 where it was skipped; None where none are taken.
        again: (S, 2) uint64, hashes of updates that the sentinel compares, 0 of all others; None where it is off.
        hashes: (P,) int64, of each rank's replicated state at the start of the round.
        requests: (P,) int64, requests of each rank to all (`hpcfed.types.Request`).
        written: (P,) int64, round of the last checkpoint of which each rank's part is on disk.
        local_seconds: (P,) float64, spent in local work.
        idle_seconds: (P,) float64, of them: waiting for clients' states of other ranks, and the sentinel's.
    """

    vectors: Mapping[str, Tensor]
    bounds: Mapping[str, np.ndarray]
    status: np.ndarray
    delta_sq: np.ndarray
    loss_sum: np.ndarray
    steps: np.ndarray
    hashes: np.ndarray
    requests: np.ndarray
    written: np.ndarray
    local_seconds: np.ndarray
    idle_seconds: np.ndarray
    scalars: Mapping[str, np.ndarray]
    update_hashes: np.ndarray | None = None
    again: np.ndarray | None = None
