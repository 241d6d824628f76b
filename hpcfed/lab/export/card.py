"""The model card of an exported model: data, sites, method, recipe, metrics, digests and references, in Markdown.

Reference: Mitchell et al., "Model cards for model reporting", FAT* 2019.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.cohort import present_in
from hpcfed.config.load import dump_yaml, to_plain
from hpcfed.data.federation import Federation
from hpcfed.data.sites import MOST_SITES, class_names, site_names
from hpcfed.errors import counted, first_of
from hpcfed.lab.cite import bibtex
from hpcfed.lab.export.formats import private_names, why_initial
from hpcfed.lab.export.preparation import dtype_of, fill_of, is_bytes, scaling
from hpcfed.lab.loaded import LoadedRun
from hpcfed.lab.report.clients import GLOBAL, read_clients
from hpcfed.lab.report.group import ABSENT
from hpcfed.run_folder.files import CERTIFICATE, SIGNATURE, read_mapping
from hpcfed.run_folder.identity import WITHOUT_EFFECT
from hpcfed.run_folder.private import NOT_COVERED, in_words
from hpcfed.run_folder.rounds import RECORD, read_rounds
from hpcfed.types import PERSONAL
from hpcfed.version import __version__

MAX_LISTED = 12
OUTPUTS = {
    "classification": "a score for each class, before the softmax",
    "multi-label": "the log-odds of each label",
    "regression": "numbers",
    "survival": "the log hazard",
    "next-token": "a score for each token, before the softmax",
}
LOADING = {
    "safetensors": 'safetensors.torch.load_file("{file}")  # tensors by the module\'s names',
    "state_dict": 'torch.load("{file}", weights_only=True)  # tensors by the module\'s names',
    "torchscript": 'torch.jit.load("{file}")  # a module in evaluation mode',
}


@dataclass(frozen=True)
class ExportedModel:
    """An exported file: name, format, SHA-256, and the number of the client whose model it is; None: the common one."""

    file: str
    kind: str
    sha256: str
    client: int | None


FILE = re.compile(r"^\| file \| `(.+)`, (\w+) \|\n\| SHA-256 \| `(\w+)` \|$", re.MULTILINE)
"""Matches the two rows of a file in a card: name and format, and SHA-256."""


def files_of(loaded: LoadedRun, text: str, client: int | None, prepared: ExportedModel) -> list[ExportedModel]:
    """Return the model files that `text`, an existing card, lists; [] if it is the card of another model.

    It is of this model if `card` returns the same text for this run, the files (as models of `client`) and `prepared`.
    """
    files = [ExportedModel(name, kind, digest, client) for name, kind, digest in FILE.findall(text)]
    known = files and all(one.kind in LOADING for one in files)
    return files if known and card(loaded, files, prepared) == text else []


def card(loaded: LoadedRun, files: Sequence[ExportedModel], prepared: ExportedModel) -> str:
    """Return the Markdown model card of `files`, one per format, and `prepared`, the preparation of their input."""
    rows = read_rounds(loaded.folder / RECORD)
    is_private = loaded.recipe.is_private
    is_personal = files[0].client is not None and not private_names(loaded)
    with Federation.open(loaded.recipe.data) as federation:
        parts = [
            f"# {_plain(loaded.recipe.name)}",
            _summary(loaded, federation, files[0].client, len(rows)),
            "## The file",
            _table(("", ""), _file(loaded, federation, files, prepared)),
            *(f"```python\n{LOADING[one.kind].format(file=one.file)}\n```" for one in files),
            "## Data",
            _table(("", ""), _data(federation, withheld=is_private)),
            "## Sites",
            f"{federation.num_clients:,} sites; their sizes are withheld."
            if is_private
            else _sites(loaded, federation, PERSONAL if is_personal else GLOBAL),
        ]
    metrics = list(_metrics(rows))
    method = loaded.environment.get("method") or loaded.recipe.algorithm.name or loaded.recipe.algorithm.factory
    parts += [
        "## Metrics over all",
        *(["Of the common model, not of this personal one."] if is_personal and metrics else []),
        _table(("Measure", "Value", "Round"), metrics) if metrics else "The run measured none.",
        "## Method and recipe",
        f"{method}; the complete recipe:",
        f"```yaml\n{_recipe(loaded)}```",
        *(
            ["## Privacy", f"{promised[0].upper()}{promised[1:]}. {NOT_COVERED}"]
            if (promised := _promised(loaded, rows))
            else []
        ),
        "## Certificate",
        _certificate(loaded, rows),
        "## Cite",
        f"```bibtex\n{bibtex(loaded.folder)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _summary(loaded: LoadedRun, federation: Federation, client: int | None, rounds: int) -> str:
    whose = ""
    if client is not None:
        has = "has the private parts" if private_names(loaded) else "is the personal model"
        why = why_initial(loaded, client, int(federation.sizes[client]))
        initial = f", which {why}: initial values" if why else ""
        whose = f" It {has} of {_plain(site_names(federation)[client])}{initial}."
    elif private := private_names(loaded):
        whose = f" {len(private)} tensors are private to each site and not in the file."
    present, version = present_in(loaded.recipe, federation.num_clients), loaded.environment.get("hpcfed", __version__)
    absent = [_plain(site_names(federation)[k]) for k in np.flatnonzero(~present)]
    without = f", without {first_of(absent, MAX_LISTED)}" if absent else ""
    empty = 0 if loaded.recipe.is_private else int((present & (federation.sizes == 0)).sum())
    sites = counted(int(present.sum()) - empty, "site") + (f" with samples ({empty} without)" if empty else "")
    return (
        f"Trained by simulated federated learning on {sites} for {counted(rounds, 'round')}{without}, "
        f"with hpcfed {version}.{whose}"
    )


def _file(
    loaded: LoadedRun, federation: Federation, files: Sequence[ExportedModel], prepared: ExportedModel
) -> Iterator[tuple[str, str]]:
    recipe = loaded.recipe
    for one in files:
        yield "file", f"`{one.file}`, {one.kind}"
        yield "SHA-256", f"`{one.sha256}`"
    yield "model", f"`{recipe.model.factory or recipe.model.name}`"
    yield "iterate", f"`evaluate.model: {recipe.evaluate.model}`"
    yield "input", f"{dtype_of(federation, recipe.dtype)}, (n, {', '.join(map(str, federation.feature_shape))})"
    yield "preparation of input", f"`{prepared.file}`: all names and numbers; SHA-256 `{prepared.sha256}`"
    if fill := list(_fill(federation)):
        yield "missing values", f"the model expects them filled, before scaling: {_plain('; '.join(fill))}"
    if scaled := _scaling(federation):
        yield "scaling", f"the model expects scaled input: {scaled}"
    yield "output", OUTPUTS.get(federation.task, "")
    if federation.num_classes is not None:
        yield "classes", _plain(first_of(class_names(federation), MAX_LISTED))


def _fill(federation: Federation) -> Iterator[str]:
    for statistic, values in (fill_of(federation) or {}).items():
        if isinstance(values, dict):
            shown = [f"{name} {value:g}" for name, value in values.items() if isinstance(value, int | float)]
            yield f"by the {statistic} of training rows, {first_of(shown, MAX_LISTED)}"
        elif isinstance(values, list):
            yield f"by the {statistic} level, {first_of([str(value) for value in values], MAX_LISTED)}"


def _scaling(federation: Federation) -> str:
    """Return the formula that scales the input; "" if it is not scaled."""
    constants, x = scaling(federation), "x / 255" if is_bytes(federation) else "x"
    if constants is None:
        return "" if x == "x" else x
    formula = f"({x} − mean) / std"
    if "sites" in constants:
        return f"{formula}, by mean and std of each site's own training samples"
    if "by" in constants:
        return f"{formula}, {_plain(constants['by'])}"
    mean, std = (first_of([f"{value:g}" for value in constants[name]], MAX_LISTED) for name in ("mean", "std"))
    return f"{formula}; mean {mean}; std {std}"


def _data(federation: Federation, *, withheld: bool) -> Iterator[tuple[str, str]]:
    """Yield facts about the data; `withheld` omits training counts and hash, which noise does not protect."""
    yield "name", _plain(federation.name)
    yield "task", federation.task
    yield (
        "samples",
        f"{'' if withheld else f'{federation.num_samples:,} to train on, '}{federation.num_test:,} to test on",
    )
    if not withheld:
        yield "content", f"`{federation.content or 'not recorded'}`"
    yield "partition", _plain(str(federation.partition.get("scheme", "")))
    if federation.features is not None:
        yield "features", _plain(first_of(federation.features, MAX_LISTED))


def _sites(loaded: LoadedRun, federation: Federation, model: str) -> str:
    """Return the table of sites, their sizes and last metrics; beyond `MOST_SITES`, a sentence on the sizes instead.

    The metrics are those of `model`, if it was measured.
    """
    sizes, offsets = federation.sizes, federation.test_offsets
    if federation.num_clients > MOST_SITES:
        spread = f"{sizes.min():,} to {sizes.max():,} training samples, median {np.median(sizes):,.10g}"
        return f"{federation.num_clients:,} sites of {spread}."
    measured = read_clients(loaded.folder / "clients.csv", model)
    values: dict[str, Mapping[str, float]] = {}
    if measured is not None:
        values = {
            name: dict(zip(measured.names, column.tolist(), strict=True)) for name, column in measured.measures.items()
        }
    head = ("Site", "Training samples", *(("Test samples",) if offsets is not None else ()), *values)
    rows = []
    recorded = [" ".join(name.splitlines()) for name in federation.client_names()]
    for k, (name, full) in enumerate(zip(site_names(federation), recorded, strict=True)):
        counts = [f"{sizes[k]:,}"] + ([] if offsets is None else [f"{offsets[k + 1] - offsets[k]:,}"])
        rows.append((_plain(name), *counts, *(_number(own.get(full, math.nan)) for own in values.values())))
    if measured is None:
        note = "The run measured no site by itself (`evaluate.clients`)."
    else:
        note = f"Measured on each site's {measured.split} samples after round {measured.round}"
        whose = "common model" if measured.model == GLOBAL else f"{measured.model} model of each"
        another = "" if measured.model == model else f", not the {'common' if model == GLOBAL else model} one"
        note += "." if measured.model == model == GLOBAL else f", with the {whose}{another}."
    return f"{_table(head, rows)}\n\n{note}"


def _metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield (measure, last value, its round) for measures on the test and training sets; matrices are left out."""
    columns = dict.fromkeys(name for row in rows for name in row if name.startswith(("test_", "train_")))
    for name in columns:
        last = next((row for row in reversed(rows) if isinstance(row.get(name), int | float)), None)
        if last is not None:
            yield name, _number(last[name]), str(last["round"])


