"""Flux, from within a job, which is an instance of its own: the queue is that of the parent."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping

from hpcfed.cluster.step.scheduler import Step, answer

CANCELS_BY_TERM = True


def name_of(step: Step) -> str:
    """Return "": a resubmitted job has another number, and there are no arrays."""
    return ""


def prepare(step: Step) -> Mapping[str, str]:
    """Return no variables: ``flux run`` passes the environment on."""
    return {}


def signal_ranks(step: Step, process: subprocess.Popen[bytes]) -> None:
    """Have Flux signal the ranks, which it numbers as a job of this instance."""
    if step.command[0] == "flux":
        answer("flux", "job", "kill", "--signal=SIGUSR1", answer("flux", "job", "last") or "")
    else:
        process.send_signal(signal.SIGUSR1)


def is_wanted(step: Step) -> bool:
    """Return True: a cancelled job has had SIGTERM."""
    return True


def send_back(step: Step) -> bool:
    """Submit the script again."""
    return answer("flux", "--parent", "batch", str(step.script)) is not None


def cancel_waiting(name: str) -> None:
    """Cancel the waiting jobs of a name."""
    listed = answer("flux", "--parent", "jobs", "--suppress-header", "--filter=pending", "--format={id.f58} {name}")
    rows = (line.split() for line in (listed or "").splitlines())
    if waiting := [row[0] for row in rows if row[1:] == [name]]:
        answer("flux", "--parent", "cancel", *waiting)
