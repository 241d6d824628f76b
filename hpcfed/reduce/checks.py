"""Checks of updates, sums and server steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from hpcfed.cohort import Cohort
from hpcfed.data.federation import Federation
from hpcfed.errors import Diverged, EnvironmentFailure, HpcfedError, InputError, goes_to_run_folder
from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import KINDS
from hpcfed.reduce.finite import LOWER
from hpcfed.reduce.slots import FAILED, SKIPPED, Sums
from hpcfed.types import DELTA, ServerUpdate, Update

SAME_ON_ALL = (
    "the method's begin, step, share and factors must do the same on every rank: no clock, no order of a set, nothing "
    "that an object keeps from call to call; if they do, "
)
"""What to look for in a method of the user's own, where the ranks' states differ."""


class RanksDiffer(EnvironmentFailure):
    """The ranks' states differ at the start of a round, on the ranks named in `which`."""

    which = ""


def ranks_differ(round: int, which: str, *, own_method: bool = False) -> RanksDiffer:
    """Return the error for ranks whose states differ; `own_method` adds advice to look at the user's method."""
    look = SAME_ON_ALL if own_method else ""
    error = RanksDiffer(
        f"round {round}: the ranks no longer hold the same model",
        got=which,
        remedy=f"{look}suspect that host's memory or its software; run 'hpcfed doctor' on it",
    )
    error.which = which
    return error


def checked(
    method: str, update: Update, names: Sequence[str], scalars: Sequence[str], like: Tensor
) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
    """Return an update's vectors and scalars by name; vectors are like Δ_i.

    Raises:
        InputError: a vector or a scalar is missing or undeclared, or a vector of another shape, type or device.
    """
    vectors, numbers = update.named, update.scalars
    if len(vectors) > len(names):
        raise _undeclared(method, vectors, names, "vectors")
    if len(numbers) > len(scalars):
        raise _undeclared(method, numbers, scalars, "scalars")
    for name in scalars:
        if not isinstance(numbers.get(name), int | float):
            got = f"a {type(numbers[name]).__name__}" if name in numbers else "nothing"
            raise InputError(f"{method}, report of {name!r}", expected="a number", got=got)
    for name in names:
        vector = vectors.get(name)
        if vector is like:
            continue
        if vector is None or (vector.shape, vector.dtype, vector.device) != (like.shape, like.dtype, like.device):
            raise InputError(
                f"{method}, report of {name!r}",
                expected=f"a vector of shape {tuple(like.shape)} in {like.dtype}",
                got="nothing" if vector is None else f"shape {tuple(vector.shape)} in {vector.dtype}",
            )
    return vectors, dict(numbers)  # a rule may fill one dict for each client


def _undeclared(method: str, found: Iterable[str], declared: Sequence[str], kind: str) -> InputError:
    name = next(name for name in found if name not in declared)
    remedy = "set reports_delta" if name == DELTA else f"name it in {kind}"
    return InputError(f"{method}, report of {name!r}", expected="nothing of this name", remedy=remedy)


def check_step(method: str, update: ServerUpdate, w: Tensor) -> None:
    """Refuse a server step whose model does not fit the one before.

    Raises:
        InputError: it has another shape.
    """
    if update.w.shape != w.shape:
        expected, got = f"a model of shape {tuple(w.shape)}", f"shape {tuple(update.w.shape)}"
        raise InputError(f"{method}, server step", expected=expected, got=got)


def client_label(federation: Federation, round: int, client: int) -> str:
    """Return the words for a client in a round."""
    return f"round {round}, client {client} ({federation.client_name(client)})"


def check_same(hashes: np.ndarray, round: int, world: World) -> None:
    """Raise, on every rank alike, if the ranks' hashes of the model and the server's state, (P,), differ.

    Raises:
        RanksDiffer: they do.
    """
    if len(set(hashes.tolist())) > 1:
        raise ranks_differ(round, differing(hashes, world.hosts))


