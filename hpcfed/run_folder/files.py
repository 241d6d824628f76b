"""The files of a run folder: their names, reading them, and moving those of an earlier run to previous-N/."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path
from typing import Any

from hpcfed.errors import EnvironmentFailure, HpcfedError, InputError
from hpcfed.io.atomic import write_whole
from hpcfed.io.text import MAX_YAML_LENGTH, Malformed, parse_json, parse_yaml, read_text
from hpcfed.run_folder.code import ACCEPTED_CODE_FILE, CODE_FILE
from hpcfed.run_folder.update_hashes import UPDATE_HASHES

LOCK, RECIPE, CLIENTS, RESULT = ".lock", "recipe.yaml", "clients.csv", "result.json"
EVALUATED = "model-evaluated.safetensors"
"""The evaluated model, where it is not the last iterate."""
ENVIRONMENT = "environment.json"
ENVIRONMENT_TYPES = {"per_rank": list, "packages": dict, "privacy": dict, "before": list}
"""Entries of ``environment.json`` that are read by their parts."""
CERTIFICATE, SIGNATURE = "certificate.json", "certificate.json.sig"
RUN_FILES = (
    "metrics.jsonl",
    CLIENTS,
    UPDATE_HASHES,
    RESULT,
    CERTIFICATE,
    SIGNATURE,
    ENVIRONMENT,
    CODE_FILE,
    ACCEPTED_CODE_FILE,
    "model.safetensors",
    EVALUATED,
    "private",
    "checkpoints",
    "logs",
    "report.html",
    "figures",
    "tables",
)
"""Files that are put aside when a run starts again."""
PRIVATE_FILES = re.compile(r"(client-\d+|initial)\.safetensors")
"""Names in ``private/``: files of each client's private parameters and buffers, and of their initial values."""
INITIAL = "private/initial.safetensors"
STATES = re.compile(r"round-\d{8,}\.(json|server|clients)")
"""Names of files in ``checkpoints/``."""
HALF_STATES = re.compile(r"\.round-\d{8,}\.([0-9a-f]{8}\.(server|clients|folder)|json\.\d+\.tmp)")
"""Names of temporary files in ``checkpoints/``; entries with other names there are the user's."""
ASIDE = "previous-*"
"""Folders of earlier runs."""
FEDERATION = "federation"
"""Folder of a federation file written from samples passed in Python; runs in previous-N/ use it, too."""
EARLY_ENTRIES = (LOCK, "logs", "checkpoints", CODE_FILE, FEDERATION)
"""Entries that may exist before a run has written its recipe."""
REMAINS = re.compile(rf"\.({'|'.join(map(re.escape, (RECIPE, *RUN_FILES)))})\.\d+\.tmp")
"""Temporary files of a job that was killed in `hpcfed.io.atomic.write_whole`."""


def has_files(folder: Path) -> bool:
    """Whether a folder exists and has entries other than `EARLY_ENTRIES`, temporary files and earlier runs."""
    if not folder.exists():
        return False
    return any(
        entry.name not in EARLY_ENTRIES and not REMAINS.fullmatch(entry.name) and not entry.match(ASIDE)
        for entry in folder.iterdir()
    )


def remove_remains(folder: Path) -> None:
    """Remove the temporary files of a job that was killed."""
    for entry in folder.iterdir():
        if REMAINS.fullmatch(entry.name):
            entry.unlink()


def read_recipe(folder: Path) -> dict[str, Any]:
    """Return the recipe of the run in a folder.

    Raises:
        InputError: the folder has no recipe, or the recipe is damaged.
    """
    path = folder / RECIPE
    if not path.is_file():
        raise InputError(
            "output holds files that are not a run's",
            where=str(folder),
            got=", ".join(sorted(entry.name for entry in folder.iterdir())[:3]),
            remedy="choose another output",
        )
    try:
        found = parse_yaml(read_text(path, MAX_YAML_LENGTH))
    except Malformed:
        found = None
    if not isinstance(found, dict):
        raise InputError("not a run's recipe", where=str(path), remedy="choose another output")
    return found


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file of a run folder; empty if the file is missing or damaged.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        found = parse_json(read_text(path))
    except (FileNotFoundError, ValueError):
        return {}
    except OSError as error:
        raise unusable(path.parent, error) from None
    return found if isinstance(found, dict) else {}


def read_environment(folder: Path) -> dict[str, Any]:
    """Return the content of a run folder's ``environment.json``; empty if the file is missing or damaged.

    Raises:
        InputError: the file cannot be read, or one of `ENVIRONMENT_TYPES` has another type.
    """
    path = folder / ENVIRONMENT
    facts = read_mapping(path)
    for key, kind in ENVIRONMENT_TYPES.items():
        value = facts.get(key)
        is_list = kind is list and isinstance(value, list)
        if value is not None and not (all(isinstance(one, dict) for one in value) if is_list else type(value) is kind):
            expected = "a list of objects" if kind is list else "an object"
            remedy = "restore the run's own file"
            raise InputError(
                key, where=str(path), expected=expected, got=f"one of type {type(value).__name__}", remedy=remedy
            )
    return facts


def private_file(client: int) -> str:
    """Return the name of the file of a client's private parameters and buffers in a run folder."""
    return f"private/client-{client}.safetensors"


def put_aside(folder: Path) -> Path | None:
    """Move a run's files to a new folder previous-N/, and copy its recipe there; return it, None without files."""
    if not any((folder / name).exists() for name in (RECIPE, *RUN_FILES)):
        return None
    number = 1
    while (aside := folder / f"previous-{number}").exists():
        number += 1
    for entry in (folder / "checkpoints").glob(".*"):
        if HALF_STATES.fullmatch(entry.name):  # of a job that was killed before the first checkpoint was whole
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    aside.mkdir()
    if (folder / RECIPE).exists():
        write_whole(aside / RECIPE, (folder / RECIPE).read_bytes())
    for entry in (folder / name for name in RUN_FILES):
        if entry.exists():
            entry.rename(aside / entry.name)
    return aside


def unusable(folder: Path, error: OSError) -> HpcfedError:
    """Return the error to raise for an OSError: EnvironmentFailure for a full or failing disk, else InputError."""
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        remedy = "make space, or choose another output"
        return EnvironmentFailure("output cannot be used", where=str(folder), got=what, remedy=remedy)
    return InputError("output cannot be used", where=str(folder), got=what, remedy="choose another output")
