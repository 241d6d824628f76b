"""Recorded work leaves the bits of work done step by step; what cannot be recorded is refused, or known beforehand."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcfed
from hpcfed.assembly import assemble, resolve
from hpcfed.client.graph_trial import Memory
from hpcfed.config.load import load_recipe
from hpcfed.ranks.graphs import Graphs, Inputs
from hpcfed.run_folder.identity import deciding
from hpcfed.simulation import Simulation
from tests.device.strict import KIND, STUB, Counts, Stub
from tests.device.test_runs import PATHS, folder  # noqa: F401 (a fixture)
from tests.federations import write_federation
from tests.mpi import tensor_kinds
from tests.mpi.recipes import small
from tests.mpi.test_models import CASES as MODELS
from tests.mpi.test_models import write_all
from tests.mpi.test_same_result import left_by

pytestmark = pytest.mark.one_mpi
CHANGING: Mapping[str, Mapping[str, Any]] = {
    "step sizes that decay": {"local": {"steps": 3, "batch_size": 7, "lr": 0.1, "lr_decay": 0.7}},
    **{
        name: PATHS[name]
        for name in (
            *("momentum, clipping and a budget", "two vectors", "adam", "states on the device"),
            *("after momentum", "after momentum, one by one"),
        )
    },
}


@pytest.mark.every(3)
@pytest.mark.parametrize("path", CHANGING)
def test_graphs_off_has_the_same_bits(path, stub, world, folder) -> None:  # noqa: F811
    found = []
    for mode in ("auto", "off"):
        recipe = {"device": "auto", "rounds": 4, **CHANGING[path]}
        local = {"steps": 3, "batch_size": 5, "lr": 0.1, **recipe.get("local", {}), "graphs": mode}
        found.append(left_by(hpcfed.run(small(mode, **{**recipe, "local": local}), world=world, quiet=True)))
    assert found[0] == found[1]


@pytest.fixture
def device(stub: Stub) -> torch.device:
    stub.take(0)
    return torch.device(KIND, 0)


def test_a_number_of_the_host_is_recorded_and_one_of_the_device_is_read(device) -> None:
    y, inputs, lr = torch.zeros(3, device=device), Inputs(device), 1.0
    graphs = Graphs(device, records=True)
    stale, fresh = torch.zeros(3, device=device), torch.zeros(3, device=device)
    for lr in (1.0, 2.0, 4.0):
        number = inputs({"lr": torch.tensor([lr]).numpy()})["lr"]
        graphs("both", lambda lr=lr, number=number: (stale.copy_(y + lr), fresh.copy_(y + number)))
    assert stale.cpu().tolist() == [2.0] * 3
    assert fresh.cpu().tolist() == [4.0] * 3


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.nonzero(),
    ],
)
def test_what_waits_is_refused_while_work_is_recorded(work, device, stub) -> None:
    x = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        stub.capture(device, lambda: work(x))


def test_nothing_recorded_is_done(device, stub) -> None:
    x = torch.zeros(3, device=device)
    replay = stub.capture(device, lambda: x.add_(1))
    assert x.cpu().tolist() == [0, 0, 0]
    replay()
    replay()
    assert x.cpu().tolist() == [2, 2, 2]


def test_memory_that_was_given_up_is_found(device, stub) -> None:
    y = torch.zeros(3, device=device)

    def record() -> Any:
        x = torch.ones(3, device=device)
        return stub.capture(device, lambda: y.copy_(x))

    replay = record()
    with pytest.raises(AssertionError, match="given up"):
        replay()


def test_memory_of_the_pool_is_lost_with_the_next_replay(device, stub) -> None:
    x, kept = torch.zeros(3, device=device), []
    first = stub.capture(device, lambda: kept.append(x + 1))
    second = stub.capture(device, lambda: x.add_(1))
    first()
    assert kept[0].cpu().tolist() == [1, 1, 1]
    second()
    assert kept[0].cpu().tolist() != [1, 1, 1]


def test_a_capture_that_fails_after_its_trial_is_said_once_and_done_step_by_step(device, caplog) -> None:
    x, graphs = torch.zeros(3, device=device), Graphs(device, records=True)
    fails = False

    def work() -> None:
        x.add_(1)
        if fails and graphs.records:
            x.sum().item()

    graphs("work", work)
    fails = True
    graphs("work", work)
    graphs("work", work)
    assert x.cpu().tolist() == [3.0] * 3
    assert not graphs.records
    assert graphs.hindrance
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "clients are trained step by step from here on, without graphs"
    ]


def test_a_capture_that_is_interrupted_leaves_the_next_one_free(device, stub) -> None:
    x, graphs = torch.zeros(3, device=device), Graphs(device, records=True)

    def stop() -> None:
        x.add_(1)
        if stub[0].recording is not None:
            raise KeyboardInterrupt

    graphs("stopped", stop)
    with pytest.raises(KeyboardInterrupt):
        graphs("stopped", stop)
    for _ in range(3):
        graphs("other", lambda: x.add_(1))
    assert x.cpu().tolist() == [4.0] * 3


def test_the_number_of_graphs_is_bounded_and_what_comes_once_is_none(device, stub, monkeypatch) -> None:
    """Whatever comes when there are so many is done step by step."""
    monkeypatch.setattr("hpcfed.ranks.graphs.MOST_GRAPHS", 2)
    x, graphs = torch.zeros(3, device=device), Graphs(device, records=True)

    def work() -> None:
        for _ in range(5):
            x.add_(1)

    launched = []
    for key in (0, 1, 2, 0, 1, 3, 3, 3, 0):
        before = stub[0].counts.kernels
        graphs(key, work)
        launched.append(stub[0].counts.kernels - before)
    assert launched == [5, 5, 5, 1, 1, 5, 5, 5, 1]
    assert x.cpu().tolist() == [45.0] * 3


def rounds_of(sizes: list[int], cohorts: list[list[int]], world, graphs: str = "auto", **changes: Any) -> list[tuple]:
    """Return the kernels and the hash of each round on clients of these sizes, in a world of one."""
    rng = np.random.default_rng(3)
    pieces = [(rng.normal(size=(n, 12)).astype(np.float32), rng.integers(4, size=n)) for n in sizes]
    write_federation(Path("uneven.h5"), pieces, num_classes=4)
    local = {"epochs": 1, "batch_size": 10, "lr": 0.1, "engine": "sequential", "graphs": graphs}
    about = {"data": "uneven.h5", "evaluate": {"every": 0}, "cohort": {"schedule": cohorts}, "rounds": len(cohorts)}
    parts, _ = assemble(resolve(load_recipe(small("run", device="auto", local=local, **about, **changes))), world)
    simulation, found = Simulation(parts), []
    with parts.clients:
        for number in range(1, len(cohorts) + 1):
            STUB[0].counts = Counts()
            found.append((simulation.round(number).hash, STUB[0].counts.kernels))
    return found


OWN_STEP = """
def plain(parameters, batch, context):
    gradient, loss = context.gradient(parameters, batch)
    return parameters - context.lr * gradient, loss
