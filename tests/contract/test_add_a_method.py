"""What README.md and docs/methods.md show of a method of one's own runs as it stands there, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import hpcfed
from hpcfed import algorithms
from hpcfed.config.factory import imported
from hpcfed.config.load import load_recipe
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.ranks.world import World
from hpcfed.run_folder.code import check_hosts
from tests.devices import DEVICE
from tests.launch import ROOT
from tests.mpi.recipes import small, write_small

PAGES = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/methods.md"))


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGES, flags=re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture
def place(world, shared_tmp) -> Path:
    """A folder with the page's file, data, and methods that do what a method must not."""

    def write() -> None:
        write_small(shared_tmp)
        (shared_tmp / "grads.py").write_text(block("python-grads"))
        (shared_tmp / "drift.py").write_text(block("python-drift"))
        (shared_tmp / "wrong.py").write_text(WRONG)

    world.on_root(write)
    return shared_tmp


def recipe(place: Path, output: str, algorithm: dict[str, Any]) -> dict[str, Any]:
    return small(
        place / output, data=str(place / "small.h5"), python_path=[str(place)], algorithm=algorithm, dtype="float64"
    )


@pytest.mark.thinned
def test_the_example_runs_with_its_own_step(world, place):
    algorithm = YAML(typ="safe").load(block("yaml-grads"))["algorithm"]
    together = hpcfed.run(recipe(place, "together", algorithm), world=world, quiet=True)
    alone = hpcfed.run(recipe(place, f"alone-{world.rank}", algorithm), world=World(), quiet=True)
    for row in together.metrics:
        assert row["server_lr"] == row["mean_delta_sq"] / row["delta_sq"] > 1
    models = [(result.folder / "model.safetensors").read_bytes() for result in (together, alone)]
    assert models[0] == models[1]


@pytest.mark.thinned
def test_the_client_rule_of_the_page_keeps_its_state(world, place):
    """Without its term it is FedAvg, bit for bit; with it, the same on any number of ranks."""
    rules = {"zero": ("drift:drift", 0.0), "drift": ("drift:drift", 0.5)}
    runs = {name: recipe(place, name, {"factory": factory, "lam": lam}) for name, (factory, lam) in rules.items()}
    runs["fedavg"] = recipe(place, "fedavg", {"name": "fedavg"})
    losses = {name: hpcfed.run(run, world=world, quiet=True).metrics[-1]["test_loss"] for name, run in runs.items()}
    assert losses["zero"] == losses["fedavg"] != losses["drift"]
    alone = recipe(place, f"alone-{world.rank}", {"factory": "drift:drift", "lam": 0.5})
    assert hpcfed.run(alone, world=World(), quiet=True).metrics[-1]["test_loss"] == losses["drift"]


@pytest.mark.thinned
def test_its_resolved_recipe_keeps_its_keys(world, place):
    first = hpcfed.run(
        recipe(place, "first", {"factory": "grads:fedexprox", "mu": 0.1, "gain": 0.5}), world=world, quiet=True
    )
    told = YAML(typ="safe").load((first.folder / "recipe.yaml").read_text())["algorithm"]
    assert told == {"factory": "grads:fedexprox", "mu": 0.1, "gain": 0.5}
    again = hpcfed.run(first.folder / "recipe.yaml", [f"output={place / 'again'}"], world=world, quiet=True)
    assert again.metrics[-1]["test_loss"] == first.metrics[-1]["test_loss"]


