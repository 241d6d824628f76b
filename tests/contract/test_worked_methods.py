"""Methods of the literature that need the whole contract, each in one file outside the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcfed
from hpcfed.ranks.world import World
from tests.mpi.recipes import small, write_small

MISTYPED = {
    "tilts": (
        "class Own(ClientRule):\n    def tilts(self, w, shared, client, context):\n        return Tilt(mu=1.0)",
        "has 'tilts', which hpcfed does not call",
    ),
    "half-a-state": (
        "class Own(ClientRule):\n    def begin(self, w):\n        return {'e': w}",
        "has begin without stateful = True",
    ),
    "next-state": (
        "class Own(ClientRule):\n    stateful = True\n    def nextstate(self):\n        return {}",
        "has 'nextstate', which hpcfed does not call; did you mean 'next_state'?",
    ),
    "final": ("class Own(Plain):\n    mu: float = 0.1", "Own derives from Plain, which is final"),
    "arguments": (
        "class Step(ServerStep):\n    def step(self, w, state, means):\n        return ServerUpdate(w)",
        "expected the arguments w, state, means, context, got w, state, means",
    ),
    "order": (
        "class Own(ClientRule):\n    def tilt(self, w, state, shared, context):\n        return Tilt()",
        "expected the arguments w, shared, client, context, got w, state, shared, context",
    ),
    "vectors": (
        "class Own(ClientRule):\n    def vectors(self, alike):\n        return ('delta', 'psi')",
        "expected names beside 'delta', which reports_delta says; at least one of the two, got 'delta', 'psi'",
    ),
}
"""A part that would silently do another thing than it says → words of its refusal."""
HEAD = """
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import Plain, ServerStep
from hpcfed.types import Method, ServerUpdate, Tilt
Own, Step = Plain, ServerStep
"""
TAIL = "\ndef method():\n    return Method('old', Own(), Step())\n"


@pytest.fixture
def place(world, shared_tmp) -> Path:
    """A folder with data."""
    world.on_root(lambda: write_small(shared_tmp) and None)
    return shared_tmp


def run(folder: Path, output: str, world: World, algorithm: dict[str, Any], **changes: Any) -> hpcfed.Result:
    common = {"data": str(folder / "small.h5"), "python_path": [str(folder), str(Path(__file__).parent)]}
    recipe = small(folder / output, **common, algorithm=algorithm, weights="uniform", **changes)
    return hpcfed.run(recipe, world=world, quiet=True)


def model(result: hpcfed.Result) -> bytes:
    return (result.folder / "model.safetensors").read_bytes()


REUSED = """
from hpcfed import ClientRule, ServerRule
from hpcfed.types import Method, ServerUpdate, Update

NUMBERS, VECTORS = {}, {}


class Numbered(ClientRule):
    scalars = ("number",)

    def vectors(self, alike):
        return ("ones",)

    def report(self, local, w, shared, client, context):
        NUMBERS["number"] = float(context.client.client)
        VECTORS["ones"] = local.delta * 0 + NUMBERS["number"]
        return Update(local.delta, VECTORS, NUMBERS)


class Mean(ServerRule):
    def step(self, w, state, means, context):
        numbers = {"scalar": means.scalars["number"], "vector": float(means.vectors["ones"][0])}
        return ServerUpdate(w - means.delta, metrics=numbers)


def method():
    return Method("Numbered", Numbered(), Mean())
