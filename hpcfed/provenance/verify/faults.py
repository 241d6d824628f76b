"""Faults of a run folder, and of the data that it was computed from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py

from hpcfed.config.recipe import Recipe
from hpcfed.data.content import KIND, content_hash
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.provenance.signature import checked
from hpcfed.run_folder.certificate import Fault, faults, read_certificate
from hpcfed.run_folder.checkpoint.restore import damage_of
from hpcfed.run_folder.checkpoint.writer import manifests
from hpcfed.run_folder.files import CERTIFICATE, SIGNATURE


def folder_faults(run: Path, signers: Path | None) -> Iterator[Fault | str]:
    """Yield faults of a run folder, and as text what was found right or could not be checked.

    Raises:
        InputError: there is no ssh-keygen to check a signature with.
        EnvironmentFailure: a file cannot be read.
    """
    try:
        certificate = read_certificate(run)
        found = [] if certificate is None else faults(run, certificate)
    except InputError as error:
        yield Fault(CERTIFICATE, str(error))
        return
    except OSError as error:
        raise EnvironmentFailure("cannot be read", where=str(run), got=str(error)) from error
    yield from found
    if certificate is None:
        yield "no certificate: the files are not checked"
    elif not found:
        yield f"{len(certificate['files'])} files and {len(certificate['rounds'])} rounds are as certified"
    yield from _signature(run, signers)
    for manifest in manifests(run / "checkpoints"):
        if damage := damage_of(manifest):
            yield Fault(f"checkpoints/{manifest.name}", damage)


def data_faults(recipe: Recipe) -> Iterator[Fault | str]:
    """Yield faults of the data that a recipe names, and as text what was found right.

    Raises:
        InputError: the data are not there.
    """
    if not recipe.data.exists():
        raise InputError("no such federation file", where=str(recipe.data), remedy="name its place with --data")
    wanted = recipe.data_content
    if wanted is None or not wanted.startswith(KIND):
        yield "the data have no hash that can be computed: they are not checked"
        return
    try:
        with h5py.File(recipe.data, "r", locking=False) as file:
            found = content_hash(file)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        yield Fault(str(recipe.data), f"cannot be read: {error}")
        return
    yield (
        f"the data are {wanted}" if found == wanted else Fault(str(recipe.data), f"the data are {found}, not {wanted}")
    )


def _signature(run: Path, signers: Path | None) -> Iterator[Fault | str]:
    if not (run / SIGNATURE).exists():
        if signers is not None:
            yield Fault(SIGNATURE, "is missing")
        return
    good, words = checked(run, signers)
    yield f"signed by {words}" if good else Fault(SIGNATURE, words)