WRONG = """
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import Plain, ServerStep
from hpcfed.types import Method, ServerUpdate, Update


class Forgetful(ClientRule):
    def report(self, local, w, shared, client, context):
        return Update(None, {"dleta": local.delta})


def forgetful():
    return Method("forgetful", Forgetful(), ServerStep())


def nothing():
    return None


def failing():
    raise OSError("no licence server")


RATE = 2
"""
UNTYPED = """
from hpcfed import ClientRule


class Counting(ClientRule):
    {attribute}
"""


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"factory": "wrong:forgetful"}, ("round 1, client 0", "report of 'delta'", "got nothing")),
        ({"factory": "wrong:nothing"}, ("wrong:nothing", "hpcfed.types.Method", "NoneType")),
        ({"factory": "wrong:failing"}, ("wrong:failing", "OSError: no licence server")),
        ({"factory": "wrong:forgtful"}, ("no function 'forgtful'", "did you mean 'forgetful'")),
        ({"factory": "grads:fedexprox"}, ("grads:fedexprox", "'mu'")),
        ({"factory": "grads:fedexprox", "mu": 0.1, "gian": 2}, ("grads:fedexprox", "did you mean 'gain'?")),
        (
            {"factory": "grads:fedexprox", "args": {"mu": 0.1}},
            ("a method's parameters stand beside 'factory': {factory: …, mu: …}",),
        ),
        (
            {"factory": "grads:fedexprox", "mu": -1.0},
            ("algorithm.mu: expected greater than or equal to 0, got -1.0; ", "grads:fedexprox"),
        ),
        ({"factory": "absent:method"}, ("absent:method", "cannot be imported")),
        ({"factory": "wrong:RATE"}, ("'wrong:RATE': expected a function or a class, got 2, of type int",)),
    ],
)
def test_a_method_that_cannot_be_is_refused_in_one_line(algorithm, says, world, place):
    with pytest.raises(hpcfed.InputError) as refused:
        hpcfed.run(recipe(place, "run", algorithm), world=world, quiet=True)
    line = str(refused.value)
    assert "\n" not in line
    for fragment in says:
        assert fragment in line


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        (
            "statefull = True",
            "'statefull = True' has no type; did you mean 'stateful'? a constant is statefull: ClassVar",
        ),
        ("count_clients = True", "did you mean 'counts_clients'?"),
        ("zz = 1", "the attribute 'zz = 1' has no type; a constant is zz: ClassVar = 1, a parameter zz: TYPE = 1"),
    ],
)
def test_an_attribute_without_a_type_is_refused_in_one_line(attribute, says, tmp_path):
    (tmp_path / "untyped.py").write_text(UNTYPED.format(attribute=attribute))
    with pytest.raises(InputError) as refused:
        imported("untyped:Counting", [tmp_path], "algorithm.factory")
    line = str(refused.value)
    assert says in line
    assert "untyped.py, line 5" in line
    assert "https" not in line


SAYING = """
from hpcfed import ClientRule, ServerRule

class Client(ClientRule):
    {flag} = ClientRule.{flag}

class Server(ServerRule):
    {flag} = ServerRule.{flag}
"""


def test_what_both_rules_may_say_needs_no_type(tmp_path):
    (tmp_path / "saying.py").write_text(SAYING.format(flag="counts_clients"))
    assert not imported("saying:Client", [tmp_path], "algorithm.factory")().counts_clients
    assert not imported("saying:Server", [tmp_path], "algorithm.factory")().counts_clients


