"""PBS, from within a job."""

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
"""States of jobs that wait: held, queued, until a time."""


def name_of(step: Step) -> str:
    """Return the index of an array's job: a resubmitted one has another number."""
    return os.environ.get("PBS_ARRAY_INDEX", "") if step.array else ""


def prepare(step: Step) -> Mapping[str, str]:
    """Return no variables: mpirun passes the environment on."""
    return {}


def signal_ranks(step: Step, process: subprocess.Popen[bytes]) -> None:
    """Signal the launcher, which passes it on."""
    process.send_signal(signal.SIGUSR1)


def is_wanted(step: Step) -> bool:
    """Return whether no job of this one's name waits: the first of an array's has submitted the whole array again."""
    name = os.environ.get("PBS_JOBNAME", "")
    return not step.array or not name or not _waiting(name)


def send_back(step: Step) -> bool:
    """Submit the script again."""
    return _pbs("qsub", str(step.script)) is not None


def cancel_waiting(name: str) -> None:
    """Delete the waiting jobs of a name."""
    if waiting := _waiting(name):
        _pbs("qdel", *waiting)


def _waiting(name: str) -> list[str]:
    return (_pbs("qselect", "-u", getpass.getuser(), "-N", name, "-s", WAITING) or "").split()


def _pbs(name: str, *words: str) -> str | None:
    """Return what a command of PBS prints; a job's PATH may lack it, where that of the submission had it.

    The command gets both: a job that qsub submits has qsub's PATH as that of its submission.
    """
    path = os.pathsep.join(os.environ.get(name, "") for name in ("PATH", "PBS_O_PATH"))
    return answer(shutil.which(name, path=path) or name, *words, env={**os.environ, "PATH": path})
