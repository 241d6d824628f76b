"""What a `World` promises its callers, on any number of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hpcfed.errors import Diverged, EnvironmentFailure, InputError


def test_a_sum_adds_all_ranks_in_place(world):
    buffer = np.array([[world.rank, 1], [-(2**62) * (world.rank == 0), 2**40]], dtype=np.int64)
    world.sum_in_place(buffer)
    ranks = world.size
    assert buffer.tolist() == [[ranks * (ranks - 1) // 2, ranks], [-(2**62), ranks * 2**40]]


def test_slots_of_one_rank_arrive_as_they_were(world):
    """All others leave zero, so any 64 bits pass: NaN payloads, infinities and −0.0 too."""
    sent = np.array([np.nan, -np.inf, -0.0, 5e-324, -1.5, world.rank], dtype=np.float64)
    slots = np.zeros((world.size, len(sent)), dtype=np.int64)
    slots[world.rank] = sent.view(np.int64)
    world.sum_in_place(slots)
    for rank in range(world.size):
        assert slots[rank, :5].tolist() == sent[:5].view(np.int64).tolist()
        assert slots[rank, 5:].view(np.float64).item() == rank


def test_gather_returns_by_rank_on_every_rank(world):
    assert world.gather({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]


def test_broadcast_returns_the_roots_value(world):
    last = world.size - 1
    assert world.broadcast(world.rank, root=last) == last
    assert world.broadcast(("mine", world.rank)) == ("mine", 0)


def test_broadcast_tensors_returns_the_roots_bits(world, monkeypatch):
    """Of any shape and dtype, in one message or several; each rank's own arguments but the root's are ignored."""
    monkeypatch.setattr("hpcfed.ranks.world.LARGEST_MESSAGE", 24)
    root = {
        "w": torch.tensor([-0.0, math.nan, 5e-324, *range(5)], dtype=torch.float64),
        "matrix": torch.arange(12, dtype=torch.float32).view(3, 4).T,
        "scalar": torch.tensor(7, dtype=torch.int64),
        "touched": torch.empty(0, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
    }
    found = world.broadcast_tensors(root if world.is_root else {})
    assert list(found) == list(root)
    for name, tensor in root.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert found[name].contiguous().numpy().tobytes() == tensor.contiguous().numpy().tobytes()


def test_on_root_calls_once_and_tells_all(world):
    calls = []

    def decide() -> str:
        calls.append(world.rank)
        return "decided"

    assert world.on_root(decide) == "decided"
    assert calls == ([0] if world.is_root else [])


@pytest.mark.parametrize("kind", [InputError, Diverged, EnvironmentFailure])
def test_an_error_on_the_root_is_raised_everywhere(kind, world):
    def refuse() -> None:
        raise kind("no", where="recipe", expected="yes", got="no", remedy="say yes")

    with pytest.raises(kind) as raised:
        world.on_root(refuse)
    assert str(raised.value) == "recipe: no: expected yes, got no; say yes"
    assert raised.value.exit_code == kind.exit_code
    assert world.gather("alive") == ["alive"] * world.size


def test_an_error_on_any_rank_is_raised_everywhere(world):
    last = world.size - 1

    def fail_on_the_last() -> int:
        if world.rank == last:
            raise InputError(f"of rank {world.rank}")
        return world.rank

    with pytest.raises(InputError, match=f"^of rank {last}$"):
        world.together(fail_on_the_last)
    assert world.gather("alive") == ["alive"] * world.size


def test_of_several_errors_all_raise_the_lowest_ranks(world):
    def fail() -> None:
        raise InputError(f"of rank {world.rank}")

    with pytest.raises(InputError, match=r"^of rank 0$"):
        world.together(fail)


def test_together_returns_each_ranks_own(world):
    assert world.together(lambda: world.rank) == world.rank


def test_ranks_leave_with_one_code(world, capfd):
    """The lowest rank that has something to say says it; all leave with its code."""
    last = world.size - 1
    assert world.leave(3 if world.rank == last else 0, "diverged" if world.rank == last else "") == 3
    assert capfd.readouterr().err == ("diverged\n" if world.rank == last else "")


def test_ends_within_does_nothing_to_a_block_that_ends(world):
    with world.ends_within(30.0, EnvironmentFailure("never said")):
        assert world.gather(1) == [1] * world.size


@pytest.mark.parametrize("groups", range(1, 6))
def test_a_world_splits_into_even_groups_of_neighbours(groups, world):
    if groups > world.size:
        with pytest.raises(InputError, match=f"expected 1 to {world.size}, the number of ranks, got {groups}"):
            world.split(groups)
        return
    group = world.split(groups)
    told = world.gather((world.rank * groups // world.size, group.rank, group.size))
    members = [[place for place in told if place[0] == number] for number in range(groups)]
    assert [place for own in members for place in own] == told  # neighbours
    for number, own in enumerate(members):
        assert own == [(number, rank, len(own)) for rank in range(len(own))]
    assert max(map(len, members)) - min(map(len, members)) <= 1
    value = np.array([1], dtype=np.int64)
    group.sum_in_place(value)
    assert value.item() == group.size
