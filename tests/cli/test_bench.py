"""``hpcfed bench``: fair turns, phases that add up, and a bare loop that does the same work."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from hpcfed.cli.bench import OWN, PAPERS, _named, command
from hpcfed.cli.bench import WORKLOADS as OFFERED
from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Model
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.lab.bench.calibration import Calibration
from hpcfed.lab.bench.phases import PHASES, phases_of
from hpcfed.lab.bench.timing import (
    BARE,
    FLOORS,
    SCRIPTS,
    SIDE_BY_SIDE,
    ByHand,
    FinishedProcess,
    Timing,
    Turn,
    in_turn,
    last_json,
    ours,
    ours_apart,
    own,
    run_to_end,
)
from hpcfed.lab.bench.workloads import WORKLOADS, write_files
from hpcfed.models import spec
from tests.launch import launch

SECONDS = {"local": 0.5, "convert": 0.1, "wait": 0.05, "reduce": 0.2, "server": 0.1, "evaluate": 0.0, "total": 0.9}


def printing(milliseconds: float) -> list[str]:
    told = json.dumps({"ms_med": milliseconds, "cpu_ms_med": milliseconds / 2})
    return [sys.executable, "-S", "-c", f"print('bla'); print('RESULT', {told!r})"]


def test_timed_rounds_save_no_states_that_those_of_a_long_run_would_not(tmp_path: Path) -> None:
    """By the defaults 30 rounds save 20 of them, in more time than a round of C takes."""
    write_files("logistic", replace(WORKLOADS["logistic"], clients=2, cohort=1), tmp_path)
    command = ours(tmp_path, rounds=25, warm_up=5, ranks=1).command
    recipe = load_recipe(tmp_path / "recipe.yaml", [*command][command.index(str(tmp_path / "recipe.yaml")) + 1 :])
    assert recipe.rounds == 30
    assert recipe.checkpoint.num_states(recipe.rounds, 1) == 0


def test_contenders_take_turns() -> None:
    lines: list[str] = []
    slow, fast = in_turn([own("slow", printing(30)), own("fast", printing(10))], 2, lines.append)
    assert len(lines) == 2
    assert (slow.wall, fast.wall) == (30, 10)
    assert slow.over(fast) == (3, 3, 3)
    assert slow.cpu_over(fast) == 3


def test_an_optional_contender_that_fails_is_left_out() -> None:
    lines: list[str] = []
    fails = own("broken", [sys.executable, "-S", "-c", "raise SystemExit('no such kernel')"], optional=True)
    (only,) = in_turn([own("fast", printing(10)), fails], 2, lines.append)
    assert (only.name, only.wall, len(only.turns)) == ("fast", 10, 2)
    assert lines[0] == "  left out: broken failed with exit code 1: got no such kernel"


def test_a_contender_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(EnvironmentFailure, match="mine failed with exit code 3: got broken"):
        run_to_end("mine", [sys.executable, "-S", "-c", "import sys; print('broken', file=sys.stderr); sys.exit(3)"])
    refused = "import sys; print('hpcfed: the reason\\nmpirun: noise', file=sys.stderr); sys.exit(2)"
    with pytest.raises(InputError, match=r"mine failed with exit code 2: got the reason$"):
        run_to_end("mine", [sys.executable, "-S", "-c", refused])
    with pytest.raises(InputError, match="no JSON object"):
        last_json("nothing here")
    with pytest.raises(InputError, match="mine printed no time"):
        own("mine", []).read(FinishedProcess('{"ms": 1}', 0.0, 0))


def test_memory_is_the_first_processes_unless_the_loop_says_of_all() -> None:
    for said, peak in (('{"ms_med": 1}', 5), ('{"ms_med": 1, "peak_bytes": 7}', 7)):
        assert own("mine", []).read(FinishedProcess(said, 1.0, 5)).peak_bytes == peak


def test_phases_add_up_to_the_round() -> None:
    split = phases_of(SECONDS)
    assert tuple(split) == PHASES
    assert sum(split.values()) == pytest.approx(SECONDS["total"])
    assert split["local"] == pytest.approx(0.35)


def test_our_rounds_are_read_from_their_record(tmp_path: Path) -> None:
    contender = ours(tmp_path, rounds=2, warm_up=1, ranks=1)
    (tmp_path / "run-1").mkdir()
    totals = enumerate((9.0, 0.9, 1.1), 1)
    rows = [{"round": round, "seconds": {**SECONDS, "total": total, "cpu": total / 2}} for round, total in totals]
    (tmp_path / "run-1" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turn = contender.read(FinishedProcess("", 5.0, 1 << 20))
    assert (turn.wall, turn.cpu, turn.peak_bytes) == (pytest.approx(1000), pytest.approx(500), 1 << 20)
    assert not (tmp_path / "run-1").exists()


def test_runs_apart_share_each_cohort(tmp_path: Path) -> None:
    (tmp_path / "cohorts.json").write_text(json.dumps([[5, 1, 4, 2], [0, 3, 2, 1]]))
    contender = ours_apart(tmp_path, rounds=1, warm_up=1, count=2)
    shares = [json.loads((tmp_path / f"apart-{number}-of-2.json").read_text()) for number in (0, 1)]
    assert shares == [[[5, 4], [0, 2]], [[1, 2], [3, 1]]]
    for number, total in enumerate((1.0, 3.0)):
        (tmp_path / f"apart-{number}-of-2").mkdir()
        rows = [{"round": round, "seconds": {**SECONDS, "total": total, "cpu": total}} for round in (1, 2)]
        (tmp_path / f"apart-{number}-of-2" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert contender.read(FinishedProcess("", 5.0, 1 << 20)).wall == pytest.approx(2000)


@pytest.mark.parametrize(
    ("endings", "code"),
    [(("pass", "pass"), 0), (("pass", "sys.exit(3)"), 1), (("os.kill(os.getpid(), 9)", "pass"), 1)],
)
def test_side_by_side_ends_well_if_all_do(endings: tuple[str, str], code: int) -> None:
    commands = json.dumps([[sys.executable, "-S", "-c", f"import os, sys; {ending}"] for ending in endings])
    assert subprocess.run([sys.executable, "-S", "-c", SIDE_BY_SIDE, commands], check=False).returncode == code


@pytest.fixture(scope="module")
def bare_loop() -> ModuleType:
    """jobs/bench/bare.py as a module."""
    return imported(BARE)


def imported(script: Path) -> ModuleType:
    description = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["mlp", "cnn", "logistic", *PAPERS])
def test_the_bare_loop_trains_the_same_model(name: str, bare_loop: ModuleType) -> None:
    work = WORKLOADS[name]
    build, batch_size = bare_loop.MODELS[name.partition("-")[0]]
    assert bare_loop.DECAYS.get(name.partition("-")[0], bare_loop.WEIGHT_DECAY) == work.weight_decay
    assert work.evaluate_every in (0, bare_loop.EVALUATE_EVERY)
    mine = spec(Model.model_validate(work.model)).build(work.shape, work.classes)
    assert [p.shape for p in build().parameters()] == [p.shape for p in mine.parameters()]
    assert batch_size == work.batch_size


@pytest.mark.parametrize("name", ["mlp", "cnn", "logistic", "pfl-cifar10", "lstm256", "residual", "transformer"])
def test_networks_as_people_write_them_are_those_of_the_bare_loop(name: str, bare_loop: ModuleType) -> None:
    work = WORKLOADS[name]
    build, batch_size = bare_loop.MODELS[name.partition("-")[0]]
    assert batch_size == work.batch_size
    x = torch.zeros(2, *work.shape, dtype=torch.int64 if work.tokens else torch.float32)
    own = [work.model["factory"]] if "factory" in work.model else []
    for factory in [*own, *(factory for _, factory in work.written)]:
        mine = imported_factory(factory)
        assert sorted(p.shape for p in build().parameters()) == sorted(p.shape for p in mine.parameters())
        assert mine(x).shape == build()(x).shape == (2, work.classes)


def imported_factory(reference: str) -> nn.Module:
    module, _, function = reference.partition(":")
    return getattr(importlib.import_module(module), function)()


MINE = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(60, 8), nn.Tanh(), nn.Linear(8, 5))
"""


