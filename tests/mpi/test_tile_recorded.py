"""The size of a tile is recorded and followed; rounds of another arithmetic are not gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hpcfed
from hpcfed.assembly import assemble, resolve
from hpcfed.assembly.remarks import remarks
from hpcfed.config.load import load_recipe
from hpcfed.errors import InputError
from hpcfed.provenance.recorded import placed_recipe, recorded
from tests.mpi.recipes import small, write_small
from tests.mpi.test_same_result import left_by

pytestmark = pytest.mark.one_mpi


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    world.on_root(lambda: write_small(shared_tmp, 6))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def recipe(output: str, rounds: int = 4, **local: Any) -> dict[str, Any]:
    work = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "batched", **local}
    return small(output, local=work, rounds=rounds, checkpoint={"every": 2}, placement="balanced")


def test_auto_is_a_number_of_the_recipe_alone(world, folder):
    result = hpcfed.run(recipe("run"), world=world, quiet=True)
    assert load_recipe(result.folder / "recipe.yaml").local.tile == 6
    assert json.loads((result.folder / "environment.json").read_text())["tile"] == 6


@pytest.mark.parametrize("tile", ["auto", 64])
def test_slots_that_are_computed_for_nothing_are_told(tile, world, folder):
    """Where they take most of a step; of this small network's six clients they do not."""
    resolved = resolve(load_recipe(recipe("run", tile=tile)))
    parts, _ = assemble(resolved, world)
    with parts.federation, parts.clients:
        found = [line for line in remarks(resolved, parts) if "computed for nothing" in line]
    what = f"tiles of 64 clients, of whom each rank trains {-(-6 // world.size)}: the other slots are computed"
    assert [line.startswith(what) for line in found] == ([] if tile == "auto" else [True])


@pytest.mark.parametrize(
    "apart", [{"engine": "sequential"}, {"engine": "auto", "noise": {"clip": 1.0, "multiplier": 1.0}}]
)
def test_a_run_whose_recipe_says_a_tile_of_one_goes_on(apart, world, folder):
    """Clients are trained one after another, with the tile in the recipe as without."""
    whole = hpcfed.run(recipe("whole", 6, **apart), world=world, quiet=True)
    hpcfed.run(recipe("parts", 4, tile=1, **apart), world=world, quiet=True)
    parts = hpcfed.run(recipe("parts", 6, tile=1, **apart), world=world, quiet=True)
    assert left_by(parts) == left_by(whole)
    assert hpcfed.run(recipe("parts", 6, **apart), world=world, quiet=True).metrics == parts.metrics  # finished already


def test_a_run_goes_on_with_the_tile_that_it_began_with(world, folder):
    whole = hpcfed.run(recipe("whole", 6, tile=2), world=world, quiet=True)
    hpcfed.run(recipe("parts", 4, tile=2), world=world, quiet=True)
    parts = hpcfed.run(recipe("parts", 6), world=world, quiet=True)
    assert left_by(parts) == left_by(whole)
    assert load_recipe(parts.folder / "recipe.yaml").local.tile == 2
    assert hpcfed.run(recipe("parts", 6), world=world, quiet=True).metrics == parts.metrics  # finished already
    with pytest.raises(InputError, match=r"another recipe's run.*local.tile 2 there and 3 here"):
        hpcfed.run(recipe("parts", 8, tile=3), world=world, quiet=True)


@pytest.mark.parametrize("in_a_file", [False, True])
def test_more_rounds_of_a_schedule_have_the_same_tile(in_a_file, world, folder):
    """The first round has one client, later ones all six."""
    rows = [[0], [0, 1, 2, 3, 4, 5], [5, 2], [1, 3, 4]]
    world.on_root(lambda: (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8"))
    schedule = {"cohort": {"schedule": "rows.json" if in_a_file else rows}, "evaluate": {"every": 0}}
    whole = hpcfed.run({**recipe("whole"), **schedule}, world=world, quiet=True)
    first = hpcfed.run({**recipe("parts", 1), **schedule}, world=world, quiet=True)
    assert load_recipe(first.folder / "recipe.yaml").local.tile == 6
    assert left_by(hpcfed.run({**recipe("parts"), **schedule}, world=world, quiet=True)) == left_by(whole)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engine": "sequential"}, "local.engine: sequential"),
        ({"batch_size": "full"}, "local.batch_size: full, and clients of different sizes"),
        ({"engine": "auto", "compile": True}, "compile: true"),
    ],
)
def test_a_tile_of_several_is_refused_where_clients_are_trained_one_by_one(changes, why, world, folder):
    """By the key that the recipe has: ``local.engine`` only where it is in there."""
    with pytest.raises(InputError, match=rf"local.tile: 3 with {why}; leave local.tile out"):
        hpcfed.run(recipe("run", tile=3, **changes), world=world, quiet=True)


def test_products_of_tiles_are_refused_by_the_key_that_has_none(world, folder):
    asked = recipe("run", engine="auto", matmul="onednn") | {"precision": "bf16-mixed"}
    with pytest.raises(InputError, match=r"local.matmul: onednn with precision: bf16-mixed; use local.matmul: blas"):
        hpcfed.run(asked, world=world, quiet=True)


@pytest.mark.thinned
def test_rounds_of_another_arithmetic_are_refused_in_one_line(world, folder, monkeypatch):
    with monkeypatch.context() as patch:
        for module in ("hpcfed.run_folder.checkpoint.layout", "hpcfed.run_folder.environment"):
            patch.setattr(f"{module}.ARITHMETIC", 1)
        hpcfed.run(recipe("old"), world=world, quiet=True)
    refused = r"rounds computed by another arithmetic.*expected arithmetic \d, this version's, got 1"
    with pytest.raises(InputError, match=refused) as error:
        hpcfed.run(recipe("old", 6), world=world, quiet=True)
    assert "\n" not in str(error.value)
    if world.is_root:
        with pytest.raises(InputError, match=refused):
            recorded(Path("old"), placed_recipe(Path("old"), None, None))
