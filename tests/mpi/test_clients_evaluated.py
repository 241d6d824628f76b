"""Each client's loss and accuracy: correct, the same on any number of ranks, without effect on training."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import hpcfed
from hpcfed.assembly import assemble, resolve
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.evaluation import blocks, tiles
from hpcfed.evaluation.per_client import ClientEvaluator, _spread
from hpcfed.ranks.world import World
from tests.federations import Arrays, blobs, write_federation
from tests.mpi import nets
from tests.mpi.recipes import small
from tests.mpi.test_resume import stopped
from tests.mpi.test_same_result import left_by
from tests.soak import often

TUNING = {"steps": 3, "lr": 0.2, "batch_size": "full"}
ALL = {"every": 2, "models": ["global", "last", "fine-tuned"], "fine_tune": TUNING}
EVALUATE = {"model": "client-average", "batch_size": 16, "clients": ALL}


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """The working folder of all ranks, with eleven clients in ``small.h5``: test sets of their own, the fifth empty,
    and the third has no samples to train on.
    """

    def write() -> None:
        given = blobs(11)
        count = len(given["test"][1])
        given["clients"][2] = given["clients"][2][0][:0], given["clients"][2][1][:0]
        write_federation(shared_tmp / "small.h5", **given, content="small-11")
        with h5py.File(shared_tmp / "small.h5", "r+") as file:
            file["test/offsets"] = np.array([0, 20, 30, 44, 60, 60, 75, 90, 99, 110, 130, count])

    world.on_root(write)
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def table(run: Path) -> list[dict[str, str]]:
    with (run / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def recipe(output: str, **changes: Any) -> dict[str, Any]:
    base = {"rounds": 3, "cohort": {"size": 3}, "model": {"name": "linear"}, "evaluate": EVALUATE}
    return small(output, **{**base, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"evaluate": {**EVALUATE, "clients": {**ALL, "fine_tune": {"steps": 7, "lr": 0.1, "batch_size": 6}}}},
        {"algorithm": {"name": "scaffold"}, "client_state": "disk", "dtype": "float64", "loss": {"reduction": "sum"}},
    ],
    ids=["plain", "minibatches", "scaffold"],
)
def test_the_table_is_the_same_as_alone(changes, world, folder):
    together = hpcfed.run(recipe("together", **changes), world=world, quiet=True)
    if world.rank == world.size - 1:
        alone = hpcfed.run(recipe("alone", **changes), world=World(), quiet=True)
        assert (folder / "together/clients.csv").read_bytes() == (folder / "alone/clients.csv").read_bytes()
        assert left_by(together) == left_by(alone)
        assert len(table(folder / "alone")) == 2 * 3 * (10 + 10)  # of rounds 2 and 3, three models, and two splits


def measured(model: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    output = x @ model["weight"].T + model["bias"]
    return float(functional.cross_entropy(output, y)), float((output.argmax(1) == y).double().mean())


def tuned(model: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient descent by hand."""
    weight, bias = model["weight"].clone(), model["bias"].clone()
    for _ in range(TUNING["steps"] if len(y) else 0):
        error = torch.softmax(x @ weight.T + bias, 1) - functional.one_hot(y, len(bias))
        weight -= TUNING["lr"] / len(y) * error.T @ x
        bias -= TUNING["lr"] * error.mean(0)
    return {"weight": weight, "bias": bias}


