"""Images in a folder per client and class: ``CLIENT/CLASS/name.png`` (or .jpg, .bmp).

8-bit images stay uint8. If any image has 16 bits, all become float32 in [0, 1], so that none loses depth.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.files import is_clutter, reading, refuse_special, unreadable
from data_prep.tables.cells import composed
from hpcfed.errors import InputError, counted, first_of

IMAGES = (".png", ".jpg", ".jpeg", ".bmp")
GREY = ("1", "L", "LA")
WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
ORIENTATION = 0x0112
"""The tag of EXIF that says how an image is stored, a key of `TURNS`."""
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
ON_ITS_SIDE = 5
"""From this one on, width and height are exchanged."""
RAISED = (OSError, ValueError, TypeError, KeyError, IndexError, EOFError, SyntaxError, struct.error)
"""What Pillow raises at damaged images."""
DRAWN = ("EPS", "WMF")
"""Formats that Pillow reads, under any name of a file, by running Ghostscript or the system's drawing."""
WHOLE, DEEP = 255, 65535
DEEP_ALL = "images of 16 bits: all became float32 in [0, 1]"
MAX_LISTED = 8
Sample = tuple[np.ndarray, int]


def class_folders(client: Path) -> list[str]:
    """Return the names of a client's classes.

    Raises:
        InputError: the folder can't be read.
    """
    with reading(client):
        return sorted(entry.name for entry in client.iterdir() if entry.is_dir() and not is_clutter(entry.name))


def files(client: Path) -> list[Path]:
    """Return a client's images, in order.

    Raises:
        InputError: a folder can't be read.
    """
    found = []
    for name in class_folders(client):
        with reading(client / name):
            entries = (entry for entry in (client / name).iterdir() if not is_clutter(entry.name))
            found += sorted(entry for entry in entries if entry.suffix.lower() in IMAGES)
    refuse_special(found)
    return found


def left_out(clients: Iterable[Path], beside: Iterable[Path] = ()) -> str:
    """Return a line on the files among the clients' folders, and `beside` them, that are not read as images; "" if
    there are none.
    """
    others = [*beside]
    for client in clients:
        for folder in (client, *(client / name for name in class_folders(client))):
            with reading(folder):
                entries = [entry for entry in folder.iterdir() if not is_clutter(entry.name)]
            if folder == client:
                others += [entry for entry in entries if not entry.is_dir()]
            else:
                others += [entry for entry in entries if entry.suffix.lower() not in IMAGES]
    if not others:
        return ""
    kinds = sorted({"folders" if path.is_dir() else path.suffix.lower() or path.name for path in others})
    return f"left out: {counted(len(others), 'file')}: {first_of(kinds, MAX_LISTED)}"


@dataclass
class Headers:
    """What the headers of images say.

    Attributes:
        deep: whether any has 16 bits.
        transparent: number of images with a channel or a color of transparency.
        moving: number of images of several frames.
    """

    deep: bool = False
    transparent: int = 0
    moving: int = 0

    def add(self, file: Any, where: str) -> tuple[tuple[int, int], str]:
        """Read an image's header, and return its size as it is shown, and its mode.

        Raises:
            InputError: the file is no image, or has bits that would be lost.
        """
        with _opened(file, where) as image:
            if image.mode == "F":
                remedy = "save it with 8 or 16 bits"
                raise InputError("an image of floating-point numbers", where=where, remedy=remedy)
            is_deep = image.mode.startswith("I")
            if not is_deep and any(";16" in str(tile[3]) for tile in image.tile):  # as they are in the file
                what = "an image of 16 bits with colors or transparency, which would be cut to 8"
                raise InputError(what, where=where, remedy="save it with 8 bits, or give all as arrays (CLIENT.npz)")
            self.deep |= is_deep
            self.transparent += image.mode in WITH_ALPHA or "transparency" in image.info
            self.moving += getattr(image, "n_frames", 1) > 1
            return image.size[::-1] if _orientation(image) >= ON_ITS_SIDE else image.size, image.mode

    def remarks(self) -> tuple[str, ...]:
        """Return lines on what of the images is not used, or changed."""
        lines = (
            (self.deep, DEEP_ALL),
            (self.transparent, f"transparency is left out in {counted(self.transparent, 'image')}"),
            (self.moving, f"several frames in {counted(self.moving, 'image')}: the first is used"),
        )
        return tuple(line for is_so, line in lines if is_so)


