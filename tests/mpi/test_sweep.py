"""A sweep leaves the same on any number of ranks in any number of groups: what each of its runs leaves alone."""

from __future__ import annotations

import pytest

import hpcfed
from hpcfed.errors import InputError
from hpcfed.lab.sweep.grid import parse_grids
from hpcfed.lab.sweep.plan import make_plan
from hpcfed.lab.sweep.run import run_sweep
from hpcfed.ranks.world import World
from tests.mpi.recipes import write_recipe, write_small
from tests.mpi.test_same_result import left_by
from tests.sweep.conftest import endings

pytestmark = pytest.mark.one_mpi


@pytest.mark.parametrize("groups", [None, 2])
def test_groups_do_not_change_what_runs_leave(groups, world, shared_tmp, monkeypatch):
    if world.is_root:
        write_small(shared_tmp, 3)
        local = {"steps": 4, "batch_size": 10, "lr": 0.1, "weight_decay": 0.1}
        write_recipe(shared_tmp, rounds=4, local=local, algorithm={"name": "scaffold"})
    world.gather(None)
    monkeypatch.chdir(shared_tmp)
    grids = parse_grids(["local.lr=0.05,0.1", "algorithm.server_lr=1,1e15"])
    plan = world.on_root(lambda: make_plan("recipe.yaml", [], grids, [3], None))
    if groups is not None and groups > world.size:
        with pytest.raises(InputError, match="groups: expected 1 to 1"):
            run_sweep(plan, world, groups, quiet=True)
        return
    assert run_sweep(plan, world, groups, quiet=True) is False
    if world.is_root:
        assert endings(plan.folder) == {"finished": 2, "diverged": 2}
        for unit in plan.units[::2]:
            overrides = [*plan.points[unit.point].overrides, "seed=3", f"output={shared_tmp / 'alone' / unit.name}"]
            alone = hpcfed.run("recipe.yaml", overrides, world=World(), quiet=True)
            assert left_by(alone) == left_by(hpcfed.Result(unit.recipe))
    world.gather(None)
