"""The scripts of ``jobs/bench``: each starts, says in a line what is wrong with its input, and does its work."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcfed.config.load import dump_yaml
from hpcfed.lab.bench.timing import SCRIPTS
from hpcfed.lab.bench.workloads import WORKLOADS, write_files
from jobs.bench.many_ranks import placing
from jobs.bench.niid_by_hand import differences
from tests.federations import write_federation
from tests.launch import ROOT

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]

NO_ARGUMENTS = {"digests.py", "many_ranks.py", "newcomers.py"}
PARSING = [
    *(path.name for path in sorted(SCRIPTS.glob("*.py")) if path.name not in NO_ARGUMENTS),
    *("conformance/check_vectors.py", "conformance/run.py", "peers/compare.py"),
]
FEW = replace(WORKLOADS["logistic"], clients=3, samples=7, cohort=2, written=())

Script = Callable[..., tuple[int, str, str]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Run a script in this process; return its exit code and what it has printed."""

    def run(name: str, *arguments: object) -> tuple[int, str, str]:
        path = SCRIPTS / name
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        code = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ending:
            code = int(ending.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", PARSING)
def test_each_says_how_it_is_used(name: str, script: Script) -> None:
    code, out, _ = script(name, "--help")
    assert code == 0
    assert out.startswith(f"usage: {Path(name).name} ")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("agreement.py none", "none: nothing has been run"),
        ("agreement.py none --to 0.8 nope", "no experiment 'nope'"),
        ("bare.py nope none", "no model 'nope'"),
        ("bits.py --only nope", "no setting has one of nope"),
        ("bare.py mlp none", "none has no federation.h5"),
        ("checkpoint.py cost full", "full is not empty"),
        ("clipping.py none feddyn-mnist iid-1 --rounds 1", "no raw data"),
        ("counts.py nope", "no workload 'nope'"),
        ("floors.py mlp none 1 0 cpu vmap", "none has no federation.h5"),
        ("leaderboard.py none niid-mnist", "none: nothing has been run"),
        ("niid_by_hand.py none", "no such recipe"),
        ("parts.py --workload nope", "unknown workload 'nope'"),
        ("profile_round.py nope", "unknown workload 'nope'"),
        ("same_bits.py --openmpi none", "--openmpi none: no such program"),
        ("scale.py rounds full", "full is not empty"),
        ("updates.py --table clients none.h5", "none.h5: no such federation file"),
        ("updates.py --only plane none.h5", "no row 'plane'"),
        ("versions.py none --pairs 1 mlp", "none is no checkout"),
        ("versions.py . --pairs 1 nope", "unknown workload 'nope'"),
        ("conformance/run.py nope", "no package 'nope'"),
        ("conformance/check_vectors.py none.json", "none.json: cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(call: str, words: str, script: Script, tmp_path, monkeypatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "hpcfed").mkdir()
    monkeypatch.chdir(tmp_path)
    name, *arguments = call.split()
    code, _, err = script(name, *arguments)
    assert code == 2
    assert words in err.splitlines()[-1]


def test_loops_and_their_parts_are_timed(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "logistic", FEW)
    write_files("few", FEW, tmp_path)
    for name, kind in (("bare.py", ()), ("floors.py", ("client-graph",))):
        _, out, _ = script(name, "logistic", tmp_path, 2, 1, "cpu", *kind)
        assert json.loads(out)["rounds"] == 2
    _, out, _ = script("parts.py", "--workload", "logistic", "--rounds", 1, "clip", "median")
    assert [line.split(" | ")[0] for line in out.splitlines()[2:]] == ["| none", "| clip", "| median"]
    _, out, _ = script("profile_round.py", "logistic")
    assert "ms a round" in out
    assert "Ordered by: internal time" in out


def test_updates_are_compared(script: Script, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [(rng.integers(0, 256, (4, 1, 4, 4)).astype(np.uint8), np.arange(4, dtype=np.uint8)) for _ in range(101)]
    data = write_federation(tmp_path / "images.h5", images[:100], num_classes=4, test=images[100])
    tables = ["--table", "sent", "--table", "held", "--only", "plain", "--only", "median"]
    _, out, _ = script("updates.py", *tables, "--rounds", 1, data)
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith(("| plain", "| median"))]
    assert [len(row) for row in rows] == [4, 4]


def test_placement_on_many_ranks_is_timed() -> None:
    placed, learned, away = placing(4, 0.0, 0.0)
    assert min(placed, learned, away) >= 0


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_niid_benchs_rounds_by_hand_are_hpcfeds(method: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clients = [
        (rng.integers(0, 256, (n, 1, 28, 28)).astype(np.uint8), rng.integers(0, 10, n).astype(np.uint8)) for n in (5, 8)
    ]
    data = write_federation(tmp_path / "images.h5", clients, num_classes=10, test=clients[0])
    local = {"epochs": 2, "batch_size": 3, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
    methods = {"fedavg": {"name": "fedavg"}}
    methods["scaffold"] = {"name": "scaffold", "correction": "after-momentum", "c_scale": "uniform"}
    recipe = {"data": str(data), "model": {"name": "niid-cnn"}, "rounds": 5, "local": local, "weights": "samples"}
    (tmp_path / "recipe.yaml").write_text(dump_yaml({**recipe, "algorithm": methods[method]}))
    for difference, moved in differences(tmp_path, 2, 2):
        assert difference < 1e-12 < moved


def test_without_time_nothing_is_measured_or_profiled(tmp_path: Path) -> None:
    environment = {**os.environ, "DEVICE": "cpu", "LIMIT": "10", "PAGE": str(tmp_path / "page.md")}
    environment["PYTHON"] = sys.executable
    done = subprocess.run([SCRIPTS / "gpu.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    titles = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("## ")]
    assert titles[:2] == ["## Right", "## Speed: pfl-cifar10"]
    assert len(titles) == done.stdout.count("left out: 10 s were over") == 7


@pytest.mark.soak
@pytest.mark.parametrize("call", ["clients --clients 12", "rounds --rounds 3", "parameters --parameters 4000"])
def test_sizes_are_measured(call: str, script: Script, tmp_path: Path) -> None:
    what, *sizes = call.split()
    code, out, _ = script("scale.py", what, tmp_path / "new", *sizes)
    assert code == 0
    assert ("| memory a rank" if what == "parameters" else "| verify two rounds") in out


@pytest.mark.soak
def test_the_structure_of_the_package_is_printed(script: Script) -> None:
    code, out, _ = script("rooms.py")
    assert code == 0
    assert "level  0 " in out
    assert "in a circle" not in out


@pytest.mark.soak
def test_rounds_of_two_checkouts_and_bits_of_two_ways_are_compared(script: Script) -> None:
    _, out, _ = script("same_bits.py", "--recipes", 1, "--ranks", 1)
    assert "1 recipes run in each of 2 ways" in out
    assert "0 with more than one hash" in out
    code, *_ = script("versions.py", ROOT, "--pairs", 1, "logistic")
    assert code == 0