ERRING = """
import time

import numpy as np
import torch
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import Plain, ServerStep
from hpcfed.algorithms.fednova import PerStep
from hpcfed.types import Method, Part, ServerUpdate, Tilt, Update


class Stateful(ClientRule):
    stateful = True

    def next_state(self, sent, local, w, shared, client, context):
        return client


class Begins(Stateful):
    def begin(self, w):
        return {"c": w.nwe_zeros(3)}


class Kept(Stateful):
    def begin(self, w):  # Kept
        return {"c": 0.0}


class Tilts(ClientRule):
    def tilt(self, w, shared, client, context):  # Tilts
        return w if context.client.client == 2 else Tilt()


class Shifts(ClientRule):
    def tilt(self, w, shared, client, context):  # Shifts
        return Tilt(shift=w[1:])


class Reports(ClientRule):
    def report(self, local, w, shared, client, context):
        return Update(local.dleta if context.client.client == 2 else local.delta)


class Shares(ClientRule):
    def share(self, shared, means):
        return {"c": means.delta[means.cohort_size]["c"]}


class Steps(ServerStep):
    def step(self, w, state, means, context):  # Steps
        return w - means.delta


class Short(ServerStep):
    def step(self, w, state, means, context):  # Short
        return ServerUpdate(w[1:], state)


class Single(ServerStep):
    def step(self, w, state, means, context):  # Single
        return ServerUpdate(w.float())


class Rate(ServerStep):
    def step(self, w, state, means, context):  # Rate
        return ServerUpdate(w, state, means.delta.norm())


class Counts(ServerStep):
    def step(self, w, state, means, context):  # Counts
        return ServerUpdate(w, state, metrics={"norm": means.delta.norm()})


class Grows(ServerStep):
    def step(self, w, state, means, context):  # Grows
        return ServerUpdate(w, {**state, "v": w})


class Reads(ServerStep):
    def step(self, w, state, means, context):
        return ServerUpdate(w - float(open("nowhere").read()))


class Full(ServerStep):
    def step(self, w, state, means, context):
        raise OSError(28, "no space left")


class Keeps(ServerStep):
    def step(self, w, state, means, context):
        self.server_lr = 2.0


class Noisy(ServerStep):
    def step(self, w, state, means, context):
        from mpi4py import MPI

        torch.rand(MPI.COMM_WORLD.rank)  # as training of a client may draw
        return ServerUpdate(w + torch.randn_like(w))


MEMORY = {}


class Remembers(ClientRule):
    def report(self, local, w, shared, client, context):  # Remembers
        error = MEMORY.get(context.client.client, torch.zeros_like(w))
        sent = 0.5 * (local.delta + error)
        MEMORY[context.client.client] = local.delta + error - sent
        return Update(sent)


class Dices(ClientRule):
    scalars = ("luck",)

    def report(self, local, w, shared, client, context):  # Dices
        return Update(local.delta, scalars={"luck": np.random.default_rng().random()})


class Takes(Stateful):
    def begin(self, w):
        return {"e": torch.zeros_like(w)}

    def tilt(self, w, shared, client, context):
        MEMORY[context.client.client] = 1.0
        return Tilt()

    def report(self, local, w, shared, client, context):  # Takes
        return Update(local.delta * MEMORY.pop(context.client.client))


class Loses(Takes):
    def report(self, local, w, shared, client, context):  # Loses
        client["e"] = local.delta.clone()
        return Update(local.delta)


class Assigns(Stateful):
    def begin(self, w):
        return {"e": torch.zeros_like(w)}

    def report(self, local, w, shared, client, context):
        return Update(local.delta + client["e"])

    def next_state(self, sent, local, w, shared, client, context):
        client["e"] = 0.5 * client["e"] + local.delta
        return client


class Copies(Assigns):
    def next_state(self, sent, local, w, shared, client, context):
        return {"e": 0.5 * client["e"] + local.delta}


class Heavy(ServerStep):
    def begin(self, w):
        return {"v": torch.zeros_like(w)}

    def step(self, w, state, means, context):
        state["v"] = 0.9 * state["v"] + means.delta
        return ServerUpdate(w - state["v"], state)


class HeavyCopies(Heavy):
    def step(self, w, state, means, context):
        v = 0.9 * state["v"] + means.delta
        return ServerUpdate(w - v, {"v": v})


class Momentum(ServerStep):
    def step(self, w, state, means, context):  # Momentum
        MEMORY["v"] = 0.9 * MEMORY.get("v", 0.0) + means.delta
        return ServerUpdate(w - MEMORY["v"])


class Timed(ServerStep):
    def step(self, w, state, means, context):
        luck = np.random.rand() + torch.rand(()).item() + context.stream().random()
        return ServerUpdate(w - means.delta * luck, metrics={"clock": time.perf_counter()})


class Half(Part):  # Half
    def begin(self, w):
        return {}


class Seeded(Part):
    def factors(self, effective_steps, steps, shares, prox_mu):
        effective_steps *= 1 + 0.5 * np.random.rand(len(steps))
        return effective_steps


class Random(Part):
    def factors(self, effective_steps, steps, shares, prox_mu):  # Random
        return np.random.default_rng().random(len(steps))


class Bias(ClientRule):  # Bias
    weights = "sample"


class Pulls(ClientRule):
    def tilt(self, w, shared, client, context):  # Pulls
        return Tilt(mu=0.5)


def made(client="Plain", rule="ServerStep", scale=None):
    return Method("erring", globals()[client](), globals()[rule](), scale and globals()[scale]())
"""


