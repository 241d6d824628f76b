"""MAGIC: showers of particles that a telescope saw, 19,020 of them, made by gamma rays or by hadrons, in 10 features.

Its publisher names no test set: every fifth row is one to test on. The file is sorted by class, so that the two shares
of each class agree.

Reference: Bock et al., "Methods for multidimensional event classification: a case study using images from a Cherenkov
gamma-ray telescope", Nuclear Instruments and Methods in Physics Research A 516, 2004.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import DataSource, Origin, Published, damaged, examine, locate, reading
from hpcfed.data.federation import Standardization
from hpcfed.errors import counted

NAME = "magic"
FILES = ("magic04.data", "magic.dat")
"""The file's name at its publisher, and in the KEEL repository, whose copy has a header of lines that begin with @."""
FEATURES = ("fLength", "fWidth", "fSize", "fConc", "fConc1", "fAsym", "fM3Long", "fM3Trans", "fAlpha", "fDist")
CLASSES = {"g": "gamma", "h": "hadron"}
"""The file's word for each class → its name, in the order of labels."""
TEST_EVERY = 5
ORIGIN = Origin(
    "MAGIC gamma telescope: 19,020 showers, 10 features, gamma or hadron; every fifth row is for testing",
    "https://archive.ics.uci.edu/dataset/159/magic+gamma+telescope",
    (Published(FILES[0]),),
    f"this file, or KEEL's {FILES[1]}",
)


def load(raw: str | Path) -> Dataset:
    """Return x (15216, 10) float32 and y (15216,) uint8, 0 for gamma, and 3,804 test samples.

    Runs scale x by mean and deviation of the training rows.

    Raises:
        InputError: the file is missing or damaged, or lacks a class.
    """
    path = locate(Path(raw), {"data": FILES})["data"]
    x, y = _read(path)
    tests = np.arange(len(y)) % TEST_EVERY == TEST_EVERY - 1
    train = np.flatnonzero(~tests)
    if set(y[train].tolist()) != {0, 1}:
        raise damaged(path, f"not both classes, {' and '.join(CLASSES)}, among its rows to train on")
    entries, verdict = examine(ORIGIN, [path], title="MAGIC", published=lambda _: FILES[0])
    return Dataset(
        name=NAME,
        task="classification",
        x=x[train].astype(np.float32),
        y=y[train],
        num_classes=len(CLASSES),
        test_x=x[tests].astype(np.float32),
        test_y=y[tests],
        normalization=Standardization(tuple(x[train].mean(axis=0).tolist()), tuple(x[train].std(axis=0).tolist())),
        source={"files": entries, "classes": list(CLASSES.values())},
        rows=train,
        features=FEATURES,
        remarks=(verdict,),
    )


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows' features (n, 10) float64 and labels (n,) uint8."""
    x, y = [], []
    words = list(CLASSES)
    for number, cells in _rows(path):
        if len(cells) != len(FEATURES) + 1:
            raise damaged(path, f"line {number} has {counted(len(cells), 'column')}, not {len(FEATURES) + 1}")
        if cells[-1] not in CLASSES:
            raise damaged(path, f"line {number}: class {cells[-1][:20]!r}, not {' or '.join(words)}")
        try:
            values = [float(cell) for cell in cells[:-1]]
        except ValueError as error:
            raise damaged(path, f"line {number} has a cell that is no number") from error
        if not np.isfinite(values).all():
            raise damaged(path, f"line {number} has a cell that is not finite")
        x.append(values)
        y.append(words.index(cells[-1]))
    return np.array(x).reshape(-1, len(FEATURES)), np.array(y, np.uint8)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of each row, without KEEL's header."""
    with reading(path), path.open(encoding="utf-8", errors="replace", newline="") as file:
        for number, cells in enumerate(csv.reader(file), start=1):
            if cells and not cells[0].startswith("@"):
                yield number, [cell.strip() for cell in cells]


SOURCES = {NAME: DataSource(load, ORIGIN)}
