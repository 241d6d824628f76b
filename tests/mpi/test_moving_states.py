"""Waiting for clients' states of other ranks: has the watchdog's time for waiting, and is no work of the rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import hpcfed
from hpcfed.client.state_transfer import Moves
from hpcfed.data.federation import Federation
from hpcfed.ranks.placement import Placement, homes
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import MpiWorld
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.slots import Sums
from tests.mpi.recipes import small, write_small

pytestmark = pytest.mark.one_mpi
SLOW = 0.2
"""Seconds by which each transfer of states is late."""


@pytest.fixture
def moving(world, shared_tmp, monkeypatch) -> dict[str, Any]:
    """A recipe of two clients of one home, first alone and then both in a round, so that the state of one moves; over
    links that are late.
    """
    world.on_root(lambda: write_small(shared_tmp, 7))
    with Federation.open(shared_tmp / "small.h5") as federation:
        first, second = np.flatnonzero(homes(federation.sizes, world.size) == world.size - 1)[:2].tolist()
    monkeypatch.chdir(shared_tmp)
    begin = MpiWorld.exchange

    def late(
        self: MpiWorld, outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        wait = begin(self, outgoing, incoming)
        return lambda: (time.sleep(SLOW), wait())[1]

    monkeypatch.setattr(MpiWorld, "exchange", late)
    cohort = {"schedule": [[first], [second], [first, second], [second]]}
    return small("run", algorithm={"name": "scaffold"}, placement="balanced", rounds=4, cohort=cohort)


def test_the_wait_is_watched_as_waiting(moving, world, monkeypatch) -> None:
    """The stage in which states are waited for is one that depends on other ranks, before and after training."""
    stages: list[bool] = []
    stage, finish = Watchdog.stage, Moves.finish

    def noted(self: Watchdog, what: str, *, waits: bool = False) -> None:
        stages.append(waits)
        stage(self, what, waits=waits)

    def finished(self: Moves) -> None:
        assert stages[-1], "states are waited for in a stage that has the time of one client's training"
        finish(self)

    monkeypatch.setattr(Watchdog, "stage", noted)
    monkeypatch.setattr(Moves, "finish", finished)
    hpcfed.run(moving, world=world, quiet=True)
    assert True in stages
    assert False in stages or world.size > 1


def test_the_wait_is_no_work_of_the_rank(moving, world, monkeypatch) -> None:
    """The speeds that `balanced` learns are those of training: the rank that waits is not the slower one.

    They are looked at and not learned: those of a loaded machine may place both clients on one rank from the start.
    """
    reduced: list[Sums] = []
    learned: list[np.ndarray] = []
    reduce = RoundBuffer.reduce

    def kept(self: RoundBuffer, *args: Any, **options: Any) -> Sums:
        reduced.append(reduce(self, *args, **options))
        return reduced[-1]

    def noted(self: Placement, ranks: Any, samples: Any, steps: Any, seconds: np.ndarray) -> None:
        learned.append(seconds)
        assert len(reduced) >= len(learned)
        late = reduced[-1].idle_seconds >= SLOW
        np.testing.assert_array_less(seconds[late], (reduced[-1].local_seconds - SLOW)[late] + 1e-9)
        assert (seconds[~late] == (reduced[-1].local_seconds - reduced[-1].idle_seconds)[~late]).all()

    monkeypatch.setattr(RoundBuffer, "reduce", kept)
    monkeypatch.setattr(Placement, "learn", noted)
    hpcfed.run(moving, world=world, quiet=True)
    assert len(learned) == 4
    assert world.size == 1 or any((sums.idle_seconds >= SLOW).any() for sums in reduced)
