"""Standard output and error of a command: never the reason why training is lost, and free of what names smuggle in.

Two kinds of commands print. One leaves files (run, sweep, …): what it prints is decoration, and it goes on when the
pipe is closed, the disk full or the terminal gone. The other prints its result (inspect, cite, …): it ends there,
quietly where the reader of a pipe has left, else as a failure of the environment.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from hpcfed.errors import EnvironmentFailure, HpcfedError, visible


class Unheard(HpcfedError):
    """The reader of a pipe has left, and so has what reads on for it: `hpcfed inspect x.h5 | head -1`."""

    exit_code = 0

    def __init__(self) -> None:
        super().__init__("")


class Output(io.TextIOBase):
    """A text stream in front of another, which may fail.

    Characters that the other's encoding lacks are written as their escapes. After its first failure nothing more is
    written.

    Args:
        stream: the other; None for none.
        cleans: whether control characters, too, are written as their escapes. Else the writer has seen to that.
        matters: whether a failure is an error.
    """

    def __init__(self, stream: TextIO | Output | None, *, cleans: bool = True, matters: bool = False):
        inner = stream.stream if isinstance(stream, Output) else stream
        self.stream: TextIO | None = inner
        self.matters: bool = matters or (isinstance(stream, Output) and stream.matters)
        self._cleans, self._lost = cleans, inner is None
        self._failure: HpcfedError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The other stream's."""
        return getattr(self.stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        with suppress(ValueError, OSError, AttributeError):
            return not self._lost and bool(self.stream.isatty())  # type: ignore[union-attr]
        return False

    def fileno(self) -> int:
        """The other stream's descriptor.

        Raises:
            OSError: it has none.
        """
        if self.stream is None:
            raise io.UnsupportedOperation("fileno")
        return self.stream.fileno()

    def writable(self) -> bool:
        """Yes."""
        return True

    def close(self) -> None:
        """Leave the other stream open."""

    def write(self, text: str) -> int:
        """Write a text, or lose it.

        Raises:
            Unheard, EnvironmentFailure: the stream has failed, and it matters.
        """
        shown = visible(text) if self._cleans else text
        self._try(lambda stream: stream.write(_encodable(shown, self.encoding)))
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered; fails as `write` does."""
        self._try(lambda stream: stream.flush())

    def _try(self, call: Callable[[TextIO], object]) -> None:
        if not self._lost and self.stream is not None:
            try:
                call(self.stream)
            except (OSError, ValueError) as error:  # ValueError: it is closed
                self._lost = True
                _to_nowhere(self.stream)
                got = getattr(error, "strerror", None) or str(error)
                failure = EnvironmentFailure("cannot be written", where="standard output", got=got)
                self._failure = Unheard() if isinstance(error, BrokenPipeError) else failure
        if self.matters and self._failure is not None:  # again and again: a library may have swallowed the first
            raise self._failure


@contextmanager
def streams(*, matters: bool) -> Iterator[None]:
    """Put an `Output` in front of standard output and standard error while the block runs."""
    for descriptor in range(3):
        _occupy(descriptor)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Output(sys.stdout, matters=matters), Output(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(HpcfedError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        pass
    return text


def _to_nowhere(stream: TextIO) -> None:
    """Point a stream's descriptor to no file, so that flushing what it still holds, at exit, fails no more."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def _occupy(descriptor: int) -> None:
    """Open a closed standard descriptor on no file: the next file to be opened would get its number, and its text."""
    try:
        os.fstat(descriptor)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere == descriptor:
            os.set_inheritable(nowhere, True)
        else:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
