"""Data sets from tables, in two passes: the first surveys the columns, the second converts the rows to numbers.

Neither pass holds more than a block of rows, so tables may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
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
    training, testing = Conversion(plan, train), Conversion(plan, tests)
    pieces: Iterable[tuple[str, Any]] = ((client, Blocks(training.of(client, clients[client]))) for client in clients)
    if options.client is not None:
        pieces = chain(((client, Blocks([])) for client in sorted(plan.clients)), training.by_client())
    test: Any = Blocks(testing.of("the test set", common)) if common else None
    if own:
        test = {client: Blocks(testing.of(f"test of {client}", files)) for client, files in own.items()}
    dataset = gather(
        name,
        pieces,
        test=test,
        task=options.task,
        num_classes=None if plan.classes is None else plan.classes.count,
        source={**source, **plan.described()},
        in_pieces=True,
        missing=options.missing,
    )
    places = np.concatenate([np.empty((0, 2), np.int64), *training.rows])
    group = np.concatenate(training.groups) if training.groups else None
    test_group = np.concatenate([np.empty(0, np.int64), *testing.groups])
    return replace(
        dataset,
        rows=places[:, 1] if len(train) == 1 else places,
        features=None if plan.image else plan.names,
        indicators=() if plan.image else plan.indicators,
        categories=() if plan.image else plan.categories,
        fill=dataset.fill if plan.missing else "",
        group=group,
        test_group=test_group if testing.groups else None,
        emptied={one: one in plan.labelled for one in dataset.without_samples() if plan.dropped[one]},
        remarks=(
            *plan.remarks(paths, plan.clients or clients),
            *plan.dropped_rows(),
            *(described(dataset.owner, group, test_group, plan.groups) if group is not None else ()),
        ),
    )


@dataclass
class Conversion:
    """Conversion of the rows of training tables, or of test sets, to samples; of each sample so far its file, by number
    in `paths`, and row, and its group.
    """

    plan: TablePlan
    paths: Files
    rows: list[np.ndarray] = field(default_factory=list)
    groups: list[np.ndarray] = field(default_factory=list)

    def of(self, part: str, files: Files) -> Iterator[Pair]:
        """Yield the samples of a client's, or a test set's, files."""
        for path in files:
            for block in self._blocks(path):
                x, y, kept, labelled = samples(self.plan, block)
                self.plan.dropped[part] += len(block) - len(kept)
                self.plan.labelled.update((part,) if labelled.any() else ())
                self._add(path, block.start + kept, groups(self.plan, block, kept))
                yield x, y

    def by_client(self) -> Iterator[tuple[str, Any]]:
        """Yield the samples of tables with a column of clients, client by client in each block."""
        plan = self.plan
        assert plan.options.client is not None
        for path in self.paths:
            for block in self._blocks(path):
                names, codes = cells.distinct(block.columns[plan.options.client])
                x, y, kept, labelled = samples(plan, block)
                plan.labelled.update(names[code] for code in np.unique(codes[labelled]).tolist())
                whole = np.bincount(codes[codes >= 0], minlength=len(names))
                left = np.bincount(codes[kept], minlength=len(names))
                plan.dropped.update({name: int(n) for name, n in zip(names, whole - left, strict=True) if n})
                plan.dropped["no client"] += int((codes < 0).sum())
                order = np.argsort(codes[kept], kind="stable")
                group = groups(plan, block, kept)
                for name, mine in zip(names, np.split(order, np.cumsum(left)[:-1]), strict=True):
                    if len(mine):
                        self._add(path, block.start + kept[mine], None if group is None else group[mine])
                        yield name, Blocks([(x[mine], y[mine])])

    def _blocks(self, path: Path) -> Iterator[Block]:
        return blocks(path, self.plan.options.missing_codes)

    def _add(self, path: Path, rows: np.ndarray, group: np.ndarray | None) -> None:
        self.rows.append(np.column_stack([np.full(len(rows), self.paths.index(path)), rows]))
        if group is not None:
            self.groups.append(group)
