"""A folder of raw data for all experiments: files in the published formats, of noise, just large enough to be split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import cifar
from data_prep.sources.text import LEAF_LETTERS, WINDOW
from tests.data import raw_formats
from tests.data.raw import idx_bytes

NUM_CLIENTS = 24
"""Of the sets that come split; a cohort takes 20."""


def write_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a folder of every data set that experiments are made from raw files of."""
    monkeypatch.setattr(raw_formats, "CIFAR_BATCH", 210)  # 1050 and 210 to train on, for 1000 and 100 clients
    raw_formats.write_cifar_binary(folder / "cifar10", cifar.CIFAR10)
    raw_formats.write_cifar_binary(folder / "CIFAR-100", cifar.CIFAR100)
    monkeypatch.setattr(raw_formats, "CINIC_PER_CLASS", 20)
    raw_formats.write_cinic(folder / "cinic10")
    rng = np.random.default_rng(0)
    for name, prefix in (("mnist", ""), ("emnist", "emnist-letters-")):
        _write_idx(folder / name, prefix, rng)
    writers = raw_formats.leaf_images(clients=tuple(f"f{k:04}_00" for k in range(NUM_CLIENTS)))
    for part in ("train", "test"):
        (folder / "fed-emnist").mkdir(exist_ok=True)
        images = {name: _tff_images(rng) for name in writers}
        raw_formats.write_tff(folder / "fed-emnist" / f"fed_emnist_{part}.h5", images)
    roles = {f"ROLE_{k}": _lines(rng, 6) for k in range(NUM_CLIENTS)}
    for name, clients in (("femnist", writers), ("leafshakespeare", roles), ("leafshakespearegel", roles)):
        for part in ("train", "test"):
            raw_formats.write_leaf(folder / name / part / f"all_data_{part}.json", clients)


def _tff_images(rng: np.random.Generator) -> dict[str, np.ndarray]:
    pixels = (rng.integers(0, 256, (3, 28, 28)) / 255).astype(np.float32)
    return {"label": rng.integers(0, 62, 3).astype(np.int32), "pixels": pixels}


def _write_idx(folder: Path, prefix: str, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for part, size in (("train", 400), ("test" if prefix else "t10k", 40)):
        images = rng.integers(0, 256, (size, 28, 28), np.uint8)
        labels = (np.arange(size) % 10 + bool(prefix)).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{prefix}{part}-{kind}-ubyte").write_bytes(idx_bytes(array))


def _lines(rng: np.random.Generator, number: int) -> tuple[list[str], list[str]]:
    text = "".join(rng.choice(list(LEAF_LETTERS), number + WINDOW))
    return [text[i : i + WINDOW] for i in range(number)], [text[i + WINDOW] for i in range(number)]