def _promised(loaded: LoadedRun, rows: Sequence[Mapping[str, Any]]) -> str:
    facts = loaded.environment.get("privacy")
    return in_words(facts, rows[-1]["epsilon"]) if facts and rows else ""


def _recipe(loaded: LoadedRun) -> str:
    """Return the recipe as YAML, without paths of this machine and without keys that do not affect results."""
    hidden = (*WITHOUT_EFFECT, *(("data_content",) if loaded.recipe.is_private else ()))
    plain = {key: value for key, value in to_plain(loaded.recipe).items() if key not in hidden}
    return dump_yaml(_portable(plain))


def _portable(value: Any) -> Any:
    """Return a part of the recipe with absolute paths cut to their last components."""
    if isinstance(value, dict):
        return {key: _portable(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_portable(own) for own in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _certificate(loaded: LoadedRun, rows: Sequence[Mapping[str, Any]]) -> str:
    found = read_mapping(loaded.folder / CERTIFICATE)
    last = f"Hash of the model and the server's state after the last round: `{rows[-1].get('hash')}`." if rows else ""
    if not found:
        return f"The run has no certificate. {last}".strip()
    signed = "signed" if (loaded.folder / SIGNATURE).exists() else "not signed"
    why_not = found.get("why_not")
    repeats = f"may differ elsewhere: {_plain(str(why_not))}" if why_not else "the same bits on any number of ranks"
    return (
        f"`{CERTIFICATE}` of the run folder, {signed}: chain `{found.get('chain')}`; {repeats}. {last} "
        "`hpcfed verify RUN` computes its rounds again."
    )


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Return text for a table cell: on one line, with Markdown and HTML escaped."""
    shown = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{one}" if one in "\\`*_[]|#" else one for one in shown)


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else ABSENT
