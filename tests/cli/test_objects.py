"""`hpcfed.run` with functions, classes, modules, losses, methods and observers: recorded by their source and values."""

from __future__ import annotations

import ast
import functools
import json
import linecache
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import hpcfed
from hpcfed import ServerRule
from hpcfed.algorithms.fedavg import Plain, ServerStep
from hpcfed.config.objects import named_objects
from hpcfed.config.recipe import LossSection
from hpcfed.config.user_code.capture import Capture
from hpcfed.config.user_code.values import NotStorable
from hpcfed.errors import InputError
from hpcfed.models.losses import loss_for
from hpcfed.types import Method, ServerUpdate
from tests.launch import launch
from tests.mpi.nets import mlp
from tests.mpi.recipes import small, write_small

SCRIPT = """
import sys

import torch
from torch import nn
from torch.nn import functional

import hpcfed
from hpcfed import ServerRule
from hpcfed.algorithms.fedavg import Plain
from hpcfed.types import Method, ServerUpdate

WIDTH = int(sys.argv[2])
SCALE = torch.tensor([1.0, 2.0, 1.0, 1.0])

class Net(nn.Sequential):
    def __init__(self, width=WIDTH):
        super().__init__(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 4))

class Half(ServerRule):
    gain: float = 0.5

    def step(self, w, state, means, context):
        return ServerUpdate(w - self.gain * means.delta, state, self.gain)

def loss(output, target):
    return functional.cross_entropy(output, target, reduction="none") * SCALE[target]

def of_width(width):
    return lambda: Net(width)

class Watch:
    def __init__(self):
        self.rows = []
    def round(self, row):
        self.rows.append(row)

watch = Watch()
result = hpcfed.run(
    data=sys.argv[1], output="run", rounds=2, model=of_width(6), loss=loss, algorithm=Method("half", Plain(), Half()),
    local={"steps": 2, "batch_size": 5, "lr": torch.tensor(0.25)}, observers=watch, quiet=True,
    evaluate={"metrics": {"right": lambda output, target: ((output.argmax(1) == target).double().sum(), len(target))}},
)
assert len(watch.rows) == 2 and result.module[0].out_features == 6
"""


@pytest.mark.soak
def test_a_script_of_objects_is_verified_elsewhere(tmp_path, command):
    write_small(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = launch(0, [str(tmp_path / "small.h5"), "8"], cwd=tmp_path, program=["train.py"])
    assert done.returncode == 0, done.stderr
    (tmp_path / "train.py").unlink()
    done = command(["verify", "run", "--all", "--run-code"], tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert hpcfed.replay(tmp_path / "run", 2, 1, run_code=True).agrees
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert (certificate["repeatable"], [*certificate["code"]]) == (True, ["from_python"])
    done = command(["export", "run", "-o", "model.safetensors"], tmp_path)
    assert (done.returncode, "was an object of Python; --run-code" in done.stderr) == (2, True)
    assert command(["export", "run", "-o", "model.safetensors", "--run-code"], tmp_path).returncode == 0
    assert hpcfed.load(tmp_path / "run", run_code=True).module(torch.zeros(3, 12)).shape == (3, 4)


def common(tmp_path, **changes: Any) -> dict[str, Any]:
    return {"quiet": True, **small(tmp_path / "run", data=str(write_small(tmp_path)), rounds=1), **changes}


def test_objects_and_their_names_give_the_same_run(tmp_path):
    """Of what a file has, the recipe has the name; torch's losses are the built-in ones."""
    named = {"model": {"factory": "tests.mpi.nets:mlp"}, "parameters": {"buffers": "averaged"}}
    by_name = hpcfed.run(**common(tmp_path, **named, output=str(tmp_path / "named")))
    given = hpcfed.run(**common(tmp_path, **named | {"model": mlp}, loss=nn.CrossEntropyLoss(), algorithm="fedavg"))
    assert (given.recipe.model, given.recipe.loss.name) == (by_name.recipe.model, "cross-entropy")
    assert given.metrics[0]["hash"] == by_name.metrics[0]["hash"]


def test_an_instance_is_the_initial_model_and_stays_as_it_is(tmp_path):
    net = nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 4))
    before = [each.clone() for each in net.parameters()]
    found = [
        hpcfed.run(**common(tmp_path, model=net, seed=seed, output=str(tmp_path / f"{seed}"), cohort=5))
        for seed in (0, 1)
    ]
    assert all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))
    alone = hpcfed.run(**common(tmp_path, model=net, output=str(tmp_path / "tiny"), local={"steps": 1, "lr": 1e-30}))
    assert all(torch.equal(*pair) for pair in zip(before, alone.module.parameters(), strict=True))
    assert found[0].metrics[0]["hash"] != found[1].metrics[0]["hash"]  # other minibatches
    with pytest.raises(InputError, match=r"your code is another than this run's.*values that it holds: seed them"):
        hpcfed.run(**common(tmp_path, model=nn.Sequential(nn.Linear(12, 4)), output=str(tmp_path / "0"), cohort=5))
    assert found[0].module[0].out_features == 5  # whatever was given since


