"""A block of a table's rows as arrays x and y."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from data_prep.tables import cells, missing
from data_prep.tables.images import pixels
from data_prep.tables.plan import TablePlan
from data_prep.tables.read import Block
from data_prep.tables.survey import Feature
from hpcfed.errors import InputError


def groups(plan: TablePlan, block: Block, kept: np.ndarray) -> np.ndarray | None:
    """Return the groups of some rows of a block, (m,) int64; None if no column names them."""
    return None if plan.options.group is None else _codes(plan.options.group, block, plan.groups)[kept]


def samples(plan: TablePlan, block: Block) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x (m, p) float32 or images, y (m,) or (m, targets), and the numbers of the rows kept, (m,).

    The last array, (rows,) bool, is True for rows that are kept or lack features alone.

    Raises:
        InputError: a cell has changed since the first pass over the file, or an image is damaged.
    """
    y = _targets(plan, block)
    keep = ~(np.isnan(y) if y.ndim == 1 else np.isnan(y).any(axis=1))
    for name in (plan.options.client, plan.options.group):
        if name is not None:
            keep &= np.asarray(block.columns[name].is_valid())
    labelled = keep
    if plan.image:
        keep = labelled & np.asarray(block.columns[plan.features[0].column].is_valid())
        kept = np.flatnonzero(keep)
        x = pixels(block, plan.features[0].column, kept, plan.headers.deep)
    else:
        x = np.concatenate([_feature(feature, block) for feature in plan.features], axis=1)
        if plan.options.missing == missing.DROP:
            keep = labelled & ~np.isnan(x).any(axis=1)
        kept = np.flatnonzero(keep)
        x = x[kept]
    y = y[kept]
    return x, y.astype(np.int64) if plan.classes is not None else y, kept, labelled


def _feature(feature: Feature, block: Block) -> np.ndarray:
    values = block.columns[feature.column]
    if not feature.levels:
        return _numbers(feature.column, block).astype(np.float32)[:, None]
    codes = _codes(feature.column, block, feature.codes)
    hot = np.zeros((len(values), len(feature.levels)), np.float32)
    hot[np.arange(len(codes)), codes] = 1
    hot[codes < 0] = np.nan
    return hot


def _targets(plan: TablePlan, block: Block) -> np.ndarray:
    if plan.classes is not None:
        codes = _codes(plan.roles.targets[0], block, plan.classes.codes).astype(np.float64)
        codes[codes < 0] = np.nan
        return codes
    columns = [_numbers(name, block) for name in plan.roles.targets]
    stacked = len(columns) > 1 or plan.options.task == "multi-label"
    return np.stack(columns, axis=1) if stacked else columns[0]


def _numbers(name: str, block: Block) -> np.ndarray:
    try:
        return cells.numbers(block.columns[name], block.decimal_comma)
    except cells.NoNumber as error:
        raise _changed(block, error.row) from error


def _codes(name: str, block: Block, known: Mapping[str, int]) -> np.ndarray:
    texts, codes = cells.distinct(block.columns[name])
    if not known.keys() >= set(texts):
        raise _changed(block, 0)
    return np.array([*(known[text] for text in texts), -1], np.int64)[codes]


def _changed(block: Block, row: int) -> InputError:
    return InputError("the file changed while it was read", where=block.place(row), remedy="prepare it again")