@pytest.mark.one_mpi
def test_a_model_of_ones_own_is_timed_beside_its_bare_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files("few", replace(WORKLOADS["logistic"], clients=3, samples=7, cohort=2), tmp_path)
    (tmp_path / "benched.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    few = ["--repeats", "1", "--rounds", "1", "--warm-up", "0", "--json", "found.json"]
    asked = ["--own-model", "benched:net", "--data", "federation.h5", "--cohort", "2", "--batch-size", "5", *few]
    done = CliRunner().invoke(command, asked, catch_exceptions=False)
    assert "benched:net, 3 clients × 7, cohort 2" in done.output
    found = json.loads(Path("found.json").read_text())["rounds"]["benched:net"]
    assert [timing["name"] for timing in found] == ["bare", "hpcfed, 1 rank"]
    for wrong, says in (
        (["--own-model", "benched:net"], "expected --own-model and --data"),
        (["mlp", "--own-model", "benched:net", "--data", "federation.h5"], "no workloads"),
        (["--own-model", "absent:net", "--data", "federation.h5"], "--own-model 'absent:net' cannot be imported"),
        (["--own-model", "benched:nets", "--data", "federation.h5"], "no function 'nets' in benched"),
        (["--own-model", "benched", "--data", "federation.h5"], "expected module:function"),
        (["mlp", "--precision", "tf32"], "--precision tf32: expected a GPU, got --device cpu; add --device cuda"),
    ):
        with pytest.raises(InputError, match=says):
            raise CliRunner().invoke(command, wrong).exception


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_all_contenders_multiply_in_the_same_precision(precision, bare_loop, tmp_path, monkeypatch) -> None:
    """By torch's own switches in loops by hand, by the recipe in hpcfed."""
    write_files("few", replace(WORKLOADS["logistic"], clients=3, samples=7, cohort=2), tmp_path, "cuda", precision)
    assert load_recipe(tmp_path / "recipe.yaml").precision == precision
    by_hand = ByHand(tmp_path, 1, 0, "cpu", precision)
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [each.allow_tf32 for each in switches]
    try:
        for contender in (by_hand.bare("logistic"), *by_hand.floors("logistic")):
            monkeypatch.setattr(sys, "argv", contender.command[1:])
            parser = bare_loop.parser_of("")
            parser.add_argument("last")  # the batch size, or the kind of floor
            bare_loop.parsed(parser)
            assert [each.allow_tf32 for each in switches] == [precision == "tf32"] * 2
    finally:
        for each, allowed in zip(switches, before, strict=True):
            each.allow_tf32 = allowed


@pytest.mark.soak
def test_networks_as_written_are_timed_beside_the_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(WORKLOADS["logistic"], clients=3, samples=7, cohort=2)
    monkeypatch.setitem(WORKLOADS, "logistic", few)
    asked = ["logistic", "--as-written", "--repeats", "1", "--rounds", "1", "--warm-up", "0"]
    CliRunner().invoke(command, [*asked, "--json", str(tmp_path / "found.json")], catch_exceptions=False)
    found = json.loads((tmp_path / "found.json").read_text())["rounds"]["logistic"]
    assert [timing["name"] for timing in found] == ["bare", "hpcfed, 1 rank", "hpcfed, as layers", "hpcfed, as a class"]


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["client-graph", "vmap", "round-graph"])
def test_floors_do_the_bare_loops_arithmetic(kind: str, bare_loop: ModuleType, tmp_path, monkeypatch) -> None:
    """Of clients with one minibatch, whose order changes nothing but rounding."""
    monkeypatch.setitem(sys.modules, "bare", bare_loop)
    floors = imported(FLOORS)
    write_files("few", replace(WORKLOADS["logistic"], clients=4, samples=5, cohort=2), tmp_path)
    data = bare_loop.Data(str(tmp_path), torch.device("cpu"))
    torch.manual_seed(0)
    expected, server = nn.Linear(60, 5), nn.Linear(60, 5)
    server.load_state_dict(expected.state_dict())
    train = floors.floor(kind, data, server, 5, 1e-4)
    for cohort in data.cohorts[:3]:
        bare_loop.train_round(expected, nn.Linear(60, 5), data.clients, cohort, 5)
        train(cohort)
    for found, parameter in zip(server.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, parameter)


