"""The README's page on adding a method: its file and its recipe run as they stand there, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import hpcfed
from hpcfed.world import World
from tests.launch import ROOT
from tests.mpi.recipes import small, write_small

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture
def place(world, shared_tmp) -> Path:
    """A folder with the README's file, data, and methods that do what a method must not."""

    def write() -> None:
        write_small(shared_tmp)
        (shared_tmp / "grads.py").write_text(block("python-grads"))
        (shared_tmp / "wrong.py").write_text(WRONG)

    world.on_root(write)
    return shared_tmp


def recipe(place: Path, output: str, algorithm: dict[str, Any]) -> dict[str, Any]:
    return small(
        place / output, data=str(place / "small.h5"), python_path=[str(place)], algorithm=algorithm, dtype="float64"
    )


def test_the_example_runs_with_its_own_step(world, place):
    algorithm = YAML(typ="safe").load(block("yaml-grads"))["algorithm"]
    together = hpcfed.run(recipe(place, "together", algorithm), world=world, quiet=True)
    alone = hpcfed.run(recipe(place, f"alone-{world.rank}", algorithm), world=World(), quiet=True)
    for row in together.metrics:
        assert row["server_lr"] == row["mean_delta_sq"] / row["delta_sq"] > 1
    models = [(result.folder / "model.safetensors").read_bytes() for result in (together, alone)]
    assert models[0] == models[1]


def test_its_resolved_recipe_keeps_its_keys(world, place):
    first = hpcfed.run(
        recipe(place, "first", {"factory": "grads:fedexprox", "mu": 0.1, "gain": 0.5}), world=world, quiet=True
    )
    told = YAML(typ="safe").load((first.folder / "recipe.yaml").read_text())["algorithm"]
    assert told == {"factory": "grads:fedexprox", "mu": 0.1, "gain": 0.5}
    again = hpcfed.run(first.folder / "recipe.yaml", [f"output={place / 'again'}"], world=world, quiet=True)
    assert again.metrics[-1]["test_loss"] == first.metrics[-1]["test_loss"]


WRONG = """
from hpcfed.algorithms.fedavg import Plain, ServerStep
from hpcfed.types import Method, Report, Stepped


class Forgetful(Plain):
    def report(self, local, w, shared, client, who):
        return Report({"dleta": local.delta})


class Short(ServerStep):
    def step(self, w, state, means):
        return Stepped(w[1:], state)


def forgetful():
    return Method("forgetful", Forgetful(), ServerStep())


def short():
    return Method("short", Plain(), Short())


def nothing():
    return None


def failing():
    raise OSError("no licence server")
"""


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"factory": "wrong:forgetful"}, ("round 1, client 0", "report of 'delta'", "got nothing")),
        ({"factory": "wrong:short"}, ("short, server step", "shape")),
        ({"factory": "wrong:nothing"}, ("wrong:nothing", "hpcfed.types.Method", "NoneType")),
        ({"factory": "wrong:failing"}, ("wrong:failing", "OSError: no licence server")),
        ({"factory": "wrong:forgtful"}, ("no function 'forgtful'", "did you mean 'forgetful'")),
        ({"factory": "grads:fedexprox"}, ("grads:fedexprox", "'mu'")),
        ({"factory": "grads:fedexprox", "mu": 0.1, "gian": 2}, ("grads:fedexprox", "'gian'")),
        ({"factory": "grads:fedexprox", "mu": -1.0}, ("grads:fedexprox", "greater than or equal to 0")),
        ({"factory": "absent:method"}, ("absent:method", "cannot be imported")),
    ],
)
def test_a_method_that_cannot_be_is_refused_in_one_line(algorithm, says, world, place):
    with pytest.raises(hpcfed.InputError) as refused:
        hpcfed.run(recipe(place, "run", algorithm), world=world, quiet=True)
    line = str(refused.value)
    assert "\n" not in line
    for fragment in says:
        assert fragment in line
