"""Units of the sums: a float's precision at any magnitude, one word where one is enough, few repeated rounds."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcfed
from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.units import SUMMABLE, Magnitudes, Terms, Units, exact_terms, suffice, units_for
from hpcfed.reduce.weighted_update import WeightedUpdate
from tests.federations import write_federation
from tests.mpi.recipes import small

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]


def reduced(
    vectors: torch.Tensor, counts: np.ndarray, magnitudes: Magnitudes, world: World
) -> tuple[torch.Tensor, int, Units]:
    """The mean of vectors (S, d), the attempts that it took, and the units of the last one, as a round has them."""
    buffer = RoundBuffer(vectors.shape[1], vectors.dtype, CPU, world)
    units, attempts = magnitudes.predict({"delta": counts})["delta"], 0
    while True:
        attempts += 1
        buffer.open({"delta": units}, len(vectors))
        for place in range(world.rank, len(vectors), world.size):
            buffer.add(WeightedUpdate(place, float(counts[place]), {"delta": vectors[place]}, loss_sum=0.0, steps=1))
        sums = buffer.reduce(0, 0.0)
        terms = exact_terms(sums.bounds["delta"], counts, vectors.shape[1])
        if suffice(units, terms, vectors.dtype):
            magnitudes.learn(sums.bounds)
            return sums.vectors["delta"], attempts, units
        units = units_for(terms, vectors.dtype)


def errors(vectors: torch.Tensor, sizes: np.ndarray, found: torch.Tensor) -> tuple[float, float]:
    """The l2 errors, relative to the exact mean by sizes (S,), of `found` and of plain sums in the vectors' dtype."""
    weights = torch.from_numpy(sizes / sizes.sum()).to(vectors.dtype)
    plain = torch.zeros_like(vectors[0])
    for vector, weight in zip(vectors, weights, strict=True):
        plain.add_(vector * weight)
    scale = 2.0 ** -math.frexp(float(vectors.abs().max()))[1]
    columns = [[Fraction(x) * int(n) for x, n in zip(own, sizes, strict=True)] for own in (vectors.T * scale).tolist()]
    exact = [sum(column) / int(sizes.sum()) for column in columns]

    def error(mean: torch.Tensor) -> float:
        differences = [Fraction(x) - y for x, y in zip((mean.double() * scale).tolist(), exact, strict=True)]
        return math.sqrt(sum(float(d) ** 2 for d in differences) / sum(float(y) ** 2 for y in exact))

    return error(found), error(plain)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    power=st.integers(-30, 30),
    number=st.integers(2, 40),
    equal=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_mean_errs_at_most_twice_as_much_as_plain_sums(power, number, equal, dtype, seed):
    rng = np.random.default_rng(seed)
    vectors = torch.from_numpy(rng.normal(size=(number, 60)) * 10.0**power).to(dtype)
    sizes = np.full(number, 7) if equal else rng.integers(1, 1000, size=number)
    found, attempts, _ = reduced(vectors, number * sizes / sizes.sum(), Magnitudes(60, dtype), World())
    assert attempts == 1 or not -9 < power < 6
    ours, plain = errors(vectors, sizes, found)
    assert ours <= 2 * plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [-30, -8, 0, 8, 30])
def test_the_bits_are_those_of_one_rank(power, dtype, world):
    rng = np.random.default_rng(3)
    vectors = torch.from_numpy(rng.normal(size=(7, 33)) * 10.0**power).to(dtype)
    counts = 7 * rng.dirichlet(np.ones(7))
    together = reduced(vectors, counts, Magnitudes(33, dtype), world)
    alone = reduced(vectors, counts, Magnitudes(33, dtype), World())
    assert torch.equal(together[0], alone[0])
    assert together[1:] == alone[1:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1, 2, 1000, 2**20, 2**21, 2**31])
def test_no_word_can_wrap(number, dtype):
    """Each term leaves at most half a unit of a word to the next."""
    terms = Terms(total=20 + math.log2(number), largest=20, least=-20, number=number, entries=1000)
    units = units_for(terms, dtype)
    assert 2.0**terms.total / units[0] <= 2.0**SUMMABLE
    for coarse, fine in pairwise(units):
        assert number * (coarse / fine / 2 + 1) < 2.0**63


@pytest.mark.parametrize("number", [1, 2, 100, 10_000])
@pytest.mark.parametrize("entries", [1, 1000])
def test_the_coarsest_unit_is_as_precise_as_promised(number, entries):
    """u √(d |S| / 12) ≤ 2^-26 max |c_i| b_i · max(1, √|S| / 2), and no finer than exponents make it."""
    terms = Terms(total=-20, largest=0, least=0, number=number, entries=entries)
    coarsest = max(2.0**power for power in range(-80, 0) if suffice((2.0**power,), terms, torch.float32))
    found, allowed = coarsest * math.sqrt(entries * number / 12), 2.0**-26 * max(1, math.sqrt(number) / 2)
    assert allowed / 4 < found <= allowed


@pytest.mark.parametrize("largest", [-900, -960, -1060])
def test_units_end_before_float64_does(largest):
    terms = Terms(total=largest + 1, largest=largest, least=largest - 1, number=2, entries=1000)
    units = units_for(terms, torch.float64)
    assert min(units) >= 2.0**-1000
    assert suffice(units, terms, torch.float64)