def test_the_numbers_are_those_of_each_client(world, folder):
    """One client a round, so that with η_g = 1 the server's models are the clients' last ones."""
    world.on_root(lambda: (folder / "each.json").write_text("[[0], [7]]"))
    base = {"cohort": {"schedule": "each.json"}, "dtype": "float64", "weights": "uniform"}
    first = hpcfed.run(recipe("first", rounds=1, **base), world=world, quiet=True)
    both = hpcfed.run(recipe("both", rounds=2, **base), world=world, quiet=True)
    last = {k: load_file(result.folder / "model.safetensors") for k, result in ((0, first), (7, both))}
    average = load_file(both.folder / "model-evaluated.safetensors")
    # the average over eleven clients, nine of which have the initial model, says what that is
    initial = {name: (11 * average[name] - last[0][name] - last[7][name]) / 9 for name in average}
    rows = table(both.folder)
    with Federation.open(folder / "small.h5") as federation:
        assert federation.test_offsets is not None
        for row in rows:
            k, split = int(row["client"]), row["split"]
            x, y = (torch.tensor(np.array(part)) for part in federation.client(k))
            model = {"global": average, "last": last.get(k, initial)}.get(row["model"])
            model = model or tuned(average, x.double(), y.long())
            if split == "test":
                test = federation.test(*federation.test_offsets[k : k + 2].tolist())
                x, y = (torch.tensor(np.array(part)) for part in test)
            assert int(row["n"]) == len(y) > 0
            loss, accuracy = measured(model, x.double(), y.long())
            np.testing.assert_allclose(float(row["loss"]), loss, rtol=1e-10)
            assert float(row["accuracy"]) == accuracy
    assert {row["round"] for row in rows} == {"2"}
    told = both.metrics[-1]["clients"]
    for model in ALL["models"]:
        found = [row for row in rows if row["model"] == model and row["split"] == "test"]
        loss, accuracy = (np.array([float(row[measure]) for row in found]) for measure in ("loss", "accuracy"))
        assert len(loss) == 10
        summary = told[model]["test"]
        assert summary["loss"]["worst_decile"] == loss.max()  # one of ten
        assert summary["accuracy"]["worst_decile"] == accuracy.min()
        np.testing.assert_allclose(summary["accuracy"]["mean"], accuracy.mean(), rtol=1e-12)
        np.testing.assert_allclose(summary["loss"]["variance"], loss.var(), rtol=1e-12)
    assert first.metrics[0]["clients"] is not None


def test_the_worst_decile_is_rounded_up_and_of_the_worst():
    values = np.arange(11.0)
    for is_larger, worst in ((True, 0.5), (False, 9.5)):
        assert _spread(values, larger_is_better=is_larger) == {"mean": 5, "worst_decile": worst, "variance": 10}
    assert _spread(values, larger_is_better=None) == {"mean": 5, "variance": 10}
    assert _spread(np.append(values, np.nan), larger_is_better=True) is None


def scores(world: World, path: Path, clients: Sequence[Arrays], seed: int, **changes: Any) -> tuple[np.ndarray, Any]:
    """Return all measures of the model that `seed` draws on each client, as training and as test samples, and the
    scores of an evaluation on all of them.
    """

    def write() -> None:
        joined = np.concatenate([x for x, _ in clients]), np.concatenate([y for _, y in clients])
        write_federation(path, clients, num_classes=4, test=joined)
        with h5py.File(path, "r+") as file:
            file["test/offsets"] = file["train/offsets"][:]

    world.on_root(write)
    evaluate = {"train": {"every": 1}, "clients": {"every": 1}, **changes.pop("evaluate", {})}
    given = small(None, name="small", data=path, evaluate=evaluate, **changes)
    recipe = resolve(Recipe.model_validate(given | {"output": path.with_suffix("")}))
    parts, evaluator = assemble(recipe, world)
    vector = parts.model.vector
    w = torch.randn(vector.shape, generator=torch.Generator().manual_seed(seed), dtype=vector.dtype)
    found = ClientEvaluator(recipe.evaluate, parts, evaluator)(w, 1).cells[:, 0].copy()
    return found, evaluator(w, test=False, train=True)


