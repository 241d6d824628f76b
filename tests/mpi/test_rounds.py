"""`hpcfed.rounds`: a loop over the rounds changes nothing, and where one rank leaves it, all stop with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hpcfed
from tests.mpi.recipes import small
from tests.mpi.test_same_result import folder, left_by  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.one_mpi, pytest.mark.usefixtures("folder")]
BATCHNORM = {"model": {"factory": "tests.mpi.nets:mlp"}, "parameters": {"buffers": "averaged"}}


def test_a_loop_changes_nothing(world):
    changes = {**BATCHNORM, "cohort": 2}
    plain = hpcfed.run(small("plain", **changes), world=world, quiet=True)
    seen = []
    for each in hpcfed.rounds(small("seen", **changes), world=world):
        seen.append(each)
        torch.manual_seed(each.number)
        torch.rand(3)
        for tensor in each.parameters.values():
            tensor.zero_()
        each.metrics.clear()
        each.cohort.clear()
    assert [each.number for each in seen] == [1, 2, 3]
    result = hpcfed.run(small("seen", **changes), world=world, quiet=True)
    assert left_by(result) == left_by(plain)
    lines = str(result).splitlines()
    assert lines[0].endswith("fedavg, 3 rounds")
    assert "after round 3" in lines[1]
    assert lines[2] == str(result.folder)
    assert result.plot().axes


def test_a_loop_that_is_left_goes_on_later(world):
    whole = hpcfed.run(small("whole"), world=world, quiet=True)
    for each in hpcfed.rounds(small("left"), world=world):
        if each.number == 2 and world.rank == world.size - 1:
            break  # on one rank alone
        assert each.number <= 2
    world.barrier()
    status = world.on_root(lambda: json.loads(Path("left/result.json").read_text()))
    assert (status["status"], status["rounds"]) == ("stopped", 2)
    rest = [(each.number, str(each), each.parameters) for each in hpcfed.rounds(small("left"), world=world)]
    assert [number for number, *_ in rest] == [3]
    assert "round 3: 5 clients" in rest[0][1]
    result = hpcfed.run(small("left"), world=world, quiet=True)
    assert left_by(result) == left_by(whole)
    trained = dict(result.module.named_parameters())
    assert all(torch.equal(tensor, trained[name]) for name, tensor in rest[0][2].items())
    assert not list(hpcfed.rounds(small("left"), world=world))
