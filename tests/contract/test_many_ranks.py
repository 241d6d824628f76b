"""What every rank computes for all of them, at 4,096 ranks: homes, placement, devices, and the reduction's size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from hpcfed.ranks.devices import RankDevices, assign
from hpcfed.ranks.placement import Placement, homes, spread
from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.slots import RANK_SLOT, client_slot
from hpcfed.reduce.weighted_update import WeightedUpdate

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]
RANKS, PER_NODE = 4096, 8


class Many(World):
    """The last of many ranks, which all others leave alone: sums are what it adds."""

    rank, size = RANKS - 1, RANKS


def sizes_of(count: int) -> np.ndarray:
    """Clients' samples, (count,), a few of them very large."""
    return np.random.default_rng(0).lognormal(4, 1, count).astype(np.int64) + 1


def test_homes_of_a_million_clients_differ_by_one_client_at_most() -> None:
    sizes = sizes_of(1_000_000)
    load = np.bincount(homes(sizes, RANKS), weights=sizes, minlength=RANKS)
    assert load.max() - load.min() <= sizes.max()


@pytest.mark.parametrize("cohort", [100, 4096, 9000])
def test_a_cohort_is_spread_evenly(cohort: int) -> None:
    work = sizes_of(cohort)
    placed = spread(work, homes(work, RANKS), RANKS)
    load = np.bincount(placed, weights=work, minlength=RANKS)
    assert load.max() <= work.sum() / RANKS + work.max()
    if cohort < RANKS:
        assert max(Counter(placed).values()) == 1


def test_placement_learns_from_thousands_of_ranks() -> None:
    """Every second rank is half as fast; with what one round shows, the slow ones get fewer of equal clients."""
    clients, speeds = np.arange(4 * RANKS), np.where(np.arange(RANKS) % 2, 1.0, 2.0)
    samples, steps = np.full(len(clients), 100), np.full(len(clients), 10)
    placement = Placement(homes(samples, RANKS), RANKS, balanced=True)
    for _ in range(3):
        placed = np.asarray(placement.place(clients, samples, steps))
        load = np.bincount(placed, minlength=RANKS)
        placement.learn(placed.tolist(), samples, steps, load / speeds)
    assert load[::2].sum() > 1.5 * load[1::2].sum()


@pytest.mark.parametrize("dealt", [False, True], ids=["in blocks", "dealt round"])
def test_each_gpu_of_512_nodes_gets_one_rank(dealt: bool) -> None:
    nodes = np.arange(RANKS) % (RANKS // PER_NODE) if dealt else np.arange(RANKS) // PER_NODE
    gpus = tuple(f"GPU-{index}" for index in range(PER_NODE))
    slots = assign([RankDevices(f"n{node}", gpus) for node in nodes])
    assert {(slot.sharing, slot.neighbours) for slot in slots} == {(1, PER_NODE)}
    taken = Counter((int(node), slot.index) for node, slot in zip(nodes, slots, strict=True))
    assert len(taken) == RANKS


def test_a_round_of_the_last_of_many_ranks() -> None:
    """Slots are 40 bytes a rank and some 50 a client; the sums are where they are in a world of one."""
    assert RANK_SLOT.itemsize * RANKS == 40 << 12
    buffer = RoundBuffer(64, torch.float32, torch.device("cpu"), Many())
    vectors, clients, ranks = buffer.sizes([1], 10_000)
    assert (vectors, 8 * clients, 8 * ranks) == (64, 10_000 * client_slot(1).itemsize, 40 << 12)
    buffer.open({"delta": (2.0**-30,)}, 2)
    buffer.add(WeightedUpdate(1, 1.0, {"delta": torch.full((64,), 0.5)}, loss_sum=3.0, steps=4))
    sums = buffer.reduce(77, 0.25, requests=1, written=2)
    assert sums.vectors["delta"].tolist() == [0.25] * 64
    assert (sums.hashes[-1], sums.hashes[:-1].any(), sums.local_seconds[-1]) == (77, False, 0.25)
    assert sums.steps.tolist() == [0, 4]
