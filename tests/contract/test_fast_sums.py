"""``reduction: fast``: sums as good as float32 makes them, exact scalars, and a record that says so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import hpcfed
from hpcfed.config.load import load_recipe
from hpcfed.errors import Diverged, InputError
from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.fast import BLOCK, FastSum
from hpcfed.reduce.slots import DONE, FAILED
from hpcfed.reduce.weighted_update import WeightedUpdate
from tests.mpi.recipes import small, write_small

SIZE = BLOCK + 7
CPU = torch.device("cpu")


def test_sums_and_norms_are_right_to_single_precision(world):
    vectors = torch.from_numpy(np.random.default_rng(3).normal(size=(5, SIZE)).astype(np.float32))
    buffer = RoundBuffer(SIZE, torch.float32, CPU, world, kind="fast")
    for _ in range(2):  # the second round must find nothing of the first
        buffer.open({"delta": ()}, len(vectors))
        for place, vector in enumerate(vectors):
            if place % world.size == world.rank:
                buffer.add(WeightedUpdate(place, 0.2, {"delta": vector}, loss_sum=0.0, steps=1))
        sums = buffer.reduce(0, 0.0)
        exact = 0.2 * vectors.double().mean(0)
        assert sums.vectors["delta"].dtype == torch.float64
        assert torch.allclose(sums.vectors["delta"], exact, rtol=0, atol=1e-6)
        assert sums.delta_sq == pytest.approx(vectors.double().square().sum(1).numpy(), rel=1e-5)
        assert (sums.bounds["delta"] >= vectors.abs().amax(1).numpy()).all()


def test_every_rank_learns_every_clients_scalars_exactly(world):
    losses = [-1.25, 0.1, -0.0, math.nan, 1e300, 5e-324, -math.inf]
    buffer = RoundBuffer(16, torch.float32, CPU, world, kind="fast")
    buffer.open({"delta": ()}, len(losses) + 1)
    for place, loss in enumerate(losses):
        if place % world.size == world.rank:
            buffer.add(WeightedUpdate(place, 0.5, {"delta": torch.ones(16)}, loss_sum=loss, steps=2**40 + place))
    if world.rank == world.size - 1:
        buffer.fail(len(losses))
    sums = buffer.reduce(state_hash=-(2**62) - world.rank, local_seconds=0.1 + world.rank)
    assert sums.loss_sum[:-1].view(np.int64).tolist() == np.array(losses).view(np.int64).tolist()
    assert sums.status.tolist() == [DONE] * len(losses) + [FAILED]
    assert sums.steps.tolist() == [*(2**40 + place for place in range(len(losses))), 0]
    assert sums.hashes.tolist() == [-(2**62) - rank for rank in range(world.size)]
    assert sums.local_seconds.tolist() == [0.1 + rank for rank in range(world.size)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_fast_sum_of_a_nonfinite_entry_is_not_finite(bad):
    vector = torch.ones(SIZE)
    vector[3] = bad
    _, bound = FastSum(torch.zeros(1, SIZE)).add(vector, 0.5)
    assert not math.isfinite(bound)


@pytest.mark.serial
def test_a_run_says_that_its_bits_are_not_promised(tmp_path: Path):
    data = write_small(tmp_path)
    models = {}
    for kind in ("exact", "fast"):
        recipe = small(tmp_path / kind, data=str(data), algorithm={"name": "fedexp"}, reduction=kind)
        run = hpcfed.run(recipe, world=World(), quiet=True)
        told = json.loads((run.folder / "environment.json").read_text())
        assert (told["reduction"]["kind"], told["bitwise"]) == (kind, kind == "exact")
        assert (told["bitwise_why_not"] is None) == (kind == "exact")
        models[kind] = torch.cat([parameter.detach().flatten() for parameter in run.module.parameters()])
    assert torch.allclose(models["fast"], models["exact"], rtol=0, atol=1e-5)
    with pytest.raises(Diverged, match="not finite"):
        hpcfed.run(
            small(
                tmp_path / "wild", data=str(data), local={"steps": 9, "lr": 1e15, "weight_decay": 1.0}, reduction="fast"
            ),
            quiet=True,
        )


LARGE = """
from hpcfed import UpdatePart
from hpcfed.updates import Sent


class Large(UpdatePart):
    def send(self, vectors, state, shared, context):
        return Sent({name: 1e38 * vector / vector.abs().max() for name, vector in vectors.items()})
"""


@pytest.mark.serial
def test_a_sum_that_may_have_left_the_range_ends_the_run(tmp_path: Path):
    """Of clients whose own updates have not."""
    (tmp_path / "large.py").write_text(LARGE)
    data, updates = str(write_small(tmp_path)), [{"factory": "large:Large"}]
    about = {"data": data, "updates": updates, "python_path": [str(tmp_path)], "rounds": 1, "evaluate": {"every": 0}}
    with pytest.raises(Diverged, match=r"round 1: the sum of 'delta' may have left the range.*set reduction: exact"):
        hpcfed.run(small(tmp_path / "fast", reduction="fast", **about), world=World(), quiet=True)
    hpcfed.run(small(tmp_path / "exact", **about), world=World(), quiet=True)


def test_double_precision_is_not_rounded_to_single():
    with pytest.raises(InputError, match="'reduction: exact' beside 'dtype: float64'"):
        load_recipe(small("run", dtype="float64", reduction="fast"))
