"""The sums of a round: the same bits in any order and any split over ranks, and within half a unit per client."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.exact import BLOCK, ExactSum, to_float64
from hpcfed.reduce.slots import DONE, FAILED
from hpcfed.reduce.weighted_update import WeightedUpdate

CLIENTS = 24
UNITS = {torch.float32: (2.0**-44,), torch.float64: (2.0**-20, 2.0**-64)}
"""That fit these contributions."""


def contributions(dtype: torch.dtype, size: int = 300) -> tuple[list[torch.Tensor], list[float]]:
    """Vectors of magnitudes from 1e-8 to 1e3, and weights, the same on every rank."""
    rng = np.random.default_rng(5)
    scales = 10.0 ** rng.uniform(-8, 3, size=(CLIENTS, size))
    vectors = [torch.from_numpy(row).to(dtype) for row in rng.normal(size=(CLIENTS, size)) * scales]
    return vectors, (rng.dirichlet(np.ones(CLIENTS))).tolist()


def integers(dtype: torch.dtype, size: int) -> torch.Tensor:
    return torch.zeros(len(UNITS[dtype]), size, dtype=torch.int64)


def summed(dtype: torch.dtype, vectors: list[torch.Tensor], weights: list[float], order: np.ndarray) -> torch.Tensor:
    total = ExactSum(integers(dtype, vectors[0].numel()), UNITS[dtype])
    for place in order:
        total.add(vectors[place], weights[place])
    total.settle()
    return total.integers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_order_does_not_matter(dtype):
    vectors, weights = contributions(dtype)
    rng = np.random.default_rng(6)
    sums = [summed(dtype, vectors, weights, rng.permutation(CLIENTS)) for _ in range(5)]
    assert all(torch.equal(sums[0], other) for other in sums[1:])


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 2.0**10), (torch.float64, 2.0**35)])
def test_both_ways_of_rounding_agree(dtype, large):
    """One entry too large for the addition sends its whole vector through the conversion."""
    rng = np.random.default_rng(8)
    size = BLOCK + 7
    vector = torch.from_numpy(rng.normal(size=size) * 10.0 ** rng.uniform(-15, 1, size=size)).to(dtype)
    with_large = vector.clone()
    with_large[3] = large
    found = [summed(dtype, [v, v], [0.3, 0.7], np.arange(2)) for v in (vector, with_large)]
    same = torch.arange(size) != 3
    assert torch.equal(found[0][:, same], found[1][:, same])
    assert float(to_float64(found[1], UNITS[dtype])[3]) == pytest.approx(large, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_split_over_ranks_does_not_matter(dtype, world):
    vectors, weights = contributions(dtype)
    owner = np.random.default_rng(7).integers(world.size, size=CLIENTS)
    mine = summed(dtype, vectors, weights, np.flatnonzero(owner == world.rank))
    world.sum_in_place(mine.numpy())
    assert torch.equal(mine, summed(dtype, vectors, weights, np.arange(CLIENTS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_is_right_to_half_a_unit_per_client(dtype):
    """Each product p_i·x is one float64 rounding, the same here; the result's own rounding is half its last place."""
    vectors, weights = contributions(dtype)
    found = to_float64(summed(dtype, vectors, weights, np.arange(CLIENTS)), UNITS[dtype])
    products = [[float(x) * p for x in vector] for vector, p in zip(vectors, weights, strict=True)]
    for place, terms in enumerate(zip(*products, strict=True)):
        exact = math.fsum(terms)
        assert abs(float(found[place]) - exact) <= CLIENTS * UNITS[dtype][-1] / 2 + math.ulp(exact)


