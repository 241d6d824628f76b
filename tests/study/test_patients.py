"""Cells that were missing, and samples of one patient, in the splits of a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from sklearn.impute import SimpleImputer

from data_prep.groups import _complete, divide
from data_prep.own import write_federation
from data_prep.sources import own
from hpcfed.cli.main import cli
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.study.federations import files_of, write_split
from hpcfed.lab.study.samples import read_samples
from hpcfed.lab.study.splits import make_splits
from tests.study.conftest import done, planned, recipe

SITES = ("north", "south", "west")
WARDS = ("a", "b", "c")
ROWS = 40


def table(seed: int) -> list[list[str]]:
    """Rows of patient, age, pulse, ward, label; a quarter of the cells is missing, and a patient has 1 to 4 rows."""
    rng = np.random.default_rng(seed)
    patients = np.repeat(np.arange(ROWS), rng.integers(1, 5, ROWS))[:ROWS]
    cells = [
        [
            f"{SITES[seed]}-{patient}",
            f"{rng.normal(50, 9):.3f}",
            f"{rng.normal(70, 20):.3f}",
            str(rng.choice(WARDS)),
            label,
        ]
        for patient, label in zip(patients, rng.choice(["well", "ill"], ROWS), strict=True)
    ]
    for row in cells:
        for k in (1, 2, 3):
            if rng.random() < 0.25:
                row[k] = ""
    return cells


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """The sites' tables in a folder."""
    folder = tmp_path_factory.mktemp("tables") / "raw"
    folder.mkdir()
    for seed, name in enumerate(SITES):
        lines = ["patient,age,pulse,ward,label", *(",".join(row) for row in table(seed))]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def prepared(tables: Path, path: Path, *options: str) -> Path:
    """Write the tables' federation file by the command."""
    words = ["prepare", "own", "--raw", str(tables), "--target", "label", "-o", str(path), *options]
    cli.main(words, prog_name="hpcfed", standalone_mode=False)
    return path


@pytest.mark.parametrize(("way", "scale"), [("mean", "none"), ("median", "client"), ("mean", "pooled")])
def test_missing_cells_are_filled_from_the_training_part_alone(tables, tmp_path, way, scale):
    """As scikit-learn's imputer, fitted on the split's training rows of the raw table, fills them."""
    options = ("--exclude", "patient", "--missing", way, "--standardize", scale, "--test-fraction", "0.3")
    samples = read_samples(prepared(tables, tmp_path / "f.h5", *options))
    raw = {name: table(seed) for seed, name in enumerate(SITES)}
    with h5py.File(tmp_path / "f.h5", locking=False) as file:
        rows = np.concatenate([file["train/row"][:], _test_rows(file)])
    text = [raw[SITES[file]][row] for file, row in rows]
    numbers = np.array([[float(cell or "nan") for cell in row[1:3]] for row in text], np.float32)
    wards = np.array([[[np.nan, ward == row[3]][row[3] != ""] for ward in WARDS] for row in text])
    split = make_splits("holdout", samples.divisible, 1, 0.25, 0).each[0]
    files = files_of(tmp_path, 0)
    write_split(files, samples, split, "none", {})
    training = split.training
    filled = SimpleImputer(strategy=way).fit(numbers[training]).transform(numbers)
    shares = np.nanmean(wards[training], axis=0)
    wards = np.where(np.isnan(wards), np.arange(len(WARDS)) == shares.argmax(), wards)
    with h5py.File(files.sites, locking=False) as file:
        found = file["train/x"][:], file["train/row"][:]
        marked = file["train/filled"][:]
        tested, test_marked = file["test/x"][:], file["test/filled"][:]
    wanted = np.concatenate([filled, wards], axis=1)
    np.testing.assert_allclose(found[0], wanted[found[1]], rtol=1e-5, atol=1e-4)
    assert np.array_equal(marked[:, :2] != 0, np.isnan(numbers[found[1]]))
    own_tests = np.concatenate([np.flatnonzero(split.tests & (samples.owner == k)) for k in range(3)])
    np.testing.assert_allclose(tested, wanted[own_tests], rtol=1e-5, atol=1e-4)
    assert np.array_equal(test_marked[:, :2] != 0, np.isnan(numbers[own_tests]))


