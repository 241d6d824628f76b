"""`hpcfed.run` with samples in the place of a federation file: written into the run folder, named by their content."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import hpcfed
from hpcfed.errors import InputError
from hpcfed.run_folder.data import DataOfRuns
from tests.devices import WANTED

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 3)), np.arange(24) % 2
ROWS = {"a": slice(0, 9), "b": slice(9, 24)}
CLIENTS = {name: (X[rows], Y[rows]) for name, rows in ROWS.items()}
FRAME = pd.DataFrame(X, columns=["age", "pulse", "sugar"]).assign(
    ward=pd.Categorical(["icu", "er"] * 12), site=["a"] * 9 + ["b"] * 15, ill=np.where(Y == 1, "yes", "no")
)
OF_FRAME = {"clients": FRAME, "client": "site", "target": "ill"}
APART = {name: FRAME[rows].drop(columns="site") for name, rows in ROWS.items()}


class Table:
    """Like Hugging Face's ``Dataset``: with its ``to_pandas``."""

    def __init__(self, frame: pd.DataFrame):
        self._frame = frame

    def to_pandas(self) -> pd.DataFrame:
        return self._frame


class DatasetDict(dict):
    """Like Hugging Face's."""


class Raising(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"no file of sample {index}")


class Random(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3), 0


def dataset(rows: slice) -> TensorDataset:
    return TensorDataset(torch.tensor(X[rows]), torch.tensor(Y[rows]))


def keys(output: Any, **changes: Any) -> dict[str, Any]:
    recipe = {"rounds": 2, "model": "logistic", "algorithm": "fedavg", "device": WANTED, "quiet": True}
    return {**recipe, "local": {"steps": 2, "batch_size": 5, "lr": 0.1}, "output": str(output), **changes}


@pytest.mark.parametrize(
    "forms",
    [
        [
            CLIENTS,
            [*CLIENTS.items()],
            {"clients": CLIENTS},
            {name: tuple(map(torch.tensor, pair)) for name, pair in CLIENTS.items()},
            {name: dataset(rows) for name, rows in ROWS.items()},
            {name: DataLoader(dataset(rows), 4, shuffle=True) for name, rows in ROWS.items()},
            {name: (sparse.csr_array(x), y) for name, (x, y) in CLIENTS.items()},
            {name: zip(x, y, strict=True) for name, (x, y) in CLIENTS.items()},
        ],
        [
            OF_FRAME,
            OF_FRAME | {"clients": Table(FRAME)},
            {"clients": FRAME.groupby("site"), "target": "ill"},
            {"clients": APART, "target": "ill"},
            {"clients": {name: Table(frame) for name, frame in APART.items()}, "target": "ill"},
        ],
        [
            {str(number): pair for number, pair in enumerate(CLIENTS.values())},
            [dataset(rows) for rows in ROWS.values()],
            [DataLoader(dataset(rows), 4) for rows in ROWS.values()],
        ],
    ],
    ids=["arrays", "frames", "a list of datasets"],
)
def test_the_same_samples_in_any_form_are_the_same_run(forms, tmp_path, capsys):
    first, *others = [hpcfed.run(data=data, **keys(tmp_path / "run", quiet=False)) for data in forms]
    assert capsys.readouterr().out.count("finished already") == len(others)
    assert {one.recipe.data for one in others} == {first.recipe.data}
    assert repr(first) == str(first)
    assert [*(tmp_path / "run" / "federation").iterdir()] == [first.recipe.data]


class Watch:
    def __init__(self) -> None:
        self.rounds = list[int]()

    def round(self, row: dict[str, Any]) -> None:
        self.rounds.append(row["round"])


