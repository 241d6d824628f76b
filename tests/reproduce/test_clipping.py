"""``jobs.bench.clipping``: a clip that is reached is found, and one that is not says so."""

from __future__ import annotations

import pytest

from hpcfed.lab.reproduce.catalogue import experiments
from hpcfed.lab.reproduce.inputs import Places, prepare
from hpcfed.lab.reproduce.plan import lay_out
from jobs.bench.clipping import compare


@pytest.mark.serial
def test_a_clip_is_found_where_it_is_reached(tmp_path):
    experiment, places = experiments()["feddyn-synthetic"].limited(["models"]), Places(tmp_path)
    list(prepare(experiment.cases["models"].data, 0, places))
    unit, *_ = lay_out(experiment.model_copy(update={"seeds": 1}), "full", places, 2, methods=["fedprox"]).plan.units
    strong = unit.recipe.algorithm.model_copy(update={"mu": 1.0})
    found = {}
    for norm in (10.0, 0.1):
        local = unit.recipe.local.model_copy(update={"epochs": 1, "clip_norm": norm})
        found[norm] = compare(unit.recipe.model_copy(update={"local": local, "algorithm": strong}))
    assert found[10.0][0] is None
    assert found[10.0][1] < 1e-4
    assert found[0.1][0] == 1
    assert found[0.1][1] > 1e-2
