"""The program's own code: a digest, by which ranks find that they run different copies, and how Python runs it."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("hpcfed", "data_prep")


@cache
def digest() -> str:
    """Return 12 hexadecimal digits of SHA-256 over names and contents of all Python files of hpcfed and data_prep.

    The files are those of the folders that this process imports from.
    """
    found = hashlib.sha256()
    for folder in map(Path, folders()):
        for path in sorted(path for path in folder.rglob("*.py") if path.is_file()):  # not an editor's broken link
            content = path.read_bytes()
            found.update(f"{folder.name}/{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
            found.update(content)
    return found.hexdigest()[:12]


def folders() -> tuple[str, ...]:
    """Return the folders of hpcfed and data_prep that this process imports from."""
    specs = [find_spec(package) for package in PACKAGES]
    return tuple(
        str(Path(place).resolve()) for spec in specs if spec for place in spec.submodule_search_locations or ()
    )


def python_options() -> tuple[str, ...]:
    """Return Python's options for a process of ours: ``-P``, or none.

    Without ``-P`` a file of the working folder that is named like a library would run in its place. A clone that is not
    installed is imported from the working folder itself, if that is the clone.
    """
    clone = Path(folders()[0]).parent
    searched = sys.path if sys.flags.safe_path else sys.path[1:]  # the first is the working folder, or the script's
    is_found = any(Path(place).resolve() == clone for place in searched if place)
    return ("-P",) if is_found or clone != Path.cwd() else ()