@pytest.mark.every(3)
@pytest.mark.thinned
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "logistic"}},
        {"dtype": "float64"},
        {"evaluate": {"batch_size": 6, "metrics": {"gap": "calibration-error"}}},
        {"loss": {"factory": "nets:centred"}, "python_path": [Path(nets.__file__).parent]},
        {"model": {"name": "logistic"}, "bits": "portable"},
        {"model": {"factory": "nets:Unkept"}, "python_path": [Path(nets.__file__).parent]},
    ],
    ids=["logistic", "perceptron", "a metric of all", "the user's loss", "portable", "batch statistics"],
)
@pytest.mark.parametrize("seeds", often([range(2)], [range(2), range(2, 4)]), ids=str)
def test_a_clients_scores_know_nothing_of_other_clients(changes, seeds, world, shared_tmp, monkeypatch):
    """Bit for bit: alone in a federation, and among others, few or many, in other blocks, on any number of ranks."""
    features = 12 if "python_path" in changes else None
    for seed in seeds:
        rng = np.random.default_rng(seed)
        width = features or int(rng.integers(1, 40))
        sizes = [0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 31, 70, *rng.integers(1, 40, size=12).tolist()]

        def client(count: int, rng: np.random.Generator = rng, width: int = width) -> Arrays:
            return rng.normal(size=(count, width)).astype(np.float32), rng.integers(4, size=count).astype(np.uint8)

        pool = [client(size) for size in sizes]
        own, mean = scores(world, shared_tmp / f"pool-{seed}.h5", pool, seed, **changes)
        monkeypatch.setattr(blocks, "MANY", 1)
        monkeypatch.setattr(blocks, "MAX_BLOCK_BYTES", 50 * width * blocks.FLOAT64_BYTES)
        order = rng.permutation(len(pool) + 30)
        others = [*pool, *(client(int(rng.integers(20))) for _ in range(30))]
        found, _ = scores(world, shared_tmp / f"more-{seed}.h5", [others[k] for k in order], seed, **changes)
        monkeypatch.undo()
        np.testing.assert_array_equal(own.view(np.int64), found[np.argsort(order)[: len(pool)]].view(np.int64))
        again, same = scores(World(), shared_tmp / f"alone-{seed}-{world.rank}.h5", pool, seed, **changes)
        assert (own.tobytes(), mean) == (again.tobytes(), same)
        for k in (1, 5, 11):
            alone, score = scores(World(), shared_tmp / f"one-{seed}-{k}-{world.rank}.h5", [pool[k]], seed, **changes)
            np.testing.assert_array_equal(alone[0].view(np.int64), own[k].view(np.int64))
            np.testing.assert_array_equal(alone[0, 0], alone[0, 1])  # of training samples, and the same as test ones
            assert score["train_loss"] == alone[0, 0, 0, 0] / alone[0, 0, 0, 1]


@pytest.mark.every(2)
@pytest.mark.thinned
@pytest.mark.parametrize("changes", [{}, {"loss": {"reduction": "sum"}, "model": {"name": "logistic"}}])
def test_scores_of_small_clients_in_tiles_are_those_of_each_alone(changes, world, folder, monkeypatch):
    """To rounding: a metric by sample, one of all samples, and the mean over clients."""
    evaluate = {**EVALUATE, "model": "last", "train": {"every": 3}, "metrics": {"gap": "calibration-error"}}
    evaluate |= {"batch_size": 64, "clients": {"every": 3}}
    changes = {"dtype": "float64", "model": {"name": "mlp", "hidden": [7]}, "evaluate": evaluate, **changes}
    together = hpcfed.run(recipe("in-tiles", **changes), world=world, quiet=True)
    monkeypatch.setattr(tiles, "WORK_OF_CALLS", 1)
    singly = hpcfed.run(recipe("singly", **changes), world=world, quiet=True)
    rows, before = table(together.folder), table(singly.folder)
    assert len(rows) == len(before) == 10 + 10
    for row, other in zip(rows, before, strict=True):
        for measure in ("loss", "gap"):
            np.testing.assert_allclose(float(row.pop(measure)), float(other.pop(measure)), rtol=1e-12)
        assert row == other
    for column in ("train_loss", "train_accuracy", "train_gap"):
        found, expected = (run.metrics[-1][column] for run in (together, singly))
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.every(2)
@pytest.mark.thinned
@pytest.mark.parametrize(
    "changes",
    [{"loss": {"factory": "nets:centred"}}, {"model": {"factory": "nets:Unkept"}}],
    ids=["the user's loss", "batch statistics"],
)
def test_what_depends_on_other_samples_sees_a_clients_own_alone(changes, world, folder, monkeypatch):
    base = {"rounds": 1, "dtype": "float64", "python_path": [str(Path(nets.__file__).parent)]}
    changes = {**base, "evaluate": {**EVALUATE, "clients": {"every": 1}}, **changes}
    singly = table(hpcfed.run(recipe("singly", **changes), world=world, quiet=True).folder)
    monkeypatch.setattr(blocks, "MANY", 1)
    together = table(hpcfed.run(recipe("in-blocks", **changes), world=world, quiet=True).folder)
    for row, other in zip(together, singly, strict=True):
        np.testing.assert_allclose(float(row["loss"]), float(other["loss"]), rtol=1e-12, atol=1e-12)


