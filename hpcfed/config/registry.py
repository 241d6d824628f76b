"""Built-in entries of a package by name: its files are found, not listed, so a new entry is one new file.

A name is its file's, with hyphens: ``fedexp-m`` is ``fedexp_m.py``. A file with several entries has a table of them.
Files that begin with "_" hold what entries share.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any


def names(package: str) -> list[str]:
    """Return the names of a package's entries, without importing them."""
    found = (file.name for file in pkgutil.iter_modules(import_module(package).__path__))
    return sorted(name.replace("_", "-") for name in found if not name.startswith("_"))


def entry(package: str, name: str) -> ModuleType:
    """Return the file of an entry."""
    return import_module(f"{package}.{name.replace('-', '_')}")


def tables(package: str, attribute: str) -> dict[str, Any]:
    """Return all entries of the tables, name → entry, that files of a package have under one name."""
    found = (getattr(entry(package, name), attribute, {}) for name in names(package))
    return {name: value for table in found for name, value in table.items()}
