"""Flux: the script of a job, and the commands that list and submit jobs."""

from __future__ import annotations

import math
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcfed.cluster.doctor.launch import find_mpi
from hpcfed.cluster.submit import script
from hpcfed.cluster.submit.commands import Queue, call, last_line, submit_chain
from hpcfed.cluster.submit.scheduler import QueuedJob
from hpcfed.cluster.submit.script import Job, check_words, notice_of, seconds_of
from hpcfed.cluster.submit.site import Site
from hpcfed.errors import EnvironmentFailure, InputError

SUFFIX, CANCEL = "flux", "flux cancel"
NAMES = {"account": "bank", "partition": "queue"}
"""Option of sbatch → its name in flux batch."""


LOOKS = 5
"""Number of times that the state of a submitted job is read, 0.2 s apart."""


def render(job: Job, site: Site) -> str:
    """Return the batch script of a job, as `Scheduler.render` does.

    The job requests one slot on each node, with the cores for all ranks there. ``flux run`` starts the ranks in the
    slots: each rank is bound to its cores and sees all GPUs of its node.
    """
    options = {**site.options, **job.options}
    check_words(options, job.output)
    limit = seconds_of(job.time)
    if math.isinf(limit):
        raise InputError("--time", expected="a limit, before which the script signals the run", got=job.time)
    if job.array is not None:
        remedy = "submit a job for each setting, or let the groups of one sweep share it (--groups)"
        raise InputError("--array", expected="none, since Flux has no arrays", remedy=remedy)
    options = {key: value for key, value in options.items() if key not in ("requeue", "no-requeue")}
    if "mem" in options:
        expected = "none, since Flux deals out no memory"
        raise InputError("--mem", expected=expected, got=str(options["mem"]), remedy="leave it out")
    gpus, log = options.pop("gpus-per-node", None), shlex.quote(f"{job.output}-{{{{id}}}}.log")
    directives = [
        f"--job-name={job.label}",
        f"--nodes={job.nodes}",
        f"--nslots={job.nodes}",
        f"--cores-per-slot={job.ranks_per_node * job.threads}",
        *([] if gpus is None else [f"--gpus-per-slot={gpus}"]),
        f"--time-limit={limit:.0f}s",
        f"--output={log}",
        f"--error={log}",
        *(_option(key, value) for key, value in options.items()),
    ]
    ranks, threads = job.nodes * job.ranks_per_node, job.threads
    per_task = [f"--ntasks={ranks}", f"--cores-per-task={threads}"]
    # without GPUs of its own `flux run` sets CUDA_VISIBLE_DEVICES to -1; options per node exclude those per task
    per_node = [f"--tasks-per-node={job.ranks_per_node}", f"--cores={ranks * threads}", f"--gpus-per-node={gpus}"]
    launch = [
        "flux",
        "run",
        f"--nodes={job.nodes}",
        *(per_node if gpus else per_task),
        "--setopt=cpu-affinity=per-task",
        *(["--setopt=pmi=pmix"] if not site.launch and find_mpi({}).vendor == "Open MPI" else []),
    ]
    runs_for = int(limit) - notice_of(job.time, job.notice)
    again = f"--scheduler=flux --script={shlex.quote(str(job.script(SUFFIX)))}"
    notice = f"--signal-after=$(({runs_for} - SECONDS))"  # which bash counts from the job's start
    return script.render("flux.sh.j2", job, site, launch, again, notice, directives=directives)


def _option(key: str, value: str | int | None) -> str:
    if key == "account":
        return f"--setattr=bank={value}"
    name = NAMES.get(key, key)
    return f"--{name}" if value is None else f"--{name}={value}"


def doubt_of(site: Site) -> str:
    """Return "", no warning: the script chooses the PMI (how ranks find each other) by the MPI found here."""
    return ""


def doubt_of_start(script: Path) -> str:
    """Return "", no warning: `submit` already refuses jobs that the nodes can never run."""
    return ""


def jobs_named(label: str) -> list[QueuedJob]:
    """Return this user's pending and running jobs with the job name `label`, as `Scheduler.jobs_named` does."""
    listed = _flux(["flux", "jobs", "--suppress-header", "--format={id.f58} {status} {name}"])
    if listed.returncode != 0:
        raise EnvironmentFailure("flux jobs failed", got=last_line(listed.stderr), remedy="try again, or ask the site")
    rows = (line.split() for line in listed.stdout.splitlines())
    return [QueuedJob(number, state) for number, state, name in (row for row in rows if len(row) == 3) if name == label]


def submit(script: Path, chain: int, make_room: Callable[[], bool] | None = None) -> list[str]:
    """Submit a script as `chain` jobs, as `Scheduler.submit` does."""
    queue = Queue(
        _flux,
        submit=["flux", "batch"],
        hold=["--urgency=hold"],
        after=lambda number: [f"--dependency=afternotok:{number}"],
        release=lambda number: ["flux", "job", "urgency", number, "default"],
        cancel=lambda number: ["flux", "cancel", number],
    )
    return submit_chain(queue, script, chain, make_room, check=lambda number: _refuse_impossible(number, script))


def _refuse_impossible(number: str, script: Path) -> None:
    """Check that a submitted job has not failed at once, for example because it needs more nodes than exist.

    Raises:
        InputError: the job has failed; the error has Flux's reason.
    """
    for _ in range(LOOKS):
        told = _flux(["flux", "jobs", "--no-header", "--format={status} {exception.note}", number]).stdout.strip()
        status, _, note = told.partition(" ")
        if status.lower() == "failed" and note:
            remedy = "change the options, typed or of the site file"
            raise InputError("Flux refuses the job", where=str(script), got=note.strip(), remedy=remedy)
        if status.lower() in ("run", "running"):
            return
        time.sleep(0.2)


def _flux(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return call(command, "Flux")
