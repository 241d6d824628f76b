"""CINIC-10: a folder of PNGs, ``{train,valid,test}/<class>/<name>.png``, or its published archive.

The archive is read in one pass without unpacking it: images are spooled to a temporary file, then sorted by name, so
folder and archive make the same federation. Constants of the normalization: FedExP's util_data.py:240, those of
CINIC-10's authors.

Reference: Darlow, Crowley, Antoniou, Storkey, "CINIC-10 is not ImageNet or CIFAR-10", arXiv 1810.03505.
"""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import (
    LISTED,
    DataSource,
    Origin,
    Published,
    check_folder,
    damaged,
    examine,
    listed,
    reading,
)
from data_prep.spool import Spool, spooled
from hpcfed.data.federation import Standardization
from hpcfed.errors import InputError

ARCHIVE = "CINIC-10.tar.gz"
ORIGIN = Origin(
    "CINIC-10: three parts of 90,000 colour images of 10 classes, 32 × 32 (Darlow et al. 2018)",
    "https://datashare.ed.ac.uk/handle/10283/3192",
    (Published(ARCHIVE, 687_544_992, "6ee4d0c996905fe93221de577967a372"),),
    f"{ARCHIVE} itself, or the folders train, valid and test that it unpacks to",
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PARTS = ("train", "valid", "test")
NORMALIZATION = Standardization((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835))
SIDE = 32
SHAPE = (3, SIDE, SIDE)
LARGEST_PNG = 1 << 16
"""Bytes; the images take about 2,500, and raw pixels 3,072."""

Named = tuple[str, str, str]  # part, class, file


def load(raw: str | Path, *, valid: bool = False) -> Dataset:
    """Read the parts train and test, from folders in `raw`, else from ``CINIC-10.tar.gz`` in or at `raw`.

    Args:
        raw: the folder, or the archive.
        valid: add the part valid to the training set, after train.

    Returns:
        x (n, 3, 32, 32) uint8 and y (n,) uint8, by part, class and name.

    Raises:
        InputError: something is missing or damaged, or the archive holds links or names that lead out of it.
    """
    raw = Path(raw)
    archive = raw if raw.is_file() else raw / ARCHIVE
    parts = PARTS if valid else ("train", "test")
    folders = [raw / part for part in parts]
    if all(folder.is_dir() for folder in folders):
        files: list[dict[str, str]] = []
        verdict = "md5: none is published for the single images"
        arrays = [_collect(folder) for folder in folders]
    elif archive.is_file():
        files, verdict = examine(ORIGIN, [archive], title="CINIC-10")
        arrays = _of_archive(archive, parts)
    else:
        check_folder(raw)
        missing = ", ".join(f"{part}/" for part, folder in zip(parts, folders, strict=True) if not folder.is_dir())
        raise InputError(f"missing {ARCHIVE}, or the folders {missing}", where=str(raw), remedy=LISTED)
    (train_x, train_y), (test_x, test_y) = _joined(arrays[:-1]), arrays[-1]
    return Dataset(
        name="cinic10",
        task="classification",
        x=train_x,
        y=train_y,
        num_classes=len(CLASSES),
        test_x=test_x,
        test_y=test_y,
        normalization=NORMALIZATION,
        source={"files": files, "parts": list(parts)},
        remarks=(verdict,),
    )


def _of_folder(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield class and file of the images of a part, in the order of their names."""
    for kind in CLASSES:
        if not (folder / kind).is_dir():
            raise InputError(f"missing the folder {kind}/", where=str(folder), remedy=LISTED)
        for path in listed(folder / kind, "*.png"):
            yield kind, path


def _limited(path: Path) -> bytes:
    with reading(path), path.open("rb") as file:
        return file.read(LARGEST_PNG + 1)


def _of_archive(archive: Path, parts: tuple[str, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return x and y of each part."""
    images, found = Spool(SHAPE, np.uint8), []
    try:
        # Not as tarfile's own stream, which goes on skipping a claimed size after the end of the file.
        with reading(archive), gzip.open(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it keeps all 270,000 otherwise
                named = _checked(archive, member)
                if named is None or named[0] not in parts:
                    continue
                opened = tar.extractfile(member)
                content = b"" if opened is None else opened.read(LARGEST_PNG + 1)
                images.append(_pixels(content, f"{archive}: {member.name}"))
                found.append(named)
    except (tarfile.TarError, EOFError, zlib.error, struct.error, ValueError, OverflowError) as error:
        raise damaged(archive, "truncated or damaged archive", error) from error
    pixels = images.finish()
    return [_part(archive, part, pixels, found) for part in parts]


def _part(archive: Path, part: str, pixels: np.ndarray, found: list[Named]) -> tuple[np.ndarray, np.ndarray]:
    rows = sorted((row for row, named in enumerate(found) if named[0] == part), key=found.__getitem__)
    if not rows:
        raise InputError(f"no images of the part {part}", where=str(archive), remedy=LISTED)
    labels = np.array([CLASSES.index(found[row][1]) for row in rows], np.uint8)
    return spooled(pixels, np.uint8, np.array(rows)).finish(), labels


def _checked(archive: Path, member: tarfile.TarInfo) -> Named | None:
    """Return part, class and file of a member, None if it is not an image.

    Raises:
        InputError: a member that only a malicious or damaged archive holds.
    """
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise InputError("an archive with a name that leads out of it", where=str(archive), got=member.name[:80])
    if not (member.isfile() or member.isdir()):
        raise InputError("an archive with a link or a device", where=str(archive), got=member.name[:80])
    named = path.parts[-3:]
    if not member.isfile() or len(named) < 3 or path.suffix != ".png":
        return None
    part, kind, file = named
    if part not in PARTS or kind not in CLASSES:
        return None
    return part, kind, file


def _collect(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of a part that is a folder."""
    spool, labels = Spool(SHAPE, np.uint8), []
    for kind, path in _of_folder(folder):
        spool.append(_pixels(_limited(path), str(path)))
        labels.append(CLASSES.index(kind))
    if not labels:
        raise InputError("holds no images", where=str(folder), remedy=LISTED)
    return spool.finish(), np.array(labels, np.uint8)


def _joined(arrays: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if len(arrays) == 1:
        return arrays[0]
    spool = Spool(SHAPE, np.uint8)
    for x, _ in arrays:
        spool.append(x)
    return spool.finish(), np.concatenate([y for _, y in arrays])


def _pixels(content: bytes, where: str) -> np.ndarray:
    """Return a PNG as (3, 32, 32) uint8; its size is checked before it is decoded.

    Raises:
        InputError: it is too large, damaged, or of another size.
    """
    from PIL import Image

    if len(content) > LARGEST_PNG:
        raise InputError("an image too large for CINIC-10", where=where, expected=f"at most {LARGEST_PNG} bytes")
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.size != (SIDE, SIDE):
                got = " × ".join(map(str, image.size))
                raise InputError("an image of another size", where=where, expected=f"{SIDE} × {SIDE}", got=got)
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        raise InputError("a damaged PNG", where=where, got=str(error)) from error


SOURCES = {"cinic10": DataSource(load, ORIGIN)}
