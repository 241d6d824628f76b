"""``hpcfed reproduce``: from nothing to a table with the paper's numbers, and on from where it was left."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.split import split
from hpcfed.cli import reproduce
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, Stopped
from hpcfed.lab.report.read import read_run
from hpcfed.lab.reproduce.catalogue import experiments, find
from hpcfed.lab.reproduce.classes import class_counts, compare_classes
from hpcfed.lab.reproduce.experiment import Case, Data, Experiment, Measure
from hpcfed.lab.reproduce.figures import draw
from hpcfed.lab.reproduce.inputs import Places, lacking, prepare
from hpcfed.ranks.signals import Signals
from hpcfed.ranks.world import World
from tests.federations import blobs, write_federation
from tests.launch import ROOT, launch
from tests.mpi.recipes import write_small

TORCHLESS = """
import sys
from hpcfed.cli.main import cli
cli.main(["reproduce", "--list"], prog_name="hpcfed", standalone_mode=False)
assert "torch" not in sys.modules and "mpi4py" not in sys.modules
"""


@pytest.mark.soak
def test_the_list_needs_neither_torch_nor_mpi():
    done = launch(0, [TORCHLESS], program=["-c"])
    assert done.returncode == 0, done.stderr
    assert "fedexp-table1" in done.stdout
    assert "waits for mnist (put its files into RAW/mnist)" in done.stdout


def test_the_toy_agrees_with_the_papers_equations_and_goes_on_to_more_rounds(command, tmp_path):
    some = ["--rounds", "2", "--method", "fedavg", "--method", "last"]
    first = command(["reproduce", "fedexp-figure2", "--output", "out", *some], tmp_path)
    assert first.returncode == 0, first.stderr
    again = command(["reproduce", "fedexp-figure2", "--output", "out", "--rounds", "3"], tmp_path)
    assert "0 done" in again.stdout
    assert "3 of 20" in again.stdout
    folder = tmp_path / "out" / "fedexp-toy"
    loss = {name: read_run(folder / f"sweep/runs/toy.{name}.0").column("train_loss") for name in ("fedavg", "last")}
    # From (0, 0) by exact projections, F = F_1 + F_2 over 2: FedAvg at (1.2, 0.9), (1.2, 1.05), (1.14, 1.155); FedExP
    # with η_g = 1.2, 6, 1.2 at (1.44, 1.08), (0, 1.08), (0.9216, 1.7712).
    np.testing.assert_allclose(loss["fedavg"], np.array([1.53, 1.6425, 1.488825]) / 2, rtol=1e-6)
    np.testing.assert_allclose(loss["last"][:2], np.array([2.9952, 3.6864]) / 2, rtol=1e-6)
    averaged = read_run(folder / "sweep/runs/toy.fedavg.0")
    np.testing.assert_allclose(averaged.column("test_w1"), [1.2, 1.2, 1.14], rtol=1e-6)
    np.testing.assert_allclose(averaged.column("test_w2"), [0.9, 1.05, 1.155], rtol=1e-6)
    for drawn in ("toy-train_loss", "toy-test_w2-test_w1"):
        assert (folder / "figures" / f"{drawn}.pdf").read_bytes().startswith(b"%PDF")
    assert "| toy in the plane | FedAvg |" in (folder / "table.md").read_text()


def test_seeds_of_ones_own_are_run_beside_the_experiments(command, tmp_path):
    write_small(tmp_path)
    (tmp_path / "own.yaml").write_text(OWN)
    for seeds, count in (("7,9", 2), ("1", 1)):
        done = command(["reproduce", "own.yaml", "--method", "fedavg", "--seeds", seeds, "--rounds", "1"], tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"| 1 of 3 | {count} of {count} |" in (tmp_path / "runs/reproduce/own/table.md").read_text()
    runs = tmp_path / "runs/reproduce/own/sweep/runs"
    assert sorted(folder.name for folder in runs.iterdir()) == [f"ours.fedavg.{seed}" for seed in (0, 7, 9)]
    assert len({(runs / f"ours.fedavg.{seed}/metrics.jsonl").read_bytes() for seed in (0, 7, 9)}) == 3
    refused = command(["reproduce", "own.yaml", "--seeds", "a"], tmp_path)
    assert (refused.returncode, "--seeds: expected how many, or a list" in refused.stderr) == (2, True)


@pytest.mark.soak
def test_a_signal_while_figures_are_drawn_lets_them_be_drawn(command, tmp_path, monkeypatch):
    """All runs are done, and nothing is left to go on with."""

    def interrupted(*arguments: Any) -> list[Path]:
        os.kill(os.getpid(), signal.SIGINT)
        return draw(*arguments)

    monkeypatch.setattr("hpcfed.lab.reproduce.session.draw", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    write_small(tmp_path)
    (tmp_path / "own.yaml").write_text(OWN)
    try:
        done = command(["reproduce", "own.yaml", "--output", "out", "--rounds", "1"], tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "own" / "table.md").exists()


def test_a_signal_ends_a_command_of_several_experiments_that_have_no_runs(monkeypatch):
    caught, shown = Signals(), []

    class Session:
        world = World()

        def prepare(self, experiment: str) -> str:
            return experiment

        def run(self, experiment: str) -> bool:
            caught.name = "SIGINT"
            return False

        def show(self, experiment: str) -> None:
            shown.append(experiment)

    monkeypatch.setattr(reproduce, "_show", Session.show)
    with pytest.raises(Stopped, match="both stopped, runs are left"):
        reproduce._run_each(Session(), ["one", "another"], "both", caught)
    assert shown == ["one"]


@pytest.mark.soak
def test_methods_are_run_one_by_one_or_on_ranks_started_here_and_never_again(command, tmp_path):
    asked = ["reproduce", "fedexp-figure2", "--output", "out", "--rounds", "2"]
    one = command([*asked, "--method", "fedavg"], tmp_path)
    assert one.returncode == 0, one.stderr
    assert "1 run, 0 done" in one.stdout
    assert one.stdout.count("not run") == 3
    rest = launch(0, [*asked, "--ranks", "2"], cwd=tmp_path)
    assert rest.returncode == 0, rest.stderr
    assert "4 runs, 1 done; 2 ranks in 2 groups" in rest.stdout
    assert "not run" not in rest.stdout
    shutil.move(tmp_path / "out", tmp_path / "moved")
    shown = command(["reproduce", "fedexp-figure2", "--output", "moved", "--table"], tmp_path)
    assert "left out" not in shown.stdout
    assert "runs" not in shown.stdout.partition("toy in the plane")[0]
    assert "2 of 20" in shown.stdout


@pytest.mark.soak
def test_a_changed_copy_of_an_experiment_is_run_under_its_own_name(command, tmp_path):
    (tmp_path / "mine").mkdir()
    copy = tmp_path / "mine" / "short.yaml"
    copy.write_text((ROOT / "jobs" / "recipes" / "fedexp" / "toy.yaml").read_text().replace("rounds: 20", "rounds: 2"))
    done = command(["reproduce", "mine/short.yaml", "--output", "out", "--method", "last"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stdout
    assert (tmp_path / "out" / "short" / "table.md").is_file()
    no_recipe = command(["run", "mine/short.yaml"], tmp_path)
    assert no_recipe.returncode == 2
    assert "an experiment of many runs: expected a recipe; hpcfed reproduce mine/short.yaml" in no_recipe.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no NAME"),
        (["fedexp-tabel1"], "did you mean 'fedexp-table1'"),
        (["fedexp"], "fedexp is a paper: expected one of its experiments, tables or figures; see --list fedexp"),
        (["fedexp-table3", "--case", "cifar"], "did you mean 'cifar10'"),
        (["fedexp-figure2", "--method", "fedexp"], "no method 'fedexp'; did you mean 'fedavg'"),
        (
            ["niid-fcube", "--method", "own"],
            "known: fedavg, feddyn, fedexp, fednova, fedprox, gel, scaffold, scaffold-exp",
        ),
        (["feddyn-table5", "--case", "iid-1"], "no data"),
        (["fedexp-figure2", "--table"], "nothing has been run"),
        (["flamby-heart", "--case", "sites"], "choose by --method"),
        (["feddyn-dynamics", "--method", "feddyn"], "choose by --case"),
        (["feddyn-dynamics", "--table"], "feddyn-dynamics trains for its table"),
        (
            ["fedexp-figure2", "--table", "--fresh", "--ranks", "2"],
            "--table runs nothing, and reads no --ranks, --fresh",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(command, tmp_path, arguments, words):
    done = command(["reproduce", *arguments], tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_raw_data_is_found_under_any_spelling_of_its_name(tmp_path):
    experiment = experiments()["feddyn-mnist"]
    assert lacking(experiment, Places(tmp_path / "out", tmp_path)).keys() == experiment.cases.keys()
    (tmp_path / "M-NIST").mkdir()
    assert lacking(experiment, Places(tmp_path / "out", tmp_path)) == {}
    shutil.rmtree(tmp_path / "M-NIST")
    assert lacking(experiment, Places(tmp_path / "out")).keys() == experiment.cases.keys()


def test_a_file_among_others_of_its_folder_is_found(tmp_path):
    plays, places = experiments()["feddyn-shakespeare-plays"], Places(tmp_path / "out", tmp_path)
    (tmp_path / "Shakespeare").mkdir()
    (tmp_path / "Shakespeare" / "tinyshakespeare.txt").write_text("ROLE:\nA word.\n")
    assert set(lacking(plays, places).values()) == {f"shakespeare (as {tmp_path}/shakespeare/plays.txt)"}
    (tmp_path / "Shakespeare" / "plays.txt").write_text("ROLE:\nA word.\n")
    data = plays.cases["roles-10"].data
    assert places.raw_of(data) == tmp_path / "Shakespeare" / "plays.txt"
    other = data.model_copy(update={"raw": "shakespeare/other.txt"})
    assert places.federation(data, 0) != places.federation(other, 0)  # two texts of the same options


def test_a_federation_of_other_raw_files_is_not_used_for_these(tmp_path):
    """Two folders of one data set: the published images and copies of them, say, with one output."""
    data, output = experiments()["feddyn-shakespeare-plays"].cases["roles-10"].data, tmp_path / "out"
    data = data.model_copy(update={"clients": 2, "partition": "iid", "options": {}})
    for folder, word in (("first", "crown"), ("second", "grave")):
        (tmp_path / folder / "shakespeare").mkdir(parents=True)
        line = f"The {word} of a king is heavy to bear, and heavier still to lose. " * 10
        (tmp_path / folder / "shakespeare" / "plays.txt").write_text(f"KING:\n{line}\n\nQUEEN:\n{line}\n")
    assert len(list(prepare(data, 0, Places(output, tmp_path / "first")))) == 1
    assert list(prepare(data, 0, Places(output, tmp_path / "first"))) == []
    assert list(prepare(data, 0, Places(output))) == []
    with pytest.raises(InputError, match=r"another plays\.txt than that of the prepared file"):
        list(prepare(data, 0, Places(output, tmp_path / "second")))
    (tmp_path / "second" / "shakespeare" / "plays.txt").write_bytes(
        (tmp_path / "first" / "shakespeare" / "plays.txt").read_bytes()
    )
    assert list(prepare(data, 0, Places(output, tmp_path / "second"))) == []


def test_jobs_that_begin_at_once_prepare_one_file(tmp_path, monkeypatch):
    """Another job writes the file while this one reads the raw data, and may read it by then: it is not replaced."""
    data, places = Data(source="linear-regression", options={"dimension": 4}, clients=2), Places(tmp_path)
    written = []

    def overtaken(*options):
        monkeypatch.undo()
        list(prepare(data, 0, places))
        written.append(places.federation(data, 0).stat())
        return split(*options)

    monkeypatch.setattr("hpcfed.lab.reproduce.inputs.split", overtaken)
    assert list(prepare(data, 0, places)) == [f"prepared {places.federation(data, 0)}"]
    assert os.path.samestat(places.federation(data, 0).stat(), *written)


def test_images_are_chosen_where_they_are_or_have_been_prepared(tmp_path):
    places = Places(tmp_path / "out", None)

    def named() -> str:
        (found,) = find("feddyn-fedsplit", "small", images=lambda variant: not lacking(variant, places))
        return found.name

    assert named() == "feddyn-fedsplit"
    prepared = experiments()["feddyn-fedsplit"].at("small", images=True)
    for case in prepared.cases.values():
        file = places.federation(case.data, 0)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert named() == "feddyn-fedsplit-cifar10"


def test_classes_are_counted_from_the_largest():
    labels, offsets = np.array([0, 0, 0, 1, 2, 1, 1, 1, 1, 1]), np.array([0, 5, 10])
    assert class_counts(labels, offsets, 3, 0.6).tolist() == [1, 1]
    assert class_counts(labels, offsets, 3, 0.8).tolist() == [2, 1]
    assert class_counts(labels, offsets, 3, 1.0).tolist() == [3, 1]


def test_classes_of_a_single_client_have_no_deviation(tmp_path):
    one = Case(title="pooled", data=Data(file=str(write_federation(tmp_path / "one.h5", **blobs(1)))))
    experiment = Experiment(name="own", title="Classes", cases={"pooled": one}, measure=Measure(kind="classes"))
    table, _ = compare_classes(experiment, Places(tmp_path), tmp_path / "figures")
    assert all(re.fullmatch(r"\d\.00", row[2]) for row in table.rows)


def test_noise_on_features_needs_no_test_set(tmp_path):
    data = Data(source="linear-regression", options={"dimension": 4}, clients=2)
    plain, noisy = data, data.model_copy(update={"noise": 0.5})
    x = []
    for one in (plain, noisy):
        list(prepare(one, 0, Places(tmp_path)))
        with Federation.open(Places(tmp_path).federation(one, 0)) as federation:
            x.append([federation.client(k)[0] for k in range(2)])
    np.testing.assert_allclose(x[0][0], x[1][0], rtol=1e-6)  # the first client has none
    assert 0.3 < np.std(x[1][1] - x[0][1]) < 0.7


def test_data_that_is_not_whole_is_named_and_left_out(command, tmp_path):
    """`feddyn-table5` has experiments on CIFAR-10 and on MNIST; here are folders of both, and no file in them."""
    for name in ("mnist", "cifar10"):
        (tmp_path / "raw" / name).mkdir(parents=True)
    done = command(["reproduce", "feddyn-table5", "--raw", "raw", "--rounds", "1", "--case", "iid-1"], tmp_path)
    assert done.returncode == 2  # nothing is left
    assert "missing data_batch_1.bin" in done.stderr
    for experiment in ("feddyn-mnist", "feddyn-cifar10"):
        assert f"{experiment} is left out: " in done.stdout


OWN = """
paper: own
name: own
title: Our hospitals
shows: {}
cost: {full: seconds}
recipe: {rounds: 3, model: {name: logistic}, local: {steps: 2, batch_size: 10, lr: 0.1}, evaluate: {every: 1}}
cases: {ours: {title: all, data: {file: small.h5}}}
methods:
  fedavg: {title: FedAvg, recipe: {algorithm: {name: fedavg}}}
  fedexp: {title: FedExP, recipe: {algorithm: {name: fedexp}}}
