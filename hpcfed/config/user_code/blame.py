"""Errors raised in user code, as one line that names their place."""

from __future__ import annotations

import inspect
import logging
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import PydanticUserError, ValidationError

from hpcfed.config.user_code.finder import is_blamed
from hpcfed.errors import (
    HOST_FULL,
    RAISED,
    EnvironmentFailure,
    HpcfedError,
    InputError,
    did_you_mean,
    goes_to_run_folder,
    shown,
)
from hpcfed.ranks.accelerators import is_fault
from hpcfed.ranks.world import World
from hpcfed.types import LocalMethod

log = logging.getLogger("hpcfed")

OF_SERVERS = ("client_scalars", "counts_clients", "final_model", "reads")
FLAGS = (*OF_SERVERS, "trains_personal", *(name for name in vars(LocalMethod) if not name.startswith("_")))
"""Names that a rule's class may set, and its methods."""
OF_THE_USER = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
"""Errors of the system that mean a wrong path, not a failing machine."""
OF_THE_MACHINE = ("CUDA error", "out of memory", HOST_FULL, "can't start new thread")
"""Texts of a RuntimeError that the machine causes, whichever code meets it."""


def place_of(error: BaseException) -> str:
    """Return file, line and function of the innermost frame of user code in an error's traceback; "" if none."""
    if isinstance(error, SyntaxError) and error.filename and is_blamed(error.filename):
        return f"{_short(error.filename)}, line {error.lineno}"
    seen: BaseException | None = error
    while seen is not None:
        frames: list[tuple[FrameType, int]] = [*traceback.walk_tb(seen.__traceback__)]
        for frame, line in reversed(frames):
            if is_blamed(frame.f_code.co_filename):
                return f"{_short(frame.f_code.co_filename)}, line {line}, in {frame.f_code.co_name}"
        seen = seen.__cause__ or seen.__context__
    return ""


def raised_in_torch(error: BaseException) -> bool:
    """Whether the innermost frame of an error's traceback is torch's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("torch.")


def defined_at(part: object, name: str = "") -> str:
    """Return file and line of a user's function, method, or class if that has no code; "" if unknown."""
    kind: Any = part if inspect.isclass(part) or inspect.isfunction(part) else type(part)
    function = inspect.unwrap(getattr(kind, name, kind))
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{_short(code.co_filename)}, line {code.co_firstlineno}" if is_blamed(code.co_filename) else ""
    with suppress(OSError, TypeError):
        return f"{_short(inspect.getsourcefile(kind) or '')}, line {inspect.getsourcelines(kind)[1]}"
    return ""


def described(error: BaseException) -> str:
    """Return kind and text of an error; of a refused parameter or attribute of a `Part` which one and why."""
    if isinstance(error, PydanticUserError):
        return _of_class(error)
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}".rstrip(": ")
    first = error.errors(include_url=False)[0]
    key = ".".join([error.title, *map(str, first["loc"])])
    if first["type"] == "frozen_instance":
        remedy = "state goes in through begin and out of step (a client's: out of next_state)"
        return f"{key} is assigned, but a part is frozen: {remedy}"
    expected, got = refusal(error)
    return f"{key}: expected {expected}, got {got}"


def _of_class(error: PydanticUserError) -> str:
    """Return what is wrong in the definition of a `Part`, with the remedy for an attribute without a type."""
    found = re.search(r"`((\w+) = .*?)`", error.message)
    if error.code != "model-field-missing-annotation" or found is None:
        return f"{type(error).__name__}: {error.message}"
    assigned, name = found.groups()
    value = assigned.removeprefix(f"{name} = ")
    likely = did_you_mean(name, FLAGS)
    forms = f"a constant is {name}: ClassVar = {value}, a parameter {name}: TYPE = {value}"
    return f"the attribute {assigned!r} has no type; {f'{likely} ' if likely else ''}{forms}"


def refusal(error: ValidationError) -> tuple[str, str]:
    """Return (expected, got) of pydantic's first complaint."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "missing":
        return "a value", "none"
    if first["type"] == "extra_forbidden":
        return "no such key", shown(first["input"])
    said = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return said, shown(first["input"])


def _short(file: str) -> str:
    """Return a path, relative to the working folder if it lies in it."""
    with suppress(FileNotFoundError):  # it has been removed
        return file.removeprefix(f"{Path.cwd()}{os.sep}")
    return file


def blamed(error: BaseException, where: str = "", remedy: str = "correct it there") -> HpcfedError | None:
    """Return the one-line error for an exception raised in user code; None if no user code is in its traceback.

    A fault of the machine becomes an `EnvironmentFailure`, any other an `InputError`.
    """
    place = place_of(error)
    if not place:
        return None
    what = described(error)
    if is_of_the_machine(error):
        return EnvironmentFailure(f"{place}: {what}", where=where, remedy=remedy)
    return InputError(f"{place}: {what}", where=where, remedy=remedy)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine causes an error, whichever code meets it."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and not isinstance(error, OF_THE_USER)):
        return True
    return isinstance(error, RuntimeError) and (any(words in str(error) for words in OF_THE_MACHINE) or is_fault(error))


@contextmanager
def own_code_named(world: World | None = None) -> Iterator[None]:
    """Turn an exception in user code into one line that names its place; the traceback goes to the log.

    Raises:
        InputError: the user's code raised.
        EnvironmentFailure: it met a fault of the machine, such as a full disk.
    """
    try:
        yield
    except HpcfedError:
        raise
    except RAISED as error:  # the user's code may raise anything
        failure = blamed(error, remedy=see_log(world))
        if failure is None:
            raise
        if world is not None:
            log.error("the user's code raised", exc_info=error)
        raise failure from error


def see_log(world: World | None) -> str:
    """Return the remedy: where to find the rank's traceback, if it is written at all."""
    if world is None or not goes_to_run_folder():
        return "correct it there"
    return f"see the run folder's logs/rank-{world.rank}.log"