@pytest.mark.every(2)
@pytest.mark.thinned
@pytest.mark.parametrize(
    ("parts", "line", "says"),
    [
        ({"client": "Begins"}, "nwe_zeros", "in begin: AttributeError: 'Tensor' object has no"),
        ({"client": "Kept"}, "# Kept", ": Kept.begin: its 'c': expected a tensor, got a float"),
        ({"client": "Tilts"}, "# Tilts", ": Tilts.tilt: its answer: expected a Tilt, got a Tensor"),
        ({"client": "Shifts"}, "# Shifts", ": Shifts.tilt: its shift: expected a tensor of shape (144,) in"),
        ({"client": "Reports"}, "dleta", "in report: AttributeError: 'LocalResult' object has no attribute 'dleta'"),
        ({"client": "Shares"}, "cohort_size", "in share: IndexError: "),
        ({"rule": "Steps"}, "# Steps", ": Steps.step: its answer: expected a ServerUpdate, got a Tensor"),
        ({"rule": "Short"}, "# Short", ": Short.step: its w: expected a tensor of shape (144,) in torch.float64, got"),
        ({"rule": "Single"}, "# Single", "in torch.float64, got a tensor of shape (144,) in torch.float32"),
        ({"rule": "Counts"}, "# Counts", ": Counts.step: its metric 'norm': expected a number, got a Tensor"),
        ({"rule": "Rate"}, "# Rate", ": Rate.step: its server_lr: expected a number or None, got a Tensor"),
        ({"rule": "Grows"}, "# Grows", ": Grows.step: its state 'v': expected none, got a tensor of shape (144,)"),
        ({"rule": "Reads"}, "nowhere", "in step: FileNotFoundError: "),
        ({"rule": "Keeps"}, "= 2.0", "Keeps.server_lr is assigned, but a part is frozen: state goes in through begin"),
        ({"client": "Remembers"}, "# Remembers", ": Remembers.report: its answer: expected the same from a second"),
        ({"client": "Dices"}, "# Dices", "got a different scalars 'luck'; keep what it remembers in its state, and"),
        ({"client": "Takes"}, "# Takes", "the same from a second call with the same arguments, got KeyError: "),
        ({"client": "Loses"}, "# Loses", "its argument client 'e': expected left as it is, or returned, got replaced"),
        ({"rule": "Momentum"}, "# Momentum", ": Momentum.step: its answer: expected the same from a second call"),
        ({"scale": "Random"}, "# Random", ": Random.factors: its answer: expected the same from a second call with"),
        ({"client": "Bias"}, "# Bias", ": weights of its local part: expected 'samples' or 'uniform', got 'sample'"),
        ({"client": "Pulls", "scale": "PerStep"}, "# Pulls", "its mu: expected 0, its prox_mu, by which the effe"),
        ({"rule": "Half"}, "# Half", ": erring: its server part, Half, has no 'step'; hpcfed.types.ServerMethod says"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_method_that_errs_is_reported_by_file_and_line(parts, line, says, world, place):
    """On every rank, although only one rank trains the client that raises."""
    world.on_root(lambda: (place / "erring.py").write_text(ERRING))
    erring = recipe(place, "run", {"factory": "erring:made", **parts})
    if DEVICE.type != "cpu" and parts.get("client") in ("Remembers", "Dices"):  # or the device's kernels differ
        hpcfed.run(erring, world=world, quiet=True)
        logs = [path.read_text() for path in (place / "run" / "logs").iterdir()]
        assert any("a second call with the same arguments gave a different" in log for log in logs)
        return
    with pytest.raises(hpcfed.InputError) as error:
        hpcfed.run(erring, world=world, quiet=True)
    number = next(number for number, text in enumerate(ERRING.splitlines(), 1) if line in text)
    assert f"erring.py, line {number}" in str(error.value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.thinned
def test_the_global_generators_and_a_metric_of_the_clock_may_be_used(world, place):
    """Each call has the generators' same stream, and no metric is computed with."""
    world.on_root(lambda: (place / "erring.py").write_text(ERRING))
    results = [
        hpcfed.run(recipe(place, name, {"factory": "erring:made", "rule": "Timed"}), world=world, quiet=True)
        for name in ("first", "second")
    ]
    assert len({result.metrics[-1]["hash"] for result in results}) == 1


@pytest.mark.thinned
def test_factors_may_draw_from_the_global_generators(world, place):
    """The same on every rank, and in a run that is resumed; arrays are their own to write to."""
    world.on_root(lambda: (place / "erring.py").write_text(ERRING))
    factory = {"factory": "erring:made", "scale": "Seeded"}
    whole = hpcfed.run(recipe(place, "whole", factory), ["rounds=3"], world=world, quiet=True)
    hpcfed.run(recipe(place, "parts", factory), ["rounds=2"], world=world, quiet=True)
    parts = hpcfed.run(recipe(place, "parts", factory), ["rounds=3"], world=world, quiet=True)
    assert [row["hash"] for row in parts.metrics] == [row["hash"] for row in whole.metrics]


@pytest.mark.thinned
def test_a_state_may_be_assigned_to_and_returned(world, place):
    """As if it had been copied: each call has a mapping of its own."""
    world.on_root(lambda: (place / "erring.py").write_text(ERRING))
    results = [
        hpcfed.run(
            recipe(place, rule, {"factory": "erring:made", "client": client, "rule": rule}), world=world, quiet=True
        )
        for client, rule in (("Assigns", "Heavy"), ("Copies", "HeavyCopies"))
    ]
    assert len({result.metrics[-1]["hash"] for result in results}) == 1


@pytest.mark.thinned
@pytest.mark.ranks(2)
def test_a_step_with_random_numbers_of_its_own_is_reported_before_the_memory(world, place):
    world.on_root(lambda: (place / "erring.py").write_text(ERRING))
    changes = {"factory": "erring:made", "rule": "Noisy"}
    with pytest.raises(EnvironmentFailure, match=r"every rank: no clock, .* suspect that host's memory"):
        hpcfed.run(recipe(place, "run", changes), world=world, quiet=True)


RANKED = """
from mpi4py import MPI

from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, Part

RANK = MPI.COMM_WORLD.rank
NAMES = {"vectors": ("a", "b")[:: -1 if RANK == 1 else 1], "scalars": ("a", "b")[RANK == 1 :]}


class Factors(Part):
    what: str

    def factors(self, effective_steps, steps, shares, prox_mu):
        return steps * (2.0 if RANK == 1 and self.what == "factors" else 1.0)


class Ranked(ClientRule):
    what: str

    def vectors(self, alike):
        return NAMES["vectors"] if self.what == "vectors" else ()

    @property
    def scalars(self):
        return NAMES["scalars"] if self.what == "scalars" else ()


def ranked(what):
    return Method("ranked", Ranked(what=what), ServerStep(), Factors(what=what))
"""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["vectors", "scalars", "factors"])
def test_ranks_that_report_others_are_named(what, world, place):
    """Before a round, whose sums would be of other names, or of another length."""
    world.on_root(lambda: (place / "ranked.py").write_text(RANKED))
    says = rf"ranked: the .*{what}.* are not the same on every rank: expected .* of rank 0, got .* of rank 1 on "
    with pytest.raises(InputError, match=says):
        hpcfed.run(recipe(place, "run", {"factory": "ranked:ranked", "what": what}), world=world, quiet=True)


@pytest.mark.ranks(2)
def test_hosts_with_other_code_are_named(world, place):
    """Each rank as on a host of its own, with a folder of its own."""
    own = place / f"host-{world.rank}"
    own.mkdir()
    (own / "apart.py").write_text(f"from wrong import *\nRANK = {min(world.rank, 1)}\n")
    (own / "wrong.py").write_text(WRONG)
    content = {**recipe(place, "run", {"factory": "apart:forgetful"}), "python_path": [str(own)]}
    loaded = load_recipe(content)
    algorithms.build(loaded.algorithm, loaded.python_path)
    check_hosts(loaded, world)  # all on one host: one rank reads
    world.hosts = tuple(f"host-{rank}" for rank in range(world.size))
    with pytest.raises(
        hpcfed.InputError, match="module apart is not the same on all hosts: got one on host-0 and anoth"
    ):
        check_hosts(loaded, world)


@pytest.mark.thinned
def test_a_full_disk_is_not_the_methods_fault(world, place):
    world.on_root(lambda: (place / "erring.py").write_text(ERRING))
    with pytest.raises(EnvironmentFailure, match=r"erring.py, line \d+, in step: OSError: .*no space left"):
        hpcfed.run(recipe(place, "run", {"factory": "erring:made", "rule": "Full"}), world=world, quiet=True)
