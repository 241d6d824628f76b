"""A folder of images a client, with a folder a class inside: ``CLIENT/CLASS/name.png`` (or .jpg, .bmp)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hpcfed.errors import InputError

IMAGES = (".png", ".jpg", ".jpeg", ".bmp")
Sample = tuple[np.ndarray, int]


def class_folders(client: Path) -> list[str]:
    """Return the names of a client's classes."""
    return sorted(entry.name for entry in client.iterdir() if entry.is_dir())


def samples(client: Path, classes: Sequence[str]) -> Iterator[Sample]:
    """Yield a client's images (C, H, W) uint8, C = 1 where the file is grey and else 3, with their class's number.

    Raises:
        InputError: a file is no image.
    """
    from PIL import Image

    for folder in sorted(entry for entry in client.iterdir() if entry.is_dir()):
        label = classes.index(folder.name)
        for path in sorted(entry for entry in folder.iterdir() if entry.suffix.lower() in IMAGES):
            try:
                with Image.open(path) as image:
                    grey = image.mode in ("1", "L", "LA", "I;16")
                    pixels = np.asarray(image.convert("L" if grey else "RGB"))
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow raises all these
                raise InputError("no image, or damaged", where=str(path), got=str(error)[:80]) from error
            yield (pixels[None] if grey else pixels.transpose(2, 0, 1)), label
