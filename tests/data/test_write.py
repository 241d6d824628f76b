"""The writer: what goes in comes out, the same bytes from the same seed, whole or not at all."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep import progress
from data_prep.dataset import Dataset
from data_prep.partition import SCHEMES
from data_prep.sources import digits, idx
from data_prep.streams import stream
from data_prep.synthetic import linear_regression, toy2d
from data_prep.write import check_output, write
from hpcfed.data import content
from hpcfed.data.content import content_hash
from hpcfed.data.federation import Federation, Standardization
from hpcfed.errors import InputError
from tests.data.raw import write_idx_folder

RECORD = {"scheme": "dirichlet-client", "clients": 7, "alpha": 0.5, "seed": 1}


@pytest.fixture
def images(tmp_path: Path) -> Dataset:
    """Sixty training and twenty test images whose files are memory-mapped."""
    write_idx_folder(tmp_path / "raw")
    return idx.load(tmp_path / "raw", idx.MNIST)


def owner_of(dataset: Dataset, num_clients: int = 7, seed: int = 1) -> np.ndarray:
    return SCHEMES["dirichlet-client"](dataset.y, num_clients, stream(seed, "t"), alpha=0.5)


def test_round_trip(tmp_path: Path, images: Dataset) -> None:
    owner = owner_of(images)
    written = write(tmp_path / "sub" / "f.h5", images, owner, 7, partition=RECORD, name="small")
    with Federation.open(tmp_path / "sub" / "f.h5") as federation:
        assert (federation.name, federation.task, federation.num_classes) == ("small", "classification", 10)
        assert (federation.num_clients, federation.num_samples, federation.num_test) == (7, 60, 20)
        assert (federation.feature_shape, federation.target_shape) == ((1, 5, 4), ())
        assert (federation.x_dtype, federation.y_dtype) == (np.uint8, np.uint8)
        assert federation.normalization == Standardization((0.1307,), (0.3081,))
        assert (federation.partition, federation.source) == (RECORD, images.source)
        assert federation.content == written
        assert [federation.client_name(k) for k in (0, 6)] == ["client-0", "client-6"]
        for k in range(7):
            x, y = federation.client(k)
            assert np.array_equal(x, images.x[owner == k])
            assert np.array_equal(y, images.y[owner == k])
            assert len(y) == federation.sizes[k]
        assert np.array_equal(federation.test(5, 20)[0], images.test_x[5:])
        assert np.array_equal(federation.test(0, 5)[1], images.test_y[:5])


def test_every_sample_once_and_traceable(tmp_path: Path, images: Dataset) -> None:
    write(tmp_path / "f.h5", images, owner_of(images), 7, partition=RECORD)
    with h5py.File(tmp_path / "f.h5") as file:
        rows = file["train/row"][:]
        assert np.array_equal(np.sort(rows), np.arange(60))
        assert np.array_equal(file["train/x"][:], images.x[rows])


def test_same_bytes_from_the_same_seed(tmp_path: Path, images: Dataset) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(tmp_path / name, images, owner_of(images, seed=seed), 7, partition=RECORD)
    first, again, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again
    assert first != other


def test_blocks_do_not_show(tmp_path: Path, images: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one", images, owner_of(images), 7, partition=RECORD)
    monkeypatch.setattr(content, "BLOCK_BYTES", 50)  # two images of 20 bytes
    write(tmp_path / "many", images, owner_of(images), 7, partition=RECORD)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()


def test_progress_has_the_time_left(tmp_path: Path, images: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(progress, "PERIOD", 0.0)
    monkeypatch.setattr(content, "BLOCK_BYTES", 100)
    with progress.shown(said.append):
        write(tmp_path / "f.h5", images, owner_of(images), 7, partition=RECORD)
    write(tmp_path / "g.h5", images, owner_of(images), 7, partition=RECORD)
    assert said[:2] == ["writing train/x, in rows: 0 of 60", "writing train/x, in rows: 5 of 60, 0:00 left"]
    assert said[-1].startswith("hashing, in bytes: 1,744 of 1,744")
    assert {line.partition(":")[0] for line in said[:-1]} > {"writing test/y, in rows", "hashing, in bytes"}


def test_content_is_the_hash_of_the_data_alone(tmp_path: Path, images: Dataset) -> None:
    first = write(tmp_path / "a", images, owner_of(images), 7, partition=RECORD)
    assert write(tmp_path / "b", images, owner_of(images), 7, partition={}, name="other") == first
    for name in ("train/x", "train/y", "test/x", "test/y"):
        write(tmp_path / "c", images, owner_of(images), 7, partition=RECORD, overwrite=True)
        with h5py.File(tmp_path / "c", "r+") as file:
            file[name][3] = file[name][3] ^ 1
            assert content_hash(file) != first, name


def test_arrays_begin_on_cache_lines(tmp_path: Path, images: Dataset) -> None:
    write(tmp_path / "f.h5", images, owner_of(images), 7, partition=RECORD)
    with h5py.File(tmp_path / "f.h5") as file:
        for name in ("train/x", "train/y", "test/x", "test/y"):
            assert file[name].id.get_offset() % 64 == 0, name


def test_existing_file_is_kept(tmp_path: Path, images: Dataset) -> None:
    path = tmp_path / "f.h5"
    path.write_text("precious")
    with pytest.raises(InputError, match="exists already"):
        write(path, images, owner_of(images), 7, partition=RECORD)
    assert path.read_text() == "precious"
    write(path, images, owner_of(images), 7, partition=RECORD, overwrite=True)
    Federation.open(path).close()


def test_unwritable_places(tmp_path: Path, images: Dataset) -> None:
    (tmp_path / "file").write_text("")
    for path, message in ((tmp_path / "file" / "f.h5", "can't write here"), (tmp_path / "raw", "is a folder")):
        with pytest.raises(InputError, match=message):
            check_output(path, overwrite=False)  # before anything is read
        with pytest.raises(InputError, match=message):
            write(path, images, owner_of(images), 7, partition=RECORD)


def test_nothing_is_left_when_the_disk_gives_up(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the kernel refuses the writes in the same place."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, "-m", "hpcfed.cli.main", "prepare", "linear-regression", "-o", str(tmp_path / "f.h5")]
    ended = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 4, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "writing failed" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_digits() -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    dataset, again, other = digits.load(0), digits.load(0), digits.load(1)
    assert (dataset.x.shape, dataset.test_x.shape) == ((1438, 1, 8, 8), (359, 1, 8, 8))
    assert (dataset.x.min(), dataset.x.max()) == (0, 255)
    assert np.array_equal(dataset.rows, again.rows)
    assert not np.array_equal(dataset.rows, other.rows)
    assert np.bincount(np.concatenate([dataset.y, dataset.test_y])).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    assert dataset.normalization.mean[0] == pytest.approx(dataset.x.mean() / 255, abs=1e-4)


def test_linear_regression_is_scaled_as_the_authors_do() -> None:
    dataset = linear_regression.generate(0)
    features, targets = dataset.x.reshape(20, 30, 1000), dataset.y.reshape(20, 30)
    assert dataset.x.dtype == dataset.y.dtype == np.float64
    assert np.linalg.norm(features, axis=2) == pytest.approx(np.ones((20, 30)))
    assert np.linalg.norm(targets, axis=1) == pytest.approx(np.ones(20))
    assert not np.array_equal(dataset.x, linear_regression.generate(1).x)
    # Rows share their client's mean m_i, whose entries are as large as the noise: half of a row's square is common.
    common = np.linalg.norm(features.mean(axis=1), axis=1) ** 2
    assert common == pytest.approx(np.full(20, 0.5), abs=0.1)
    assert linear_regression.generate(0, dimension=20).x.shape == (600, 20)


def test_toy_is_equation_12() -> None:
    dataset = toy2d.generate()
    for w1, w2 in ((0.0, 3.0), (1.0, 2.0), (-0.5, 0.25)):
        squares = ((dataset.x @ np.array([w1, w2]))[:, None] - dataset.y)[:, 0] ** 2
        assert squares.tolist() == [(3 * w1 + w2 - 3) ** 2, (w1 + w2 - 3) ** 2]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """By the next that writes the same file: of dead processes here, and of other hosts' after a day."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host, day = socket.gethostname(), 86_400
    left = [f".f.h5.{host}.{ended.pid}.tmp", ".f.h5.elsewhere.7.tmp", f".f.h5.{ended.pid}.tmp"]
    kept = [f".f.h5.{host}.{os.getppid()}.tmp", ".f.h5.elsewhere.8.tmp", ".g.h5.elsewhere.7.tmp", ".f.h5.mine.tmp"]
    for name in (*left, *kept):
        (tmp_path / name).touch()
    for name in (*left[1:], ".g.h5.elsewhere.7.tmp"):
        os.utime(tmp_path / name, (time.time() - 2 * day,) * 2)
    dataset = Dataset("f", "regression", np.zeros((1, 2)), np.zeros(1))
    write(tmp_path / "f.h5", dataset, np.zeros(1, np.int64), 1, partition={})
    assert {path.name for path in tmp_path.iterdir()} == {"f.h5", *kept}
