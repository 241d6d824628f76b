"""Last steps on features, once the training rows are known: filling of missing values, and standardization."""

from __future__ import annotations

from data_prep.dataset import Dataset
from data_prep.split import Split
from data_prep.tables.missing import fill, refuse_emptied
from data_prep.tables.standardize import standardize


def finish(dataset: Dataset, done: Split, scale: str) -> Dataset:
    """Return the data set with missing values filled and features standardized, ready to be written.

    Args:
        dataset: as read by its source.
        done: the split; all statistics are of its training rows.
        scale: ``client``, ``pooled`` or ``none``.

    Raises:
        InputError: as `refuse_emptied`, `fill` and `standardize`.
    """
    refuse_emptied(dataset, done.clients)
    return standardize(fill(dataset, done.training), done, scale)
