"""A file that a run appends to while it goes on, with a check that no other program changes it meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

from hpcfed.errors import EnvironmentFailure


class AppendedFile:
    """A file to append to, once it is opened; `check` finds changes by other programs.

    Attributes:
        path: path of the file.
        is_open: whether `open` has been called.
    """

    def __init__(self, path: Path):
        self.path, self._size = path, 0
        self._file: BinaryIO | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def open(self) -> None:
        """Open the file for appending at its end; create it if it does not exist.

        Raises:
            OSError: the file cannot be opened.
        """
        self._file = cast(BinaryIO, self.path.open("ab"))
        self._size = self._file.seek(0, os.SEEK_END)

    def write(self, data: str | bytes) -> None:
        """Append bytes, or text as UTF-8; buffered until `flush`.

        Raises:
            OSError: the file cannot be written.
        """
        assert self._file is not None
        self._size += self._file.write(data.encode() if isinstance(data, str) else data)

    def flush(self) -> None:
        assert self._file is not None
        self._file.flush()

    def check(self) -> None:
        """Check that no other program has changed the file; if one has, further rounds would be lost.

        Raises:
            EnvironmentFailure: another program removed, replaced or changed it.
        """
        if self._file is None:
            return
        try:
            found = self.path.stat()
            is_ours = os.path.samestat(found, os.fstat(self._file.fileno())) and found.st_size == self._size
        except OSError:
            is_ours = False
        if not is_ours:
            what, remedy = "the record was removed or changed while the run wrote it", "choose another output"
            raise EnvironmentFailure(what, where=str(self.path), remedy=remedy)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # `write` and `flush` have reported what could not be written
                self._file.close()
            self._file = None
