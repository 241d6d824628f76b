"""The entries of a run folder, in kinds: results, which commands read; other files of a run; and everything else.

    results      the record, the models, private parts, checkpoints, `RESULTS`
    of a run     lock, logs, pages, figures, tables, earlier runs, temporary files: never read as results
    of samples   `FEDERATION`, the data of a run from Python; its recipe has their hash
    others       the user's

A result must be a regular file in the folder: through a link, a file elsewhere would be read or written.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from hpcfed.errors import InputError
from hpcfed.run_folder.code import ACCEPTED_CODE_FILE, CODE_FILE
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.files import (
    CERTIFICATE,
    CLIENTS,
    FEDERATION,
    HALF_STATES,
    LOCK,
    PRIVATE_FILES,
    RECIPE,
    REMAINS,
    RESULT,
    SIGNATURE,
    STATES,
)
from hpcfed.run_folder.rounds import RECORD
from hpcfed.run_folder.update_hashes import UPDATE_HASHES

RESULTS = (RECIPE, "environment.json", RECORD, CLIENTS, UPDATE_HASHES, CODE_FILE, RESULT, *MODELS)
"""Results at the top of the folder."""
CHECKPOINTS, PRIVATE, LOGS, FIGURES, TABLES = "checkpoints", "private", "logs", "figures", "tables"
INSIDE = {CHECKPOINTS: (STATES, HALF_STATES), PRIVATE: (PRIVATE_FILES, re.compile(r"\..*\.\d+\.tmp"))}
"""Folder in the run folder → patterns of names of its results, and of its temporary files."""
OF_A_RUN = re.compile(
    rf"{re.escape(LOCK)}|{ACCEPTED_CODE_FILE}|{FEDERATION}|{LOGS}|{FIGURES}|{TABLES}|report\.html|previous-\d+"
)
WRITTEN = (
    *(LOCK, ACCEPTED_CODE_FILE, CERTIFICATE, SIGNATURE, *RESULTS),
    *(CHECKPOINTS, PRIVATE, FEDERATION, LOGS, FIGURES, TABLES),
)
"""Entries that commands write to."""

LINK = "a link, or no file, in the place of one that hpcfed writes"


@dataclass
class Contents:
    """The entries of a run folder, as paths relative to it.

    Attributes:
        results: results that are regular files.
        unusable: results, and the certificate and its signature, that are links, folders or devices instead of files.
        others: entries that no run writes.
    """

    results: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def is_result(name: str) -> bool:
    """Whether a path, relative to the run folder, is that of a result."""
    folder, _, file = name.rpartition("/")
    return name in RESULTS if not folder else folder in INSIDE and INSIDE[folder][0].fullmatch(file) is not None


def contents_of(folder: Path) -> Contents:
    """Return the entries of a run folder by kind; no file is opened, and no link followed.

    Raises:
        OSError: a folder cannot be listed.
    """
    found = Contents()
    for entry in _entries(folder):
        if entry.name in INSIDE:
            if entry.is_dir(follow_symlinks=False):
                _add_inside(found, entry)
            else:
                found.unusable.append(entry.name)
        elif entry.name in RESULTS or entry.name in (CERTIFICATE, SIGNATURE):
            is_file = entry.is_file(follow_symlinks=False)
            if not is_file:
                found.unusable.append(entry.name)
            elif entry.name in RESULTS:
                found.results.append(entry.name)
        elif not (OF_A_RUN.fullmatch(entry.name) or REMAINS.fullmatch(entry.name)):
            found.others.append(entry.name)
    return found


def refuse_link(path: Path) -> None:
    """Refuse a path that is a link, where a command would create a folder and write into it.

    Raises:
        InputError: `path` is a link.
    """
    if path.is_symlink():
        remedy = "remove it, or choose another output"
        raise InputError(LINK, where=str(path), got=f"a link to {path.readlink()}", remedy=remedy)


def refuse_links(folder: Path) -> None:
    """Refuse a run folder with a link, a pipe or a socket in the place of an entry that a run writes.

    A link may lead to any file of the user; a pipe would be waited on. A character device, or a link to one, is no
    harm: ``logs/rank-0.log`` may be /dev/null.

    Raises:
        InputError: there is such an entry; the message has its path.
        OSError: a folder cannot be listed.
    """
    for entry in _entries(folder) if folder.is_dir() else []:
        inner = _entries(entry.path) if entry.name == LOGS and entry.is_dir(follow_symlinks=False) else []
        for one in (entry, *inner) if entry.name in WRITTEN else ():
            path = Path(one.path)
            if not path.is_char_device():
                refuse_link(path)
                _refuse_special(path)


def _refuse_special(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):  # a run there may have removed it meanwhile
        raise InputError(LINK, where=str(path), got="a pipe, a socket or a device", remedy="remove it")


def refuse_unusable(folder: Path) -> None:
    """Refuse a run folder in which a result is a link, a folder or a device.

    Raises:
        InputError: there is such a result; the message has its path.
        OSError: a folder cannot be listed.
    """
    for name in contents_of(folder).unusable:
        raise InputError(LINK, where=str(folder / name), remedy="put the run's own file there")


def _add_inside(found: Contents, folder: os.DirEntry[str]) -> None:
    ours, temporary = INSIDE[folder.name]
    for entry in _entries(folder.path):
        name = f"{folder.name}/{entry.name}"
        if ours.fullmatch(entry.name):
            (found.results if entry.is_file(follow_symlinks=False) else found.unusable).append(name)
        elif not temporary.fullmatch(entry.name):
            found.others.append(name)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)
