"""True and False mean 1 and 0 in every reader, as labels and as features."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from scipy import sparse

import hpcfed
from data_prep.coverage import coverage
from data_prep.dataset import Dataset
from data_prep.own import gather
from data_prep.sources import own
from data_prep.split import split
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError

LABELS, SMOKES, AGE = [True, False, False, True], [False, True, False, True], [30.0, 41.0, 52.0, 63.0]


def table(path: Path, words: tuple[str, str] | None, mark: str = ",") -> None:
    def spell(value: bool) -> Any:
        return int(value) if words is None else words[int(value)]

    with path.open("w", newline="") as file:
        rows = csv.writer(file, delimiter=mark)
        rows.writerow(["age", "smokes", "y"])
        rows.writerows([age, spell(smokes), spell(y)] for age, smokes, y in zip(AGE, SMOKES, LABELS, strict=True))


def parquet(path: Path, dtype: str) -> None:
    frame = pandas.DataFrame({"age": AGE, "smokes": SMOKES, "y": LABELS})
    frame.astype({"smokes": dtype, "y": dtype}).to_parquet(path)


TABLES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "words": (".csv", lambda path: table(path, ("False", "True"))),
    "capitals": (".csv", lambda path: table(path, ("FALSE", "TRUE"))),
    "small": (".tsv", lambda path: table(path, ("false", "true"), "\t")),
    "numbers": (".csv", lambda path: table(path, None)),
    "parquet": (".parquet", lambda path: parquet(path, "bool")),
    "parquet-numbers": (".parquet", lambda path: parquet(path, "int64")),
    "parquet-words": (".parquet", lambda path: parquet(path, "str")),
    "parquet-nullable": (".parquet", lambda path: parquet(path, "boolean")),
}
X = np.column_stack([AGE, SMOKES]).astype(np.float32)


def frames(dtype: str) -> tuple[Any, Any]:
    frame = pandas.DataFrame({"age": AGE, "smokes": SMOKES, "y": LABELS}).astype({"smokes": dtype, "y": dtype})
    return frame[["age", "smokes"]], frame["y"]


ARRAYS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (X, np.array(LABELS)),
    "objects": lambda: (X.astype(object), np.array(LABELS, object)),
    "numbers": lambda: (X, np.array(LABELS).astype(int)),
    "words": lambda: (X, np.array([str(label) for label in LABELS])),
    "capitals": lambda: (X, np.array([str(label).upper() for label in LABELS], object)),
    "frame": lambda: frames("bool"),
    "nullable": lambda: frames("boolean"),
    "tensors": lambda: (torch.tensor(X), torch.tensor(LABELS)),
    "dataset": lambda: list(zip(torch.tensor(X), torch.tensor(LABELS), strict=True)),
}


def check(dataset: Dataset) -> None:
    assert dataset.num_classes == 2
    assert dataset.y.tolist() == [int(label) for label in LABELS] * 2
    assert np.array_equal(dataset.x, np.concatenate([X, X]))


@pytest.mark.parametrize("pair", itertools.combinations_with_replacement(TABLES, 2), ids="-and-".join)
def test_tables_of_two_sites_mean_the_same(pair: tuple[str, str], tmp_path: Path) -> None:
    for site, kind in zip("ab", pair, strict=True):
        ending, write = TABLES[kind]
        write(tmp_path / f"{site}{ending}")
    dataset = own.load(tmp_path)
    check(dataset)
    assert list(dataset.features or ()) == ["age", "smokes"]
    written = {"numbers", "parquet-numbers"} & {*pair}
    assert dataset.source.get("classes") == (None if written else ["False", "True"])


@pytest.mark.parametrize("pair", itertools.combinations_with_replacement(ARRAYS, 2), ids="-and-".join)
def test_arrays_of_two_clients_mean_the_same(pair: tuple[str, str]) -> None:
    check(gather("own", {site: ARRAYS[kind]() for site, kind in zip("ab", pair, strict=True)}))


def test_files_of_arrays_do_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=np.array(LABELS))
    np.savez(tmp_path / "b.npz", x=X, y=np.array(LABELS).astype(int))
    check(own.load(tmp_path))
    np.savez(tmp_path / "b.npz", x=X, y=np.array(LABELS, object))
    with pytest.raises(InputError, match=r"b\.npz: an array of Python objects.*astype\(str\)"):
        own.load(tmp_path)


@pytest.mark.parametrize("task", ["regression", "survival", "multi-label"])
def test_other_targets_and_categories(task: str, tmp_path: Path) -> None:
    target = "y,age" if task == "survival" else "y"
    for site, kind in zip("abc", ("words", "numbers", "parquet"), strict=True):
        TABLES[kind][1](tmp_path / f"{site}{TABLES[kind][0]}")
    dataset = own.load(tmp_path, task=task, target=target)
    assert dataset.y.reshape(12, -1)[:, 0].tolist() == [int(label) for label in LABELS] * 3
    chosen = own.load(tmp_path, categorical="smokes")
    assert list(chosen.features or ()) == ["age", "smokes=0", "smokes=1"]


def test_words_beside_true_and_false_are_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,smokes,y\n1,True,0\n2,False,1\n")
    (tmp_path / "b.csv").write_text("age,smokes,y\n1,unknown,0\n2,True,1\n")
    dataset = own.load(tmp_path)
    assert list(dataset.features or ()) == ["age", "smokes=False", "smokes=True", "smokes=unknown"]
    assert dataset.x[:, 1:].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_classes_of_one_site_alone_are_compared_with_the_others(tmp_path: Path) -> None:
    def said(of_a: str, of_b: str) -> str:
        for name, labels in (("a", of_a), ("b", of_b)):
            rows = "".join(f"{k},{label}\n" for k, label in enumerate(labels.split()))
            (tmp_path / f"{name}.csv").write_text(f"age,y\n{rows}")
        dataset = own.load(tmp_path)
        return "\n".join(coverage(dataset, split(dataset, None, None, 0, {})))

    assert "no class in common with any other client: a (no, yes), b (0, 1); do they mean" in said("yes no", "1 0")
    assert "classes of different clients that may be one: 'f' and 'female', 'm' and 'male'" in said(
        "m f none", "male female none"
    )
    assert said("yes no", "no yes") == said("True False", "1 0") == ""


def test_python_is_told_what_the_command_says(tmp_path: Path) -> None:
    """Classes that only test samples have, and those of one client alone."""
    clients = {"a": (X, np.array(["x", "y", "x", "y"])), "b": (X, np.array(["x", "z", "x", "z"]))}
    with pytest.warns(UserWarning, match="only test samples have classes: w"):
        hpcfed.write_federation(tmp_path / "f.h5", clients, test=(X, np.array(["x", "y", "z", "w"])))
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.num_classes == len(np.unique(federation.test(0, 4)[1])) == 4


def test_words_of_one_site_alone_are_compared_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,smokes,y\n1,T,0\n2,F,1\n")
    (tmp_path / "b.csv").write_text("age,smokes,y\n1,TRUE,0\n2,FALSE,1\n")
    dataset = own.load(tmp_path)
    (line,) = coverage(dataset, split(dataset, None, None, 0, {}))
    assert line == (
        "'smokes': no word in common with any other client: a (F, T), b (FALSE, TRUE); do they mean the same?"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            lambda: [{"image": x, "label": y} for x, y in zip(X, LABELS, strict=True)],
            "got mappings of 'image', 'label'",
        ),
        (lambda: (torch.tensor(X).to_sparse(), np.array(LABELS)), r"a sparse Tensor; give part\.toarray"),
        (lambda: (X, sparse.csr_matrix(np.array(LABELS))), r"a sparse csr_matrix; give part\.toarray"),
        (lambda: ([[1, 2], [3]], [0, 1]), "expected rows of one length"),
    ],
    ids=["mappings", "torch-sparse", "scipy-sparse", "ragged"],
)
def test_forms_that_are_no_samples_are_refused_with_a_remedy(given: Callable[[], Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        gather("own", {"a": given()})
