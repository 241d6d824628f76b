"""A federation file as a source: its samples can be given to other clients without the raw data.

Samples count in the order of the source that they once came from (`/train/row`), so a scheme with a seed gives the same
clients, and the same file to the last byte, as it would have from the raw data.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from data_prep.dataset import Dataset
from hpcfed.data.format import Federation


def load(raw: Path) -> Dataset:
    """Return the samples of a federation file, mapped, with its clients as the natural split.

    Raises:
        InputError: it is no federation file.
    """
    with Federation.open(raw) as federation:
        x, y = federation.train()
        test_x, test_y = federation.test(0, federation.num_test) if federation.num_test else (None, None)
        clients = np.arange(federation.num_clients)
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
            source=federation.source,
            owner=np.repeat(clients, federation.sizes),
            test_owner=None if offsets is None else np.repeat(clients, np.diff(offsets)),
            clients=federation.client_names(),
            rows=_rows(raw),
            vocabulary=federation.vocabulary,
        )


def _rows(path: Path) -> np.ndarray | None:
    with h5py.File(path, "r", locking=False) as file:
        return file["train/row"][:] if "train/row" in file else None