@pytest.mark.soak
def test_pfls_benchmark_beside_its_floors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small: ten rounds of two clients, with an evaluation; all contenders print means, and ours is read as one."""
    few = replace(WORKLOADS["pfl-cifar10"], clients=2, cohort=2, samples=10, tests=20)
    monkeypatch.setitem(WORKLOADS, "pfl-cifar10", few)
    asked = ["pfl-cifar10", "--floors", "--repeats", "1", "--rounds", "3", "--warm-up", "0"]
    done = CliRunner().invoke(command, [*asked, "--json", str(tmp_path / "found.json")], catch_exceptions=False)
    found = json.loads((tmp_path / "found.json").read_text())["rounds"]["pfl-cifar10"]
    names = ["bare", "hpcfed, 1 rank", "floor: client-graph", "floor: vmap", "floor: round-graph"]
    assert [timing["name"] for timing in found] == names
    assert found[1]["turns"][0]["phases"]["evaluate"] > 0
    assert "1,500 rounds at this speed: bare " in done.output


def test_a_choice_is_advised_where_it_is_clearly_faster() -> None:
    auto, near, fast = (Timing(name, (Turn(wall), Turn(2 * wall))) for name, wall in (("a", 10), ("b", 9.8), ("c", 7)))
    assert Calibration([auto, near], {}).advice == "auto takes a, and nothing is clearly faster here"
    assert Calibration([auto, near, fast], {}).advice.startswith("c takes 0.70 of the time")


@pytest.mark.soak
def test_choices_are_timed_on_the_users_recipe(folder: Path, environment: dict[str, str]) -> None:
    """In float64, which oneDNN does not support; sections beyond the rounds are ignored, and no run folder is made."""
    few = ["--repeats", "1", "--rounds", "1", "--warm-up", "0", "--json", "found.json"]
    command = ["bench", "--calibrate", "recipe.yaml", "dtype=float64", "evaluate.clients.every=1", *few]
    done = launch(0, command, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    timed = json.loads((folder / "found.json").read_text())["calibrate"]["timings"]
    names = [f"local.engine={engine} local.matmul=blas" for engine in ("batched", "sequential")]
    assert [timing["name"] for timing in timed] == names
    said = " ".join(done.stdout.split())  # in lines of a terminal
    assert "local.matmul=onednn is no choice: " in said
    assert "local.matmul: onednn with dtype: float64" in said
    assert not (folder / "run").exists()


@pytest.mark.one_mpi
def test_loops_of_ones_own_have_names_and_learn_what_is_timed():
    known = {"workload": "mlp", "folder": "a b", "rounds": 25, "warm_up": 5}
    assert _named("pfl=python rounds.py {workload} {folder} {rounds}", known) == (
        "pfl",
        ["python", "rounds.py", "mlp", "a b", "25"],
    )
    assert _named("python -c 'x={}; a=1'", known) == ("own loop", ["python", "-c", "x={}; a=1"])


def test_a_peer_runs_on_a_python_that_starts_or_is_left_out(tmp_path: Path, monkeypatch, capsys) -> None:
    """As blazefl, which is newer than this Python may be; pyenv puts names on the PATH that do not start."""
    compare = imported(SCRIPTS / "peers" / "compare.py")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compare, "PEERS", {"blazefl": compare.PEERS["blazefl"]})
    monkeypatch.setattr(compare, "PYTHONS", {"blazefl": ("2.6", "2.7")})
    for version, code in (("2.6", 127), ("2.7", 1)):
        (tmp_path / f"python{version}").write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / f"python{version}").chmod(0o755)
    assert compare.loops("mlp", tmp_path) == []
    assert capsys.readouterr().out == "blazefl is left out: it needs Python 2.6 or 2.7 on the PATH\n"
    (tmp_path / "python2.7").write_text("#!/bin/sh\n")
    assert compare.base_of("blazefl") == str(tmp_path / "python2.7")


def test_a_workload_that_is_not_one_is_refused() -> None:
    assert tuple(WORKLOADS) == OFFERED + PAPERS + OWN
    with pytest.raises(InputError, match="unknown workload 'mpl'; did you mean 'mlp'"):
        raise CliRunner().invoke(command, ["mpl"]).exception
    with pytest.raises(InputError, match="two ranks or more"):
        raise CliRunner().invoke(command, ["reduce"]).exception
