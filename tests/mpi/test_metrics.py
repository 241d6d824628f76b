"""The recipe's metrics equal their libraries' to the last digit, on any number of ranks; undefined ones are named."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from sklearn import metrics as sk

import hpcfed
from hpcfed.config.metrics import BUILT_IN, targets_of
from hpcfed.errors import InputError
from hpcfed.evaluation.metrics import FUNCTIONS
from hpcfed.models.losses import cox
from hpcfed.ranks.world import World
from tests.federations import write_federation
from tests.mpi.recipes import small

SIZES, NUM_TEST = (23, 9, 0, 14, 5), 37  # all different, to distinguish the kept predictions
OWN = """
import numpy as np

def keep(output, target):
    np.savez(f"kept-{len(target)}.npz", output=output.double().numpy(), target=target.numpy())
    return 1.0

def spread(output, target):
    return float("nan") if len(target) < 6 else output.std()

def positive(output, target):
    return (output > 0).sum(), output.numel()

def words(output, target):
    return "high"

def failing(output, target):
    raise KeyError("no such class")
"""
TASKS: Mapping[str, tuple[str, int | None]] = {
    "binary": ("classification", 2),
    "classes": ("classification", 4),
    "label": ("multi-label", 1),
    "labels": ("multi-label", 3),
    "numbers": ("regression", None),
    "times": ("survival", None),
}


def write(path: Path, task: str, num_classes: int | None) -> None:
    """Write ragged sites, the third empty, the last of one class; test sets of their own with the fourth empty."""
    rng = np.random.default_rng(3)
    pieces = []
    for count in (*SIZES, NUM_TEST):
        x = rng.normal(size=(count, 6)).astype(np.float32)
        score = x[:, : num_classes or 2] + 0.5 * rng.normal(size=(count, num_classes or 2))
        times = np.stack([rng.random(count) < 0.6, np.ceil(4 * np.exp(-score[:, 0]))], axis=1)
        y = {"classification": score.argmax(1), "multi-label": score > 0, "survival": times}.get(task, score)
        y = np.zeros_like(y) if count == SIZES[-1] else y
        pieces.append((x, y.astype(np.uint8 if num_classes else np.float32)))
    write_federation(path, pieces[:-1], num_classes=num_classes, test=pieces[-1], content=path.stem)
    with h5py.File(path, "r+") as file:
        file.attrs["task"] = task
        file["test/offsets"] = np.array([0, 12, 20, 26, 26, NUM_TEST])


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    def write_all() -> None:
        for name, (task, num_classes) in TASKS.items():
            write(shared_tmp / f"{name}.h5", task, num_classes)
        (shared_tmp / "own_metrics.py").write_text(OWN, encoding="utf-8")

    world.on_root(write_all)
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def fitting(name: str) -> list[str]:
    return [metric for metric, kind in BUILT_IN.items() if targets_of(*TASKS[name]) in kind.targets]


def recipe(
    name: str, output: str, changes: Mapping[str, Any] = MappingProxyType({}), **evaluate: Any
) -> dict[str, Any]:
    own = {"kept": {"whole": "own_metrics:keep"}, "positive": "own_metrics:positive"}
    metrics = [*fitting(name), own | {"few": {"sum": "own_metrics:positive", "better": "lower"}}]
    evaluate = {"batch_size": 8, "train": {"every": 1}, "clients": {"every": 2}, "metrics": metrics, **evaluate}
    given = {"data": f"{name}.h5", "model": {"name": "linear"}, "rounds": 2, "evaluate": evaluate}
    return small(output, **{**given, **changes})


def expected(metric: str, name: str, output: np.ndarray, target: np.ndarray) -> Any:
    """Return a metric by a direct call of its library; None where it is undefined."""
    if name == "label":
        target, output = target[:, 0], np.concatenate([np.zeros_like(output), output], axis=1)
    if name == "times":
        return concordance(output[:, 0], *target.T)
    several, probability = name == "labels", softmax(output, axis=1)
    scores = output if several else probability if name == "classes" else output[:, -1] - output[:, 0]
    predicted = output > 0 if several else output.argmax(1)
    present = len(np.unique(target)) == (TASKS[name][1] or 0) or name == "label"
    one_class = bool((target == target[0]).all()) or (name == "classes" and not present)
    if metric in ("auroc", "average-precision", "r2") and one_class:
        return None
    calls: Mapping[str, Callable[[], Any]] = {
        "auroc": lambda: sk.roc_auc_score(target, scores, **({"multi_class": "ovr"} if name == "classes" else {})),
        "average-precision": lambda: sk.average_precision_score(target, scores),
        "f1-macro": lambda: sk.f1_score(target, predicted, average="macro"),
        "balanced-accuracy": lambda: np.mean([(predicted[target == c] == c).mean() for c in np.unique(target)]),
        "confusion-matrix": lambda: sk.confusion_matrix(target, predicted, labels=range(output.shape[1])).tolist(),
        "calibration-error": lambda: calibration_error(probability, target),
        "brier": lambda: brier(probability, target),
        "dice": lambda: np.mean([dice(a > 0, b > 0) for a, b in zip(output, target, strict=True)]),
        "mae": lambda: sk.mean_absolute_error(target, output),
        "rmse": lambda: sk.root_mean_squared_error(target, output),
        "r2": lambda: sk.r2_score(target, output),
    }
    return calls[metric]()


def calibration_error(probability: np.ndarray, target: np.ndarray) -> float:
    """Equation 3 of Guo et al., bin by bin."""
    total, confidence, right = 0.0, probability.max(1), probability.argmax(1) == target
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return total


def brier(probability: np.ndarray, target: np.ndarray) -> float:
    """Brier's sum over classes, sample by sample; of two classes half of it, the second one's."""
    squares = [sum((p - (c == y)) ** 2 for c, p in enumerate(row)) for row, y in zip(probability, target, strict=True)]
    return np.mean(squares) / (2 if probability.shape[1] == 2 else 1)


def concordance(risk: np.ndarray, event: np.ndarray, time: np.ndarray) -> float | None:
    """Harrell's C, pair by pair."""
    total = pairs = 0.0
    for i in np.flatnonzero(event):
        for j in range(len(time)):
            if time[i] < time[j] or (time[i] == time[j] and not event[j]):
                pairs += 1
                total += (risk[i] > risk[j]) + 0.5 * (risk[i] == risk[j])
    return total / pairs if pairs else None


