"""The workloads of the benchmarks: random data of fixed shapes, since a step's time does not depend on values."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from data_prep.write import write
from hpcfed.config.factory import imported
from hpcfed.config.load import dump_yaml
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, nearest
from hpcfed.io.atomic import write_whole

PEOPLE = "hpcfed.lab.bench.people"
"""Module with the networks as users write them."""
ROUNDS = 400  # cohorts written, more than any benchmark asks for


@dataclass(frozen=True)
class Workload:
    """One workload: clients of equal size, one epoch of local SGD, cohorts drawn uniformly.

    Attributes:
        letter: short name in the tables of results.
        title: a description.
        model: the recipe's ``model``.
        clients, samples, shape, classes: number of clients, samples per client, shape of a sample, number of classes.
        cohort, batch_size: clients per round, and samples per minibatch.
        weight_decay: weight decay of local SGD, whose step size is 0.1.
        images: whether samples are bytes x, used as x / 255.
        tests: number of test samples.
        evaluate_every: rounds between two evaluations on the test set; 0: no evaluation.
        whole: number of rounds of the published experiment that the workload is taken from; 0 if there is none.
        tokens: whether samples are sequences of tokens from 0 to `classes` − 1.
        written: `model` as users write it in PyTorch, in one or more styles: (description, factory) of each.
    """

    letter: str
    title: str
    model: dict[str, Any]
    clients: int
    samples: int
    shape: tuple[int, ...]
    classes: int
    cohort: int
    batch_size: int
    weight_decay: float = 1e-4
    images: bool = False
    tests: int = 0
    evaluate_every: int = 0
    whole: int = 0
    tokens: bool = False
    written: tuple[tuple[str, str], ...] = ()

    @property
    def evaluates(self) -> bool:
        """Whether evaluations are timed, too; a round's time is then the mean over rounds, not the median."""
        return self.evaluate_every > 0


MLP = Workload(
    "A",
    "MLP 784-200-100-10",
    {"name": "mlp", "hidden": [200, 100]},
    100,
    600,
    (784,),
    10,
    cohort=10,
    batch_size=50,
    written=(("as layers", f"{PEOPLE}:mlp"), ("as a class", f"{PEOPLE}:Perceptron")),
)
CNN = Workload(
    "B",
    "CNN conv5(64)-pool-conv5(64)-pool-394-192-10",
    {"name": "feddyn-cnn", "hidden": 394},
    20,
    100,
    (3, 32, 32),
    10,
    cohort=4,
    batch_size=50,
    written=(("as layers", f"{PEOPLE}:convolutional"), ("as a class", f"{PEOPLE}:Convolutional")),
)
LOGISTIC = Workload(
    "C",
    "logistic 60→5",
    {"name": "logistic"},
    1000,
    100,
    (60,),
    5,
    cohort=20,
    batch_size=5,
    written=(("as layers", f"{PEOPLE}:logistic"), ("as a class", f"{PEOPLE}:Logistic")),
)
LSTM = Workload(
    "F", "FedDyn's LSTM 8-100-100-80", {"name": "lstm"}, 20, 100, (80,), 80, cohort=4, batch_size=50, tokens=True
)
PFL = Workload(
    "H",
    "pfl's CIFAR-10 benchmark, conv3(32)-conv3(64)-pool-128-10 with dropout",
    {"name": "emnist-cnn"},
    1000,
    50,
    (3, 32, 32),
    10,
    cohort=50,
    batch_size=10,
    weight_decay=0.0,
    images=True,
    tests=10_000,
    evaluate_every=10,
    whole=1500,
    written=(("as layers", f"{PEOPLE}:with_dropout"),),
)
"""The timing workload of arXiv 2404.06430 (CIFAR-10, IID): random images in place of CIFAR-10's."""
WORKLOADS = {
    "mlp": MLP,
    "mlp-100": replace(MLP, letter="A100", cohort=100),
    "cnn": CNN,
    "logistic": LOGISTIC,
    "logistic-200": replace(LOGISTIC, letter="C200", cohort=200),
    "fedexp": replace(
        CNN, letter="D", title="FedExP's CNN conv5(32)-pool-conv5(64)-pool-384-192-10", model={"name": "cifar-cnn"}
    ),
    "resnet18": Workload(
        "E", "ResNet-18 with GroupNorm", {"name": "resnet18-gn"}, 4, 50, (3, 32, 32), 10, cohort=1, batch_size=50
    ),
    "lstm": LSTM,
    "lstm256": replace(
        LSTM,
        letter="G",
        title="GeL's LSTM 8-256-256-80",
        model={"name": "lstm", "hidden": 256},
        written=(("as a class", f"{PEOPLE}:Recurrent"),),
    ),
    "pfl-cifar10": PFL,
    "mlp-layers": replace(MLP, letter="A", title=f"{MLP.title}, as layers", model={"factory": f"{PEOPLE}:mlp"}),
    "mlp-class": replace(MLP, letter="A", title=f"{MLP.title}, as a class", model={"factory": f"{PEOPLE}:Perceptron"}),
    "cnn-class": replace(
        CNN, letter="B", title=f"{CNN.title}, as a class", model={"factory": f"{PEOPLE}:Convolutional"}
    ),
    "logistic-class": replace(LOGISTIC, title=f"{LOGISTIC.title}, as a class", model={"factory": f"{PEOPLE}:Logistic"}),
    "residual": replace(
        LOGISTIC,
        letter="I",
        title="residual perceptron with LayerNorm, three blocks of 64, as a class",
        model={"factory": f"{PEOPLE}:residual"},
        written=(),
    ),
    "transformer": Workload(
        "J",
        "two-layer transformer of 140 on 80 characters, as a class",
        {"factory": f"{PEOPLE}:Transformer"},
        20,
        50,
        (80,),
        80,
        cohort=4,
        batch_size=10,
        tokens=True,
    ),
}


