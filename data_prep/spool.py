"""Disk-backed buffers for rows that arrive piecewise, so that unpacking a format needs bounded memory."""

from __future__ import annotations

import math
import tempfile

import numpy as np

from hpcfed.data.content import rows_per_block
from hpcfed.errors import EnvironmentFailure
from hpcfed.io.node import temporary_folder

WHOLE = 255


class Spool:
    """Rows of one shape and type in an unnamed file of ``$TMPDIR``, which the system removes after its last use.

    Rows are written, not stored into a map, so a full disk raises an error instead of a signal.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: np.dtype | type | str):
        self.row_shape, self.dtype = row_shape, np.dtype(dtype)
        self.num_rows = 0
        try:
            # lives as long as the map of `finish`
            self._file = tempfile.TemporaryFile(prefix="hpcfed-", dir=temporary_folder())  # noqa: SIM115
        except OSError as error:
            raise _full(error) from error

    def append(self, rows: np.ndarray) -> None:
        """Add rows (m, *row_shape), which may also come flat.

        Raises:
            EnvironmentFailure: the disk is full or failed.
        """
        rows = rows.reshape(-1, *self.row_shape)
        block = rows_per_block(self.row_shape, self.dtype)
        try:
            for start in range(0, len(rows), block):
                self._file.write(np.ascontiguousarray(rows[start : start + block], self.dtype).data.cast("B"))
        except OSError as error:
            raise _full(error) from error
        self.num_rows += len(rows)

    def finish(self) -> np.ndarray:
        """Return all rows, (n, *row_shape), as a read-only memory map; nothing can be added afterwards."""
        if not self.num_rows or not math.prod(self.row_shape):
            self._file.close()
            return np.empty((self.num_rows, *self.row_shape), self.dtype)
        try:
            self._file.flush()
        except OSError as error:
            raise _full(error) from error
        mapped = np.memmap(self._file, self.dtype, "r", shape=(self.num_rows, *self.row_shape))
        self._file.close()
        return mapped.view(np.ndarray)


class UnitImages:
    """Images of numbers in [0, 1]: kept as uint8 while all of them are k / 255 in float32, as float32 from then on."""

    def __init__(self, shape: tuple[int, ...]):
        self._spool = Spool(shape, np.uint8)

    def append(self, images: np.ndarray) -> None:
        """Add images (m, …) of floating-point numbers in [0, 1], finite."""
        wanted = images.astype(np.float32)
        whole = np.rint(wanted * WHOLE).astype(np.uint8)
        if self._spool.dtype == np.uint8 and not np.array_equal(as_unit(whole), wanted):
            self._spool = spooled(self._spool.finish(), np.float32)
        self._spool.append(whole if self._spool.dtype == np.uint8 else wanted)

    def finish(self) -> np.ndarray:
        """Return all images as a read-only memory map."""
        return self._spool.finish()


def as_unit(images: np.ndarray) -> np.ndarray:
    """Return uint8 images as float32 in [0, 1], as a run scales them."""
    return images.astype(np.float32) / np.float32(WHOLE)


def alike(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two results of `UnitImages` in one type: uint8 if both are, else float32."""
    if first.dtype == second.dtype:
        return first, second
    wide = (array if array.dtype == np.float32 else spooled(array, np.float32).finish() for array in (first, second))
    return next(wide), next(wide)


def spooled(images: np.ndarray, dtype: type, rows: np.ndarray | None = None) -> Spool:
    """Return some rows of `images` (default: all) in a new spool; uint8 becomes k / 255 if `dtype` is float32."""
    rows = np.arange(len(images)) if rows is None else rows
    spool = Spool(images.shape[1:], dtype)
    size = rows_per_block(images.shape[1:], spool.dtype)
    for start in range(0, len(rows), size):
        block = images[rows[start : start + size]]
        spool.append(as_unit(block) if spool.dtype == np.float32 and block.dtype == np.uint8 else block)
    return spool


def _full(error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"writing a temporary file failed: {error.strerror or error}",
        where=str(temporary_folder()),
        remedy="point $TMPDIR to a larger disk",
    )
