"""Federations from data frames, DataLoaders and sparse matrices, as notebooks hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, SubsetRandomSampler, TensorDataset

import hpcfed
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError

FRAME = pd.DataFrame(
    {
        "age": [30.5, 40, 50, 60, 35, 45],
        "ward": pd.Categorical(["icu", "er", "er", "icu", "er", "er"], categories=["icu", "er", "day"]),
        "smokes": ["yes", "no", "no", "yes", "no", "no"],
        "ill": ["no", "yes", "no", "yes", "yes", "no"],
        "hospital": ["b", "b", "a", "a", "a", "b"],
    }
)
X, Y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 0, 1])


class Table:
    """Like Hugging Face's ``Dataset``."""

    def __init__(self, frame: pd.DataFrame):
        self._frame = frame

    def to_pandas(self) -> pd.DataFrame:
        return self._frame


def content(path: Path) -> tuple[Any, ...]:
    with Federation.open(path) as federation:
        x, y = federation.train()
        names = [federation.client_name(k) for k in range(federation.num_clients)]
        return np.asarray(x[:]), np.asarray(y[:]), names, federation.features, federation.source


def written(path: Path, *arguments: Any, **options: Any) -> tuple[Any, ...]:
    hpcfed.write_federation(path, *arguments, **options, overwrite=True)
    return content(path)


def test_a_frame_its_groups_and_a_frame_a_client_make_one_federation(tmp_path):
    path = tmp_path / "f.h5"
    x, y, names, features, source = written(path, FRAME, client="hospital", target="ill")
    assert features == ["age", "ward=icu", "ward=er", "ward=day", "smokes=no", "smokes=yes"]
    assert (names, y.tolist()) == (["a", "b"], [0, 1, 1, 0, 1, 0])
    assert x[:, 0].tolist() == [50, 60, 35, 30.5, 40, 45]
    assert x[1].tolist() == [60, 1, 0, 0, 0, 1]
    assert source["categories"] == {"ward": ["icu", "er", "day"], "smokes": ["no", "yes"]}
    apart = {name: part.drop(columns="hospital") for name, part in FRAME.groupby("hospital")}
    others = [
        (Table(FRAME), {"client": "hospital", "target": "ill"}),
        (FRAME.groupby("hospital"), {"target": "ill"}),
        (apart, {"target": "ill"}),
        ({name: Table(part) for name, part in apart.items()}, {"target": ["ill"]}),
    ]
    for clients, options in others:
        again = written(path, clients, **options)
        assert (again[0] == x).all()
        assert again[2:4] == (names, features)


def test_test_sets_have_the_columns_of_the_clients(tmp_path):
    test = FRAME.iloc[:2].assign(smokes=["sometimes", "no"]).drop(columns="hospital")
    _, _, _, features, _ = written(tmp_path / "f.h5", FRAME, client="hospital", target="ill", test=test)
    assert features[-3:] == ["smokes=no", "smokes=sometimes", "smokes=yes"]
    with Federation.open(tmp_path / "f.h5") as federation:
        assert (federation.num_test, federation.test_offsets) == (2, None)
    written(tmp_path / "f.h5", FRAME, client="hospital", target="ill", test=FRAME.iloc[1:4])
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.test_offsets.tolist() == [0, 2, 3]


def test_missing_words_are_missing_values(tmp_path):
    frame = FRAME.assign(smokes=["yes", None, "no", "yes", "no", "no"])
    with pytest.raises(InputError, match="got NaN"):
        written(tmp_path / "f.h5", frame, client="hospital", target="ill")
    x, *_ = written(tmp_path / "f.h5", frame, client="hospital", target="ill", missing="drop")
    assert len(x) == 5


def test_loaders_and_sparse_matrices_are_their_samples(tmp_path):
    dataset = TensorDataset(torch.tensor(X), torch.tensor(Y))
    arrays = written(tmp_path / "f.h5", {"a": (X, Y)})
    for given in (DataLoader(dataset, 2), DataLoader(dataset, 3, shuffle=True), (sparse.csc_matrix(X), Y), dataset):
        assert (written(tmp_path / "f.h5", {"a": given})[0] == arrays[0]).all()


class Noisy(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return X[index] + np.random.rand(), Y[index]  # noqa: NPY002


DATASET = TensorDataset(torch.tensor(X), torch.tensor(Y))
OF_ILL = {"client": "hospital", "target": "ill"}


@pytest.mark.parametrize(
    ("clients", "options", "says"),
    [
        (FRAME, {}, "name it: target="),
        (FRAME, {"target": "ill"}, "a data frame without its column of clients"),
        (FRAME, {"client": "hospitals", "target": "ill"}, "did you mean 'hospital'?"),
        (FRAME, {"client": "hospital", "target": "il"}, "no column 'il'; did you mean 'ill'?"),
        (FRAME.assign(hospital=[None, *"abcab"]), OF_ILL, "1 samples without a client"),
        (FRAME.assign(seen=pd.Timestamp("2026-01-01")), OF_ILL, "column 'seen': expected numbers or words, got dates"),
        (
            FRAME.assign(scan=[[1, 2]] * 6),
            OF_ILL,
            "got a list; give arrays, {'north': (x, y), …}",
        ),
        (
            {"a": FRAME, "b": pd.concat([FRAME, FRAME[["age"]]], axis=1)},
            {"target": "ill"},
            "column 'age' is there twice",
        ),
        (
            {"a": FRAME, "b": FRAME.assign(age=list("uvwxyz"))},
            {"target": "ill"},
            "client 'a': column 'age': expected one of u, v, w, x, y, z, got ",
        ),
        (
            FRAME.assign(age=["61", "-5.5", "?", "70", "61", "1e3"]),
            OF_ILL,
            "column 'age': expected numbers, or words, got text: 61, 70, ?; make them numbers by",
        ),
        ({"a": (X, Y)}, {"target": "ill"}, "name columns of data frames"),
        ({"a": DataLoader(DATASET, sampler=SubsetRandomSampler([0, 1]))}, {}, "got one with a SubsetRandomSampler"),
        ({"a": DataLoader(DATASET, sampler=RandomSampler(DATASET, replacement=True))}, {}, "each once"),
        ({"a": DataLoader(DATASET, collate_fn=list)}, {}, "got one with a collate_fn"),
        ({"a": Noisy()}, {}, "sample 0 differs each time that it is read: got a random transform"),
        ({"a": Subset(Noisy(), [1, 2])}, {}, "a random transform"),
        ({"a": ([[1, 2], [3]], [0, 1])}, {}, "rows of one length"),
        ({"a": [(X[0], 1), (X[0, :2], 0)]}, {}, "got several shapes; pad sequences to one length"),
    ],
    ids=range(18),
)
def test_what_is_no_federation_is_refused_in_one_line(clients, options, says, tmp_path):
    with pytest.raises(InputError) as raised:
        written(tmp_path / "f.h5", clients, **options)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "f.h5").exists()
