"""Checks before any round is computed: faults of a run folder's files, and of the data that it was computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal

from hpcfed.config.recipe import Recipe
from hpcfed.data.content import KIND, content_hash
from hpcfed.data.federation import Federation
from hpcfed.data.storage import open_hdf5
from hpcfed.errors import EnvironmentFailure, InputError, first_of
from hpcfed.io.pace import Pace
from hpcfed.io.text import doubled_key, lines_of, open_file
from hpcfed.provenance.recorded import RecordedRun
from hpcfed.provenance.signature import checked
from hpcfed.provenance.verify.tables import RecordedTables
from hpcfed.run_folder.certificate import Fault, OtherVersion, faults, links_of, read_certificate
from hpcfed.run_folder.checkpoint.restore import damage_of
from hpcfed.run_folder.checkpoint.writer import manifests, round_of
from hpcfed.run_folder.code import CODE_FILE, CodeRecord
from hpcfed.run_folder.contents import CHECKPOINTS, contents_of
from hpcfed.run_folder.files import CERTIFICATE, RECIPE, RESULT, SIGNATURE
from hpcfed.run_folder.outcome import has_ended
from hpcfed.run_folder.rounds import RECORD
from hpcfed.run_folder.stopping import reason_to_stop

MAX_LISTED = 4
"""Largest number of files that are named in a line."""


def folder_faults(run: Path, signers: Path | None) -> Iterator[Fault | str]:
    """Yield a `Fault` for each fault of a run folder's files, and a line for each check that passed or was impossible.

    Args:
        run: the run folder.
        signers: an "allowed signers" file of ssh-keygen; a key in it must have signed. None: a signature is optional.

    Raises:
        InputError: `run` is not a run folder, or a signature cannot be checked because ssh-keygen is not installed.
        EnvironmentFailure: a file cannot be read.
    """
    if not (run / RECIPE).is_file():
        raise InputError("not a run folder", where=str(run), remedy="name the output folder of a run")
    try:
        certificate = read_certificate(run)
        found = links_of(run) if certificate is None else faults(run, certificate)
    except OtherVersion:
        raise
    except InputError as error:
        yield Fault(CERTIFICATE, str(error))
        return
    except OSError as error:
        raise EnvironmentFailure("cannot be read", where=str(run), got=str(error)) from error
    found += _doubled_entries(run)
    yield from found
    if others := contents_of(run).others:
        yield f"not a run's, and not looked at: {first_of(others, MAX_LISTED)}"
    if certificate is None:
        yield "no certificate: the files are not checked"
    elif not found:
        yield f"{len(certificate['files'])} files and {len(certificate['rounds'])} rounds are as certified"
    present = contents_of(run)
    if SIGNATURE not in present.unusable:
        yield from _signature(run, signers)
    for manifest in manifests(run / CHECKPOINTS) if CHECKPOINTS not in present.unusable else ():
        own = {f"{CHECKPOINTS}/{path.name}" for path in (manifest, manifest.with_suffix(".server"))}
        if own.isdisjoint(present.unusable) and (damage := damage_of(manifest)):
            yield Fault(f"checkpoints/{manifest.name}", damage)


def _doubled_entries(run: Path) -> Iterator[Fault]:
    """Yield a fault for each JSON file that has a key twice: another reader may take the value not verified here."""
    for name in (CERTIFICATE, *contents_of(run).results):
        path = run / name
        if path.suffix not in (".json", ".jsonl") or not path.is_file():
            continue
        with suppress(OSError, ValueError), open_file(path) as file:  # reported where the file is used
            for number, line in enumerate(lines_of(file) if path.suffix == ".jsonl" else [file.read()], start=1):
                if (key := doubled_key(line.decode())) is not None:
                    yield Fault(name, f"has {key!r} twice{f', in line {number}' if path.suffix == '.jsonl' else ''}")
                    break


def ended(run: RecordedRun) -> bool:
    """Whether the run has ended, judged by its record and its models, not by ``result.json``."""
    return has_ended(run.folder, run.recipe, run.rows)


def ending_faults(run: RecordedRun, tables: RecordedTables) -> Iterator[Fault]:
    """Yield contradictions between the record and ``result.json``, checkpoints and tables, and within ``code.json``."""
    status, rounds, last = run.result.get("status"), run.result.get("rounds"), len(run.rows)
    if status == "finished" and not ended(run):
        what = f"says finished, but the record has {last} of {run.recipe.rounds} rounds, or the model is missing"
        yield Fault(RESULT, what)
    if status is not None and rounds != last:
        yield Fault(RESULT, f"says {rounds} rounds, the record has {last}")
    if last > run.recipe.rounds:
        yield Fault(RECORD, f"has {last} rounds, the recipe {run.recipe.rounds}")
    if status == "finished" and run.result.get("stopped") is not None and reason_to_stop(run.recipe, run.rows) is None:
        yield Fault(RESULT, f"says {run.result['stopped']!r}, which the record does not bear out")
    for manifest in manifests(run.folder / CHECKPOINTS):
        if round_of(manifest) > last:
            yield Fault(f"{CHECKPOINTS}/{manifest.name}", f"is of a round after the last one, {last}")
    for version in CodeRecord(run.folder).versions():
        for name, source in version.files.items():
            if source.text is not None and "\ufffd" not in source.text and not source.is_whole:
                yield Fault(CODE_FILE, f"the text of {name} does not have its hash")
    yield from tables.faults_of_sizes()


def data_faults(recipe: Recipe, say: Callable[[str], None]) -> Iterator[Fault | str]:
    """Yield a fault unless the federation file has the hash in the recipe; a line if it has, or the recipe has none.

    `say` is called with lines on progress.

    Raises:
        InputError: the federation file does not exist.
    """
    if not recipe.data.exists():
        raise InputError("no such federation file", where=str(recipe.data), remedy="name its place with --data")
    wanted = recipe.data_content
    if wanted is None or not wanted.startswith(KIND):
        yield "the data have no hash that can be computed: they are not checked"
        return
    pace = Pace()

    def show(done: int, total: int) -> None:
        if pace.is_due():
            say(f"{decimal(done)} of {decimal(total)} of the data are read{pace.left(done, total)}")

    try:
        # Opened as by a run: a pipe is refused, and sizes that the file only claims.
        with Federation.open(recipe.data, labels_checked=True), open_hdf5(recipe.data) as file:
            found = content_hash(file, show)
    except InputError as error:
        yield Fault(str(recipe.data), f"cannot be read: {str(error).removeprefix(f'{error.where}: ')}")
        return
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
    if not (run / CERTIFICATE).is_file():
        yield Fault(CERTIFICATE, "is missing, and was signed")
        return
    good, words = checked(run, signers)
    yield f"signed by {words}" if good else Fault(SIGNATURE, words)
