"""SLURM: the script of a job, and the commands that list and submit jobs."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

from hpcfed.cluster.doctor.launch import Mpi, find_mpi
from hpcfed.cluster.submit import script
from hpcfed.cluster.submit.commands import Queue, call, last_line, submit_chain
from hpcfed.cluster.submit.gpus import asks_for_gpus, gpus_of_node
from hpcfed.cluster.submit.scheduler import QueuedJob
from hpcfed.cluster.submit.script import Job, check_words, notice_of
from hpcfed.cluster.submit.site import Site
from hpcfed.errors import EnvironmentFailure, InputError

SUFFIX, CANCEL = "sbatch", "scancel"
PMI = {"MPICH": "pmi2", "MVAPICH": "pmi2", "Open MPI": "pmix"}
"""MPI → the ``srun --mpi`` plugin that it needs (PMI: how ranks find each other); with another, ranks run alone."""
TOGETHER = "--wait=30"
"""Option of srun that kills the other ranks 30 s after the first has ended; without it they wait for a dead rank.

``--kill-on-bad-exit`` would kill them at once: when a run stops early, all ranks exit with 75, and the first exit
would kill the others while they end, which looks like the death of a rank.
"""
BOUND = "--cpu-bind=cores"
"""Option of srun that binds each rank to separate cores, whatever the site's default; a rank uses a GPU near them."""
THREADS = ("hint", "threads-per-core", "ntasks-per-core", "extra-node-info")
"""Options for the number of hardware threads per core that a job uses; SLURM accepts only one of them."""
REQUEUE = ("requeue", "no-requeue")
"""Options of sbatch that `Job.requeue` replaces."""
OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Environment variables of SLURM that describe the cluster, not a job."""
NOT_OURS = ("SBATCH_ARRAY_INX", "SBATCH_WAIT")
"""Environment variables of sbatch that would turn a job into an array, or make sbatch wait for the job's end."""


def render(job: Job, site: Site) -> str:
    """Return the batch script of a job, as `Scheduler.render` does."""
    directives = _directives(job, site)
    shared = job.ranks_per_node > gpus_of_node(directives, job.nodes) > 0
    options = ["${early-}", *(["--mps"] if shared else [])]
    return script.render("slurm.sh.j2", job, site, [] if site.launch else _srun(), *options, directives=directives)


def doubt_of(site: Site) -> str:
    """Return a warning if the PMI of the ranks (how they find each other) is unknown or looks wrong; "" otherwise.

    It is unknown if the site file has no launch command and the MPI found here is none of those in `PMI`. It looks
    wrong if the launch command names another PMI than this MPI needs; it may still be right if the job's modules load
    another MPI.
    """
    if site.launch:
        named = re.search(r"(?<!\S)--mpi=(pmi2|pmix)\b", site.launch)
        wanted = PMI.get(_mpi().vendor or "") if named else None
        if named is None or wanted in (None, named[1]):
            return ""
        return (
            f"{_mpi().vendor} is the MPI here, which wants srun --mpi={wanted}; the site file's launch has {named[0]}"
        )
    if _mpi().vendor in PMI:
        return ""
    library = _mpi().vendor or _mpi().library
    which = f"{library} is the MPI" if library else "no MPI can be loaded"
    return f"{which} here, so the script leaves the PMI to srun; the site file may name one: 'launch: srun --mpi=…'"


def _srun() -> list[str]:
    vendor = _mpi().vendor
    return ["srun", *([f"--mpi={PMI[vendor]}"] if vendor in PMI else []), BOUND, TOGETHER]


@cache
def _mpi() -> Mpi:
    return find_mpi({})