def test_training_does_not_know_of_it(world, folder):
    """With a model that draws, whose stream fine-tuning must not move."""
    world.on_root(lambda: (folder / "own_dropout.py").write_text(DROPOUT))
    changes = {"model": {"factory": "own_dropout:model"}, "rounds": 4}
    runs = []
    for output, clients in (("with", {**ALL, "every": 1}), ("without", {"every": 0})):
        changed = recipe(output, **changes, evaluate={**EVALUATE, "clients": clients})
        models, rows = left_by(hpcfed.run(changed, world=world, quiet=True))
        runs.append((models, [{key: row[key] for key in row if key != "clients"} for row in rows]))
    assert runs[0] == runs[1]
    assert not (folder / "without" / "clients.csv").exists()


DROPOUT = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4))
"""


@pytest.mark.every(3)
@pytest.mark.thinned
@pytest.mark.parametrize("damage", ["", "5", "5,0,glo", "9,0,global,train,0.5,0.5,3\n", f"{'9' * 5000},0\n"])
def test_the_table_goes_on_from_a_checkpoint(damage, world, folder):
    """Rows of rounds after it, whole or half, are gone; so it is the table of a run that was never interrupted."""
    changes = {"rounds": 6, "checkpoint": {"every": 4}, "evaluate": {**EVALUATE, "clients": {**ALL, "every": 1}}}
    hpcfed.run(recipe("whole", **changes), world=world, quiet=True)
    run = stopped(recipe("run", **changes), world, 4)

    def spoil() -> None:
        with (run / "clients.csv").open("a") as file:
            file.write(damage)

    world.on_root(spoil)
    hpcfed.run(recipe("run", **changes), world=world, quiet=True)
    assert (run / "clients.csv").read_bytes() == (folder / "whole" / "clients.csv").read_bytes()


@pytest.mark.every(3)
@pytest.mark.thinned
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b"round,client,model,split,loss", b"a;b;c", r"clients\.csv: not a run's table: .* begins with round,client,"),
        (b"\n", b"\r\n", r"clients\.csv: not a run's table"),
        (b"2,global,test", b"2,gl\xf6bal,test", r"clients\.csv, line \d+: not UTF-8 text; restore"),
        (None, b"", r"clients\.csv: lines are missing or damaged: expected 121 .* round 4, got the first 0; restore"),
        (None, b"round,client,mo", r"clients\.csv: lines are missing or damaged: .*got the first 0"),
        (b"\n2,1,global,train,", b"\n?,1,global,train,", r"clients\.csv: lines are missing or damaged: .*the first 2;"),
        (b"\n4,10,fine-tuned,test,", b"\n5,", r"clients\.csv: lines are missing or damaged: .*got the first 120;"),
    ],
)
def test_a_table_that_another_program_has_changed_is_refused(old, new, complaint, world, folder):
    """Before the first round, and the run's files stay as they are. Without `old` the table is `new` alone."""
    changes = {"rounds": 6, "checkpoint": {"every": 4}, "evaluate": {**EVALUATE, "clients": ALL}}
    run = stopped(recipe("run", **changes), world, 4)
    path = run / "clients.csv"
    world.on_root(lambda: path.write_bytes(path.read_bytes().replace(old, new) if old else new) and None)
    before = world.on_root(lambda: (path.read_bytes(), (run / "metrics.jsonl").read_bytes()))
    with pytest.raises(InputError, match=complaint):
        hpcfed.run(recipe("run", **changes), world=world, quiet=True)
    assert world.on_root(lambda: (path.read_bytes(), (run / "metrics.jsonl").read_bytes())) == before


