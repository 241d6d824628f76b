"""Local steps of the user's own: SAM, MOON and distillation in one file each, and their crossings."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

import hpcfed
from hpcfed.errors import EnvironmentFailure
from hpcfed.lab.report.group import method_of
from hpcfed.lab.report.read import read_run
from hpcfed.ranks.world import World
from tests.contract.test_add_a_method import block
from tests.devices import KIND
from tests.federations import blobs, write_federation
from tests.mpi.recipes import METHODS, small

STEPS, LR = 3, 0.2
SAM = {"step": "samstep:step", "step_args": {"rho": 0.3}}
MOON = {"step": "moon:step", "step_args": {"mu": 2.0, "temperature": 0.5}}
OWN = """
import torch


def plain(parameters, batch, context):
    g, loss = context.gradient(parameters, batch)
    return parameters - context.lr * (g + context.tilt(parameters)), loss


def by_output(parameters, batch, context):
    at = parameters.clone().requires_grad_()
    loss = context.loss(context.output(at, batch[0]), batch[1])
    (g,) = torch.autograd.grad(loss, at)
    assert context.num_parameters == sum(one.numel() for one in context.module.parameters()) < len(at)
    return parameters - context.lr * (g + context.tilt(parameters)), loss


def untilted(parameters, batch, context):  # untilted
    g, loss = context.gradient(parameters, batch)
    return parameters - context.lr * g, loss


def noisy(parameters, batch, context, momentum):
    g, loss = context.gradient(parameters, batch)
    v = context.memory["v"] = g + momentum * context.memory.get("v", 0 * g)
    noise = parameters.new_tensor(context.random.normal(size=len(parameters)))
    assert context.step <= context.steps and context.client.num_samples == len(batch[1]) > 0 < context.round
    parameters -= context.lr * v + 1e-3 * noise  # in place
    return parameters, float(loss)


def raising(parameters, batch, context):
    return parameters.nwe_zeros(3), 0.0


def full(parameters, batch, context):
    raise OSError(28, "no space left")


def alone(parameters, batch, context):  # alone
    return parameters


def short(parameters, batch, context):  # short
    return parameters[1:], 0.0


def wordy(parameters, batch, context):  # wordy
    return parameters, "low"


def two(parameters, batch):  # two
    return parameters, 0.0


def lasting(parameters, batch, context):  # lasting
    context.w.mul_(0.5)
    return parameters, 0.0


def scaling(parameters, batch, context):
    batch[0].mul_(1.5)
    return parameters, 0.0


class Scaling(torch.nn.Linear):
    def __init__(self):
        super().__init__(12, 4)

    def forward(self, x):
        x *= 1.5
        return super().forward(x)
"""


@pytest.fixture
def place(world, shared_tmp) -> Path:
    """A folder with steps and data: five clients, the fourth without samples."""

    def write() -> None:
        federation = blobs(5)
        x, y = federation["clients"][3]
        federation["clients"][3] = x[:0], y[:0]
        write_federation(shared_tmp / "small.h5", **federation, content="small")
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).double()
        save_file(dict(layers.state_dict()), shared_tmp / "w0.safetensors")
        (shared_tmp / "own.py").write_text(OWN)
        (shared_tmp / "distil.py").write_text(block("python-distil"))

    world.on_root(write)
    return shared_tmp


def recipe(place: Path, output: str, local: dict[str, Any], **changes: Any) -> dict[str, Any]:
    paths = {"data": str(place / "small.h5"), "python_path": [str(place), str(Path(__file__).parent)]}
    local = {"steps": STEPS, "batch_size": "full", "lr": LR, **local}
    return small(place / output, **{**paths, "weights": "uniform", **changes, "local": local})


def run(place: Path, output: str, world: World, local: dict[str, Any], **changes: Any) -> hpcfed.Result:
    return hpcfed.run(recipe(place, output, local, **changes), world=world, quiet=True)


def model(result: hpcfed.Result) -> bytes:
    return (result.folder / "model.safetensors").read_bytes()


Objective = Callable[[nn.Sequential, nn.Sequential, nn.Sequential, torch.Tensor, torch.Tensor], None]


def by_hand(place: Path, rounds: int, backward: Objective) -> dict[str, torch.Tensor]:
    """Train by torch alone; `backward` sets a model's gradients from it, the server's, the client's last, x and y."""
    w = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    w.load_state_dict(load_file(place / "w0.safetensors"))
    clients = blobs(5)["clients"]
    last = [copy.deepcopy(w) for _ in clients]
    for _ in range(rounds):
        models = []
        for k, (x, y) in enumerate(clients):
            y_k = copy.deepcopy(w)
            for _ in range(STEPS if k != 3 else 0):
                y_k.zero_grad()
                backward(y_k, w, last[k], torch.tensor(x).double(), torch.tensor(y).long())
                with torch.no_grad():  # torch.optim would import its compiler
                    for parameter in y_k.parameters():
                        parameter -= LR * parameter.grad
            models.append(y_k)
        last = models
        averaged = {name: sum(one.state_dict()[name] for one in models) / 5 for name in w.state_dict()}
        w = copy.deepcopy(w)
        w.load_state_dict(averaged)
    return dict(w.state_dict())