"""
OF_ANOTHER_LOOP: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "a step": ({"local": {"steps": 2, "lr": 0.1, "step": "own_step:plain"}}, "local.step is your own"),
    "noise": (
        {"local": {"steps": 2, "lr": 0.1, "noise": {"clip": 1.0, "multiplier": 1.0}}},
        "local.noise has minibatches of random sizes",
    ),
    "parts in turn": (
        {
            "model": {"factory": "tests.mpi.nets:mlp"},
            "parameters": {"private": ["4.*"], "buffers": "averaged", "private_first": 2},
        },
        "parameters.private_first trains parts in turn",
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("case", OF_ANOTHER_LOOP)
def test_what_is_never_recorded_says_so(case, stub, world, folder, capfd) -> None:  # noqa: F811
    world.on_root(lambda: (folder / "own_step.py").write_text(OWN_STEP))
    changes, why = OF_ANOTHER_LOOP[case]
    run = hpcfed.run(small("run", device="auto", rounds=1, evaluate={"every": 0}, **changes), world=world)
    assert json.loads((run.folder / "environment.json").read_text())["graphs"] == why
    if world.is_root:
        assert f"one by one, since they cannot be recorded: {why}" in " ".join("".join(capfd.readouterr()).split())


def test_all_ranks_record_or_none(stub, world, folder, monkeypatch) -> None:  # noqa: F811
    if world.rank == world.size - 1:
        monkeypatch.setattr("hpcfed.client.trials.hindrance", lambda *about: "it waits here")
    parts, _ = assemble(resolve(load_recipe(small("run", device="auto"))), world)
    assert str(parts.engine.graphs) == "it waits here"
    assert not parts.engine.graphs.records
    parts.federation.close()


@pytest.mark.serial
def test_rare_short_minibatches_of_a_batchnorm_are_trained_step_by_step(stub, world, folder) -> None:  # noqa: F811
    """They keep their own shapes, and are recorded when they come again."""
    about = {"model": {"factory": "tests.mpi.nets:mlp"}, "parameters": {"buffers": "averaged"}}
    cohorts = [[3], [0], [1], [0], [1], [2]]
    auto, off = (rounds_of([40, 43, 47, 10], cohorts, world, graphs, **about) for graphs in ("auto", "off"))
    assert [hash for hash, _ in auto] == [hash for hash, _ in off]
    saved = [eager - own for (_, own), (_, eager) in zip(auto[1:], off[1:], strict=True)]
    assert [kernels > 60 for kernels in saved] == [False, False, True, True, False], saved  # of 120 or more


@pytest.mark.serial
def test_clients_of_many_sizes_share_the_graphs_of_pieces(stub, world, folder, monkeypatch) -> None:  # noqa: F811
    """Each size would else be a graph, and those that come when there are enough of them none."""
    monkeypatch.setattr("hpcfed.client.device_rounds.MOST_WHOLE", 2)
    monkeypatch.setattr("hpcfed.ranks.graphs.MOST_GRAPHS", 10)
    sizes, cohorts = [*range(30, 150, 10)], [[first, first + 1] for first in (0, 2, 4, 6, 8, 10) * 2]
    (auto, off) = (rounds_of(sizes, cohorts, world, graphs) for graphs in ("auto", "off"))
    assert [hash for hash, _ in auto] == [hash for hash, _ in off]
    assert max(own for _, own in auto[6:]) <= 60 < min(own for _, own in off[6:])


def test_graphs_do_not_decide_a_run() -> None:
    recipes = ({"local": {"steps": 3, "graphs": mode}} for mode in ("auto", "off"))
    assert len({repr(deciding(recipe, ())) for recipe in recipes}) == 1


def test_a_tile_of_recurrent_layers_is_refused_in_one_line(stub, world, tmp_path, monkeypatch) -> None:
    write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe = small("run", **{**MODELS["lstm"], "device": "auto", "local": {"steps": 1, "lr": 0.1, "engine": "batched"}})
    with pytest.raises(hpcfed.InputError, match="cannot take recurrent layers on a GPU"):
        hpcfed.run(recipe, world=world, quiet=True)


LOSS = """
import numpy as np
from torch.nn.functional import cross_entropy