def partial_likelihood(risk: np.ndarray, event: np.ndarray, time: np.ndarray) -> float:
    """The mean of Cox's factors, sample by sample, from the latest."""
    order = sorted(range(len(time)), key=lambda i: -time[i])
    terms = [np.log(np.exp(risk[order[: place + 1]]).sum()) - risk[i] for place, i in enumerate(order) if event[i]]
    return np.sum(terms) / len(time)


def dice(first: np.ndarray, second: np.ndarray) -> float:
    both = first.sum() + second.sum()
    return 2 * (first & second).sum() / both if both else 1.0


def check(found: Any, metric: str, name: str, count: int) -> Any:
    """Compare a value with the library's on the kept predictions of `count` samples; return the library's."""
    with np.load(f"kept-{count}.npz") as kept:
        value = expected(metric, name, kept["output"].astype(np.float64), kept["target"])
    rounding = metric in ("calibration-error", "brier", "dice", "balanced-accuracy")  # summed in another order
    assert found == (pytest.approx(value, rel=1e-12) if rounding else value), (metric, count)
    return value


@pytest.mark.every(2)
@pytest.mark.thinned
@pytest.mark.parametrize("name", TASKS)
def test_metrics_are_the_librarys(name, world, folder):
    result = hpcfed.run(recipe(name, "run"), world=world, quiet=True)
    alone = folder / "alone.txt"
    if world.rank == world.size - 1:
        before = [{key: row[key] for key in row if key.startswith(("test_", "train_"))} for row in result.metrics]
        again = hpcfed.run(recipe(name, "alone"), world=World(), quiet=True)
        for row, other in zip(before, again.metrics, strict=True):
            assert row == {key: other[key] for key in row}
        assert (folder / "run/clients.csv").read_bytes() == (folder / "alone/clients.csv").read_bytes()
        alone.write_text("done")
    world.gather(None)
    last = result.metrics[-1]
    with (folder / "run/clients.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"]
    assert [int(row["n"]) for row in rows] == [size for size in SIZES if size]
    for metric in fitting(name):
        check(last[f"test_{metric}"], metric, name, NUM_TEST)
        of_clients = [
            check(json.loads(row[metric]) if row[metric] else None, metric, name, int(row["n"])) for row in rows
        ]
        defined = [value for value in of_clients if value is not None]
        if metric == "confusion-matrix":
            assert last["train_confusion-matrix"] == np.sum(of_clients, axis=0).tolist()
            continue
        mean = pytest.approx(np.mean(defined), rel=1e-12)
        assert last[f"train_{metric}"] == mean
        summary = last["clients"]["global"]["train"][metric]
        assert (summary["mean"], summary["clients"]) == (mean, len(defined))
        worst = min if BUILT_IN[metric].larger_is_better else max
        assert summary["worst_decile"] == pytest.approx(worst(defined), rel=1e-12)
    if name == "times":
        with np.load(f"kept-{NUM_TEST}.npz") as kept:
            loss = partial_likelihood(kept["output"][:, 0], *kept["target"].T)
        assert last["test_loss"] == pytest.approx(loss, rel=1e-6)
        assert [row["loss"] for row in rows if row["n"] == "5"] == ["0.0"]  # it has no event
    if name in ("binary", "label", "times"):
        name = "concordance" if name == "times" else "auroc"
        assert len([row for row in rows if row[name] == ""]) == 1
    positive, few = (last["clients"]["global"]["train"][key] for key in ("positive", "few"))
    assert few["worst_decile"] >= few["mean"] == positive["mean"]  # the clients with most, since fewer is better
    assert "worst_decile" not in positive