"""


@pytest.mark.parametrize("changes", [{}, {"local": {"engine": "sequential"}}, {"updates": [{"clip": {"norm": 1e9}}]}])
def test_a_rule_that_fills_one_dict_for_each_client(world, place, changes):
    world.on_root(lambda: (place / "reused.py").write_text(REUSED) and None)
    local = {"steps": 4, "batch_size": 10, "lr": 0.1} | changes.get("local", {})
    row = run(place, "reused", world, {"factory": "reused:method"}, **{**changes, "local": local}).metrics[0]
    mean = sum(row["cohort"]) / len(row["cohort"])
    assert row["method"] == {"scalar": pytest.approx(mean), "vector": pytest.approx(mean)}


def test_q_ffl_on_any_number_of_ranks(world, place):
    """With q = 0 it is FedAvg, but for rounding; its scalars are the same to the last bit on all ranks."""
    fair, plain = {"factory": "qffl:method", "q": 0.0}, {"name": "fedavg"}
    zero = run(place, "zero", world, fair, dtype="float64")
    fedavg = run(place, "fedavg", world, plain, dtype="float64")
    assert zero.metrics[-1]["test_loss"] == pytest.approx(fedavg.metrics[-1]["test_loss"], rel=1e-12)
    together = run(place, "together", world, {**fair, "q": 2.0})
    alone = run(place, f"alone-{world.rank}", World(), {**fair, "q": 2.0})
    assert model(together) == model(alone) != model(zero)
    for column in ("server_lr", "hash", "bytes_up", "method"):
        assert [row[column] for row in together.metrics] == [row[column] for row in alone.metrics]
    assert all(0 < row["method"]["h_min"] < row["method"]["h_max"] for row in together.metrics)
    for reduction in ("mean", "sum"):  # where nobody moves, the mean of h_i is that of f_i(w), by η
        changes = {"loss": {"reduction": reduction}, "local": {"steps": 1, "batch_size": 10, "lr": 1e-30}}
        changes |= {"dtype": "float64", "rounds": 1, "evaluate": {"batch_size": 8, "train": {"every": 1}}}
        (row,) = run(place, reduction, world, {**fair, "q": 1.0}, **changes).metrics
        assert 1e-30 / row["server_lr"] == pytest.approx(row["train_loss"], rel=1e-12)
    sent = sum(parameter.nbytes for parameter in together.module.parameters()) + 8
    assert [row["bytes_up"] for row in together.metrics] == [5 * sent, 10 * sent, 15 * sent]


def test_fedsam_on_any_number_of_ranks(world, place):
    """With ρ = 0 it is FedAvg, bit for bit; the two engines agree but for rounding."""
    local = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "sequential"}
    flat = run(place, "flat", world, {"factory": "fedsam:method", "rho": 0.0}, local=local)
    assert model(flat) == model(run(place, "fedavg", world, {"name": "fedavg"}, local=local))
    sam = {"factory": "fedsam:method", "rho": 0.05}
    together = run(place, "together", world, sam)
    alone = run(place, f"alone-{world.rank}", World(), sam)
    assert model(together) == model(alone) != model(flat)
    in_turn = run(place, "in-turn", world, sam, local=local)
    assert in_turn.metrics[-1]["test_loss"] == pytest.approx(together.metrics[-1]["test_loss"], rel=1e-5)
    assert model(in_turn) != model(together)
    assert in_turn.metrics[-1]["gradients"] == 3 * 5 * 4


NOISY = """
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, ServerUpdate, Update


class Noisy(ClientRule):
    def report(self, local, w, shared, client, context):
        noise = w.new_tensor(context.stream().normal(size=len(w)))
        return Update(local.delta + 1e-3 * noise)


class NoisyStep(ServerStep):
    def step(self, w, state, means, context):
        return ServerUpdate(w - means.delta + 1e-3 * w.new_tensor(context.stream().normal(size=len(w))))


def method():
    return Method("noisy", Noisy(), NoisyStep())


def noisy_clients():
    return Method("noisy", Noisy(), ServerStep())
"""


@pytest.mark.thinned
@pytest.mark.parametrize("case", MISTYPED)
def test_a_function_that_would_never_be_called_is_refused(case, world, place):
    part, words = MISTYPED[case]
    name = f"mistyped_{case.replace('-', '_')}"
    world.on_root(lambda: (place / f"{name}.py").write_text(HEAD + part + TAIL) and None)
    with pytest.raises(hpcfed.InputError, match=re.escape(words)):
        run(place, "run", world, {"factory": f"{name}:method"}, rounds=1)


def test_random_numbers_in_the_gaps_between_parameters_are_in_no_norm(world, place):
    """‖Δ̄‖² is that of the change of the parameters."""
    world.on_root(lambda: (place / "noisy.py").write_text(NOISY) and None)
    common = {"model": {"name": "logistic"}, "dtype": "float64", "loss": {"reduction": "sum"}}
    algorithm = {"factory": "noisy:noisy_clients"}
    one, two = (run(place, f"{rounds}", world, algorithm, rounds=rounds, **common) for rounds in (1, 2))
    before, after = ([p.detach() for p in result.module.parameters()] for result in (one, two))
    change = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    assert two.metrics[1]["delta_sq"] == pytest.approx(change, rel=1e-9)


SETTLED = """
import torch
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, ServerUpdate, Update


