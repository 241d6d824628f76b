"""Recipes at random leave, on all ranks and resumed on other numbers of ranks, what they leave alone.

HPCFED_SEEDS=1000:1100 python -m pytest tests/mpi/test_drawn.py         # others than those of the suite
"""

from __future__ import annotations

import os

import pytest

import hpcfed
from hpcfed.ranks.world import World
from tests.mpi.drawn import write_drawn
from tests.mpi.test_same_result import left_by

USUAL, MANY = range(6), range(6, 400)


def seeds() -> list[object]:
    """Seeds of the suite, and those of the soak."""
    if asked := os.environ.get("HPCFED_SEEDS"):
        first, last = map(int, asked.split(":"))
        return list(range(first, last))
    of_every_mpi = {seed: [] if seed % 4 == 0 else [pytest.mark.one_mpi] for seed in USUAL}
    return [
        *(pytest.param(seed, marks=of_every_mpi[seed]) for seed in USUAL),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in MANY),
    ]


@pytest.mark.parametrize("seed", seeds())
def test_a_drawn_recipe_is_the_same_as_alone(seed, world, shared_tmp):
    """In one go on all ranks; and on all after the first rounds on one, or the other way round."""
    recipe = world.on_root(lambda: write_drawn(shared_tmp, seed))
    is_last = world.rank == world.size - 1

    def run(name: str, where: World, **changes: object) -> tuple:
        return left_by(hpcfed.run({**recipe, **changes, "output": str(shared_tmp / name)}, world=where, quiet=True))

    together, alone = run("together", world), None
    if is_last:
        alone = run("alone", World())
        assert together == alone
    before, rounds = {"rounds": recipe["rounds"] - 1, "checkpoint": {"every": 1}}, {"checkpoint": {"every": 1}}
    first_alone = seed % 2 == 0
    if first_alone:
        world.on_root(lambda: run("resumed", World(), **before) and None)
        assert run("resumed", world, **rounds) == together
    else:
        run("resumed", world, **before)
        world.on_root(lambda: _check(run("resumed", World(), **rounds), together))


def _check(found: tuple, expected: tuple) -> None:
    assert found == expected
