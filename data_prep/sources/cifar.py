"""CIFAR-10 and CIFAR-100, binary and python versions: 32 × 32 colour images, rows of red, then green, then blue.

    binary   records of 1 (CIFAR-10) or 2 (coarse, fine) label bytes and 3,072 bytes of pixels
    python   pickled dicts of ``data`` (n, 3072) uint8 and ``labels`` or ``fine_labels``; see `pickled`

References: Krizhevsky, "Learning multiple layers of features from tiny images", 2009; the CIFAR page. Constants of the
normalization: FedExP, util_data.py:141 (both sets); FedDyn, utils_dataset.py:21-107 (CIFAR-100's own). ``interleaved``:
pfl-research, benchmarks/dataset/cifar10/download_preprocess.py:57.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import (
    AGAIN,
    DataSource,
    Origin,
    Published,
    check_folder,
    damaged,
    examine,
    listed,
    locate,
    reading,
)
from data_prep.sources.pickled import read_pickle
from data_prep.spool import Spool
from hpcfed.data.federation import Standardization
from hpcfed.errors import InputError, counted, nearest

URL = "https://www.cs.toronto.edu/~kriz/cifar.html"
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
MAX_LABEL = np.iinfo(np.uint8).max
FEDEXP = Standardization((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
FEDDYN = Standardization((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
OF_100: Mapping[str, Standardization] = {"feddyn": FEDDYN, "fedexp": FEDEXP}
INTERLEAVED = Standardization((0.4734, 0.4734, 0.4734), (0.2516, 0.2516, 0.2516))
"""Of the training set whose bytes are taken in threes, so that each channel has every third byte of each colour."""


@dataclass(frozen=True)
class Version:
    """One of the two sets.

    Attributes:
        name, title: of the federation, and for display.
        origin: its published files.
        num_classes: of the labels, which are the fine ones of CIFAR-100.
        label_bytes: number of label bytes before the pixels of a record; the last one is the label.
        binary, python: the files of the two versions, the test set last, and the folder they are unpacked to.
        labels: the key of the labels in the python version.
        normalization: of the training set, after scaling to [0, 1].
    """

    name: str
    title: str
    origin: Origin
    num_classes: int
    label_bytes: int
    binary: tuple[str, ...]
    python: tuple[str, ...]
    folders: tuple[str, str]
    labels: str
    normalization: Standardization


_TEN = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_LAYOUT = "the unpacked files of the binary or of the python version, or the folder they are unpacked to"
CIFAR10 = Version(
    name="cifar10",
    title="CIFAR-10",
    origin=Origin(
        "CIFAR-10: 50,000 and 10,000 colour images of 10 classes, 32 × 32 (Krizhevsky 2009)",
        URL,
        (
            Published(
                "cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530", unpack="unpack it; or"
            ),
            *(Published(f"{name}.bin", 30_730_000) for name in _TEN),
            Published("cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a", unpack="unpack it"),
            Published("data_batch_1", 31_035_704, "c99cafc152244af753f735de768cd75f"),
            Published("data_batch_2", 31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
            Published("data_batch_3", 31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
            Published("data_batch_4", 31_035_696, "634d18415352ddfa80567beed471001a"),
            Published("data_batch_5", 31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
            Published("test_batch", 31_035_526, "40351d587109b95175f43aff81a1287e"),
        ),
        _LAYOUT,
    ),
    num_classes=10,
    label_bytes=1,
    binary=tuple(f"{name}.bin" for name in _TEN),
    python=_TEN,
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    labels="labels",
    normalization=FEDEXP,
)
CIFAR100 = Version(
    name="cifar100",
    title="CIFAR-100",
    origin=Origin(
        "CIFAR-100: 50,000 and 10,000 colour images of 100 classes, 32 × 32 (Krizhevsky 2009)",
        URL,
        (
            Published(
                "cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8", unpack="unpack it; or"
            ),
            Published("train.bin", 153_700_000),
            Published("test.bin", 30_740_000),
            Published("cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85", unpack="unpack it"),
            Published("train", md5="16019d7e3df5f24257cddd939b257f8d"),
            Published("test", md5="f0ef6b0ae62326f3e7ffdfab6717acfc"),
        ),
        _LAYOUT,
    ),
    num_classes=100,
    label_bytes=2,
    binary=("train.bin", "test.bin"),
    python=("train", "test"),
    folders=("cifar-100-binary", "cifar-100-python"),
    labels="fine_labels",
    normalization=FEDDYN,
)


Reader = Callable[[Path, Version], tuple[np.ndarray, np.ndarray]]


def load10(
    raw: str | Path, *, incomplete: bool = False, first: int | None = None, interleaved: bool = False
) -> Dataset:
    """Read CIFAR-10, or its `first` training images and a quarter as many to test on; see `load`.

    Args:
        raw, incomplete: see `load`.
        first: number of training images; None: all, and the whole test set.
        interleaved: take an image's bytes in threes, one for each channel, as pfl-research's benchmark does, though
            they are planes of red, green and blue: a row of the result holds three rows of one colour.
    """
    normalization = INTERLEAVED if interleaved else CIFAR10.normalization
    dataset = load(Path(raw), CIFAR10, normalization, incomplete, interleaved)
    if first is None or dataset.test_x is None or dataset.test_y is None:
        return dataset
    if not 4 <= first <= len(dataset.x):
        raise InputError("first of cifar10", expected=f"4 to {len(dataset.x)}", got=str(first))
    train, test = slice(first), slice(first // 4)
    return replace(
        dataset,
        x=dataset.x[train],
        y=dataset.y[train],
        test_x=dataset.test_x[test],
        test_y=dataset.test_y[test],
        source={**dataset.source, "first": first},
    )


def load100(raw: str | Path, *, incomplete: bool = False, normalization: str = "feddyn") -> Dataset:
    """Read CIFAR-100 with its fine labels, normalized by its own constants, or as FedExP by those of CIFAR-10."""
    if normalization not in OF_100:
        raise InputError("normalization of cifar100", got=repr(normalization), remedy=nearest(normalization, OF_100))
    return load(Path(raw), CIFAR100, OF_100[normalization], incomplete)


def load(
    folder: Path, version: Version, normalization: Standardization, incomplete: bool = False, interleaved: bool = False
) -> Dataset:
    """Read a set from its version in `folder`, the binary one if both are there: x (n, 3, 32, 32) uint8, y (n,).

    Args:
        folder: the unpacked files, or the parent of their folder.
        version: CIFAR-10 or CIFAR-100.
        normalization: to be stored.
        incomplete: accept any ``data_batch*.bin`` and ``test_batch*.bin`` of the binary version.
        interleaved: see `load10`.

    Raises:
        InputError: files are missing or damaged, or have other contents.
    """
    check_folder(folder)
    paths, read = _any_binary(folder, version) if incomplete else _complete(folder, version)
    x, y = _collect(paths[:-1], version, read)
    test_x, test_y = _collect(paths[-1:], version, read)
    files, verdict = examine(version.origin, paths, title=version.title)
    source: dict[str, Any] = {"files": files}
    remarks = [verdict]
    if interleaved:
        x, test_x = _in_threes(x), _in_threes(test_x)
        source["interleaved"] = True
        remarks.append("bytes of an image taken in threes, as pfl-research does: its colours lie one below the other")
    return Dataset(
        name=version.name,
        task="classification",
        x=x,
        y=y,
        num_classes=version.num_classes,
        test_x=test_x,
        test_y=test_y,
        normalization=normalization,
        source=source,
        remarks=tuple(remarks),
    )


def _in_threes(x: np.ndarray) -> np.ndarray:
    """Return images (n, 3, 32, 32) with byte 3k + c as pixel k of channel c, where byte 1024 c + k was; a view."""
    channels, rows, columns = SHAPE
    return x.reshape(-1, rows, columns, channels).transpose(0, 3, 1, 2)


def _complete(folder: Path, version: Version) -> tuple[list[Path], Reader]:
    """Return the files of a version, the test set last, and their reader."""
    binary, python = zip((version.binary, version.python), version.folders, strict=True)
    use_python = _some(folder, *python) and not _some(folder, *binary)
    names, inside = python if use_python else binary
    paths = locate(folder, {name: (name,) for name in names}, inside=inside)
    return list(paths.values()), _read_python if use_python else _read_binary


def _some(folder: Path, names: tuple[str, ...], inside: str) -> bool:
    return any((place / name).is_file() for place in (folder, folder / inside) for name in names)


def _any_binary(folder: Path, version: Version) -> tuple[list[Path], Reader]:
    train_stem, test_stem = (version.binary[i].split(".")[0].rstrip("_12345") for i in (0, -1))
    train, test = (listed(folder, f"{stem}*.bin") for stem in (train_stem, test_stem))
    if not train or len(test) != 1:
        expected, got = f"{train_stem}*.bin and one {test_stem}*.bin", f"{len(train)} and {counted(len(test), 'file')}"
        raise InputError("too little to read", where=str(folder), expected=expected, got=got)
    return train + test, _read_binary


def _collect(paths: list[Path], version: Version, read: Reader) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, 3, 32, 32) uint8, on disk, and y (n,) uint8 of the files, concatenated."""
    spool, labels = Spool(SHAPE, np.uint8), []
    for path in paths:
        pixels, own = read(path, version)
        if own.max() >= version.num_classes:
            expected = f"labels 0 … {version.num_classes - 1}"
            what = f"not the labels of {version.title}"
            raise InputError(what, where=str(path), expected=expected, got=str(own.max()))
        spool.append(pixels)
        labels.append(own)
    return spool.finish(), np.concatenate(labels)


