"""Signs of life between ranks: a silent rank is named, a slow one or one that slept is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from hpcfed.errors import Stopped
from hpcfed.ranks import watchdog
from hpcfed.ranks.pulse import Pulse, neighbours
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World
from tests.launch import HUNG

SILENCE = 0.6


@pytest.fixture
def ended(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines with which this rank would have ended the job."""
    lines: list[str] = []
    monkeypatch.setattr(world, "end_at_once", lambda code, message: lines.append(message))
    monkeypatch.setattr(watchdog, "MIN_SILENCE", SILENCE)
    monkeypatch.setattr(watchdog, "SPEAKS_AFTER", 0.0)
    return lines


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HUNG
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.serial
def test_life_is_shown_along_a_tree() -> None:
    """Each rank has three partners at most, which are its partners, too, and reaches rank 0 in log₂ P steps."""
    size = 4096
    partners = [neighbours(rank, size) for rank in range(size)]
    assert all(rank in partners[other] for rank in range(size) for other in partners[rank])
    assert max(map(len, partners)) == 3
    assert sum(map(len, partners)) == 2 * (size - 1)
    rank, steps = size - 1, 0
    while rank:
        rank, steps = partners[rank][0], steps + 1
    assert steps == 12


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_rounds", [False, True], ids=["outside", "in the rounds"])
@pytest.mark.parametrize("lost", [0, -1], ids=["rank 0", "the last rank"])
def test_a_silent_rank_is_named_with_its_host(lost, in_rounds, world, ended, monkeypatch) -> None:
    """By its neighbours."""
    lost %= world.size
    if world.rank == lost:
        monkeypatch.setattr(Pulse, "tick", lambda self, seconds: None)
    dog = Watchdog(world, 0.1)
    near = lost in neighbours(world.rank, world.size)
    with dog.watching(), dog.rounds() if in_rounds else nullcontext():
        dog.limit = 0.5  # of a stage
        if near:
            until(lambda: ended)
        world.gather(None)
    if near:
        host, stage = world.hosts[lost], "the first round" if in_rounds else "start"
        assert f"{stage}, rank {world.rank} on {host}: no sign of life from rank {lost} on {host} for 1 s" in ended[0]
    else:
        assert not ended
    assert not world.pulse._comm.Iprobe()


@pytest.mark.ranks(2)
def test_nothing_is_left_on_its_way_by_a_run_that_ends_early(world, ended) -> None:
    """Messages that nobody has received are what UCX warns of when MPI ends."""

    def stops() -> None:
        with Watchdog(world, 0.3).watching():
            time.sleep(0.2 * world.rank)
            raise Stopped("round 3")

    with pytest.raises(Stopped):
        stops()
    world.barrier()
    assert not world.pulse._comm.Iprobe()
    assert not ended


@pytest.mark.ranks(2)
def test_runs_may_follow_each_other_at_once(world) -> None:
    """A rank shows life in the next run while a partner still receives what was sent in the last."""
    for _ in range(200):
        world.pulse.resume()
        world.pulse.tick(0.0)
        world.pulse.pause()
        world.pulse.drain()


def test_a_limit_follows_the_longest_round(world, monkeypatch) -> None:
    dog = Watchdog(world)
    with dog.watching(), dog.rounds():
        assert dog._limits() == (1800, 1800)
        for seconds, limit in ((1, 300), (50, 500), (2, 500)):
            monkeypatch.setattr(dog, "_began", time.monotonic() - seconds)
            dog.round_done()
            assert dog._limits() == (pytest.approx(limit, rel=0.01), 300)
    assert dog._limits() == (1800, 1800)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_rounds", [False, True])
def test_a_rank_may_take_long_where_it_shows_life_or_is_in_the_rounds(in_rounds, world, ended) -> None:
    """No limit of a stage applies outside of the rounds."""
    dog = Watchdog(world, 0.3)
    with dog.watching():
        for _ in range(2):  # an exchange goes on after a pause
            if world.rank == world.size - 1:
                if in_rounds:
                    with dog.rounds(signs=False):  # as where MPI sums a GPU's memory
                        dog.limit = None
                        time.sleep(2 * SILENCE)
                    dog.limit = 0.3
                else:
                    time.sleep(2 * SILENCE)
            world.gather(None)
    assert not ended
    assert not world.pulse._comm.Iprobe()


def test_a_stage_outside_of_the_rounds_ends_too(world, ended, monkeypatch) -> None:
    """After an hour at least; with its name, though no log is open yet."""
    monkeypatch.setattr(watchdog, "MIN_STAGE_LIMIT", 0.3)
    dog = Watchdog(world, 0.01)
    with dog.watching():
        dog.stage("start: checkpoint")
        until(lambda: ended)
        world.gather(None)
    assert ended[0].startswith(
        f"hpcfed: start: checkpoint, rank {world.rank} on {world.hosts[world.rank]}: nothing moved"
    )
