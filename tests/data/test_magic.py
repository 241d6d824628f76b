"""MAGIC's table: rows, classes and the test set, from the publisher's file and KEEL's; a damaged one is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import magic
from data_prep.split import split
from data_prep.write import write
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError

VALUES = np.round(np.random.default_rng(4).normal(20, 5, (23, 10)), 4)
LABELS = np.array([0] * 14 + [1] * 9)
HEADER = "@relation magic\n@attribute FLength real [4.2835, 334.177]\n@data\n"


def lines(between: str = ",") -> list[str]:
    rows = zip(VALUES.tolist(), LABELS.tolist(), strict=True)
    return [between.join([*(f"{value:.4f}" for value in row), "gh"[label]]) for row, label in rows]


@pytest.mark.parametrize(
    ("name", "text"),
    [("magic04.data", "\n".join(lines()) + "\n"), ("magic.dat", HEADER + "\r\n".join(lines(", ")))],
    ids=["publisher", "KEEL"],
)
def test_every_fifth_row_is_for_testing(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    dataset = magic.load(tmp_path)
    tests = [4, 9, 14, 19]
    train = np.setdiff1d(np.arange(23), tests)
    assert "none is published for" in dataset.remarks[0]
    write(tmp_path / "magic.h5", dataset, **vars(split(dataset, "iid", 1, 0, {})))
    with Federation.open(tmp_path / "magic.h5") as federation:
        assert (federation.num_classes, federation.source["classes"]) == (2, ["gamma", "hadron"])
        assert federation.features == list(magic.FEATURES)
        scale = federation.normalization
        assert scale is not None
        assert np.allclose(scale.mean, VALUES[train].mean(axis=0), rtol=1e-12)  # the same sums in another order
        assert np.allclose(scale.std, VALUES[train].std(axis=0), rtol=1e-12)
        x, y = federation.client(0)
        order, expected = np.lexsort(x.T), train[np.lexsort(VALUES[train].T)]
        assert np.array_equal(x[order], VALUES[expected].astype(np.float32))
        assert np.array_equal(y[order], LABELS[expected])
        x, y = federation.test(0, len(tests))
        assert np.array_equal(x, VALUES[tests].astype(np.float32))
        assert np.array_equal(y, LABELS[tests])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({3: lines()[3].replace("g", "x")}, "line 4: class 'x', not g or h"),
        ({3: "1,2,g"}, "line 4 has 3 columns, not 11"),
        ({3: lines()[3].replace("1", "one", 1)}, "line 4 has a cell that is no number"),
        ({3: ",".join(["inf"] * 10 + ["g"])}, "line 4 has a cell that is not finite"),
        (dict.fromkeys(range(14, 23), lines()[0]), "not both classes, g and h"),
        (dict.fromkeys(range(23), ""), "not both classes, g and h"),
    ],
    ids=["class", "columns", "number", "infinite", "one class", "empty"],
)
def test_a_damaged_file_is_refused(wrong: dict[int, str], says: str, tmp_path: Path) -> None:
    rows = [wrong.get(number, line) for number, line in enumerate(lines())]
    (tmp_path / "magic04.data").write_text("\n".join(rows))
    with pytest.raises(InputError, match=says):
        magic.load(tmp_path)
