"""The record of a finished run without its models and states: small enough for a repository, verified anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcfed.config.load import dump_yaml
from hpcfed.errors import InputError
from hpcfed.io.atomic import write_whole
from hpcfed.run_folder.certificate import NOT_KEPT, faults, read_certificate, sha256_of
from hpcfed.run_folder.contents import PRIVATE
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.files import CERTIFICATE, CLIENTS, RECIPE, RESULT, read_mapping, read_recipe
from hpcfed.run_folder.rounds import RECORD, iterate_rounds
from hpcfed.run_folder.update_hashes import UPDATE_HASHES

OF_THE_MACHINE = ("output", "python_path", "observers", "secret_seed")
"""Keys of the recipe with paths of the machine, and without an effect on results."""
MEASURED = ("seconds", "imbalance")
"""Columns of the record that measure the machine."""
COPIED = (CLIENTS, UPDATE_HASHES, RESULT)


def write_slim(run: Path, folder: Path, data: str) -> dict[str, Any]:
    """Write the recipe, record and certificate of a finished run into a folder; return the certificate.

    The files name no path or host of this machine, and no times of rounds. The certificate keeps the run's hashes of
    rounds and their chain. Models are not kept; `hpcfed verify --all` computes them again, and compares their SHA-256
    with the certified ones. If `folder` already has a record with the same chain, nothing is written.

    Args:
        run: the run folder.
        folder: the folder to write.
        data: path of the federation file for the written recipe, relative to `folder`.

    Raises:
        InputError: the run has no certificate, differs from it, or needs other files than the federation; or `folder`
            has the record of another run.
        OSError: a file cannot be read or written.
    """
    certificate = read_certificate(run)
    if certificate is None:
        raise InputError("no certificate", where=str(run), remedy="finish the run")
    if found := [*faults(run, certificate), *_own_files(certificate)]:
        raise InputError("cannot be kept as a record", where=str(run), got=str(found[0]))
    before = read_certificate(folder)
    if before is not None:
        if before["chain"] == certificate["chain"]:
            return before
        remedy = "remove it if the new one shall take its place"
        raise InputError("the record of another run", where=str(folder), got=before["chain"], remedy=remedy)
    files = certificate["files"]
    recipe = {key: value for key, value in read_recipe(run).items() if key not in OF_THE_MACHINE} | {"data": data}
    environment = _without_hosts(certificate["environment"])
    contents = {name: (run / name).read_bytes() for name in COPIED if name in files} | {
        RECIPE: dump_yaml(recipe).encode(),
        RECORD: b"".join(_rows(run)),
        "environment.json": _json(environment),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_whole(folder / name, content)
    own = {
        "recipe": read_recipe(folder),
        "environment": environment,
        "why_not": _unnamed(certificate["why_not"], certificate["environment"]),
        "files": {name: sha256_of(folder / name) for name in sorted(contents)},
        NOT_KEPT: {name: files[name] for name in MODELS if name in files},
    }
    write_whole(folder / CERTIFICATE, _json(certificate | own))
    return read_mapping(folder / CERTIFICATE)


def _own_files(certificate: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files, other than the federation, that are needed to compute a run again and to compare it."""
    yield from (f"named by the recipe: {key}" for key in certificate["named_files"])
    yield from (f"code of the user's: {module}" for module in certificate["code"])
    yield from (name for name in certificate["files"] if name.startswith(f"{PRIVATE}/"))


def _rows(run: Path) -> Iterator[bytes]:
    for row in iterate_rounds(run / RECORD):
        kept = {key: value for key, value in row.items() if key not in MEASURED}
        yield json.dumps(kept, separators=(",", ":")).encode() + b"\n"


def _without_hosts(environment: Mapping[str, Any]) -> dict[str, Any]:
    ranks = [{key: value for key, value in rank.items() if key != "host"} for rank in environment["per_rank"]]
    kept = {key: value for key, value in environment.items() if key != "hosts"} | {"per_rank": ranks}
    if "bitwise_why_not" in kept:
        kept["bitwise_why_not"] = _unnamed(kept["bitwise_why_not"], environment)
    return kept


def _unnamed(why_not: str | None, environment: Mapping[str, Any]) -> str | None:
    """Return the reasons why the same recipe may give other bits elsewhere, with numbers for the names of hosts."""
    if why_not is None:
        return None
    hosts = dict.fromkeys(str(rank.get("host")) for rank in environment["per_rank"])
    numbers = {f" on {host}": f" on host {number}" for number, host in enumerate(hosts, start=1)}
    pattern = "|".join(re.escape(name) for name in sorted(numbers, key=len, reverse=True))
    return re.sub(rf"(?:{pattern})(?=;|$)", lambda found: numbers[found[0]], why_not) if numbers else why_not


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"
