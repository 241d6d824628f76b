"""FLamby's two federations: rows, splits, features and scales from small generated files, and from the real ones."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

from data_prep.sources import flamby
from data_prep.split import split
from data_prep.write import write
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError

SIZES = dict(zip(flamby.HOSPITALS, (40, 30, 12, 20), strict=True))
REGIONS = ("North", "South")


def heart_rows(count: int, seed: int, *, positive: float = 0.5) -> list[list[str]]:
    """Rows of 14 cells; in every fifth one a cell is missing, in a column that is kept or in a dropped one."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        row = [f"{value:.1f}" for value in rng.uniform(20, 80, 14)]
        row[2], row[6] = str(rng.integers(1, 5)), str(rng.integers(3))
        row[13] = str(int(rng.random() < positive) * rng.integers(1, 5))
        if number % 5 == 0:
            row[3 if number % 2 else 11] = "?"
        rows.append(row)
    return rows


@pytest.fixture
def heart(tmp_path: Path) -> Path:
    folder = tmp_path / "raw" / "fed_heart_disease"
    folder.mkdir(parents=True)
    for seed, (name, count) in enumerate(SIZES.items()):
        rows = heart_rows(count, seed, positive=1.0 if name == "switzerland" else 0.5)
        with (folder / f"processed.{name}.data").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return tmp_path / "raw"


@pytest.fixture
def tcga(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    rng = np.random.default_rng(0)
    pids = [f"TCGA-{'AB' if k % 2 else 'CD'}-{k:04}" for k in range(30)]
    tables = {
        "brca.csv": [["pid", "age", "stage", "E", "T"]]
        + [[pid, rng.integers(30, 80), k % 2, float(k % 3 == 0), float(k)] for k, pid in enumerate(pids)],
        "centers.csv": [["TSS Code", "Region"], ["AB", REGIONS[1]], ["CD", REGIONS[0]]],
        "train_test_split.csv": [["pid", "fold", "fold2"]]
        + [[pid, "", f"{'test' if k % 5 == 0 else 'train'}_{k % 2}"] for k, pid in enumerate(pids[:25])],
    }
    for name, rows in tables.items():
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return folder


def prepared(dataset: flamby.Dataset, path: Path) -> Federation:
    write(path, dataset, **vars(split(dataset, None, None, 0, {})))
    return Federation.open(path)


def test_heart_disease_is_flambys(heart: Path, tmp_path: Path) -> None:
    """Computed here from the rows, hospital by hospital; dropped columns may have missing values."""
    dataset = flamby.load_heart(heart)
    names = [*(name for name in flamby.COLUMNS[:10] if name not in ("cp", "restecg"))]
    assert dataset.features == [*names, "cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2"]
    with prepared(dataset, tmp_path / "heart.h5") as federation:
        assert federation.client_names() == list(SIZES)
        assert federation.test_offsets is not None
        for k, (name, count) in enumerate(SIZES.items()):
            rows = heart_rows(count, k, positive=1.0 if name == "switzerland" else 0.5)
            whole = [row for row in rows if "?" not in row[:10]]
            assert len(whole) == count - len(range(5, count, 10))
            y = np.array([int(row[13]) > 0 for row in whole])
            both = min(y.sum(), (~y).sum()) > 2
            train, test = train_test_split(
                np.arange(len(y)), train_size=0.66, test_size=1 - 0.66, random_state=43, stratify=y if both else None
            )
            x = np.array([[float(row[c]) for c in (0, 1, 3, 4, 5, 7, 8, 9)] for row in whole])
            hot = [[row[2] == str(c) for c in (2, 3, 4)] + [row[6] == str(c) for c in (1, 2)] for row in whole]
            x = np.concatenate([x, np.array(hot, float)], axis=1)
            mean, std = x[train].mean(0), x[train].std(0, ddof=1) + 1e-9
            found, labels = federation.client(k)
            np.testing.assert_allclose(found, (x[np.sort(train)] - mean) / std, rtol=1e-5, atol=1e-6)
            assert np.array_equal(labels[:, 0], y[np.sort(train)])
            found, labels = federation.test(*federation.test_offsets[k : k + 2].tolist())
            np.testing.assert_allclose(found, (x[np.sort(test)] - mean) / std, rtol=1e-5, atol=1e-6)
            assert np.array_equal(labels[:, 0], y[np.sort(test)])


def test_heart_disease_may_be_scaled_as_one(heart: Path, tmp_path: Path) -> None:
    plain = flamby.load_heart(heart, normalization="none")
    with prepared(flamby.load_heart(heart, normalization="pooled"), tmp_path / "pooled.h5") as federation:
        assert federation.normalization is not None
        np.testing.assert_allclose(federation.normalization.mean, plain.x.mean(0), rtol=1e-5)
        np.testing.assert_allclose(federation.normalization.std, plain.x.std(0, ddof=1), rtol=1e-4)
        assert np.array_equal(np.concatenate([federation.client(k)[0] for k in range(4)]), plain.x)


def test_breast_cancer_is_flambys(tcga: Path, tmp_path: Path) -> None:
    with prepared(flamby.load_tcga(tcga), tmp_path / "tcga.h5") as federation:
        assert (federation.task, federation.client_names()) == ("survival", list(REGIONS))
        assert (federation.sizes.tolist(), federation.num_test) == ([10, 10], 5)
        _, y = federation.client(1)
        rows = [k for k in range(25) if k % 2 and k % 5]
        assert y.tolist() == [[float(k % 3 == 0), float(k)] for k in rows]


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("fed_heart_disease/processed.va.data", "", None, "missing processed.va.data"),
        ("fed_heart_disease/processed.va.data", ",", ";", "row 1 has 1 column, not 14"),
        ("fed_heart_disease/processed.va.data", "?", "none", "row 1: 'none' is no number"),
    ],
)
def test_damaged_heart_files_are_refused(file: str, old: str, new: str | None, says: str, heart: Path) -> None:
    path = heart / file
    text = path.read_text()
    path.unlink() if new is None else path.write_text(text.replace(old, new))
    if says.endswith("number"):  # in a column that is kept
        path.write_text(text.replace(text.split(",")[0], "none", 1))
    with pytest.raises(InputError, match=says):
        flamby.load_heart(heart)


def test_a_hospital_of_missing_values_is_refused(heart: Path) -> None:
    path = heart / "fed_heart_disease" / "processed.va.data"
    path.write_text("\n".join(",".join(["63", *["?"] * 12, "1"]) for _ in range(9)) + "\n")
    with pytest.raises(InputError, match=r"processed\.va\.data: a hospital needs two rows without a missing value"):
        flamby.load_heart(heart)
    with pytest.raises(InputError, match=r"--normalization 'site'; did you mean 'sites'"):
        flamby.load_heart(heart, normalization="site")


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("brca.csv", ",29.0", ",-3.0", None),  # of a patient who is in no fold
        ("brca.csv", ",24.0", ",-3.0", "row 25: a negative survival time: got -3 days"),
        ("brca.csv", ",24.0", ",soon", "row 25: 'soon' is no number"),
        ("brca.csv", ",T", ",days", "no column 'T'"),
        ("train_test_split.csv", "train_1", "fold_1", "fold2 'fold_1' is neither train_K nor test_K"),
    ],
)
def test_damaged_cancer_files_are_refused(file: str, old: str, new: str, says: str | None, tcga: Path) -> None:
    path = tcga / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    if says is None:
        assert len(flamby.load_tcga(tcga).x) == 20
        return
    with pytest.raises(InputError, match=says):
        flamby.load_tcga(tcga)