def _read_binary(path: Path, version: Version) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (n, 3072) and labels (n,), both uint8, of a file of records, which is mapped."""
    record = version.label_bytes + PIXELS
    with reading(path):
        size = path.stat().st_size
        if not size or size % record:
            what = "truncated, or no records of this set"
            expected = f"a multiple of {record} bytes"
            raise InputError(what, where=str(path), expected=expected, got=f"{size} bytes", remedy=AGAIN)
        records = np.memmap(path, np.uint8, "r").view(np.ndarray).reshape(-1, record)
    return records[:, version.label_bytes :], records[:, version.label_bytes - 1].copy()


def _read_python(path: Path, version: Version) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (n, 3072) and labels (n,), both uint8, of a pickled dict."""
    content = read_pickle(path)
    pixels, labels = content.get("data"), content.get(version.labels)
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS or not len(pixels):
        raise damaged(path, f"not a batch of {version.title}: its data are no (n, {PIXELS}) uint8")
    if (
        not isinstance(labels, list)
        or len(labels) != len(pixels)
        or not all(type(label) is int and 0 <= label <= MAX_LABEL for label in labels)
    ):
        raise damaged(path, f"not a batch of {version.title}: its {version.labels} are not {len(pixels)} labels")
    return pixels, np.array(labels, np.uint8)


SOURCES = {"cifar10": DataSource(load10, CIFAR10.origin), "cifar100": DataSource(load100, CIFAR100.origin)}