def check_sums(
    sums: Sums,
    round: int,
    cohort: Cohort,
    ranks: Sequence[int],
    failure: HpcfedError | None,
    federation: Federation,
    world: World,
) -> None:
    """Raise, on every rank alike, what makes a round's sums unusable.

    Args:
        sums, round, cohort, ranks: of the round; which rank trained which member.
        failure: what went wrong on this rank, if anything.
        federation, world: of the run.

    Raises:
        RanksDiffer: the ranks' states differ.
        InputError, EnvironmentFailure: the training of a client raised.
        Diverged: a client's update is not finite, or none is left that has a weight.
    """
    failed = np.flatnonzero(sums.status == FAILED)
    known = world.broadcast(failure, root=ranks[failed[0]]) if len(failed) else None
    if isinstance(known, InputError):  # of the user's code, which may have written to the model
        raise known
    check_same(sums.hashes, round, world)
    left = sums.status != SKIPPED
    if not left.any() or (cohort.shares.any() and not cohort.shares[left].any()):
        whose = "with samples" if cohort.shares.any() else "(none has samples)"
        what = f"round {round}: training failed for every client of the cohort {whose}"
        seen = "; logs/ of the run folder has what they raised, if anything" if goes_to_run_folder() else ""
        raise Diverged(what, remedy=f"{LOWER}{seen}")
    if len(failed):
        what = f"round {round}: rank {ranks[failed[0]]} failed without saying why"
        raise known or EnvironmentFailure(what, remedy="see its log in logs/ of the run folder")
    bad = np.flatnonzero(~np.isfinite(sum([*sums.bounds.values(), *map(np.abs, sums.scalars.values())])))
    if len(bad):
        place = f"{client_label(federation, round, int(cohort.clients[bad[0]]))}, rank {ranks[bad[0]]}"
        what = f"{place}: its update is not finite after {sums.steps[bad[0]]} steps"
        x = federation.client(int(cohort.clients[bad[0]]))[0]
        if flaws := int(np.count_nonzero(~np.isfinite(x))):
            remedy = "mend its data, or leave it out by cohort.without"
            got = f"{flaws:,} of {x.size:,}"
            raise Diverged(f"{what}; its x has numbers that are not finite", got=got, remedy=remedy)
        raise Diverged(what, remedy=LOWER)


def check_range(sums: Sums, counts: Mapping[str, np.ndarray], round: int, kind: str) -> None:
    """Refuse sums that may have left the range of their kind: float32's, or nearly float64's.

    Args:
        sums, round: of the round.
        counts: c_i of each vector, (S,).
        kind: the recipe's ``reduction``.

    Raises:
        Diverged: they may have.
    """
    for name, own in sums.bounds.items():
        total, limit = float((np.abs(counts[name]) * own).sum()), KINDS[kind].range
        if not total < limit:
            raise Diverged(
                f"round {round}: the sum of {name!r} may have left the range of reduction: {kind}",
                expected=f"magnitudes below {limit:.3g} in total",
                got=f"{total:.3g}",
                remedy=LOWER if kind == "exact" else f"set reduction: exact if updates may be so large, else {LOWER}",
            )


def check_repeated(
    first: Sums,
    second: Sums,
    round: int,
    cohort: Cohort,
    ranks: Sequence[int],
    federation: Federation,
    world: World,
) -> None:
    """Compare what two attempts at a round brought: clients must have reported the same.

    Raises:
        EnvironmentFailure: naming the first client that did not.
    """
    same = [first.status == second.status, *(first.bounds[name] == own for name, own in second.bounds.items())]
    same += [first.steps == second.steps, *(first.scalars[name] == own for name, own in second.scalars.items())]
    if first.update_hashes is not None and second.update_hashes is not None:
        same.append(first.update_hashes == second.update_hashes)
    differing = np.flatnonzero(~np.all(same, axis=0))
    if len(differing):
        place, client = int(differing[0]), int(cohort.clients[differing[0]])
        rank = ranks[place]
        raise EnvironmentFailure(
            f"{client_label(federation, round, client)}, rank {rank} on {world.hosts[rank]}: trained twice, it "
            "reported two different updates",
            remedy="look for randomness of its own in the model, the loss or the method, and for kernels that are not "
            "deterministic",
        )


def differing(hashes: np.ndarray, hosts: tuple[str, ...]) -> str:
    """Name the ranks whose hash is not the most frequent one; all of them in a tie."""
    values, counts = np.unique(hashes, return_counts=True)
    tied = (counts == counts.max()).sum() > 1
    ranks = range(len(hashes)) if tied else np.flatnonzero(hashes != values[counts.argmax()]).tolist()
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks) + " differing"
