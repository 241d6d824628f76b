"""Folders of honest authors, thirty kinds of them: `verify` finds nothing wrong, and says what it could not check."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hpcfed
from hpcfed.config.load import load_recipe
from hpcfed.run_folder.certificate import write_certificate
from hpcfed.run_folder.folder import RunFolder
from tests.cli.elsewhere import claim_other_processor
from tests.launch import Completed, launch
from tests.mpi.recipes import METHODS, small, write_recipe, write_small
from tests.soak import often

pytestmark = pytest.mark.one_mpi

Command = Callable[..., Completed]
VERIFIED = re.compile(r"verified: all \d+ rounds, bit for bit, on 1 rank")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    write_small(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(output: str = "run", **changes: Any) -> Path:
    return hpcfed.run(small(output, **{"rounds": 4, **changes}), quiet=True).folder


def check(run: Path, command: Command, *options: object) -> None:
    """By all rounds, and by some."""
    done = command(["verify", run, "--all", *options], Path.cwd())
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert VERIFIED.fullmatch(done.stdout.splitlines()[-1])
    done = command(["verify", run, "--rounds", 1, *options], Path.cwd())
    assert (done.returncode, "spot-checked: round " in done.stdout) == (0, True), done.stdout


OFTEN = ("fedavg", "fedexp-m", "fednova", "fedsplit", "scaffold")
"""Methods that differ most in what they keep; tests/mpi/test_verify.py has others."""


@pytest.mark.every(2)
@pytest.mark.parametrize("method", often(OFTEN, METHODS))
def test_of_each_method(method, folder, command):
    check(trained(algorithm={"name": method, **METHODS[method]}), command)


SETTINGS: dict[str, dict[str, Any]] = {
    "averages": {"evaluate": {"model": "client-average", "train": {"every": 2}}},
    "two-models": {
        "evaluate": {
            "model": "last-two",
            "clients": {"every": 2, "models": ["global", "fine-tuned"], "fine_tune": {"steps": 2, "lr": 0.1}},
        }
    },
    "private": {"parameters": {"private": ["*.bias"]}, "evaluate": {"every": 0, "clients": {"every": 2}}},
    "hashes-and-schedule-never-scored": {
        "update_hashes": True, "cohort": {"schedule": [[0, 1], [3], [2, 0], [1, 2, 4]]}, "evaluate": {"every": 0},
    },
    "stopped-by-scores": {"rounds": 30, "stop": {"patience": 2}, "local": {"steps": 1, "batch_size": 10, "lr": 1e-6}},
    "metrics-of-float64-adam-without-checkpoints": {
        "dtype": "float64", "local": {"steps": 3, "batch_size": 7, "lr": 0.01, "optimizer": "adam"},
        "evaluate": {"metrics": ["auroc", "f1-macro", "confusion-matrix"], "every": 3}, "checkpoint": {"every": 0},
    },
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_of_other_settings(setting, folder, command):
    check(trained(**SETTINGS[setting]), command)


@pytest.mark.soak
def test_that_went_on_on_other_ranks_after_a_stop(folder, command):
    write_recipe(folder, rounds=6, algorithm={"name": "scaffold"})
    done = launch(2, ["run", "recipe.yaml", "stop.max_hours=1e-9", "-q"], cwd=folder)
    assert done.returncode == 75
    assert command(["run", "recipe.yaml", "-q"], folder).returncode == 0
    check(folder / "run", command)


KILLER = """
import os
import signal
from pathlib import Path


class Once:
    def round(self, row):
        if row["round"] == 4 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_that_went_on_on_other_ranks_after_a_kill(folder, command):
    (folder / "killer.py").write_text(KILLER)
    about = {"algorithm": {"name": "scaffold"}, "checkpoint": {"every": 1}, "observers": [{"factory": "killer:Once"}]}
    write_recipe(folder, rounds=6, **about)
    assert launch(3, ["run", "recipe.yaml", "-q"], cwd=folder).returncode != 0
    assert (folder / "killed").exists()
    assert launch(2, ["run", "recipe.yaml", "-q"], cwd=folder).returncode == 0
    check(folder / "run", command)


@pytest.mark.soak
def test_that_was_given_more_rounds_twice(folder, command):
    for rounds in (2, 5, 9):
        trained(rounds=rounds)
    check(folder / "run", command)


def test_that_went_on_with_other_measures(folder, command):
    """What the present recipe does not measure cannot be checked, and is named; all else is."""
    trained(evaluate={"every": 2, "metrics": ["auroc"]})
    trained(rounds=6, evaluate={"every": 1})
    done = command(["verify", "run", "--all"], folder)
    assert done.returncode == 5, done.stdout
    *_, note, lack, last = done.stdout.splitlines()
    assert note == "columns of the record that the recipe does not measure are not checked: test_auroc"
    assert lack == "the record lacks scores of 2 computed rounds that the recipe asks for"
    assert last == "verified in part: all 6 rounds, bit for bit, on 1 rank"


