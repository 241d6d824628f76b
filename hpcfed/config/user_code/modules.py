"""User code: its loaded modules, and their sources as this process imported them.

A file is user code if it belongs neither to Python, nor to an installed package, nor to hpcfed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import xxhash

from hpcfed.io.text import open_file

INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, in any environment."""
CELLS = ("<ipython-input", "<stdin>")
"""File names of code typed at a prompt; a notebook's cells name a file in a temporary folder."""
NOTEBOOK = "__main__"


@dataclass(frozen=True)
class Source:
    """A file of the user's code, or a function or class of a notebook.

    Attributes:
        file: its path from the folder in which its module was found, or ``__main__:name``.
        path: its absolute path; "" in a notebook.
        hash: XXH3-128 of its bytes, hexadecimal; "" for a file that is not there.
        text: its content; None for a compiled module.
    """

    file: str
    path: str
    hash: str
    text: str | None

    def differs_at(self, other: Source) -> int | None:
        """Return the first line, from 1, in which two texts differ."""
        if self.text is None or other.text is None:
            return None
        lines, others = self.text.splitlines(), other.text.splitlines()
        for number, (line, its) in enumerate(zip(lines, others, strict=False), start=1):
            if line != its:
                return number
        return min(len(lines), len(others)) + 1


_loaded: dict[str, tuple[object, Source]] = {}
"""Module → the stamp of its import (see `_stamp`), and its source as read right after."""


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


def search(python_path: Sequence[Path]) -> None:
    """Put these folders, in this order, at the front of the import path."""
    wanted = [str(folder) for folder in python_path]
    if sys.path[: len(wanted)] != wanted:
        sys.path[:] = [*wanted, *(entry for entry in sys.path if entry not in wanted)]


def outdated(python_path: Sequence[Path]) -> list[str]:
    """Return loaded user modules that are out of date: edited since, or hidden by another folder's of the same name.

    A new process has none; a notebook, or a script that runs several recipes, would go on with the old ones.
    """
    importlib.invalidate_caches()
    own = dict(_own_files())
    folders = _with_real(python_path)
    packages = {name.partition(".")[0] for name in own}
    found = {name for name in packages if _is_found_elsewhere(name, python_path)}
    here = [name for name, file in own.items() if file.startswith(folders)]
    if any(_is_edited(name) for name in here):
        found |= {name.partition(".")[0] for name in here}  # all of them: one may hold objects that another defined
    return [name for name in own if name.partition(".")[0] in found]


def forget(names: Iterable[str]) -> None:
    """Drop these modules, so that Python imports them anew."""
    for name in names:
        cached = getattr(sys.modules.pop(name, None), "__cached__", None)
        _loaded.pop(name, None)
        if cached is not None:  # bytecode is matched by whole seconds and size alone
            with suppress(OSError):
                Path(cached).unlink()


def _is_found_elsewhere(name: str, python_path: Sequence[Path]) -> bool:
    """Whether the recipe's folders have another file for a loaded module."""
    spec = PathFinder.find_spec(name, [str(folder) for folder in python_path])
    file = _file_of(sys.modules[name]) if name in sys.modules else None
    found = None if spec is None else spec.origin
    return found is not None and file is not None and os.path.realpath(found) != os.path.realpath(file)


def _is_edited(name: str) -> bool:
    module = sys.modules[name]
    stamp, source = _loaded.get(name, (None, None))
    return source is not None and stamp is _stamp(module) and read_source(source.file, source.path).hash != source.hash


def loaded(folders: Sequence[Path], references: Iterable[str], leave_out: Iterable[str] = ()) -> dict[str, Source]:
    """Return the sources of the loaded modules that lie under the folders, and of a notebook's callables, by module.

    Args:
        folders: the recipe's.
        references: its ``package.module:name`` texts; the folders that hold these packages count, too.
        leave_out: modules to leave out.
    """
    references = [*references]
    ignored, roots = {*leave_out}, _with_real([*folders, *_homes(references)])
    found = {}
    for name, file in _own_files():
        root = next((root for root in roots if file.startswith(root)), None)
        if root is not None and name not in ignored:
            found[name] = _source_of(name, file, file[len(root) :])
    return found | _of_main(references)


def _of_main(references: Sequence[str]) -> dict[str, Source]:
    """Return the sources of the running script, or of the notebook's callables, if the recipe refers to them."""
    names = [name for module, _, name in (text.partition(":") for text in references) if module == NOTEBOOK]
    main = sys.modules.get(NOTEBOOK)
    if not names or main is None:
        return {}
    file = _file_of(main)
    if file is not None and is_own(file):
        return {NOTEBOOK: _source_of(NOTEBOOK, file, Path(file).name)}
    return {f"{NOTEBOOK}:{name}": source_in_notebook(name) for name in names}