class Settled(ClientRule):
    stateful = True

    def begin(self, w):
        return {"e": w.new_full(w.shape, 0.1)}

    def report(self, local, w, shared, client, context):
        return Update(local.delta * (1 + client["e"]))

    def next_state(self, sent, local, w, shared, client, context):
        return None if context.round < 3 else {**client, "e": client["e"] * 2}


class Strided(ServerStep):
    def begin(self, w):
        return {"v": torch.zeros_like(w)}

    def step(self, w, state, means, context):
        both = torch.stack([state["v"] + means.delta, w], 1)
        return ServerUpdate(w - both[:, 0], {**state, "v": both[:, 0]})


def method():
    return Method("settled", Settled(), Strided())
"""


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "changes",
    [{}, *({"evaluate": {"model": f"{which}-average"}} for which in ("client", "step")), {"placement": "balanced"}],
    ids=str,
)
def test_states_left_as_they_are_and_states_in_other_memory(changes, world, place):
    """A client whose next state is None keeps it, where it moves, too; a server's state may be a column of a matrix."""
    world.on_root(lambda: (place / "settled.py").write_text(SETTLED) and None)
    changes = {"cohort": {"size": 3}, "rounds": 5, **changes}
    together = run(place, "together", world, {"factory": "settled:method"}, **changes)
    alone = run(place, f"alone-{world.rank}", World(), {"factory": "settled:method"}, **changes)
    assert model(together) == model(alone)
    assert [row["hash"] for row in together.metrics] == [row["hash"] for row in alone.metrics]


BAD = {
    "ends-the-process": ("report: sys.exit()", "SystemExit"),
    "ends-it-at-the-server": ("step: sys.exit()", "SystemExit"),
    "names-in-no-order": ("scalars = {'a', 'b'}", "scalars of its local part: expected a tuple of distinct names"),
    "names-as-text": ("vectors: return 'psi'", "vectors of its local part: expected a tuple"),
    "names-of-averages": ("vectors: return ('moved',)", "vectors of its local part: expected names other than last-"),
    "state-of-averages": (
        "begin: return {'last-model': w}",
        "begin: a name of its answer: expected another than last-",
    ),
    "no-delta-to-average": ("report: return Update(local.delta / 2)", "its delta: expected Δ_i itself, of which"),
    "sent-as-text": ("sent = 'two'", "sent of its local part: expected a number of vectors"),
    "writes-to-w": ("report: w.mul_(0.5)", "report: its argument w: expected left as it is"),
    "writes-to-the-initial-model": ("begin: w.mul_(0.5)", "begin: its argument w: expected left as it is"),
    "writes-to-its-state": ("next_state: client['e'].add_(1)", "next_state: its argument client 'e': expected left"),
    "writes-to-w-at-the-server": ("step: w.sub_(means.delta)", "step: its argument w: expected left as it is"),
    "writes-to-the-means": ("share: means.delta.mul_(2)", "share: its argument means 'delta': expected left as it is"),
    "complex-state": ("begin: return {'e': w.to(torch.complex64)}", "begin: its 'e': expected a dense tensor of"),
    "numbered-state": ("begin: return {1: w}", "begin: a name of its answer: expected text, got 1"),
    "huge-scalar": ("report: return Update(local.delta, scalars={'a': 10**400})", "its scalar 'a': expected a number"),
    "huge-step-size": ("step: return ServerUpdate(w, {}, 10**400)", "its server_lr: expected a number or None"),
    "radius-as-text": ("tilt: return Tilt(radius='a')", "tilt: its radius: expected a number"),
}
"""A line of a method → words of its refusal."""
SKELETON = """
import sys
import torch
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, ServerUpdate, Tilt, Update


class Client(ClientRule):
    stateful = evaluates_elsewhere = True
    {scalars}
    {sent}

    def vectors(self, alike):
        {vectors}
        return ()

    def begin(self, w):
        {begin}
        return {{"e": 1 * w}}

    def tilt(self, w, shared, client, context):
        {tilt}
        return Tilt()

    def report(self, local, w, shared, client, context):
        {report}
        return Update(local.delta)

    def next_state(self, sent, local, w, shared, client, context):
        {next_state}
        return {{"e": local.delta}}

    def share(self, shared, means):
        {share}
        return shared


class Server(ServerStep):
    def step(self, w, state, means, context):
        {step}
        return ServerUpdate(w - means.delta, {{}}, metrics={{"large": 2**80}})


def method():
    return Method("bad", Client(), Server())
"""


