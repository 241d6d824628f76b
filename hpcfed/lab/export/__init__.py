"""Export of a trained model for other programs: one file, with a model card and the preparation of its input."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.io.atomic import write_whole, writing
from hpcfed.lab.export.card import ExportedModel, card, files_of
from hpcfed.lab.export.formats import FORMATS, content_of
from hpcfed.lab.export.preparation import SUFFIX, preparation
from hpcfed.lab.loaded import LoadedRun, load
from hpcfed.run_folder.contents import PRIVATE
from hpcfed.run_folder.files import INITIAL, private_file


def export(
    run: Path,
    kind: str = "safetensors",
    output: Path | None = None,
    site: str | None = None,
    *,
    data: Path | None = None,
    accept_code: bool = False,
    run_code: bool = False,
    overwrite: bool = False,
) -> tuple[Path, Path, Path]:
    """Write a run's evaluated model, the preparation of its input, and a model card; return their paths, in this order.

    An existing card of the same model is extended, so that it lists the files of all formats.

    Args:
        run: the run folder.
        kind: the format, a key of `FORMATS`.
        output: path of the model's file; by default the run's name, the client's number if `site` is given, and the
            format's suffix, in the working folder. The other two files are written beside it.
        site: name or number of the client whose private parameters and buffers, or personal model, are exported; None:
            the common model without private parts.
        data: present path of the run's federation file; None if it has not moved.
        accept_code: whether the model may be built by code that has changed since the run.
        run_code: whether a user-defined model is built by running the code recorded in the run folder.
        overwrite: whether to replace files that exist.

    Raises:
        InputError: there is no trained model or no such site, a file exists, or the format cannot hold the model.
        EnvironmentFailure: a file cannot be written.
    """
    loaded = load(run, data=data, accept_code=accept_code, run_code=run_code)
    client = None if site is None else _client(loaded, site)
    name = loaded.recipe.name if client is None else f"{loaded.recipe.name}-{client}"
    path = output or Path(f"{name}{FORMATS[kind]}")
    if path.suffix == ".md":
        raise InputError("--output", where=str(path), got="the place of the model card", remedy="use another ending")
    stem = path.name.removesuffix(FORMATS[kind])
    stem = path.stem if stem in ("", path.name) else stem
    beside, of_input = (path.with_name(stem + ending) for ending in (".md", SUFFIX))
    with Federation.open(loaded.recipe.data) as federation:
        steps = preparation(federation, loaded.recipe.dtype).encode()
    prepared = ExportedModel(of_input.name, "json", hashlib.sha256(steps).hexdigest(), client)
    others = _listed(loaded, beside, client, prepared)
    for taken, ours in ((path, False), (of_input, _holds(of_input, steps)), (beside, bool(others))):
        if taken.exists() and not (ours or overwrite):
            raise InputError("exists", where=str(taken), remedy="choose another --output, or add --overwrite")
    content = content_of(loaded, kind, client)
    made = ExportedModel(path.name, kind, hashlib.sha256(content).hexdigest(), client)
    text = card(loaded, [*(one for one in others if one.file != made.file), made], prepared)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        write_whole(of_input, steps)
        write_whole(beside, text)
    return path, of_input, beside


def _listed(loaded: LoadedRun, path: Path, client: int | None, prepared: ExportedModel) -> list[ExportedModel]:
    """Return the model files listed by the card at `path`; [] if there is no card or it describes another model."""
    try:
        return files_of(loaded, path.read_text(encoding="utf-8"), client, prepared)
    except (OSError, ValueError):  # ValueError: no text
        return []


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def _client(loaded: LoadedRun, site: str) -> int:
    """Return the number of the client that `site` names.

    Raises:
        InputError: there is no such client, or it has neither private parts nor a personal model.
    """
    if not (loaded.folder / PRIVATE).exists():
        what = f"--site {site}: the model has no private part, so that all sites have the same"
        raise InputError(what, where=str(loaded.folder), remedy="leave it out")
    with Federation.open(loaded.recipe.data) as federation:
        client = federation.client_number(site)
    if not any((loaded.folder / name).exists() for name in (INITIAL, private_file(client))):
        what = f"--site {site}: it was never drawn, so that it has no model of its own"
        raise InputError(what, where=str(loaded.folder), remedy="leave it out")
    return client