def test_undefined_values_are_reported(world, folder, capsys):
    evaluate = {"metrics": ["auroc", {"spread": {"whole": "own_metrics:spread"}}], "every": 2}
    result = hpcfed.run(recipe("binary", "run", **evaluate), world=world)
    said = capsys.readouterr().out
    if world.is_root:
        line = (
            "auroc is undefined on the training samples of 1 of 4 clients (4), left out of its mean: a class is absent"
        )
        assert said.count(line) == 1
        assert said.count("spread is undefined on the training samples of 1 of 4 clients") == 1
        assert "undefined on the test set" not in said
    assert all(np.isfinite(row["train_auroc"]) for row in result.metrics)


def test_a_test_set_with_numbers_that_are_not_finite_is_reported_once(world, folder, capsys):
    def spoil():
        with h5py.File("label.h5", "r+") as file:
            file["test/x"][NUM_TEST - 1, 0], file["test/x"][NUM_TEST - 2, 0] = np.nan, np.inf

    world.on_root(spoil)
    hpcfed.run(recipe("label", "spoilt", every=1, metrics=[]), world=world)
    said = capsys.readouterr().out
    if world.is_root:
        line = f"/test/x has numbers that are not finite: 2 in rows 32 to {NUM_TEST - 1}; its scores count such samples"
        assert said.count("not finite") == said.count(line) == 1


@pytest.mark.thinned
def test_metrics_may_change_when_a_run_goes_on(world, folder):
    changes = {"checkpoint": {"every": 1}, "rounds": 4}
    for rounds, metrics in ((1, ["auroc"]), (2, []), (3, ["f1-macro", "confusion-matrix"])):
        one = recipe("binary", "run", metrics=metrics, clients={"every": 1}) | changes | {"rounds": rounds}
        hpcfed.run(one, world=world, quiet=True)
    with (folder / "run/clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-4:] == ["name", "auroc", "f1-macro", "confusion-matrix"]
    filled = {(row["round"], name) for row in rows for name in ("auroc", "f1-macro") if row[name]}
    assert filled == {("1", "auroc"), ("3", "f1-macro")}
    assert len(rows) == 3 * 8


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "metrics", "says"),
    [
        ("numbers", ["auroc"], ("auroc needs one label a sample or several", "regression", "use mae, rmse, r2")),
        ("labels", ["confusion-matrix"], ("confusion-matrix needs one label", "multi-label", "dice")),
        ("label", ["dice"], ("dice needs several labels a sample: got a multi-label federation of one label; use ",)),
        ("binary", ["auc"], ("evaluate.metrics.auc", "auroc", "'module:function', got 'auc'")),
        ("binary", ["auroc", "auroc"], ("evaluate.metrics: expected different names",)),
        ("binary", {"w": {"whole": "own_metrics:gone"}}, ("evaluate.metrics.w", "no function 'gone'")),
        ("binary", {"w": {"whole": "own_metrics:words"}}, ("evaluate.metrics.w: expected a number, got 'high'",)),
        ("binary", {"w": {"whole": "own_metrics:failing"}}, ("evaluate.metrics.w", "own_metrics.py, line", "KeyError")),
        ("binary", {"w": {"whole": "own_metrics:spread", "better": "up"}}, ("metrics.w.better", "'lower', got 'up'")),
        ("binary", {"w": {"wholly": "own_metrics:words"}}, ("evaluate.metrics.w", "{whole: 'module:function'}")),
    ],
)
def test_wrong_metrics_are_refused(name, metrics, says, world, folder):
    with pytest.raises(InputError) as error:
        hpcfed.run(recipe(name, "run", metrics=metrics), world=world, quiet=True)
    assert all(fragment in str(error.value) for fragment in says), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", TASKS)
