"""Observers receive every round, and change neither the bits, nor the record, nor the run's ending."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpcfed
from hpcfed.errors import InputError
from hpcfed.ranks.world import World
from tests.mpi.recipes import small, write_small
from tests.mpi.test_same_result import left_by

pytestmark = pytest.mark.one_mpi

OBSERVERS = '''
import json
import random
import sys
from pathlib import Path

import numpy
import torch


class Diary:
    """Writes down all calls."""

    def __init__(self, path):
        self.path = Path(path)

    def start(self, run):
        self.write("start", run.done, run.recipe["rounds"], run.environment["ranks"], run.folder.name)
        run.recipe.clear()

    def round(self, row):
        self.write("round", row)

    def end(self, status):
        self.write("end", status)

    def write(self, *told):
        with self.path.open("a") as file:
            file.write(json.dumps(told) + "\\\\n")


class Vandal:
    """Changes all that it can reach, then raises in round 3."""

    def __init__(self):
        self.rounds = 0

    def round(self, row):
        self.rounds += 1
        row["seconds"].clear()
        row["cohort"].append(99)
        torch.manual_seed(row["round"])
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)
        random.seed(1)
        numpy.random.seed(1)
        if self.rounds == 3:
            sys.exit("enough")
        assert self.rounds < 3

    def end(self, status):
        raise AssertionError("was dropped before")


class Mute:
    pass


def broken():
    raise OSError("no space")
'''.replace("\\\\n", "\\n")
MODEL = {"factory": "own_observers:Dropped"}
DROPPED = """
import torch


class Dropped(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 4))
"""


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation and the observers; the working folder of all ranks."""

    def write() -> None:
        write_small(shared_tmp)
        (shared_tmp / "own_observers.py").write_text(OBSERVERS + DROPPED)

    world.on_root(write)
    monkeypatch.chdir(shared_tmp)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return shared_tmp


def run(world: World, output: str, *, quiet: bool = True, **changes: Any) -> hpcfed.Result:
    recipe = small(output, model=MODEL, rounds=5, cohort={"size": 3}, **changes)
    return hpcfed.run(recipe, world=world, quiet=quiet)