def _directives(job: Job, site: Site) -> dict[str, str | int | None]:
    """Return the options of sbatch in a job's script; the job's options override the site's, and None makes a flag.

    Raises:
        InputError: an option that only the script may set, or that cannot be written in it.
    """
    options = {**site.options, "time": job.time, **job.options}
    options = {key: value for key, value in options.items() if key not in REQUEUE}
    notice = notice_of(str(options["time"]), job.notice)
    if "job-name" in options:
        raise InputError("option job-name", expected="none, since a run's jobs are found by their name")
    if "array" in options and job.array is None:
        remedy = "hpcfed sweep --array N has jobs share its runs"
        raise InputError("option array", expected="none, since its jobs would be in one folder", remedy=remedy)
    if "signal" in options:
        expected = "none, since the script waits for its own signal"
        raise InputError("option signal", expected=expected, remedy="--notice says how long before the limit it comes")
    if "wrap" in options:
        raise InputError("option wrap", expected="none, since the job's commands are those of its script")
    check_words(options, job.output)
    log = str(job.output).replace("%", "%%")
    return {
        "job-name": job.label,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": job.threads,
        "signal": f"B:USR1@{notice}",
        ("requeue" if job.requeue else "no-requeue"): None,
        "open-mode": "append",
        "output": f'"{log}-{"%j" if job.array is None else "%A_%a"}.log"',
        **({} if job.array is None else {"array": f"1-{job.array}"}),
        **_placement(options),
        **options,
    }


def _placement(options: Mapping[str, str | int | None]) -> dict[str, str | int | None]:
    """Return defaults for the options on cores, memory and GPUs that `options` does not set.

    A rank takes a whole core, not a hardware thread. A job with exclusive nodes gets all of their memory. Every rank
    sees all GPUs of its node; ranks are assigned to the sockets in turn, like the GPUs.
    """
    open_: dict[str, str | int | None] = {}
    if not any(key in options for key in THREADS):
        open_["hint"] = "nomultithread"
    if options.get("exclusive", "") is None and not any(key.startswith("mem") for key in options):
        open_["mem"] = 0
    if asks_for_gpus(options) and "gpus-per-task" not in options:
        open_ |= {"gpu-bind": "none", "distribution": "block:cyclic"}
    return open_


def doubt_of_start(script: Path) -> str:
    """Return a warning if ``sbatch --test-only`` refuses a script, with its reason; "" if it accepts the script."""
    if not (refusal := _refusal(script)):
        return ""
    remedy = "it waits until the cluster changes; if it asks for more than there is, scancel it and submit it with less"
    return f"SLURM could not start this job on its nodes as they are ({refusal}): {remedy}"


def jobs_named(label: str) -> list[QueuedJob]:
    """Return this user's pending and running jobs with the job name `label`.

    Raises:
        InputError: SLURM is not installed here.
        EnvironmentFailure: SLURM does not answer.
    """
    listed = _slurm(["squeue", "--noheader", f"--user={os.getuid()}", f"--name={label}", "--format=%i %T"])
    if listed.returncode != 0:
        raise EnvironmentFailure("squeue failed", got=last_line(listed.stderr), remedy="try again, or ask the site")
    rows = (line.split() for line in listed.stdout.splitlines() if line.strip())
    return [QueuedJob(number, state) for number, state in rows]


def submit(script: Path, chain: int, make_room: Callable[[], bool] | None = None) -> list[str]:
    """Submit a script as `chain` jobs; each starts only if the previous one has ended with its run unfinished.

    A job whose run is done cancels all waiting jobs (see ``job-step``): SLURM counts a cancelled job as failed, so
    cancelling only the next job would start the one after it.

    Args:
        make_room: moves earlier runs away, and returns whether anything is left to do. Called when the scheduler
            has accepted the first job, which it holds meanwhile. None: nothing is moved.

    Returns:
        The jobs' numbers, in order; [] if nothing is left to do.

    Raises:
        InputError: SLURM refuses a job, or would let it wait for ever.
        EnvironmentFailure: SLURM does not answer.
    """
    _refuse_impossible(script)
    options = _options(script.read_text(encoding="utf-8"))
    queue = Queue(
        _slurm,
        submit=["sbatch", "--parsable", *options],
        hold=["--hold"],
        after=lambda number: [f"--dependency=afternotok:{number}", "--kill-on-invalid-dep=yes"],
        release=lambda number: [] if "--hold" in options else ["scontrol", "release", number],
        cancel=lambda number: ["scancel", number],
        number=lambda output: output.strip().partition(";")[0],  # "number;cluster" with several clusters
    )
    return submit_chain(queue, script, chain, make_room)


