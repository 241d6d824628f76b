"""Standard output and error of a command: a failed write never ends training, and control characters are escaped.

A command that leaves files (run, sweep, …) goes on when the pipe is closed, the disk full or the terminal gone. A
command whose output is its result (inspect, cite, …) ends there: quietly if the reader of a pipe has left, else with an
`EnvironmentFailure`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from hpcfed.errors import EnvironmentFailure, HpcfedError, visible


class ReaderGone(HpcfedError):
    """The reader of a pipe has left: `hpcfed inspect x.h5 | head -1`."""

    exit_code = 0

    def __init__(self, text: str = "") -> None:  # taken from another rank with its text
        super().__init__(text)


class Output(io.TextIOBase):
    """A text stream that wraps another one, whose failures it survives.

    Characters that the inner stream's encoding lacks are escaped. After its first failure nothing more is written.

    Args:
        stream: the inner stream; None discards everything.
        cleans: whether control characters are escaped, too; false if the caller has escaped them.
        matters: whether a failure raises.
    """

    def __init__(self, stream: TextIO | Output | None, *, cleans: bool = True, matters: bool = False):
        inner = stream.stream if isinstance(stream, Output) else stream
        self.stream: TextIO | None = inner
        self.matters: bool = matters or (isinstance(stream, Output) and stream.matters)
        self._cleans, self._lost = cleans, inner is None
        self._failure: HpcfedError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The inner stream's."""
        return getattr(self.stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the inner stream is a terminal."""
        with suppress(ValueError, OSError, AttributeError):
            return not self._lost and bool(self.stream.isatty())  # type: ignore[union-attr]
        return False

    def fileno(self) -> int:
        """The inner stream's descriptor.

        Raises:
            OSError: it has none.
        """
        if self.stream is None:
            raise io.UnsupportedOperation("fileno")
        return self.stream.fileno()

    def writable(self) -> bool:
        """Always true."""
        return True

    def close(self) -> None:
        """Leave the inner stream open."""

    def write(self, text: str | bytes) -> int:
        """Write a text, or UTF-8 (click's completion of words); after a failure, discard it.

        Raises:
            ReaderGone, EnvironmentFailure: the stream has failed, and it matters.
        """
        plain = text.decode() if isinstance(text, bytes) else text
        shown = visible(plain) if self._cleans else plain
        self._try(lambda stream: stream.write(_encodable(shown, self.encoding)))
        return len(text)

    def flush(self) -> None:
        """Flush the inner stream; fails as `write` does."""
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
                self._failure = ReaderGone() if isinstance(error, BrokenPipeError) else failure
        if self.matters and self._failure is not None:  # at every call: a library may have swallowed the first
            raise self._failure


@contextmanager
def streams(*, matters: bool) -> Iterator[None]:
    """Wrap standard output and standard error in `Output` while the block runs."""
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
    """Point a stream's descriptor to /dev/null, so that flushing its buffer at exit does not fail again."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def _occupy(descriptor: int) -> None:
    """Open a closed standard descriptor on /dev/null: else the next file opened gets its number and its output."""
    try:
        os.fstat(descriptor)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere == descriptor:
            os.set_inheritable(nowhere, True)
        else:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
