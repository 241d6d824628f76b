"""Runs without a client: the bits of a run in which it never took part, from any round that they begin at."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.torch import load_file

import hpcfed
from hpcfed import algorithms
from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Algorithm
from hpcfed.errors import InputError
from hpcfed.lab.whatif.without import WithoutRequest, run_without
from hpcfed.run_folder.certificate import VARYING_COLUMNS
from tests.federations import blobs, write_federation
from tests.mpi.recipes import METHODS, small, write_small

pytestmark = [pytest.mark.one_mpi, pytest.mark.thinned]

LATE = [[0, 1], [2, 3], [1, 2], [4, 0], [3, 4], [1, 3]]
"""Cohorts in which client 4 takes part from round 4 on."""
OFTEN = ("fedavg", "fedexp-m", "fednova", "fedsplit", "feddyn", "scaffold")
"""Methods whose server or weights differ most from each other."""
NAMES = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.soak) for name in algorithms.names()]


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation of five clients, and one without the last; the working folder of all ranks."""

    def write() -> None:
        write_small(shared_tmp)
        whole = blobs(5)
        write_federation(shared_tmp / "four.h5", **{**whole, "clients": whole["clients"][:4]}, content="four")

    world.on_root(write)
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def rows_of(run: hpcfed.Result) -> list[dict[str, Any]]:
    """The record without what was measured."""
    return [{key: row[key] for key in row.keys() - set(VARYING_COLUMNS)} for row in run.metrics]


def without(world, *clients: str, run: str = "run", **options: Any) -> tuple[hpcfed.Result, list[str]]:
    """The run without clients, and what was said before it began."""
    said: list[str] = []
    found = run_without(WithoutRequest(Path(run), clients, **options), world, said.append, quiet=True)
    world.gather(None)
    return found, said


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("method", "cohort", "start"),
    [
        pytest.param("fedavg", {"schedule": LATE}, 2, marks=pytest.mark.soak),
        ("fedexp", {"schedule": LATE}, 2),
        pytest.param("fednova", {"schedule": LATE}, 2, marks=pytest.mark.soak),
        ("scaffold", {"schedule": LATE}, 0),
        ("feddyn", {"size": 3}, 0),
        pytest.param("feddyn", {}, 0, marks=pytest.mark.soak),
    ],
)
def test_it_is_a_run_that_began_without_the_client(method, cohort, start, world, folder):
    recipe = {"algorithm": {"name": method, **METHODS[method]}, "cohort": cohort, "rounds": 6, "update_hashes": True}
    hpcfed.run(small("run", **recipe, checkpoint={"every": 2, "keep": 9}), world=world, quiet=True)
    found, said = without(world, "4")
    if world.is_root:
        assert any(f"rounds computed: {6 - start} of 6" in line for line in said)
    again = hpcfed.run(small("again", **{**recipe, "cohort": {**cohort, "without": [4]}}), world=world, quiet=True)
    assert rows_of(found) == rows_of(again)
    assert all(4 not in row["cohort"] for row in rows_of(found))
    for name in ("model.safetensors", "update-hashes.bin"):
        assert (found.folder / name).read_bytes() == (again.folder / name).read_bytes()


