"""`hpcfed.rounds`: a loop over the rounds changes nothing, and where one rank leaves it, all stop with a checkpoint."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hpcfed
from hpcfed.config.user_code.settings import multiply_exactly, settings_kept
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.reduce.update_hash import hash_of_update
from hpcfed.run_folder.update_hashes import UPDATE_HASHES, read_update_hashes
from tests.mpi.nets import mlp
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


class Differences:
    """Keeps each client's ‖Δ_i‖, and spoils what it is shown."""

    wants_updates = True

    def __init__(self) -> None:
        self.norms: list[dict[int, float]] = []

    def look(self, round: hpcfed.loop.Round) -> None:
        self.norms.append({client: float(flat(update).norm()) for client, update in round.updates.items()})
        for update in round.updates.values():
            for tensor in update.values():
                tensor.zero_()


def flat(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in named.values()])


def with_gaps(named: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the vector (d,), in which each tensor begins a line of 16 numbers, and lines come in pairs."""
    lines = torch.cat([nn.functional.pad(one.flatten(), (0, -one.numel() % 16)) for one in named.values()])
    return nn.functional.pad(lines, (0, -len(lines) % 32))


def test_random_draws_outside_of_runs_go_on_where_they_were(world):
    """Before, in and after a loop, a run, a replay, and where a result's module is built: no draw comes twice."""
    changes = {**BATCHNORM, "cohort": 2}
    numbers = (lambda: float(torch.rand(())), np.random.rand, random.random)
    for number, seed in zip(numbers, (torch.manual_seed, np.random.seed, random.seed), strict=True):
        seed(1)
        expected = [number() for _ in range(8)]
        seed(1)
        drawn = [number()]
        drawn.extend(number() for _ in hpcfed.rounds(small("seen", **changes), world=world, fresh=True))
        result = hpcfed.run(small("plain", **changes), world=world, quiet=True, fresh=True)
        drawn.append(number())
        _ = result.module
        drawn.append(number())
        replayed = hpcfed.replay(result.folder, 2, result.metrics[1]["cohort"][0], run_code=True)
        drawn.append(number())
        assert replayed.agrees
        assert [*drawn, number()] == expected


@pytest.mark.parametrize("raises", [False, True])
def test_torchs_settings_are_left_as_they_were(world, raises):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        changes = {**BATCHNORM, "model": {"factory": f"tests.mpi.test_rounds:{'in_double' if raises else 'mlp'}"}}
        with pytest.raises(InputError, match="set_default_dtype") if raises else nullcontext():
            result = hpcfed.run(small("plain", **changes), world=world, quiet=True)
            assert result.module is not None
            assert hpcfed.replay(result.folder, 2, result.metrics[1]["cohort"][0], run_code=True).agrees
        assert (torch.get_num_threads(), torch.get_default_dtype()) == (2, torch.float32)
    finally:
        torch.set_num_threads(before)
        torch.set_default_dtype(torch.float32)


def test_settings_of_a_loops_body_stay_outside_of_the_run(world):
    plain = hpcfed.run(small("plain", **BATCHNORM), world=world, quiet=True)
    try:
        for each in hpcfed.rounds(small("seen", **BATCHNORM), world=world):
            assert torch.get_default_dtype() == (torch.float32 if each.number == 1 else torch.float64)
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
        assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float64, False)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert left_by(hpcfed.run(small("seen", **BATCHNORM), world=world, quiet=True)) == left_by(plain)


def test_autocast_around_a_run_is_refused(world):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match=r"torch\.autocast was set before"):
        hpcfed.run(small("plain", **BATCHNORM), world=world, quiet=True)


