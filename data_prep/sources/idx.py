"""IDX, the format of MNIST and its relatives: a big-endian header (magic, one size per axis), then unsigned bytes.

Reference: LeCun, Cortes, Burges, "The MNIST database of handwritten digits", section "File formats".
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np

from data_prep.dataset import Dataset
from hpcfed.data.format import Normalization
from hpcfed.errors import InputError

UNSIGNED_BYTES = 8
PARTS = ("train-images", "train-labels", "t10k-images", "t10k-labels")
AXES = {"images": 3, "labels": 1}
CHUNK = 1 << 20
Opened = gzip.GzipFile | BufferedReader


@dataclass(frozen=True)
class Family:
    """One member of the MNIST family: its published checksums (of the gzipped and the plain files) and statistics."""

    name: str
    title: str
    md5: Mapping[str, tuple[str, ...]]
    normalization: Normalization
    num_classes: int = 10


MNIST = Family(
    name="mnist",
    title="MNIST",
    md5={
        "train-images": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        "train-labels": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        "t10k-images": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        "t10k-labels": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    },
    normalization=Normalization((0.1307,), (0.3081,)),
)
FASHION_MNIST = Family(
    name="fashion-mnist",
    title="Fashion-MNIST",
    md5={
        "train-images": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d",),
        "train-labels": ("25c81989df183df01b3e8a0aad5dffbe",),
        "t10k-images": ("bef4ecab320f06d8554ea6380940ec79",),
        "t10k-labels": ("bb300cfdad3c16e7a12a480ee83cd310",),
    },
    normalization=Normalization((0.2860,), (0.3530,)),
)


def load(folder: str | Path, family: Family) -> Dataset:
    """Read the four files of a family, gzipped or not, from `folder`: x (n, 1, H, W) uint8, y (n,) uint8.

    Raises:
        InputError: a file is missing, damaged, of another kind, or does not fit the others.
    """
    paths = find(Path(folder))
    arrays = {part: read(path, AXES[part.split("-")[1]]) for part, path in paths.items()}
    for images, labels in (("train-images", "train-labels"), ("t10k-images", "t10k-labels")):
        _check_pair(paths[images], arrays[images], paths[labels], arrays[labels], family)
    if arrays["train-images"].shape[1:] != arrays["t10k-images"].shape[1:]:
        expected, got = (str(arrays[part].shape[1:]) for part in ("train-images", "t10k-images"))
        raise InputError("images of another size", where=str(paths["t10k-images"]), expected=expected, got=got)
    digests = {part: _digests(path) for part, path in paths.items()}
    files = [{"name": paths[part].name, "sha256": digests[part][1]} for part in PARTS]
    return Dataset(
        name=family.name,
        task="classification",
        x=arrays["train-images"][:, None],
        y=arrays["train-labels"],
        num_classes=family.num_classes,
        test_x=arrays["t10k-images"][:, None],
        test_y=arrays["t10k-labels"],
        normalization=family.normalization,
        source={"files": files},
        remarks=(_verdict(paths, {part: digests[part][0] for part in PARTS}, family),),
    )


def find(folder: Path) -> dict[str, Path]:
    """Return the path of each part: ``train-images-idx3-ubyte`` or ``train-images.idx3-ubyte``, plain or ``.gz``.

    Raises:
        InputError: the folder or a file is missing; every missing file is named.
    """
    if not folder.is_dir():
        raise InputError("no such folder", where=str(folder), remedy="name the one with the IDX files by --raw")
    found, missing = {}, []
    for part in PARTS:
        kind = f"idx{AXES[part.split('-')[1]]}-ubyte"
        names = [f"{part}{joint}{kind}{end}" for joint in "-." for end in ("", ".gz")]
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is None:
            missing.append(f"{names[0]}[.gz]")
        else:
            found[part] = path
    if missing:
        raise InputError(f"missing {', '.join(missing)}", where=str(folder), remedy="put the files into that folder")
    return found


def read(path: Path, num_axes: int) -> np.ndarray:
    """Read one IDX file of unsigned bytes with `num_axes` axes; its header must agree with what follows it.

    A plain file is mapped, a gzipped one is unpacked piece by piece, so that no header can ask for memory that the
    file does not fill.

    Raises:
        InputError: wrong magic, wrong number of axes, truncated, longer than its header says, or damaged gzip.
    """
    packed = path.suffix == ".gz"
    try:
        body: np.ndarray | bytearray
        with gzip.open(path) if packed else path.open("rb") as file:
            shape = _header(path, file, num_axes)
            start = file.tell()
            if packed:
                body = _unpack(file, math.prod(shape) + 1)
            else:
                body = np.memmap(path, np.uint8, "r", offset=start) if path.stat().st_size > start else bytearray()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError("truncated or damaged gzip file", where=str(path), got=str(error), remedy=_AGAIN) from error
    except OSError as error:
        raise InputError("can't be read", where=str(path), got=error.strerror or str(error)) from error
    if len(body) != math.prod(shape):
        what = "truncated" if len(body) < math.prod(shape) else "longer than its header says"
        got = f"{len(body)}" if len(body) < math.prod(shape) or not packed else "more"
        raise InputError(what, where=str(path), expected=f"{math.prod(shape)} bytes of data", got=got, remedy=_AGAIN)
    return np.frombuffer(body, np.uint8).reshape(shape)


_AGAIN = "copy or download it again"


def _header(path: Path, file: Opened, num_axes: int) -> tuple[int, ...]:
    magic = file.read(4)
    expected = bytes([0, 0, UNSIGNED_BYTES, num_axes])
    if magic != expected:
        what = "truncated" if len(magic) < 4 else "not an IDX file of this kind: wrong magic number"
        raise InputError(what, where=str(path), expected=f"0x{expected.hex()}", got=f"0x{magic.hex()}", remedy=_AGAIN)
    sizes = file.read(4 * num_axes)
    if len(sizes) < 4 * num_axes:
        raise InputError("truncated in its header", where=str(path), remedy=_AGAIN)
    return struct.unpack(f">{num_axes}I", sizes)


def _unpack(file: Opened, limit: int) -> bytearray:
    body = bytearray()
    while len(body) < limit and (piece := file.read(min(CHUNK, limit - len(body)))):
        body += piece
    return body


def _check_pair(images_path: Path, images: np.ndarray, labels_path: Path, labels: np.ndarray, family: Family) -> None:
    if not images.size:
        raise InputError("holds no images", where=str(images_path), remedy=_AGAIN)
    if len(images) != len(labels):
        what = f"does not fit {images_path.name}"
        raise InputError(what, where=str(labels_path), expected=f"{len(images)} labels", got=str(len(labels)))
    if labels.max() >= family.num_classes:
        expected, got = f"labels 0 … {family.num_classes - 1}", str(labels.max())
        raise InputError(f"not the labels of {family.title}", where=str(labels_path), expected=expected, got=got)


def _digests(path: Path) -> tuple[str, str]:
    """Return md5 and sha256 of a file as it lies."""
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            md5.update(piece)
            sha256.update(piece)
    return md5.hexdigest(), sha256.hexdigest()


def _verdict(paths: Mapping[str, Path], md5: Mapping[str, str], family: Family) -> str:
    others = [paths[part].name for part in PARTS if md5[part] not in family.md5[part]]
    if not others:
        return f"md5: the four files are the canonical {family.title}"
    return f"md5: not the published files of {family.title}: {', '.join(others)}"
