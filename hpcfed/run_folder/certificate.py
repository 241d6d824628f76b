"""``certificate.json`` of a run folder: all that a result depends on, and the digests of all that the run left.

recipe, named_files   the resolved recipe; SHA-256 of the schedules and weights that it names
data                  content hash of the federation
code                  the user's modules → SHA-256 of their text
environment           ``environment.json``
rounds                of each round, "hash digest": 16 digits of the SHA-256 of its row, without what was measured
chain                 SHA-256 over (recipe, named_files, data, code), then over (it, row) round after round
code_before           where a change of code was accepted: ``code`` and the first round, `since`, of each version
files                 path in the folder → SHA-256, of every file that a command reads
not_kept              of a record without its models (`hpcfed.provenance.slim`): name → SHA-256 of each model
repeatable, why_not   whether the same recipe gives the same bits elsewhere, as far as the run can tell
privacy               where means are noised: what ``environment.json`` says of it, and ε after the last round
bits                  ``portable``: elsewhere is any machine; ``native``: one of the same processor and libraries
arithmetic            how this version makes bits (`hpcfed.version.ARITHMETIC`)

Written at the end of a run, whole or not at all, and removed when the run goes on. Alone it protects against accidents;
signed (`hpcfed.provenance.signature`) it protects against intent.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpcfed.config.load import IN_RECIPE_FOLDER, load_recipe, to_plain
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.finder import GIVEN
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.io.text import parse_json, read_text
from hpcfed.run_folder.code import CODE_FILE
from hpcfed.run_folder.contents import contents_of, is_result
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.files import CERTIFICATE, RECIPE, RESULT, read_environment, read_mapping, read_recipe
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.identity import NOT_OF_THE_RESULT, deciding
from hpcfed.run_folder.machines import moves_in_a_line
from hpcfed.run_folder.rounds import RECORD, iterate_rounds
from hpcfed.version import ARITHMETIC

FORMAT, VERSION = "hpcfed-certificate", 2
VARYING_COLUMNS = ("seconds", "imbalance", "bitwise", "sentinel")
"""Columns of the record that differ from run to run."""
DIGITS = 16
BASIS = ("recipe", "named_files", "data", "code", "code_before")
"""Entries on which the rounds depend: the beginning of the chain."""
NOT_KEPT = "not_kept"
ABSENT = "(no such key)"
KINDS = {"recipe": dict, "named_files": dict, "code": dict, "rounds": list, "chain": str, "files": dict}
"""Entries that are read, by their types."""
CHECKED = (
    "data",
    "environment",
    "privacy",
    "stopped",
    "name",
    "bits",
    "arithmetic",
    "code",
    "code_before",
    "why_not",
    "repeatable",
)
"""Entries that other files of the folder give."""


def write_certificate(folder: RunFolder, recipe: Recipe, stopped: str | None) -> None:
    """Write the certificate of a run that has ended; on rank 0 alone.

    Raises:
        EnvironmentFailure: a file of the folder cannot be read, or the certificate not written.
    """
    try:
        content = certificate_of(folder.path, recipe, stopped)
    except OSError as error:
        where, got = str(error.filename or folder.path), error.strerror or str(error)
        raise EnvironmentFailure("cannot be read for the certificate", where=where, got=got) from error
    folder.write(CERTIFICATE, content)


def certificate_of(folder: Path, recipe: Recipe, stopped: str | None) -> dict[str, Any]:
    """Return the content of the certificate for the run in a folder.

    Raises:
        InputError: the run's record is damaged.
        OSError: a file cannot be read.
    """
    environment = _environment(folder)
    basis = {
        "recipe": to_plain(recipe),
        "named_files": {key: sha256_of(path) if path.is_file() else None for key, path in named_files(recipe).items()},
        "data": recipe.data_content,
        **_code_of(read_mapping(folder / CODE_FILE)),
    }
    rounds = CertifiedRounds(basis)
    for row in iterate_rounds(folder / RECORD):
        rounds.add(row)
    why_not = "; ".join(doubts(environment, len(rounds.entries), rounds.first_skipped, basis))
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": recipe.name,
        "repeatable": not why_not,
        "why_not": why_not or None,
        "bits": recipe.bits,
        "arithmetic": environment.get("arithmetic", 1),
        "stopped": stopped,
        **privacy_of(environment, rounds.epsilon),
        **basis,
        "environment": environment,
        "rounds": rounds.entries,
        "chain": rounds.chain,
        "files": _digests(folder),
    }


def _environment(folder: Path) -> dict[str, Any]:
    """Return the content of ``environment.json`` without inode and times of the federation file."""
    return {key: value for key, value in read_environment(folder).items() if key != "data"}


def privacy_of(environment: Mapping[str, Any], epsilon: float | None) -> dict[str, Any]:
    """Return {``privacy``: its facts and the last round's ε}; {} for a run without differential privacy."""
    return {"privacy": {**environment["privacy"], "epsilon": epsilon}} if "privacy" in environment else {}


def doubts(
    environment: Mapping[str, Any], rounds: int, first_skipped: int | None, code: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the reasons why the same recipe may give other bits elsewhere.

    Args:
        environment: content of ``environment.json``.
        rounds: number of recorded rounds.
        first_skipped: the first round that skipped a client; None if none did.
        code: a certificate's entries on code.
    """
    if environment.get("bitwise") is False:
        yield str(environment.get("bitwise_why_not"))
    if moved := moves_in_a_line(environment, rounds):
        yield moved
    if first_skipped is not None:
        yield f"clients were skipped, in round {first_skipped} first: what made their training fail may not recur"
    if GIVEN in code["code"] and code["code"][GIVEN] is None:
        yield "objects given from Python could not be recorded (code.json)"
    changes = len(code.get("code_before", ())) - 1
    if changes > 0:
        yield f"code of the user's was changed {'once' if changes == 1 else f'{changes} times'} on the way (code.json)"


def row_digest(row: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a round's row of the record, without the columns that vary, such as timings."""
    kept = {key: value for key, value in row.items() if key not in VARYING_COLUMNS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


class CertifiedRounds:
    """The certified rounds, added one after another.

    Args:
        basis: the certificate's entries on which the run's result depends.

    Attributes:
        entries: "hash digest" of each round.
        chain: the last link of the chain: SHA-256 of the basis, then of each row after the other; equal for equal
            results, on any machine.
        first_skipped: the first round that skipped a client; None if none did.
        epsilon: ε after the last round; None without differential privacy.
    """

    def __init__(self, basis: Mapping[str, Any]):
        decides = {**basis, "recipe": deciding(basis["recipe"], NOT_OF_THE_RESULT)}
        self.entries = list[str]()
        self.chain = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        self.first_skipped: int | None = None
        self.epsilon: float | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the next round, by its row of the record."""
        digest = row_digest(row)
        self.epsilon = row.get("epsilon")
        self.entries.append(f"{row.get('hash')} {digest[:DIGITS]}")
        self.chain = hashlib.sha256(f"{self.chain} {digest}".encode()).hexdigest()
        if self.first_skipped is None and row.get("skipped"):
            self.first_skipped = row["round"]


def named_files(recipe: Recipe) -> dict[str, Path]:
    """Return the schedules and weights that a recipe names, by their dotted keys; the data have a hash of their own,
    and a secret seed must have none.
    """
    found = {}
    for keys in IN_RECIPE_FOLDER:
        value: Any = recipe
        for key in keys:
            value = getattr(value, key, None)
        if isinstance(value, Path) and keys not in (("data",), ("secret_seed",)):
            found[".".join(keys)] = value
    return found


def read_certificate(folder: Path) -> dict[str, Any] | None:
    """Return the certificate of a run folder; None if there is none.

    Raises:
        InputError: the file is a link or not a certificate; `OtherVersion`: another version of hpcfed wrote it.
    """
    path = folder / CERTIFICATE
    if path.is_symlink():
        raise InputError("a link, not a certificate", where=str(path))
    try:
        content = parse_json(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError("not a certificate", where=str(path), got=str(error)) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError("not a certificate", where=str(path), expected=f'"format": "{FORMAT}"')
    if content.get("version") != VERSION:
        remedy = "'hpcfed certify RUN' writes one of this version"
        if read_environment(folder).get("arithmetic", 1) != ARITHMETIC:  # that would be refused next
            remedy = "its rounds have another arithmetic (docs/bits.md), too: check it with the version that wrote it"
        raise OtherVersion("a certificate of another version", where=str(path), expected=str(VERSION), remedy=remedy)
    for key, kind in KINDS.items():
        if not isinstance(content.get(key), kind):
            raise InputError("not a certificate", where=str(path), expected=f"{key!r} of type {kind.__name__}")
    return content


def not_kept(folder: Path) -> dict[str, Any]:
    """Return the certificate's list of models that the run left and its folder does not keep: name → SHA-256."""
    found = read_mapping(folder / CERTIFICATE).get(NOT_KEPT)
    return found if isinstance(found, dict) else {}


def changed(folder: Path, *patterns: str) -> Iterator[Path]:
    """Yield files of a run folder that are missing or differ from its certificate; without one there are none.

    Args:
        folder: the run folder.
        patterns: the files to compare, such as ``private/*``.
    """
    certified = read_mapping(folder / CERTIFICATE).get("files")
    for name, digest in certified.items() if isinstance(certified, dict) else ():
        path = folder / name
        if any(fnmatchcase(name, one) for one in patterns) and not (path.is_file() and sha256_of(path) == digest):
            yield path


def refuse_changed(folder: Path, *patterns: str) -> None:
    """Refuse a run folder in which a file is `changed`.

    Raises:
        InputError: a file is not the one that the certificate names.
    """
    for path in changed(folder, *patterns):
        remedy = "restore it, or remove the run's folder to train it again"
        raise InputError("is not the file that the run's certificate names", where=str(path), remedy=remedy)


class OtherVersion(InputError):
    """A certificate that another version of hpcfed wrote."""


@dataclass(frozen=True)
class Fault:
    """A difference between a run folder and its certificate: the file or part, and what is wrong with it."""

    part: str
    what: str

    def __str__(self) -> str:
        return f"{self.part}: {self.what}"


def links_of(folder: Path) -> list[Fault]:
    """Return a fault for each result of a run folder that is a link, a folder or a device."""
    return [Fault(name, "is a link, or no file: nothing is read through it") for name in contents_of(folder).unusable]


def faults(folder: Path, certificate: Mapping[str, Any]) -> list[Fault]:
    """Return where a run folder differs from its certificate, the certificate itself included.

    A result that is no file of the folder, or that the certificate does not name, is a fault; of the certificate's
    names only those of results are looked at.

    Raises:
        OSError: as the system reports it.
    """
    present, found, elsewhere = contents_of(folder), links_of(folder), not_kept(folder)
    others = [name for name in elsewhere if name not in MODELS]
    found += [Fault(CERTIFICATE, f"does not keep {name!r}, which is no model") for name in others]
    unknown = [name for name, digest in elsewhere.items() if not _is_digest(digest)]
    found += [Fault(CERTIFICATE, f"does not keep {name!r}, and has no SHA-256 of it") for name in unknown]
    put_back = {name: digest for name, digest in elsewhere.items() if name in present.results}
    certified: Mapping[str, Any] = {**certificate["files"], **put_back}
    for name in sorted({*certified, *present.results}):
        if not is_result(name):
            found.append(Fault(CERTIFICATE, f"names {name!r}, which is no result of a run"))
        elif name not in present.results:
            if name not in present.unusable and name.rpartition("/")[0] not in present.unusable:
                found.append(Fault(name, "is missing"))
        elif name not in certified:
            found.append(Fault(name, "is not named by the certificate"))
        elif sha256_of(folder / name) != certified[name]:
            found.append(Fault(name, "is not the file that the certificate names"))
    if RECORD in present.results:
        found += _faults_of_rounds(folder, certificate)
    found += [] if found else _contradictions(folder, certificate)
    return found


def _contradictions(folder: Path, certificate: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each entry of a certificate that differs from the content of the file it is taken from."""
    environment, recipe = _environment(folder), read_recipe(folder)
    epsilon, rounds = None, 0
    for row in iterate_rounds(folder / RECORD):
        epsilon, rounds = row.get("epsilon"), rounds + 1
    first_skipped = next((row["round"] for row in iterate_rounds(folder / RECORD) if row.get("skipped")), None)
    code = _code_of(read_mapping(folder / CODE_FILE))
    why_not = "; ".join(doubts(environment, rounds, first_skipped, code))
    expected = {
        "environment": (environment, "environment.json"),
        "privacy": (privacy_of(environment, epsilon).get("privacy"), "the environment and the record"),
        "stopped": (read_mapping(folder / RESULT).get("stopped"), RESULT),
        "name": (recipe.get("name"), RECIPE),
        "data": (recipe.get("data_content"), RECIPE),
        "bits": (recipe.get("bits", "native"), RECIPE),
        "arithmetic": (environment.get("arithmetic", 1), "environment.json"),
        "code": (code["code"], CODE_FILE),
        "code_before": (code.get("code_before"), CODE_FILE),
        "why_not": (why_not or None, "the environment, the record and the code"),
        "repeatable": (not why_not, "the environment, the record and the code"),
    }
    for entry, (value, source) in expected.items():
        if certificate.get(entry) != value:
            yield Fault(CERTIFICATE, f"its {entry!r} is not that of {source}")
    known = {"format", "version", *KINDS, *CHECKED, *([NOT_KEPT] if not_kept(folder) else [])}
    for entry in sorted(certificate.keys() - known):
        yield Fault(CERTIFICATE, f"has an entry {entry!r}, which is none of a certificate's")
    yield from _other_recipe(folder, certificate, recipe)


def _other_recipe(folder: Path, certificate: Mapping[str, Any], recipe: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each key of the certified recipe that is not that of ``recipe.yaml``, and for each schedule or
    weights file that only one of the two names.

    A certificate may be later than ``recipe.yaml``, and have keys that this lacks: they have their defaults.
    """
    certified, recorded = deciding(certificate["recipe"], ()), deciding(recipe, ())
    try:
        loaded = load_recipe(folder / RECIPE)
    except InputError:  # said by all that use the recipe
        return
    expected, named = deciding(to_plain(loaded), ()) | recorded, named_files(loaded)
    for key in sorted(recorded.keys() | certified.keys()):
        one, other = (recipe.get(key, ABSENT) for recipe in (certified, expected))
        if one != other:
            yield Fault(CERTIFICATE, f"its recipe has {key}: {one}, {RECIPE} {other}")
    for key in sorted(named.keys() ^ certificate["named_files"].keys()):
        where, other = (RECIPE, CERTIFICATE) if key in named else (CERTIFICATE, RECIPE)
        yield Fault(where, f"names a file for {key}, {other} none")


def _faults_of_rounds(folder: Path, certificate: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each round whose row was changed, and one if the certificate contradicts itself."""
    basis = {key: certificate[key] for key in BASIS if key in certificate}
    rounds = CertifiedRounds(basis)
    try:
        for row in iterate_rounds(folder / RECORD):
            rounds.add(row)
    except InputError as damage:
        yield Fault(RECORD, str(damage))
        return
    entries, recorded = rounds.entries, certificate["rounds"]
    if len(entries) != len(recorded):
        yield Fault(RECORD, f"has {len(entries)} rounds, the certificate {len(recorded)}")
    for round, (found, own) in enumerate(zip(entries, recorded, strict=False), start=1):
        if found != own:
            yield Fault(RECORD, f"round {round} was changed: hash and digest {found}, certified {own}")
    if entries == recorded and certificate["chain"] != rounds.chain:
        yield Fault(CERTIFICATE, "its recipe, data, code and rounds do not give its chain")


def _digests(folder: Path) -> dict[str, str]:
    return {name: sha256_of(folder / name) for name in contents_of(folder).results}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _code_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry ``code`` of a certificate from ``code.json``, and ``code_before`` where code was changed."""

    def digests(files: Mapping[str, Any]) -> dict[str, str | None]:
        return {name: _of_text(source["text"]) for name, source in files.items()}

    found: dict[str, Any] = {"code": digests(content.get("files", {}))}
    if before := content.get("before"):
        found["code_before"] = [{"code": digests(one["files"]), "since": one["since"]} for one in before]
        found["code_before"].append({"code": found["code"], "since": content["since"]})
    return found


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _of_text(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()