def diary(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bits_and_record_are_those_of_a_run_without(world, folder, capsys):
    without = left_by(run(world, "without"))
    observers = [
        "own_observers:Vandal",
        {"factory": "own_observers:Diary", "args": {"path": str(folder / "diary")}},
        {"factory": "own_observers:Vandal"},
    ]
    observed = run(world, "with", quiet=False, observers=observers)
    assert left_by(observed) == without
    said = "run: observer own_observers:Vandal: round raised at own_observers.py, line "
    assert "".join(capsys.readouterr()).count(said) == 2 * world.is_root
    told = diary(folder / "diary")
    assert told[0] == ["start", 0, 5, world.size, "with"]
    assert [entry[1] for entry in told[1:-1]] == observed.metrics
    assert told[-1] == ["end", "finished"]
    log = (observed.folder / "logs" / "rank-0.log").read_text()
    assert log.count("observer own_observers:Vandal: round raised at own_observers.py, line") == 2


def test_a_run_goes_on_with_other_observers(world, folder):
    whole = left_by(run(world, "whole"))
    checkpoint = {"every": 1, "keep": 1}
    first = small("parts", model=MODEL, rounds=2, cohort={"size": 3}, checkpoint=checkpoint)
    hpcfed.run(first, world=world, quiet=True)
    observer = {"factory": "own_observers:Diary", "args": {"path": str(folder / "diary")}}
    parts = run(world, "parts", checkpoint=checkpoint, observers=observer)
    assert left_by(parts) == whole
    told = diary(folder / "diary")
    assert told[0][1] == 2
    assert [entry[1]["round"] for entry in told[1:-1]] == [3, 4, 5]
    run(world, "parts", checkpoint=checkpoint)  # finished, with any observers
    assert len(diary(folder / "diary")) == len(told)


class Looker:
    """Keeps a parameter of each round, and spoils the copies that it gets."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def look(self, round: Any) -> None:
        name = "2.bias"
        self.kept.append((round.number, round.metrics["hash"], round.parameters[name].clone()))
        for each in round.parameters.values():
            each.zero_()


def test_an_observer_that_looks_gets_the_model_of_each_round(world, folder):
    lookers = Looker(), Looker()
    model = nn.Sequential(nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 4))
    plain = hpcfed.run(small("plain", model=model, seed=1), world=world, quiet=True)
    looked = hpcfed.run(small("looked", model=model, seed=1, observers=[*lookers]), world=world, quiet=True)
    assert [row["hash"] for row in looked.metrics] == [row["hash"] for row in plain.metrics]
    for looker in lookers if world.is_root else ():
        assert [(number, text) for number, text, _ in looker.kept] == [(r["round"], r["hash"]) for r in plain.metrics]
        assert torch.equal(looker.kept[-1][2], plain.module[2].bias)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("observers", "message"),
    [
        ([{"factory": "own_observers:Dairy"}], "did you mean 'Diary'"),
        ([{"factory": "own_observers:Diary"}], "own_observers:Diary' raised TypeError"),
        (
            [{"factory": "own_observers:broken"}],
            "own_observers:broken' raised OSError: no space (own_observers.py, line",
        ),
        (
            [{"factory": "own_observers:Mute"}],
            "expected an object with start, round, look, end, or one of them, got one of Mute",
        ),
        ([{"factory": "own_observers:Diary", "arg": {}}], "unknown key 'observers.0.arg'; did you mean 'args'"),
        (["tensorbord"], "observers.0.name: expected 'tensorboard', 'wandb' or 'mlflow', got 'tensorbord'"),
        ([{}], "exactly one of 'name' and 'factory'"),
    ],
)
def test_what_cannot_observe_is_refused_before_the_run_begins(world, folder, observers, message):
    with pytest.raises(InputError) as error:
        run(world, "refused", observers=observers)
    assert message in str(error.value)
    assert not (folder / "refused").exists()


@pytest.mark.thinned
def test_a_library_that_is_not_installed_is_refused_with_its_remedy(world, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"wandb, which is not installed; pip install wandb"):
        run(world, "refused", observers="wandb")
    assert not (folder / "refused").exists()


@pytest.mark.serial
def test_tensorboard_gets_the_rounds_numbers(world, folder):
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("needs tensorboard (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(world, "run", observers="tensorboard")
    events = EventAccumulator(str(result.folder / "logs" / "tensorboard"))
    events.Reload()
    for name in ("test_accuracy", "params_up"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(row["round"], pytest.approx(row[name])) for row in result.metrics]
    assert len(events.Scalars("seconds/local")) == 5
    assert "recipe/text_summary" in events.Tags()["tensors"]


@pytest.mark.serial
@pytest.mark.soak
def test_weights_and_biases_writes_its_run_offline(world, folder):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("needs wandb (pip install wandb)")
    without = left_by(run(world, "without"))
    result = run(world, "run", observers={"name": "wandb", "args": {"project": "tests"}})
    assert left_by(result) == without
    (offline,) = (result.folder / "logs" / "wandb").glob("offline-run-*")
    assert list(offline.glob("run-*.wandb"))


@pytest.mark.serial
@pytest.mark.soak
def test_mlflow_goes_on_with_the_run_of_a_folder(world, folder):
    if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("sqlalchemy") is None:
        pytest.skip("needs mlflow (pip install mlflow)")
    from mlflow import MlflowClient

    without = left_by(run(world, "without"))
    observer = {"name": "mlflow", "args": {"tags": {"team": "tests"}}}
    changes = {"model": MODEL, "cohort": {"size": 3}, "checkpoint": {"every": 1, "keep": 1}, "observers": observer}
    hpcfed.run(small("it's", rounds=2, **changes), world=world, quiet=True)
    result = hpcfed.run(small("it's", rounds=5, **changes), world=world, quiet=True)
    assert left_by(result) == without
    client = MlflowClient(f"sqlite:///{result.folder.absolute() / 'logs' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("hpcfed").experiment_id])
    assert (found.info.status, found.data.tags["team"], found.data.params["local.lr"]) == ("FINISHED", "tests", "0.1")
    for name in ("test_accuracy", "params_up"):
        history = [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, name)]
        assert history == [(row["round"], row[name]) for row in result.metrics]
    log = result.folder / "logs" / "rank-0.log"
    assert not log.exists() or "observer" not in log.read_text()  # warnings of libraries are there, too
    log = result.folder / "logs" / "rank-0.log"
    assert not log.exists() or "observer" not in log.read_text()  # warnings of libraries are there, too
