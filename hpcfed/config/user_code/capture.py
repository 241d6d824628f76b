"""Objects given from Python as the text of one module: functions, classes, lambdas and instances, with what they use.

What a file of the user's or an installed package defines is imported; what a script, a notebook or another function
defines stands in the text, by its source. Values of closures, of defaults and of global names are literals, or pickled
(`hpcfed.config.user_code.values`). A definition with values of its own, under names that others use, is made by a
function that has them as arguments.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import dis
import inspect
import keyword
import linecache
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from hpcfed.config.user_code.finder import CELLS, GIVEN, NOTEBOOK, is_own
from hpcfed.config.user_code.values import NotStorable, stored

RESTORED = "_restored"
"""Name in the module of what makes an object of its stored values."""
HEAD = f"from __future__ import annotations\n\nfrom {stored.__module__} import restored as {RESTORED}\n"
LITERALS = (bool, int, float, str, bytes, type(None), type(...))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_ABSENT = object()


@dataclass(frozen=True)
class Statement:
    """A piece of the module's text.

    Attributes:
        file, node: where the user wrote the definition in it, and that definition; "" and None for other pieces.
    """

    text: str
    file: str = ""
    node: ast.Lambda | Definition | None = None

    def compiled(self, place: str, line: int) -> CodeType:
        """Return its code, with the user's file and lines, which errors name; else `place`, from `line` on."""
        tree = ast.parse(self.text)
        ast.increment_lineno(tree, line - 1)
        if self.node is not None:
            for one in ast.walk(tree):  # also the function around a definition
                ast.copy_location(one, self.node)
            wanted = type(self.node), getattr(self.node, "name", None)
            written = next(one for one in ast.walk(tree) if (type(one), getattr(one, "name", None)) == wanted)
            for one, own in zip(ast.walk(written), ast.walk(self.node), strict=False):
                ast.copy_location(one, own)
        flags = __future__.annotations.compiler_flag
        return compile(tree, self.file if self.node is not None else place, "exec", flags, dont_inherit=True)


