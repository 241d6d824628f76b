"""PBS (OpenPBS, PBS Professional): the script of a job, and the commands that list and submit jobs."""

from __future__ import annotations

import getpass
import math
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcfed.cluster.submit import script
from hpcfed.cluster.submit.commands import Queue, call, last_line, submit_chain
from hpcfed.cluster.submit.scheduler import QueuedJob
from hpcfed.cluster.submit.script import Job, check_words, notice_of, seconds_of
from hpcfed.cluster.submit.site import Site
from hpcfed.errors import EnvironmentFailure, InputError

SUFFIX, CANCEL = "pbs", "qdel"
LAUNCH = ("mpirun",)
"""Command that starts the ranks: an MPI that is built for PBS finds the hosts by itself."""
LETTERS = {"account": "A", "partition": "q", "queue": "q"}
"""Option of sbatch → its letter in qsub; all other options become resources, ``-l key=value``."""


def render(job: Job, site: Site) -> str:
    """Return the batch script of a job, as `Scheduler.render` does."""
    options = {**site.options, **job.options}
    check_words(options, job.output)
    limit = seconds_of(job.time)
    if math.isinf(limit):
        raise InputError("--time", expected="a limit, which PBS needs", got=job.time)
    ranks, threads = job.ranks_per_node, job.threads
    size: dict[str, str | int] = {"ncpus": ranks * threads, "mpiprocs": ranks, "ompthreads": threads}
    if gpus := options.pop("gpus-per-node", None):
        size["ngpus"] = gpus
    if memory := str(options.pop("mem", None) or ""):
        size["mem"] = f"{memory.lower()}b" if memory[-1].isalpha() else f"{memory}mb"  # sbatch's unit
    select = ":".join([f"select={job.nodes}", *(f"{key}={value}" for key, value in size.items())])
    place = _place(job.nodes, options)
    hours, rest = divmod(int(limit), 3600)
    directives = [
        f"-N {job.label}",
        f"-l {select}",
        *([f"-l place={place}"] if place else []),
        f"-l walltime={hours}:{rest // 60:02}:{rest % 60:02}",
        "-j oe",
        f"-o {job.output}.log",
        "-r n",
        *([] if job.array is None else [f"-J 1-{job.array}"]),
        *(_option(key, value) for key, value in options.items() if key not in ("requeue", "no-requeue")),
    ]
    runs_for = int(limit) - notice_of(job.time, job.notice)
    again = f"--scheduler=pbs --script={shlex.quote(str(job.script(SUFFIX)))}"
    notice = f"--signal-after=$(({runs_for} - SECONDS))"  # which bash counts from the job's start
    return script.render("pbs.sh.j2", job, site, LAUNCH, again, notice, directives=directives)


def _place(nodes: int, options: dict[str, str | int | None]) -> str:
    """Take `place` and `exclusive` out of the options; return how chunks are placed, "" where PBS may choose.

    PBS puts several chunks on one host where they fit; ``scatter`` makes each a node. ``exclusive`` is sbatch's word.
    """
    place = [str(options.pop("place", None) or ("scatter" if nodes > 1 else ""))]
    if "exclusive" in options:
        options.pop("exclusive")
        if "excl" not in place[0]:
            place.append("exclhost")
    return ":".join(filter(None, place))


def _option(key: str, value: str | int | None) -> str:
    resource = key if value is None else f"{key}={value}"
    return f"-{LETTERS[key]} {value}" if key in LETTERS else f"-l {resource}"


def doubt_of(site: Site) -> str:
    """Return "", no warning: mpirun starts the ranks, and the script has no MPI setting that could be wrong."""
    return ""


def doubt_of_start(script: Path) -> str:
    """Return "", no warning: qsub cannot check a script without submitting it."""
    return ""


def jobs_named(label: str) -> list[QueuedJob]:
    """Return this user's pending and running jobs with the job name `label`, as `Scheduler.jobs_named` does."""
    found = []
    for letter, state in (("HQW", "PENDING"), ("EBR", "RUNNING")):
        listed = _pbs(["qselect", "-u", getpass.getuser(), "-N", label, "-s", letter])
        if listed.returncode != 0:
            raise EnvironmentFailure(
                "qselect failed", got=last_line(listed.stderr), remedy="try again, or ask the site"
            )
        found += [QueuedJob(number, state) for number in listed.stdout.split()]
    return found


def submit(script: Path, chain: int, make_room: Callable[[], bool] | None = None) -> list[str]:
    """Submit a script as `chain` jobs, as `Scheduler.submit` does."""
    queue = Queue(
        _pbs,
        submit=["qsub"],
        hold=["-h"],
        after=lambda number: ["-W", f"depend=afternotok:{number}"],
        release=lambda number: ["qrls", number],
        cancel=lambda number: ["qdel", number],
    )
    return submit_chain(queue, script, chain, make_room)


def _pbs(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return call(command, "PBS")
