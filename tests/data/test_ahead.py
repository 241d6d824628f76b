"""The next cohort's data are read from disk while a round trains."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcfed.cohort import Cohorts
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from tests.federations import write_federation
from tests.mpi.recipes import small

FEATURES, SAMPLES, CLIENTS = 1024, 512, 6  # 2 MiB a client


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Clients whose data no memory holds yet, unless the file system is memory itself."""
    samples = [(np.full((SAMPLES, FEATURES), k, np.float32), np.full(SAMPLES, k, np.float64)) for k in range(CLIENTS)]
    path = write_federation(tmp_path / "large.h5", samples)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return Federation.open(path)


def in_memory(federation: Federation, client: int) -> bool:
    """Whether the page in the middle of a client's samples can be had without a disk; looking does not fetch it."""
    mapped, page = np.memmap(federation.path, mode="r"), mmap.PAGESIZE
    place = (2 * client + 1) * SAMPLES * FEATURES * 2 // page * page
    found = ctypes.c_ubyte()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(mapped.ctypes.data + place), ctypes.c_size_t(page), ctypes.byref(found)):
        raise OSError(ctypes.get_errno(), "mincore")
    return bool(found.value & 1)


def test_what_is_expected_is_read_and_nothing_else(federation):
    before = in_memory(federation, 1)
    federation.expect([4])
    deadline = time.monotonic() + 10
    while not in_memory(federation, 4):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert in_memory(federation, 1) == before


def test_once_all_samples_are_held_nobody_asks_who_comes_next(federation):
    shards, asked = Shards(federation, torch.float32, torch.device("cpu"), 1 << 30), []

    def expected(*clients: int) -> list[int]:
        def comes_next() -> tuple[int, ...]:
            asked.append(clients)
            return clients

        shards.expect(comes_next)
        return asked

    expected(0, 1)
    shards.client(0)
    expected(1)
    shards.client(0)
    assert expected(2) == [(0, 1), (1,)]


@pytest.mark.parametrize("cohort", [{"size": 3}, {"fraction": 0.5, "sampling": "bernoulli"}])
def test_who_comes_after_a_round(cohort):
    sections = small(None, cohort=cohort, rounds=4)
    recipe = Recipe.model_validate({**sections, "name": "small", "data": Path("small.h5"), "output": Path("run")})
    recorded = recipe.model_dump(mode="json")  # as 0.1.0 wrote it, so that its runs go on
    assert not {"stream", "lr_schedule"} & {*recorded["cohort"], *recorded["local"]}
    cohorts = Cohorts(recipe, np.full(9, 20))
    for number in range(1, 4):
        clients, steps = cohorts.after(number)
        following = cohorts.round(number + 1)
        assert (clients.tolist(), steps.tolist()) == (following.clients.tolist(), following.steps.tolist())
    assert [len(part) for part in cohorts.after(4)] == [0, 0]
    assert cohorts.draws == pytest.approx(4 * (3 / 9 if "size" in cohort else 0.5 / (1 - 0.5**9)))


def test_budgets_are_drawn_for_each_round_and_client():
    """Evenly from low to high; a client has the same ones whoever else is drawn."""

    def drawn(cohort: dict[str, float]) -> Cohorts:
        sections = small(None, cohort=cohort, budget={"low": 2, "high": 5}, rounds=200)
        recipe = Recipe.model_validate({**sections, "name": "small", "data": Path("small.h5"), "output": Path("run")})
        return Cohorts(recipe, np.full(9, 20))

    some, every = drawn({"size": 3}), drawn({"fraction": 1.0})
    steps = np.array([every.round(number).steps for number in range(1, 201)])
    np.testing.assert_allclose(np.bincount(steps.ravel()) / steps.size, [0, 0, *[0.25] * 4], atol=0.05)
    assert len(np.unique(steps, axis=0)) > 190  # of 4^9 rows, two may be the same
    assert len(np.unique(steps, axis=1).T) == 9
    for number in range(1, 201):
        assert some.round(number).steps.tolist() == steps[number - 1][some.round(number).clients].tolist()


def test_budgets_of_a_schedule_stay_with_their_clients_where_one_is_left_out(tmp_path):
    (tmp_path / "budgets.json").write_text("[[5, 6, 7], [8, 9]]")
    cohort, budget = {"schedule": [[0, 1, 2], [2, 3]], "without": [1]}, {"schedule": tmp_path / "budgets.json"}
    sections = small(None, cohort=cohort, budget=budget, rounds=2)
    recipe = Recipe.model_validate({**sections, "name": "small", "data": Path("small.h5"), "output": Path("run")})
    rounds = [Cohorts(recipe, np.full(9, 20)).round(number) for number in (1, 2)]
    assert [one.clients.tolist() for one in rounds] == [[0, 2], [2, 3]]
    assert [one.steps.tolist() for one in rounds] == [[5, 7], [8, 9]]


def test_cohorts_of_feddyns_code():
    """Round t tries the seeds t − 1, t, … of NumPy's old generator until somebody is drawn, so it repeats cohorts."""

    def drawn(number: int) -> list[int]:
        seed = 7 + number - 1
        while True:
            np.random.seed(seed)  # noqa: NPY002
            chosen = np.sort(np.where(np.random.uniform(size=100) <= 0.01)[0])  # noqa: NPY002
            if len(chosen) != 0:
                return chosen.tolist()
            seed += 1

    cohort = {"fraction": 0.01, "sampling": "bernoulli", "stream": "authors"}
    sections = small(None, cohort=cohort, rounds=300, seed={"cohort": 7})
    recipe = Recipe.model_validate({**sections, "name": "small", "data": Path("small.h5"), "output": Path("run")})
    cohorts = Cohorts(recipe, np.full(100, 20))
    ours = [cohorts.round(number).clients.tolist() for number in range(1, 301)]
    assert ours == [drawn(number) for number in range(1, 301)]
    assert 0.3 < np.mean([one == two for one, two in itertools.pairwise(ours)]) < 0.45
    assert cohorts.draws == pytest.approx(sum(map(len, ours)) / 100, rel=0.1)  # the mean over clients, of 300 rounds


def test_how_often_a_schedule_draws_a_client(tmp_path):
    (tmp_path / "schedule.json").write_text("[[0, 1], [2], [0, 3, 5], [4, 6, 7, 8]]")
    sections = small(None, cohort={"schedule": tmp_path / "schedule.json"}, rounds=3)
    recipe = Recipe.model_validate({**sections, "name": "small", "data": Path("small.h5"), "output": Path("run")})
    assert Cohorts(recipe, np.full(9, 20)).draws == pytest.approx(6 / 9)
