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
from hpcfed.cluster.submit.commands import begin, call, last_line
from hpcfed.cluster.submit.gpus import asks_for_gpus, gpus_of_node
from hpcfed.cluster.submit.scheduler import QueuedJob
from hpcfed.cluster.submit.script import Job, check_words, notice_of
from hpcfed.cluster.submit.site import Site
from hpcfed.errors import EnvironmentFailure, InputError

SUFFIX, CANCEL = "sbatch", "scancel"
PMI = {"MPICH": "pmi2", "MVAPICH": "pmi2", "Open MPI": "pmix"}
"""The `srun --mpi` plugin of each MPI; under another one every rank would be a world of one."""
TOGETHER = "--wait=30"
"""Ends a step 30 s after its first rank: all leave together, and srun lets the others of a rank that died wait.

Not at once, by ``--kill-on-bad-exit``: a run that stops early leaves with 75 on all ranks, and the first to go would
have srun kill the others on their way out, which looks like a rank that died.
"""
BOUND = "--cpu-bind=cores"
"""Keeps each rank on cores of its own, whatever the site's default; near these lies the GPU that it is given."""
THREADS = ("hint", "threads-per-core", "ntasks-per-core", "extra-node-info")
"""Options that say how many hardware threads of a core a job uses; SLURM takes one of them."""
REQUEUE = ("requeue", "no-requeue")
"""Options of sbatch that `Job.requeue` stands for."""
OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""Variables of SLURM that do not describe a job."""
NOT_OURS = ("SBATCH_ARRAY_INX", "SBATCH_WAIT")
"""Variables of sbatch that would make an array of a job, or have us wait for its end."""


def render(job: Job, site: Site) -> str:
    """Return the batch script of a job, as `Scheduler.render` does."""
    directives = _directives(job, site)
    shared = job.ranks_per_node > gpus_of_node(directives, job.nodes) > 0
    options = ["${early-}", *(["--mps"] if shared else [])]
    return script.render("slurm.sh.j2", job, site, [] if site.launch else _srun(), *options, directives=directives)


def doubt_of(site: Site) -> str:
    """Return a warning if neither the site file nor the MPI found here tells which PMI the ranks need, or they differ.

    They may: the job's modules may load another MPI.
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
    """Return the options of sbatch; the job's override the site's."""
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
    """Return what `options` leave open of cores, memory and GPUs.

    A rank takes a core, not a hardware thread; nodes of one's own have all of their memory; every rank sees all GPUs of
    its node, whose ranks are dealt to the sockets in turn, as its GPUs are.
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
    """Return the refusal of ``sbatch --test-only`` if no nodes could start a script's job, else ""."""
    if not (refusal := _refusal(script)):
        return ""
    remedy = "it waits until the cluster changes; if it asks for more than there is, scancel it and submit it with less"
    return f"SLURM could not start this job on its nodes as they are ({refusal}): {remedy}"


def jobs_named(label: str) -> list[QueuedJob]:
    """Return this user's pending and running jobs of a name.

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
    """Submit a script as `chain` jobs; each starts once the one before has ended without finishing its run.

    A job whose run ends for good cancels all waiting ones (see ``job-step``): SLURM counts a cancelled job as not
    finished, so cancelling the next job alone would start the one after it.

    Args:
        script, chain: path of the script, and number of jobs.
        make_room: moves earlier runs away and returns whether anything is left to do; called once SLURM has accepted
            the first job, which is held meanwhile.

    Returns:
        The jobs' numbers; none if nothing is left to do.

    Raises:
        InputError: SLURM refuses a job, or would let it wait for ever.
        EnvironmentFailure: SLURM does not answer.
    """
    numbers: list[str] = []
    _refuse_impossible(script)
    options = _options(script.read_text(encoding="utf-8"))
    for _ in range(chain):
        after = [f"--dependency=afternotok:{numbers[-1]}", "--kill-on-invalid-dep=yes"] if numbers else []
        hold = ["--hold"] if make_room and not numbers else []
        done = _slurm(["sbatch", "--parsable", *options, *after, *hold, str(script)])
        if done.returncode != 0:
            before = f"submitted: {', then '.join(numbers)}"
            what = f"sbatch refuses job {len(numbers) + 1} of {chain}" if numbers else "sbatch refuses the job"
            remedy = before if numbers else "change the options, typed or of the site file"
            raise InputError(what, where=str(script), got=last_line(done.stderr), remedy=remedy)
        numbers.append(done.stdout.strip().partition(";")[0])  # "number;cluster" with several clusters
        if hold and make_room:
            release = [] if "--hold" in options else ["scontrol", "release", numbers[0]]
            if not begin(make_room, _slurm, release, ["scancel", numbers[0]]):
                return []
    return numbers


def _refuse_impossible(script: Path) -> None:
    """Refuse a job of more nodes than its partition has, or allows, or of more cores than its nodes have.

    SLURM takes it, and lets it wait for ever.
    ``sbatch --test-only`` refuses a job that could not start at once; of one that waits for nodes that are down or
    drained, the partition still has enough.

    Raises:
        InputError: with SLURM's words, and the partition's nodes.
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
    """Return the fields of a line of ``scontrol show --oneliner``."""
    return dict(re.findall(r"(\w+)=(\S*)", line))


def _count(partition: Mapping[str, str], field: str) -> float:
    number = partition.get(field, "")
    return int(number) if number.isdecimal() else math.inf  # UNLIMITED


def _refusal(script: Path) -> str:
    """Return the words with which ``sbatch --test-only`` refuses a script's job, "" if it does not."""
    tried = _slurm(["sbatch", "--test-only", *_options(script.read_text(encoding="utf-8")), str(script)])
    return "" if tried.returncode == 0 else last_line(tried.stderr)


def _options(script: str) -> list[str]:
    """Return the options that a script sets; on the command line they override variables such as SBATCH_TIMELIMIT."""
    head = takewhile(lambda line: line.startswith("#"), script.split("\n"))  # sbatch reads no further
    lines = (line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH "))
    return [word for line in lines for word in shlex.split(line)]


def _slurm(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return call(command, "SLURM", _environment())


def _environment() -> dict[str, str]:
    """Return the environment for sbatch to read and pass on, without the variables of the job around this process."""
    variables = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    if "SLURM_JOB_ID" not in variables:
        return variables
    return {key: value for key, value in variables.items() if key in OF_THE_CLUSTER or not key.startswith("SLURM_")}