def skeleton(line: str = "") -> str:
    """The method with one line of its own."""
    place = re.match(r"\w+", line)[0] if line else ""
    text = line if "=" in line.partition(":")[0] else line.partition(": ")[2]
    places = re.findall(r"[^{]{(\w+)}", SKELETON)
    lines = {name: "" if name in ("scalars", "sent") else "pass" for name in places}
    return SKELETON.format(**{**lines, **({place: text} if place else {})})


@pytest.mark.thinned
@pytest.mark.parametrize("case", BAD)
def test_what_a_method_does_wrong_is_one_line_on_all_ranks(case, world, place):
    """Also what one rank alone would not notice, or what would end one rank alone."""
    line, words = BAD[case]
    name = f"bad_{case.replace('-', '_')}"
    world.on_root(lambda: (place / f"{name}.py").write_text(skeleton(line)) and None)
    evaluate = {"model": "cohort-average" if case == "no-delta-to-average" else "last"}
    with pytest.raises(hpcfed.InputError) as refused:
        run(place, "run", world, {"factory": f"{name}:method"}, rounds=1, evaluate=evaluate)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_state_may_be_the_solvers_memory_and_a_metric_any_number(world, place):
    """The memory is used again for the next client of a rank; the record of huge integers can be read."""
    world.on_root(lambda: (place / "skeleton.py").write_text(skeleton()) and None)
    changes = {"local": {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "sequential"}, "checkpoint": {"every": 1}}
    together = run(place, "together", world, {"factory": "skeleton:method"}, **changes)
    alone = run(place, f"alone-{world.rank}", World(), {"factory": "skeleton:method"}, **changes)
    assert together.metrics[-1]["method"] == {"large": 2.0**80}
    assert [row["hash"] for row in together.metrics] == [row["hash"] for row in alone.metrics]


COUNTED = """
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, ServerUpdate, Update


class Counted(ClientRule):
    scalars = ("count",)

    def report(self, local, w, shared, client, context):
        return Update(local.delta, scalars={"count": float(context.num_parameters)})


class CountedStep(ServerStep):
    def step(self, w, state, means, context):
        return ServerUpdate(w - means.delta, metrics={"count": means.scalars["count"], "here": context.num_parameters})


def method():
    return Method("counted", Counted(), CountedStep())
"""


def test_a_rule_knows_the_number_of_parameters_without_gaps(world, place):
    world.on_root(lambda: (place / "counted.py").write_text(COUNTED) and None)
    result = run(place, "run", world, {"factory": "counted:method"}, rounds=1)
    count = sum(parameter.numel() for parameter in result.module.parameters())
    assert result.metrics[0]["method"] == {"count": count, "here": count}


def test_random_streams_of_methods_do_not_depend_on_ranks(world, place):
    world.on_root(lambda: (place / "noisy.py").write_text(NOISY) and None)
    together = run(place, "together", world, {"factory": "noisy:method"})
    alone = run(place, f"alone-{world.rank}", World(), {"factory": "noisy:method"})
    assert model(together) == model(alone)


