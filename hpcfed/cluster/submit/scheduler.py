"""The interface between `hpcfed submit` and a cluster's scheduler, which is a file of ``schedulers/``."""

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
    """A job in the queue: its number and state."""

    id: str
    state: str


class Scheduler(Protocol):
    """A cluster's scheduler: the functions of its file."""

    SUFFIX: str
    """Of scripts' names."""
    CANCEL: str
    """Command that cancels a job, for messages."""

    def render(self, job: Job, site: Site) -> str:
        """Return the batch script of a job.

        Raises:
            InputError: the script cannot express an option or the output's path; or the recipe is no file.
        """
        ...

    def doubt_of(self, site: Site) -> str:
        """Return a warning about what the script leaves undecided, or ""."""
        ...

    def doubt_of_start(self, script: Path) -> str:
        """Return why the cluster could not start a script's job, or "": it could, or cannot be asked."""
        ...

    def jobs_named(self, label: str) -> list[QueuedJob]:
        """Return this user's pending and running jobs of a name.

        Raises:
            InputError: the scheduler's commands are not installed here.
            EnvironmentFailure: it does not answer.
        """
        ...

    def submit(self, script: Path, chain: int, make_room: Callable[[], bool] | None = None) -> list[str]:
        """Submit a script as `chain` jobs; each starts once the one before has ended without finishing its run.

        Args:
            script, chain: path of the script, and number of jobs.
            make_room: moves earlier runs away and returns whether anything is left to do; called once the first job,
                held meanwhile, has been accepted.

        Returns:
            The jobs' numbers; none if nothing is left to do.

        Raises:
            InputError: a job is refused.
            EnvironmentFailure: the scheduler does not answer.
        """
        ...


def scheduler_of(site: Site) -> Scheduler:
    """Return the scheduler that a site file names."""
    return cast("Scheduler", registry.entry(SCHEDULERS, site.scheduler))
