"""Last steps once the split is known: clients left out are named, missing values filled, features standardized."""

from __future__ import annotations

from dataclasses import replace

from data_prep.dataset import Dataset
from data_prep.split import Split, left_out
from data_prep.tables.missing import fill, refuse_emptied, unmeasured
from data_prep.tables.standardize import standardize

LEFT_OUT = "left out"


def finish(dataset: Dataset, done: Split, scale: str) -> Dataset:
    """Return the data set with missing values filled and features standardized, ready to be written.

    Clients that are left out for want of samples go into a remark, and into ``source``.

    Args:
        dataset: as read by its source.
        done: the split; all statistics are of its training rows.
        scale: ``client``, ``pooled`` or ``none``.

    Raises:
        InputError: as `refuse_emptied`, `fill` and `standardize`.
    """
    refuse_emptied(dataset, done.clients)
    if left := left_out(dataset, done):
        before = dataset.source.get(LEFT_OUT)
        source = {**dataset.source, LEFT_OUT: left if before is None else f"{before}; {left}"}
        dataset = replace(dataset, source=source, remarks=(*dataset.remarks, f"left out: {left}"))
    dataset = fill(dataset, done.training)
    if line := unmeasured(dataset, done):
        dataset = replace(dataset, remarks=(*dataset.remarks, line))
    return standardize(dataset, done, scale)
