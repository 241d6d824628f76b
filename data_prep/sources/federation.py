"""A federation file as a source, so that its samples can be partitioned anew without the raw data.

Samples are taken in the order of their original source (`/train/row`), so a scheme with a seed gives the same clients,
and the same file to the last byte, as from the raw data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import DataSource, Origin
from hpcfed.data.federation import Federation
from hpcfed.data.storage import open_hdf5
from hpcfed.errors import InputError

SCALED = (
    "x stays scaled by the statistics of each client of this file; to pool or scale otherwise, prepare the raw files"
)


def load(raw: Path) -> Dataset:
    """Return the samples of a federation file, mapped, with its clients as the natural split.

    Raises:
        InputError: it is not a federation file.
    """
    with Federation.open(raw) as federation:
        x, y = federation.train()
        test_x, test_y = federation.test(0, federation.num_test) if federation.num_test else (None, None)
        clients = np.arange(federation.num_clients)
        features, scaled = federation.features, federation.statistics is not None
        source = dict(federation.source)
        if scaled:
            source["standardized"] = f"each client of {raw.name} by its own training rows"
        hot = {f"{column}={level}" for column, levels in categories_of(source) for level in levels}
        offsets = federation.test_offsets
        return Dataset(
            name=federation.name,
            task=federation.task,
            x=x,
            y=y,
            num_classes=federation.num_classes,
            test_x=test_x,
            test_y=test_y,
            normalization=federation.normalization,
            source=source,
            owner=np.repeat(clients, federation.sizes),
            test_owner=None if offsets is None else np.repeat(clients, np.diff(offsets)),
            clients=federation.client_names(),
            rows=_rows(raw, federation.num_samples),
            vocabulary=federation.vocabulary,
            features=features,
            filled=federation.filled("train"),
            test_filled=federation.filled("test"),
            group=federation.groups("train"),
            test_group=federation.groups("test"),
            indicators=tuple(k for k, name in enumerate(features or ()) if name in hot),
            remarks=(SCALED,) if scaled else (),
        )


def _rows(path: Path, count: int) -> np.ndarray | None:
    """Return the samples' rows in their source, (n,) or (n, 2); None if the file has none.

    Raises:
        InputError: it has those of another number of samples.
    """
    with open_hdf5(path) as file:
        rows = file["train/row"][:] if "train/row" in file else None
    if rows is not None and len(rows) != count:
        expected, got = f"a row for each of {count} samples", f"{len(rows)}"
        raise InputError("/train/row", where=str(path), expected=expected, got=got, remedy="prepare it again")
    return rows


def categories_of(source: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return one-hot columns with their levels, as `data_prep.tables` describes them."""
    categories = source.get("categories")
    pairs = categories.items() if isinstance(categories, dict) else ()
    return [(column, levels) for column, levels in pairs if isinstance(levels, list)]


SOURCES = {
    "federation": DataSource(
        load, Origin("A federation file, to partition it anew", layout="nothing else: name the file itself")
    )
}