def write_workload(name: str, folder: Path, device: str = "cpu", precision: str = "float32") -> None:
    """Write the workload `name` of `WORKLOADS` to a folder: ``federation.h5``, ``cohorts.json``, ``recipe.yaml``."""
    write_files(name, workload(name), folder, device, precision)


def workload(name: str) -> Workload:
    """Return the workload `name` of `WORKLOADS`.

    Raises:
        InputError: there is none of that name.
    """
    if name not in WORKLOADS:
        raise InputError(f"unknown workload {name!r}", remedy=nearest(name, WORKLOADS))
    return WORKLOADS[name]


def write_files(name: str, work: Workload, folder: Path, device: str = "cpu", precision: str = "float32") -> None:
    """Write the same files as `write_workload`, for any workload `work`; data set and recipe are called `name`."""
    rng = np.random.Generator(np.random.Philox(1234))
    x, y = _samples(rng, work, work.clients * work.samples)
    test_x, test_y = _samples(rng, work, work.tests) if work.tests else (None, None)
    owner = np.repeat(np.arange(work.clients), work.samples)
    task = "next-token" if work.tokens else "classification"
    dataset = Dataset(name=name, task=task, x=x, y=y, num_classes=work.classes, test_x=test_x, test_y=test_y)
    write(folder / "federation.h5", dataset, owner, work.clients, partition={"scheme": "equal"})
    _write_rounds(name, work, folder, device, rng, precision=precision)


def own_workload(
    reference: str,
    data: Path,
    folder: Path,
    cohort: int,
    batch_size: int,
    device: str,
    precision: str = "float32",
) -> Workload:
    """Write and return the workload of a user's network on the federation file `data`.

    `reference` names the function that makes the network, ``module:function`` in the working folder. A `cohort` larger
    than the federation is reduced to all its clients.

    Raises:
        InputError: `data` is not a federation with classes, or `reference` cannot be imported.
    """
    if ":" not in reference:
        raise InputError("--own-model", expected="module:function", got=reference)
    imported(reference, [Path.cwd()], "--own-model")
    with Federation.open(data) as federation:
        if federation.task not in ("classification", "next-token"):
            what, got = "bench --own-model needs samples of classes", f"a {federation.task} federation"
            raise InputError(what, where=str(data), got=got)
        clients, shape = federation.num_clients, federation.feature_shape
        tokens, classes = federation.task == "next-token", federation.num_classes or 0
        samples = round(float(federation.sizes.mean()))
    (folder / "federation.h5").symlink_to(data.resolve())
    model, cohort = {"factory": reference}, min(cohort, clients)
    work = Workload("", reference, model, clients, samples, shape, classes, cohort, batch_size, tokens=tokens)
    rng = np.random.Generator(np.random.Philox(1234))
    here = {"data": str(data.resolve()), "python_path": [str(Path.cwd())]}
    _write_rounds("own", work, folder, device, rng, precision=precision, **here)
    return work


def _write_rounds(
    name: str, work: Workload, folder: Path, device: str, rng: np.random.Generator, **changes: Any
) -> None:
    """Write ``cohorts.json`` and ``recipe.yaml``."""
    cohorts = [rng.choice(work.clients, work.cohort, replace=False).tolist() for _ in range(ROUNDS)]
    write_whole(folder / "cohorts.json", json.dumps(cohorts))
    recipe = {
        "name": name,
        "data": "federation.h5",
        "model": work.model,
        "rounds": 1,
        "cohort": {"schedule": "cohorts.json"},
        "local": {"epochs": 1, "batch_size": work.batch_size, "lr": 0.1, "weight_decay": work.weight_decay},
        "algorithm": {"name": "fedavg"},
        "evaluate": {"every": work.evaluate_every},
        "device": device,
        **changes,
    }
    write_whole(folder / "recipe.yaml", dump_yaml(recipe))


def _samples(rng: np.random.Generator, work: Workload, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` random samples, x (count, …) and y (count,)."""
    x: np.ndarray
    if work.tokens:
        x = rng.integers(work.classes, size=(count, *work.shape), dtype=np.uint8)
    elif work.images:
        x = rng.integers(256, size=(count, *work.shape), dtype=np.uint8)
    else:
        x = (0.5 * rng.standard_normal((count, prod(work.shape)), dtype=np.float32)).reshape(count, *work.shape)
    return x, rng.integers(work.classes, size=count, dtype=np.uint8)