def test_norms_and_largest_entries_are_those_of_the_vector():
    vector = torch.linspace(-2, 1, BLOCK + 11)
    squared, largest = ExactSum(integers(torch.float32, BLOCK + 11), UNITS[torch.float32]).add(vector, 0.25)
    assert squared == pytest.approx(float(np.square(vector.numpy().astype(np.longdouble)).sum()), rel=1e-12)
    assert largest == 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_exact_sum_of_a_nonfinite_entry_is_not_finite(bad):
    vector = torch.ones(2 * BLOCK)  # in the first of two blocks
    vector[3] = bad
    _, largest = ExactSum(integers(torch.float32, len(vector)), UNITS[torch.float32]).add(vector, 0.5)
    assert not math.isfinite(largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rank_learns_every_clients_scalars_exactly(dtype, world):
    """Losses of either sign, −0.0 and NaN, from whichever rank trained the client."""
    size, losses = 16, [-1.25, 0.1, -0.0, math.nan, 1e300, 5e-324, -math.inf]
    buffer = RoundBuffer(size, dtype, torch.device("cpu"), world)
    for _ in range(2):  # the second round must find nothing of the first
        buffer.open({"delta": UNITS[dtype], "other": UNITS[dtype]}, len(losses) + 1)
        for place, loss in enumerate(losses):
            if place % world.size == world.rank:
                vector = torch.full((size,), place - 3.0, dtype=dtype)
                vectors = {"delta": vector, "other": 2 * vector}
                buffer.add(WeightedUpdate(place, 0.5, vectors, loss_sum=loss, steps=place + 7))
        if world.rank == world.size - 1:
            buffer.fail(len(losses))
        sums = buffer.reduce(state_hash=-5 - world.rank, local_seconds=0.125 * world.rank, requests=1 << world.rank)
        told = sums.loss_sum[:-1].view(np.int64).tolist()
        assert told == np.array(losses).view(np.int64).tolist()
        assert sums.status.tolist() == [DONE] * len(losses) + [FAILED]
        assert sums.steps.tolist() == [*range(7, 7 + len(losses)), 0]
        assert sums.delta_sq[:-1].tolist() == [size * (place - 3.0) ** 2 for place in range(len(losses))]
        assert sums.bounds["delta"][:-1].tolist() == [abs(place - 3.0) for place in range(len(losses))]
        assert sums.bounds["other"].tolist() == [*(2 * abs(place - 3.0) for place in range(len(losses))), 0.0]
        assert sums.hashes.tolist() == [-5 - rank for rank in range(world.size)]
        assert sums.requests.tolist() == [1 << rank for rank in range(world.size)]
        assert sums.local_seconds.tolist() == [0.125 * rank for rank in range(world.size)]
        total = sum(0.5 * (place - 3.0) for place in range(len(losses))) / (len(losses) + 1)
        assert sums.vectors["delta"].tolist() == [total] * size
        assert sums.vectors["other"].tolist() == [2 * total] * size


def test_a_vector_that_is_not_finite_marks_its_client_whichever_vector_it_is(world):
    buffer = RoundBuffer(8, torch.float32, torch.device("cpu"), world)
    buffer.open(dict.fromkeys(("delta", "other"), (2.0**-40,)), 2)
    if world.is_root:
        bad = torch.full((8,), math.nan)
        buffer.add(WeightedUpdate(0, 0.5, {"delta": torch.ones(8), "other": bad}, loss_sum=0.0, steps=1))
        buffer.add(WeightedUpdate(1, 0.5, {"delta": torch.ones(8), "other": torch.ones(8)}, loss_sum=0.0, steps=1))
    bounds = buffer.reduce(0, 0.0).bounds
    assert {name: np.isfinite(own).tolist() for name, own in bounds.items()} == {
        "delta": [True, True],
        "other": [False, True],
    }


def test_a_factor_counts_for_the_first_vector_alone(world):
    """FedNova's: it multiplies Δ_i and its norm, not what else a client reports.

    Rounds may differ in what they sum, and in the words of each vector.
    """
    buffer = RoundBuffer(8, torch.float64, torch.device("cpu"), world)
    for units in ({"delta": (1.0,)}, {"delta": (0.5, 2.0**-50), "other": (0.5,)}, {"delta": (2.0**-40,)}):
        buffer.open(units, 1)
        if world.is_root:
            vectors = {"delta": torch.full((8,), 2.0).double(), "other": torch.full((8,), 5.0).double()}
            buffer.add(WeightedUpdate(0, 0.5, vectors, factor=3.0, loss_sum=0.0, steps=1))
        sums = buffer.reduce(0, 0.0)
        assert {name: vector.tolist() for name, vector in sums.vectors.items()} == {
            name: [{"delta": 3.0, "other": 2.5}[name]] * 8 for name in units
        }
        assert sums.delta_sq.tolist() == [8 * 36.0]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("exact", torch.float32), ("exact", torch.float64), ("fast", torch.float32)]
)
@pytest.mark.parametrize("trained", [CLIENTS, 0])
def test_sums_in_pieces_are_those_of_the_whole(kind, dtype, trained, world):
    """As they are reduced from a GPU, which only the copies need."""
    vectors, weights = contributions(dtype)
    found = []
    for piece_bytes in (0, 7 * 8):
        buffer = RoundBuffer(len(vectors[0]), dtype, torch.device("cpu"), world, kind=kind)
        buffer._piece_bytes = piece_bytes
        buffer.open({"delta": UNITS[dtype], "other": (2.0**-10, 2.0**-45)}, CLIENTS)
        for place in range(trained):
            if place % world.size == world.rank:
                reported = {"delta": vectors[place], "other": -vectors[place]}
                buffer.add(WeightedUpdate(place, weights[place], reported, loss_sum=0.5 * place, steps=place))
        found.append(buffer.reduce(7, 0.0))
    whole, pieces = found
    assert pieces.steps.tolist() == whole.steps.tolist() == [*range(trained), *[0] * (CLIENTS - trained)]
    assert pieces.hashes.tolist() == [7] * world.size
    for name, vector in whole.vectors.items():
        if kind == "exact":
            assert torch.equal(pieces.vectors[name], vector)
        else:  # MPI may add in another order where a message has another size
            assert torch.allclose(pieces.vectors[name], vector, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 300])
@pytest.mark.parametrize("large", [None, 2.0**17])
def test_vectors_added_together_have_the_bits_of_those_added_one_by_one(dtype, size, large):
    """For any number and order, the one with an entry too large for the quick way of rounding included."""
    vectors, weights = contributions(dtype, size)
    if large:
        vectors[3][0] = large
    one_by_one = ExactSum(integers(dtype, size), UNITS[dtype])
    told = [one_by_one.add(vector, weight) for vector, weight in zip(vectors, weights, strict=True)]
    one_by_one.settle()
    for order in (np.arange(CLIENTS), np.random.default_rng(2).permutation(CLIENTS)):
        together = ExactSum(integers(dtype, size), UNITS[dtype])
        for part in np.split(order, [1, 5, 6]):
            for row, place in enumerate(part):
                together.rows.put(row, vectors[place])
            squared, largest = together.add_rows(np.array(weights)[part])
            assert list(zip(squared.tolist(), largest.tolist(), strict=True)) == [told[place] for place in part]
        together.settle()
        assert torch.equal(together.integers, one_by_one.integers)
