"""Signs of life between ranks before the first round and after the last: a silent rank is named, a slow one is not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hpcfed.ranks import watchdog
from hpcfed.ranks.pulse import Pulse
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lost", [0, -1], ids=["rank 0", "the last rank"])
def test_a_silent_rank_is_named_with_its_host(lost, world, ended, monkeypatch) -> None:
    """By rank 0, or by all others if it is rank 0."""
    lost %= world.size
    if world.rank == lost:
        monkeypatch.setattr(Pulse, "tick", lambda self, seconds: None)
    with Watchdog(world, 0.1).watching():
        if world.rank != lost and 0 in (world.rank, lost):
            until(lambda: ended)
        world.gather(None)
    if world.rank != lost and 0 in (world.rank, lost):
        host = world.hosts[lost]
        assert f"start, rank {world.rank} on {host}: no sign of life from rank {lost} on {host} for 1 s" in ended[0]
    else:
        assert not ended
    assert not world.pulse._comm.Iprobe()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_rounds", [False, True])
def test_a_rank_may_take_long_where_it_shows_life_or_is_in_the_rounds(in_rounds, world, ended) -> None:
    """A time limit on stages applies in the rounds alone, the silence of ranks outside of them alone."""
    dog = Watchdog(world, 0.3)
    with dog.watching():
        for _ in range(2):  # an exchange goes on after a pause
            if world.rank == world.size - 1:
                if in_rounds:
                    with dog.rounds():
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
