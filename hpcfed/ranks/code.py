"""A digest of the program's own code, by which ranks find that they were started with different copies of it."""

from __future__ import annotations

import hashlib
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
