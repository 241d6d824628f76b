"""Images in a folder per client and class: ``CLIENT/CLASS/name.png`` (or .jpg, .bmp).

8-bit images stay uint8. If any image has 16 bits, all become float32 in [0, 1], so that none loses depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.sources.files import reading, unreadable
from hpcfed.errors import InputError

IMAGES = (".png", ".jpg", ".jpeg", ".bmp")
GREY = ("1", "L", "LA")
WHOLE, DEEP = 255, 65535
Sample = tuple[np.ndarray, int]


def class_folders(client: Path) -> list[str]:
    """Return the names of a client's classes.

    Raises:
        InputError: the folder can't be read.
    """
    with reading(client):
        return sorted(entry.name for entry in client.iterdir() if entry.is_dir())


def files(client: Path) -> list[Path]:
    """Return a client's images, in order.

    Raises:
        InputError: a folder can't be read.
    """
    found = []
    for name in class_folders(client):
        with reading(client / name):
            found += sorted(entry for entry in (client / name).iterdir() if entry.suffix.lower() in IMAGES)
    return found


def any_deep(paths: Iterable[Path]) -> bool:
    """Tell whether an image has more than 8 bits a pixel; only the files' headers are read.

    Raises:
        InputError: a file is no image.
    """
    return any(depth(path, str(path)) > 8 for path in paths)


def samples(client: Path, classes: Sequence[str], deep: bool) -> Iterator[Sample]:
    """Yield a client's images (C, H, W), as `pixels` returns them, with their class's number.

    Raises:
        InputError: a file is no image.
    """
    for path in files(client):
        yield pixels(path, str(path), deep), classes.index(path.parent.name)


def depth(file: Any, where: str) -> int:
    """Return the bits of a pixel's channel, 8 or 16, from an image's header.

    Raises:
        InputError: the file is no image, or has more bits.
    """
    with _opened(file, where) as image:
        if image.mode == "F":
            remedy = "save it with 8 or 16 bits"
            raise InputError("an image of floating-point numbers", where=where, remedy=remedy)
        return 16 if image.mode.startswith("I") else 8


def pixels(file: Any, where: str, deep: bool) -> np.ndarray:
    """Return an image (C, H, W), C = 1 where the file is grey and else 3: uint8, or float32 in [0, 1] if `deep`.

    Raises:
        InputError: the file is no image, or a pixel has more than 16 bits.
    """
    with _opened(file, where) as image:
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


@contextmanager
def _opened(file: Any, where: str) -> Iterator[Any]:
    from PIL import Image

    try:
        with Image.open(file) as image:
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow raises all these
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(Path(where), error) from error
        raise InputError("no image, or damaged", where=where, got=str(error)[:80]) from error