def test_metrics_of_drawn_outputs_are_the_librarys(name):
    task, num_classes = TASKS[name]
    rng = np.random.default_rng(7)
    output = rng.normal(size=(60, 1 if name == "times" else num_classes or 2))
    score = output + rng.normal(size=output.shape)
    times = np.stack([rng.random(60) < 0.6, np.ceil(4 * np.exp(-score[:, 0]))], axis=1)
    target = {"classification": score.argmax(1), "multi-label": (score > 0).astype(int), "survival": times}
    for metric in fitting(name):
        found = FUNCTIONS[metric](output, target.get(task, score), task == "multi-label")
        wanted = expected(metric, name, output, target.get(task, score))
        np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=metric)


def test_concordance_counts_ties_as_its_definition():
    rng = np.random.default_rng(0)
    risk, time = rng.integers(6, size=40) / 2.0, rng.integers(12, size=40).astype(float)
    target = np.stack([rng.random(40) < 0.6, time], axis=1)
    assert FUNCTIONS["concordance"](risk[:, None], target, False) == concordance(risk, *target.T)


def test_brier_of_two_classes_is_the_librarys():
    rng = np.random.default_rng(0)
    output, target = rng.normal(size=(40, 2)), rng.integers(2, size=40)
    library = sk.brier_score_loss(target, softmax(output, axis=1)[:, 1])
    assert FUNCTIONS["brier"](output, target, False) == pytest.approx(library, rel=1e-12)
    one = output[:, 1:] - output[:, :1]
    assert FUNCTIONS["brier"](one, target[:, None], True) == pytest.approx(library, rel=1e-12)


def test_a_logit_that_saturates_keeps_its_rank():
    output = np.array([[40.0], [60.0], [50.0], [-3.0]])
    target = np.array([[0], [1], [1], [0]])
    assert FUNCTIONS["auroc"](output, target, True) == 1.0 > sk.roc_auc_score(target[:, 0], expit(output[:, 0]))


def test_the_partial_likelihoods_gradient_is_the_definitions():
    """A round of one full-batch step at one site, by hand."""
    rng = np.random.default_rng(1)
    x, risk = torch.tensor(rng.normal(size=(12, 3))), torch.zeros(3, dtype=torch.float64, requires_grad=True)
    time, event = torch.tensor(rng.integers(5, size=12)).double(), torch.tensor(rng.random(12) < 0.7).double()
    cox((x @ risk)[:, None], torch.stack([event, time], dim=1)).sum().backward()
    order = sorted(range(12), key=lambda i: -float(time[i]))
    slope = torch.zeros(3, dtype=torch.float64)
    for place, i in enumerate(order):
        slope += event[i] * (x[order[: place + 1]].mean(0) - x[i])  # at 0, all at risk weigh alike
    assert torch.allclose(risk.grad, slope, rtol=1e-12, atol=1e-12)


def test_the_partial_likelihood_of_the_last_event_has_no_gradient():
    """Exactly: Adam divides a gradient by its size, and so would make whole steps of rounding errors."""
    risk = torch.linspace(-1, 1, 7).sin()[:, None].requires_grad_()
    target = torch.tensor([[0.0, 3.0], [0.0, 2.0], [1.0, 9.0], [0.0, 4.0], [0.0, 8.0], [0.0, 1.0], [0.0, 5.0]])
    for count in (7, 3):
        assert not torch.autograd.grad(cox(risk[:count], target[:count]).mean(), risk)[0].any()


@pytest.mark.every(3)
@pytest.mark.thinned
@pytest.mark.parametrize("method", [{"name": "scaffold-exp"}, {"name": "feddyn", "alpha": 0.1}, {"name": "dsgd"}])
def test_survival_is_learnt_by_every_kind_of_method(method, world, folder):
    changes = {"algorithm": method, "local": {"steps": 5, "batch_size": 8, "lr": 0.1}, "rounds": 10}
    result = hpcfed.run(recipe("times", "run", changes, every=10, metrics=["concordance"]), world=world, quiet=True)
    assert result.metrics[-1]["test_concordance"] > 0.7


