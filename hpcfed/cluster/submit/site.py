"""The site file: the settings that all jobs of a cluster share.

modules: [gcc/13, openmpi/5.0]         # loaded in this order
setup: |                               # shell lines before the run
  source ~/venvs/hpcfed/bin/activate
launch: srun --mpi=pmix --wait=30      # starts the ranks; default: srun with the plugin of the MPI found here
python: $SCRATCH/env/bin/python        # runs hpcfed in the job; default: the Python that submits
job_python: /opt/env/bin/python        # runs `hpcfed job-step` in the job, outside of containers; same default
options: {account: project7, constraint: milan, exclusive: true}     # options of sbatch; true makes a flag
scheduler: slurm                       # or pbs, flux
requeue: true                          # whether jobs may requeue themselves; if false, use --chain

In `launch`, `python` and `job_python`, $VARIABLES and a leading ~/ of an unquoted word expand where the job runs;
nothing else does. A $ in single quotes or after a backslash is literal. Each of the three may begin with NAME=value.
A script in the place of Python has to pass on all words, Python's option -P among them.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from hpcfed.config import registry
from hpcfed.config.load import validated
from hpcfed.errors import InputError
from hpcfed.io.text import MAX_YAML_LENGTH, parse_yaml, read_text

SCHEDULERS = "hpcfed.cluster.submit.schedulers"
SAFE = re.compile(r"[\w@%+=:,./&|!*()\[\]^~-]+")
"""Words safe for sbatch and `module load`: no white space, no quotes, nothing that a shell expands outside quotes."""


def _one_word(text: str) -> str:
    if not SAFE.fullmatch(text) or text.startswith("-"):
        raise ValueError("one word without quotes or white space")
    return text


def _a_command(text: str) -> str:
    if not words_of(text):
        raise ValueError("a command")
    return text


def _a_scheduler(name: str) -> str:
    if name not in (known := registry.names(SCHEDULERS)):
        raise ValueError(" or ".join(known))
    return name


def _with_flags(options: object) -> object:
    """Return sbatch options with ``true`` replaced by None, which makes a flag, and without ``false`` ones."""
    if not isinstance(options, dict):
        return options
    return {key: None if value is True else value for key, value in options.items() if value is not False}


Word = Annotated[str, AfterValidator(_one_word)]


class Site(BaseModel):
    """The settings of a cluster (keys: see the module's docstring)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    modules: list[Word] = Field(default_factory=list)
    setup: str = ""
    launch: Annotated[str, AfterValidator(_a_command)] | None = None
    python: Annotated[str, AfterValidator(_a_command)] | None = None
    job_python: Annotated[str, AfterValidator(_a_command)] | None = None
    options: Annotated[dict[Word, Word | int | None], BeforeValidator(_with_flags)] = Field(default_factory=dict)
    scheduler: Annotated[str, AfterValidator(_a_scheduler)] = "slurm"
    requeue: bool = True


def default_path() -> Path | None:
    """Return the default path of the site file; None if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hpcfed" / "site.yaml"
    except RuntimeError:
        return None


def read_site(path: Path | None) -> Site:
    """Read a site file; None: the file at the default path, or the default settings if there is none.

    Raises:
        InputError: the file cannot be read, or has unknown keys or invalid values.
    """
    if path is None:
        path = default_path()
        if path is None or not path.exists():
            return Site()
    try:
        content = parse_yaml(read_text(path, MAX_YAML_LENGTH, pipes=True))
    except (OSError, ValueError) as error:
        raise InputError("site file cannot be read", where=str(path), got=str(error), remedy="check the path") from None
    if not isinstance(content or {}, dict):
        raise InputError("a site file", where=str(path), expected="a mapping of keys", got=type(content).__name__)
    site: Site = validated(Site, content or {}, str(path))
    return site


def words_of(command: str) -> list[str]:
    """Split a command into words as a shell does, without expansion.

    Raises:
        ValueError: a quote is not closed.
    """
    return shlex.split(command)
