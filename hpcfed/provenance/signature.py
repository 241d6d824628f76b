"""Signatures of certificates by SSH keys: ``certificate.json.sig``, made and checked by ``ssh-keygen -Y``, offline."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from hpcfed.errors import InputError
from hpcfed.io.atomic import write_whole, writing
from hpcfed.run_folder.files import CERTIFICATE, SIGNATURE

NAMESPACE = "hpcfed"
"""Namespace of the signatures, so that one made for mail or git is not accepted for a run."""
KEY = re.compile(r"key (\S+:\S+)")


def sign(folder: Path, key: Path) -> str:
    """Sign a run folder's certificate with an SSH key; return the key's fingerprint, ``key SHA256:…``.

    ssh-keygen asks for a passphrase on the terminal.

    Args:
        folder: the run folder.
        key: file of the private key, or of the public key if ssh-agent holds the private one.

    Raises:
        InputError: ssh-keygen is not installed, or refuses the key.
        EnvironmentFailure: the signature cannot be written.
    """
    content = (folder / CERTIFICATE).read_bytes()
    signed = _ssh_keygen(["sign", "-f", str(key), "-n", NAMESPACE], content)
    if signed.returncode or not signed.stdout:
        got = _words(signed) or f"exit code {signed.returncode}"
        raise InputError("the certificate was not signed", where=str(key), got=got, remedy="name a private SSH key")
    with writing(folder / SIGNATURE):
        write_whole(folder / SIGNATURE, signed.stdout)
    return checked(folder, None)[1]


def checked(folder: Path, signers: Path | None) -> tuple[bool, str]:
    """Return whether the certificate's signature is valid, and in words the signer and key, or why it is not valid.

    Args:
        folder: the run folder, which has a signature.
        signers: an "allowed signers" file of ssh-keygen; None: any key is accepted, and only its fingerprint returned.

    Raises:
        InputError: ssh-keygen is not installed, or the file of signers does not exist.
    """
    content, signature = (folder / CERTIFICATE).read_bytes(), str(folder / SIGNATURE)
    good = _ssh_keygen(["check-novalidate", "-n", NAMESPACE, "-s", signature], content)
    if good.returncode:
        return False, _words(good) or "not a signature of it"
    found = KEY.search(_words(good))
    key = found[1] if found else "unknown"
    if signers is None:
        return True, f"key {key}"
    if not signers.is_file():
        raise InputError("no such file of allowed signers", where=str(signers))
    names = _ssh_keygen(["find-principals", "-s", signature, "-f", str(signers)], b"")
    signer = _words(names).splitlines()[0] if names.returncode == 0 and _words(names) else ""
    if not signer:
        return False, f"key {key}, which is not among the allowed signers"
    checked = _ssh_keygen(["verify", "-f", str(signers), "-I", signer, "-n", NAMESPACE, "-s", signature], content)
    return checked.returncode == 0, f"{signer}, key {key}" if checked.returncode == 0 else _words(checked)


def _ssh_keygen(arguments: list[str], content: bytes) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise InputError("no ssh-keygen on the path", remedy="install OpenSSH's client (version 8.2 or later)")
    return subprocess.run([program, "-Y", *arguments], input=content, capture_output=True, check=False)


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    return (done.stdout + done.stderr).decode(errors="replace").strip()
