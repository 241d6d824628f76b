"""The errors that end a run, each with its exit code and a one-line message.

The line follows one template, ``where: what: expected …, got …; remedy``, so that it can be understood without a
traceback. A traceback, where one helps, goes to ``logs/rank-R.log`` of the run folder (`goes_to_run_folder`).
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MAX_LENGTH = 600
"""Longest place, description or found value in a message, in characters."""


RAISED = (Exception, SystemExit)
"""What a user's code may raise: a script that is imported may call ``sys.exit``, which would end one rank alone."""


RUN_LOG = "hpcfed.run_folder"
"""Name of the log handler that writes to a run folder."""


def goes_to_run_folder() -> bool:
    """Whether this process's log goes to a run folder now: not while a command computes rounds again, or estimates."""
    return any(handler.name == RUN_LOG for handler in logging.getLogger("hpcfed").handlers)


class HpcfedError(Exception):
    """Base of the errors that end a run with a known exit code."""

    exit_code = 1


def sentence(what: str, *, where: str = "", expected: str = "", got: str = "", remedy: str = "") -> str:
    """Join the parts of an error message into one line: ``where: what: expected E, got G; remedy``."""
    is_whole = not (where or expected or got or remedy)  # a line already, that of another rank's error
    what, got = cut(what, 4 * MAX_LENGTH if is_whole else MAX_LENGTH), cut(got)
    if len(where) > MAX_LENGTH:  # of a path, the end says more
        where = f"{where[:100]}…{where[101 - MAX_LENGTH :]}"
    details = ", ".join(part for part in (expected and f"expected {expected}", got and f"got {got}") if part)
    line = ": ".join(part for part in (where, what, details) if part)
    if remedy:
        line = f"{line}; {remedy}"
    return visible(" ".join(line.split()))


_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, separators of lines, bidirectional controls, and surrogates."""


def in_a_line(error: BaseException) -> str:
    """Return an error's kind and the first line of its message, if it has one."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


def visible(text: str) -> str:
    r"""Return a text with control characters escaped, such as ``\x1b``: a name must not steer a terminal."""
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cut(text: str, most: int = MAX_LENGTH) -> str:
    """Return a text, at most so many characters of it."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_of(names: Sequence[str], most: int, total: int | None = None) -> str:
    """Return the first names in a line, and how many more there are of the `total`, by default `names`."""
    total = len(names) if total is None else total
    return ", ".join(names[:most]) + (f" and {total - most:,} more" if total > most else "")


def counted(number: int, what: str) -> str:
    """Return the number with its noun, in the singular or plural."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def shown(value: Any) -> str:
    """Return a value as text of at most 200 characters for a message; a large one is cut before it is converted."""
    writer = reprlib.Repr()
    writer.maxdict = writer.maxlist = writer.maxtuple = writer.maxset = 12
    writer.maxlevel, writer.maxstring, writer.maxother, writer.maxlong = 3, 120, 120, 40
    text = writer.repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


class _Explained(HpcfedError):
    """An error built from the template's parts (see `sentence`); `where` is its place, "" if it names none."""

    def __init__(self, what: str, *, where: str = "", expected: str = "", got: str = "", remedy: str = ""):
        self.where = where
        super().__init__(sentence(what, where=where, expected=expected, got=got, remedy=remedy))


class InputError(_Explained):
    """What the user typed, or a file they named, is wrong (exit code 2)."""

    exit_code = 2


class Busy(InputError):
    """Another job holds the run folder; later it may be free."""


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Give errors of input that name no place this one: a recipe's file, whichever check refuses its key."""
    try:
        yield
    except InputError as error:
        if error.where:
            raise
        whole = InputError(f"{where}: {error}")
        whole.where = where
        raise whole from error


class Diverged(_Explained):
    """Training produced numbers that are not finite, or left the range of the sums (exit code 3)."""

    exit_code = 3


class EnvironmentFailure(_Explained):
    """The machine, a disk, a file in mid-run or a rank failed (exit code 4)."""

    exit_code = 4


HOST_FULL = "can't allocate memory"
"""torch's words where the system gives a process no more."""
SYSTEM_FAILURES = {
    errno.EMFILE: "raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs: the machine has no more files to open",
    errno.ENOMEM: "use a machine with more memory, or raise this process's limits",
    errno.ENOSPC: "make space",
    errno.EDQUOT: "make space",
    errno.EFBIG: "raise this process's limit of a file's size (ulimit -f)",
    errno.EIO: "check the disk or file system",
    errno.ESTALE: "check the file system, and give the same command again",
}
"""Errors of the system that no input causes → remedy."""


def system_failure(error: BaseException, where: str = "") -> EnvironmentFailure | None:
    """Return the one-line error for one of `SYSTEM_FAILURES`, whichever call met it, h5py's too; None for others."""
    if not isinstance(error, OSError) or error.errno not in SYSTEM_FAILURES:
        return None
    where, what = where or str(error.filename or ""), f"the system says: {os.strerror(error.errno)}"
    failure = EnvironmentFailure(what, where=where, remedy=SYSTEM_FAILURES[error.errno])
    failure.__cause__ = error
    return failure


class Stopped(_Explained):
    """The run ended early on request, with a checkpoint; the same command goes on (exit code 75)."""

    exit_code = 75


@contextmanager
def ends_in_a_line() -> Iterator[None]:
    """End a script by an error's line and exit code, as the command ends; also a decorator."""
    try:
        yield
    except HpcfedError as error:
        print(f"hpcfed: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the known word closest to `word`, or the list of known words."""
    known = sorted(known)
    return did_you_mean(word, known) or f"known: {', '.join(known)}"


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``did you mean 'x'?`` for the known word closest to `word` but for capitals, "" if none is similar."""

    def likeness(one: str) -> float:
        return difflib.SequenceMatcher(None, word, one).ratio()

    spelled = {one.lower(): one for one in sorted(sorted(known, reverse=True), key=likeness)}
    match = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=cutoff)
    return f"did you mean {spelled[match[0]]!r}?" if match else ""