measure: {kind: final}
"""


def test_an_own_experiment_shows_the_runs_of_its_recipe_alone(command, tmp_path):
    write_small(tmp_path)
    (tmp_path / "own.yaml").write_text(OWN)
    (tmp_path / "elsewhere").mkdir()
    whole = command(["reproduce", "../own.yaml", "--output", "../runs/reproduce"], tmp_path / "elsewhere")
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count("3 of 3") == 2
    assert "aper" not in whole.stdout
    shorter = command(["reproduce", "own.yaml", "--rounds", "1"], tmp_path)  # at most so many *now*
    assert shorter.returncode == 0, shorter.stderr
    assert shorter.stdout.count("3 of 3") == 2
    (tmp_path / "own.yaml").write_text(OWN.replace("every: 1", "every: 1, model: last-two"))
    other = " ".join(command(["reproduce", "own.yaml", "--table"], tmp_path).stdout.split())
    assert "FedAvg, all (evaluated.model 'last' there and 'last-two' here)" in other
    assert "FedExP, all" not in other
    (tmp_path / "own.yaml").write_text(OWN.replace("lr: 0.1", "lr: 0.2"))
    mixed = command(["reproduce", "own.yaml", "--fresh", "--method", "fedexp"], tmp_path)
    assert mixed.returncode == 0, mixed.stderr
    assert mixed.stdout.count("3 of 3") == 1
    assert "FedAvg, all (local.lr 0.1 there and 0.2 here)" in " ".join(mixed.stdout.split())
    assert "| all | FedAvg | left out | 0 of 3 |" in (tmp_path / "runs/reproduce/own/table.md").read_text()


def test_an_own_file_that_is_not_there_is_named(command, tmp_path):
    (tmp_path / "own.yaml").write_text(OWN)
    done = command(["reproduce", "own.yaml"], tmp_path)
    assert done.returncode == 2
    assert f"all waits for {tmp_path}/small.h5 (no such file)" in done.stdout
    (tmp_path / "own.yaml").write_text(OWN.replace("small.h5", "small.h5, clients: 3"))
    assert "got clients, too" in command(["reproduce", "own.yaml"], tmp_path).stderr
