"""Private, frozen and averaged parts of a model: right, the same bits on any number of ranks, killed and resumed."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import hpcfed
from hpcfed.data.federation import Federation
from hpcfed.errors import Diverged, InputError
from hpcfed.ranks.world import World
from hpcfed.run_folder.certificate import faults, read_certificate
from tests.devices import KIND
from tests.federations import blobs, write_federation
from tests.mpi.nets import ResNet18, mlp
from tests.mpi.recipes import METHODS, small
from tests.mpi.test_replay import check_steps
from tests.mpi.test_resume import by_the_first, stopped
from tests.mpi.test_same_result import left_by

pytestmark = [pytest.mark.one_mpi, pytest.mark.thinned]

HERE = str(Path(__file__).parent)
FEDBN = {"private": ["2.*"]}
FEDPER = {"private": ["4.*"], "buffers": "averaged"}
OF_CLIENTS = {"every": 0, "clients": {"every": 1}, "batch_size": 16}
TUNED = {"every": 2, "models": ["global", "last", "fine-tuned"], "fine_tune": {"steps": 2, "lr": 0.1}}


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """The working folder of all ranks, with six clients in ``small.h5``: the third has no samples; ``own.h5`` also has
    a test set for each client, the second one's empty.
    """

    def write() -> None:
        given = blobs(6)
        given["clients"][2] = given["clients"][2][0][:0], given["clients"][2][1][:0]
        for name in ("small", "own"):
            write_federation(shared_tmp / f"{name}.h5", **given, content=name)
        with h5py.File(shared_tmp / "own.h5", "r+") as file:
            file["test/offsets"] = np.array([0, 20, 20, 44, 60, 75, len(given["test"][1])])

    world.on_root(write)
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def recipe(output: str | Path, parameters: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    base = {"model": {"factory": "nets:mlp"}, "python_path": [HERE], "evaluate": OF_CLIENTS, "cohort": {"size": 3}}
    return small(output, parameters=parameters, **{**base, **changes})


def everything(result: hpcfed.Result) -> tuple[Any, ...]:
    """Models, record, table of clients and private parts."""
    own = {path.name: path.read_bytes() for path in sorted((result.folder / "private").glob("*"))}
    table = result.folder / "clients.csv"
    return (*left_by(result), own, table.read_bytes() if table.exists() else b"")


def check_same_as_alone(world: World, folder: Path, base: Mapping[str, Any]) -> hpcfed.Result:
    together = hpcfed.run({**base, "output": str(folder / "together")}, world=world, quiet=True)
    if world.rank == world.size - 1:
        alone = hpcfed.run({**base, "output": str(folder / "alone")}, world=World(), quiet=True)
        assert everything(together) == everything(alone)
    return together


OWN = {"fedsam": {"factory": "fedsam:method", "rho": 0.05}, "qffl": {"factory": "qffl:method", "q": 1.0}}
"""Methods outside the package: one whose gradients are taken elsewhere, one that asks for the loss at w."""
LOCAL = {"steps": 3, "batch_size": 8, "lr": 0.1}
CASES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"algorithm": {"name": name, **METHODS[name]}} for name in METHODS},
    **{name: {"algorithm": algorithm, "weights": "uniform"} for name, algorithm in OWN.items()},
    "moved-and-on-disk": {
        "algorithm": {"name": "feddyn", "alpha": 0.1},
        "placement": "balanced",
        "client_state": "disk",
    },
    "guess-and-clip": {
        "algorithm": {"local": "scaffold", "normalize": "steps", "server": "yogi"},
        "local": {"steps": 5, "batch_size": 9, "lr": 0.05, "momentum": 0.5, "clip_norm": 0.5, "weight_decay": 0.01},
        "budget": {"low": 1, "high": 5},
        "guess": "remaining",
        "rounds": 4,
    },
    "linear-clip": {
        "algorithm": {"name": "fedprox", "mu": 0.1},
        "local": {**LOCAL, "clip_norm": 0.5, "clip": "linear", "weight_decay": 0.1, "optimizer": "adam"},
        "dtype": "float64",
    },
    "last-and-tuned": {
        "evaluate": {"every": 0, "model": "client-average", "clients": TUNED, "train": {"every": 1}},
        "loss": {"reduction": "sum"},
        "weights": "uniform",
    },
}


OFTEN = ("fedexp", "scaffold", "feddyn", "fedsplit", "fedsam", "qffl", "guess-and-clip", "moved-and-on-disk")
"""Run every time: a server state, client states, a start elsewhere, gradients and losses elsewhere, parts that move."""


def test_each_clients_own_layers_are_measured_in_bfloat16(world, folder):
    """Not the first one's, whose casts autocast keeps until it ends."""
    evaluate = {"every": 0, "precision": "run", "train": {"every": 1}, "clients": {"every": 1, "models": ["global"]}}
    local = {"steps": 4, "batch_size": 10, "lr": 0.5}
    about = {"model": {"name": "mlp", "hidden": [8]}, "precision": "bf16-mixed", "local": local, "evaluate": evaluate}
    row = hpcfed.run(small("run", parameters=FEDBN, **about), world=world, quiet=True).metrics[-1]
    assert row["train_loss"] == pytest.approx(row["clients"]["global"]["train"]["loss"]["mean"])


