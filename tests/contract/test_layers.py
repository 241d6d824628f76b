"""Dependencies point one way, and what must start fast or everywhere imports neither torch nor MPI."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from hpcfed.algorithms import names
from hpcfed.config import registry
from tests.launch import ROOT, launch

LEVELS = (
    {"arithmetic", "errors", "rng", "version"},
    {"types"},
    {"io"},
    {"ranks"},
    {"config"},
    {"algorithms", "cohort", "data", "models"},
    {"updates"},
    {"reduce"},
    {"client"},
    {"parts"},
    {"evaluation", "local_round"},
    {"sentinel", "server"},
    {"simulation"},
    {"run_folder"},
    {"assembly"},
    {"cluster", "loop"},
    {"api", "provenance"},
    {"lab"},
    {"cli"},
    {"__main__"},
)
"""Parts of the package, lowest first: a part imports from lower levels and from itself."""
LEVEL = {part: number for number, parts in enumerate(LEVELS) for part in parts}
MOST_ENTRIES = 29
"""At the root of the package, beside its face and `__main__`."""

ONLY = {
    "arithmetic": set(),
    "types": {"arithmetic", "errors", "rng"},
    "rng": set(),
    "io": {"errors"},
    "config": {"errors", "io"},
    "config.user_code": {"errors", "io", "ranks", "rng", "types"},
    "reduce": {"arithmetic", "errors", "types", "ranks"},
    "reduce.masks": {"reduce", "rng", "types"},
    "reduce.checks": {"cohort", "data", "errors", "ranks", "reduce", "types"},
    "algorithms": {"arithmetic", "types", "config", "errors"},
    "updates": {"arithmetic", "types", "config", "errors", "models.flat", "rng"},
    "lab.report": {"algorithms", "config", "errors", "io", "lab.frame", "run_folder", "version"},
    "lab.watch": {"errors", "io", "lab.frame", "lab.report", "run_folder"},
}
"""Where the design allows less than the levels do: modules by the beginning of their names, the longest that fits."""
OF_DATA_PREP = ("data", "errors", "io", "config.registry")
"""What of hpcfed the preparation of data may use."""
USERS_OF_LAB = {"__init__", "api", "cli", "lab"}


@cache
def imports(path: Path) -> tuple[str, ...]:
    """The absolute names a file imports, at run time or for types, anywhere in it."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"


def parts_of_hpcfed(path: Path) -> set[str]:
    """The parts that a file imports from."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("hpcfed.")}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(ROOT / "hpcfed").with_suffix("").parts[0]


def module(path: Path) -> str:
    """A file's dotted name inside the package."""
    return ".".join(path.relative_to(ROOT / "hpcfed").with_suffix("").parts).removesuffix(".__init__")


def is_in(name: str, places: Iterable[str]) -> bool:
    """Whether a dotted name inside the package is one of these modules and packages, or lies in one."""
    return any(f"{name}.".startswith(f"{place}.") for place in places)


def test_every_part_has_a_level_and_few_lie_at_the_root():
    parts = {part(path) for path in files("hpcfed")} - {"__init__"}
    assert parts <= set(LEVEL)
    assert len(parts - {"__main__"}) <= MOST_ENTRIES


@pytest.mark.parametrize("path", files("hpcfed"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    own = part(path)
    if own == "__init__":  # the package's face, which imports what needs torch when it is asked for
        return
    above = {other for other in parts_of_hpcfed(path) - {own} if LEVEL.get(other, -1) >= LEVEL[own]}
    assert not above
    limited = max((place for place in ONLY if is_in(module(path), [place])), key=len, default=None)
    if limited is not None:
        used = {name.removeprefix("hpcfed.") for name in imports(path) if name.startswith("hpcfed.")}
        assert not [name for name in used if not is_in(name, ONLY[limited] | {limited})]


def test_the_engine_does_not_use_the_laboratory():
    users = {part(path) for path in files("hpcfed") if "lab" in parts_of_hpcfed(path)}
    assert users <= USERS_OF_LAB


def test_no_folder_has_entries_that_import_each_other_in_a_circle():
    """At every depth: modules and folders of one folder can be ordered so that each imports only earlier ones."""
    known = {module(path) for path in files("hpcfed")}
    uses: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in files("hpcfed"):
        own = module(path).split(".")
        for name in imports(path):
            other = name.removeprefix("hpcfed.")
            other = other if other in known else other.rpartition(".")[0]
            if name.startswith("hpcfed.") and other in known and own != ["__init__"]:
                shared = next((k for k, (a, b) in enumerate(zip(own, other.split("."), strict=False)) if a != b), None)
                if shared is not None:
                    uses[".".join(own[:shared])][own[shared]].add(other.split(".")[shared])
    for folder, graph in uses.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as circle:
            pytest.fail(f"hpcfed.{folder}: {' → '.join(circle.args[1])}")


def test_one_module_imports_mpi4py():
    users = [path for path in files("hpcfed") + files("data_prep") if any("mpi4py" in name for name in imports(path))]
    assert users == [ROOT / "hpcfed" / "ranks" / "world.py"]


def test_the_laboratory_alone_imports_pandas():
    users = [
        path for path in files("hpcfed") + files("data_prep") if any(n.split(".")[0] == "pandas" for n in imports(path))
    ]
    assert users
    assert all(path.is_relative_to(ROOT / "hpcfed" / "lab") for path in users)


def test_data_prep_uses_little_of_hpcfed_and_no_torch():
    for path in files("data_prep"):
        used = {name.removeprefix("hpcfed.") for name in imports(path) if name.startswith("hpcfed.")}
        assert not [name for name in used if not is_in(name, OF_DATA_PREP)], path
        assert not [name for name in imports(path) if name.split(".")[0] == "torch"], path


FAST = (
    "hpcfed",
    "hpcfed.api",
    "hpcfed.cli.main",
    "hpcfed.config.load",
    "hpcfed.assembly",
    "hpcfed.run_folder.folder",
    "hpcfed.ranks.world",
    *(f"hpcfed.models.architectures.{name}" for name in registry.names("hpcfed.models.architectures")),
    "hpcfed.lab.report.comparison",
    "hpcfed.lab.watch.view",
    "hpcfed.lab.cite",
    "hpcfed.lab.loaded",
    "hpcfed.lab.sweep.report",
    *(f"hpcfed.algorithms.{name.replace('-', '_')}" for name in names()),
    *(f"hpcfed.updates.{name.replace('-', '_')}" for name in registry.names("hpcfed.updates")),
)
"""What is imported before a recipe has been checked, or where nothing is trained."""


@pytest.mark.serial
def test_what_must_start_fast_loads_no_torch_mpi_or_pandas():
    data_prep = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files("data_prep")]
    modules = [*FAST, *(name.removesuffix(".__init__") for name in data_prep)]
    program = f"import sys; sys.modules.update(torch=None, mpi4py=None, pandas=None)\nimport {', '.join(modules)}"
    done = launch(0, [], program=("-c", program))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.serial
def test_help_needs_nothing_heavy():
    program = (
        "import sys; sys.modules.update(torch=None, mpi4py=None, h5py=None, matplotlib=None, numpy=None)\n"
        "from hpcfed.cli.main import main; main()"
    )
    done = launch(0, ["--help"], program=("-c", program))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Run a recipe" in done.stdout
