"""The batch script of a run."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpcfed.cluster.doctor.launch import Mpi, find_mpi
from hpcfed.cluster.submit.site import SAFE, Site, words_of
from hpcfed.errors import InputError

PMI = {"MPICH": "pmi2", "MVAPICH": "pmi2", "Open MPI": "pmix"}
"""The `srun --mpi` plugin of each MPI; under another one every rank would be a world of one."""
TOGETHER = "--wait=60"
"""Ends a step 60 s after its first rank: all leave together, and srun lets the others of a rank that died wait."""
PART = r"[0-5]?\d"
LIMIT = re.compile(
    rf"(?P<m>\d+)(:(?P<s>{PART}))?|(?P<h>\d+):(?P<hm>{PART}):(?P<hs>{PART})"
    rf"|(?P<d>\d+)-(?P<dh>[01]?\d|2[0-3])(:(?P<dm>{PART})(:(?P<ds>{PART}))?)?|UNLIMITED|INFINITE",
    re.IGNORECASE,
)
"""Time limits that sbatch takes; the last letter of a group is its unit."""
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
NOTICE, SHORTEST = 120, 10
"""Seconds of notice of a long job, and of the shortest."""
REQUEUE = ("requeue", "no-requeue")
"""Options of sbatch that `Job.requeue` stands for."""
EARLY = 60
"""Seconds by which SLURM may send its signal before the notice."""
ESCAPED = re.compile(r"\\.", re.DOTALL)
QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
DOLLAR = "\0"
"""Stands for a ``$`` that does not expand; a site file has no such character."""
UNQUOTED_HOME = re.compile(rf"{QUOTED.pattern}|(?<!\S)~(?=/)", re.DOTALL)
"""A quoted part, or a ``~/`` that begins a word outside of quotes."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
VARIABLE = re.compile(r"(\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\})", re.ASCII)
UNFIT = re.compile(r'[\x00-\x1f\x7f"\\]')
"""Characters that sbatch cannot take in a path."""


@dataclass(frozen=True)
class Job:
    """A run or sweep as a batch job.

    Attributes:
        name, output: of the run or sweep; the folders of all its seeds and settings are `output` or lie in it.
        words: the command's arguments to ``hpcfed``.
        recipe: path of the recipe or experiment among them, which the job refuses if it has changed; None if it is
            one of the package.
        nodes, ranks_per_node, threads: its size; threads are cores per rank.
        time: its time limit, in sbatch's format.
        notice: seconds before the limit at which the run gets the signal to stop; None for the default.
        options: more options of sbatch; a value of None makes a flag.
        requeue: whether the job requeues itself until the run is done.
        chained: whether jobs of the same script wait to resume the run.
        array: number of such jobs that share the work; None for a single one.
    """

    name: str
    output: Path
    words: Sequence[str]
    recipe: Path | None
    nodes: int
    ranks_per_node: int
    threads: int
    time: str
    notice: int | None
    options: Mapping[str, str | int | None]
    requeue: bool
    chained: bool = False
    array: int | None = None

    @property
    def label(self) -> str:
        """The job's name in the queue, unique to the run folder."""
        digest = hashlib.sha256(os.path.realpath(self.output).encode()).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', self.name)}-{digest}"

    @property
    def script(self) -> Path:
        """Path of the script: beside the run folder, which accepts only the run's files."""
        return self.output.with_name(f"{self.output.name}.sbatch")


def render(job: Job, site: Site) -> str:
    """Return the batch script of a job.

    Raises:
        InputError: an option, or the output's path, cannot be expressed in a batch script; or the recipe is no file.
    """
    environment = Environment(
        loader=PackageLoader("hpcfed", "cluster/submit"), undefined=StrictUndefined, keep_trailing_newline=False
    )
    environment.filters["quote"] = lambda word: shlex.quote(str(word))
    launch = _expanding(site.launch) if site.launch else _srun()
    python = _expanding(site.python) if site.python else [shlex.quote(sys.executable)]
    text = environment.get_template("job.sbatch.j2").render(
        directives=_directives(job, site),
        modules=site.modules,
        setup=site.setup.strip(),
        threads=job.threads,
        output=job.output,
        requeue=job.requeue,
        chained=job.chained,
        array=job.array,
        recipe=job.recipe,
        digest=_digest(job.recipe) if job.recipe else "",
        run=[*launch, *python, "-m", "hpcfed", *map(shlex.quote, job.words)],
    )
    return text.rstrip() + "\n"


