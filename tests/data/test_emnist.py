"""EMNIST from IDX and from MATLAB files: upright images, labels from 0, and what is refused."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import emnist, matlab
from hpcfed.errors import InputError
from tests.data import raw_formats as raw

FORMATS = ("idx", "mat", "plain mat")


def written(folder: Path, split: str, how: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    _, _, num_classes, first = emnist.SPLITS[split]
    parts = raw.emnist(split, num_classes, first)
    if how == "idx":
        raw.write_emnist_idx(folder, split, parts)
    else:
        raw.write_emnist_mat(folder, split, parts, compress=how == "mat")
    return parts


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("split", emnist.SPLITS)
def test_round_trip(tmp_path: Path, split: str, how: str) -> None:
    parts = written(tmp_path, split, how)
    _, _, num_classes, first = emnist.SPLITS[split]
    dataset = emnist.load(tmp_path, split)
    assert dataset.num_classes == num_classes
    for (images, labels), x, y in zip(
        (parts["train"], parts["test"]), (dataset.x, dataset.test_x), (dataset.y, dataset.test_y), strict=True
    ):
        np.testing.assert_array_equal(x, images[:, None])
        np.testing.assert_array_equal(y, labels - first)
        assert x.dtype == y.dtype == np.uint8
    assert dataset.source["files"][0]["name"].startswith(f"emnist-{split}")


@pytest.mark.parametrize("how", ["idx", "mat"])
def test_feddyns_ten_letters(tmp_path: Path, how: str) -> None:
    parts = written(tmp_path, "letters", how)
    dataset = emnist.load_letters(tmp_path, classes=10)
    for (images, labels), x, y in (
        (parts["train"], dataset.x, dataset.y),
        (parts["test"], dataset.test_x, dataset.test_y),
    ):
        np.testing.assert_array_equal(x, images[labels <= 10][:, None])
        np.testing.assert_array_equal(y, labels[labels <= 10] - 1)
    np.testing.assert_array_equal(dataset.rows, np.flatnonzero(parts["train"][1] <= 10))
    assert (dataset.num_classes, dataset.source["classes"]) == (10, 10)
    scaled = parts["train"][0][parts["train"][1] <= 10] / 255
    found = emnist.load_letters(tmp_path, classes=10, normalization="feddyn").normalization
    assert dataset.normalization is None
    assert (found.mean[0], found.std[0]) == pytest.approx((scaled.mean(), scaled.std()))
    with pytest.raises(InputError, match="expected at most 26, got 27"):
        emnist.load_letters(tmp_path, classes=27)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing emnist-digits-train-images-idx3-ubyte\[.gz\], emnist-digits-train"):
        emnist.load(tmp_path, "digits")
    with pytest.raises(InputError, match="no such folder"):
        emnist.load(tmp_path / "absent", "digits")


def test_labels_of_another_split(tmp_path: Path) -> None:
    written(tmp_path, "byclass", "mat").clear()
    (tmp_path / "emnist-byclass.mat").rename(tmp_path / "emnist-digits.mat")
    with pytest.raises(InputError, match=r"dataset.train.labels are not those of EMNIST digits: expected 0 … 9"):
        emnist.load(tmp_path, "digits")


def test_big_endian(tmp_path: Path) -> None:
    """Only the numbers' order differs: swap it in an uncompressed file whose elements all are of 4 bytes or of one."""
    parts = {part: (images, labels.astype(np.int32)) for part, (images, labels) in raw.emnist("digits", 10, 0).items()}
    little = raw.write_emnist_mat(tmp_path, "digits", parts, compress=False)
    expected = matlab.read_emnist(little)
    little.write_bytes(_swapped(little.read_bytes()))
    for part, (images, labels) in matlab.read_emnist(little).items():
        np.testing.assert_array_equal(images, expected[part][0])
        np.testing.assert_array_equal(labels, expected[part][1])


def _swapped(content: bytes) -> bytes:
    """Return a little-endian .mat file as a big-endian machine would have written it."""
    widths = {kind: np.dtype(code).itemsize for kind, code in matlab.NUMBERS.items()}

    def element(at: int) -> tuple[bytes, int]:
        kind, size = struct.unpack_from("<2I", content, at)
        if kind >> 16:
            small, count = kind & 0xFFFF, kind >> 16
            data = numbers(content[at + 4 : at + 8], widths[small])
            return struct.pack(">2H", count, small) + data, at + 8
        start, stop = at + 8, at + 8 + size
        if kind == matlab.MATRIX:
            body = b""
            while start < stop:
                more, start = element(start)
                body += more
        else:
            body = numbers(content[start:stop], widths[kind])
        padding = -size % 8
        return struct.pack(">2I", kind, size) + body + b"\0" * padding, stop + padding

    def numbers(data: bytes, width: int) -> bytes:
        return np.frombuffer(data, f"<u{width}").byteswap().tobytes()

    return content[:124] + b"\x01\x00MI" + element(128)[0]


def repacked(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes inside the zlib stream of a .mat file."""
    content = path.read_bytes()
    inner = zlib.decompress(content[136:])
    assert old in inner
    packed = zlib.compress(inner.replace(old, new, 1))
    path.write_bytes(content[:128] + struct.pack("<2I", 15, len(packed)) + packed)


SHAPE = struct.pack("<2I2i", 5, 8, 40, 784)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"dataset", b"dataser", "no struct dataset, but 'dataser'"),
        (SHAPE, struct.pack("<2I2i", 5, 8, 2**31 - 1, 784), "31360 bytes for a matrix"),
        (SHAPE, struct.pack("<2I2i", 5, 8, -40, 784), "a shape of"),
        (SHAPE, struct.pack("<2I2i", 5, 8, 20, 1568), "expected (n, 784) images"),
        (SHAPE, struct.pack("<2I2i", 5, 2**32 - 8, 40, 784), "an element of type 5"),
        (struct.pack("<2I", 2, 40 * 784), struct.pack("<2I", 2, 2**32 - 8), "4294967288 bytes for a matrix"),
        (struct.pack("<2I", 2, 40 * 784), struct.pack("<2I", 77, 40 * 784), "numbers of type 77"),
        (b"images\0", b"pixels\0", "lacks dataset.train.images"),
    ],
)
def test_damaged_matlab_files(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    written(tmp_path, "digits", "mat")
    repacked(tmp_path / "emnist-digits.mat", old, new)
    with pytest.raises(InputError) as caught:
        emnist.load(tmp_path, "digits")
    assert message in str(caught.value)


@pytest.mark.parametrize("keep", [0, 100, 132, 500, -4])
def test_cut_matlab_files(tmp_path: Path, keep: int) -> None:
    written(tmp_path, "digits", "mat")
    path = tmp_path / "emnist-digits.mat"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="not EMNIST's MATLAB file of level 5, or damaged"):
        emnist.load(tmp_path, "digits")
