"""Checks of what a method, perhaps the user's own, hands over, and of what the ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hpcfed.cohort import Cohort
from hpcfed.data.format import Federation
from hpcfed.errors import Diverged, EnvironmentFailure, HpcfedError, InputError
from hpcfed.reduce.fused import FAILED, SKIPPED, Sums
from hpcfed.types import Report, Stepped
from hpcfed.world import World

LOWER = "lower local.lr, or set local.clip_norm"


def check_report(method: str, told: Report, names: Sequence[str], like: Tensor) -> None:
    """Refuse a report that the buffer would take for something else: each name must be a vector like Δ_i.

    Raises:
        InputError: a vector is missing, or of another shape, type or device.
    """
    for name in names:
        vector = told.vectors.get(name)
        if vector is None or (vector.shape, vector.dtype, vector.device) != (like.shape, like.dtype, like.device):
            raise InputError(
                f"{method}, report of {name!r}",
                expected=f"a vector of shape {tuple(like.shape)} in {like.dtype}",
                got="nothing" if vector is None else f"shape {tuple(vector.shape)} in {vector.dtype}",
            )


def check_step(method: str, stepped: Stepped, w: Tensor) -> None:
    """Refuse a server step whose model does not fit the one before.

    Raises:
        InputError: it has another shape.
    """
    if stepped.w.shape != w.shape:
        expected, got = f"a model of shape {tuple(w.shape)}", f"shape {tuple(stepped.w.shape)}"
        raise InputError(f"{method}, server step", expected=expected, got=got)


def whereabouts(federation: Federation, round: int, client: int) -> str:
    """Return the words for a client in a round."""
    return f"round {round}, client {client} ({federation.client_name(client)})"


def check_sums(
    sums: Sums,
    round: int,
    cohort: Cohort,
    ranks: Sequence[int],
    failure: HpcfedError | None,
    federation: Federation,
    world: World,
    limit: float,
) -> None:
    """Raise, on every rank alike, what makes a round's sums unusable.

    Args:
        sums, round, cohort, ranks: of the round; which rank trained which member.
        failure: what went wrong on this rank, if anything.
        federation, world: of the run.
        limit: magnitude that the sums must stay below (`RoundBuffer.range`).

    Raises:
        EnvironmentFailure: the ranks' states differ, or the training of a client raised.
        Diverged: a client's update is not finite, or the sums left their range.
    """
    if len(set(sums.hashes.tolist())) > 1:
        raise EnvironmentFailure(
            f"round {round}: the ranks no longer hold the same model",
            got=differing(sums.hashes, world.hosts),
            remedy="suspect that host's memory or its software; run 'hpcfed doctor' on it",
        )
    if (sums.status == SKIPPED).all():
        what = f"round {round}: training failed for every client of the cohort"
        raise Diverged(what, remedy=f"{LOWER}; logs/ of the run folder has what they raised, if anything")
    failed = np.flatnonzero(sums.status == FAILED)
    if len(failed):
        raise world.broadcast(failure, root=ranks[failed[0]]) or EnvironmentFailure("a rank failed")
    bad = np.flatnonzero(~np.isfinite(sums.largest))
    if len(bad):
        place = f"{whereabouts(federation, round, int(cohort.clients[bad[0]]))}, rank {ranks[bad[0]]}"
        raise Diverged(f"{place}: its update is not finite after {sums.steps[bad[0]]} steps", remedy=LOWER)
    if sums.largest.sum() >= limit:
        raise Diverged(
            f"{whereabouts(federation, round, int(cohort.clients[np.argmax(sums.largest)]))}: "
            "updates leave the range of the sums",
            expected=f"magnitudes below {limit:.7g} in total",
            got=f"{sums.largest.sum():.3g}",
            remedy=LOWER,
        )


def differing(hashes: np.ndarray, hosts: tuple[str, ...]) -> str:
    """Name the ranks whose hash is not the most frequent one; all of them where none is."""
    values, counts = np.unique(hashes, return_counts=True)
    tied = (counts == counts.max()).sum() > 1
    ranks = range(len(hashes)) if tied else np.flatnonzero(hashes != values[counts.argmax()]).tolist()
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks) + " differing"
