"""What a method's name stands for beside its equations: the clients' weights and the evaluated model."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import hpcfed
from hpcfed import algorithms
from hpcfed.assembly import resolve
from hpcfed.config.load import dump_yaml, load_recipe
from hpcfed.errors import InputError
from hpcfed.lab.report.comparison import compare
from hpcfed.lab.report.page import warnings
from hpcfed.lab.report.unlike import unlike
from hpcfed.lab.sweep.grid import parse_grids
from hpcfed.lab.sweep.plan import make_plan
from hpcfed.types import Means, Method, RoundContext, ServerUpdate, State
from tests.federations import write_federation

UNIFORM = {"feddyn", "fedsplit", "scaffold", "scaffold-exp"}
AVERAGED = {"fedexp", "fedexp-m", "scaffold-exp"}
NAMES = {*algorithms.names()}


@pytest.fixture
def data(world, shared_tmp):
    """Clients of 3, 5 and 8 samples."""

    def write() -> None:
        draws = np.random.default_rng(4)
        clients = [(draws.normal(size=(size, 4)), draws.integers(3, size=size)) for size in (3, 5, 8)]
        write_federation(shared_tmp / "f.h5", clients, num_classes=3, test=clients[0])

    world.on_root(write)
    return shared_tmp / "f.h5"


def recipe(data, algorithm: Any, **keys: Any) -> dict[str, Any]:
    return {
        "name": "r",
        "data": str(data),
        "model": "logistic",
        "rounds": 3,
        "local": {"steps": 3, "batch_size": 2, "lr": 0.5},
        "algorithm": algorithm,
        "output": str(data.parent / "run"),
        **keys,
    }


def test_defaults_are_the_methods_own(data):
    for name in NAMES:
        chosen = {"name": name, **algorithms.examples()[name]}
        found = resolve(load_recipe(recipe(data, chosen)))
        assert found.weights == ("uniform" if name in UNIFORM else "samples"), name
        assert found.evaluate.model == ("last-two" if name in AVERAGED else "last"), name
        asked = resolve(load_recipe(recipe(data, chosen, weights="uniform", evaluate={"model": "step-average"})))
        assert (asked.weights, asked.evaluate.model) == ("uniform", "step-average")
    parts = resolve(load_recipe(recipe(data, {"local": "prox", "server": "fedexp", "mu": 0.1})))
    assert (parts.weights, parts.evaluate.model) == ("samples", "last-two")


def test_fedexp_evaluates_the_average_and_trains_as_before(data, world, capsys):
    alone = hpcfed.run(recipe(data, {"name": "fedexp", "eps": 1e-3}), world=world)
    said = capsys.readouterr().out
    last = hpcfed.run(
        recipe(data, {"name": "fedexp", "eps": 1e-3}, evaluate={"model": "last"}, output=str(data.parent / "last")),
        world=world,
        quiet=True,
    )
    two = recipe(data, {"name": "fedexp", "eps": 1e-3}, rounds=2, output=str(data.parent / "two"))
    earlier = hpcfed.run(two, world=world, quiet=True)
    if world.is_root:
        assert "evaluated is the last-two model (evaluate.model, the default of fedexp)" in said
    losses = [one.metrics[-1]["test_loss"] for one in (alone, last)]
    assert losses[0] != losses[1]
    assert [row["hash"] for row in alone.metrics] == [row["hash"] for row in last.metrics]
    weights = [one.state_dict() for one in (alone.module, earlier.module, alone.evaluated)]
    for name, found in weights[2].items():
        torch.testing.assert_close(found, (weights[0][name] + weights[1][name]) / 2, rtol=0, atol=1e-7)
        assert torch.equal(last.evaluated.state_dict()[name], weights[0][name])


def test_a_finished_run_keeps_the_model_that_it_evaluated(data, world, capsys):
    asked = recipe(data, {"name": "fedexp", "eps": 1e-3})
    hpcfed.run(asked, ["evaluate.model=last"], world=world, quiet=True)
    hpcfed.run(asked, world=world)
    if world.is_root:
        assert "finished already" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"evaluate\.model"):
        hpcfed.run(asked, ["evaluate.model=last-two"], world=world, quiet=True)


@pytest.mark.parametrize("name", ["feddyn", "fedavg"])
def test_a_run_says_that_clients_of_unequal_sizes_weigh_alike(data, world, capsys, name):
    hpcfed.run(recipe(data, {"name": name, **algorithms.examples()[name]}), world=world)
    line = "clients of 3 to 8 samples weigh alike (weights: uniform, the default of feddyn; FedAvg's is samples)"
    if world.is_root:
        assert (line in capsys.readouterr().out) == (name == "feddyn")


def test_a_comparison_says_what_its_methods_differ_in(data, world, shared_tmp):
    folders = []
    for name in ("fedavg", "feddyn", "fedexp"):
        folders.append(shared_tmp / name)
        algorithm = {"name": name, **algorithms.examples()[name]}
        hpcfed.run(recipe(data, algorithm, name=name, output=str(folders[-1])), world=world, quiet=True)
    weights, models = "samples for FedAvg, FedExP; uniform for FedDyn", "last for FedAvg, FedDyn; last-two for FedExP"
    said = warnings(compare(folders).groups)
    assert [text for text in said if "iffer between" in text] == [
        f"Clients' weights differ between methods: {weights}; set weights to compare the methods.",
        f"Evaluated models differ between methods: {models} (evaluate.model).",
    ]
    assert not [text for text in warnings(compare(folders[:1]).groups) if "differ" in text]
    write = shared_tmp / "r.yaml"
    world.on_root(lambda: write.write_text(dump_yaml(recipe(data, {"name": "fedavg"}))))
    grids = parse_grids(["algorithm.name=fedavg,scaffold-exp"])
    lines = make_plan(write, [], grids, [0, 1], shared_tmp / "sweep").unlike()
    assert [line.partition(":")[0] for line in lines] == [
        "clients' weights differ between methods",
        "evaluated models differ between methods",
    ]
    both = unlike([(name, {"weights": value}) for name in "ab" for value in ("samples", "uniform")])
    assert not both, "the same methods in two cases"
    set_alike = ["weights=uniform", "evaluate.model=last"]
    assert not make_plan(write, set_alike, grids, [0], shared_tmp / "sweep").unlike()


class Named(hpcfed.ServerRule):
    final_model: ClassVar[str] = "middle"

    def step(self, w: torch.Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        return ServerUpdate(w - means.delta, state)


def named() -> Method:
    return Method("named", hpcfed.ClientRule(), Named())


def test_an_own_rules_final_model_is_one_of_the_recipes(data):
    with pytest.raises(InputError, match=r"named: final_model .* last-two.*middle"):
        resolve(load_recipe(recipe(data, {"factory": f"{__name__}:named"})))
