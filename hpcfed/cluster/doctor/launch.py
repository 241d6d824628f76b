"""The launcher of the ranks, the MPI library, and the SLURM job.

A separate process queries the MPI library without starting MPI. So ``doctor`` can report a library that cannot be
loaded, and a run with one rank needs no MPI.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATIENCE = 20.0
"""Seconds for an MPI library or ``mpirun`` to report its version; a cold parallel file system takes several."""

LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("PALS_RANKID", "PALS"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    ("MPI_LOCALRANKID", "MPICH's mpirun"),
    ("SLURM_PROCID", "srun"),
    ("FLUX_TASK_RANK", "Flux"),
    ("PMIX_RANK", "PMIx"),
    ("PMI_RANK", "PMI"),
)
"""Pairs of an environment variable and the launcher that sets it. The first variable that is set decides, so a launcher
that may run inside an srun step comes before srun.
"""


@dataclass(frozen=True)
class Mpi:
    """The MPI library that mpi4py loads, and the first ``mpirun`` on the PATH; unknown values are None.

    Attributes:
        standard: version of the MPI standard that the library implements.
        abi: binary interface of the library (see `abi_of`).
        threads: thread level that the library granted, ``single`` to ``multiple``; None if MPI is not running.
        path: path of the library.
        problem: why no library can be loaded; "" if one can.
        mpirun: path of ``mpirun``; None if there is none on the PATH.
        reads_gpu_memory: whether the library accepts buffers in CUDA memory; None if MPI is not running.
    """

    library: str | None
    vendor: str | None
    standard: str | None
    abi: str | None
    threads: str | None = None
    path: str | None = None
    problem: str = ""
    mpirun: str | None = None
    mpirun_vendor: str | None = None
    reads_gpu_memory: bool | None = None


@dataclass(frozen=True)
class LauncherJob:
    """A SLURM job.

    Attributes:
        tasks: number of tasks of the running step; None outside of a step.
        seconds_left: seconds until the job's time limit; None if SLURM does not report it.
    """

    id: str
    nodes: int | None
    node_list: str
    tasks: int | None
    seconds_left: float | None


def find_mpi(described: Mapping[str, Any]) -> Mpi:
    """Query the MPI library that mpi4py loads, and the ``mpirun`` on the PATH.

    Python is called with ``-P``: else a file ``mpi4py.py`` in the working folder, a stranger's, would run.

    Args:
        described: result of `World.describe`; {} if MPI is not running.
    """
    mpirun = shutil.which("mpirun")
    mpirun_vendor = vendor_of(_output([mpirun, "--version"])[1]) if mpirun else None
    loads, library = _output([sys.executable, "-P", "-m", "mpi4py", "--mpi-lib-version"])
    lines = library.replace("\0", "").strip().splitlines() or [""]
    if not loads:
        return Mpi(None, None, None, None, problem=lines[-1], mpirun=mpirun, mpirun_vendor=mpirun_vendor)
    knows_standard, standard = _output([sys.executable, "-P", "-m", "mpi4py", "--mpi-std-version"])
    knows_path, path = _output([sys.executable, "-P", "-m", "mpi4py", "--mpi-library"])
    return Mpi(
        library=" ".join(lines[0].split(", ")[0].replace("Version:", "").split()),
        vendor=vendor_of(library),
        standard=standard.strip() if knows_standard else None,
        abi=abi_of(path.strip(), library) if knows_path else None,
        threads=described.get("mpi_threads"),
        path=path.strip() if knows_path else None,
        mpirun=mpirun,
        mpirun_vendor=mpirun_vendor,
        reads_gpu_memory=described.get("mpi_reads_gpu_memory"),
    )


def vendor_of(text: str) -> str | None:
    """Return the vendor named in the version text of an MPI library or ``mpirun``; None if it is unknown."""
    lower = text.lower()
    known = {
        "open mpi": "Open MPI",
        "openrte": "Open MPI",
        "prte": "Open MPI",
        "intel": "Intel MPI",
        "mvapich": "MVAPICH",
        "cray": "Cray MPICH",
        "mpich": "MPICH",
        "hydra": "MPICH",
    }
    return next((vendor for sign, vendor in known.items() if sign in lower), None)


def abi_of(path: str, library: str) -> str | None:
    """Return the binary interface (ABI) of an MPI library from its path; None if unknown.

    ``libmpi_abi`` is the MPI standard's, new in MPI 5.0; ``libmpi.so.12`` is MPICH's, also used by Intel MPI, MVAPICH
    and Cray MPICH, with a version that the library's text has (``MPICH 18:2:6``); ``libmpi.so.40`` is that of Open MPI
    2 to 5.
    """
    if "libmpi_abi" in path:
        return "MPI standard"
    if "libmpi.so.40" in path:
        return "Open MPI"
    if "libmpi.so.12" in path or "libmpich" in path:
        version = next((line.split(":", 1)[1].strip() for line in library.splitlines() if "ABI:" in line), "")
        return f"MPICH {version}".strip()
    return None


def find_launcher(variables: Mapping[str, str]) -> str | None:
    """Return the name of the launcher that set a rank's environment variables; None if no known launcher did."""
    return next((name for sign, name in LAUNCHERS if sign in variables), None)


def find_job(variables: Mapping[str, str]) -> LauncherJob | None:
    """Return the SLURM job that the environment variables describe; None outside of a job."""
    if "SLURM_JOB_ID" not in variables:
        return None
    end = _number(variables, "SLURM_JOB_END_TIME")
    return LauncherJob(
        id=variables["SLURM_JOB_ID"],
        nodes=_number(variables, "SLURM_JOB_NUM_NODES"),
        node_list=variables.get("SLURM_JOB_NODELIST", ""),
        tasks=_number(variables, "SLURM_STEP_NUM_TASKS"),
        seconds_left=end - time.time() if end else None,
    )


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdigit() else None


def _output(command: list[str]) -> tuple[bool, str]:
    """Return (True, stdout) of a command that succeeds; (False, stderr or the reason) of one that fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, done.stdout if done.returncode == 0 else done.stderr