def _refuse_impossible(script: Path) -> None:
    """Check that a job does not need more nodes than its partition has or allows, or more cores than a node has.

    SLURM would accept such a job and let it wait for ever. ``sbatch --test-only`` refuses it, but also refuses jobs
    that only wait for nodes that are down or drained; so its refusals are compared with the partition's limits.

    Raises:
        InputError: the job is too large; the error has SLURM's reason and the partition's limit.
    """
    refusal = _refusal(script)
    options = _options(script.read_text(encoding="utf-8"))
    values = dict(option.removeprefix("--").partition("=")[::2] for option in options)
    if not refusal:
        return
    asked = [name for name in (values.get("partition") or os.environ.get("SBATCH_PARTITION", "")).split(",") if name]
    found = [_facts(line) for line in _slurm(["scontrol", "show", "--oneliner", "partition"]).stdout.splitlines()]
    having = [one for one in found if (one["PartitionName"] in asked if asked else one.get("Default") == "YES")]
    most = {one["PartitionName"]: min(_count(one, "TotalNodes"), _count(one, "MaxNodes")) for one in having}
    wanted = re.match(r"\d+", values.get("nodes", ""))
    if wanted is not None and most and int(wanted[0]) > max(most.values()):
        expected = ", ".join(f"at most {number:g} in partition {name}" for name, number in most.items())
        raise InputError("--nodes", where=str(script), expected=expected, got=f"{wanted[0]} ({refusal})")
    rows = (line.split() for line in _slurm(["sinfo", "--noheader", "--Node", "--format=%R %c"]).stdout.splitlines())
    cores = [int(number) for name, number in rows if name in most and number.isdecimal()]
    ranks, each = values.get("ntasks-per-node", ""), values.get("cpus-per-task", "1")
    if cores and ranks.isdecimal() and each.isdecimal() and int(ranks) * int(each) > max(cores):
        expected = f"at most {max(cores)} CPUs a node in partition {', '.join(most)}"
        raise InputError("--ranks-per-node", where=str(script), expected=expected, got=f"{ranks} of {each} ({refusal})")


def _facts(line: str) -> dict[str, str]:
    """Return the fields of a line of ``scontrol show --oneliner``, by name."""
    return dict(re.findall(r"(\w+)=(\S*)", line))


def _count(partition: Mapping[str, str], field: str) -> float:
    number = partition.get(field, "")
    return int(number) if number.isdecimal() else math.inf  # UNLIMITED


def _refusal(script: Path) -> str:
    """Return SLURM's reason if ``sbatch --test-only`` refuses a script; "" if it accepts the script."""
    tried = _slurm(["sbatch", "--test-only", *_options(script.read_text(encoding="utf-8")), str(script)])
    return "" if tried.returncode == 0 else last_line(tried.stderr)


def _options(script: str) -> list[str]:
    """Return the ``#SBATCH`` options of a script's text.

    On sbatch's command line, they override environment variables such as SBATCH_TIMELIMIT.
    """
    head = takewhile(lambda line: line.startswith("#"), script.split("\n"))  # sbatch reads no further
    lines = (line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH "))
    return [word for line in lines for word in shlex.split(line)]


def _slurm(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return call(command, "SLURM", _environment())


def _environment() -> dict[str, str]:
    """Return the environment for SLURM's commands, without `NOT_OURS` and the variables of a surrounding job."""
    variables = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    if "SLURM_JOB_ID" not in variables:
        return variables
    return {key: value for key, value in variables.items() if key in OF_THE_CLUSTER or not key.startswith("SLURM_")}