def _test_rows(file: h5py.File) -> np.ndarray:
    """Return file and row of the test samples, which are the rows of each table that are not among the others."""
    rows = file["train/row"][:]
    return np.array([(k, row) for k in range(3) for row in range(ROWS) if not (rows == (k, row)).all(axis=1).any()])


def test_files_without_a_mask_stay_valid(tables, tmp_path):
    """Their filled cells stay as they are, and a line says so; a mask of another shape is refused."""
    path = prepared(tables, tmp_path / "f.h5", "--exclude", "patient", "--missing", "mean")
    with h5py.File(path, "a") as file:
        mask = file["train/filled"][:]
        del file["train/filled"]
    samples = read_samples(path)
    assert np.isfinite(samples.dataset.x).all()
    assert any("prepare it again to mark them" in line for line in samples.remarks)
    with h5py.File(path, "a") as file:
        file["train/filled"] = mask[1:]
    with pytest.raises(InputError, match=r"/train/filled: expected integers of shape \(120, 5\), got uint8 \(119, 5\)"):
        read_samples(path)


def test_no_patient_is_in_both_parts(tables, tmp_path):
    """Of holdouts and folds, of the command's own test sets, and of those of a file that is partitioned anew."""
    path = prepared(tables, tmp_path / "f.h5", "--group", "patient", "--missing", "mean", "--test-fraction", "0.3")
    again = tmp_path / "g.h5"
    words = ["prepare", "federation", "--raw", str(path), "-o", str(again), "--test-fraction", "0.4"]
    cli.main(words, prog_name="hpcfed", standalone_mode=False)
    for one in (path, again):
        with Federation.open(one) as federation:
            train, test = federation.groups("train"), federation.groups("test")
            assert len(np.intersect1d(train, test)) == 0
            assert federation.features == ["age", "pulse", "ward=a", "ward=b", "ward=c"]
            assert (np.diff(federation.test_offsets) > 0).all()
    samples = read_samples(path)
    for kind, count, low, high in (("holdout", 4, 0.15, 0.35), ("k-fold", 4, 0.15, 0.35)):
        found = make_splits(kind, samples.divisible, count, 0.25, 0)
        tests = np.array([split.tests for split in found.each])
        for part in tests:
            assert len(np.intersect1d(samples.group[part], samples.group[~part])) == 0
        for k in range(3):
            for label in (0, 1):
                own_ = (samples.owner == k) & (samples.label == label)
                assert low < tests[:, own_].mean() < high
                assert tests[:, own_].any(axis=1).all()
        assert (tests.sum(axis=0) == 1).all() == (kind == "k-fold")
        assert "no group is in both parts" in found.remarks[-1]


def test_patients_of_several_sites(tables, tmp_path):
    """They stay together too; no model can be tested on a site whose patients it was trained on."""
    for path in tables.glob("*.csv"):
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / "raw" / path.name).write_text(path.read_text().replace(f"{path.stem}-", ""))
    dataset = own.load(tmp_path / "raw", target="label", group="patient", missing="mean")
    assert any("groups are of several clients; where each client numbers its own" in line for line in dataset.remarks)
    path = prepared(tmp_path / "raw", tmp_path / "f.h5", "--group", "patient", "--missing", "mean")
    samples = read_samples(path)
    for split in make_splits("holdout", samples.divisible, 2, 0.25, 0).each:
        assert len(np.intersect1d(samples.group[split.tests], samples.group[~split.tests])) == 0
    with pytest.raises(InputError, match=r"leave-one-site-out: .* groups are of several sites: got one of north and"):
        make_splits("leave-one-site-out", samples.divisible, 2, 0.25, 0)
    one = np.where(samples.owner == 1, 10**6, samples.group)
    with pytest.raises(InputError, match="site 'south' has too few groups: expected at least 2, got 1"):
        make_splits("holdout", replace(samples.divisible, group=one), 2, 0.25, 0)


