"""The files of a study's results: each is written atomically; a later call removes files that it does not write again.

``tables/.written`` and ``figures/.written`` list the files beside them with the SHA-256 hash of their content, in the
format of ``sha256sum``. A call removes a file only if an earlier list names it, the call does not write it, and its
content still has the listed hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hpcfed.io.atomic import write_whole, writing
from hpcfed.io.text import read_text
from hpcfed.lab.study.plan import FIGURES, TABLES

LIST = ".written"
LONG_AGO = 3600.0
"""Age in seconds from which a temporary file counts as abandoned: jobs on other nodes write results here, too."""


def replace_results(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write `files` (path in the study's folder → content); remove other tables and figures that earlier calls wrote.

    A killed call leaves lists of both the old and the new files, so that the next call knows all of them.

    Raises:
        EnvironmentFailure: the disk is full or failed.
    """
    places = [folder / name for name in (TABLES, FIGURES)]
    own = [{Path(name).name: _hash(text) for name, text in files.items() if Path(name).parent.name == place.name}
           for place in places]  # fmt: skip
    with writing(folder):
        before = [set(_listed(place / LIST)) for place in places]
        for place, old, names in zip(places, before, own, strict=True):
            if old or names:
                place.mkdir(parents=True, exist_ok=True)
                write_whole(place / LIST, _text(old | _entries(names)))
        for name, text in files.items():
            write_whole(folder / name, text)
        now = max((folder / name).stat().st_mtime for name in files)  # by the clock of the file system
        _remove_remains(folder, {Path(name).name for name in files}, now)
        for place, old, names in zip(places, before, own, strict=True):
            for hashed, name in old:
                path = place / name
                if (
                    name not in names
                    and path.is_file()
                    and not path.is_symlink()
                    and _hash(path.read_bytes()) == hashed
                ):
                    path.unlink()
            if old or names:
                write_whole(place / LIST, _text(_entries(names)))
                _remove_remains(place, {LIST, *names, *(name for _, name in old)}, now)


def _entries(names: Mapping[str, str]) -> set[tuple[str, str]]:
    return {(hashed, name) for name, hashed in names.items()}


def _remove_remains(folder: Path, names: Collection[str], now: float) -> None:
    """Remove temporary files of the files `names` that a killed process left at least `LONG_AGO` before `now`."""
    for path in folder.glob(".*.tmp"):
        found = re.fullmatch(r"\.(.+)\.[1-9][0-9]{0,8}\.tmp", path.name, re.ASCII)
        with suppress(FileNotFoundError):
            if found and found[1] in names and now - path.stat().st_mtime > LONG_AGO:
                path.unlink()


def _hash(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _text(entries: set[tuple[str, str]]) -> str:
    return "".join(f"{hashed}  {name}\n" for hashed, name in sorted(entries, key=lambda entry: entry[::-1]))


def _listed(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (hash, name) of each file in a ``.written`` list; nothing if the list is missing or damaged."""
    try:
        lines = read_text(path).splitlines()
    except (FileNotFoundError, ValueError):
        return
    for line in lines:
        hashed, _, name = line.partition("  ")
        if name and Path(name).name == name:
            yield hashed, name
