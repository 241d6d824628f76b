"""The certificate of a finished run folder: written if it is missing, checked, and signed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpcfed.config.load import load_recipe
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.provenance.signature import sign
from hpcfed.run_folder.certificate import OtherVersion, faults, read_certificate, write_certificate
from hpcfed.run_folder.files import CERTIFICATE, RECIPE, RESULT, SIGNATURE, read_mapping
from hpcfed.run_folder.folder import RunFolder


def certify(run: Path, key: Path | None) -> Iterator[str]:
    """Certify a finished run; yield a line for each step: certificate written if missing, files checked, signed.

    Args:
        run: the run folder.
        key: SSH key that signs the certificate; None: it is not signed.

    Raises:
        InputError: the run is not finished, its files differ from the certificate, or the certificate cannot be signed.
        EnvironmentFailure: a file cannot be read or written.
    """
    if not (run / RECIPE).exists():
        what = "not a run folder" if run.exists() else "no such run"
        raise InputError(what, where=str(run), remedy="name the output folder of a run")
    folder = RunFolder(run.resolve())
    result = read_mapping(folder.path / RESULT)
    if result.get("status") != "finished":
        got = str(result.get("status", "unfinished"))
        raise InputError("only finished runs have a certificate", where=str(run), got=got)
    try:
        certificate, why = read_certificate(folder.path), "for the run had none"
    except OtherVersion as error:
        if (folder.path / SIGNATURE).exists():
            remedy = "check it with the version that wrote it; to have one of this version, move both files away first"
            raise InputError(
                "a certificate of another version, and signed", where=str(folder.path / CERTIFICATE), remedy=remedy
            ) from error
        certificate, why = None, "in place of one of another version"
    if certificate is None:
        (folder.path / SIGNATURE).unlink(missing_ok=True)  # of another certificate
        write_certificate(folder, load_recipe(folder.path / RECIPE), result.get("stopped"))
        certificate = read_certificate(folder.path) or {}
        yield f"{folder.path / CERTIFICATE}: written, {why}"
    try:
        found = faults(folder.path, certificate)
    except OSError as error:
        raise EnvironmentFailure("cannot be read", where=str(run), got=str(error)) from error
    if found:
        remedy = "restore it, or train again with --fresh"
        raise InputError(
            "the folder is not what its certificate says", where=str(run), got=str(found[0]), remedy=remedy
        )
    yield f"{len(certificate['files'])} files and {len(certificate['rounds'])} rounds are as certified"
    if key is not None:
        with suppress(RuntimeError):  # ``~`` of nobody: ssh-keygen says that there is no such file
            key = key.expanduser()
        yield f"{folder.path / SIGNATURE}: signed with {sign(folder.path, key)}"
