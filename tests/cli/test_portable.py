"""``bits: portable``: the same models and rounds under every instruction set and library, and what it refuses."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch

import hpcfed
from hpcfed.assembly import resolve
from hpcfed.cli.main import main
from hpcfed.config.load import load_recipe
from hpcfed.errors import InputError
from hpcfed.run_folder.machines import BEFORE, moves_in_a_line, of_environments, went_on
from tests.cli.portable_runs import RUNS, digests
from tests.launch import ROOT
from tests.mpi.recipes import small, write_recipe, write_small

BITS = ROOT / "jobs" / "bench" / "bits.py"
SETTINGS = runpy.run_path(str(BITS))["SETTINGS"]
OF_ALL_RANKS = """
import hashlib, runpy, sys, torch

operations = runpy.run_path(sys.argv[1])["OPERATIONS"]
for name in ("server steps", "step sizes, effective steps, factors"):
    for part, tensor in operations[name](torch.Generator().manual_seed(0)).items():
        print(name, part, hashlib.sha256(tensor.contiguous().numpy().data).hexdigest())
"""
"""Prints digests of what each rank computes by itself, and all must have alike."""
FEW = ["scaffold", "fedexp-m", "fednova", "fedadam", "momentum", "clip", "float64", "least-squares"]
OLDEST, NATIVE = "all oldest", "native"


def digests_under(setting: str, place, *names: str) -> dict[str, list[str]]:
    """Digests of runs in a child process under a setting."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **SETTINGS[setting]}
    command = [sys.executable, "-m", "tests.cli.portable_runs", str(place), *names]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_has_the_same_bits_under_the_oldest_instructions(tmp_path):
    oldest = digests_under(OLDEST, tmp_path, *FEW, NATIVE)
    (tmp_path / "here").mkdir()
    here = digests(tmp_path / "here", [*FEW, NATIVE])
    assert {name: here[name] for name in FEW} == {name: oldest[name] for name in FEW}
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":  # else there is nothing older
        assert here[NATIVE] != oldest[NATIVE]


@pytest.mark.soak
def test_what_all_ranks_must_have_alike_has_the_same_bits_on_any_processor():
    printed = []
    for setting in ("as it is", OLDEST):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **SETTINGS[setting]}
        command = [sys.executable, "-c", OF_ALL_RANKS, str(BITS)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        printed.append(done.stdout.splitlines())
    assert len(printed[0]) > 20
    assert printed[0] == printed[1]


@pytest.mark.soak
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if SETTINGS[setting]])
def test_all_runs_have_the_same_bits_under_every_setting(setting, tmp_path, tmp_path_factory):
    known = tmp_path_factory.getbasetemp() / "portable.json"
    names = [name for name in RUNS if name != NATIVE]
    if not known.exists():
        (tmp_path / "here").mkdir()
        known.write_text(json.dumps(digests(tmp_path / "here", names)), encoding="utf-8")
    assert digests_under(setting, tmp_path, *names) == json.loads(known.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "mlp", "hidden": [3]}},
        {"model": {"factory": "torch.nn:Linear", "args": {"in_features": 12, "out_features": 4}}},
        {"loss": {"factory": "torch.nn:CrossEntropyLoss", "args": {"reduction": "none"}}},
        {"loss": {"weights": "balanced"}},
        {"algorithm": {"factory": "mine:method"}},
        {"parameters": {"private": ["bias"]}},
        {"local": {"steps": 1, "step": "mine:step"}},
        {"local": {"steps": 1, "optimizer": "adam"}},
        {"local": {"steps": 1, "engine": "sequential"}},
        {"local": {"steps": 1, "matmul": "onednn"}},
        {"local": {"steps": 1, "compile": True}},
        {"device": "cuda"},
        {"precision": "bf16-mixed"},
        {"reduction": "fast"},
        {"evaluate": {"metrics": ["auroc"]}},
        {"evaluate": {"clients": {"every": 1, "models": ["fine-tuned"], "fine_tune": {"steps": 1, "lr": 0.1}}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_be_portable_is_refused(changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from hpcfed.algorithms import build\nfrom hpcfed.config.recipe import Algorithm\n"
        "def method():\n    return build(Algorithm(name='fedavg'), [])\n"
        "def step(parameters, batch, context):\n    pass\n"
    )
    recipe = small("run", **{"model": {"name": "logistic"}, "bits": "portable", "python_path": ["."], **changes})
    with pytest.raises(InputError, match=r"^recipe: bits: portable with .*leave bits out"):
        hpcfed.run(recipe, quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_gpu_is_not_taken_by_default(tmp_path):
    recipe = small(tmp_path / "run", data=str(write_small(tmp_path)), model={"name": "logistic"}, bits="portable")
    assert resolve(load_recipe(recipe | {"device": "auto"})).device == "cpu"


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path)
    write_recipe(tmp_path, bits="portable")
    with pytest.raises(SystemExit) as ending:
        main(["run", "recipe.yaml"])
    assert ending.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_processor_is_no_excuse_for_other_bits():
    there = {"bits": "portable", "cpu": "one", "threads_per_rank": 1, "packages": {"numpy": "1"}}
    here = {"bits": "portable", "cpu": "another", "threads_per_rank": 2, "packages": {"numpy": "2"}}
    assert [*of_environments(there, here)] == ["numpy: 1 there, 2 here"]
    assert len([*of_environments(there | {"bits": "native"}, here)]) == 3


def test_processors_of_all_ranks_say_whether_a_run_went_on_elsewhere():
    """Not that of rank 0 alone, which may be on another of the same hosts."""

    def of(*processors: str) -> dict:
        ranks = [{"device": "cpu", "instructions": "AVX2", "cpu": one} for one in processors]
        return {"bits": "native", "cpu": processors[0], "packages": {}, "per_rank": ranks}

    assert went_on(of("old", "new"), of("new", "old", "old"), 3) == []
    facts, turns = of("old", "old"), (("old", "new"), ("old", "old"))
    for done in range(1, 8):
        here = of(*turns[1 - done % 2])
        facts = here | {BEFORE: went_on(facts, here, done)}
    assert [one["until"] for one in facts[BEFORE]] == [*range(1, 8)]
    assert moves_in_a_line(facts, 8).startswith("after round 1 it went on elsewhere, where last bits may differ: proc")
    assert moves_in_a_line(facts, 8).endswith("processor: old before, new, old since; and 4 times more")
    assert not moves_in_a_line({**here, BEFORE: facts[BEFORE][-1:]}, 7)  # measured elsewhere after its last round
