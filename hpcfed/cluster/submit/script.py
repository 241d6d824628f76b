"""Batch jobs: their settings, and the parts of a script that all schedulers share."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpcfed.cluster.submit.site import SAFE, Site, words_of
from hpcfed.errors import InputError
from hpcfed.ranks.code import python_options

PART = r"[0-5]?\d"
INTERPRETER = re.compile(r"python[\d.]*['\"]?$", re.IGNORECASE)
"""The end of a quoted word that names a Python."""
LIMIT = re.compile(
    rf"(?P<m>\d+)(:(?P<s>{PART}))?|(?P<h>\d+):(?P<hm>{PART}):(?P<hs>{PART})"
    rf"|(?P<d>\d+)-(?P<dh>[01]?\d|2[0-3])(:(?P<dm>{PART})(:(?P<ds>{PART}))?)?|UNLIMITED|INFINITE",
    re.IGNORECASE,
)
"""A time limit in sbatch's formats; the last letter of a group's name is its unit."""
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
NOTICE, SHORTEST = 120, 10
"""Default seconds between the signal to stop and the time limit; the minimum of this default, for short jobs."""
EARLY = 60
"""Seconds by which SLURM may send the signal too early."""
ESCAPED = re.compile(r"\\.", re.DOTALL)
QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
DOLLAR = "\0"
"""Placeholder for a ``$`` that bash must not expand; no site file contains this character."""
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
        name: name of the run or sweep.
        output: output folder of the run or sweep; with several seeds or settings, their folders lie in it.
        words: the arguments of the ``hpcfed`` command that the job runs.
        recipe: path of the recipe or experiment in `words`; the job refuses to run if the file has changed. None for an
            experiment that comes with the package.
        threads: number of cores per rank.
        time: the time limit, in sbatch's format.
        notice: seconds between the signal to stop and the time limit; None for the default of `notice_of`.
        options: further sbatch options by name; the value None makes a flag.
        requeue: whether the job requeues itself until the run is done.
        chained: whether further jobs of the same script are queued to resume the run.
        array: number of jobs in the job array that shares the work; None for a single job.
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
        """The job's name in the queue: `name` and a digest of the output folder's path."""
        digest = hashlib.sha256(os.path.realpath(self.output).encode()).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', self.name)}-{digest}"

    def script(self, suffix: str) -> Path:
        """Return the path of the batch script: beside the output folder, which may contain only the run's files."""
        return self.output.with_name(f"{self.output.name}.{suffix}")


def render(template: str, job: Job, site: Site, launch: Sequence[str], *options: str, **facts: Any) -> str:
    """Return the text of a job's batch script.

    Args:
        template: file name of a Jinja template in ``schedulers/``.
        launch: the command that starts the ranks, as words; used if the site file has no launch command.
        options: further options of ``hpcfed job-step``, already quoted for the shell.
        facts: further variables of the template.

    Raises:
        InputError: the recipe is not a regular file.
    """
    environment = Environment(loader=PackageLoader("hpcfed", "cluster/submit/schedulers"), undefined=StrictUndefined)
    environment.filters["quote"] = lambda word: shlex.quote(str(word))
    python = _expanding(site.python) if site.python else [shlex.quote(sys.executable)]
    launched = _expanding(site.launch) if site.launch else launch
    text = environment.get_template(template).render(
        job=job,
        modules=site.modules,
        setup=site.setup.strip(),
        run=[*launched, *_hpcfed(python), *map(shlex.quote, job.words)],
        step=_step(job, site, options),
        **facts,
    )
    return text.rstrip() + "\n"


def _step(job: Job, site: Site, options: Sequence[str]) -> list[str]:
    """Return the ``hpcfed job-step`` command of a script, without the ranks' command: one line for each option."""
    python = _expanding(site.job_python) if site.job_python else [shlex.quote(sys.executable)]
    return [
        " ".join([*_hpcfed(python), "job-step"]),
        f"--output={shlex.quote(str(job.output))}",
        *options,
        *([] if job.requeue else ["--no-requeue"]),
        *([f"--chain={shlex.quote(job.label)}"] if job.chained else []),
        *([] if job.array is None else ["--array"]),
        *([f"--unchanged {shlex.quote(str(job.recipe))} {_digest(job.recipe)}"] if job.recipe else []),
    ]


