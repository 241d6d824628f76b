"""Data sets from tables, in two passes: the first surveys the columns, the second converts the rows to numbers.

Neither pass holds more than a block of rows, so tables may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from data_prep.groups import described
from data_prep.own import gather
from data_prep.samples import Blocks
from data_prep.tables import cells, missing
from data_prep.tables.columns import ColumnOptions
from data_prep.tables.encode import groups, samples
from data_prep.tables.plan import Files, TablePlan
from data_prep.tables.plan import plan as plan_of
from data_prep.tables.read import Block, all_encodings_told, blocks
from hpcfed.errors import InputError

Pair = tuple[np.ndarray, np.ndarray]


def load(
    name: str,
    clients: Mapping[str, Files],
    common: Files,
    own: Mapping[str, Files],
    options: ColumnOptions,
    source: dict[str, Any],
) -> Dataset:
    """Return the data set of all clients' tables.

    Args:
        name: of the data set.
        clients: client → its files; if `options.client` names a column, the files of all clients, under any name.
        common: the files of a common test set; empty for none.
        own: client → the files of its own test set.
        options: the user's options about the columns.
        source: provenance so far.

    Raises:
        InputError: files that are not tables, or do not fit each other or the options.
    """
    if options.task == "next-token" and options.missing in (missing.MEAN, missing.MEDIAN):
        raise InputError(f"--missing {options.missing} has no effect with tokens", remedy="use drop")
    train = [path for files in clients.values() for path in files]
    tests = [path for files in (common, *own.values()) for path in files]
    paths = [*train, *tests]
    with all_encodings_told(paths):
        plan = plan_of(paths, options, tests)
    rows: list[np.ndarray] = []
    of_rows: list[np.ndarray] = []
    of_tests: list[np.ndarray] = []

    def pieces() -> Iterator[tuple[str, Any]]:
        if options.client is not None:
            yield from ((client, Blocks([])) for client in sorted(plan.clients))
            for number, path in enumerate(train):
                for block in blocks(path, options.missing_codes):
                    yield from _by_client(plan, block, number, rows, of_rows)
            return
        for client, files in clients.items():
            yield client, Blocks(_of(plan, client, files, of_rows, rows, train))

    test: Any = Blocks(_of(plan, "the test set", common, of_tests)) if common else None
    if own:
        test = {client: Blocks(_of(plan, f"test of {client}", files, of_tests)) for client, files in own.items()}
    dataset = gather(
        name,
        pieces(),
        test=test,
        task=options.task,
        num_classes=None if plan.classes is None else plan.classes.count,
        source={**source, **plan.described()},
        in_pieces=True,
        missing=options.missing,
    )
    places = np.concatenate(rows) if rows else np.empty((0, 2), np.int64)
    group = np.concatenate(of_rows) if of_rows else None
    test_group = np.concatenate([np.empty(0, np.int64), *of_tests])
    return replace(
        dataset,
        rows=places[:, 1] if len(train) == 1 else places,
        features=None if plan.image else plan.names,
        indicators=() if plan.image else plan.indicators,
        categories=() if plan.image else plan.categories,
        fill=dataset.fill if plan.missing else "",
        group=group,
        test_group=test_group if of_tests else None,
        emptied={one: one in plan.labelled for one in dataset.without_samples() if plan.dropped[one]},
        remarks=(
            *plan.remarks(paths, plan.clients or clients),
            *plan.dropped_rows(),
            *(described(dataset.owner, group, test_group, plan.groups) if group is not None else ()),
        ),
    )


def _of(
    plan: TablePlan,
    part: str,
    files: Files,
    of_rows: list[np.ndarray],
    rows: list[np.ndarray] | None = None,
    train: Files = (),
) -> Iterator[Pair]:
    """Yield the samples of some files; append their groups to `of_rows` and their row numbers to `rows`."""
    for path in files:
        for block in blocks(path, plan.options.missing_codes):
            x, y, kept, labelled = samples(plan, block)
            plan.dropped[part] += len(block) - len(kept)
            plan.labelled.update((part,) if labelled.any() else ())
            if (group := groups(plan, block, kept)) is not None:
                of_rows.append(group)
            if rows is not None:
                rows.append(np.column_stack([np.full(len(kept), train.index(path)), block.start + kept]))
            yield x, y


def _by_client(
    plan: TablePlan, block: Block, number: int, rows: list[np.ndarray], of_rows: list[np.ndarray]
) -> Iterator[tuple[str, Any]]:
    """Yield the samples of a block, client by client; append as `_of`."""
    assert plan.options.client is not None
    names, codes = cells.distinct(block.columns[plan.options.client])
    x, y, kept, labelled = samples(plan, block)
    plan.labelled.update(names[code] for code in np.unique(codes[labelled]).tolist())
    whole = np.bincount(codes[codes >= 0], minlength=len(names))
    left = np.bincount(codes[kept], minlength=len(names))
    plan.dropped.update({name: int(n) for name, n in zip(names, whole - left, strict=True) if n})
    plan.dropped["no client"] += int((codes < 0).sum())
    order = np.argsort(codes[kept], kind="stable")
    ends = np.cumsum(left)
    group = groups(plan, block, kept)
    for name, mine in zip(names, np.split(order, ends[:-1]), strict=True):
        if len(mine):
            if group is not None:
                of_rows.append(group[mine])
            rows.append(np.column_stack([np.full(len(mine), number), block.start + kept[mine]]))
            yield name, Blocks([(x[mine], y[mine])])
