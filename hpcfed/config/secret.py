"""The secret seed of a private run: read from a file or a variable of the environment, published as a commitment.

    secret_seed: seed.txt              a file, relative to the recipe;      secret_seed: {env: HPCFED_SECRET}

It is text of at least 32 hexadecimal digits, 128 random bits, such as ``openssl rand -hex 32`` writes. The recipe of a
run folder has its place and

    secret = SHAKE-256(text, what decides the rounds), 256 bits
    secret_commitment = salt : SHA-256(salt, secret),      salt = SHAKE-256(secret), 128 bits

by which its holder can show that a run was made with it, and nobody else can find it. Runs of one text that differ in
name, seeds, data, model, method, lists, cohorts, masks or local work, such as those of a sweep, have noise of their
own; in the user's code they must not differ alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from hashlib import file_digest, sha256, shake_256
from pathlib import Path
from typing import Any

from hpcfed.errors import InputError
from hpcfed.io.text import MAX_YAML_LENGTH, Malformed, read_text, refuse_special

MIN_DIGITS, MIN_DIFFERENT = 32, 6
"""Hexadecimal digits of 128 bits, and how many different ones random text hardly ever falls below."""
A_SECRET = {
    "anyOf": [
        {"type": "string", "format": "path"},
        {
            "type": "object",
            "properties": {"env": {"type": "string"}},
            "required": ["env"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ],
}
"""JSON Schema of the values that `a_secret` accepts."""
REMEDY = "make one with: openssl rand -hex 32"
HOLDER = "the rounds of this run can be computed by the holder of its secret seed alone"


def a_secret(value: Any) -> Any:
    """Validate a file, or ``{env: NAME}``."""
    if value is None or isinstance(value, str | Path):
        return value if value is None else Path(value)
    if isinstance(value, Mapping) and [*value] == ["env"] and isinstance(value["env"], str):
        return dict(value)
    raise ValueError("a file, or {env: NAME}")


def read_secret(place: Path | Mapping[str, str], commitment: str | None, about: str) -> int:
    """Return the secret seed of a run, a number of 256 bits: from the text, and from what is said `about` the run.

    Raises:
        InputError: it is not there, too short or not random, or not the one of the `commitment`.
    """
    text = _text(place, commitment).strip().lower()
    where = f"secret_seed: {place['env'] if isinstance(place, Mapping) else place}"
    if len(text) < MIN_DIGITS or text.strip("0123456789abcdef") or len({*text}) < MIN_DIFFERENT:
        expected = f"{MIN_DIGITS} random hexadecimal digits or more"
        raise InputError(where, expected=expected, got=f"{len(text)} characters", remedy=REMEDY)
    digest = shake_256(f"hpcfed secret seed {text} {about}".encode()).digest(32)
    secret = int.from_bytes(digest, "little") | 1 << 255  # no seed of a recipe is so large
    if commitment not in (None, commitment_of(secret)):
        raise InputError(f"{where} is not the run's: {HOLDER}", remedy="name the file with the run's own seed")
    return secret


def content_of(value: Path | Any) -> Any:
    """Return a value; of a file the hash of its content, "" where it cannot be read, which is refused elsewhere."""
    if not isinstance(value, Path):
        return value
    try:
        refuse_special(value)
        with value.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except (OSError, Malformed):
        return ""


def _text(place: Path | Mapping[str, str], commitment: str | None) -> str:
    whose = "" if commitment is None else f"; {HOLDER}"
    if isinstance(place, Mapping):
        found = os.environ.get(place["env"])
        if found is None:
            what = f"secret_seed: the variable {place['env']} is not set{whose}"
            raise InputError(what, remedy=f"set it; {REMEDY}" if commitment is None else "set it to the run's own")
        return found
    try:
        return read_text(place, MAX_YAML_LENGTH, pipes=True)
    except FileNotFoundError:
        remedy = REMEDY if commitment is None else "put the run's own there"
        raise InputError(f"secret_seed: no such file{whose}", where=str(place), remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise InputError("secret_seed: cannot be read", where=str(place), got=str(error)) from None


def is_open(place: Path | Mapping[str, str]) -> bool:
    """Whether others than the file's owner and group may read it."""
    return isinstance(place, Path) and place.exists() and bool(place.stat().st_mode & stat.S_IROTH)


def commitment_of(secret: int) -> str:
    """Return what a run publishes of its secret seed."""
    key = secret.to_bytes(32, "little")
    salt = shake_256(b"hpcfed salt" + key).digest(16)
    return f"{salt.hex()}:{sha256(salt + key).hexdigest()}"


def key_of(secret: int) -> bytes:
    """Return the key with which clients' states are written to checkpoints, 32 bytes."""
    return shake_256(b"hpcfed states" + secret.to_bytes(32, "little")).digest(32)
