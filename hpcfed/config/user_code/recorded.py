"""User code from the record of a run: imported from its recorded text, as modules that have no file.

What a script or a notebook defined is taken out of it by name, with all that it uses: the definitions alone, since the
script's other lines would start its run again.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import PurePosixPath
from types import CodeType, ModuleType

from hpcfed.config.user_code.capture import HEAD
from hpcfed.config.user_code.finder import GIVEN, NOTEBOOK
from hpcfed.config.user_code.modules import Source, forget
from hpcfed.errors import InputError

MAIN = "recorded_main"
"""Module of the definitions that were those of the running script, or of a notebook."""
PLACE = "/recorded"
"""Beginning of the file names in tracebacks; there is no such folder."""


def modules_of(sources: Mapping[str, Source], references: Sequence[str]) -> dict[str, Source]:
    """Return the recorded modules by the names under which they are imported.

    Args:
        sources: of ``code.json``, by module.
        references: the recipe's, ``package.module:name``.

    Raises:
        InputError: the text of one is not recorded, or no Python.
    """
    found, main = {}, list[str]()
    for name, source in sources.items():
        if source.text is None:
            in_file = name.partition(":")[0] not in (GIVEN, NOTEBOOK)
            why = "it is compiled, or was gone" if in_file else "it has objects that no text stands for"
            raise InputError(f"the text of module {name} is not recorded: {why}")
        if not source.is_whole:
            raise InputError(f"the recorded text of module {name} does not have its recorded hash")
        if name == NOTEBOOK:
            wanted = [one.partition(":")[2] for one in references if one.partition(":")[0] == NOTEBOOK]
            main.append(definitions(source.text, wanted))
        elif name.startswith(f"{NOTEBOOK}:"):
            main.append(source.text.removeprefix(HEAD.rstrip()) if main else source.text)
        else:
            found[name] = source
    if main:
        found[MAIN] = Source(f"{MAIN}.py", "", "", "\n".join(main))
    for name, source in found.items():
        _compiled(name, source)
    return found


def as_recorded(reference: str) -> str:
    """Return a reference of a recipe to what is imported from the record."""
    module, _, name = reference.partition(":")
    return f"{MAIN}:{name}" if module == NOTEBOOK else reference


@contextmanager
def recorded_code(modules: Mapping[str, Source]) -> Iterator[None]:
    """Import these modules from their text while the block runs; loaded ones of their names are forgotten."""
    finder = _Finder(modules)
    packages = {name.partition(".")[0] for name in modules}

    def forget_all() -> None:
        forget([name for name in sys.modules if name.partition(".")[0] in packages])

    forget_all()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        forget_all()


def definitions(text: str, names: Sequence[str]) -> str:
    """Return the statements of a script that define some names, and all that these use, in their order.

    Raises:
        InputError: the text is no Python.
    """
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        raise InputError("the recorded script is no Python", got=str(error)) from None
    binds, uses = [{*_bound(one)} for one in statements], [{*_used(one)} for one in statements]
    kept, wanted = set[int](), {*names}
    while wanted:
        name = wanted.pop()
        for number in (n for n, own in enumerate(binds) if name in own and n not in kept):
            kept.add(number)
            wanted |= uses[number]
    lines = text.splitlines(keepends=True)
    return "".join(_lines_of(lines, statements[number]) for number in sorted(kept))


def _lines_of(lines: Sequence[str], statement: ast.stmt) -> str:
    first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", ()))])
    text = "".join(lines[first - 1 : statement.end_lineno])
    return text if text.endswith("\n") else f"{text}\n"


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    else:
        inner = (one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.stmt))
        yield from (name for one in inner for name in _bound(one))
        stored = (one for one in ast.walk(statement) if isinstance(one, ast.Name))
        yield from (one.id for one in stored if isinstance(one.ctx, ast.Store))


def _used(statement: ast.stmt) -> Iterator[str]:
    yield from (one.id for one in ast.walk(statement) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load))


def _compiled(name: str, source: Source) -> CodeType:
    """Compile a module's text.

    Raises:
        InputError: it is no Python.
    """
    try:
        return compile(source.text or "", f"{PLACE}/{source.file}", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"the recorded text of module {name} is no Python", got=str(error)) from None


class _Finder(MetaPathFinder, Loader):
    """Finds modules among recorded sources."""

    def __init__(self, modules: Mapping[str, Source]):
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = self._modules.get(fullname)
        if source is not None:
            is_package = PurePosixPath(source.file).name == "__init__.py"
            spec = ModuleSpec(fullname, self, origin=f"{PLACE}/{source.file}", is_package=is_package)
            spec.has_location = True
            return spec
        if any(name.startswith(f"{fullname}.") for name in self._modules):
            return ModuleSpec(fullname, None, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = self._modules[module.__name__]
        text, place = source.text or "", f"{PLACE}/{source.file}"
        linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
        exec(_compiled(module.__name__, source), vars(module))
