"""The folder of a study: making it, writing its splits, and refusing folders that hold something else.

study.yaml            the settings; a call whose settings give different splits is refused
splits.csv            each sample's site and label, and the splits that test on it
data/                 the federation files of the splits
sweep/                the runs, laid out as those of ``hpcfed sweep``
tuning/               settings, data and runs of the inner splits, on which values are tuned
study.html            the results, with tables/ and figures/
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.config.load import dump_yaml, read_yaml
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.io.atomic import write_new, write_whole
from hpcfed.io.pace import Pace, nobody
from hpcfed.lab.frame import as_csv
from hpcfed.lab.study.federations import files_of, remarks_on, write_split
from hpcfed.lab.study.plan import DATA, FIGURES, PAGE, SWEEP, TABLES, TUNING, Study
from hpcfed.lab.study.tuning import naming_tune
from hpcfed.run_folder.files import unusable

SETTINGS, SAMPLES = "study.yaml", "splits.csv"
OF_A_STUDY = {SETTINGS, PAGE, TABLES, FIGURES, DATA, SWEEP, TUNING, SAMPLES}


def prepare(study: Study, *, fresh: bool, say: Callable[[str], None] = nobody) -> list[str]:
    """Make the study's folder and its splits' files; return remarks on filling and scaling. On rank 0 only.

    A folder with a study of different splits is refused or, if `fresh`, cleared: the files of that study are moved to
    its subfolder ``previous-1`` (or the next free number). `say` prints progress.

    Raises:
        InputError: the folder holds files that are not a study's or, unless `fresh`, a study of different splits; it is
            not writable; or samples cannot be filled or scaled.
        EnvironmentFailure: the disk is full or failed.
    """
    folder, about = study.folder, study.about()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in folder.iterdir() if not path.name.startswith((".", "previous-"))}
        foreign = sorted(present - OF_A_STUDY) or (sorted(present) if present and SETTINGS not in present else [])
        if foreign:
            what, got = "the folder holds files that are not a study's", ", ".join(foreign[:3])
            raise InputError(what, where=str(folder), got=got, remedy="choose --output")
        if SETTINGS in present:
            _compare(read_yaml(folder / SETTINGS), about, folder, fresh)
        settings = dump_yaml({**about, "sites": study.samples.sites})
        if not write_new(folder / SETTINGS, settings):
            _compare(read_yaml(folder / SETTINGS), about, folder, fresh=False)  # another job may just have made it
            write_whole(folder / SETTINGS, settings)
        write_whole(folder / SAMPLES, _samples_csv(study))
    except OSError as error:
        raise unusable(folder, error) from None
    return _write_splits(study, say)


def prepare_inner(inner: Study, *, fresh: bool, say: Callable[[str], None] = nobody) -> None:
    """Make the folder and the splits' files of the `inner` study, on which values are tuned. On rank 0 only.

    Raises:
        InputError: as in `prepare`; the message names ``--tune``.
        EnvironmentFailure: the disk is full or failed.
    """
    with naming_tune():
        prepare(inner, fresh=fresh, say=say)


def _write_splits(study: Study, say: Callable[[str], None]) -> list[str]:
    """Write the splits' files that are missing or outdated; return the remarks on filling and scaling of all splits.

    Raises:
        InputError: the samples cannot be scaled or filled.
        EnvironmentFailure: the disk is full or failed.
    """
    about = study.about()
    remarks: list[str] = []
    pace, total = Pace(), len(study.splits.each)
    for number, split in enumerate(study.splits.each):
        if pace.is_due():
            say(f"{study.folder.name}: {number} of {total} splits written{pace.left(number, total)}")
        files = files_of(study.folder / DATA, number)
        ours = {**about, "split": number}
        if not all(_holds(file, ours) for file in (files.sites, files.pooled)):
            write_split(files, study.samples, split, str(about["standardize"]), ours)
        remarks += [f"split {number}: {line}" for line in remarks_on(files)]
    return remarks


def _holds(file: Path, split: Mapping[str, Any]) -> bool:
    """Whether a federation file exists and its ``partition`` equals the settings `split`."""
    if not file.exists():
        return False
    with Federation.open(file) as federation:
        return federation.partition == {"scheme": "study", **json.loads(json.dumps(split))}


def _compare(before: dict[str, Any], now: dict[str, Any], folder: Path, fresh: bool) -> None:
    """Compare the settings in ``study.yaml``, `before`, with those of this call, `now`.

    If they differ and `fresh`, move the folder's files to ``previous-1`` or the next free number.

    Raises:
        InputError: they differ, and `fresh` is False.
    """
    changed = [key for key in now if before.get(key) != now[key]]
    if not changed:
        return
    if not fresh:
        apart = "; ".join(f"{key} {before.get(key)!r} there and {now[key]!r} here" for key in changed)
        remedy = "choose another --output, or start anew with --fresh"
        raise InputError("a study of other splits", where=str(folder), got=apart, remedy=remedy)
    number = next(n for n in range(1, 10**6) if not (folder / f"previous-{n}").exists())
    aside = folder / f"previous-{number}"
    aside.mkdir()
    for name in [*sorted(OF_A_STUDY - {SETTINGS}), SETTINGS]:  # last: until then a killed call can be repeated
        if (folder / name).exists():
            (folder / name).rename(aside / name)


def _samples_csv(study: Study) -> str:
    """Return ``splits.csv``: one row per sample with its index (as in ``/train/row``), site, label, group if there are
    groups, and the splits that test on it.
    """
    samples, tests = study.samples, np.array([split.tests for split in study.splits.each])
    return as_csv([
        {"sample": number, "site": samples.sites[site],
         "label": "" if samples.label is None else samples.labels[samples.label[number]],
         **({} if samples.group is None else {"group": int(samples.group[number])}),
         "tested": " ".join(map(str, np.flatnonzero(tests[:, number])))}
        for number, site in enumerate(samples.owner.tolist())
    ])  # fmt: skip