def loss():
    return lambda output, target: cross_entropy(output, target, reduction="none") * (1 + 0.01 * np.random.rand())
"""
OF_PYTHON: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "a buffer that is replaced": (
        {
            "model": {"factory": "tensor_kinds:Buffered", "args": {"dtype": "float32", "counts": True}},
            "parameters": {"buffers": "averaged"},
        },
        "gives 'table' other memory",
    ),
    "a frozen parameter that eval replaces": (
        {"model": {"factory": "rebinding:make", "args": {"name": "adapter-frozen", "twin": False}}},
        "gives 'layer.weight' other memory",
    ),
    "a loss that draws on the host": (
        {"model": {"name": "mlp", "hidden": [8]}, "loss": {"factory": "drawing_loss:loss"}},
        "draws from a generator of the host",
    ),
    "the same in tiles": (
        {
            "model": {"name": "mlp", "hidden": [8]},
            "loss": {"factory": "drawing_loss:loss"},
            "local": {"engine": "batched"},
        },
        "draws from a generator of the host",
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("case", OF_PYTHON)
def test_what_is_done_in_python_at_each_step_is_not_recorded(case, stub, world, folder) -> None:  # noqa: F811
    """It would be left out of all steps but the first: a silent other result."""
    changes, why = OF_PYTHON[case]
    (folder / "drawing_loss.py").write_text(LOSS)
    found = []
    for mode in ("auto", "off"):
        local = {"steps": 3, "batch_size": 5, "lr": 0.1, "engine": "sequential", **changes.get("local", {})}
        places = [str(Path(tensor_kinds.__file__).parent), str(folder)]
        recipe = {"rounds": 4, "device": "auto", **changes, "python_path": places, "local": {**local, "graphs": mode}}
        parts, _ = assemble(resolve(load_recipe(small(mode, **recipe))), world)
        assert parts.engine.graphs is not None
        assert (why in parts.engine.graphs.hindrance) == (mode == "auto")
        found.append(left_by(hpcfed.run(small(mode, **recipe), world=world, quiet=True)))
    assert found[0] == found[1]


def test_memory_that_a_model_gives_up_is_kept_while_its_places_are_compared() -> None:
    """Else an allocator that gives the last place freed, as CUDA's, hides that a parameter has moved there and back."""
    module, array = torch.nn.Linear(3, 2), np.zeros((2, 3), np.float32)
    module.weight.data = torch.from_numpy(array)
    memory, given_up = Memory(module), weakref.ref(array)
    del array
    module.weight.data = module.weight.data + 1
    assert given_up() is not None
    assert memory.moved() == "weight"
