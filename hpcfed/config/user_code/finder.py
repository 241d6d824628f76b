"""The import of user code, from the recipe's folders, without a change of ``sys.path``.

A folder on ``sys.path`` answers every import of the process: a file beside the recipe that is named like a library
would be run in the library's place when hpcfed, or another library, imports that late. Here the folders answer for what
the recipe names, and for what files in them import.

A file is user code if it belongs neither to Python, nor to an installed package, nor to hpcfed.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType

from hpcfed.errors import InputError

NOTEBOOK = "__main__"
GIVEN = "from_python"
"""Module of the objects that a call of Python gave; it has no file (`hpcfed.config.user_code.given`)."""
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, in any environment."""
CELLS = ("<ipython-input", "<stdin>")
"""File names of code typed at a prompt; a notebook's cells name a file in a temporary folder."""
IMPORTS = ("<frozen importlib", importlib.__file__)
"""File names of the frames between an import and the finder."""


@cache
def is_own(file: str) -> bool:
    """Whether a file, as named by a module or a frame, is user code."""
    if file.startswith("<"):
        return file.startswith(CELLS)
    return not file.startswith(_libraries()) and not any(name in INSTALLED for name in Path(file).parts)


@cache
def _libraries() -> tuple[str, ...]:
    """Folders of Python, of its packages, and of hpcfed, as path prefixes."""
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    ours = Path(__file__).parents[2]
    folders = [*python, str(ours), str(ours.with_name("data_prep"))]
    return tuple({f"{folder}{os.sep}" for path in folders for folder in (path, os.path.realpath(path))})


def as_prefixes(folders: Iterable[Path]) -> tuple[str, ...]:
    """Return folders as prefixes of paths, with links kept and with links resolved."""
    named = [os.path.normpath(Path(folder).absolute()) for folder in folders]
    paths = [path for name in named for path in (name, os.path.realpath(name))]
    return tuple(dict.fromkeys(f"{path.rstrip(os.sep)}{os.sep}" for path in paths))


def find_in(folders: Sequence[Path], name: str) -> ModuleSpec | None:
    """Return the top-level module of a name in some folders, in their order; None if none has it.

    As in Python a folder without ``__init__.py``, such as the clone of a package, is no module if a package that can
    be imported has its name.
    """
    found = PathFinder.find_spec(name, [str(folder) for folder in folders])
    if found is None or found.has_location:
        return found
    others = (finder.find_spec(name, None) for finder in sys.meta_path if not isinstance(finder, _Finder))
    return None if any(other is not None and other.has_location for other in others) else found


class _Finder(MetaPathFinder):
    """Finds top-level modules in the recipe's folders, where the recipe or a file in them asks for one.

    Attributes:
        folders: of the recipe whose code was imported last.
        wanted: the module that the recipe names, while it is imported.
    """

    def __init__(self) -> None:
        self.folders: Sequence[Path] = ()
        self.wanted: str | None = None

    def _is_asked_from_them(self) -> bool:
        """Whether the import that is going on stands in a file of the folders."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith((*IMPORTS, __file__)):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(as_prefixes(self.folders))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or not self.folders or fullname in sys.stdlib_module_names:
            return None
        return find_in(self.folders, fullname) if fullname == self.wanted or self._is_asked_from_them() else None


_FINDER = _Finder()


def import_named(name: str, python_path: Sequence[Path], key: str) -> ModuleType:
    """Import a module that a recipe names: from its folders first, then from the installed packages.

    Args:
        name: ``package.module``.
        python_path: the folders.
        key: the recipe's key, for messages.

    Raises:
        InputError: a file of the folders has the name of one of Python's modules, or of another package.
        Exception: the module may raise any.
    """
    package = name.partition(".")[0]
    _refuse_namesake(package, python_path, key)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.folders, _FINDER.wanted = list(python_path), package
    try:
        return importlib.import_module(name)
    finally:
        _FINDER.wanted = None


def _refuse_namesake(package: str, python_path: Sequence[Path], key: str) -> None:
    found = find_in(python_path, package)
    own = None if found is None else found.origin or next(iter(found.submodule_search_locations or ()), None)
    if own is None or not is_own(own):
        return
    if package in sys.stdlib_module_names:
        other = "Python"
    else:
        elsewhere = _found_elsewhere(package, python_path)
        if elsewhere is None or is_own(elsewhere) or os.path.realpath(elsewhere) == os.path.realpath(own):
            return
        other = f"the installed packages, {elsewhere}"
    named = Path(own).parent.name if Path(own).name == "__init__.py" else Path(own).name
    what = f"{key}: {named} has the name of a module of {other}: which of them is meant is not known"
    raise InputError(what, where=own, remedy="rename yours, here and in the recipe")


def _found_elsewhere(package: str, python_path: Sequence[Path]) -> str | None:
    """Return the file of a top-level module that is found without the recipe's folders; None if there is none."""
    ours = {os.path.realpath(folder) for folder in python_path}
    spec = PathFinder.find_spec(package, [entry for entry in sys.path if os.path.realpath(entry or ".") not in ours])
    if spec is None and package not in sys.modules:
        spec = find_spec(package)  # by the finders of editable installations
    return spec.origin if spec is not None and spec.has_location else None
