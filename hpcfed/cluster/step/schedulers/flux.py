"""Flux, used from inside a job. A job is a Flux instance by itself; the queue belongs to its parent instance."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping

from hpcfed.cluster.step.scheduler import Step, answer

CANCELS_BY_TERM = True


def name_of(step: Step) -> str:
    """Return "": the output folder is enough, since Flux has no arrays; a resubmission changes the job's number."""
    return ""


def prepare(step: Step) -> Mapping[str, str]:
    """Return no variables: ``flux run`` passes the environment on to the ranks."""
    return {}


def signal_ranks(step: Step, process: subprocess.Popen[bytes]) -> None:
    """Send SIGUSR1 to the ranks: through Flux if ``flux run`` started them, else through their launcher."""
    if step.command[0] == "flux":
        answer("flux", "job", "kill", "--signal=SIGUSR1", answer("flux", "job", "last") or "")
    else:
        process.send_signal(signal.SIGUSR1)


def is_wanted(step: Step) -> bool:
    """Return True: Flux cancels a job by SIGTERM, after which `hpcfed job-step` requeues nothing."""
    return True


def send_back(step: Step) -> bool:
    """Submit the job's script again; return whether Flux accepts it."""
    return answer("flux", "--parent", "batch", str(step.script)) is not None


def cancel_waiting(name: str) -> None:
    """Cancel the waiting jobs with the job name `name`."""
    listed = answer("flux", "--parent", "jobs", "--suppress-header", "--filter=pending", "--format={id.f58} {name}")
    rows = (line.split() for line in (listed or "").splitlines())
    if waiting := [row[0] for row in rows if row[1:] == [name]]:
        answer("flux", "--parent", "cancel", *waiting)