@pytest.mark.every(3)
@pytest.mark.of_ranks
@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in OFTEN else pytest.mark.soak) for c in CASES])
def test_a_run_with_a_private_head_is_the_same_as_alone(case, world, folder):
    base = recipe("run", FEDPER, **{"local": LOCAL, **CASES[case]})
    base["python_path"] = [HERE, str(Path(HERE).parent / "contract")]
    check_same_as_alone(world, folder, base)


@pytest.mark.every(2)
@pytest.mark.of_ranks
@pytest.mark.parametrize(
    "parameters",
    [
        FEDBN,
        {"buffers": "averaged"},
        {"buffers": "private", "frozen": ["1.*"]},
        {"buffers": "fixed", "private": ["4.bias"]},
        {"frozen": ["2.*"], "private": ["4.*"]},
    ],
    ids=["fedbn", "averaged", "private-statistics", "fixed", "frozen-norm"],
)
def test_every_role_is_the_same_as_alone_and_resumed(parameters, world, folder):
    evaluate = {**OF_CLIENTS, "every": 1, "metrics": ["f1-macro"]}
    base = recipe("run", parameters, data="own.h5", evaluate=evaluate, rounds=4)
    base["checkpoint"] = {"every": 1}
    whole = check_same_as_alone(world, folder, base)
    assert whole.metrics[-1]["test_loss"] > 0
    assert 0 < whole.metrics[-1]["test_f1-macro"] < 1
    stopped({**base, "output": str(folder / "halves")}, world, 2)
    left: list[Any] = []
    again = {**base, "output": str(folder / "halves")}
    by_the_first(world, lambda alone: left.append(everything(hpcfed.run(again, world=alone, quiet=True))))
    assert not left or left[0] == everything(whole)