@pytest.mark.thinned
def test_a_table_that_was_removed_is_refused(world, folder):
    changes = {"rounds": 6, "checkpoint": {"every": 4}, "evaluate": {**EVALUATE, "clients": ALL}}
    run = stopped(recipe("run", **changes), world, 4)
    world.on_root((run / "clients.csv").unlink)
    with pytest.raises(InputError, match=r"clients\.csv: lines are missing or damaged: .*got the first 0; restore"):
        hpcfed.run(recipe("run", **changes), world=world, quiet=True)


@pytest.mark.every(2)
@pytest.mark.thinned
@pytest.mark.parametrize("header", [b"", b"round,client,mo"])
def test_a_header_cut_before_any_client_was_evaluated_is_written_again(header, world, folder):
    """As a job leaves it that was killed in its first evaluation of clients."""
    changes = {"rounds": 6, "checkpoint": {"every": 2}}
    often, seldom = ({**EVALUATE, "clients": clients} for clients in ({"every": 1}, {"every": 0}))
    run = stopped(recipe("run", **changes, evaluate=seldom), world, 2)
    world.on_root(lambda: (run / "clients.csv").write_bytes(header) and None)
    hpcfed.run(recipe("run", **changes, evaluate=often), world=world, quiet=True)
    assert {row["round"] for row in table(run)} == {"3", "4", "5", "6"}


def test_it_may_begin_and_end_on_the_way(world, folder):
    """What is evaluated may change when a run goes on."""
    changes = {"rounds": 6, "checkpoint": {"every": 1}}
    often, seldom = ({**EVALUATE, "clients": clients} for clients in ({"every": 1}, {"every": 0}))
    stopped(recipe("run", **changes, evaluate=seldom), world, 2)
    stopped(recipe("run", **changes, evaluate=often), world, 4)
    result = hpcfed.run(recipe("run", **changes, evaluate=seldom), world=world, quiet=True)
    assert {row["round"] for row in table(result.folder)} == {"3", "4"}
    assert [row["clients"] is None for row in result.metrics] == [True, True, False, False, True, True]


@pytest.mark.thinned
def test_a_run_that_starts_again_starts_a_table(world, folder):
    changes = {"checkpoint": {"every": 0}, "evaluate": {**EVALUATE, "clients": ALL}}
    run = stopped(recipe("run", **changes), world, 2)
    before = (run / "clients.csv").read_bytes()
    hpcfed.run(recipe("run", **changes), world=world, quiet=True)
    assert (run / "previous-1" / "clients.csv").read_bytes() == before
    assert {row["round"] for row in table(run)} == {"2", "3"}


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"models": ["last"]}, r"evaluate: expected 'model: client-average', which keeps the clients' last models"),
        ({"models": ["fine-tuned"]}, r"evaluate\.clients: expected 'fine_tune' beside 'fine-tuned'"),
        ({"fine_tune": {"lr": 0.1}}, r"evaluate\.clients: expected 'fine_tune' beside 'fine-tuned'"),
        ({"models": ["fine-tuned"], "fine_tune": {}}, r"key 'evaluate\.clients\.fine_tune\.lr' is missing"),
        ({"models": ["global", "global"]}, r"evaluate\.clients: expected different 'models'"),
        ({"models": []}, r"evaluate\.clients\.models: "),
        ({"models": ["own"]}, r"models\.0: expected 'global', 'last', 'fine-tuned' or 'personal', got 'own'"),
        ({"models": ["fine-tuned"], "fine_tune": {"lr": 0.1, "step": 3}}, r"unknown key .*did you mean 'steps'"),
    ],
)
def test_what_cannot_be_is_refused(changes, complaint, world, folder):
    with pytest.raises(InputError, match=complaint):
        hpcfed.run(recipe("run", evaluate={"clients": {"every": 1, **changes}}), world=world, quiet=True)
    assert not (folder / "run").exists()