def test_rounds_of_one_magnitude_take_one_word_in_float32_and_two_in_float64():
    for dtype, words in zip(DTYPES, (1, 2), strict=True):
        magnitudes, rng = Magnitudes(10**6, dtype), np.random.default_rng(0)
        seen = []
        for _ in range(30):
            (units,) = magnitudes.predict({"delta": np.ones(100)}).values()
            bounds = 0.01 * 2.0 ** rng.normal(size=100)
            assert suffice(units, exact_terms(bounds, np.ones(100), 10**6), dtype)
            magnitudes.learn({"delta": bounds})
            seen.append(len(units))
        assert seen == [words + 1] + [words] * 29


@pytest.mark.parametrize("odd", [2.0**-60, 2.0**60])
def test_a_round_of_another_size_is_forgotten(odd):
    magnitudes = Magnitudes(100, torch.float32)
    for bound in (odd, *[1.0] * 200):
        magnitudes.learn({"delta": np.array([bound])})
    (units,) = magnitudes.predict({"delta": np.ones(1)}).values()
    assert len(units) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_that_alternate_between_magnitudes_are_not_repeated_for_ever(dtype):
    magnitudes, attempts = Magnitudes(8, dtype), []
    for round in range(20):
        vectors = torch.full((3, 8), 10.0 ** (8 * (-1) ** round), dtype=dtype)
        found, took, units = reduced(vectors, np.ones(3), magnitudes, World())
        assert torch.allclose(found, vectors[0].double(), rtol=4e-16, atol=0)
        attempts.append(took)
    assert max(attempts[3:]) == 1
    assert len(units) <= 3


def test_a_vector_of_zeros_keeps_its_units_and_magnitudes_come_back_from_a_checkpoint():
    magnitudes = Magnitudes(4, torch.float32)
    magnitudes.learn({"delta": np.array([1e-9, 3e-9]), "psi": np.array([5.0, 0.0])})
    expected = magnitudes.predict({"delta": np.ones(2), "psi": np.ones(2)})
    magnitudes.learn({"delta": np.zeros(2)})
    again = Magnitudes(4, torch.float32)
    again.restore(magnitudes.state())
    assert again.predict({"delta": np.ones(2), "psi": np.ones(2)}) == expected


def test_factors_that_cancel_out_hide_no_range(world):
    """Of both signs: the words hold the terms, which are large where their sum is 0."""
    magnitudes, counts = Magnitudes(4, torch.float32), np.array([1.0, -1.0])
    small_ones, large = torch.full((2, 4), 1e-9), torch.tensor([[2.0, -1.0, 0.5, 0.25], [-2.0, 2.5, 1.5, 0.0]])
    for _ in range(60):  # until the span has left the first round's
        reduced(small_ones, counts, magnitudes, world)
    found, attempts, _ = reduced(large, counts, magnitudes, world)
    assert attempts == 2
    assert torch.equal(found, torch.tensor([2.0, -1.75, -0.5, 0.125], dtype=torch.float64))


def line(folder: Path, target: float, clients: int = 3) -> Path:
    """A regression with one feature, 1, and the same target for each of the clients' single samples."""
    one = np.ones((1, 1), np.float32)
    return write_federation(folder / "line.h5", [(one, np.full((1, 1), target, np.float32))] * clients)


def on_the_line(folder: Path, **changes: object) -> dict:
    """A recipe whose clients go from w = 0 to `target` in one step, where the step size is 1."""
    model = {"name": "linear", "bias": False, "init": str(zero(folder))}
    local = {"steps": 1, "batch_size": "full", "lr": 1.0}
    return small(folder / "run", **{"data": str(folder / "line.h5"), "model": model, "local": local, **changes})


def zero(folder: Path) -> Path:
    from safetensors.numpy import save_file

    save_file({"weight": np.zeros((1, 1), np.float32)}, folder / "zero.safetensors")
    return folder / "zero.safetensors"


@pytest.mark.serial
@pytest.mark.parametrize("skip", ["stop", "skip"])
def test_an_honest_update_may_be_large(skip, tmp_path):
    """It is nowhere near what float32 holds; a finite one is neither diverged nor skipped."""
    line(tmp_path, 1.1e6)
    result = hpcfed.run(on_the_line(tmp_path, rounds=2, on_bad_client=skip), world=World(), quiet=True)
    assert float(result.module.weight) == np.float32(1.1e6)
    assert result.metrics[0]["skipped"] == []


@pytest.mark.serial
def test_updates_may_be_small(tmp_path):
    """FedExP's step size is a ratio of norms: the same in any unit of the targets."""
    found = []
    for target in (1.0, 1e-6, 1e-10):
        folder = tmp_path / str(target)
        folder.mkdir()
        samples = [(np.array([[x]], np.float32), np.array([[y * target]], np.float32)) for x, y in ((1, 2), (0.5, -3))]
        write_federation(folder / "line.h5", samples)
        algorithm = {"name": "fedexp", "eps": 1e-30}
        result = hpcfed.run(on_the_line(folder, rounds=1, algorithm=algorithm), world=World(), quiet=True)
        found.append(result.metrics[0]["server_lr"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    assert found[0] > 1


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.deadline(900)
def test_two_million_clients_agree(tmp_path):
    """Each moves by 1: with a fixed ratio of words, 2^21 remainders of half a unit wrapped the low one to 0."""
    number = 2**21
    write_federation(tmp_path / "line.h5", [(np.ones((number, 1)), np.ones((number, 1)))])
    with h5py.File(tmp_path / "line.h5", "a") as file:
        del file["train/offsets"]
        file["train/offsets"] = np.arange(number + 1)
    changes = {"dtype": "float64", "rounds": 1, "evaluate": {"every": 0}}
    result = hpcfed.run(on_the_line(tmp_path, **changes), world=World(), quiet=True)
    assert float(result.module.weight) == 1.0
    assert result.metrics[0]["delta_sq"] == result.metrics[0]["mean_delta_sq"] == 1.0
