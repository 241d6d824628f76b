"""What is done to features once it is known who trains on which rows: missing ones filled, and all put on one scale."""

from __future__ import annotations

from data_prep.dataset import Dataset
from data_prep.split import Split
from data_prep.tables.missing import fill
from data_prep.tables.standardize import standardize


def finish(dataset: Dataset, done: Split, scale: str) -> Dataset:
    """Return the data set as it is written.

    Args:
        dataset: as its source has read it.
        done: who trains on which rows; all statistics are of these.
        scale: ``client``, ``pooled`` or ``none``.

    Raises:
        InputError: as `fill` and `standardize`.
    """
    return standardize(fill(dataset, done.training), done, scale)