@pytest.mark.every(3)
@pytest.mark.thinned
@pytest.mark.parametrize(("name", "count"), [("binary", 2), ("classes", 4), ("label", 2)])
def test_balanced_weights_are_those_of_all_training_samples(name, count, world, folder):
    """As the same numbers given by hand; and the loss is the samples', times the weights."""
    with h5py.File(f"{name}.h5") as file:
        found = np.bincount(file["train/y"][:].ravel(), minlength=count)
    weights = (found.sum() / (count * found)).tolist()
    rows = [
        hpcfed.run(recipe(name, str(k), {"loss": {"weights": one}}, clients={"every": 0}), world=world, quiet=True)
        for k, one in enumerate(("balanced", weights, [1.0] * count, None))
    ]
    first, second, ones, plain = ([row["test_loss"] for row in result.metrics] for result in rows)
    assert first == second != ones
    assert ones == pytest.approx(plain, rel=1e-5)  # in the other engine
    with np.load(f"kept-{NUM_TEST}.npz") as kept:
        output, target = torch.tensor(kept["output"]), torch.tensor(kept["target"]).long()
    if name == "label":
        output, target = torch.cat([torch.zeros_like(output), output], 1), target[:, 0]
    each = torch.nn.functional.cross_entropy(output, target, reduction="none")
    assert plain[-1] == pytest.approx(float(each.mean()), rel=1e-6)


def test_weights_by_site_are_those_of_each_sites_own_samples(world, folder):
    """A round of one full-batch step, by hand; what is measured has no weights."""
    rng = np.random.default_rng(2)
    sites = [(rng.normal(size=(n, 3)).astype(np.float32), np.arange(n) % k % 2) for n, k in ((9, 2), (14, 5))]
    world.on_root(lambda: write_federation(folder / "uneven.h5", [*sites], num_classes=2, content="uneven"))
    local = {"steps": 1, "batch_size": "full", "lr": 0.5}
    base = small("by-site", data="uneven.h5", model={"name": "linear"}, dtype="float64", rounds=1, local=local)
    base["evaluate"] = {"every": 0, "train": {"every": 1}}
    run = hpcfed.run({**base, "loss": {"weights": "balanced-by-site"}}, world=world, quiet=True)
    start = hpcfed.run({**base, "output": "start", "local": {**local, "lr": 1e-30}}, world=world, quiet=True).module
    expected = {name: torch.zeros_like(tensor) for name, tensor in start.state_dict().items()}
    for x, y in sites:
        counts = torch.tensor(np.bincount(y, minlength=2)).double()
        loss = torch.nn.functional.cross_entropy(start(torch.tensor(x).double()), torch.tensor(y), reduction="none")
        weights = len(y) / (2 * counts)
        gradients = torch.autograd.grad((weights[y] * loss).mean(), list(start.parameters()))
        for (name, parameter), gradient in zip(start.named_parameters(), gradients, strict=True):
            expected[name] += len(y) / 23 * (parameter.detach() - 0.5 * gradient)
    for name, tensor in run.module.state_dict().items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-12)
    losses = [
        torch.nn.functional.cross_entropy(run.module(torch.tensor(x).double()), torch.tensor(y)) for x, y in sites
    ]
    assert run.metrics[0]["train_loss"] == pytest.approx(float(sum(losses) / 2), rel=1e-12)


def damaged(folder: Path, name: str, **changes: Any) -> None:
    """Change targets of the training samples: all, or the first's entry."""
    with h5py.File(folder / f"{name}.h5", "r+") as file:
        for place, value in changes.items():
            file["train/y"][{"all": slice(None), "event": (0, 0), "time": (0, 1)}[place]] = value


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "damage", "changes", "says"),
    [
        ("times", {"time": -1.0}, {}, ("targets in /train/y", "a time of at least 0, got time -1")),
        ("times", {"event": 2.0}, {}, ("targets in /train/y", "event 0 or 1", "got event 2")),
        ("times", {}, {"loss": {"reduction": "sum"}}, ("loss.reduction: sum with cox",)),
        ("times", {}, {"local": {"steps": 1, "engine": "batched"}}, ("batched with loss.name: cox",)),
        ("times", {}, {"loss": {"weights": "balanced"}}, ("loss.weights needs classes", "survival")),
        ("classes", {"all": 1}, {"loss": {"weights": "balanced"}}, ("every class: got none of class 0",)),
        ("binary", {}, {"loss": {"weights": "balanced-by-site"}}, ("every site: got none of class 1 at 4 (client 4)",)),
        ("classes", {}, {"loss": {"weights": [1.0, 2.0]}}, ("loss.weights: expected 4 numbers, got 2",)),
        ("classes", {}, {"loss": {"weights": [1.0, 0.0]}}, ("loss.weights",)),
        ("classes", {}, {"loss": {"name": "cox"}}, ("'cox' does not fit a classification",)),
    ],
)
def test_wrong_targets_and_weights_are_refused(name, damage, changes, says, world, folder):
    world.on_root(lambda: damaged(folder, name, **damage))
    with pytest.raises(InputError) as error:
        hpcfed.run(recipe(name, "run", changes), world=world, quiet=True)
    assert all(fragment in str(error.value) for fragment in says), error.value
    assert not Path("run").exists()