def _hpcfed(python: Sequence[str]) -> list[str]:
    """Return the words that run hpcfed by the words of a site's `python`.

    Python's options come before a module that runs hpcfed, as in ``python -m mpi4py``.
    """
    places = [place for place, word in enumerate(python, 1) if INTERPRETER.search(word) and "-m" in python[place:]]
    place = max(places, default=len(python))
    return [*python[:place], *python_options(), *python[place:], "-m", "hpcfed"]


def _digest(recipe: Path) -> str:
    """Return the SHA-256 of a recipe's file, in hexadecimal.

    Raises:
        InputError: the recipe is a pipe or another special file, which the job could not read again.
    """
    if not recipe.is_file():
        raise InputError("recipe", where=str(recipe), expected="a file, since the job reads it when it starts")
    return hashlib.sha256(recipe.read_bytes()).hexdigest()


def _expanding(command: str) -> list[str]:
    """Return a command's words, quoted so that bash expands only ``$NAME``, ``${NAME}`` and a leading ``~/``.

    As in a shell, a ``$`` in single quotes or after a backslash is literal. If the command starts with ``NAME=value``,
    ``env`` is put in front, because the script runs the words from an array, where bash takes no assignments.
    """
    words = words_of(UNQUOTED_HOME.sub(_with_literal_dollars, command))
    return [*(["env"] if words and ASSIGNMENT.match(words[0]) else []), *map(_quoted, words)]


def _with_literal_dollars(quoted: re.Match[str]) -> str:
    """Return the replacement of a match of `UNQUOTED_HOME`: ``$HOME`` for ``~``, `DOLLAR` for each literal ``$``."""
    if quoted[0] == "~":
        return "$HOME"
    if quoted[0].startswith("'"):
        return quoted[0].replace("$", DOLLAR)
    return ESCAPED.sub(lambda found: DOLLAR if found[0] == "\\$" else found[0], quoted[0])


def _quoted(word: str) -> str:
    """Return a word quoted for bash so that only its variables expand."""
    pieces = VARIABLE.split(word)  # text and variables in turn
    parts = (f'"{piece}"' if place % 2 else shlex.quote(piece) for place, piece in enumerate(pieces) if piece)
    return "".join(parts).replace(DOLLAR, "$") or "''"


def notice_of(limit: str, notice: int | None) -> int:
    """Return the seconds between the signal to stop and the job's time limit.

    Args:
        limit: the time limit, in sbatch's format.
        notice: the seconds to return; None: 120, or fewer for a short job.

    Raises:
        InputError: `limit` is not in sbatch's format, or is too short for `notice`.
    """
    seconds = seconds_of(limit)
    if notice is None:
        return int(min(NOTICE, max(SHORTEST, (seconds - EARLY) / 2)))
    if seconds <= notice + EARLY:
        least = f"more than {notice + EARLY} s, the notice of {notice} s and {EARLY} s by which SLURM may be early"
        raise InputError("--time", expected=least, got=f"{limit!r}, {seconds} s", remedy="or give less --notice")
    return notice


def seconds_of(limit: str) -> float:
    """Return the seconds of a time limit in sbatch's format; inf for UNLIMITED and INFINITE.

    Raises:
        InputError: the text is not a time limit, or is zero.
    """
    found = LIMIT.fullmatch(limit)
    parts = {name: int(value) for name, value in found.groupdict().items() if value is not None} if found else {}
    seconds = sum(SECONDS[name[-1]] * value for name, value in parts.items()) if parts else math.inf
    if found is None or not seconds:
        raise InputError("--time", expected="minutes, 4:00:00 for hours, or 2-12 for days-hours", got=repr(limit))
    return seconds


def check_words(options: Mapping[str, str | int | None], output: Path) -> None:
    """Check that options and the output's path can be written in a line of a batch script.

    Raises:
        InputError: an option or the path cannot be written so; the message names it.
    """
    for key, value in options.items():
        for word in (key, value):
            if word is not None and not SAFE.fullmatch(str(word)):
                raise InputError(f"option {key}", expected="one word without quotes or white space", got=repr(word))
    if UNFIT.search(str(output)):
        raise InputError("output", expected="a path without quotes, backslashes and line ends", got=str(output))
