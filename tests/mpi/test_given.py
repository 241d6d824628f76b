"""Objects given from Python, which each rank makes by itself, are rank 0's on all ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import hpcfed
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from tests.mpi.recipes import small
from tests.mpi.test_same_result import folder  # noqa: F401 (a fixture)

pytestmark = pytest.mark.one_mpi


@pytest.mark.usefixtures("folder")
def test_a_module_that_differs_between_ranks_is_rank_0s(world):
    torch.manual_seed(world.rank)
    net = nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 4))
    first = world.broadcast(net[0].weight.detach().numpy())
    recipe = small("run", model=net, local={"steps": 1, "lr": 1e-30}, rounds=1)
    result = hpcfed.run(recipe, world=world, quiet=True)
    assert (result.module[0].weight.detach().numpy() == first).all()
    text = world.on_root(lambda: json.loads((result.folder / "code.json").read_text())["files"]["from_python"]["text"])
    assert result.given.text == text


@pytest.mark.usefixtures("folder")
def test_what_one_rank_alone_refuses_ends_all(world):
    loss = nn.KLDivLoss() if world.rank == world.size - 1 else nn.CrossEntropyLoss()
    with pytest.raises(InputError, match="one loss per sample"):
        hpcfed.run(small("run", loss=loss), world=world, quiet=True)


@pytest.mark.usefixtures("folder")
def test_samples_are_those_of_rank_0_written_once(world):
    rng = np.random.default_rng(world.rank)
    clients = {name: (rng.normal(size=(9, 3)), np.arange(9) % 2) for name in "abc"}
    recipe = small("given", data=None, model="logistic", rounds=2, cohort=2)
    result = hpcfed.run(recipe, data=clients if world.is_root else None, world=world, quiet=True)
    found = world.broadcast((str(result.recipe.data), world.is_root and [*result.recipe.data.parent.iterdir()]))
    assert found == (str(result.recipe.data), [result.recipe.data])
    first = np.random.default_rng(0).normal(size=(9, 3))
    with Federation.open(result.recipe.data) as federation:
        assert (np.asarray(federation.train()[0][:9]) == first).all()
    with pytest.raises(InputError, match="samples without their clients"):
        hpcfed.run(recipe, data=first if world.is_root else clients, world=world, quiet=True)