def test_parts_have_their_shares_of_each_stratum():
    """Of many small groups nearly exactly; a group is in one part; a stratum of two groups is in both parts."""
    rng = np.random.default_rng(0)
    group = rng.permutation(np.repeat(np.arange(300), 3))
    stratum = (group % 5 == 0).astype(np.int64)
    part = divide(group, stratum, (0.2, 0.8), rng)
    assert all(len(np.unique(part[group == one])) == 1 for one in range(300))
    for one in (0, 1):
        assert np.mean(part[stratum == one] == 0) == pytest.approx(0.2, abs=0.02)
    few = divide(np.array([0, 0, 1, 2, 2, 2]), np.array([0, 0, 0, 1, 1, 1]), (0.2, 0.8), rng)
    assert few[0] != few[2]


def test_a_group_that_its_part_alone_has_of_a_stratum_is_not_moved():
    """The first group is the smallest of the stratum that a part lacks, but also the only one here of another."""
    strata = ((np.array([0, 1]), np.array([1, 1])), (np.array([0]), np.array([5])), (np.array([1]), np.array([3])))
    part = np.array([0, 0, 1])
    _complete(part, strata, 2, np.arange(3))
    assert part.tolist() == [0, 1, 1]


def test_a_study_by_patient(tables, tmp_path):
    """The page says so, and splits.csv has the groups."""
    prepared(tables, tmp_path / "sites.h5", "--group", "patient", "--missing", "median")
    recipe(tmp_path, rounds=1, evaluate={})
    study = planned(tmp_path, "fedavg", splits=2, baselines="none")
    place = done(study)
    page = (place / "study.html").read_text()
    assert "Samples of one patient are never in both parts" in page
    assert "Each split tests on about 20 % of every site&#39;s samples" in page
    assert "Missing cells are filled by the median of the split" in page
    assert (place / "splits.csv").read_text().startswith("sample,site,label,group,tested\n")


def test_patients_of_arrays_and_images(tmp_path):
    """An array of their names beside x and y, dropped with its samples; a pattern of files' names; both kept whole."""
    rng = np.random.default_rng(0)
    packed, apart, images = (tmp_path / name for name in ("packed", "apart", "images"))
    for folder in (packed, apart):
        folder.mkdir()
    for site in SITES:
        patients = np.array([f"{site}-{k // 3}" for k in range(12)])
        x, y = rng.normal(size=(12, 2)), np.arange(12) % 2
        x[4] = np.nan
        np.savez(packed / f"{site}.npz", x=x, y=y, patient=patients)
        for name, array in (("x", x), ("y", y), ("patient", patients)):
            np.save(apart / f"{site}.{name}.npy", array)
        for k, patient in enumerate(patients):
            path = images / site / ("ill" if k % 2 else "well") / f"{patient}_{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(256, size=(4, 4), dtype=np.uint8)).save(path)
    ways = {packed: ("patient", 11), apart: ("patient", 11), images: ("^[^_]+", 12)}
    for folder, (group, rows) in ways.items():
        path = tmp_path / f"{folder.name}.h5"
        options = ("--missing", "drop") if folder is not images else ()
        words = ["prepare", "own", "--raw", str(folder), "-o", str(path), "--group", group, *options]
        cli.main([*words, "--test-fraction", "0.3"], prog_name="hpcfed", standalone_mode=False)
        with Federation.open(path) as federation:
            train, test = federation.groups("train"), federation.groups("test")
            assert len(np.intersect1d(train, test)) == 0
            assert len(train) + len(test) == 3 * rows
            assert len(np.union1d(train, test)) == 12
        samples = read_samples(path)
        assert sorted(np.bincount(samples.group)) == [2] * (3 * (12 - rows)) + [3] * (12 - 3 * (12 - rows))
        assert samples.grouped_by == ("group" if folder is images else "patient")