def check_alike(paths: Iterable[Path]) -> Headers:
    """Check that images are of one size, all grey or all colored, by their headers, and return these.

    Raises:
        InputError: as `Headers.add`; or a file is unlike the first.
    """
    headers, first = Headers(), None
    for path in paths:
        size, mode = headers.add(path, str(path))
        if first is None:
            first = path, size, mode
        if size != first[1]:
            expected, got = (f"{width} × {height} pixels" for width, height in (first[1], size))
            expected, remedy = f"{expected}, as {first[0]}", "scale all images to one size"
            raise InputError("images of different sizes", where=str(path), expected=expected, got=got, remedy=remedy)
        if _is_grey(mode) != _is_grey(first[2]):
            expected, remedy = f"mode {first[2]}, as {first[0]}", "save all in grey, or all in color"
            raise InputError("grey and colored images", where=str(path), expected=expected, got=f"mode {mode}",
                             remedy=remedy)  # fmt: skip
    return headers


def _is_grey(mode: str) -> bool:
    return mode in GREY or mode.startswith("I")


def samples(client: Path, classes: Sequence[str], deep: bool) -> Iterator[Sample]:
    """Yield a client's images (C, H, W), as `pixels` returns them, with their class's number.

    Raises:
        InputError: a file is no image.
    """
    for path in files(client):
        yield pixels(path, str(path), deep), classes.index(composed(path.parent.name))


def groups(client: Path, pattern: str) -> list[str]:
    """Return the groups of a client's images, in their order: what a regular expression finds in the files' names.

    It is the expression's first group if it has one, else its match.

    Raises:
        InputError: the expression is none, or finds nothing in a name.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        expected = "of images, a regular expression that finds the patient in a file's name, such as '^[^_]+'"
        raise InputError(f"--group {pattern}", expected=expected, got=str(error)) from None
    found = []
    for path in files(client):
        match = expression.search(composed(path.name))
        name = None if match is None else match[min(1, expression.groups)]
        if not name:
            what = f"--group {pattern}: nothing in the file's name fits"
            raise InputError(what, where=str(path), remedy="of images it is a regular expression, such as '^[^_]+'")
        found.append(name)
    return found


def pixels(file: Any, where: str, deep: bool) -> np.ndarray:
    """Return an image (C, H, W), C = 1 where the file is grey and else 3: uint8, or float32 in [0, 1] if `deep`.

    It is turned as its EXIF says.

    Raises:
        InputError: the file is no image, or a pixel has more than 16 bits.
    """
    from PIL import Image

    with _opened(file, where) as image:
        image.load()
        if turn := TURNS.get(_orientation(image)):
            image = image.transpose(Image.Transpose[turn])
        if image.mode.startswith("I"):
            values = np.asarray(image)
            if values.size and not 0 <= int(values.min()) <= int(values.max()) <= DEEP:
                got = f"{values.min()} … {values.max()}"
                raise InputError("an image of more than 16 bits", where=where, expected=f"0 … {DEEP}", got=got)
            return (values[None] / np.float32(DEEP)).astype(np.float32)
        grey = image.mode in GREY
        whole = np.asarray(image.convert("L" if grey else "RGB"))
    whole = whole[None] if grey else whole.transpose(2, 0, 1)
    return whole.astype(np.float32) / np.float32(WHOLE) if deep else whole


def _orientation(image: Any) -> int:
    """Return how an image is stored, a key of `TURNS`, or 1: as it is shown, also if its EXIF is damaged."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # Pillow would decode all of it to look behind the pixels, too
    try:
        found = image.getexif().get(ORIENTATION)
    except RAISED:
        return 1
    return found if found in TURNS else 1


@contextmanager
def _opened(file: Any, where: str) -> Iterator[Any]:
    from PIL import Image

    try:
        with Image.open(file) as image:
            if image.format in DRAWN:
                expected, got = "PNG, JPEG or BMP", f"{image.format}, which another program would draw"
                raise InputError("no image of pixels", where=where, expected=expected, got=got)
            yield image
    except MemoryError as error:  # a part of it claims to be larger than the memory
        raise InputError("an image damaged, or larger than the memory", where=where) from error
    except (*RAISED, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(Path(where), error) from error
        raise InputError("no image, or damaged", where=where, got=str(error)[:80]) from error