def trained_by_hand(
    module: nn.Module, start: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, steps: int, lr: float
) -> dict[str, torch.Tensor]:
    """Return the state dict after full-batch steps of plain SGD."""
    module.load_state_dict(start)
    for _ in range(steps):
        gradients = torch.autograd.grad(functional.cross_entropy(module(x), y), list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter -= lr * gradient
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.every(3)
@pytest.mark.parametrize("parameters", [FEDBN, {"buffers": "averaged"}, FEDPER], ids=["fedbn", "averaged", "fedper"])
def test_it_is_what_a_plain_loop_computes(parameters, world, folder):
    """FedBN and others by hand, in float64: private parts stay, the rest is averaged by n_i, counters by maximum."""
    local = {"steps": 3, "batch_size": "full", "lr": 0.1}
    run = hpcfed.run(
        recipe("run", parameters, dtype="float64", local=local, cohort=None, rounds=3), world=world, quiet=True
    )
    first = hpcfed.run(
        recipe("none", {"buffers": "averaged"}, dtype="float64", local={**local, "lr": 1e-30}, rounds=1, cohort=None),
        world=world,
        quiet=True,
    ).module.state_dict()
    module = mlp().double().train()
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    start |= {name: first[name] for name, _ in module.named_parameters()}
    with Federation.open(folder / "small.h5") as federation:
        sizes = federation.sizes
    with h5py.File(folder / "small.h5") as file:
        x, y = torch.tensor(file["train/x"][:]).double(), torch.tensor(file["train/y"][:]).long()
    ends = np.cumsum(sizes)
    rows = {k: slice(ends[k] - sizes[k], ends[k]) for k in range(6) if sizes[k]}
    kept = [name for name in start if any(name.startswith(p[:-1]) for p in parameters.get("private", ()))]
    own = {k: {name: start[name] for name in kept} for k in rows}
    shared = {name: tensor for name, tensor in start.items() if name not in kept}
    for _ in range(3):
        ended = {k: trained_by_hand(module, {**shared, **own[k]}, x[rows[k]], y[rows[k]], 3, 0.1) for k in rows}
        own = {k: {name: ended[k][name] for name in kept} for k in rows}
        for name, tensor in shared.items():
            parts = [(sizes[k] / sizes.sum(), ended[k][name]) for k in rows]
            mean = sum(share * part for share, part in parts)
            shared[name] = mean if tensor.is_floating_point() else max(part for _, part in parts)
    model = load_file(run.folder / "model.safetensors")
    assert model.keys() == shared.keys()
    for name, tensor in shared.items():
        np.testing.assert_allclose(model[name], tensor, rtol=1e-12, atol=1e-13)
    for k in rows if kept else ():
        found = load_file(run.folder / f"private/client-{k}.safetensors")
        assert found.keys() == {*kept}
        for name in kept:
            np.testing.assert_allclose(found[name], own[k][name], rtol=1e-12, atol=1e-13)


@pytest.mark.every(2)
@pytest.mark.parametrize("left_out", [[], [4]], ids=["all", "without"])
def test_statistics_of_an_averaged_iterate_are_those_of_the_training_samples(left_out, world, folder):
    """By hand from the evaluated module and its minibatches; the round's stay in ``model.safetensors``."""
    cohort = {"size": 3, **({"without": left_out} if left_out else {})}
    evaluate = {"every": 2, "model": "last-two", "batch_size": 16, "statistics": "training", "clients": {"every": 3}}
    base = recipe("run", {"buffers": "averaged"}, dtype="float64", rounds=3, algorithm="fedexp", cohort=cohort)
    run = check_same_as_alone(world, folder, {**base, "evaluate": evaluate})
    usual = hpcfed.run(
        {**base, "output": "usual", "evaluate": {"every": 2, "model": "last-two"}}, world=world, quiet=True
    )
    loaded = hpcfed.load(run.folder)
    with Federation.open(folder / "small.h5") as federation, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clients = [k for k in (0, 1, 3, 4, 5) if k not in left_out]
        samples = [torch.tensor(federation.client(k)[0]).double() for k in clients]
        parts = [part for x in samples for part in x.tensor_split(-(-len(x) // 16))]
        hidden = [loaded.evaluated[1](part) for part in parts]
        test_x, test_y = (torch.tensor(part) for part in federation.test(0, federation.num_test))
        loss = functional.cross_entropy(loaded.evaluated(test_x.double()), test_y.long())
    assert len(hidden) > 2 * len(clients)
    mean = torch.cat(hidden).mean(0)
    square = sum(len(h) * (h.var(0) + h.mean(0) ** 2) for h in hidden) / sum(map(len, hidden))
    np.testing.assert_allclose(loaded.evaluated[2].running_mean, mean, rtol=1e-12)
    np.testing.assert_allclose(loaded.evaluated[2].running_var, square - mean**2, rtol=1e-12)
    assert run.metrics[-1]["test_loss"] == pytest.approx(float(loss), rel=1e-12)
    assert run.metrics[-1]["test_loss"] != usual.metrics[-1]["test_loss"]
    assert run.metrics[-1]["hash"] == usual.metrics[-1]["hash"]


def test_a_state_that_the_method_leaves_alone_stays_beside_a_private_part(world, folder):
    """The private files are in the certificate, too."""
    again = recipe("run", FEDBN, algorithm={"factory": "nets:settled"}, cohort={"size": 6}, rounds=3)
    run = hpcfed.run(again, world=world, quiet=True)
    certificate = read_certificate(run.folder) or {}
    private = {f"private/{path.name}" for path in (run.folder / "private").iterdir()}
    assert len(private) == 7
    assert private < set(certificate["files"])
    assert not faults(run.folder, certificate)


def test_what_is_sent_is_counted(world, folder):
    """Private and frozen parts are not; averaged buffers are, in both directions, and no parameters."""
    body, norm, head = 12 * 8 + 8, 2 * 8, 8 * 4 + 4
    buffers = 4 * 2 * 8 + 8  # two vectors of float32, a counter
    for parameters, parameters_sent, buffers_sent in [
        ({"buffers": "averaged"}, body + norm + head, buffers),
        (FEDBN, body + head, 0),
        (FEDPER, body + norm, buffers),
        ({"buffers": "fixed"}, body + norm + head, 0),
        ({"frozen": ["1.*"], "buffers": "averaged"}, norm + head, buffers),
    ]:
        output = folder / str(sorted(parameters.items()))[:30].replace("/", "-")
        again = recipe(output, parameters, algorithm={"name": "scaffold"}, rounds=1, budget={"low": 1, "high": 4})
        row = hpcfed.run(again, world=world, quiet=True).metrics[-1]
        assert row["params_up"] == row["params_down"] == 3 * 2 * parameters_sent  # SCAFFOLD's two vectors
        assert row["bytes_up"] == row["bytes_down"] == 3 * (4 * 2 * parameters_sent + buffers_sent)
    for method in ("feddyn", "scaffold"):  # what the average of clients' models adds up follows from Δ
        base = recipe("run", {"buffers": "fixed"}, rounds=1, algorithm={"name": method, **METHODS[method]})
        rows = [
            hpcfed.run(
                {**base, "output": f"{method}-{model}", "evaluate": {"every": 1, "model": model}},
                world=world,
                quiet=True,
            )
            for model in ("client-average", "last")
        ]
        first, second = (run.metrics[-1]["bytes_up"] for run in rows)
        assert first == second > 0


@pytest.mark.filterwarnings("ignore:.*the model is code")
def test_clients_are_measured_with_their_own_part(world, folder):
    """As by hand from the exported modules; those never drawn begin with the initial part, and are counted."""
    base = recipe("run", {**FEDPER, "buffers": "private"}, data="own.h5", cohort={"size": 2}, rounds=2)
    run = hpcfed.run({**base, "evaluate": {**OF_CLIENTS, "every": 1}}, world=world, quiet=True)
    loaded = hpcfed.load(run.folder)
    drawn = {client for row in run.metrics for client in row["cohort"]}
    assert [row["never_drawn"] for row in run.metrics] == [4, 6 - len(drawn)]
    files = {path.name for path in (run.folder / "private").iterdir()}
    assert files == {"initial.safetensors", *(f"client-{client}.safetensors" for client in drawn)}
    with h5py.File(folder / "own.h5") as file:
        x, y, offsets = (torch.tensor(file[f"test/{name}"][:]) for name in ("x", "y", "offsets"))
    with (run.folder / "clients.csv").open(newline="") as table:
        rows = [row for row in csv.DictReader(table) if row["split"] == "test" and row["round"] == "2"]
    total = 0.0
    assert [int(row["client"]) for row in rows] == [0, 2, 3, 4, 5]
    for row in rows:
        client = int(row["client"])
        part = slice(int(offsets[client]), int(offsets[client + 1]))
        with torch.no_grad():
            loss = functional.cross_entropy(loaded.module_of(client)(x[part]), y[part].long())
        assert float(row["loss"]) == pytest.approx(float(loss), rel=1e-6)
        total += float(row["loss"]) * int(row["n"])
    assert run.metrics[-1]["test_loss"] == pytest.approx(total / len(y), rel=1e-12)
    never = next(client for client in range(6) if client not in drawn)
    initial, own = loaded.module.state_dict(), loaded.module_of(never).state_dict()
    assert all(torch.equal(own[name], initial[name]) for name in initial)


def visited(size: int, steps: int = 4, batch: int = 10) -> int:
    """Return the samples that a client of so many visits in its steps; a short minibatch ends a pass."""
    total = 0
    while steps > 0 and size:
        part = min(size, steps * batch)
        total, steps = total + part, steps - -(-part // batch)
    return int(total)


def test_constant_and_replaced_buffers(world, folder):
    """A table and a mask keep their bits, a counter that is replaced takes the maximum; averages with momentum=None."""
    base = recipe("run", {"buffers": "averaged"}, model={"factory": "nets:Norms"}, evaluate={"batch_size": 16})
    run = check_same_as_alone(world, folder, {**base, "rounds": 5, "cohort": {"size": 2}})
    state = run.module.state_dict()
    assert torch.equal(state["table"], torch.linspace(0.1, 1.2, 12))
    assert torch.equal(state["mask"], torch.arange(12) % 2 == 0)
    with Federation.open(folder / "small.h5") as federation:
        most = [max(visited(federation.sizes[client]) for client in row["cohort"]) for row in run.metrics]
    assert state["seen"] == sum(most)
    assert state["norm.num_batches_tracked"] == 5 * 4
    private = {"private": ["norm.*", "seen"], "frozen": ["table", "mask"]}
    check_same_as_alone(world, folder / "own", {**base, "parameters": private, "evaluate": OF_CLIENTS})


def test_frozen_parameters_stay_and_a_run_can_start_from_another(world, folder):
    """Also a module that is used as it was trained: of averaged statistics, by a run that fixes them."""
    first = hpcfed.run(recipe("first", {"buffers": "averaged"}, evaluate={"every": 1}), world=world, quiet=True)
    warm = {"factory": "nets:mlp", "init": str(first.folder / "model.safetensors")}
    frozen = {"frozen": ["1.*", "2.*"]}
    second = hpcfed.run(recipe("second", frozen, model=warm, evaluate={"every": 1}), world=world, quiet=True)
    before, after = first.module.state_dict(), second.module.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"4.weight", "4.bias"}
    again = hpcfed.run(recipe("third", FEDPER, model=warm, rounds=1), world=world, quiet=True)
    initial = load_file(again.folder / "private/initial.safetensors")
    assert all(torch.equal(initial[name], before[name]) for name in initial)


def test_fast_sums_and_the_built_in_perceptron(world, folder):
    """Which has no buffers, and is trained in tiles, its private head, too."""
    base = {"model": {"name": "mlp", "hidden": [8]}, "reduction": "fast"}
    runs = [
        hpcfed.run(recipe(folder / kind, {"private": ["2.*"]}, **{**base, "reduction": kind}), world=world, quiet=True)
        for kind in ("fast", "exact")
    ]
    said = [json.loads((run.folder / "environment.json").read_text())["training"] for run in runs]
    assert said == ["2 clients a tile, read as a perceptron"] * 2
    fast, exact = (run.module.state_dict() for run in runs)
    for name, tensor in exact.items():
        np.testing.assert_allclose(fast[name], tensor, rtol=1e-5, atol=1e-6)
    fast, exact = (
        hpcfed.run(
            recipe(folder / f"norm-{kind}", {"buffers": "averaged"}, reduction=kind), world=world, quiet=True
        ).module.state_dict()
        for kind in ("fast", "exact")
    )
    for name, tensor in exact.items():
        np.testing.assert_allclose(fast[name], tensor, rtol=1e-5, atol=1e-6)


PULLED = {"algorithm": {"name": "fedprox", "mu": 0.3}}
DECAYED: Mapping[str, Any] = {**LOCAL, "weight_decay": 0.1}
TILED: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "a perceptron": ("perceptron", "1.*", {"local": {**DECAYED, "tile": 2}}),
    "pulled": ("perceptron", "*bias", {**PULLED, "local": DECAYED}),
    "a pulled norm": ("normed", "2.*", {**PULLED, "local": {**DECAYED, "clip_norm": 0.5, "clip": "linear"}}),
    "clipped": ("normed", "4.*", {"local": {**DECAYED, "clip_norm": 0.3, "optimizer": "adam", "lr": 0.01}}),
    "guessed": (
        "perceptron",
        "3.*",
        {"local": {**LOCAL, "momentum": 0.6}, "budget": {"low": 1, "high": 7}, "guess": "remaining"},
    ),
    "personal": ("normed", "4.*", {"algorithm": {"name": "ditto", "mu": 0.2}, "local": {**LOCAL, "tile": 1}}),
}


@pytest.mark.of_ranks
@pytest.mark.parametrize("case", TILED)
def test_private_parameters_in_tiles_are_those_of_clients_trained_one_after_another(case, world, folder):
    """To rounding in float64; and in tiles to the same bits on any ranks."""
    factory, private, changes = TILED[case]
    base = recipe(
        "run", {"private": [private]}, **{"model": {"factory": f"nets:{factory}"}, "dtype": "float64", **changes}
    )
    local = {key: value for key, value in base["local"].items() if key != "tile"}
    tiles = check_same_as_alone(world, folder, base if KIND == "cpu" else {**base, "local": local})
    alone = hpcfed.run(
        {**base, "output": str(folder / "one"), "local": {**local, "engine": "sequential"}}, world=world, quiet=True
    )
    training = json.loads((tiles.folder / "environment.json").read_text())["training"]
    assert ("a tile" in training) == (KIND == "cpu")  # on a GPU one after another
    files = [alone.folder / "model.safetensors", *(alone.folder / "private").glob("client-*")]
    assert len(files) > 3
    for theirs in files:
        ours = load_file(tiles.folder / theirs.relative_to(alone.folder))
        for name, tensor in load_file(theirs).items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-12, atol=1e-13)


OWN_PARTS = [(FEDBN, "mlp"), (FEDPER, "mlp"), ({"buffers": "fixed"}, "mlp"), ({"private": ["1.*"]}, "perceptron")]


@pytest.mark.every(3)
@pytest.mark.parametrize(("parameters", "factory"), OWN_PARTS, ids=["fedbn", "fedper", "fixed", "tiles"])
def test_a_replayed_client_trains_with_its_own_part(parameters, factory, world, folder):
    kept = {"checkpoint": {"every": 2, "keep": 9}, "rounds": 4, "update_hashes": True}
    base = recipe("run", parameters, model={"factory": f"nets:{factory}"}, **kept)
    run = hpcfed.run(base, world=world, quiet=True)
    world.gather(None)
    for client in run.metrics[-1]["cohort"]:
        found = hpcfed.replay("run", 4, client)
        assert found.agrees
        check_steps(found)
        ended = found.module(len(found.steps)).state_dict()
        own = run.folder / f"private/client-{client}.safetensors"
        kept = load_file(own) if own.exists() else {}
        assert all(torch.equal(ended[name].cpu(), tensor) for name, tensor in kept.items())


SHORT = {"steps": 4, "lr": 0.1, "batch_size": 22}
WRONG: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "no-match": ({"private": ["head.*"], "buffers": "fixed"}, {}, r"'head\.\*' matches no parameter"),
    "a-module": ({"frozen": ["4"], "buffers": "fixed"}, {}, r"did you mean '4\.\*'"),
    "private-everything": ({"private": ["*"]}, {}, "nothing is left to average"),
    "frozen-everything": ({"frozen": ["*"]}, {}, "at least one trainable parameter"),
    "both": (
        {"private": ["4.*"], "frozen": ["4.bias"], "buffers": "fixed"},
        {},
        r"both private and frozen, got 4\.bias",
    ),
    "no-role": ({"private": ["4.*"]}, {}, "keeps running statistics.*set parameters.buffers"),
    "part-of-the-statistics": ({"private": ["2.running_mean"]}, {}, "keeps running statistics"),
    "no-buffers": ({"buffers": "averaged"}, {"model": "mlp"}, "the model has no buffers"),
    "large-counter": (
        {"buffers": "averaged"},
        {"model": {"factory": "nets:counting"}},
        r"expected whole numbers up to 9007199254740992, got -115292",
    ),
    "common-test-set": (FEDBN, {"evaluate": {"every": 1}}, "a common test set has no private part"),
    "batched": (FEDBN, {"local": {**LOCAL, "engine": "batched"}}, "batched with private buffers"),
    "nothing-averaged": (
        FEDBN,
        {"evaluate": {**OF_CLIENTS, "statistics": "training"}},
        "no averaged running statistics",
    ),
    "own-step": (FEDBN, {"local": {**LOCAL, "step": "nets:mlp"}}, "a step of your own trains the shared parameters"),
    "one-sample-each": (FEDBN, {"local": {"steps": 2, "batch_size": 1, "lr": 0.1}}, "client 0.*one of 1 sample, of"),
    "one-sample": (FEDBN, {"local": {"epochs": 1, "batch_size": 22, "lr": 0.1}}, "client 5.*one of 1 sample, of 67"),
    "one-sample-of-fine-tuning": (
        FEDBN,
        {"evaluate": {**OF_CLIENTS, "model": "client-average", "clients": {**TUNED, "fine_tune": SHORT}}},
        "fine_tune.batch_size: client 5.*one of 1 sample, of 67",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_means_nothing_is_refused_in_one_line(case, world, folder):
    parameters, changes, words = WRONG[case]
    with pytest.raises(InputError, match=words) as error:
        hpcfed.run(recipe("run", parameters, **changes), world=world, quiet=True)
    assert "\n" not in str(error.value)


def test_private_parts_that_are_not_finite_end_the_run_or_skip_their_client(world, folder):
    base = recipe("run", FEDPER, local={"steps": 2, "batch_size": 8, "lr": 1e14}, loss={"reduction": "sum"}, rounds=2)
    with pytest.raises(Diverged):
        hpcfed.run(base, world=world, quiet=True)


BODY, HEAD, BUFFERS = 11_176_512, 512 * 4 + 4, 4 * 9600 + 8 * 20
"""Parameters of ResNet-18 below its head, and of a head of 4 classes; bytes of the statistics of its 20 layers."""


@pytest.mark.soak
@pytest.mark.parametrize("role", ["averaged", "private", "fixed", "fedbn"])
def test_resnet_18_of_full_width(role, world, folder):
    """Of torchvision's names and sizes: the bits of a run alone, also stopped and resumed by one rank; bytes sent."""
    module = ResNet18(outputs=1000)
    sizes = [tensor.numel() for tensor in module.parameters()]
    assert (len(module.state_dict()), sum(sizes)) == (122, 11_689_512)  # torchvision.models.resnet18()
    norms = [name for name, part in module.named_modules() if isinstance(part, nn.BatchNorm2d)]
    of_norms = sum(tensor.numel() for name in norms for tensor in module.get_submodule(name).parameters())

    def write() -> None:
        rng = np.random.default_rng(1)
        pieces = [(rng.random((n, 3, 32, 32), np.float32), rng.integers(4, size=n)) for n in (4, 6, 5)]
        write_federation(folder / "images.h5", pieces, num_classes=4, content="images")

    world.on_root(write)
    parameters = {"private": [f"{name}.*" for name in norms]} if role == "fedbn" else {"buffers": role}
    base = recipe("run", parameters, data="images.h5", model={"factory": "nets:ResNet18"}, rounds=2)
    base |= {"local": {"steps": 2, "batch_size": 2, "lr": 0.05}, "checkpoint": {"every": 1}}
    whole = check_same_as_alone(world, folder, base)
    row = whole.metrics[-1]
    sent = BODY + HEAD - (of_norms if role == "fedbn" else 0)
    of_buffers = BUFFERS if role == "averaged" else 0
    assert row["params_up"] == row["params_down"] == 2 * 3 * sent
    assert row["bytes_up"] == row["bytes_down"] == 2 * 3 * (4 * sent + of_buffers)
    halves = {**base, "output": str(folder / "halves")}
    stopped(halves, world, 1)
    left: list[Any] = []
    by_the_first(world, lambda alone: left.append(everything(hpcfed.run(halves, world=alone, quiet=True))))
    assert not left or left[0] == everything(whole)
