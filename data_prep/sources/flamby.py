"""Two natural cross-silo federations of FLamby: heart disease at four hospitals, breast cancer in six regions.

Their sites, rows, splits and features are those of FLamby's benchmark. Heart disease is one label a sample, 1 for
disease; a target of breast cancer is (event, time): 1 for a death or 0 for censored, and days.

Reference: Ogier du Terrail et al., "FLamby: datasets and benchmarks for cross-silo federated learning in realistic
healthcare settings", NeurIPS Datasets and Benchmarks 2022.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import DataSource, Origin, Published, damaged, examine, locate, reading
from hpcfed.data.federation import Standardization
from hpcfed.errors import InputError, counted, nearest

URL = "https://github.com/owkin/FLamby"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HEART = Origin(
    "Heart disease at four hospitals, as FLamby splits it: 740 patients, 13 features, disease or not",
    "https://archive.ics.uci.edu/dataset/45/heart+disease",
    tuple(Published(f"processed.{name}.data") for name in HOSPITALS),
    "these files, or a folder fed_heart_disease with them",
)
TABLES = ("brca.csv", "centers.csv", "train_test_split.csv")
TCGA = Origin(
    "Breast cancer (TCGA-BRCA) in six regions, as FLamby splits it: 1,088 patients, 39 features, survival",
    URL,
    tuple(Published(name) for name in TABLES),
    "these files, or a folder fed_tcga_brca with them",
)
COLUMNS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak",
           "slope", "ca", "thal", "num")  # fmt: skip
DROPPED, HOT, TARGET = ("slope", "ca", "thal"), ("cp", "restecg"), "num"
MISSING = "?"
TRAIN, SEED, FEWEST = 0.66, 43, 3
"""FLamby's share of training patients, its seed, and the fewest patients of each class for a stratified split."""
EPSILON = 1e-9
"""What FLamby adds to standard deviations."""
SITES, POOLED, NONE = WAYS = ("sites", "pooled", "none")


@dataclass(frozen=True)
class _Site:
    """The complete rows of a hospital: x (n, columns); label, row in the file, whether it is a test row, (n,) each."""

    x: np.ndarray
    y: np.ndarray
    rows: np.ndarray
    tests: np.ndarray


def load_heart(raw: str | Path, *, normalization: str = SITES) -> Dataset:
    """Return heart disease: x (486, 13) float32, y (486, 1) of zeros and ones; 254 patients to test, by hospital.

    Columns slope, ca and thal are dropped, then rows with a missing value; cp and restecg are one-hot over the levels
    of all hospitals, without the first, and come last.

    Args:
        raw: folder of the files.
        normalization: ``sites`` scales each hospital by mean and deviation (n − 1) of its own training patients;
            ``pooled`` has runs scale by those of all training patients; ``none``.

    Raises:
        InputError: files are missing or damaged, or a hospital has no complete row; or scikit-learn is missing.
    """
    if normalization not in WAYS:
        raise InputError(f"--normalization {normalization!r}", remedy=nearest(normalization, WAYS))
    paths = locate(Path(raw), {name: [f"processed.{name}.data"] for name in HOSPITALS}, inside="fed_heart_disease")
    sites = [_site(path) for path in paths.values()]
    names, x = _encoded(np.concatenate([site.x for site in sites]))
    owner = np.repeat(np.arange(len(sites)), [len(site.y) for site in sites])
    tests = np.concatenate([site.tests for site in sites])
    y = np.concatenate([site.y for site in sites]).astype(np.uint8)[:, None]
    rows = np.column_stack([owner, np.concatenate([site.rows for site in sites])])
    own = [_moments(x[(owner == k) & ~tests]) for k in range(len(sites))]
    statistics = np.array([mean for mean, _ in own]), np.array([std for _, std in own])
    entries, verdict = examine(HEART, paths.values(), title="heart disease")
    source = {"files": entries, "classes": ["no disease", "disease"]}
    scale = None
    if normalization == SITES:
        x = (x - statistics[0][owner]) / statistics[1][owner]
        source["standardized"] = "each hospital by its own training rows: /train/mean, /train/std"
    elif normalization == POOLED:
        scale = Standardization(*(tuple(part.tolist()) for part in _moments(x[~tests])))
    return Dataset(
        name="flamby-heart-disease",
        task="multi-label",
        x=x.astype(np.float32),
        y=y,
        num_classes=1,
        normalization=scale,
        source=source,
        owner=owner,
        clients=HOSPITALS,
        rows=rows,
        features=names,
        indicators=tuple(k for k, name in enumerate(names) if "=" in name),
        statistics=statistics if normalization == SITES else None,
        remarks=(verdict,),
    ).with_tests(tests)


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation of training rows as FLamby computes them, (features,) each."""
    return x.mean(axis=0), (x.std(axis=0, ddof=1) if len(x) > 1 else np.zeros(x.shape[1])) + EPSILON


def _site(path: Path) -> _Site:
    kept = [place for place, name in enumerate(COLUMNS) if name not in DROPPED]
    found, rows = [], []
    for number, row in enumerate(_rows(path)):
        if len(row) != len(COLUMNS):
            what = f"row {number + 1} has {counted(len(row), 'column')}, not {len(COLUMNS)}"
            raise damaged(path, what)
        cells = [row[place].strip() for place in kept]
        if MISSING not in cells:
            found.append([_number(path, number, cell) for cell in cells])
            rows.append(number)
    if len(found) < 2:
        got = "no row" if not found else "one"
        raise InputError("a hospital needs two rows without a missing value", where=str(path), got=got)
    table = np.array(found)
    y = table[:, -1] > 0
    return _Site(table[:, :-1], y, np.array(rows), _tests(y))


def _rows(path: Path) -> Iterator[list[str]]:
    with reading(path), path.open(encoding="utf-8", errors="replace", newline="") as file:
        yield from (row for row in csv.reader(file) if row)


def _number(path: Path, row: int, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise damaged(path, f"row {row + 1}: {cell[:20]!r} is no number, and not {MISSING!r}")
    return value


def _tests(y: np.ndarray) -> np.ndarray:
    """Return which rows of a site FLamby tests on, (n,) bool."""
    try:
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise InputError("FLamby's split needs scikit-learn", remedy="pip install scikit-learn") from error
    counts = np.bincount(y, minlength=2)
    found = train_test_split(
        np.arange(len(y)),
        test_size=1.0 - TRAIN,
        train_size=TRAIN,
        random_state=SEED,
        shuffle=True,
        stratify=y if counts.min() >= FEWEST else None,
    )
    tests = np.zeros(len(y), bool)
    tests[found[1]] = True
    return tests


def _encoded(table: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the features' names and values, (n, features) float64, with the columns of `HOT` one-hot at the end."""
    columns = [name for name in COLUMNS if name not in (*DROPPED, TARGET)]
    names = [name for name in columns if name not in HOT]
    parts = [table[:, [columns.index(name) for name in names]]]
    for name in HOT:
        column = table[:, columns.index(name)]
        levels = np.unique(column)[1:]
        names += [f"{name}={level:g}" for level in levels]
        parts.append((column[:, None] == levels).astype(np.float64))
    return names, np.concatenate(parts, axis=1)