DRAWN = """
import random
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, ServerUpdate, Tilt, Update


def noise(w):
    numbers = torch.from_numpy(np.random.normal(size=len(w)))
    return 1e-3 * random.random() * (torch.randn_like(w) + numbers.to(w))


class Drawn(ClientRule):
    stateful = True

    def begin(self, w):
        return {"a": noise(w)}

    def tilt(self, w, shared, client, context):
        return Tilt(shift=client["a"] + noise(w))

    def report(self, local, w, shared, client, context):
        return Update(local.delta + noise(w))

    def next_state(self, sent, local, w, shared, client, context):
        return {"a": client["a"] + noise(w)}


class DrawnStep(ServerStep):
    def step(self, w, state, means, context):
        return ServerUpdate(w - means.delta + noise(w))


def method():
    return Method("drawn", Drawn(), DrawnStep())


def loss():
    def each(output, target):
        return cross_entropy(output, target, reduction="none") * (1 + 0.01 * np.random.rand())
    return each


def metric(output, target):
    return float(np.random.rand(len(output)).sum() + torch.rand(1).sum()), len(output)


def whole(output, target):
    return random.random()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.carried, self.seen = 0, None, torch.zeros(8)
        self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 4)
        nn.init.uniform_(self.a.weight, -0.1, 0.1 + 0.1 * np.random.rand())

    def forward(self, x):
        before, self.carried = self.carried, torch.tanh(self.a(x.flatten(1))).mean(0)
        if self.seen.device != x.device:
            self.seen = self.seen.to(x.device)
        self.seen += self.carried.detach()
        self.calls += 1
        self.added = getattr(self, "added", torch.zeros(1, device=x.device)) + 0.01
        x = x * (1 + self.added)
        more = 0 if before is None else 0.1 * before.detach() + 0.01 * self.seen
        return self.b(more + dropout(torch.tanh(self.a(x.flatten(1))), 0.2, training=True) + 0.1 * np.random.rand())


def step(parameters, batch, context):
    g, loss = context.gradient(parameters, batch)
    return parameters - context.lr * (g + context.tilt(parameters) + noise(g)), loss
"""


MLP, NET = {"name": "mlp", "hidden": [8]}, {"factory": "drawn:Net"}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("model", "local"),
    [(MLP, {}), (NET, {}), (MLP, {"step": "drawn:step"}), (NET, {"step": "drawn:step"}), (MLP, {"engine": "batched"})],
    ids=["mlp", "own-model", "step", "own-model-step", "batched"],
)
def test_what_own_code_draws_from_global_generators_does_not_depend_on_ranks(model, local, world, place):
    """Nor on what ran before: a rule's calls, a step, a loss, metrics, and a model that draws in evaluation, too."""
    world.on_root(lambda: (place / "drawn.py").write_text(DRAWN) and None)
    changes = {
        "model": model,
        "loss": {"factory": "drawn:loss"},
        "local": {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "sequential"} | local,
        "evaluate": {
            "every": 1,
            "batch_size": 16,
            "metrics": {"drawn": "drawn:metric", "whole": {"whole": "drawn:whole"}},
            "train": {"every": 1},
            "clients": {"every": 1, "models": ["global", "fine-tuned"], "fine_tune": {"steps": 2, "lr": 0.1}},
        },
        "checkpoint": {"every": 1},
    }
    method = {"factory": "drawn:method"}
    run(place, "together", world, method, **changes, rounds=2)
    torch.manual_seed(world.rank)
    np.random.seed(world.rank)  # noqa: NPY002
    resumed, alone = (
        run(place, name, ranks, method, **changes).metrics
        for name, ranks in (("together", world), (f"alone-{world.rank}", World()))
    )
    same = ("hash", "test_loss", "test_drawn", "test_whole", "train_loss", "clients")
    assert [[row[key] for key in same] for row in resumed] == [[row[key] for key in same] for row in alone]
    assert all(row[key] is not None for row in alone for key in same)


COUNTING = """
from torch import nn


class Net(nn.Linear):
    def __init__(self):
        super().__init__(12, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)
"""


def test_a_number_that_a_model_keeps_is_left_alone_and_named(world, place, capfd):
    world.on_root(lambda: (place / "counting.py").write_text(COUNTING) and None)
    recipe = small(place / "run", data=str(place / "small.h5"), python_path=[str(place)])
    hpcfed.run(recipe | {"model": {"factory": "counting:Net"}}, world=world)
    said = world.on_root(lambda: capfd.readouterr().out)
    assert said.count("the model's calls change Net.calls, which passes from client to client") == 1