@pytest.mark.every(2)
@pytest.mark.parametrize("cohort", [pytest.param({}, marks=pytest.mark.soak), {"size": 2}], ids=["all", "drawn"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_run_on_a_federation_that_lacks_the_client(name, cohort, world, folder):
    """The last one, so that the numbers of the others, and with them their random streams, are the same."""
    evaluate = {"train": {"every": 2}, "clients": {"every": 2}, "batch_size": 64}
    recipe = {"algorithm": {"name": name, **METHODS[name]}, "evaluate": evaluate}
    left_out = {**cohort, "without": {"clients": [4], "cohorts": "redrawn"}}
    found = hpcfed.run(small("found", **recipe, cohort=left_out), world=world, quiet=True)
    lacking = hpcfed.run(small("lacking", **recipe, cohort=cohort, data="four.h5"), world=world, quiet=True)
    assert rows_of(found) == rows_of(lacking)
    world.gather(None)
    for file in ("model.safetensors", "clients.csv"):
        assert (found.folder / file).read_bytes() == (lacking.folder / file).read_bytes()
    samples = [json.loads((run.folder / "environment.json").read_text()) for run in (found, lacking)]
    assert samples[0]["evaluated_samples"] == samples[1]["evaluated_samples"]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
def test_methods_say_whether_the_number_of_clients_enters(name, world, folder):
    """Rounds before a client's first are the same without it, but for methods that say otherwise."""
    section = {"name": name, **METHODS[name]}
    recipe = {"algorithm": section, "rounds": 3, "cohort": {"schedule": LATE}, "evaluate": {"every": 0}}
    whole = hpcfed.run(small("whole", **recipe), world=world, quiet=True)
    found = hpcfed.run(
        small("found", **{**recipe, "cohort": {"schedule": LATE, "without": 4}}), world=world, quiet=True
    )
    same = rows_of(whole) == rows_of(found)
    assert same == (not algorithms.build(Algorithm.model_validate(section), []).counts_clients)


def test_feddyn_as_written_down_without_the_client(world, shared_tmp, monkeypatch):
    """Least squares in NumPy: N in h, and the cohorts, are those of the others."""
    rng = np.random.default_rng(3)
    clients = [(rng.normal(size=(6, 3)), rng.normal(size=(6, 1))) for _ in range(4)]
    world.on_root(lambda: write_federation(shared_tmp / "squares.h5", clients) and None)
    monkeypatch.chdir(shared_tmp)
    cohorts = [[0, 1], [1, 2], [1], [3, 0, 1], [2, 3]]
    recipe = small(
        "run", data="squares.h5", rounds=5, dtype="float64", evaluate={"every": 0},
        model={"name": "linear", "bias": False}, algorithm={"name": "feddyn", "alpha": 0.3},
        cohort={"schedule": cohorts, "without": {"clients": [1]}}, local={"steps": 3, "batch_size": "full", "lr": 0.05},
    )  # fmt: skip
    run = hpcfed.run(recipe, world=world, quiet=True)
    world.gather(None)
    assert [row["cohort"] for row in run.metrics] == [[0], [2], [], [3, 0], [2, 3]]
    assert run.metrics[2]["hash"] == run.metrics[1]["hash"]
    assert run.metrics[2]["local_loss"] is run.metrics[2]["delta_sq"] is None
    assert run.metrics[2]["gradients"] == run.metrics[1]["gradients"]
    w = initial(recipe, world)
    h, own = np.zeros_like(w), {k: np.zeros_like(w) for k in range(4)}
    for cohort in cohorts:
        deltas = []
        for k in set(cohort) - {1}:
            y, (x, target) = w.copy(), clients[k]
            for _ in range(3):
                y -= 0.05 * (x.T @ (x @ y - target) / len(x) - own[k] + 0.3 * (y - w))
            own[k] += 0.3 * (w - y)
            deltas.append(w - y)
        if deltas:
            h += 0.3 * sum(deltas) / 3
            w = w - sum(deltas) / len(deltas) - h / 0.3
    np.testing.assert_allclose(load_file(run.folder / "model.safetensors")["weight"].numpy().T, w, rtol=1e-10)


def initial(recipe: Mapping[str, Any], world) -> np.ndarray:
    """The model before round 1, (p, 1): that of a round in which nobody moves."""
    still = {**recipe, "rounds": 1, "output": "still", "local": {"steps": 1, "batch_size": "full", "lr": 1e-30}}
    run = hpcfed.run({**still, "algorithm": {"name": "fedavg"}, "cohort": {}}, world=world, quiet=True)
    world.gather(None)
    return load_file(run.folder / "model.safetensors")["weight"].numpy().T.copy()


def write_sites(path: Path) -> None:
    """Four clients of these names with test sets, one without samples to test on."""
    found = blobs(4)
    write_federation(path, **found, content="sites")
    with h5py.File(path, "a") as file:
        file["train/client"] = np.array([name.encode() for name in ("north", "east", "Köln/<b>", "west")])
        file["test/offsets"] = np.array([0, 40, 70, 70, 150])
        file.attrs["normalization"] = json.dumps({"mean": [0.1], "std": [1.5]})


def scores_of(run: str, split: str, measure: str) -> dict[str, tuple[float, int]]:
    """Value and number of samples of each client that was measured after round 3, by name."""
    with Path(run, "clients.csv").open(encoding="utf-8", newline="") as table:
        rows = [row for row in csv.DictReader(table) if row["round"] == "3" and row["split"] == split]
    return {row["name"]: (float(row[measure]), int(row["n"])) for row in rows}


def test_the_only_client_with_test_data_is_reported_apart(world, folder):
    """Measures of all samples at once have none then, as sums have."""

    def give_all_to_the_last() -> None:
        with h5py.File("small.h5", "a") as file:
            file["test/offsets"] = np.array([0, 0, 0, 0, 0, len(file["test/y"])])

    world.on_root(give_all_to_the_last)
    evaluate = {"metrics": ["brier", "confusion-matrix"]}
    found = hpcfed.run(small("run", cohort={"without": [4]}, evaluate=evaluate, rounds=1), world=world, quiet=True)
    (row,) = found.metrics
    measures = ("loss", "accuracy", "brier", "confusion-matrix")
    assert [row[f"test_{measure}"] for measure in measures] == [None] * 4
    assert row["apart"]["4"].keys() == {*measures}
    assert None not in row["apart"]["4"].values()


def test_of_many_clients_the_first_are_named(world, folder):
    world.on_root(lambda: write_small(folder, 10))
    hpcfed.run(small("run", rounds=2), world=world, quiet=True)
    _, said = without(world, *map(str, range(9)), output=Path("few"))
    if world.is_root:
        assert said[0] == "the first round that is another without 0, 1, 2, 3, 4, 5 and 3 more: 1"


@pytest.mark.soak
def test_its_test_data_are_reported_apart(world, shared_tmp, monkeypatch):
    world.on_root(lambda: write_sites(shared_tmp / "sites.h5"))
    monkeypatch.chdir(shared_tmp)
    evaluate = {"every": 3, "train": {"every": 2}, "clients": {"every": 1}, "metrics": ["calibration-error"]}
    recipe = {"data": "sites.h5", "evaluate": evaluate, "checkpoint": {"every": 1}}
    hpcfed.run(small("run", **recipe), world=world, quiet=True)
    found, ended = without(world, "west", "Köln/<b>")
    every, said = without(world, "Köln/<b>", "west", evaluate="all", output=Path("all"))
    assert found.folder.name == "run-without-K-ln-b--west"
    assert load_recipe(found.folder / "recipe.yaml").name == "run without Köln-b--west"
    assert [row["hash"] for row in found.metrics] == [row["hash"] for row in every.metrics]
    if world.is_root:
        assert said[0] == "the first round that is another without Köln/<b>, west: 1"
        both = {
            name: score for name, score in scores_of("run", "test", "accuracy").items() if name in ("north", "east")
        }
        samples, before = sum(n for _, n in both.values()), 100 * weighted(both)
        scores = f"{100 * found.metrics[-1]['test_accuracy']:.2f} % without Köln/<b>, west, {before:.2f} % with"
        assert ended[-1] == f"on the {samples} samples that both count: test accuracy {scores}"
    last, whole = found.metrics[-1], every.metrics[-1]
    assert "apart" not in whole
    assert last["apart"].keys() == {"3"}  # Köln/<b> has no test samples
    for measure in ("loss", "accuracy", "calibration-error"):
        of_all, two = scores_of("all", "test", measure), scores_of(str(found.folder), "test", measure)
        assert two == {name: of_all[name] for name in ("north", "east")}
        assert last["apart"]["3"][measure] == pytest.approx(of_all["west"][0], rel=1e-12)
        assert last["clients"]["global"]["test"][measure]["mean"] == pytest.approx(
            np.mean([v for v, _ in two.values()])
        )
        if measure != "calibration-error":  # which is no mean over samples
            assert last[f"test_{measure}"] == pytest.approx(weighted(two), rel=1e-12)
            assert whole[f"test_{measure}"] == pytest.approx(weighted(of_all), rel=1e-12)
        training = scores_of(str(found.folder), "train", measure)
        assert training.keys() == {"north", "east"}
        assert last[f"train_{measure}"] == pytest.approx(np.mean([value for value, _ in training.values()]), rel=1e-12)
    recorded = json.loads((found.folder / "environment.json").read_text())
    counts = {
        part: sum(n for _, n in scores_of(str(found.folder), part, "loss").values()) for part in ("test", "train")
    }
    assert recorded["evaluated_samples"] == counts
    facts = recorded["without"]
    assert facts["clients"] == {"2": "Köln/<b>", "3": "west"}
    assert facts["exact"] == "training only"


@pytest.mark.soak
def test_one_loss_measures_runs_on_all_clients(world, shared_tmp, monkeypatch):
    """With `balanced` weights the model that nothing moves has the same losses, whoever trains, also where only the
    client that is left out has a class; what trains has the weights of its own samples.
    """
    x, y = np.random.default_rng(1).normal(size=(24, 12)).astype(np.float32), np.arange(24) % 3
    clients = [(x, y), (x[:9], y[:9] ** 2 % 3), (x[::2], y[::2]), (x, np.maximum(y, 1) + 1)]
    world.on_root(lambda: write_federation(shared_tmp / "four.h5", clients, num_classes=4, test=(x, y)))
    monkeypatch.chdir(shared_tmp)
    evaluate = {"train": {"every": 3}, "clients": {"every": 3}, "batch_size": 64}
    recipe = {"data": "four.h5", "loss": {"weights": "balanced"}, "evaluate": evaluate}
    still = small("still", **recipe, local={"steps": 4, "batch_size": 10, "lr": 1e-30})
    run = hpcfed.run(still, world=world, quiet=True)
    found, _ = without(world, "3", run="still", evaluate="all")
    for name in ("test_loss", "train_loss", "clients"):
        assert found.metrics[-1][name] == run.metrics[-1][name]
    labels = np.concatenate([own for _, own in clients[:3]])
    counts = np.bincount(labels, minlength=4)
    by_hand = np.where(counts, len(labels) / (4 * np.maximum(counts, 1)), 1.0).tolist()
    hpcfed.run(small("run", **recipe), world=world, quiet=True)
    trained, _ = without(world, "3", evaluate="all")
    given = {**recipe, "loss": {"weights": by_hand}, "cohort": {"without": {"clients": [3], "evaluate": "all"}}}
    again = hpcfed.run(small("again", **given), world=world, quiet=True)
    assert [row["hash"] for row in trained.metrics] == [row["hash"] for row in again.metrics]
    assert trained.metrics[-1]["test_loss"] != again.metrics[-1]["test_loss"]


def weighted(scores: Mapping[str, tuple[float, int]]) -> float:
    """Their mean over samples."""
    return float(np.average([value for value, _ in scores.values()], weights=[n for _, n in scores.values()]))


def test_it_goes_on_as_it_began(world, folder):
    """After a run that was cut short, on the same checkpoints; and without one more client."""
    recipe = {"cohort": {"schedule": LATE}, "rounds": 5, "checkpoint": {"every": 2, "keep": 9}}
    hpcfed.run(small("run", **recipe), world=world, quiet=True)
    first, _ = without(world, "4")
    more = hpcfed.run(first.folder / "recipe.yaml", ["rounds=6"], world=world, quiet=True)
    whole = {**recipe, "rounds": 6, "cohort": {"schedule": LATE, "without": [4]}}
    again = hpcfed.run(small("again", **whole), world=world, quiet=True)
    assert rows_of(more) == rows_of(again)
    second, said = without(world, "0", run="run-without-4")
    if world.is_root:
        assert said[0] == "the first round that is another without 0, 4: 1"
    assert [row["cohort"] for row in second.metrics] == [[1], [2, 3], [1, 2], [], [3], [1, 3]]
    found, said = without(world, "0", run="run-without-4")
    assert said == []
    assert rows_of(found) == rows_of(second)


def test_scores_of_other_clients_are_measured_again(world, folder):
    """A run without a client, whose scores leave it out, begins one without another whose scores are of all."""
    evaluate = {"batch_size": 64, "train": {"every": 1}, "clients": {"every": 1}}
    recipe = {"cohort": {"schedule": LATE}, "rounds": 4, "checkpoint": {"every": 1, "keep": 9}, "evaluate": evaluate}
    hpcfed.run(small("run", **{**recipe, "cohort": {"schedule": LATE, "without": [4]}}), world=world, quiet=True)
    found, _ = without(world, "3", evaluate="all")
    both = {"clients": [4, 3], "evaluate": "all"}
    again = hpcfed.run(
        small("again", **{**recipe, "cohort": {"schedule": LATE, "without": both}}), world=world, quiet=True
    )
    assert rows_of(found) == rows_of(again)


@pytest.mark.soak
def test_the_scores_of_a_former_last_round_are_measured_again(world, folder):
    """A run that was asked for more rounds has evaluated one that no period names."""
    evaluate = {"batch_size": 64, "train": {"every": 9}}
    recipe = {"cohort": {"schedule": LATE}, "checkpoint": {"every": 1, "keep": 9}, "evaluate": evaluate}
    hpcfed.run(small("run", **recipe, rounds=1), world=world, quiet=True)
    base = hpcfed.run(small("run", **recipe, rounds=4), world=world, quiet=True)
    assert base.metrics[0]["train_loss"] is not None
    found, _ = without(world, "3")
    cohort = {"schedule": LATE, "without": [3]}
    again = hpcfed.run(small("again", **{**recipe, "cohort": cohort}, rounds=4), world=world, quiet=True)
    assert rows_of(found) == rows_of(again)


@pytest.mark.parametrize(
    ("clients", "options", "expected"),
    [
        (["nobody"], {}, "no client 'nobody': expected a name of the federation, or a number below 5"),
        (["5"], {}, "no client '5'"),
        (["0", "1", "2", "3", "4"], {}, "at least one client left, got all 5 left out"),
        (["0", "1", "2"], {"cohorts": "redrawn"}, "at most the 2 clients left of small.h5, got 3"),
    ],
    ids=str,
)
def test_what_cannot_be_left_out_is_refused(clients: Sequence[str], options, expected, world, folder):
    hpcfed.run(small("run", rounds=1, cohort={"size": 3}), world=world, quiet=True)
    world.gather(None)
    with pytest.raises(InputError, match=expected):
        without(world, *clients, **options)


@pytest.mark.parametrize(
    ("cohort", "changes", "expected"),
    [
        ({"schedule": [[0]], "without": [0]}, {}, "no round of cohort.schedule has a client left"),
        ({"schedule": [[0], [1]], "without": {"clients": [0], "cohorts": "redrawn"}}, {}, "'cohorts: empty'"),
        ({"without": []}, {}, "cohort.without.clients"),
        ({"without": {"clients": [0], "cohort": "redrawn"}}, {}, "cohort.without.cohort"),
        ({"without": [3]}, {"loss": {"weights": "balanced"}}, "none of class 3"),
    ],
    ids=str,
)
def test_what_a_recipe_cannot_leave_out_is_refused(cohort, changes, expected, world, shared_tmp, monkeypatch):
    """A class that only client 3 has, too."""
    x, y = np.zeros((8, 12), np.float32), np.arange(8) % 3
    clients = [(x, y)] * 3 + [(x, y + 1)]
    world.on_root(lambda: write_federation(shared_tmp / "small.h5", clients, num_classes=4) and None)
    monkeypatch.chdir(shared_tmp)
    with pytest.raises(InputError, match=expected):
        hpcfed.run(small("run", cohort=cohort, **changes), world=world, quiet=True)


@pytest.mark.parametrize("model", ["last-two", "cohort-average"])
def test_a_round_that_trains_nobody_has_its_own_average(model, world, folder):
    """w^t is w^{t-1} there, so both averages are the model itself."""
    algorithm, cohort = {"name": "fedavg", "server_lr": 2.0}, {"schedule": [[0], [1], [2], [3]], "without": [3]}
    recipe = small("run", algorithm=algorithm, cohort=cohort, evaluate={"model": model})
    evaluated = hpcfed.run(recipe, world=world, quiet=True).folder / "model-evaluated.safetensors"
    assert evaluated.exists()
    hpcfed.run(recipe, ["rounds=4"], world=world, quiet=True)
    assert not evaluated.exists()


@pytest.mark.every(2)
@pytest.mark.parametrize("model", ["last-two", "cohort-average"])
def test_another_evaluated_model_waits_for_a_round(model, world, folder):
    """What it needs of the last round is in no checkpoint."""
    recipe = small("run", cohort={"schedule": [[0], [1], [2], [3], [4]], "without": [3]})
    hpcfed.run(recipe, world=world, quiet=True)
    with pytest.raises(InputError, match=r"of round 3 lacks what evaluate.model needs of it, and no round follows"):
        hpcfed.run(recipe, [f"evaluate.model={model}"], world=world, quiet=True)
    late = hpcfed.run(recipe, ["rounds=5", f"evaluate.model={model}"], world=world, quiet=True)
    whole = hpcfed.run(recipe, ["rounds=5", f"evaluate.model={model}", "output=whole"], world=world, quiet=True)
    assert [row["test_loss"] for row in late.metrics[3:]] == [row["test_loss"] for row in whole.metrics[3:]]