def load_tcga(raw: str | Path) -> Dataset:
    """Return breast cancer: x (866, 39) float32, y (866, 2), event and days; 222 patients to test, by region.

    Patients that are not in FLamby's split are left out.

    Raises:
        InputError: files are missing or damaged, or a time is negative.
    """
    paths = locate(Path(raw), {name: [name] for name in TABLES}, inside="fed_tcga_brca")
    patients = table(paths["brca.csv"], "pid", "E", "T")
    codes = table(paths["centers.csv"], "TSS Code", "Region")
    folds = table(paths["train_test_split.csv"], "pid", "fold2")
    of_code = {row["TSS Code"]: row["Region"] for row in codes}
    fold_of = {row["pid"]: row["fold2"] for row in folds}
    kept = [(number, row) for number, row in enumerate(patients) if row["pid"] in fold_of]
    if not kept:
        raise InputError("no patient of brca.csv is in train_test_split.csv", where=str(raw))
    features = [name for name in patients[0] if name not in ("pid", "E", "T")]
    path = paths["brca.csv"]
    numbers = np.array([[_number(path, k, row[name]) for name in (*features, "E", "T")] for k, row in kept])
    x, y = numbers[:, :-2].astype(np.float32), numbers[:, -2:].astype(np.float32)
    if (y[:, 1] < 0).any():
        worst = int(y[:, 1].argmin())
        what = f"row {kept[worst][0] + 1}: a negative survival time"
        raise InputError(what, where=str(path), got=f"{y[worst, 1]:g} days")
    split = [fold(paths["train_test_split.csv"], fold_of[row["pid"]]) for _, row in kept]
    tests, owner = np.array([test for test, _ in split]), np.array([site for _, site in split])
    entries, verdict = examine(TCGA, paths.values(), title="TCGA-BRCA")
    regions = _regions([row["pid"] for _, row in kept], owner, of_code)
    return Dataset(
        name="flamby-tcga-brca",
        task="survival",
        x=x,
        y=y,
        source={"files": entries},
        owner=owner,
        clients=regions,
        rows=np.array([number for number, _ in kept]),
        features=features,
        indicators=tuple(k for k, column in enumerate(x.T) if set(np.unique(column)) <= {0.0, 1.0}),
        remarks=(verdict,),
    ).with_tests(tests)


def table(path: Path, *needed: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header that has the needed columns."""
    with reading(path), path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.DictReader(file, restval="")
        rows = list(reader)
    absent = [name for name in needed if name not in (reader.fieldnames or ())]
    if absent:
        raise damaged(path, f"no column {absent[0]!r}")
    if not rows:
        raise damaged(path, "no row below the header")
    return rows


def fold(path: Path, text: str) -> tuple[bool, int]:
    """Return whether ``train_3`` or ``test_3`` is for testing, and its site."""
    part, _, site = text.partition("_")
    if part not in ("train", "test") or not site.isdecimal():
        raise damaged(path, f"fold2 {text[:20]!r} is neither train_K nor test_K")
    return part == "test", int(site)


def _regions(pids: list[str], owner: np.ndarray, of_code: Mapping[str, str]) -> list[str]:
    """Return each site's name, the region of most of its patients: their codes are the second part of the pid."""
    names: list[str] = []
    for site in range(int(owner.max()) + 1):
        codes = [pids[k].split("-")[1:2] for k in np.flatnonzero(owner == site)]
        found = [of_code.get(code, "") for parts in codes for code in parts]
        known = [name for name in found if name]
        name = max(dict.fromkeys(known), key=known.count) if known else f"site {site}"
        names.append(name if name not in names else f"{name} ({site})")
    return names


SOURCES = {"flamby-heart-disease": DataSource(load_heart, HEART), "flamby-tcga-brca": DataSource(load_tcga, TCGA)}
