"""IDX files: round trips, and every way a raw file can be wrong."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import idx
from hpcfed.errors import InputError
from tests.data.raw import idx_bytes, write_idx_folder
from tests.shared_files import shared_folder


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("joint", ["-", "."])
def test_round_trip(tmp_path: Path, end: str, joint: str) -> None:
    arrays = write_idx_folder(tmp_path, end=end, joint=joint)
    dataset = idx.load(tmp_path, idx.MNIST)
    assert np.array_equal(dataset.x, arrays["train-images"][:, None])
    assert np.array_equal(dataset.y, arrays["train-labels"])
    assert np.array_equal(dataset.test_x, arrays["t10k-images"][:, None])
    assert np.array_equal(dataset.test_y, arrays["t10k-labels"])
    assert dataset.remarks[0].startswith("md5: not the published files of MNIST: train-images")


def test_the_first_images_without_normalization(tmp_path: Path) -> None:
    arrays = write_idx_folder(tmp_path)
    whole = idx.load(tmp_path, idx.MNIST)
    part = idx.load(tmp_path, idx.MNIST, normalization="none", first=6)
    assert np.array_equal(part.x, arrays["train-images"][:6, None])
    assert np.array_equal(part.y, arrays["train-labels"][:6])
    assert np.array_equal(part.test_x, whole.test_x)
    assert (part.normalization, whole.normalization) == (None, idx.MNIST.normalization)
    assert part.source["first"] == 6
    for options, says in (
        ({"first": 61}, "--first.*at most the 60 images"),
        ({"normalization": "non"}, "did you mean"),
    ):
        with pytest.raises(InputError, match=says):
            idx.load(tmp_path, idx.MNIST, **options)


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_idx_folder(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(InputError, match=r"missing train-labels-idx1-ubyte\[.gz\], t10k-images-idx3-ubyte\[.gz\]"):
        idx.load(tmp_path, idx.MNIST)
    with pytest.raises(InputError, match="no such folder"):
        idx.load(tmp_path / "absent", idx.MNIST)


MUTATIONS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (lambda data: b"\x00\x00\x0d\x03" + data[4:], "wrong magic number"),
    "labels for images": (lambda data: b"\x00\x00\x08\x01" + data[4:], "expected 0x00000803, got 0x00000801"),
    "cut": (lambda data: data[:-7], "truncated: expected 1200 bytes of data, got 1193"),
    "cut in the header": (lambda data: data[:9], "truncated in its header"),
    "cut in the magic": (lambda data: data[:2], "truncated"),
    "only a header": (lambda data: data[:16], "truncated: expected 1200 bytes of data, got 0"),
    "empty": (lambda data: b"", "truncated"),
    "longer": (lambda data: data + b"\x00", "longer than its header says"),
    "exabytes promised": (lambda data: data[:4] + b"\xff" * 12 + data[16:], "truncated"),
    "no images": (lambda data: data[:4] + b"\x00" * 4 + data[8:16], "holds no images"),
    "fewer images": (lambda data: idx_bytes(np.zeros((59, 5, 4), np.uint8)), "expected 59 labels, got 60"),
    "other size": (lambda data: idx_bytes(np.zeros((60, 4, 4), np.uint8)), "images of another size"),
}


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_damaged_images(tmp_path: Path, mutation: str, end: str) -> None:
    write_idx_folder(tmp_path, end=end)
    path = tmp_path / f"train-images-idx3-ubyte{end}"
    change, message = MUTATIONS[mutation]
    data = change(gzip.decompress(path.read_bytes()) if end else path.read_bytes())
    path.write_bytes(gzip.compress(data) if end else data)
    with pytest.raises(InputError, match=message) as caught:
        idx.load(tmp_path, idx.MNIST)
    assert "-ubyte" in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    write_idx_folder(tmp_path, end=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    else:
        data = bytearray(b"<html>not found</html>")
    path.write_bytes(data)
    with pytest.raises(InputError, match="truncated or damaged gzip"):
        idx.load(tmp_path, idx.MNIST)


def test_labels_of_another_family(tmp_path: Path) -> None:
    write_idx_folder(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.full(60, 46, np.uint8)))
    with pytest.raises(InputError, match=r"not the labels of MNIST: expected labels 0 … 9, got 46"):
        idx.load(tmp_path, idx.MNIST)


def test_folder_in_place_of_a_file_is_missing(tmp_path: Path) -> None:
    write_idx_folder(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    (tmp_path / "train-labels-idx1-ubyte").mkdir()
    with pytest.raises(InputError, match="missing train-labels"):
        idx.load(tmp_path, idx.MNIST)


def test_canonical_mnist() -> None:
    folder = shared_folder("data/MNIST")
    if folder is None:
        pytest.skip("needs MNIST in $HPCFED_SHARED/data/MNIST")
    dataset = idx.load(folder, idx.MNIST)
    assert dataset.remarks == ("md5: all 4 files are the published MNIST",)
    assert (dataset.x.shape, dataset.test_x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert round(dataset.x.mean() / 255, 4) == dataset.normalization.mean[0]
    assert round(dataset.x.std() / 255, 4) == dataset.normalization.std[0]
