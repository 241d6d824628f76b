"""User code: its loaded modules, and their sources as this process imported them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import xxhash

from hpcfed.config.user_code.capture import Capture
from hpcfed.config.user_code.finder import GIVEN, NOTEBOOK, as_prefixes, find_in, is_extension, is_own
from hpcfed.config.user_code.reached import reached
from hpcfed.config.user_code.values import NotStorable
from hpcfed.io.text import open_file


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

    @property
    def is_whole(self) -> bool:
        """Whether the text has the hash."""
        return self.text is not None and xxhash.xxh3_128_hexdigest(self.text.encode()) == self.hash

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
_earlier: dict[str, object] = {}
"""Modules that were loaded when the present run began → the stamps of their imports."""


def run_begins() -> None:
    """Note which modules are loaded already: by an earlier run of this process, or by the program that calls."""
    _earlier.clear()
    _earlier.update({name: _stamp(module) for name, module in [*sys.modules.items()] if isinstance(module, ModuleType)})


def outdated(python_path: Sequence[Path]) -> list[str]:
    """Return loaded user modules that are out of date: edited since, or hidden by another folder's of the same name.

    A new process has none; a notebook, or a script that runs several recipes, would go on with the old ones.
    """
    importlib.invalidate_caches()
    own = dict(_own_files())
    folders = as_prefixes(python_path)
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
    spec = find_in(python_path, name)
    file = _file_of(sys.modules[name]) if name in sys.modules else None
    found = None if spec is None else spec.origin
    return found is not None and file is not None and os.path.realpath(found) != os.path.realpath(file)


def _is_edited(name: str) -> bool:
    module = sys.modules[name]
    stamp, source = _loaded.get(name, (None, None))
    return source is not None and stamp is _stamp(module) and read_source(source.file, source.path).hash != source.hash


def loaded(folders: Sequence[Path], references: Iterable[str], leave_out: Iterable[str] = ()) -> dict[str, Source]:
    """Return the sources of the loaded modules that lie under the folders, and of a notebook's callables, by module.

    Modules that were loaded before the run began are left out where the code of the references does not import them.

    Args:
        folders: the recipe's.
        references: its ``package.module:name`` texts; the folders that hold these packages count, too.
        leave_out: modules to leave out.
    """
    references = [*references]
    ignored, roots = {*leave_out}, as_prefixes([*folders, *_homes(references, folders)])
    found = {}
    for name, file in _own_files():
        root = next((root for root in roots if file.startswith(root)), None)
        if root is not None and name not in ignored:
            found[name] = _source_of(name, file, file[len(root) :])
    found |= _of_packages(references, folders)
    without_module = _of_main(references) | _of_given(references)
    if before := {name for name in found if _earlier.get(name) is _stamp(sys.modules[name])}:
        named = {text.partition(":")[0] for text in references} - {NOTEBOOK, GIVEN}
        packages = {name.partition(".")[0] for name in found}
        used = reached(named, [source.text for source in without_module.values()], partial(_text_of, packages))
        found = {name: source for name, source in found.items() if used is None or name in used or name not in before}
    return found | without_module


def _text_of(packages: Collection[str], name: str) -> str | None:
    """Return the text of a user's module, or of one of these packages; None if it has none, "" for all others."""
    file = _file_of(sys.modules.get(name))
    if file is None or not (is_own(file) or name.partition(".")[0] in packages):
        return ""
    return _source_of(name, file, file).text


def _of_packages(references: Sequence[str], python_path: Sequence[Path]) -> dict[str, Source]:
    """Return the sources of the loaded modules of installed packages to which the recipe refers."""
    found = {}
    for package in sorted({text.partition(":")[0].partition(".")[0] for text in references}):
        origin = _origin(package, python_path)
        if origin is None or is_own(origin) or not is_extension(origin):
            continue
        path = Path(origin)
        root = path.parent.parent if path.name == "__init__.py" else path.parent
        for name, module in [*sys.modules.items()]:
            file = _file_of(module) if name == package or name.startswith(f"{package}.") else None
            if file is not None and Path(file).is_relative_to(root):
                found[name] = _source_of(name, file, str(Path(file).relative_to(root)))
    return found


def _of_given(references: Sequence[str]) -> dict[str, Source]:
    """Return the source of the objects given from Python, if the recipe refers to them."""
    source = getattr(sys.modules.get(GIVEN), "__source__", None)
    is_named = any(text.partition(":")[0] == GIVEN for text in references)
    return {GIVEN: source} if is_named and isinstance(source, Source) else {}


def source_without_file(file: str) -> Source:
    """Return the present source of what has no file: of a notebook, or given from Python."""
    if file == f"{GIVEN}.py":
        return _of_given([f"{GIVEN}:"]).get(GIVEN, Source(file, "", "", None))
    return _in_notebook(file.partition(":")[2])


