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
from itertools import islice
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
MOST_FILES = 64
"""Files of Python in an installed package of methods or models; a library, such as torchvision, has more."""
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
    folders = {f"{folder}{os.sep}" for path in python for folder in (path, os.path.realpath(path))}
    return (*folders, *_ours())


@cache
def is_extension(origin: str) -> bool:
    """Whether an installed package is recorded as user code is, if a recipe names it: one of `MOST_FILES` or fewer."""
    path = Path(origin)
    if origin.startswith(_ours()) or not any(name in INSTALLED for name in path.parts):
        return False
    return path.name != "__init__.py" or sum(1 for _ in islice(path.parent.rglob("*.py"), MOST_FILES + 1)) <= MOST_FILES


def is_blamed(file: str) -> bool:
    """Whether an error in a file is one of user code: also of the installed packages that recipes have named."""
    return is_own(file) or file.startswith(tuple(_FINDER.packages))


@cache
def _ours() -> tuple[str, ...]:
    """Folders of hpcfed, as path prefixes."""
    ours = Path(__file__).parents[2]
    return as_prefixes([ours, ours.with_name("data_prep")])


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
        packages: prefixes of the files of installed packages that recipes have named.
    """

    def __init__(self) -> None:
        self.folders: Sequence[Path] = ()
        self.wanted: str | None = None
        self.packages: set[str] = set()

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
        module = importlib.import_module(name)
    finally:
        _FINDER.wanted = None
    origin = getattr(sys.modules[package], "__file__", None) or ""
    if is_extension(origin):
        _FINDER.packages.add(origin.removesuffix("__init__.py"))
    return module


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
