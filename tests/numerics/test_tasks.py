"""Label sets and tokens are learnt, the user's loss and metrics are used, and unfit models are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file

import hpcfed
from hpcfed.errors import InputError
from tests.federations import write_federation
from tests.mpi.recipes import small

OWN = """
import torch


def summed(output, target):
    return torch.tensor(float(len(target)))


def top2(output, target):
    return (output.topk(2).indices == target[:, None]).sum(), len(target)


def of_class_9(output, target):
    return 0.0, (target == 9).sum()


def one(output, target):
    return 1.0


class Probabilities(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(6, 4), torch.nn.Softmax(1))


class Dropping(torch.nn.Linear):
    def __init__(self):
        super().__init__(6, 4)

    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x))  # in evaluation, too


class Neighbours(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(9)
        super().__init__(6, 4)

    def forward(self, x):
        return super().forward(x - x.mean(0))


def uncounted(output, target):
    return 1.0, -1


def raising(output, target):
    raise OSError("no licence server")


def failing():
    return raising


class Counting(torch.nn.Linear):
    def __init__(self):
        super().__init__(6, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input):
        if self.training:
            self.calls += 1
        return super().forward(input)
"""


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """Four clients of labelled vectors, also as label sets and as sequences; the working folder of all ranks."""
    rng = np.random.default_rng(7)
    x = rng.integers(256, size=(5, 24, 6), dtype=np.uint8)
    y = (x[..., :4] // 64).max(-1)

    def write(name: str, x: np.ndarray, y: np.ndarray, num_classes: int, task: str) -> None:
        clients = list(zip(x[:4], y[:4], strict=True))
        with h5py.File(write_federation(Path(name), clients, num_classes=num_classes, test=(x[4], y[4])), "r+") as file:
            file.attrs["task"] = task

    def write_all() -> None:
        write("classes.h5", x, y, 4, "classification")
        write("nobody.h5", x[:, :0], y[:, :0], 4, "classification")
        write("labels.h5", x, (x[..., :3] > 127).astype(np.uint8), 3, "multi-label")
        cycle = (np.arange(9) + rng.integers(6, size=(5, 24, 1))) % 6
        write("tokens.h5", cycle[..., :8].astype(np.uint8), cycle[..., 8], 6, "next-token")
        write("steps.h5", cycle[..., :8], cycle[..., 1:], 6, "next-token")
        Path("own_functions.py").write_text(OWN, encoding="utf-8")

    monkeypatch.chdir(shared_tmp)
    world.on_root(write_all)
    return shared_tmp


def last_row(world: Any, **changes: Any) -> dict[str, Any]:
    return hpcfed.run(small(changes.pop("output", "run"), **changes), world=world, quiet=True).metrics[-1]


def test_label_sets_are_learnt(folder, world):
    """The subset accuracy is that of the saved model, computed here."""
    local = {"steps": 20, "batch_size": 8, "lr": 0.5}
    row = last_row(world, data="labels.h5", model={"name": "logistic"}, local=local, rounds=8)
    parameters = load_file("run/model.safetensors")
    with h5py.File("labels.h5") as file:
        x, y = file["test/x"][:] / np.float32(255), file["test/y"][:]
    told = x @ parameters["weight"].T + parameters["bias"] > 0
    assert row["test_accuracy"] == (told == y).all(1).mean()
    assert row["test_accuracy"] > 0.6


def test_a_cycle_of_tokens_is_learnt(folder, world):
    local = {"steps": 10, "batch_size": 8, "lr": 0.02, "optimizer": "adam"}
    row = last_row(world, data="tokens.h5", model={"name": "lstm", "hidden": 12}, local=local, rounds=8)
    assert row["test_accuracy"] == 1.0


def test_the_users_loss_is_torchs_where_it_says_so(folder, world):
    factory = {"factory": "torch.nn:CrossEntropyLoss"}
    evaluate = {"train": {"every": 1}}
    ours = last_row(world, data="classes.h5", dtype="float64", evaluate=evaluate)
    theirs = last_row(world, data="classes.h5", dtype="float64", evaluate=evaluate, loss=factory, output="other")
    for key in ("local_loss", "test_loss", "train_loss", "test_accuracy", "train_accuracy"):
        assert theirs[key] == pytest.approx(ours[key], rel=1e-12)


def test_own_metrics_are_in_every_row(folder, world):
    metrics = {"top2": "own_functions:top2", "nine": "own_functions:of_class_9"}
    evaluate = {"every": 2, "batch_size": 5, "metrics": metrics}
    recipe = small("run", data="classes.h5", model={"name": "logistic"}, evaluate=evaluate)
    rows = hpcfed.run(recipe, world=world, quiet=True).metrics
    assert [row["test_nine"] for row in rows] == [None] * 3  # there is no such class
    parameters = load_file("run/model.safetensors")
    with h5py.File("classes.h5") as file:
        x, y = file["test/x"][:] / np.float32(255), file["test/y"][:]
    best = np.argsort(x @ parameters["weight"].T + parameters["bias"])[:, -2:]
    top2 = (best == y[:, None]).any(1).mean()
    assert [row["test_top2"] for row in rows][0::2] == [None, top2]
    assert [row["train_top2"] for row in rows] == [None] * 3


def test_a_softmax_before_the_cross_entropy_is_reported(folder, world, capfd):
    hpcfed.run(small("run", data="classes.h5", model={"factory": "own_functions:Probabilities"}, rounds=1), world=world)
    assert ("takes the scores before a softmax: leave it out" in capfd.readouterr().out) == world.is_root


@pytest.mark.parametrize(
    ("model", "why"), [("Dropping", "random draws (functional.dropout"), ("Neighbours", "the samples beside it")]
)
def test_a_model_that_is_not_steady_in_evaluation_is_reported(folder, world, capfd, model, why):
    hpcfed.run(small("run", data="classes.h5", model={"factory": f"own_functions:{model}"}, rounds=1), world=world)
    said = capfd.readouterr().out
    told = f"in evaluation, too, the model's output for a sample depends on {why}"
    assert (told in said) == world.is_root
    assert ("the model's code sets torch's seed to 9: its" in said) == (world.is_root and model == "Neighbours")


def test_a_model_that_remembers_its_clients_is_refused(folder, world):
    """What a buffer keeps of one client would reach the next one trained on the same rank."""
    with pytest.raises(InputError, match=r"round 1, client \d.*'calls'") as error:
        last_row(world, data="classes.h5", model={"factory": "own_functions:Counting"})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": {"factory": "own_functions:sumed"}}, ("loss.factory", "did you mean 'summed'")),
        ({"loss": {"factory": "own_functions:summed"}}, ("loss.factory", "TypeError", "a factory returns")),
        ({"loss": {"factory": "torch.nn:NLLLoss"}}, ("one loss per sample", "(2,)", "shape ()")),
        ({"loss": {"factory": "own_functions:failing"}}, ("loss.factory", "no licence", "(2, 4) torch.float32")),
        ({"loss": {"name": "squared", "factory": "own_functions:top2"}}, ("'name' or 'factory'",)),
        ({"loss": {"name": "binary-cross-entropy"}}, ("does not fit a classification", "'cross-entropy'")),
        ({"evaluate": {"metrics": {"one": "own_functions:one"}}}, ("evaluate.metrics.one", "(sum, count)", "1.0")),
        ({"evaluate": {"metrics": {"u": "own_functions:uncounted"}}}, ("evaluate.metrics.u", "count from 0", "-1")),
        ({"evaluate": {"metrics": {"f": "own_functions:raising"}}}, ("evaluate.metrics.f", "no licence server")),
        ({"evaluate": {"metrics": {"loss": "own_functions:one"}}}, ("other than loss and accuracy",)),
        ({"evaluate": {"metrics": {"name": "own_functions:one"}}}, ("other than the columns of clients.csv: round,",)),
        ({"data": "nobody.h5"}, ("nobody.h5: no client has a training sample",)),
        ({"data": "tokens.h5"}, ("'mlp' takes numbers", "next-token", "lstm")),
        ({"model": {"name": "lstm"}}, ("'lstm' takes tokens", "classification")),
        ({"data": "steps.h5", "model": {"name": "lstm"}}, ("one target per sample", "(8,)", "each position a sample")),
        ({"local": {"steps": 1, "augment": {"flip": 0.5}}}, ("local.augment needs images", "(6,)")),
        ({"local": {"steps": 1, "augment": {"per": "batch"}}}, ("local.augment", "'crop' or 'flip'")),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_round(changes, says, folder, world):
    with pytest.raises(InputError) as error:
        last_row(world, **{"data": "classes.h5", **changes})
    assert all(fragment in str(error.value) for fragment in says), error.value
    assert "\n" not in str(error.value)
    assert not Path("run").exists()
