"""The document of a command that ends without its own: what the line on standard error says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CommandError:
    """Why a command failed."""

    exit_code: int
    """Of the process: 2 the input is wrong, 3 diverged, 4 the machine, 75 stopped, 130 interrupted, 1 a defect."""
    message: str
    """The line on standard error, without the name hpcfed; the traceback of a defect."""


@dataclass(frozen=True)
class ErrorDocument:
    """A command that failed before it had a document to print."""

    error: CommandError
    """What went wrong."""


DOCUMENT = ErrorDocument