class Capture:
    """The text of a module that has the objects that were added.

    Attributes:
        folders: of the user's files that it imports.
        statements: the pieces of the text, in order.
    """

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.statements: list[Statement] = [Statement(HEAD.rstrip("\n"))]
        self._bound: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._alive: list[Any] = []
        self._count = 0

    @property
    def text(self) -> str:
        """The module's source."""
        return joined(self.statements)

    def add(self, value: Any, name: str) -> str:
        """Add an object, and return the name that it has in the module: `name`, or that with a number.

        Raises:
            NotStorable: saying what of it no text can stand for.
        """
        expression = self._expression(value, name)
        if expression.isidentifier() and expression in self._bound and not expression.startswith("_"):
            return expression
        return self._assign(expression, self._free(name), value)

    def add_maker(self, value: Any, name: str) -> str:
        """Add a function that returns an object, another copy at each call; return its name.

        Raises:
            NotStorable: saying what of it no text can stand for.
        """
        is_code = isinstance(value, FunctionType | type)
        made = self._expression(value, f"{name}_function") if is_code else self._restored(value)
        free = self._free(name)
        self._bound[free] = _ABSENT
        self._add(f"def {free}():\n    return {made}")
        return free

    def _add(self, text: str, file: str = "", node: ast.Lambda | Definition | None = None) -> None:
        is_shown = file and is_own(file)
        self.statements.append(Statement(text, file, node) if is_shown else Statement(text))

    def _restored(self, value: Any) -> str:
        return f"{RESTORED}({stored(value, self._name_in_pickle)!r}, globals())"

    def _assign(self, expression: str, name: str, value: Any) -> str:
        self._bound[name] = value
        self._add(f"{name} = {expression}")
        return name

    def _free(self, name: str) -> str:
        """Return a name that nothing in the module has: this one, or with a number."""
        name = name if name.isidentifier() and not keyword.iskeyword(name) else "given"
        found, number = name, 2
        while found in self._bound or hasattr(builtins, found):
            found, number = f"{name}_{number}", number + 1
        return found

    def _private(self) -> str:
        self._count += 1
        return f"_given_{self._count}"

    def _remember(self, value: Any, name: str) -> str:
        self._alive.append(value)  # ids are those of living objects
        self._known[id(value)] = name
        return name

    def _expression(self, value: Any, wish: str) -> str:
        """Return an expression that has this value in the module, after statements that it needs."""
        if (literal := _literal(value)) is not None:
            return literal
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, ModuleType):
            return self._imported_module(value, wish)
        if inspect.isclass(value) or inspect.isroutine(value):
            if (found := importable(value)) is not None:
                return self._import(value, *found)
            if isinstance(value, FunctionType | type):
                return self._define(value, wish)
        restored = self._restored(value)
        return self._remember(value, self._assign(restored, self._private(), value))

    def _name_in_pickle(self, value: Any) -> str | None:
        if isinstance(value, ModuleType):
            return self._expression(value, value.__name__.rpartition(".")[2])
        found = importable(value)
        if found is not None:
            self.note(found[0])
            return None
        expression = self._expression(value, getattr(value, "__name__", "given"))
        return expression if expression.isidentifier() else self._assign(expression, self._private(), value)

    def note(self, module: str) -> None:
        """Note the folder from which a module of the user's is imported."""
        top = sys.modules.get(module.partition(".")[0])
        file = getattr(top, "__file__", None)
        if isinstance(file, str) and is_own(file):
            path = Path(file).absolute()
            folder = path.parents[1] if path.name == "__init__.py" else path.parent
            if folder not in self.folders:
                self.folders.append(folder)

    def _imported_module(self, module: ModuleType, wish: str) -> str:
        if module.__name__ in (NOTEBOOK, GIVEN) or sys.modules.get(module.__name__) is not module:
            raise NotStorable(f"module {module.__name__}")
        self.note(module.__name__)
        name = self._free(wish)
        self._bound[name] = module
        package, _, last = module.__name__.rpartition(".")
        statement = f"from {package} import {last}" if package else f"import {last}"
        self._add(statement + (f" as {name}" if name != last else ""))
        return self._remember(module, name)

    def _import(self, value: Any, module: str, qualname: str) -> str:
        self.note(module)
        root, _, rest = qualname.partition(".")
        if module == builtins.__name__:
            return qualname
        holder = getattr(sys.modules[module], root)
        if id(holder) not in self._known:
            name = self._free(root)
            self._bound[name] = holder
            self._add(f"from {module} import {root}" + (f" as {name}" if name != root else ""))
            self._remember(holder, name)
        return f"{self._known[id(holder)]}.{rest}" if rest else self._known[id(holder)]

    def _define(self, value: Any, wish: str) -> str:
        """Add the definition of a function or class, and return its name."""
        file, node = _found(value)
        is_lambda = isinstance(node, ast.Lambda)
        own = wish if is_lambda else node.name
        variables = dict(_closure(value))
        around = vars(sys.modules[value.__module__]) if inspect.isclass(value) else value.__globals__
        node = copy.deepcopy(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = []  # what they made of it is another object
        free = self._free(own)
        self._bound[free] = value
        self._remember(value, free)
        if not isinstance(node, ast.ClassDef):
            self._give_defaults(node, value)
        arguments: dict[str, str] = {}
        for name in sorted(_global_names(node) - {"__class__", "__name__"}):
            found = variables.get(name, around.get(name, _ABSENT))
            if found is _ABSENT or (found is value and name == own and not is_lambda):  # it names itself
                continue
            if name in variables or not self._bind(name, found):
                arguments[name] = self._expression(found, name)
        self._add(_statement(node, own, free, self._private(), arguments), file, node)
        return free

    def _bind(self, name: str, value: Any) -> bool:
        """Give a name of the module to a value that a definition uses; False if it is another's."""
        if name in self._bound:
            there = self._bound[name]
            same = _literal(value)
            return there is value or (same is not None and _literal(there) == same)
        if name.startswith("_given_") or name == RESTORED:
            return False
        if getattr(builtins, name, _ABSENT) is value:
            return True
        expression = self._expression(value, name)
        if expression != name:
            if name in self._bound:
                return self._bound[name] is value
            self._assign(expression, name, value)
        return True

    def _give_defaults(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, function: Any) -> None:
        """Replace the expressions of arguments' defaults by the values that they had."""

        def given(value: Any) -> ast.expr:
            return ast.parse(self._expression(value, "default"), mode="eval").body

        for number, value in enumerate(function.__defaults__ or ()):
            if not isinstance(node.args.defaults[number], ast.Constant):
                node.args.defaults[number] = given(value)
        for number, (argument, default) in enumerate(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)):
            if default is not None and not isinstance(default, ast.Constant):
                node.args.kw_defaults[number] = given(function.__kwdefaults__[argument.arg])


def joined(statements: Sequence[Statement]) -> str:
    """Return the text of a module of these pieces."""
    return "\n\n".join(one.text for one in statements) + "\n"


def _statement(node: Any, own: str, free: str, maker: str, arguments: Mapping[str, str]) -> str:
    """Return the statements that define a function or class under the name `free`; those with arguments by `maker`."""
    source = ast.unparse(node)
    if isinstance(node, ast.Lambda):
        if not arguments:
            return f"{free} = {source}"
        body = f"    return {source}"
    else:
        if not arguments and own == free:
            return source
        body = "\n".join(f"    {line}" for line in _indented(node))
        body += f"\n    return {own}"
    given = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"def {maker}({', '.join(arguments)}):\n{body}\n\n\n{free} = {maker}({given})"


def _indented(node: ast.stmt) -> list[str]:
    """Return the lines of a statement inside a function; those of texts over several lines keep their content."""
    holder = ast.parse("def holder():\n    pass").body[0]
    assert isinstance(holder, ast.FunctionDef)
    holder.body = [node]
    return [line.removeprefix("    ") for line in ast.unparse(holder).splitlines()[1:]]


