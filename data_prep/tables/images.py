"""Images inside a table, as the datasets hub writes them: a struct of the file's bytes and its path."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from data_prep.sources import own_images
from data_prep.tables.read import Block
from hpcfed.errors import InputError


def headers(found: Iterable[Block], column: str) -> own_images.Headers:
    """Return what the headers of all images say.

    Raises:
        InputError: a cell holds no image, or as `own_images.Headers.add`.
    """
    said = own_images.Headers()
    for block in found:
        for row in np.flatnonzero(block.columns[column].is_valid()).tolist():
            said.add(_file(block, column, row), block.place(row))
    return said


def pixels(block: Block, column: str, rows: np.ndarray, deep: bool) -> np.ndarray:
    """Return the images of some rows, (m, C, H, W), as `own_images.pixels` does.

    Raises:
        InputError: a cell holds no image, or one of another size.
    """
    images: list[np.ndarray] = []
    for row in rows.tolist():
        where = block.place(row)
        image = own_images.pixels(_file(block, column, row), where, deep)
        if images and image.shape != images[0].shape:
            expected, got = f"shape {images[0].shape}, as before", str(image.shape)
            raise InputError(f"image of column {column!r}", where=where, expected=expected, got=got)
        images.append(image)
    return np.stack(images) if images else np.empty((0, 1, 1, 1), np.float32 if deep else np.uint8)


def _file(block: Block, column: str, row: int) -> Any:
    """Return an image's file, in memory."""
    content = block.columns[column][row]["bytes"].as_py()
    if content is None:
        remedy = "keep the images in the table (datasets: embed_external_files)"
        raise InputError(f"column {column!r} names an image's file, and does not hold it",
                         where=block.place(row), remedy=remedy)  # fmt: skip
    return io.BytesIO(content)