def test_objects_that_cannot_be_recorded_train_and_say_so(tmp_path, command, capfd):
    lock = threading.Lock()

    def net():
        with lock:
            return nn.Linear(12, 4)

    result = hpcfed.run(**common(tmp_path, model=net, quiet=False))
    assert "cannot be recorded: net uses a lock" in " ".join(capfd.readouterr().out.split())
    certificate = json.loads((result.folder / "certificate.json").read_text())
    assert (certificate["repeatable"], certificate["code"]["from_python"]) == (False, None)
    assert "could not be recorded" in certificate["why_not"]
    sys.modules.pop("from_python")  # as in another process
    done = command(["verify", result.folder, "--run-code"], tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "objects that no text stands for" in done.stderr


@pytest.mark.parametrize(("key", "marked"), [("algorithm", "in step"), ("rule", "in step"), ("model", "in wide")])
def test_an_error_is_named_where_the_user_wrote_it(key, marked, tmp_path):
    """The recorded text, which has no comments and other definitions, has other lines."""
    width = 4

    class Erring(ServerRule):
        """A rule with an error,

        below a text of two lines."""

        gain: float = 1.0

        def step(self, w, state, means, context):
            scaled = self.gain * means.delta

            return ServerUpdate(w - scaled, state, self.gian)  # in step

    def wide():
        return nn.Linear(12, width, "cpu", "no device")  # in wide

    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if text.endswith(f"# {marked}"))
    method = Method("Erring", Plain(), Erring())
    keys = {"algorithm": {"algorithm": method}, "rule": {"algorithm": lambda: method}, "model": {"model": wide}}[key]
    with pytest.raises(InputError, match=rf"test_objects\.py, line {line}, in"):
        hpcfed.run(**common(tmp_path, **keys))
    if key != "model":
        log = (tmp_path / "run" / "logs" / "rank-0.log").read_text(encoding="utf-8")
        assert f"line {line}, in step\n    {lines[line - 1].strip()}" in log


def test_a_method_of_the_users_is_named_as_it_names_itself(tmp_path):
    result = hpcfed.run(**common(tmp_path, algorithm=lambda: Method("Mine", Plain(), ServerStep())))
    assert str(result).startswith("run: Mine, 1 round\n")
    assert str(hpcfed.load(result.folder)).startswith("run: Mine, 1 round\n")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model": 5}, "model: expected"),
        ({"model": object()}, "a function that returns one, or a name"),
        ({"model": lambda: 5}, "expected a torch.nn.Module, got int"),
        ({"loss": nn.CrossEntropyLoss(weight=torch.ones(4))}, "divides by what a minibatch holds"),
        ({"loss": nn.KLDivLoss()}, "one loss per sample"),
        ({"loss": lambda output, target: functional.cross_entropy(output, target)}, "one loss per sample"),
        ({"algorithm": np.zeros(3)}, "algorithm: expected a hpcfed.types.Method"),
        ({"algorithm": lambda: 5}, "expected a hpcfed.types.Method"),
        ({"modle": nn.Linear(12, 4)}, "did you mean 'model'?"),
        ({"evaluate": {"metrics": [functools.partial(max, 1)]}}, "a name for each"),
        ({"observers": [object()]}, "an object with start, round, look, end"),
    ],
    ids=range(11),
)
def test_what_stands_for_nothing_is_refused_in_one_line(keys, says, tmp_path):
    with pytest.raises(InputError) as raised:
        hpcfed.run(**common(tmp_path, **keys))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def captured(value: Any, name: str = "given") -> Any:
    """A value, from its text alone."""
    capture = Capture()
    own = capture.add(value, name)
    module: dict[str, Any] = {"__name__": "elsewhere"}
    exec(compile(capture.text, "elsewhere", "exec", dont_inherit=True), module)
    return module[own]


