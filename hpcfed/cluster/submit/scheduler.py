"""The interface between `hpcfed submit` and the cluster's scheduler; each scheduler is a module of ``schedulers/``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from hpcfed.cluster.submit.script import Job
from hpcfed.cluster.submit.site import SCHEDULERS, Site
from hpcfed.config import registry


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue: its identifier and state."""

    id: str
    state: str


class Scheduler(Protocol):
    """Interface of a scheduler's module, as used to submit jobs."""

    SUFFIX: str
    """Suffix of the scripts' file names, without the dot."""
    CANCEL: str
    """Command that cancels a job, for messages."""

    def render(self, job: Job, site: Site) -> str:
        """Return the text of a job's batch script.

        Raises:
            InputError: a script cannot contain an option or the output's path, or the recipe is not a regular file.
        """
        ...

    def doubt_of(self, site: Site) -> str:
        """Return a warning about a setting that the script leaves open or that may be wrong; "" if there is none."""
        ...

    def doubt_of_start(self, script: Path) -> str:
        """Return a warning if the cluster could not start a script's job; "" if it could, or if this is unknown."""
        ...

    def jobs_named(self, label: str) -> list[QueuedJob]:
        """Return this user's pending and running jobs with the job name `label`.

        Raises:
            InputError: the scheduler's commands are not installed here.
            EnvironmentFailure: the scheduler does not answer.
        """
        ...

    def submit(self, script: Path, chain: int, make_room: Callable[[], bool] | None = None) -> list[str]:
        """Submit a script as `chain` jobs; each starts only if the previous one has ended with its run unfinished.

        Args:
            make_room: moves earlier runs away, and returns whether anything is left to do. Called when the scheduler
                has accepted the first job, which it holds meanwhile. None: nothing is moved.

        Returns:
            The jobs' identifiers, in order; [] if nothing is left to do.

        Raises:
            InputError: the scheduler refuses a job.
            EnvironmentFailure: the scheduler does not answer.
        """
        ...


def scheduler_of(site: Site) -> Scheduler:
    """Return the scheduler that a site file selects."""
    return cast("Scheduler", registry.entry(SCHEDULERS, site.scheduler))