def test_a_run_s_module_is_built_under_autocast(world):
    result = hpcfed.run(small("plain", **BATCHNORM), world=world, quiet=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert result.module(torch.zeros(2, 12)).dtype == torch.bfloat16


def test_flags_of_torch_that_are_not_to_be_set_stay_alone(world, monkeypatch):
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    assert hpcfed.run(small("plain", **BATCHNORM), world=world, quiet=True).metrics


def test_convolutions_of_a_cpu_are_exact_in_a_run(world):
    conv = getattr(torch.backends.mkldnn, "conv", None)
    if not hasattr(conv, "fp32_precision"):
        pytest.skip("torch before 2.9")
    before = conv.fp32_precision
    try:
        conv.fp32_precision = "bf16"
        with settings_kept():
            multiply_exactly(torch.device("cpu"))
            assert conv.fp32_precision == "ieee"
        assert conv.fp32_precision == "bf16"
    finally:
        conv.fp32_precision = before


def in_double() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    return mlp()


@pytest.mark.parametrize("means", [None, [{"trimmed-mean": {"fraction": 0.4}}]], ids=["mean", "robust"])
def test_updates_on_request_are_those_that_were_summed(world, means):
    """By the hashes in the record of a run without the request; by the step along their mean."""
    topk = {"updates": [{"topk": {"fraction": 0.3}}], "means": means, "update_hashes": True, "cohort": 3}
    changes = {**topk, "algorithm": {"name": "fedavg", "server_lr": 0.5}, "rounds": 4}
    plain = hpcfed.run(small("plain", **changes), world=world, quiet=True)
    looker, before = Differences(), None
    asked = hpcfed.rounds(small("seen", **changes, observers=[looker]), world=world, with_updates=True)
    for each in asked:
        recorded = read_update_hashes(plain.folder / UPDATE_HASHES, [3] * 4, each.number)
        found = [hash_of_update({"delta": with_gaps(each.updates[client])}, ["delta"]) for client in each.cohort]
        assert found == recorded.tolist()
        norms = {client: float(flat(update).norm()) for client, update in each.updates.items()}
        assert not world.is_root or looker.norms[-1] == norms
        if before is not None:
            torch.testing.assert_close(before - 0.5 * flat(each.delta), flat(each.parameters))
        before = flat(each.parameters)
        each.delta.clear()
    assert left_by(hpcfed.run(small("seen", **changes), world=world, quiet=True)) == left_by(plain)
    assert all(not each.updates and each.delta is None for each in hpcfed.rounds(small("bare", **topk), world=world))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"secure_aggregation": {}, "updates": [{"clip": {"norm": 1.0}}]}, "secure_aggregation shows the server none"),
        (
            {"updates": [{"clip": {"norm": 1.0}}], "means": [{"noise": {"multiplier": 1.0}}], "weights": "uniform"},
            "they have no noise of their own",
        ),
        ({"algorithm": {"name": "fedsplit", "s": 1.0}}, "report Δ_i, got clients that report residual"),
    ],
)
def test_updates_that_nobody_sees_are_refused(world, changes, message):
    with pytest.raises(InputError) as refused:
        list(hpcfed.rounds(small("refused", **changes), world=world, with_updates=True))
    assert message in str(refused.value)


def test_a_loop_that_is_left_goes_on_later(world):
    *_, last = hpcfed.rounds(small("whole"), world=world, with_updates=True)
    whole = hpcfed.run(small("whole"), world=world, quiet=True)
    for each in hpcfed.rounds(small("left"), world=world):
        if each.number == 2 and world.rank == world.size - 1:
            break  # on one rank alone
        assert each.number <= 2
    world.barrier()
    status = world.on_root(lambda: json.loads(Path("left/result.json").read_text()))
    assert (status["status"], status["rounds"]) == ("stopped", 2)
    (rest,) = hpcfed.rounds(small("left"), world=world, with_updates=True)
    assert str(rest).startswith("round 3: 5 clients")
    assert rest.updates.keys() == last.updates.keys()
    assert all(torch.equal(flat(rest.updates[client]), flat(update)) for client, update in last.updates.items())
    assert torch.equal(flat(rest.delta), flat(last.delta))
    result = hpcfed.run(small("left"), world=world, quiet=True)
    assert left_by(result) == left_by(whole)
    trained = dict(result.module.named_parameters())
    assert all(torch.equal(tensor, trained[name]) for name, tensor in rest.parameters.items())
    assert not list(hpcfed.rounds(small("left"), world=world))


def test_a_folder_that_is_moved_away_is_not_called_full(world):
    """And the run ends soon, not after all rounds, of which no checkpoint would be left."""
    rounds = []

    def trained() -> None:
        for each in hpcfed.rounds(small("moved", rounds=300, checkpoint={"every": 1}), world=world):
            rounds.append(each.number)
            if each.number == 2 and world.is_root:
                Path("moved/checkpoints").rename("elsewhere")

    said = "the checkpoint of round [23] cannot be written: got .*; the folder was moved or removed: put it back"
    with pytest.raises(EnvironmentFailure, match=said):
        trained()
    assert len(rounds) < 300