def _of_main(references: Sequence[str]) -> dict[str, Source]:
    """Return the sources of the running script, or of the notebook's callables, if the recipe refers to them."""
    names = [name for module, _, name in (text.partition(":") for text in references) if module == NOTEBOOK]
    main = sys.modules.get(NOTEBOOK)
    if not names or main is None:
        return {}
    file = _file_of(main)
    if file is not None and is_own(file):
        return {NOTEBOOK: _source_of(NOTEBOOK, file, Path(file).name)}
    return {f"{NOTEBOOK}:{name}": _in_notebook(name) for name in names}


def _in_notebook(name: str) -> Source:
    """Return the source of a notebook's function or class, with all that it uses.

    Where no text stands for it, the hash is that of its own bytecode, so that edits are noticed.
    """
    variables, capture, file = vars(sys.modules[NOTEBOOK]), Capture(), f"{NOTEBOOK}:{name}"
    if name not in variables:
        return Source(file, "", "", None)
    value = variables[name]
    try:
        added = capture.add(value, name)
    except NotStorable:
        code = getattr(value, "__code__", None)
        names = repr((code.co_names, [one for one in code.co_consts if not isinstance(one, CodeType)])) if code else ""
        return Source(file, "", xxhash.xxh3_128_hexdigest(code.co_code + names.encode()) if code else "", None)
    text = capture.text + (f"\n\n{name} = {added}\n" if added != name else "")
    return Source(file, "", xxhash.xxh3_128_hexdigest(text.encode()), text)


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
    return replace(source, file=relative)  # a run before may have found the module from another folder


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
    main = sys.modules.get(NOTEBOOK)  # multiprocessing knows it by another name, too
    named = ((name, _file_of(module)) for name, module in [*sys.modules.items()] if module is not main)
    yield from sorted((name, file) for name, file in named if file is not None and is_own(file))


def is_installed(reference: str, python_path: Sequence[Path]) -> bool:
    """Whether ``package.module:name`` is in hpcfed, in an installed package or in Python itself."""
    origin = _origin(reference, python_path)
    return origin is not None and not is_own(origin)


def is_recorded(reference: str, python_path: Sequence[Path]) -> bool:
    """Whether the code of ``package.module:name`` is recorded: the user's, or that of an extension."""
    origin = _origin(reference, python_path)
    return origin is None or is_own(origin) or is_extension(origin)


def _homes(references: Iterable[str], python_path: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders in which the packages of the user's references lie."""
    for origin in dict.fromkeys(_origin(reference, python_path) for reference in references):
        if origin is not None:
            path = Path(origin)
            yield path.parent.parent if path.name == "__init__.py" else path.parent


def _origin(reference: str, python_path: Sequence[Path]) -> str | None:
    """Return the file of a reference's top-level package; None if it has none, and for ``__main__``."""
    package = reference.partition(":")[0].partition(".")[0]
    if package == NOTEBOOK:
        return None
    with suppress(ImportError, ValueError):
        spec = find_in(python_path, package) or importlib.util.find_spec(package)
        return spec.origin if spec is not None and spec.has_location else None
    return None


def unrecorded(files: Mapping[str, Source], references: Sequence[str]) -> list[str]:
    """Return the references whose module, or function or class of a notebook, is not among recorded sources."""
    return [one for one in references if not {one, one.partition(":")[0]} & files.keys()]


def lies_in(folder: Path, files: Mapping[str, Source], references: Sequence[str], python_path: Sequence[Path]) -> bool:
    """Whether an import of the references may run a file in a folder, which `python_path` or a package there leads to.

    Args:
        folder: the folder, without links.
        files: the recorded sources, by module.
        references: the recipe's, ``package.module:name``.
        python_path: the recipe's folders.
    """
    modules = [one.partition(":")[0].replace(".", os.sep) for one in references]
    names = ["", *modules, *(source.file for source in files.values())]
    roots = _roots(references, python_path)
    return any(Path(os.path.realpath(root / name)).is_relative_to(folder) for root in roots for name in names)


def _roots(references: Sequence[str], python_path: Sequence[Path]) -> list[Path]:
    """Return the folders from which the references are imported, with links kept and with links resolved."""
    return [Path(root) for root in as_prefixes([*python_path, *_homes(references, python_path)])]


def at_hand(files: Mapping[str, Source], references: Sequence[str], python_path: Sequence[Path]) -> bool:
    """Whether an import from the recipe's folders, or the running script, gives just these sources."""
    roots = _roots(references, python_path)
    here = _of_main(references) | _of_given(references)

    def is_there(name: str, then: Source) -> bool:
        if name.partition(":")[0] in (NOTEBOOK, GIVEN):
            return name in here and here[name].hash == then.hash
        return any(read_source(then.file, str(root / then.file)).hash == then.hash for root in roots)

    return all(is_there(name, then) for name, then in files.items())