def sam(y_k: nn.Sequential, w: nn.Sequential, last: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    parameters = list(y_k.parameters())
    ascent = torch.autograd.grad(functional.cross_entropy(y_k(x), y), parameters)
    norm = torch.sqrt(sum(g.square().sum() for g in ascent))
    with torch.no_grad():
        for parameter, g in zip(parameters, ascent, strict=True):
            parameter += SAM["step_args"]["rho"] * g / norm
    functional.cross_entropy(y_k(x), y).backward()
    with torch.no_grad():
        for parameter, g in zip(parameters, ascent, strict=True):
            parameter -= SAM["step_args"]["rho"] * g / norm


def moon(y_k: nn.Sequential, w: nn.Sequential, last: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    z, z_w, z_last = y_k[:-1](x), w[:-1](x).detach(), last[:-1](x).detach()

    def likeness(other: torch.Tensor) -> torch.Tensor:
        cosine = (z * other).sum(1) / (z.norm(dim=1) * other.norm(dim=1)).clamp_min(1e-8)
        return torch.exp(cosine / MOON["step_args"]["temperature"])

    contrast = -torch.log(likeness(z_w) / (likeness(z_w) + likeness(z_last))).mean()
    (functional.cross_entropy(y_k(x), y) + MOON["step_args"]["mu"] * contrast).backward()


def distil(y_k: nn.Sequential, w: nn.Sequential, last: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    p, q = w(x).detach().softmax(1), y_k(x).softmax(1)
    divergence = (p * (p.log() - q.log())).sum(1).mean()
    (functional.cross_entropy(y_k(x), y) + 0.5 * divergence).backward()


WORKED = {
    "sam": (SAM, {"name": "fedavg"}, sam),
    "moon": (MOON, {"factory": "moon:method"}, moon),
    "distil": ({"step": "distil:step", "step_args": {"weight": 0.5}}, {"name": "fedavg"}, distil),
}


@pytest.mark.thinned
@pytest.mark.parametrize("name", WORKED)
def test_a_worked_step_is_what_torch_computes_by_hand(name, world, place):
    """The same bits on any number of ranks, and torch's numbers: three rounds of which MOON's state is part."""
    local, algorithm, backward = WORKED[name]
    changes = {"algorithm": algorithm, "dtype": "float64"}
    changes["model"] = {"name": "mlp", "hidden": [8], "init": str(place / "w0.safetensors")}
    together = run(place, "together", world, local, **changes)
    alone = run(place, f"alone-{world.rank}", World(), local, **changes)
    assert model(together) == model(alone)
    assert [row["hash"] for row in together.metrics] == [row["hash"] for row in alone.metrics]
    assert {row["gradients"] for row in together.metrics} == {4 * STEPS, 8 * STEPS, 12 * STEPS}
    for key, expected in by_hand(place, 3, backward).items():
        torch.testing.assert_close(load_file(together.folder / "model.safetensors")[key], expected, rtol=0, atol=1e-11)


@pytest.mark.every(2)
@pytest.mark.thinned
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "feddyn", "fedsplit", "fedexp", "fedadam"])
def test_a_plain_step_with_the_tilt_is_the_built_in_step(name, world, place):
    """Shift, μ, anchor and start of each method, its states, unequal minibatches and budgets; but for rounding."""
    changes = {"algorithm": {"name": name, **METHODS[name]}, "dtype": "float64", "budget": {"low": 1, "high": 5}}
    local = {"batch_size": 7, "engine": "sequential", "lr_decay": 0.9}
    own = run(place, "own", world, {**local, "step": "own:plain"}, **changes)
    built_in = run(place, "built-in", world, local, **changes)
    for key, expected in load_file(built_in.folder / "model.safetensors").items():
        torch.testing.assert_close(load_file(own.folder / "model.safetensors")[key], expected, rtol=1e-9, atol=1e-11)
    for column in ("cohort", "gradients", "params_up"):
        assert [row[column] for row in own.metrics] == [row[column] for row in built_in.metrics]
    assert [row["local_loss"] for row in own.metrics] == pytest.approx([row["local_loss"] for row in built_in.metrics])


CROSSINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "states-on-disk": (MOON, {"algorithm": {"factory": "moon:method"}, "client_state": "disk", "cohort": {"size": 3}}),
    "states-that-move": (MOON, {"algorithm": {"factory": "moon:method"}, "placement": "balanced"}),
    "client-average": (SAM, {"evaluate": {"model": "client-average", "clients": {"every": 1, "models": ["last"]}}}),
    "noise-and-memory": ({"step": "own:noisy", "step_args": {"momentum": 0.5}}, {"algorithm": {"name": "fedexp"}}),
    "dropped-clients": (SAM, {"on_bad_client": "skip", "cohort": {"size": 1}}),
    "feddyn": (SAM, {"algorithm": {"name": "feddyn", "alpha": 0.1}, "cohort": {"size": 2}}),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CROSSINGS)