def _literal(value: Any) -> str | None:
    """Return the text of a plain value; None for another."""
    if isinstance(value, float) and type(value) is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if type(value) in LITERALS:
        return "..." if value is ... else repr(value)
    if type(value) in (list, tuple, set, dict) and value:
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else [*value]
        plain = all(type(part) in LITERALS or type(part) in (list, tuple, dict) for part in parts)
        if len(parts) > 10_000 or not plain or any(_literal(part) is None for part in parts):
            return None
        if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
            return None
        return repr(value) if not isinstance(value, set) else "{" + ", ".join(sorted(map(repr, value))) + "}"
    return repr(value) if type(value) in (list, tuple, set, dict) else None


def importable(value: Any) -> tuple[str, str] | None:
    """Return (module, qualified name) by which a function or class can be imported; None if it cannot."""
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module in (NOTEBOOK, GIVEN) or "<" in qualname or not qualname:
        return None
    holder: Any = sys.modules.get(module)
    if holder is None or getattr(holder, "__spec__", None) is None:
        return None
    for part in qualname.split("."):
        holder = getattr(holder, part, _ABSENT)
    return (module, qualname) if holder is value else None


def _closure(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a function's closure, or of those of a class's methods."""
    if inspect.isclass(value):  # whose base may be one of the function around it
        yield from ((base.__name__, base) for base in value.__bases__ if "<locals>" in base.__qualname__)
    functions = [value] if isinstance(value, FunctionType) else list(_methods(value))
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell that is still empty
                yield name, cell.cell_contents


def _methods(kind: type) -> Iterator[FunctionType]:
    """Yield the functions that are defined in a class's body."""
    for member in vars(kind).values():
        for one in (member, getattr(member, "__func__", None), getattr(member, "fget", None)):
            function = inspect.unwrap(one) if isinstance(one, FunctionType) else None
            if isinstance(function, FunctionType) and function.__qualname__.startswith(f"{kind.__qualname__}."):
                yield function


def _found(value: Any) -> tuple[str, Any]:
    """Return the file and the syntax of a function or class.

    Raises:
        NotStorable: there is none, or it is not that of the code that runs.
    """
    name = getattr(value, "__qualname__", repr(value))
    if isinstance(value, FunctionType):
        code = value.__code__
        tree = _tree(code.co_filename, name)
        _check_runs(code, tree, name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and _is_of(node, code):
                return code.co_filename, node
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (node.name, _first_line(node)) == (code.co_name, code.co_firstlineno):
                return code.co_filename, node
        raise NotStorable(f"{name}, which has no source")
    for file, line in _places(value):
        with suppress(NotStorable):
            for node in ast.walk(_tree(file, name)):
                if not isinstance(node, ast.ClassDef) or node.name != value.__name__:
                    continue
                if line is None or _first_line(node) <= line <= (node.end_lineno or 0):
                    return file, node
    raise NotStorable(f"class {name}, which has no source")


def _places(kind: type) -> Iterator[tuple[str, int | None]]:
    """Yield files, and lines of them, in which a class may be defined."""
    for function in _methods(kind):
        yield function.__code__.co_filename, function.__code__.co_firstlineno
    with suppress(OSError, TypeError):
        yield inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1]
    if kind.__module__ == NOTEBOOK:
        for file in reversed([*linecache.cache]):
            if file.startswith(CELLS) or "ipykernel" in file:
                yield file, None


def _tree(file: str, name: str) -> ast.Module:
    lines = linecache.getlines(file)
    if not lines:
        raise NotStorable(f"{name}, which has no source")
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError) as error:
        raise NotStorable(f"{name}, whose source is no Python") from error


def _check_runs(code: CodeType, tree: ast.Module, name: str) -> None:
    """Refuse source that was edited since it was run: as one module, or as a notebook runs it, statement by statement.

    Attributes of what the same module imports are compiled to other instructions.
    """
    parts = (*(ast.Module([statement], []) for statement in tree.body), tree)
    pending = [compile(part, code.co_filename, "exec", dont_inherit=True) for part in parts]
    while pending:
        one = pending.pop()
        if _content(one) == _content(code):
            return
        pending += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    raise NotStorable(f"{name}, whose source was changed since it was run")


def _content(code: CodeType) -> tuple[object, ...]:
    """Return what two compilations of one source have in common; constants as text, which tells 1 from 1.0."""
    constants = [
        sorted(map(repr, one)) if isinstance(one, frozenset) else repr(one)
        for one in code.co_consts
        if not isinstance(one, CodeType)
    ]
    return code.co_name, code.co_firstlineno, code.co_code, code.co_names, constants


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _is_of(node: ast.Lambda, code: CodeType) -> bool:
    """Whether a lambda expression has the place of a code object."""
    body = node.body
    wanted = body.lineno, body.end_lineno, body.col_offset, body.end_col_offset
    return node.lineno == code.co_firstlineno and wanted in set(code.co_positions())


def _global_names(node: Any) -> set[str]:
    """Return the names of the module around that a definition uses, at once or when it is called."""
    statement = ast.Expr(node) if isinstance(node, ast.Lambda) else node
    tree = ast.fix_missing_locations(ast.Module([statement], []))
    pending, found = [compile(tree, "<names>", "exec", dont_inherit=True)], set[str]()
    while pending:
        code = pending.pop()
        found |= {str(one.argval) for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        pending += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return found