def _digest(recipe: Path) -> str:
    """Return the SHA-256 of a recipe's file.

    Raises:
        InputError: it is a pipe, or something else that the job could not read again.
    """
    if not recipe.is_file():
        raise InputError("recipe", where=str(recipe), expected="a file, since the job reads it when it starts")
    return hashlib.sha256(recipe.read_bytes()).hexdigest()


def _expanding(command: str) -> list[str]:
    """Return the words of a command for bash: ``$NAME``, ``${NAME}`` and a leading ``~/`` expand, and nothing else.

    As in a shell, a ``$`` in single quotes or after a backslash stays as it is. Before ``NAME=value`` comes ``env``,
    since bash takes it for a command where it has come out of an array.
    """
    words = words_of(UNQUOTED_HOME.sub(_with_literal_dollars, command))
    return [*(["env"] if words and ASSIGNMENT.match(words[0]) else []), *map(_quoted, words)]


def _with_literal_dollars(quoted: re.Match[str]) -> str:
    """Return a match of `UNQUOTED_HOME`, with ``$HOME`` for ``~``, and `DOLLAR` for each ``$`` that does not expand."""
    if quoted[0] == "~":
        return "$HOME"
    if quoted[0].startswith("'"):
        return quoted[0].replace("$", DOLLAR)
    return ESCAPED.sub(lambda found: DOLLAR if found[0] == "\\$" else found[0], quoted[0])


def _quoted(word: str) -> str:
    """Return a word for bash, in which variables expand and nothing else."""
    pieces = VARIABLE.split(word)  # text and variables in turn
    parts = (f'"{piece}"' if place % 2 else shlex.quote(piece) for place, piece in enumerate(pieces) if piece)
    return "".join(parts).replace(DOLLAR, "$") or "''"


def _directives(job: Job, site: Site) -> dict[str, str | int | None]:
    """Return the options of sbatch; the job's override the site's."""
    options = {**site.options, "time": job.time, **job.options}
    options = {key: value for key, value in options.items() if key not in REQUEUE}
    notice = _notice(str(options["time"]), job.notice)
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
    for key, value in options.items():
        for word in (key, value):
            if word is not None and not SAFE.fullmatch(str(word)):
                raise InputError(f"option {key}", expected="one word without quotes or white space", got=repr(word))
    if UNFIT.search(str(job.output)):
        raise InputError("output", expected="a path without quotes, backslashes and line ends", got=str(job.output))
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
        **options,
    }


def _notice(limit: str, notice: int | None) -> int:
    """Return the seconds before a time limit at which SLURM signals: `notice`, or without it 120, less for a short job.

    Raises:
        InputError: sbatch does not take the limit, or no time is left before the notice.
    """
    found = LIMIT.fullmatch(limit)
    parts = {name: int(value) for name, value in found.groupdict().items() if value is not None} if found else {}
    seconds = sum(SECONDS[name[-1]] * value for name, value in parts.items()) if parts else math.inf
    if found is None or not seconds:
        raise InputError("--time", expected="minutes, 4:00:00 for hours, or 2-12 for days-hours", got=repr(limit))
    if notice is None:
        return int(min(NOTICE, max(SHORTEST, (seconds - EARLY) / 2)))
    if seconds <= notice + EARLY:
        least = f"more than {notice + EARLY} s, the notice of {notice} s and {EARLY} s by which SLURM may be early"
        raise InputError("--time", expected=least, got=f"{limit!r}, {seconds} s", remedy="or give less --notice")
    return notice


def doubt_of(site: Site) -> str:
    """Return a line for the user if nothing says which PMI the ranks need, else ""."""
    if site.launch or _mpi().vendor in PMI:
        return ""
    library = _mpi().vendor or _mpi().library
    which = f"{library} is the MPI" if library else "no MPI can be loaded"
    return f"{which} here, so the script leaves the PMI to srun; the site file may name one: 'launch: srun --mpi=…'"


def _srun() -> list[str]:
    vendor = _mpi().vendor
    return ["srun", f"--mpi={PMI[vendor]}", TOGETHER] if vendor in PMI else ["srun", TOGETHER]


@cache
def _mpi() -> Mpi:
    return find_mpi({})