def test_the_same_bits_wherever_clients_are_trained(case, world, place):
    local, changes = CROSSINGS[case]
    together = run(place, "together", world, local, rounds=2, **changes)
    alone = run(place, f"alone-{world.rank}", World(), local, rounds=2, **changes)
    assert model(together) == model(alone)
    assert [row["hash"] for row in together.metrics] == [row["hash"] for row in alone.metrics]


def test_it_goes_on_from_a_checkpoint_and_its_code_is_recorded(world, place):
    changes = {"algorithm": {"factory": "moon:method"}, "checkpoint": {"every": 1}}
    through = run(place, "through", world, MOON, rounds=3, **changes)
    run(place, "cut", world, MOON, rounds=2, **changes)
    assert model(run(place, "cut", world, MOON, rounds=3, **changes)) == model(through)
    assert "moon" in json.loads((through.folder / "code.json").read_text())["files"]
    with pytest.raises(hpcfed.InputError, match=r"local\.step_args\.mu"):
        run(place, "cut", world, {**MOON, "step_args": {"mu": 1.0, "temperature": 0.5}}, rounds=3, **changes)


@pytest.mark.skipif(KIND == "stub", reason="torch mixes no precisions on a device written in Python")
def test_the_models_output_has_the_recipes_precision(world, place):
    changes = {"rounds": 2, "precision": "bf16-mixed"}
    mixed, by_output = (run(place, name, world, {"step": f"own:{name}"}, **changes) for name in ("plain", "by_output"))
    single = run(place, "float32", world, {"step": "own:by_output"}, rounds=2)
    assert model(by_output) != model(single)
    if KIND == "cpu":  # a GPU's kernels for the two differ
        assert model(mixed) == model(by_output)


def test_fast_sums_are_close(world, place):
    exact, fast = (run(place, kind, world, SAM, reduction=kind) for kind in ("exact", "fast"))
    assert exact.metrics[-1]["test_loss"] == pytest.approx(fast.metrics[-1]["test_loss"], rel=1e-4)


@pytest.mark.thinned
def test_built_in_steps_leave_no_trace_in_a_recipe(world, place):
    """Nor does an own step's absence: recorded recipes of earlier versions stay the same."""
    kept = (run(place, "run", world, {}).folder / "recipe.yaml").read_text()
    assert "step:" not in kept.replace("\n    steps:", "")
    assert "step_args" not in kept


