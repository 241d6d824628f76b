"""The federation files of a study's splits: ordinary files, from which each run can be repeated and verified.

    split-0.sites.h5     the sites as clients, each with its own test samples
    split-0.pooled.h5    a client `all sites` with all training samples; the sites follow as clients that only test

If a split leaves a site out, the other sites are the clients, and the left-out site's samples are the common test set
of both files. Samples that are neither for training nor for testing are in neither file. ``/train/row`` holds each
sample's index in `SiteSamples`. Both files have the same x, filled and scaled by statistics of the training samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from data_prep.finish import finish
from data_prep.split import NOBODY, Split
from data_prep.write import write
from hpcfed.data.federation import Federation
from hpcfed.lab.study.samples import SiteSamples
from hpcfed.lab.study.splits import TrainTestSplit

POOL = "all sites"
"""Name of the only client of the pooled file that trains."""
REMARKS = "remarks"
"""Key of the remarks in the files' ``source``."""
COMMON_TEST = "the common test set is scaled"
"""Beginning of a remark of `data_prep.tables.standardize`."""


@dataclass(frozen=True)
class SplitFiles:
    """Paths of a split's two federation files: with the sites as clients, and with all training samples pooled."""

    sites: Path
    pooled: Path


def files_of(folder: Path, number: int) -> SplitFiles:
    """Return the paths of the files of split `number` in `folder`."""
    return SplitFiles(folder / f"split-{number}.sites.h5", folder / f"split-{number}.pooled.h5")


def write_split(
    files: SplitFiles, samples: SiteSamples, split: TrainTestSplit, scale: str, about: dict[str, Any]
) -> None:
    """Write a split's two files, each atomically, with remarks on how they were filled and scaled.

    `scale` is ``client``: standardize each site's x by the site's training samples; ``pooled``: by those of all sites;
    or ``none``. `about` is provenance to store in the files, such as the kind of split, its number and seed.

    Raises:
        InputError: the samples cannot be scaled.
        EnvironmentFailure: the disk is full or failed.
    """
    left_out = split.site is not None
    dataset, owner, names = _clients(samples, split)
    held = None if left_out else split.tests
    partition = {"scheme": "study", **about}
    of_sites = Split(owner, len(names), partition, names, held=held)
    finished = finish(dataset, of_sites, scale)
    finished = replace(finished, source={**finished.source, REMARKS: list(finished.remarks)})
    write(files.sites, finished, **vars(of_sites), overwrite=True)
    together = replace(finished, statistics=None)
    if left_out:
        of_all = Split(np.where(owner == NOBODY, NOBODY, 0), 1, partition, [POOL])
    else:
        place = np.where(owner == NOBODY, NOBODY, np.where(split.tests, 1 + owner, 0))
        of_all = Split(place, 1 + len(names), partition, [POOL, *names], held=held)
    write(files.pooled, together, **vars(of_all), overwrite=True)


def remarks_on(files: SplitFiles) -> list[str]:
    """Return the remarks on filling and scaling that are stored in a split's files.

    Remarks on the common test set are omitted: it has the left-out site's samples, on which `Study.remarks` has a line.

    Raises:
        InputError: a file is damaged.
    """
    with Federation.open(files.sites) as federation:
        lines = [str(line) for line in federation.source.get(REMARKS, [])]
    return [line for line in lines if not line.startswith(COMMON_TEST)]


def _clients(samples: SiteSamples, split: TrainTestSplit) -> tuple[Dataset, np.ndarray, list[str]]:
    """Return the data set, the client of each sample (n,), and the clients' names.

    A left-out site becomes the data set's common test set. Samples of no client have the number `NOBODY`.
    """
    clients = split.trainers(samples.owner)
    number = np.full(len(samples.sites), NOBODY)
    number[clients] = np.arange(len(clients))
    owner = number[samples.owner]
    if split.unused is not None:
        owner[split.unused] = NOBODY
    dataset = replace(samples.dataset, owner=None, clients=None)
    if split.site is not None:
        tests = np.flatnonzero(split.tests)
        group = None if dataset.group is None else dataset.group[tests]
        dataset = replace(dataset, test_x=dataset.x[tests], test_y=dataset.y[tests], test_group=group)
    return dataset, owner, [samples.sites[k] for k in clients]