@pytest.mark.soak
def test_that_went_on_with_another_model_to_measure(folder, command):
    trained(evaluate={"model": "last"})
    trained(rounds=6, evaluate={"model": "last-two"})
    for options in (["--all"], ["--rounds", 1]):
        done = command(["verify", "run", *options], folder)
        assert done.returncode == 5, done.stdout
        assert re.search(r"scores of \d rounds? were measured with evaluate.model: last: they are not", done.stdout)


CLIENTS = {"every": 1, "clients": {"every": 1}}
TUNED = {"every": 1, "clients": {"every": 1, "models": ["global", "fine-tuned"], "fine_tune": {"steps": 3, "lr": 0.1}}}
STEPS = 'evaluate.clients.fine_tune: {"steps":3,"lr":0.1}'
OF_CLIENTS = "clients.csv: auroc, clients.global.train.auroc, test_auroc"


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        ({"batch_size": 7}, {}, "scores of 3 rounds were measured with evaluate.batch_size: 7: they are not checked"),
        (
            CLIENTS,
            {**CLIENTS, "metrics": ["auroc"]},
            "the record lacks scores of 3 computed rounds that the recipe asks",
        ),
        ({**CLIENTS, "metrics": ["auroc"]}, CLIENTS, f"recipe does not measure are not checked: {OF_CLIENTS}"),
        ({"every": 0}, CLIENTS, "the record lacks scores of 3 computed rounds that the recipe asks"),
        (
            {"every": 1, "clients": {"every": 2}},
            CLIENTS,
            "the record lacks scores of 1 computed round that the recipe asks",
        ),
        (
            TUNED,
            CLIENTS,
            f"clients' scores of 3 rounds were measured with evaluate.clients.models: global, fine-tuned, {STEPS}",
        ),
        (CLIENTS, TUNED, "clients' scores of 3 rounds were measured with evaluate.clients.models: global, evaluate."),
    ],
)
@pytest.mark.parametrize("checkpoint", [{"every": 1}, {"every": 1, "keep": 1}], ids=["all kept", "the last kept"])
def test_that_went_on_with_other_chunks_or_measures_of_clients(checkpoint, before, after, note, folder, command):
    trained(rounds=3, checkpoint=checkpoint, evaluate=before)
    trained(rounds=6, checkpoint=checkpoint, evaluate=after)
    done = command(["verify", "run", "--all"], folder)
    assert (done.returncode, note in done.stdout) == (5, True), done.stdout


@pytest.mark.soak
def test_with_an_earlier_run_beside_it(folder, command):
    trained()
    hpcfed.run(small("run", rounds=4, local={"steps": 2, "batch_size": 5, "lr": 0.2}), quiet=True, fresh=True)
    assert (folder / "run" / "previous-1").is_dir()
    check(folder / "run", command)


def test_of_a_sweep(folder, command):
    write_recipe(folder, output=None)
    grid = ["--grid", "local.lr=0.1,0.2", "--output", "sweep", "--quiet"]
    assert command(["sweep", "recipe.yaml", *grid], folder).returncode == 0
    runs = sorted(path.parent for path in (folder / "sweep").rglob("certificate.json"))
    assert len(runs) == 2
    check(runs[1], command)


def test_of_a_study(folder, command, blank_pictures):
    write_recipe(folder, output=None)
    settings = ["--tune", "local.lr=0.05,0.1", "--splits", "2", "--baselines", "none", "--bootstrap", "100"]
    done = command(["study", "recipe.yaml", "rounds=2", *settings, "--output", "study", "--quiet"], folder)
    assert done.returncode == 0, done.stderr
    runs = sorted(path.parent for path in (folder / "study").rglob("certificate.json"))
    check(runs[0], command)
    check(runs[-1], command)


def test_without_a_client(folder, command):
    trained(cohort={"schedule": [[0, 1], [1, 2], [2, 3], [3, 4]]})
    assert command(["without", "run", "--client", 3, "--evaluate", "all", "--quiet"], folder).returncode == 0
    check(folder / "run-without-3", command)


def test_of_before_certificates(folder, command):
    run = trained(checkpoint={"every": 1, "keep": 2})
    (run / "certificate.json").unlink()
    done = command(["verify", run, "--all"], folder)
    assert (done.returncode, "no certificate: the files are not checked" in done.stdout) == (0, True)
    assert command(["certify", run], folder).returncode == 0
    check(run, command)


def test_of_another_processor_that_computes_the_same_bits(folder, command):
    run = trained()
    claim_other_processor(run)
    (run / "certificate.json").unlink()
    write_certificate(RunFolder(run), load_recipe(run / "recipe.yaml"), None)
    check(run, command)


