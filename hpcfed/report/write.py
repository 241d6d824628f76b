"""Where a report may be written, and writing its files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.files import write_whole
from hpcfed.report.read import Run, is_run_folder

PAGE = "report.html"
MARKER = '<meta name="generator" content="hpcfed report'  # near the top of every page of ours
DEFAULT_FOLDER = Path("report")


def choose_folder(runs: Sequence[Run], output: Path | None) -> Path:
    """Return the folder for the report: `output`, else the run's own for a single run, else ``report``.

    Raises InputError: it holds files that are not a report of ours, or it cannot be written.
    """
    own = runs[0].folder if len(runs) == 1 else None
    folder = output or own or DEFAULT_FOLDER
    page = folder / PAGE
    if own is None or not (folder.exists() and folder.samefile(own)):
        _check_is_ours(folder)
    if page.exists() and not _is_our_page(page):
        raise InputError(
            "not written by hpcfed report, so left alone",
            where=str(page),
            remedy="move it away, or name another folder with --output",
        )
    _make_writable(folder / "figures")
    return folder


def _check_is_ours(folder: Path) -> None:
    another = "name an empty or new folder with --output"
    if folder.exists() and not folder.is_dir():
        raise InputError("not a folder", where=str(folder), remedy=another)
    if is_run_folder(folder):
        raise InputError("the folder of a run, not of this report", where=str(folder), remedy=another)
    if folder.exists() and any(folder.iterdir()) and not (folder / PAGE).exists():
        raise InputError("holds files, but no report of ours", where=str(folder), remedy=another)


def _is_our_page(page: Path) -> bool:
    with page.open("rb") as file:
        return MARKER.encode() in file.read(1024)


def _make_writable(folder: Path) -> None:
    remedy = "name a folder that can be written with --output"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(error.strerror or "cannot be made", where=str(folder), remedy=remedy) from error
    if not os.access(folder, os.W_OK) or not os.access(folder.parent, os.W_OK):
        raise InputError("cannot be written", where=str(folder.parent), remedy=remedy)


def write_report(folder: Path, page: str, figures: Mapping[str, bytes], known: Sequence[str]) -> Path:
    """Write the `figures`, name → content, and then the page, and return the page's path.

    Figures of an earlier report, which are `known` by name but not drawn this time, are removed.
    """
    for name, content in figures.items():
        _write(folder / "figures" / name, content)
    for name in set(known) - set(figures):
        (folder / "figures" / name).unlink(missing_ok=True)
    _write(folder / PAGE, page.encode())
    return folder / PAGE


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise EnvironmentFailure(error.strerror or "cannot be written", where=str(path)) from error
