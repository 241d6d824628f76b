"""IDX, the format of MNIST and its relatives: a big-endian header (magic, one size per axis), then unsigned bytes.

References: LeCun, Cortes, Burges, "The MNIST database of handwritten digits", section "File formats". Cohen, Afshar,
Tapson, van Schaik, "EMNIST", arXiv 1702.05373: its images are stored column by column, its letters count from 1.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import AGAIN, CHUNK, DataSource, Origin, Published, damaged, examine, locate, reading
from data_prep.spool import Spool
from hpcfed.data.federation import Standardization
from hpcfed.errors import InputError, nearest

UNSIGNED_BYTES = 8
PARTS = ("train-images", "train-labels", "t10k-images", "t10k-labels")
AXES = {"images": 3, "labels": 1}
NORMALIZATIONS = ("own", "none")
Opened = gzip.GzipFile | BufferedReader


@dataclass(frozen=True)
class Family:
    """One member of the MNIST family.

    Attributes:
        name, title: of the federation, and for display.
        origin: its published files, gzipped and plain.
        stems: part → the first words of its file's name; default: the part itself.
        normalization: mean and std of the pixels; None for pixels in [0, 1].
        num_classes, first_label: labels are first_label … first_label + num_classes - 1 in the files.
        transposed: images are stored column by column.
    """

    name: str
    title: str
    origin: Origin
    stems: Mapping[str, str] = field(default_factory=dict)
    normalization: Standardization | None = None
    num_classes: int = 10
    first_label: int = 0
    transposed: bool = False


def _of_mnist(title: str, url: str, *parts: tuple[int, str, str]) -> Origin:
    """Return an origin from size and md5 of the gzipped files, and md5 of the plain ones, in the order of `PARTS`."""
    names = [f"{part}-idx{AXES[part.split('-')[1]]}-ubyte" for part in PARTS]
    packed = (Published(f"{name}.gz", size, packed) for name, (size, packed, _) in zip(names, parts, strict=True))
    plain = (Published(name, md5=md5) for name, (_, _, md5) in zip(names, parts, strict=True) if md5)
    return Origin(title, url, (*packed, *plain), "the four files, gzipped or not")


MNIST = Family(
    name="mnist",
    title="MNIST",
    origin=_of_mnist(
        "MNIST: 60,000 and 10,000 digits, 28 × 28 (LeCun, Cortes, Burges)",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        (28_881, "d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        (1_648_877, "9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        (4_542, "ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    ),
    normalization=Standardization((0.1307,), (0.3081,)),
)
FASHION_MNIST = Family(
    name="fashion-mnist",
    title="Fashion-MNIST",
    origin=_of_mnist(
        "Fashion-MNIST: 60,000 and 10,000 articles, 28 × 28 (Xiao et al. 2017); in Debian: dataset-fashion-mnist",
        "https://github.com/zalandoresearch/fashion-mnist",
        (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d", ""),
        (29_515, "25c81989df183df01b3e8a0aad5dffbe", ""),
        (4_422_102, "bef4ecab320f06d8554ea6380940ec79", ""),
        (5_148, "bb300cfdad3c16e7a12a480ee83cd310", ""),
    ),
    normalization=Standardization((0.2860,), (0.3530,)),
)


def load(folder: str | Path, family: Family, *, normalization: str = "own", first: int | None = None) -> Dataset:
    """Read the four files of a family, gzipped or not, from `folder`: x (n, 1, H, W) uint8, y (n,) uint8.

    Args:
        folder, family: of the files.
        normalization: ``own``, the family's, or ``none``: pixels in [0, 1].
        first: so many images to train on, the file's first; None for all.

    Raises:
        InputError: a file is missing, damaged, of another format, or does not fit the others.
    """
    paths = find(Path(folder), family)
    arrays = {part: read(path, AXES[part.split("-")[1]]) for part, path in paths.items()}
    for images, labels in (("train-images", "train-labels"), ("t10k-images", "t10k-labels")):
        _check_pair(paths[images], arrays[images], paths[labels], arrays[labels], family)
    if arrays["train-images"].shape[1:] != arrays["t10k-images"].shape[1:]:
        expected, got = (str(arrays[part].shape[1:]) for part in ("train-images", "t10k-images"))
        raise InputError("images of another size", where=str(paths["t10k-images"]), expected=expected, got=got)
    files, verdict = examine(
        family.origin,
        [paths[part] for part in PARTS],
        title=family.title,
        published=lambda name: name.replace(".idx", "-idx"),
    )
    if normalization not in NORMALIZATIONS:
        remedy = nearest(normalization, NORMALIZATIONS)
        raise InputError(f"normalization of {family.name}", got=repr(normalization), remedy=remedy)
    if first is not None and not 0 < first <= len(arrays["train-images"]):
        expected = f"at most the {len(arrays['train-images']):,} images of {family.name}"
        raise InputError("--first", expected=expected, got=f"{first:,}")
    lowest = np.uint8(family.first_label)
    axes = (0, 1, 3, 2) if family.transposed else (0, 1, 2, 3)
    return Dataset(
        name=family.name,
        task="classification",
        x=arrays["train-images"][:first, None].transpose(axes),
        y=arrays["train-labels"][:first] - lowest,
        num_classes=family.num_classes,
        test_x=arrays["t10k-images"][:, None].transpose(axes),
        test_y=arrays["t10k-labels"] - lowest,
        normalization=None if normalization == "none" else family.normalization,
        source={"files": files, **({} if first is None else {"first": first})},
        remarks=(verdict,),
    )


def find(folder: Path, family: Family) -> dict[str, Path]:
    """Return the path of each part: ``train-images-idx3-ubyte`` or ``train-images.idx3-ubyte``, plain or ``.gz``.

    Raises:
        InputError: the folder or a file is missing; every missing file is named.
    """
    return locate(folder, {part: names(part, family) for part in PARTS})


def names(part: str, family: Family) -> list[str]:
    """Return the names that the file of a part may have."""
    stem, kind = family.stems.get(part, part), f"idx{AXES[part.split('-')[1]]}-ubyte"
    return [f"{stem}{joint}{kind}{end}" for joint in "-." for end in ("", ".gz")]


def read(path: Path, num_axes: int) -> np.ndarray:
    """Read one IDX file of unsigned bytes with `num_axes` axes; its header must agree with what follows it.

    A plain file is mapped, a gzipped one is unpacked to disk piece by piece, so that no header can exhaust memory.

    Raises:
        InputError: wrong magic, wrong number of axes, truncated, longer than its header says, or damaged gzip.
    """
    packed = path.suffix == ".gz"
    with reading(path):
        try:
            with gzip.open(path) if packed else path.open("rb") as file:
                shape = _header(path, file, num_axes)
                start, promised = file.tell(), math.prod(shape)
                if packed:
                    body = _unpack(file, promised + 1)
                elif path.stat().st_size > start:
                    body = np.memmap(path, np.uint8, "r", offset=start).view(np.ndarray)
                else:
                    body = np.empty(0, np.uint8)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise damaged(path, "truncated or damaged gzip file", error) from error
    if len(body) != promised:
        what = "truncated" if len(body) < promised else "longer than its header says"
        got = f"{len(body)}" if len(body) < promised or not packed else "more"
        raise InputError(what, where=str(path), expected=f"{promised} bytes of data", got=got, remedy=AGAIN)
    return body.reshape(shape)


def _header(path: Path, file: Opened, num_axes: int) -> tuple[int, ...]:
    magic = file.read(4)
    expected = bytes([0, 0, UNSIGNED_BYTES, num_axes])
    if magic != expected:
        what = "truncated" if len(magic) < 4 else "not an IDX file of this kind: wrong magic number"
        raise InputError(what, where=str(path), expected=f"0x{expected.hex()}", got=f"0x{magic.hex()}", remedy=AGAIN)
    sizes = file.read(4 * num_axes)
    if len(sizes) < 4 * num_axes:
        raise InputError("truncated in its header", where=str(path), remedy=AGAIN)
    return struct.unpack(f">{num_axes}I", sizes)


def _unpack(file: Opened, limit: int) -> np.ndarray:
    spool = Spool((), np.uint8)
    while spool.num_rows < limit and (piece := file.read(min(CHUNK, limit - spool.num_rows))):
        spool.append(np.frombuffer(piece, np.uint8))
    return spool.finish()


def _check_pair(images_path: Path, images: np.ndarray, labels_path: Path, labels: np.ndarray, family: Family) -> None:
    if not images.size:
        raise InputError("holds no images", where=str(images_path), remedy=AGAIN)
    if len(images) != len(labels):
        what = f"does not fit {images_path.name}"
        raise InputError(what, where=str(labels_path), expected=f"{len(images)} labels", got=str(len(labels)))
    first, last = family.first_label, family.first_label + family.num_classes - 1
    wrong = labels[(labels < first) | (labels > last)]
    if len(wrong):
        what = f"not the labels of {family.title}"
        raise InputError(what, where=str(labels_path), expected=f"labels {first} … {last}", got=str(wrong[0]))


def _load_mnist(raw: str | Path, *, normalization: str = "own", first: int | None = None) -> Dataset:
    return load(raw, MNIST, normalization=normalization, first=first)


def _load_fashion(raw: str | Path, *, normalization: str = "own", first: int | None = None) -> Dataset:
    return load(raw, FASHION_MNIST, normalization=normalization, first=first)


SOURCES = {
    "mnist": DataSource(_load_mnist, MNIST.origin),
    "fashion-mnist": DataSource(_load_fashion, FASHION_MNIST.origin),
}
