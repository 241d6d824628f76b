"""The structure of the package: its rooms by level, cycles between them, the longest modules, and its size.

    python jobs/bench/rooms.py
    python jobs/bench/rooms.py --since COMMIT

The second says how many of COMMIT's lines of code are still there and how many came later, by git blame; it takes
minutes. A line that moved or was only indented anew is as old as it was.

A room is a folder of hpcfed/, or a module at its root. A room's level is one above the highest of those it imports
from, at run time or for types; rooms that import each other in a circle have none, and are listed with those imports.
Lines of code are those without comments, blank lines and docstrings; a docstring may stand below an attribute.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpcfed"
LONGEST = 5
KINDS = {
    "training": "types rng errors version arithmetic algorithms cohort client local_round models data evaluation "
    "reduce ranks simulation sentinel loop parts updates server",
    "recipe, runs, commands": "config assembly run_folder io api cli cluster __init__ __main__",
    "laboratory": "lab provenance",
}
"""Kind → its rooms."""


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


def lines_of_code(text: str) -> set[int]:
    """Return the numbers of a module's lines that hold code, from 1."""
    skipped, found = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skipped |= {*range(node.lineno, int(node.end_lineno or 0) + 1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            found |= {*range(token.start[0], token.end[0] + 1)}
    return found - skipped


def sizes(folder: str) -> Counter[str]:
    """Return lines of code by entry of a folder at the root of the repository."""
    found = Counter[str]()
    for path in (ROOT / folder).rglob("*.py"):
        lines = lines_of_code(path.read_text(encoding="utf-8"))
        found[path.relative_to(ROOT / folder).with_suffix("").parts[0]] += len(lines)
    return found


def git(*command: str) -> str:
    """Return what git prints on this repository; where it fails it has said why."""
    done = subprocess.run(["git", "-C", ROOT, *command], check=False, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        sys.exit(2)
    return done.stdout


def ages(path: str, since: int) -> tuple[int, int]:
    """Return how many of a committed module's lines of code are no younger than `since`, in seconds, and the others."""
    code, old, number, committed = lines_of_code(git("show", f"HEAD:{path}")), 0, 0, 0
    for line in git("blame", "-w", "-M", "-C", "--line-porcelain", "HEAD", "--", path).split("\n"):
        if line.startswith("committer-time "):
            committed = int(line.split()[1])
        elif line.startswith("\t"):
            number += 1
            old += number in code and committed <= since
    return old, len(code) - old


def print_ages(commit: str) -> None:
    """Print, by room or module, how many lines of code a commit already had and how many were added since."""
    since, found = int(git("log", "-1", "--format=%ct", commit)), defaultdict[str, Counter[str]](Counter)
    paths = [path for path in git("ls-files", "hpcfed", "data_prep").split() if path.endswith(".py")]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for path, (old, new) in zip(paths, threads.map(lambda path: ages(path, since), paths), strict=True):
            for room in ("hpcfed and data_prep", "/".join(path.split("/")[:3])):
                found[room].update(old=old, new=new)
    for room, lines in sorted(found.items(), key=lambda entry: -entry[1].total()):
        print(f"{room}: {lines['old']:,} of {commit}'s, {lines['new']:,} added since")


def print_sizes() -> None:
    """Print lines of code by room, by kind, and of the other folders."""
    rooms, prepared = sizes("hpcfed"), sizes("data_prep")
    of_lab, of_tables = sizes("hpcfed/lab"), sizes("data_prep/tables")
    print("lines by room:    ", ", ".join(f"{room} {lines:,}" for room, lines in rooms.most_common()))
    print("of the laboratory:", ", ".join(f"{room} {lines:,}" for room, lines in of_lab.most_common()))
    by_kind = {kind: sum(rooms[room] for room in own.split()) for kind, own in KINDS.items()}
    assert sum(by_kind.values()) == rooms.total(), "a room without a kind"
    by_kind["data preparation"] = prepared.total()
    print("lines by kind:    ", ", ".join(f"{kind} {lines:,}" for kind, lines in by_kind.items()))
    print(f"hpcfed and data_prep {rooms.total() + prepared.total():,} (tables {of_tables.total():,});",
          ", ".join(f"{folder} {sizes(folder).total():,}" for folder in ("jobs", "tests")))  # fmt: skip


def print_structure() -> None:
    """Print the rooms by level, the longest modules and functions, and lines of code."""
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
    at_root = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    length = median(lines for lines, _ in modules)
    entries = len(at_root - {"__init__.py", "__main__.py"})
    print(f"{entries} entries at the root, {len(uses)} rooms, {len(modules)} modules, median {length:.0f} lines")
    print("longest modules:  ", ", ".join(f"{name} {lines}" for lines, name in sorted(modules, reverse=True)[:LONGEST]))
    longest = sorted(functions, reverse=True)[:LONGEST]
    print("longest functions:", ", ".join(f"{name} {lines}" for lines, name in longest))
    print_sizes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--since", metavar="COMMIT", help="say how many lines are older; takes minutes")
    since = parser.parse_args().since
    print_ages(since) if since else print_structure()


if __name__ == "__main__":
    main()
