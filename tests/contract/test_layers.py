"""Dependencies point one way, and what must start fast or everywhere imports neither torch nor MPI."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcfed import registry
from hpcfed.algorithms import names
from tests.launch import ROOT, launch

LEVELS = (
    {"bits", "errors", "registry", "rng", "version"},
    {"types"},
    {"io"},
    {"ranks"},
    {"environment", "user_code"},
    {"config"},
    {"algorithms", "cohort", "data", "models", "reduce", "vendor"},
    {"client", "round_checks", "run_folder"},
    {"observers", "parts", "report"},
    {"cite", "evaluation", "local_round", "watch"},
    {"setup", "simulation", "stopping"},
    {"checkpoint", "record"},
    {"clock", "doctor", "tools", "trail"},
    {"remarks"},
    {"loop", "rewind", "vectors"},
    {"api", "submit", "sweep", "verify"},
    {"loaded"},
    {"export"},
    {"reproduce", "scaling", "study", "whatif"},
    {"cli"},
    {"__main__"},
)
"""Parts of the package, lowest first: a part imports from lower levels and from itself."""
LEVEL = {part: number for number, parts in enumerate(LEVELS) for part in parts}

ONLY = {
    "bits": set(),
    "types": {"bits", "errors", "rng"},
    "rng": set(),
    "io": {"errors"},
    "user_code": {"errors", "io", "ranks", "rng", "types"},
    "config": {"errors", "io", "registry", "user_code"},
    "reduce": {"bits", "errors", "types", "ranks"},
    "algorithms": {"bits", "types", "config", "errors", "registry", "user_code"},
    "report": {"algorithms", "config", "errors", "io", "run_folder", "version"},
    "watch": {"errors", "io", "report", "run_folder"},
}
"""Where the design allows less than the levels do."""
OF_DATA_PREP = {"data", "errors", "io", "registry"}
"""What of hpcfed the preparation of data may use."""


def imports(path: Path) -> Iterator[str]:
    """Yield the absolute names a file imports, at run time or for types, anywhere in it."""
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


def test_every_part_has_a_level():
    assert {part(path) for path in files("hpcfed")} - {"__init__"} <= set(LEVEL)


@pytest.mark.parametrize("path", files("hpcfed"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    own = part(path)
    if own == "__init__":  # the package's face, which imports what needs torch when it is asked for
        return
    above = {other for other in parts_of_hpcfed(path) - {own} if LEVEL.get(other, -1) >= LEVEL[own]}
    assert not above
    assert parts_of_hpcfed(path) - {own} <= ONLY.get(own, set(LEVEL))


def test_one_module_imports_mpi4py():
    users = [path for path in files("hpcfed") + files("data_prep") if any("mpi4py" in name for name in imports(path))]
    assert users == [ROOT / "hpcfed" / "ranks" / "world.py"]


def test_data_prep_uses_little_of_hpcfed_and_no_torch():
    for path in files("data_prep"):
        assert parts_of_hpcfed(path) <= OF_DATA_PREP, path
        assert not [name for name in imports(path) if name.split(".")[0] == "torch"], path


FAST = (
    "hpcfed",
    "hpcfed.api",
    "hpcfed.cli.main",
    "hpcfed.config.load",
    "hpcfed.setup",
    "hpcfed.run_folder.folder",
    "hpcfed.ranks.world",
    *(f"hpcfed.models.architectures.{name}" for name in registry.names("hpcfed.models.architectures")),
    "hpcfed.report.comparison",
    "hpcfed.watch.view",
    "hpcfed.cite",
    "hpcfed.loaded",
    "hpcfed.sweep.report",
    *(f"hpcfed.algorithms.{name.replace('-', '_')}" for name in names()),
)
"""What is imported before a recipe has been checked, or where nothing is trained."""


@pytest.mark.serial
def test_what_must_start_fast_loads_neither_torch_nor_mpi():
    data_prep = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files("data_prep")]
    modules = [*FAST, *(name.removesuffix(".__init__") for name in data_prep)]
    program = f"import sys; sys.modules.update(torch=None, mpi4py=None)\nimport {', '.join(modules)}"
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