NO_MEANING = [
    ({"algorithm": {"name": "fednova"}}, {}, "fednova has no meaning: a normalisation by steps divides by ‖a_i‖₁, and"),
    ({"algorithm": {"name": "scaffold"}}, {}, "the local method of scaffold divides by ‖a_i‖₁, and a step of your own"),
    ({"algorithm": {"name": "dsgd"}}, {}, "its round is one step along the full gradient"),
    ({"algorithm": {"factory": "fedsam:method", "rho": 0.1}}, {}, "would both choose where gradients are taken"),
    ({"guess": "limit"}, {}, "leaves no moment to guess from"),
    ({}, {"engine": "batched"}, "batched with local.step: own:plain; use local.engine: sequential"),
    ({}, {"momentum": 0.9}, "no 'momentum' beside 'step', which takes the place"),
    ({}, {"clip_norm": 1.0}, "no 'clip_norm' beside 'step'"),
    (
        {},
        {"step_args": {"rho": 1.0}},
        "expected a function of parameters, batch, context, rho, got one of parameters, batch, context",
    ),
    ({}, {"step": "samstep:step", "step_args": {"roh": 1.0}}, "did you mean 'rho'?"),
    ({}, {"step": "own:two"}, "own.py, line {two}: local.step 'own:two': expected a function of parameters, batch, co"),
    ({}, {"step": "own:plian"}, "no function 'plian' in own; did you mean 'plain'?"),
    ({}, {"step": "own:qqqqq"}, "no function 'qqqqq' in own; known: Scaling, alone, by_output, full"),
    ({}, {"step": "absent:step"}, "local.step 'absent:step' cannot be imported"),
    (
        {},
        {"step": 20},
        "'module:function', a step of yours, got 20; did you mean 'local.steps=20'?",
    ),
    ({}, {"step": None, "step_args": {"rho": 1.0}}, "'step_args' only beside 'step'"),
]


@pytest.mark.thinned
@pytest.mark.parametrize(("changes", "local", "says"), NO_MEANING, ids=range(len(NO_MEANING)))
def test_a_step_beside_an_incompatible_method_is_refused(changes, local, says, world, place):
    with pytest.raises(hpcfed.InputError) as refused:
        run(place, "run", world, {"step": "own:plain", **local}, **changes)
    assert says.replace("{two}", str(line_of("# two"))) in str(refused.value)
    assert "\n" not in str(refused.value)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(OWN.splitlines(), 1) if text in line)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("step", "at", "says"),
    [
        ("raising", "nwe_zeros", ", in raising: AttributeError: 'Tensor' object has no attribute 'nwe_zeros'"),
        (
            "alone",
            "# alone",
            ": local.step, in alone: its answer: expected a pair, next parameters and loss, got",
        ),
        (
            "short",
            "# short",
            ", in short: its next parameters: expected a tensor of shape (160,) in torch.float32",
        ),
        ("wordy", "# wordy", ": local.step, in wordy: its loss: expected a number, got a str"),
        ("untilted", "# untilted", ", in untilted: the method adds a term to each gradient: expected context.tilt in"),
        ("lasting", "# lasting", ", in lasting: context.w: expected left as it is, got written to in place"),
    ],
)
def test_a_step_that_errs_is_reported_by_file_line_and_function(step, at, says, world, place):
    with pytest.raises(hpcfed.InputError) as error:
        run(place, "run", world, {"step": f"own:{step}"}, algorithm={"name": "fedprox", "mu": 0.1}, cohort={"size": 1})
    assert f"own.py, line {line_of(at)}" in str(error.value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("local", "changes"),
    [({"step": "own:scaling"}, {}), ({"engine": "sequential"}, {"model": {"factory": "own:Scaling"}})],
)
def test_samples_that_are_written_to_are_refused(local, changes, world, place):
    """By a step, or by a model that is called, in training on full batches."""
    with pytest.raises(hpcfed.InputError, match=r"the samples of the federation: .* got written to in place"):
        run(place, "run", world, local, evaluate={"every": 1}, **changes)


@pytest.mark.thinned
def test_a_full_disk_is_not_the_steps_fault(world, place):
    with pytest.raises(EnvironmentFailure, match=r"own.py, line \d+, in full: OSError: .*no space left"):
        run(place, "run", world, {"step": "own:full"})


@pytest.mark.soak
@pytest.mark.thinned
@pytest.mark.serial
def test_a_sweep_over_its_arguments(command, place):
    """And a run says that it trains clients one after another, although the model could be stacked."""
    hpcfed_recipe = recipe(place, "run", SAM, rounds=1)
    (place / "recipe.yaml").write_text(json.dumps(hpcfed_recipe))
    done = command(["sweep", "recipe.yaml", "--grid", "local.step_args.rho=0.0,0.3"], place)
    assert done.returncode == 0, done.stderr
    alone = command(["run", "recipe.yaml"], place)
    assert "local.step: samstep:step trains one client after another (local.engine: sequential)" in alone.stdout
    models = {path.read_bytes() for path in (place / "run-sweep").rglob("model.safetensors")}
    assert len(models) == 2
    assert (place / "run" / "model.safetensors").read_bytes() in models
    assert read_run(place / "run").recipe["local"]["step_args"] == {"rho": 0.3}
    assert method_of(read_run(place / "run")) == "FedAvg + samstep:step"
    assert "% Local step samstep:step: no reference known here" in command(["cite", "run"], place).stdout