@pytest.mark.parametrize(
    ("folder", "group", "message"),
    [
        ("packed", "ward", "--group ward: expected an array of this name, got x, y, patient"),
        ("packed", "y", "groups of client 'north': expected 3 names or whole numbers, one a sample, got float64"),
        ("packed", "patient", "groups of client 'north': expected a name for each sample, got an empty one"),
        ("apart", "ward", "--group ward: expected north.ward.npy beside it, got none"),
        ("images", "(", "--group (: expected of images, a regular expression that finds the patient in a file's name"),
        ("images", "^[0-9]+", "--group ^[0-9]+: nothing in the file's name fits; of images it is a regular expression"),
    ],
)
def test_wrong_groups_of_arrays_and_images(tmp_path, folder, group, message):
    place = tmp_path / folder
    (place / "north" / "well").mkdir(parents=True) if folder == "images" else place.mkdir()
    x, y, patient = np.zeros((3, 2)), np.array([0.5, 1, 2]), np.array(["a", "", "b"])
    if folder == "packed":
        np.savez(place / "north.npz", x=x, y=y, patient=patient)
    elif folder == "apart":
        np.save(place / "north.x.npy", x)
        np.save(place / "north.y.npy", y)
    else:
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(place / "north/well/a_1.png")
    with pytest.raises(InputError) as refused:
        own.load(place, task="classification" if folder == "images" else "regression", group=group)
    assert message in str(refused.value)


def test_groups_from_python(tmp_path):
    """Of clients that are generators too; unknown clients, and a test set without groups, are refused."""
    clients = {name: (sample for sample in [(np.full(2, 1.0 * k), k % 2) for k in range(6)]) for name in SITES}
    groups = {name: [f"{name}-{k // 2}" for k in range(6)] for name in SITES}
    write_federation(tmp_path / "f.h5", clients, groups=groups)
    assert read_samples(tmp_path / "f.h5").group.tolist() == [k // 2 for k in range(18)]
    pair = {"north": (np.zeros((2, 1)), np.array([0, 1]))}
    with pytest.raises(InputError, match="groups of client 'nord'; did you mean 'north'"):
        write_federation(tmp_path / "g.h5", pair, groups={"north": [1, 2], "nord": [3]})
    with pytest.raises(InputError, match=r"groups of the test set: expected 2 names or whole numbers.*got none"):
        write_federation(tmp_path / "g.h5", pair, test=pair["north"], groups={"north": [1, 2]})


def test_a_client_of_one_patient_is_not_held_out_whole(tmp_path):
    (tmp_path / "raw").mkdir()
    for name, patients in (("north", ["a"] * 6), ("south", [f"b{k}" for k in range(6)])):
        rows = [f"{patient},{k},{'ill' if k % 2 else 'well'}" for k, patient in enumerate(patients)]
        (tmp_path / "raw" / f"{name}.csv").write_text("\n".join(["patient,age,label", *rows]) + "\n")
    with pytest.raises(InputError, match="client 'north': all its groups would be held out"):
        prepared(tmp_path / "raw", tmp_path / "f.h5", "--group", "patient", "--test-fraction", "0.6")
    (tmp_path / "raw/empty.csv").write_text("patient,age,label\n")  # which has nothing to hold out
    table = tmp_path / "raw/north.csv"
    table.write_text(table.read_text().replace("a,0,", "c,0,").replace("a,1,", "d,1,"))
    prepared(tmp_path / "raw", tmp_path / "f.h5", "--group", "patient", "--test-fraction", "0.2")
    with h5py.File(tmp_path / "f.h5") as file:
        assert np.diff(file["train/offsets"][:])[0] == 0
