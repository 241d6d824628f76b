"""The structure of the package: its rooms by level, cycles between them, the longest modules and functions.

    python jobs/bench/rooms.py

A room is a folder of hpcfed/, or a module at its root. A room's level is one above the highest of those it imports
from, at run time or for types; rooms that import each other in a circle have none, and are listed with those imports.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

PACKAGE = Path(__file__).resolve().parents[2] / "hpcfed"
LONGEST = 5


def name_of(path: Path) -> str:
    """Return a module's dotted name inside the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names inside the package that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpcfed."):
            yield str(node.module).removeprefix("hpcfed.")
        elif isinstance(node, ast.ImportFrom) and node.module == "hpcfed":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("hpcfed.") for alias in node.names if alias.name.startswith("hpcfed."))


def levels(uses: dict[str, set[str]]) -> tuple[list[set[str]], set[str]]:
    """Return the rooms by level, lowest first, and those that are left since they import each other in a circle."""
    left, found = set(uses), []
    while ready := {room for room in left if not uses[room] & left - {room}}:
        found.append(ready)
        left -= ready
    return found, left


def main() -> None:
    uses: dict[str, set[str]] = defaultdict(set)
    why: dict[tuple[str, str], list[str]] = defaultdict(list)
    modules, functions = [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), name_of(path)
        tree = ast.parse(text)
        modules.append((text.count("\n"), name))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.append((int(node.end_lineno or 0) - node.lineno + 1, f"{name}.{node.name}"))
        room = name.partition(".")[0]
        if room == "__init__":  # the package's face, which imports what needs torch when it is asked for
            continue
        uses[room] |= set()
        for other in imported(tree):
            if other.partition(".")[0] != room:
                uses[room].add(other.partition(".")[0])
                why[room, other.partition(".")[0]].append(f"{name} → {other}")
    found, left = levels(uses)
    for number, rooms in enumerate(found):
        print(f"level {number:2}  {' '.join(sorted(rooms))}")
    for room in sorted(left):
        print(f"in a circle: {room}: {'; '.join(why[room, other][0] for other in sorted(uses[room] & left))}")
    print(f"{len(uses)} rooms, {len(modules)} modules, median {median(lines for lines, _ in modules):.0f} lines")
    print("longest modules:  ", ", ".join(f"{name} {lines}" for lines, name in sorted(modules, reverse=True)[:LONGEST]))
    longest = sorted(functions, reverse=True)[:LONGEST]
    print("longest functions:", ", ".join(f"{name} {lines}" for lines, name in longest))


if __name__ == "__main__":
    main()
