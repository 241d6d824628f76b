"""Arrays of SLURM jobs that share a sweep's runs: the options of the commands that submit one, and what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hpcfed.cli.options import given
from hpcfed.cli.submit import TIME, F, job_options

if TYPE_CHECKING:
    from hpcfed.cli.submit import JobFacts
    from hpcfed.lab.sweep.plan import Plan
    from hpcfed.lab.sweep.run import Redo

ARRAY = click.option(
    "--array", type=click.IntRange(1), metavar="N", help="Submit to SLURM as N jobs that share the runs."
)


class ArrayJobFacts(NamedTuple):
    """`hpcfed.cli.submit.JobFacts` of an array of jobs that share the runs of one study or experiment."""

    name: str
    threads: int
    device: str


def array_options(function: F) -> F:
    """Give a command ``--array``, ``--time``, and the options of a job."""
    return ARRAY(click.option("--time", help=TIME)(job_options(function)))


def is_asked_for(array: int | None, job: Mapping[str, Any]) -> bool:
    """Whether the options of `array_options` ask for jobs, and not for runs here.

    Raises:
        InputError: they are incomplete.
    """
    from hpcfed.errors import InputError

    asked = given("array", *job)
    if not asked:
        return False
    if click.get_current_context().params.get("as_json"):
        remedy = "call it with --json once the jobs are done"
        raise InputError("--json with --array", expected="results, which jobs do not have yet", remedy=remedy)
    if array is None or job["time"] is None:
        remedy = "give both, or no option of a job to run here"
        raise InputError("an array of jobs", expected="--array and --time", got=", ".join(asked), remedy=remedy)
    return True


def submit_array(
    facts: JobFacts,
    folder: Path,
    plan: Callable[[], Plan],
    words: Sequence[str],
    array: int | None,
    redo: Redo,
    job: Mapping[str, Any],
) -> None:
    """Submit an array of jobs that share the runs of a plan, on rank 0 only.

    Args:
        facts: of the runs.
        folder: the folder that the command fills.
        plan: returns the runs; not called where the script is only shown.
        words: the command of every job, as ``hpcfed`` takes it.
        array: number of jobs; `is_asked_for` has checked it.
        redo: treatment of existing runs, now; the jobs go on.
        job: the other options of the command line.
    """
    from hpcfed.cli.submit import submit_job
    from hpcfed.lab.sweep.claims import Claims
    from hpcfed.lab.sweep.run import is_decided, prepare

    def is_done() -> bool:
        planned = plan()
        claims = Claims(planned.folder, "submit")
        prepare(planned, claims, redo)
        return is_decided(planned, claims)

    if redo.fresh:
        submit_job(facts, folder, words, lambda: False, lambda: not is_done(), array=array, **job)
    else:
        submit_job(facts, folder, words, is_done, array=array, **job)
