"""PBS, used from inside a job."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping

from hpcfed.cluster.step.scheduler import Step, answer

CANCELS_BY_TERM = True
WAITING = "HQW"
"""States of waiting jobs: held (H), queued (Q), waiting for a start time (W)."""


def name_of(step: Step) -> str:
    """Return the job's index in its array, which is the same after a resubmission; "" for a job outside of an array."""
    return os.environ.get("PBS_ARRAY_INDEX", "") if step.array else ""


def prepare(step: Step) -> Mapping[str, str]:
    """Return no variables: mpirun passes the environment on to the ranks."""
    return {}


def signal_ranks(step: Step, process: subprocess.Popen[bytes]) -> None:
    """Send SIGUSR1 to the launcher, which passes it on to the ranks."""
    process.send_signal(signal.SIGUSR1)


def is_wanted(step: Step) -> bool:
    """Return whether the script may be submitted again; for an array, False while jobs with the array's name wait.

    The script submits the whole array, so only one of the array's jobs may submit it again.
    """
    name = os.environ.get("PBS_JOBNAME", "")
    return not step.array or not name or not _waiting(name)


def send_back(step: Step) -> bool:
    """Submit the job's script again; return whether PBS accepts it."""
    return _pbs("qsub", str(step.script)) is not None


def cancel_waiting(name: str) -> None:
    """Delete the waiting jobs with the job name `name`."""
    if waiting := _waiting(name):
        _pbs("qdel", *waiting)


def _waiting(name: str) -> list[str]:
    return (_pbs("qselect", "-u", getpass.getuser(), "-N", name, "-s", WAITING) or "").split()


def _pbs(name: str, *words: str) -> str | None:
    """Return the output of a PBS command; None if it fails.

    The command is searched on the job's PATH, then on the submitter's (PBS_O_PATH). It runs with both as its PATH,
    since qsub records its PATH as the PBS_O_PATH of the job that it submits.
    """
    path = os.pathsep.join(os.environ.get(name, "") for name in ("PATH", "PBS_O_PATH"))
    return answer(shutil.which(name, path=path) or name, *words, env={**os.environ, "PATH": path})