ELSEWHERE = {"ATEN_CPU_CAPABILITY": "default"}
"""Kernels without vector instructions, as on a processor that has none: other last bits, by ``environment.json``."""
CLIENTS = {"every": 2, "models": ["global", "fine-tuned"], "fine_tune": {"steps": 2, "lr": 0.1}}


KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {"update_hashes": True, "evaluate": {"model": "last-two", "train": {"every": 3}, "clients": CLIENTS}},
    "scaffold": {"algorithm": {"name": "scaffold"}, "cohort": {"size": 3}},
    "float64": {"dtype": "float64", "evaluate": {"metrics": ["auroc"], "clients": {"every": 2}}},
    "private": {"parameters": {"private": ["*.bias"]}, "evaluate": {"every": 0, "clients": {"every": 2}}},
}


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> Callable[[str], Path]:
    """Return the folder of a kind's run of eight rounds, computed with other instructions than this process has."""

    @cache
    def of(kind: str) -> Path:
        place = tmp_path_factory.mktemp(kind)
        write_small(place)
        write_recipe(place, rounds=8, local={"steps": 20, "batch_size": 10, "lr": 0.1}, **KINDS[kind])
        done = launch(0, ["run", "recipe.yaml", "-q"], cwd=place, env=ELSEWHERE)
        assert done.returncode == 0, done.stderr
        return place / "run"

    return of


@pytest.fixture(params=often(["fedavg"], KINDS))
def elsewhere(request, computed, folder) -> Path:
    """A copy of such a run."""
    run = Path(shutil.copytree(computed(request.param), folder / "run"))
    here = trained("here", rounds=8, local={"steps": 20, "batch_size": 10, "lr": 0.1}, **KINDS[request.param])
    if (here / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes():
        check(run, command=request.getfixturevalue("command"))
        pytest.skip("this processor has no other instructions")
    return run


@pytest.mark.soak
def test_of_another_processor_that_computes_other_bits(elsewhere, folder, command):
    for options in (["--all"], ["--rounds", 2]):
        done = command(["verify", elsewhere, *options], folder)
        assert (done.returncode, done.stderr) == (5, ""), done.stdout
        assert "this machine computes other bits: instruction set: " in done.stdout
        last, has_hashes = done.stdout.splitlines()[-1], (elsewhere / "update-hashes.bin").exists()
        assert re.fullmatch(r"agrees within \S+, not to the bit: 8 rounds .*the last models as recorded", last)
        assert ("update-hashes.bin has the bits of the other" in done.stdout) == has_hashes
        assert "clients.csv" not in done.stdout


@pytest.mark.parametrize("elsewhere", often(["fedavg"], ["fedavg", "float64", "private"]), indirect=True)
def test_other_bits_of_clients_are_rounding_alone(elsewhere, folder, command):
    """Their rows are checked within the tolerance: rounding is, an invented number is not."""
    table = elsewhere / "clients.csv"
    lines = table.read_text().splitlines()
    names, row = lines[0].split(","), lines[-1].split(",")
    for name, value, code in (("loss", 1 + 1e-15, 5), ("loss", 1.2, 1), ("accuracy", 0.1, 1), ("name", 0, 1)):
        changed = [*row]
        place = names.index(name)
        changed[place] = "another" if name == "name" else repr(float(row[place]) * value)
        table.write_text("\n".join([*lines[:-1], ",".join(changed)]) + "\n")
        (elsewhere / "certificate.json").unlink()
        write_certificate(RunFolder(elsewhere), load_recipe(elsewhere / "recipe.yaml"), None)
        done = command(["verify", elsewhere, "--all"], folder)
        assert (done.returncode, f": {name} " in done.stdout) == (code, code == 1), done.stdout


@pytest.mark.parametrize("elsewhere", ["fedavg"], indirect=True)
def test_a_run_that_went_on_elsewhere_says_so_and_is_not_accused(elsewhere, folder, command):
    """Its rounds are of two machines: neither gives the bits of all."""
    done = command(["run", elsewhere / "recipe.yaml", "rounds=10", f"output={elsewhere}"], folder)
    moved = "after round 8 it went on elsewhere, where last bits may differ: instruction set: "
    assert (done.returncode, moved in done.stdout) == (0, True), done.stdout
    certificate = json.loads((elsewhere / "certificate.json").read_text())
    assert (certificate["repeatable"], moved in certificate["why_not"]) == (False, True)
    done = command(["verify", elsewhere, "--all"], folder)
    assert (done.returncode, "this machine computes other bits: instruction set" in done.stdout) == (5, True), (
        done.stdout
    )
    assert f"{elsewhere}: {moved}" in command(["compare", elsewhere, elsewhere], folder).stdout


def test_moved_with_its_data(folder, command):
    run = trained()
    (folder / "there").mkdir()
    (folder / "small.h5").rename(folder / "there" / "small.h5")
    run.rename(folder / "there" / "mine")
    check(folder / "there" / "mine", command, "--data", folder / "there" / "small.h5")