def source_in_notebook(name: str) -> Source:
    """Return the source of a notebook's function or class, with all the notebook's definitions that it uses."""
    parts: dict[str, str] = {}
    variables = vars(sys.modules[NOTEBOOK])
    pending = [name]
    while pending:
        used = pending.pop()
        if used in parts or used not in variables:
            continue
        value = variables[used]
        if inspect.isclass(value) or inspect.isfunction(value):
            if value.__module__ == NOTEBOOK:
                codes = [*_codes_of(value)]
                parts[used] = _text_of(value, codes)
                pending += [other for code in codes for other in code.co_names]
        elif isinstance(value, bool | int | float | str | tuple | None):
            parts[used] = f"{used} = {value!r}\n"
    text = "\n".join(parts[used] for used in sorted(parts))
    return Source(f"{NOTEBOOK}:{name}", "", xxhash.xxh3_128_hexdigest(text.encode()) if text else "", text)


def _text_of(value: Any, codes: Sequence[CodeType]) -> str:
    """Return the source of a function or class; its bytecode if it was typed at a prompt."""
    with suppress(OSError, TypeError):
        return inspect.getsource(value)
    with suppress(OSError, TypeError):
        return "\n".join(inspect.getsource(code) for code in codes)
    return "\n".join(f"{code.co_name} {code.co_names} {code.co_consts!r} {code.co_code.hex()}" for code in codes)


def _codes_of(value: Any) -> Iterator[CodeType]:
    """Yield the code objects of a function, or of a class's methods, nested functions included."""
    members = vars(value).values() if inspect.isclass(value) else [value]
    pending = [code for code in (getattr(member, "__code__", None) for member in members) if code is not None]
    while pending:
        code = pending.pop()
        yield code
        pending += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def read_source(file: str, path: str) -> Source:
    """Return a source as it is on disk now."""
    try:
        with open_file(Path(path)) as opened:
            content = opened.read()
    except (OSError, ValueError):  # ValueError: no file, or text that is no path
        return Source(file, path, "", None)
    is_text = path.endswith(".py")
    return Source(file, path, xxhash.xxh3_128_hexdigest(content), content.decode(errors="replace") if is_text else None)


def _source_of(name: str, file: str, relative: str) -> Source:
    """Return a loaded module's source as this process first read it, right after the import."""
    stamp, source = _loaded.get(name, (None, None))
    if source is None or stamp is not _stamp(sys.modules[name]) or source.path != file:
        source = read_source(relative, file)
        _loaded[name] = (_stamp(sys.modules[name]), source)
    return source


def _stamp(module: ModuleType) -> object:
    """Return an object that a reload of the module replaces."""
    return vars(module).get("__spec__") or module


def _file_of(module: Any) -> str | None:
    file = getattr(module, "__dict__", {}).get("__file__")  # without triggering a lazy module's import
    if not isinstance(file, str) or file.startswith("<"):
        return None
    return file if file.startswith(os.sep) else str(Path.cwd() / file)


def _own_files() -> Iterator[tuple[str, str]]:
    """Yield (module, file) of the loaded user modules, without the running script."""
    main = sys.modules.get(NOTEBOOK)
    for name, module in sorted(sys.modules.items()):
        file = None if module is main else _file_of(module)  # multiprocessing knows it by another name, too
        if file is not None and is_own(file):
            yield name, file


def _with_real(folders: Iterable[Path]) -> tuple[str, ...]:
    """Return the folders as path prefixes, with links kept and with links resolved."""
    named = [os.path.normpath(Path(folder).absolute()) for folder in folders]
    paths = [path for name in named for path in (name, os.path.realpath(name))]
    return tuple(dict.fromkeys(f"{path.rstrip(os.sep)}{os.sep}" for path in paths))


def is_installed(reference: str) -> bool:
    """Whether ``package.module:name`` is in hpcfed, in an installed package or in Python itself."""
    origin = _origin(reference)
    return origin is not None and not is_own(origin)


def _homes(references: Iterable[str]) -> Iterator[Path]:
    """Yield the folders in which the packages of the user's references lie."""
    for origin in dict.fromkeys(_origin(reference) for reference in references):
        if origin is not None:
            path = Path(origin)
            yield path.parent.parent if path.name == "__init__.py" else path.parent


def _origin(reference: str) -> str | None:
    """Return the file of a reference's top-level package; None if it has none, and for ``__main__``."""
    package = reference.partition(":")[0].partition(".")[0]
    if package == NOTEBOOK:
        return None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
        return spec.origin if spec is not None and spec.has_location else None
    return None