def test_a_run_of_a_frame_is_verified_replayed_and_used_elsewhere(tmp_path, command):
    """Its folder has moved, and its observer, an object, is gone."""
    watch = Watch()
    data = OF_FRAME | {"test": FRAME.iloc[::3]}
    result = hpcfed.run(data=data, **keys(tmp_path / "run", observers=watch, checkpoint={"every": 1}))
    assert (watch.rounds, result.recipe.observers != []) == ([1, 2], True)
    folder = shutil.move(tmp_path / "run", tmp_path / "moved")
    done = command(["verify", "moved", "--all"], tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "not looked at" not in done.stdout
    replayed, loaded = hpcfed.replay(folder, 2, 1), hpcfed.load(folder)
    assert replayed.agrees
    assert str(replayed) == repr(replayed) == f"run, round 2, client 1 (b): 2 steps\n{folder}"
    assert str(loaded) == repr(loaded) == f"run: fedavg, 2 rounds\n{folder}"
    assert hpcfed.predict(folder, FRAME.drop(columns=["ill", "site"])).shape == (24, 3)
    words = ["run", "moved/recipe.yaml", f"data=federation/{result.recipe.data.name}", "output=again"]
    done = command(words, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_data_never_take_the_place_of_a_runs_own(tmp_path):
    other = {name: (x + 1, y) for name, (x, y) in CLIENTS.items()}
    run = hpcfed.run(data=CLIENTS, **keys(tmp_path / "run"))
    with pytest.raises(InputError, match="another recipe's run: got data_content"):
        hpcfed.run(data=other, **keys(tmp_path / "run"))
    assert [*run.recipe.data.parent.iterdir()] == [run.recipe.data]
    again = hpcfed.run(data=other, **keys(tmp_path / "run"), fresh=True)
    assert {*run.recipe.data.parent.iterdir()} == {run.recipe.data, again.recipe.data}
    assert hpcfed.load(tmp_path / "run" / "previous-1").recipe.data == run.recipe.data
    named = hpcfed.run(data=CLIENTS, overrides=[f"data={run.recipe.data}"], **keys(tmp_path / "named"))
    assert (named.recipe.data, (tmp_path / "named" / "federation").exists()) == (run.recipe.data, False)


def test_seeds_share_a_file_and_a_stopped_run_goes_on(tmp_path):
    found = hpcfed.run_seeds(data=CLIENTS, seeds=[0, 1], **keys(tmp_path / "seeds"))
    assert {one.recipe.data.parent for one in found} == {tmp_path / "seeds" / "federation"}
    assert {*hpcfed.runs(tmp_path / "seeds").run} == {str(one.folder) for one in found}
    for _ in hpcfed.rounds(data=CLIENTS, **keys(tmp_path / "left")):
        break
    gone_on = hpcfed.run(data=CLIENTS, **keys(tmp_path / "left"))
    assert [row["hash"] for row in gone_on.metrics] == [row["hash"] for row in found[0].metrics]


REFUSED = [
    (FRAME, "a data frame without its column of y; data={'clients': frame, 'client'"),
    (FRAME.groupby("site"), "without its column of y"),
    ({"table": FRAME, "client": "site", "label": "ill"}, "unknown key 'table'; did you mean 'clients'?"),
    ({"clients": FRAME, "client": "site", "label": "ill"}, "unknown key 'label'; did you mean 'target'?"),
    ({"clients": FRAME, "client": "sit", "target": "ill"}, "no column 'sit'; did you mean 'site'?"),
    (OF_FRAME | {"clients": FRAME.assign(ill=[None, *FRAME.ill[1:]])}, "no missing entry, got 1"),
    ({"a": (X, np.where(Y == 1, np.nan, Y))}, "a label for each sample, got 12 of NaN"),
    ({"a": ([[1, 2], [3]], [0, 1])}, "rows of one length, got 2 numbers in row 0 and 1 in row 1"),
    ({"a": DataLoader(dataset(ROWS["a"]), sampler=RandomSampler(X, num_samples=5))}, "got one with a RandomSampler"),
    ({"a": Random()}, "sample 0 differs each time that it is read: got a random transform"),
    ({"a": Raising()}, "in __getitem__: ValueError: no file of sample 0"),
    ({"clents": {"a": (X, Y)}}, "client 'clents': a mapping: expected x and y, got a; several clients are data="),
    (X, "samples without their clients: got ndarray"),
    ((X, Y), "samples without their clients"),
    ({"x": X, "y": Y}, "hpcfed.partition"),
    (DataLoader(dataset(ROWS["a"])), "samples without their clients"),
    (DatasetDict(train=Table(FRAME), test=Table(FRAME)), "a DatasetDict: expected clients, got train, test"),
    ({}, "no client has a sample"),
    ({"a": "a.csv"}, "data: client 'a'"),
    (5, "data: expected a path"),
]


@pytest.mark.parametrize(("data", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_data_is_refused_in_one_line(data, says, tmp_path):
    with pytest.raises(InputError) as raised:
        hpcfed.run(data=data, **keys(tmp_path / "run"))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_refused_recipe_leaves_no_data(tmp_path):
    with pytest.raises(InputError, match="at most the 2 clients"):
        hpcfed.run(data=CLIENTS, **keys(tmp_path / "run", cohort=3))
    assert not (tmp_path / "run").exists()
    assert not DataOfRuns.UNWRITTEN.exists()
