"""Random streams are addressed, not advanced; every client has one home, and work is spread fairly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpcfed.placement import homes, spread
from hpcfed.rng import Purpose, stream, torch_seed

ADDRESSES = [
    *itertools.product((0, 1, 2**63 - 1), Purpose, (0, 1, 2), (0, 1, 2)),
    (0, Purpose.BATCHES, 10**9, 10**9),
]


def test_a_stream_does_not_depend_on_what_was_drawn_before():
    first = {address: stream(*address).random(5).tolist() for address in ADDRESSES}
    stream(0, Purpose.MODEL).random(10_000)
    again = {address: stream(*address).random(5).tolist() for address in reversed(ADDRESSES)}
    assert first == again


def test_streams_of_different_addresses_differ():
    draws = {tuple(stream(*address).integers(2**63, size=4).tolist()) for address in ADDRESSES}
    assert len(draws) == len(ADDRESSES)
    assert len({torch_seed(*address) for address in ADDRESSES}) == len(ADDRESSES)


def test_a_long_stream_does_not_run_into_its_neighbour():
    mine = set(stream(0, Purpose.BATCHES, 1, 1).integers(2**63, size=20_000).tolist())
    for neighbour in ((1, 2), (2, 1)):
        assert mine.isdisjoint(stream(0, Purpose.BATCHES, *neighbour).integers(2**63, size=20_000).tolist())


def test_the_numbers_of_the_purposes_never_change():
    """They are part of every result."""
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        "MODEL": 1,
        "COHORT": 2,
        "BATCHES": 3,
        "BUDGET": 4,
        "DROPOUT": 5,
        "AUGMENT": 6,
        "TUNING_BATCHES": 7,
        "TUNING_DROPOUT": 8,
    }
    assert stream(7, Purpose.COHORT, 3, 2).integers(2**32, size=3).tolist() == [4099395486, 1673106716, 428939887]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 40])
def test_every_client_has_one_home_and_ranks_differ_by_one_clients_samples(num_ranks):
    sizes = np.random.default_rng(1).integers(0, 500, size=31)
    home = homes(sizes, num_ranks)
    assert home.shape == sizes.shape
    assert 0 <= home.min() <= home.max() < num_ranks
    load = np.bincount(home, weights=sizes, minlength=num_ranks)
    assert load.max() - load.min() <= sizes.max()
    clients = np.bincount(home, minlength=num_ranks)
    assert clients.max() - clients.min() <= 1


@pytest.mark.parametrize("home", [[0] * 10, [1] * 10, [0, 1] * 5, [0] * 9 + [1]])
def test_equal_clients_are_spread_evenly_wherever_they_are_at_home(home):
    chosen = spread([20] * 10, home, 2)
    assert (chosen.count(0), chosen.count(1)) == (5, 5)


def test_clients_stay_at_home_where_that_is_fair():
    assert spread([5, 5, 5, 5], [1, 0, 1, 0], 2) == [1, 0, 1, 0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 12])
def test_no_rank_has_more_than_a_fair_share_and_one_client(num_ranks):
    rng = np.random.default_rng(2)
    for _ in range(20):
        costs = rng.integers(1, 100, size=rng.integers(1, 20)).tolist()
        chosen = spread(costs, rng.integers(num_ranks, size=len(costs)).tolist(), num_ranks)
        load = np.bincount(chosen, weights=costs, minlength=num_ranks)
        assert load.sum() == sum(costs)
        assert load.max() <= sum(costs) / num_ranks + max(costs)
