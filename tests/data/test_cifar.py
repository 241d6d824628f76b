"""CIFAR: both versions sample for sample, and pickles that are taken apart and never run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import cifar
from data_prep.sources.pickled import read_pickle
from hpcfed.errors import InputError
from tests.data import raw_formats as raw
from tests.shared_files import shared_folder

VERSIONS = {"cifar10": (cifar.CIFAR10, cifar.load10), "cifar100": (cifar.CIFAR100, cifar.load100)}
WRITERS = {
    "binary": raw.write_cifar_binary,
    "python 2": raw.write_cifar_python,
    "python 3": lambda *arguments: raw.write_cifar_python(*arguments, python=3),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("how", WRITERS)
@pytest.mark.parametrize("name", VERSIONS)
def test_round_trip(tmp_path: Path, name: str, how: str, inside: bool) -> None:
    version, load = VERSIONS[name]
    folder = tmp_path / version.folders[how != "binary"] if inside else tmp_path
    batches = list(WRITERS[how](folder, version).values())
    dataset = load(tmp_path)
    train = np.concatenate([pixels for pixels, _ in batches[:-1]])
    np.testing.assert_array_equal(dataset.x, train.reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(dataset.y, np.concatenate([labels for _, labels in batches[:-1]]))
    np.testing.assert_array_equal(dataset.test_x, batches[-1][0].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(dataset.test_y, batches[-1][1])
    assert (dataset.num_classes, dataset.x.dtype, dataset.y.dtype) == (version.num_classes, np.uint8, np.uint8)
    assert dataset.remarks[0].startswith(
        f"md5: not the published files of {version.title}: {'data_' if name[5:] == '10' else 't'}"
    )


def test_rows_of_red_come_first(tmp_path: Path) -> None:
    raw.write_cifar_binary(tmp_path, cifar.CIFAR10)
    content = (tmp_path / "test_batch.bin").read_bytes()
    image = cifar.load10(tmp_path).test_x[0]
    assert image[0, 0, :3].tolist() == list(content[1:4])
    assert image[0, 1, 0] == content[1 + 32]
    assert image[2, 31, 31] == content[3072]


def test_interleaved_takes_bytes_in_threes(tmp_path: Path) -> None:
    raw.write_cifar_binary(tmp_path, cifar.CIFAR10)
    pixels = (tmp_path / "test_batch.bin").read_bytes()[1:]
    dataset = cifar.load10(tmp_path, interleaved=True)
    for channel, row, column in ((0, 0, 0), (2, 0, 1), (1, 31, 30)):
        assert dataset.test_x[0, channel, row, column] == pixels[3 * (32 * row + column) + channel]
    assert dataset.source["interleaved"] is True
    assert "as pfl-research does" in dataset.remarks[-1]


def test_constants_are_those_of_the_papers(tmp_path: Path) -> None:
    raw.write_cifar_binary(tmp_path, cifar.CIFAR100)
    assert cifar.load100(tmp_path).normalization.mean == (0.5071, 0.4867, 0.4408)
    assert cifar.load100(tmp_path, normalization="fedexp").normalization.std == (0.247, 0.243, 0.262)
    with pytest.raises(InputError, match="did you mean 'fedexp'"):
        cifar.load100(tmp_path, normalization="fedxp")


def test_missing_batches_are_named(tmp_path: Path) -> None:
    raw.write_cifar_binary(tmp_path, cifar.CIFAR10)
    (tmp_path / "data_batch_3.bin").unlink()
    (tmp_path / "test_batch.bin").rename(tmp_path / "test_batch.first.bin")
    with pytest.raises(InputError, match=r"missing data_batch_3.bin, test_batch.bin; put them into that folder"):
        cifar.load10(tmp_path)
    few = cifar.load10(tmp_path, incomplete=True, first=8)
    assert (few.x.shape, few.test_x.shape) == ((8, 3, 32, 32), (2, 3, 32, 32))
    with pytest.raises(InputError, match="first of cifar10: expected 4 to "):
        cifar.load10(tmp_path, incomplete=True, first=10**6)
    dataset = cifar.load10(tmp_path, incomplete=True)
    assert (len(dataset.x), len(dataset.test_x)) == (4 * raw.CIFAR_BATCH, raw.CIFAR_BATCH)
    (tmp_path / "test_batch.first.bin").unlink()
    with pytest.raises(InputError, match=r"expected data_batch\*.bin and one test_batch\*.bin, got 4 and 0 files"):
        cifar.load10(tmp_path, incomplete=True)


def test_damaged_records(tmp_path: Path) -> None:
    raw.write_cifar_binary(tmp_path, cifar.CIFAR10)
    path = tmp_path / "data_batch_2.bin"
    content = path.read_bytes()
    for changed, message in (
        (content[:-1], "a multiple of 3073 bytes, got 18437 bytes"),
        (b"", "got 0 bytes"),
        (b"\x0a" + content[1:], "expected labels 0 … 9, got 10"),
    ):
        path.write_bytes(changed)
        with pytest.raises(InputError, match=message):
            cifar.load10(tmp_path)


class Evil:
    """Makes a file when it is unpickled in the ordinary way."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_code_is_run(tmp_path: Path, protocol: int) -> None:
    raw.write_cifar_python(tmp_path, cifar.CIFAR10)
    canary = tmp_path / "canary"
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": Evil(f"touch {canary}")}, protocol))
    with pytest.raises(InputError, match=r"a pickle that would run \w+.system; it was not run"):
        cifar.load10(tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "would run builtins.eval"),
        (b"\x80\x02(S'touch x'\nios\nsystem\n.", "would run os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "would run os.system"),
        (b"\x80\x02}r\xff\xff\xff\xffN.", "not a pickle, or damaged"),  # a memo of 2^32 places, which pickle would make
        (b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.", "not a pickle, or damaged"),  # 2^60 bytes promised
        (b"\x80\x02T\xff\xff\xff\x7fabc.", "not a pickle, or damaged"),
        (
            b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n)R(K\x01J\xff\xff\xff\x7f\x85NNNtbu.",
            "damaged array",
        ),
        (b"", "not a pickle, or damaged"),
        (b"<html>not found</html>", "not a pickle, or damaged"),
        (b"].", "holds no dict"),
        (b"e.", "not a pickle, or damaged"),
        (b"\x80\x02}(U\x01a", "not a pickle, or damaged"),
        (b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.", "tuples more than 64 deep"),  # to hash them is a crash
        (b"\x80\x02}K\x01K\x01s.", "holds no dict of texts"),
        (  # 10,000 times the same text: 5 GB
            b"\x80\x02}U\x01b](c_codecs\nencode\nq\0X\x20\xa1\x07\0"
            + b"a" * 500_000
            + b"U\x06latin1\x86q\3R"
            + b"h\0h\3R" * 10_000
            + b"es.",
            "more bytes than the file has",
        ),
    ],
)
def test_pickles_of_others(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_pickle(path)


def test_a_batch_of_another_set(tmp_path: Path) -> None:
    raw.write_cifar_python(tmp_path, cifar.CIFAR10)
    pixels = np.zeros((2, 3072), np.uint8)
    for content, message in (
        (raw.python2_pickle(pixels, [0, 1], "fine_labels"), "labels are not 2 labels"),
        (raw.python2_pickle(pixels, [0], "labels"), "labels are not 2 labels"),
        (raw.python2_pickle(pixels, [0, 300], "labels"), "labels are not 2 labels"),
        (raw.python2_pickle(pixels, [0, 10], "labels"), "expected labels 0 … 9, got 10"),
        (raw.python2_pickle(pixels[:, :100], [0, 1], "labels"), "no \\(n, 3072\\) uint8"),
    ):
        (tmp_path / "data_batch_4").write_bytes(content)
        with pytest.raises(InputError, match=message):
            cifar.load10(tmp_path)


def test_real_records() -> None:
    folder = shared_folder("data/CIFAR-10")
    if folder is None:
        pytest.skip("needs CIFAR-10 records in $HPCFED_SHARED/data/CIFAR-10")
    dataset = cifar.load10(folder, incomplete=True)
    assert (dataset.x.shape, dataset.test_x.shape) == ((4000, 3, 32, 32), (1000, 3, 32, 32))
    assert dataset.y[:5].tolist() == [6, 9, 9, 4, 1]  # frog, truck, truck, deer, automobile, as everywhere
    assert dataset.test_y[:5].tolist() == [3, 8, 8, 0, 6]
    mean = dataset.x.mean(axis=(0, 2, 3)) / 255
    np.testing.assert_allclose(mean, dataset.normalization.mean, atol=0.01)
    threes = cifar.load10(folder, incomplete=True, interleaved=True)
    np.testing.assert_allclose(threes.x.mean(axis=(0, 2, 3)) / 255, threes.normalization.mean, atol=0.01)
    np.testing.assert_allclose(threes.x.std(axis=(0, 2, 3)) / 255, threes.normalization.std, atol=0.01)
    rows = dataset.x.astype(np.float64)
    along, across = np.abs(np.diff(rows, axis=3)).mean(), np.abs(np.diff(rows, axis=2)).mean()
    assert max(along, across) < 20  # neighbouring pixels are alike: 32 × 32 is cut right
