"""`hpcfed compare` finds the planted round, client and step in which two runs part."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
import torch
from torch import Tensor

import hpcfed
from hpcfed.models.flat import PARAMETERS
from hpcfed.provenance.compare import _first_difference, _of_code
from hpcfed.provenance.replay.replay import Step
from hpcfed.types import Tilt
from tests.launch import launch
from tests.mpi.recipes import METHODS, small, write_small

pytestmark = pytest.mark.one_mpi

LOCAL = {"steps": 4, "batch_size": 10, "lr": 0.1}
STATEFUL = {"algorithm": {"name": "scaffold", **METHODS["scaffold"]}, "cohort": {"size": 3}, "update_hashes": True}

PLANTED: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "step-size": (
        {"local": {**LOCAL, "lr_schedule": [{"round": 7, "lr": 0.09999}]}},
        "part in round 7",
        "step 1: from the same iterate, minibatch and gradient another iterate",
    ),
    "products": (
        {"local": {**LOCAL, "engine": "sequential"}},
        "part in round 1",
        "minibatch and gradient another iterate",
    ),
    "batches": ({"seed": {"batches": 1}}, "part in round 1", "step 1: another minibatch: look at seed.batches"),
    "model": (
        {"seed": {"model": 1}},
        "part in round 1",
        "the models differ before round 1 already: look at seed.model",
    ),
    "cohort": ({"seed": {"cohort": 1}}, "part in round 1", "their cohorts differ: look at seed.cohort"),
    "steps": ({"local": {**LOCAL, "steps": 5}}, "part in round 1", "it takes 4 steps and 5"),
    "loss": (
        {"local": {**LOCAL, "weight_decay": 0.001}},
        "part in round 1",
        "recipe: local.weight_decay 0.0 in one and 0.001 in other\n",
    ),
    "server": (
        {"algorithm": {"name": "scaffold", "server_lr": 1.1}},
        "part in round 1",
        "their sum or the server's step differs: look at reduction and algorithm\n",
    ),
    "server, without hashes": (
        {"algorithm": {"name": "scaffold", "server_lr": 1.1}, "update_hashes": False},
        "part in round 1",
        "reduction and algorithm (",
    ),
}


def trained(output: str, **changes: Any) -> Path:
    recipe = {"rounds": 8, "checkpoint": {"every": 3, "keep": 9}, **STATEFUL, **changes}
    return hpcfed.run(small(output, **recipe), quiet=True).folder


@pytest.fixture
def two(tmp_path, monkeypatch) -> Path:
    """A folder with a federation, and a run of it."""
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path)
    trained("one")
    return tmp_path


def test_what_was_planted_is_found(two, command):
    for name, (changes, round, told) in PLANTED.items():
        trained("other", **changes)
        done = command(["compare", "one", "other"], two)
        assert (done.returncode, done.stderr) == (1, ""), name
        assert round in done.stdout, (name, done.stdout)
        assert told in done.stdout, (name, done.stdout)
        shutil.rmtree(two / "other")


def test_a_module_that_one_run_alone_has_is_said_to_be_there(two, command):
    Path("mine.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(12, 4)\n")
    trained("plain", rounds=1)
    trained("own", rounds=1, model={"factory": "mine:net"}, python_path=["."])
    for pair in (["plain", "own"], ["own", "plain"]):
        done = command(["compare", *pair], two)
        assert "code: module mine in own alone\n" in done.stdout


def test_a_flipped_bit_of_one_client_is_found(two, command):
    """It takes effect in the first round that visits the sample."""
    with h5py.File(shutil.copy("small.h5", "flipped.h5"), "r+") as file:
        row = int(file["train/offsets"][3]) + 5
        x = file["train/x"][row]
        x.view("u4")[3] ^= 1 << 16
        file["train/x"][row] = x
    for hashes in (True, False):
        one, other = (
            trained(f"{data}-{hashes}", data=f"{data}.h5", update_hashes=hashes) for data in ("small", "flipped")
        )
        done = command(["compare", one, other], two)
        assert done.returncode == 1
        assert "client 3: its data differ, x of its sample 5 first" in done.stdout, done.stdout
        assert "clients whose updates differ: 1 of 3: 3 (3)\n" in done.stdout


X, Y = torch.arange(12.0).reshape(3, 4), torch.tensor([0, 1, 2])
ONE, TWO = torch.ones(5), torch.full((5,), 2.0)


def replayed(tilt: Tilt | None = None, y: Tensor = Y, start: Tensor = ONE, **changes: Any) -> Any:
    """A replay of two steps, the second with changes."""
    first = Step(1, X, Y, 0.5, 0.25, 0.125, ONE, {PARAMETERS: ONE}, {"norm.running_mean": ONE})
    task = SimpleNamespace(tilt=tilt or Tilt(), samples=(X, y), own={PARAMETERS: start})
    return SimpleNamespace(reported=SimpleNamespace(task=task), steps=[first, replace(first, number=2, **changes)])


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (replayed(), ""),
        *((replayed(Tilt(**{name: ONE})), f"another {name} ") for name in ("shift", "anchor", "offset")),
        *((replayed(Tilt(**{name: 1.0})), f"another {name} ") for name in ("mu", "radius", "from_anchor")),
        (replayed(Tilt(after_momentum=ONE)), "another after_momentum "),
        (replayed(start=TWO), "its private.parameters at the start are others"),
        (replayed(own={PARAMETERS: TWO}), "minibatch and gradient other private.parameters"),
        (replayed(buffers={"norm.running_mean": TWO}), "minibatch and gradient other norm.running_mean"),
        (replayed(y=torch.tensor([0, 1, 1])), "its data differ, y of its sample 2 first"),
        (replayed(y=Y[:2]), "its data differ, 3 and 2 samples first"),
        (replayed(y=Y[:0]), "its data differ, 3 and 0 samples first"),
        (replayed(x=X.flip(0)), "step 2: another minibatch"),
        (replayed(loss=0.75), "step 2: from the same iterate and minibatch another gradient: loss 0.5 and 0.75,"),
        (replayed(gradient=0.5), "minibatch another gradient: loss 0.5 and 0.5, ‖gradient‖ 0.25 and 0.5"),
        (replayed(iterate=TWO), "step 2: from the same iterate, minibatch and gradient another iterate"),
        (replayed(iterate=None, drift=0.5), "another iterate (drift 0.125 and 0.5)"),
    ],
)
def test_the_first_difference_within_a_client_is_named(other, told):
    assert told in (found := _first_difference(replayed(), other))
    assert bool(found) == bool(told)


def test_code_that_differs_is_named():
    code = {"same": {"hash": "1"}, "mine": {"hash": "2"}, "bare": None}
    other = {"same": {"hash": "1"}, "mine": {"hash": "3"}}
    assert [*_of_code(code, other, ("in one", "in other"))] == ["module bare in one alone", "module mine differs"]


@pytest.mark.soak
def test_other_libraries_are_named(two, command):
    """Where the setting changes bits, as on processors with AVX; this process then computes those of the first run."""
    old = {"ATEN_CPU_CAPABILITY": "default"}
    assert launch(0, ["run", "one/recipe.yaml", "output=old", "-q"], cwd=two, env=old).returncode == 0
    done = command(["compare", "one", "old"], two)
    assert re.search(r"library settings: .* in one, ATEN_CPU_CAPABILITY=default.* in old", done.stdout)
    if done.returncode:
        assert "old: this machine computes another update of client " in done.stdout
        assert done.stdout.endswith("look at the processors and libraries of the two runs, and their settings\n")
    else:
        assert Path("one/model.safetensors").read_bytes() == Path("old/model.safetensors").read_bytes()


def test_the_same_runs_are_the_same(two, command):
    trained("again", rounds=6, checkpoint={"every": 0}, update_hashes=False)
    facts = json.loads(Path("again/environment.json").read_text())
    Path("again/environment.json").write_text(json.dumps(facts | {"bitwise": False, "bitwise_why_not": "a reason"}))
    done = command(["compare", "one", "again"], two)
    assert (done.returncode, done.stderr) == (0, "")
    assert "/again: its record says bitwise: false: a reason\n" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "the same model, bit for bit, in all 6 rounds",
        "one has 8 rounds, the other 6",
    ]
    shutil.move("small.h5", "there.h5")
    trained("third", data="there.h5", seed={"batches": 3})
    done = command(["compare", "one", "third"], two)
    assert (done.returncode, "clients and steps cannot be compared here: " in done.stdout) == (1, True)
    done = command(["compare", "one", "nowhere"], two)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    Path("again/metrics.jsonl").write_bytes(b"")
    for first, second in (("one", "again"), ("again", "one")):
        done = command(["compare", first, second], two)
        assert (done.returncode, done.stdout) == (2, "")
        assert "again: a run without rounds: nothing to compare" in done.stderr


def test_runs_that_evaluate_other_models_are_compared_by_their_training(two, command):
    trained("other", evaluate={"every": 2, "model": "client-average"})
    trained("slower", evaluate={"model": "client-average"}, local={**LOCAL, "lr": 0.09})
    done = command(["compare", "one", "other"], two)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the same losses and norms of updates in all 8 rounds" in done.stdout
    done = command(["compare", "one", "slower"], two)
    assert (done.returncode, done.stderr) == (1, "")
    assert "part in round 1" in done.stdout
    assert "hashes are left out" in done.stdout
