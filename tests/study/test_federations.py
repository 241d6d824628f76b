"""The files of the splits: no test sample in training, and statistics of the training part alone."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep.own import write_federation
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.study.federations import files_of, write_split
from hpcfed.lab.study.samples import read_samples
from hpcfed.lab.study.splits import make_splits
from tests.study.conftest import SITES, SIZES, write_sites

NUMBER = sum(sum(sizes) for sizes in SIZES.values())


def written(folder: Path, data: Path, scale: str, kind: str = "holdout", number: int = 0):
    """Write a split of a federation file; return the samples, the split and its files."""
    samples = read_samples(data)
    splits = make_splits(kind, samples.divisible, 3, 0.25, 0)
    split, files = splits.each[number], files_of(folder, number)
    write_split(files, samples, split, scale, {"kind": kind})
    return samples, split, files


@pytest.mark.parametrize("scale", ["none", "client", "pooled"])
def test_training_and_test_samples_are_those_of_the_split(tmp_path, scale):
    """Of both files, as every sample is found again by its row and its values."""
    samples, split, files = written(tmp_path, write_sites(tmp_path / "sites.h5"), scale)
    own = [np.flatnonzero(~split.tests & (samples.owner == k)) for k in range(3)]
    for path, names in ((files.sites, SITES), (files.pooled, ("all sites", *SITES))):
        with h5py.File(path, locking=False) as file, Federation.open(path) as federation:
            rows = file["train/row"][:]
            assert sorted(rows) == np.flatnonzero(~split.tests).tolist()
            assert federation.client_names() == list(names)
            assert np.diff(federation.test_offsets)[-3:].tolist() == [
                np.sum(split.tests & (samples.owner == k)) for k in range(3)
            ]
            assert np.array_equal(file["train/y"][:], samples.dataset.y[rows])
            x = samples.dataset.x[rows].astype(np.float64)
            if scale == "client":
                moments = np.array(
                    [[f(samples.dataset.x[one].astype(float), 0) for f in (np.mean, np.std)] for one in own]
                )
                mean, std = moments[samples.owner[rows]].transpose(1, 0, 2)
                x = (x - mean) / std
            np.testing.assert_allclose(file["train/x"][:], x, atol=1e-5)
            if scale == "pooled":
                theirs = federation.normalization
                training = samples.dataset.x[~split.tests].astype(np.float64)
                np.testing.assert_allclose([theirs.mean, theirs.std], [training.mean(0), training.std(0)], rtol=1e-6)


@pytest.mark.parametrize("scale", ["client", "pooled"])
def test_an_outlier_among_the_tests_changes_no_statistic(tmp_path, scale):
    """Planted in the last sample, which the first split tests on."""
    found = []
    for name, extra in (("usual", 1.0), ("far", 1e6)):
        data = write_sites(tmp_path / f"{name}.h5", extra=extra)
        number = next(n for n in range(3) if written(tmp_path / "try", data, scale, number=n)[1].tests[NUMBER - 1])
        _, _, files = written(tmp_path / name, data, scale, number=number)
        for path in (files.sites, files.pooled):
            with h5py.File(path, locking=False) as file:
                found.append((name, path.name, file["train/x"][:].tobytes(), file.attrs.get("normalization")))
    assert [one[1:] for one in found[:2]] == [one[1:] for one in found[2:]]


def test_a_site_left_out_is_the_common_test_set(tmp_path):
    """Scaled by the others' training samples, not by its own."""
    samples, split, files = written(tmp_path, write_sites(tmp_path / "sites.h5"), "client", "leave-one-site-out", 1)
    others = samples.dataset.x[samples.owner != 1].astype(np.float64)
    for path, count in ((files.sites, 2), (files.pooled, 1)):
        with Federation.open(path) as federation, h5py.File(path, locking=False) as file:
            assert federation.num_clients == count
            assert federation.test_offsets is None
            assert federation.num_test == SIZES["train"][1] + SIZES["test"][1]
            x = (samples.dataset.x[split.tests] - others.mean(0)) / others.std(0)
            np.testing.assert_allclose(file["test/x"][:], x, atol=1e-5)


def test_a_client_without_samples_is_no_site(tmp_path):
    """A line says so, in every kind of split; the others keep their samples, in the units before any scaling."""
    rng = np.random.default_rng(0)
    sites = {
        name: (rng.normal(k, k + 1.0, (20 * (k != 1), 3)), np.arange(20 * (k != 1)) % 2) for k, name in enumerate(SITES)
    }
    write_federation(tmp_path / "f.h5", sites, num_classes=2, standardize="client")
    samples = read_samples(tmp_path / "f.h5")
    assert samples.sites == ["north", "west"]
    assert samples.remarks == ("south: no samples, left out",)
    assert np.bincount(samples.owner).tolist() == [20, 20]
    np.testing.assert_allclose(samples.dataset.x, np.concatenate([sites[name][0] for name in ("north", "west")]))
    write_federation(tmp_path / "one.h5", {name: sites[name] for name in SITES[:2]}, num_classes=2)
    with pytest.raises(InputError, match="expected 2 to 50 sites with samples, got 1"):
        read_samples(tmp_path / "one.h5")


def test_a_files_own_scaling_is_undone(tmp_path):
    """That by each site, and that of all sites; what was prepared without scaling gives the same samples."""
    rng = np.random.default_rng(0)
    sites = {name: (rng.normal(k, k + 1.0, (20, 3)), np.arange(20) % 2) for k, name in enumerate(SITES)}
    read = {}
    for way in ("none", "client", "pooled"):
        write_federation(tmp_path / f"{way}.h5", sites, num_classes=2, standardize=way)
        read[way] = read_samples(tmp_path / f"{way}.h5")
    assert {way: one.scale for way, one in read.items()} == {"none": "none", "client": "client", "pooled": "pooled"}
    for way in ("client", "pooled"):
        np.testing.assert_allclose(read[way].dataset.x, read["none"].dataset.x, rtol=1e-12, atol=1e-12)
        assert read[way].dataset.normalization is None
