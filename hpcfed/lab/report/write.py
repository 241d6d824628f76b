"""Writing a report: its folder is chosen and checked, and each of its files is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.io.atomic import write_whole
from hpcfed.io.text import Malformed, open_file
from hpcfed.lab.report.read import Run, is_run_folder
from hpcfed.run_folder.contents import FIGURES, TABLES, refuse_link

PAGE = "report.html"
MARKER = '<meta name="generator" content="hpcfed report'  # near the top of every page of a report
BEGUN = f'<!DOCTYPE html>{MARKER}"><title>hpcfed report</title><p>Not finished: hpcfed report has to be called again.\n'
DEFAULT_FOLDER = Path("report")
ANOTHER = "name an empty or new folder with --output"


def choose_folder(runs: Sequence[Run], output: Path | None) -> Path:
    """Return the folder for the report: `output`; if None, the run's folder for a single run, else ``report``.

    The folder is not created yet: a process killed while it draws the figures leaves nothing behind.

    Raises InputError: the folder holds files that are not a report's, or cannot be written.
    """
    own = runs[0].folder if len(runs) == 1 else None
    folder = output or own or DEFAULT_FOLDER
    page = folder / PAGE
    try:
        if own is None or not (folder.exists() and folder.samefile(own)):
            _check_is_ours(folder)
        if page.exists() and not _is_our_page(page):
            raise InputError(
                "not written by hpcfed report, so left alone",
                where=str(page),
                remedy="move it away, or name another folder with --output",
            )
        for name in (FIGURES, TABLES):
            refuse_link(folder / name)
        for place in (folder, folder / FIGURES, folder / TABLES):
            _check_writable(place)
    except OSError as error:
        raise InputError(error.strerror or "cannot be read", where=str(folder), remedy=ANOTHER) from error
    return folder


def _check_is_ours(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError("not a folder", where=str(folder), remedy=ANOTHER)
    if is_run_folder(folder):
        raise InputError("the folder of a run, not of this report", where=str(folder), remedy=ANOTHER)
    if folder.exists() and not (folder / PAGE).exists() and any(not _is_remains(entry) for entry in folder.iterdir()):
        raise InputError("holds files, but no report of ours", where=str(folder), remedy=ANOTHER)


def _is_remains(entry: Path) -> bool:
    """Whether a killed report may have left this entry: a temporary page, or an empty ``figures`` or ``tables``."""
    if entry.is_dir():
        return entry.name in (FIGURES, TABLES) and not any(entry.iterdir())
    return entry.match(_temporary(PAGE))


def _temporary(name: str) -> str:
    """Return a glob pattern for the temporary files that `write_whole` makes for the file `name`."""
    return f".{name}.*.tmp"


def _is_our_page(page: Path) -> bool:
    with suppress(Malformed), open_file(page) as file:
        return MARKER.encode() in file.read(1024)
    return False


def _check_writable(folder: Path) -> None:
    """Raise InputError if the folder, or its nearest existing parent, cannot be written."""
    place = next(above for above in (folder, *folder.absolute().parents) if above.exists())
    if not place.is_dir():
        raise InputError("Not a directory", where=str(place), remedy="name a folder that can be written with --output")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(
            "cannot be written", where=str(place), remedy="name a folder that can be written with --output"
        )


def write_report(folder: Path, page: str, files: Mapping[str, str | bytes], known: Sequence[str]) -> Path:
    """Write `files` (path inside `folder` → content) and then the page; return the page's path.

    If there is no page yet, a placeholder is written first: it marks the folder as a report's even if writing is cut
    short. Files of an earlier report (paths in `known`) that are not among `files` are removed.

    Raises EnvironmentFailure: a file cannot be written.
    """
    target = folder / PAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            write_whole(target, BEGUN)
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_whole(folder / name, content)
        for name in known:
            path = folder / name
            if name not in files:
                path.unlink(missing_ok=True)
            _remove_all(path.parent, _temporary(path.name))
        _remove_all(folder, _temporary(PAGE))
        write_whole(target, page)
    except OSError as error:
        where = str(error.filename or folder)
        raise EnvironmentFailure(error.strerror or "cannot be written", where=where) from error
    return target


def _remove_all(folder: Path, pattern: str) -> None:
    for remains in folder.glob(pattern):
        remains.unlink(missing_ok=True)