SHARED = [1, 2.5, float("inf")]


def even(n: int) -> bool:
    return n == 0 or odd(n - 1)


def odd(n: int) -> bool:
    return n != 0 and even(n - 1)


def test_closures_defaults_and_what_they_call_are_in_the_text():
    def power(exponent, offset=SHARED[0] + 2):
        def inner(x, *, factor=SHARED[1] * 2):
            return factor * x**exponent + offset

        return inner

    square, cube = power(2), power(3, 1)
    both = lambda x: (square(x), cube(x), SHARED[0])  # noqa: E731
    first, second = (lambda x, k=k: k * x for k in (2, 3))
    assert captured(both)(2) == (23.0, 41.0, 1)
    assert (captured(first)(5), captured(second)(5)) == (10, 15)
    assert captured(lambda n: even(n))(10)
    text = captured(
        lambda: (
            """two
        lines"""
        )
    )
    assert text() == "two\n        lines"
    array = np.arange(3.0)
    assert (captured(lambda: array + 1)() == array + 1).all()

    class Base:
        def value(self):
            return 1

    class Derived(Base):
        def value(self):
            return super().value() + exponent

    exponent = 4
    assert captured(lambda: Derived().value())() == 5
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    net[0].weight = net[1].weight = nn.Parameter(torch.eye(2, dtype=torch.float64))
    copy = captured(net)
    assert copy[0].weight is copy[1].weight
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in copy.state_dict().items())


def test_a_cell_that_imports_what_it_uses_is_in_the_text():
    """A notebook compiles statement by statement: calls of what the cell imports are other instructions then."""
    cell, name = "from torch import nn\nnet = lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU())\n", "<ipython-input-99>"
    linecache.cache[name] = len(cell), None, cell.splitlines(keepends=True), name
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for statement in ast.parse(cell).body:
        exec(compile(ast.Module([statement], []), name, "exec", dont_inherit=True), namespace)
    assert len(captured(namespace["net"])()) == 2
    linecache.cache[name] = len(cell), None, [cell.replace("3, 2", "5, 2")], name
    with pytest.raises(NotStorable, match="was changed since it was run"):
        Capture().add(namespace["net"], "net")


def test_a_definition_whose_source_is_gone_is_not_stored():
    namespace: dict[str, Any] = {}
    exec("def typed(x):\n    return x", namespace)
    with pytest.raises(NotStorable, match="typed, which has no source"):
        Capture().add(namespace["typed"], "typed")


def test_runs_of_several_threads_take_turns(tmp_path):
    """Each has its own objects, draws and settings, the same as alone."""
    same = common(tmp_path)

    def run(where: str, width: int) -> list[str]:
        def net():
            return nn.Sequential(nn.Linear(12, width), nn.Dropout(0.5), nn.Linear(width, 4))

        result = hpcfed.run(**same | {"model": net, "output": str(tmp_path / f"{where}-{width}")})
        assert result.module[0].out_features == width
        return [row["hash"] for row in result.metrics]

    widths = [3, 4, 5, 6]
    alone = [run("alone", width) for width in widths]
    with ThreadPoolExecutor(len(widths)) as pool:
        assert [*pool.map(partial(run, "together"), widths)] == alone
    loop = hpcfed.rounds(**same | {"rounds": 2, "output": str(tmp_path / "loop")})
    next(loop)
    with ThreadPoolExecutor(1) as pool:  # in a loop's body, too
        assert pool.submit(run, "within", 3).result() == alone[0]
    loop.close()
    assert torch.get_default_dtype() == torch.float32


def test_torchs_losses_have_torchs_value():
    x, y = torch.randn(6, 3), torch.rand(6, 3)
    for loss in (nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(delta=0.3), nn.SmoothL1Loss(beta=2.0), nn.BCEWithLogitsLoss()):
        section, _ = named_objects({"loss": loss})
        own = loss_for(LossSection(**section["loss"]), "regression", ())
        torch.testing.assert_close(own.batch(x, y), loss(x, y))
