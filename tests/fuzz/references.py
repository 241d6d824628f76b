"""Training samples of raw files as other libraries read them: pandas, Pillow, h5py, scipy, json, tarfile, pickle.

Each function returns x and y of a folder. An error says only that the library, or this page's narrow use of
it, cannot read the files.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
from PIL import Image
from scipy.io import loadmat

from data_prep.sources import cifar, cinic, tff
from data_prep.sources.text import LEAF_LETTERS
from data_prep.tables.read import MISSING, separator

Samples = tuple[np.ndarray, np.ndarray]
WHOLE = 255
WINDOW = 80


def check_same(ours: Samples, theirs: Samples) -> None:
    """Fail unless both hold the same numbers; shapes may differ, and images of k / 255 may be k here."""
    for own, other in zip(ours, theirs, strict=True):
        flat, wanted = np.ravel(own), np.ravel(other)
        if flat.dtype == np.uint8 and wanted.dtype.kind == "f" and own is ours[0]:
            wanted = np.rint(wanted.astype(np.float32) * WHOLE)
        elif flat.dtype.kind == "f":
            wanted = wanted.astype(flat.dtype)
        np.testing.assert_array_equal(flat, wanted)


class _ArraysAlone(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        assert module.startswith("numpy") or (module, name) == ("_codecs", "encode"), (module, name)
        return super().find_class(module, name)


def by_pickle(version: cifar.Version) -> Callable[[Path], Samples]:
    def read(folder: Path) -> Samples:
        files = [folder / name for name in version.python if not name.startswith("test")]
        batches = [_ArraysAlone(io.BytesIO(path.read_bytes()), encoding="bytes").load() for path in files]
        labels = version.labels.encode()
        return np.concatenate([batch[b"data"] for batch in batches]), np.concatenate([b[labels] for b in batches])

    return read


def by_rows(folder: Path) -> Samples:
    """CIFAR-10's binary batches: a label and 3072 pixels a row."""
    rows = [np.frombuffer((folder / f"data_batch_{k}.bin").read_bytes(), np.uint8) for k in range(1, 6)]
    table = np.concatenate(rows).reshape(-1, 3073)
    return table[:, 1:], table[:, 0]


def by_scipy(folder: Path) -> Samples:
    train = loadmat(folder / "emnist-digits.mat")["dataset"][0, 0]["train"][0, 0]
    return train["images"].reshape(-1, 28, 28).transpose(0, 2, 1), train["labels"]


def by_numpy(folder: Path) -> Samples:
    if (folder / "a.npz").exists():
        pairs: list[Any] = [np.load(folder / f"{name}.npz", allow_pickle=False) for name in "ab"]
    else:
        pairs = [{which: np.load(folder / f"{name}.{which}.npy") for which in "xy"} for name in "ab"]
    return np.concatenate([pair["x"] for pair in pairs]), numbered(np.concatenate([pair["y"] for pair in pairs]))


def by_hand(folder: Path) -> Samples:
    """MNIST's IDX: bytes after headers of 16 and 8 bytes."""
    files = [(folder / f"train-{name}-ubyte").read_bytes() for name in ("images-idx3", "labels-idx1")]
    return np.frombuffer(files[0], np.uint8, offset=16), np.frombuffer(files[1], np.uint8, offset=8)


def by_gzip(folder: Path) -> Samples:
    """EMNIST's letters: the same packed, images column by column, labels from 1."""
    names = (f"emnist-letters-train-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1"))
    images, labels = (gzip.decompress((folder / name).read_bytes()) for name in names)
    upright = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28).transpose(0, 2, 1)
    return upright, np.frombuffer(labels, np.uint8, offset=8) - 1


def numbered(labels: np.ndarray) -> np.ndarray:
    """Number labels in the order of their values."""
    if labels.dtype.kind not in "biuf" or not np.isfinite(labels).all():
        raise ValueError("labels that are words, or missing")
    return np.unique(labels, return_inverse=True)[1].reshape(labels.shape)


def _tables(frames: list[pandas.DataFrame]) -> Samples:
    """The samples of tables of numbers without a missing cell, whose target is the column y."""
    for frame in frames:
        frame.columns = frame.columns.str.strip()
    whole = pandas.concat([frame[frames[0].columns] for frame in frames])
    x = whole.drop(columns="y")
    if any(kind.kind not in "iuf" for kind in [*x.dtypes, whole["y"].dtype]) or whole.isna().to_numpy().any():
        raise ValueError("cells that are no numbers")
    return x.to_numpy(np.float64), numbered(whole["y"].to_numpy())


def by_pandas(folder: Path) -> Samples:
    paths = sorted(folder.glob("*.csv"))
    return _tables(
        [
            pandas.read_csv(
                path, sep=separator(path), index_col=False, float_precision="round_trip", na_values=MISSING,
                encoding="utf-8-sig", decimal="," if separator(path) == ";" else ".",
            )
            for path in paths
        ]
    )  # fmt: skip


def by_parquet(folder: Path) -> Samples:
    return _tables([pandas.read_parquet(path) for path in sorted(folder.glob("*.parquet"))])


def by_pillow(folder: Path) -> Samples:
    """Images as CLIENT/CLASS/name.png, of 8 bits."""
    paths = sorted(folder.glob("*/*/*.png"))
    classes = sorted({path.parent.name for path in paths})
    return _pixels(paths), np.array([classes.index(path.parent.name) for path in paths])


def _pixels(files: Iterable[Any]) -> np.ndarray:
    images = [Image.open(file) for file in files]
    if any(image.mode not in ("RGB", "RGBA", "P") for image in images):
        raise ValueError("grey, or of 16 bits")
    return np.stack([np.asarray(image.convert("RGB")).transpose(2, 0, 1) for image in images])


def by_pillow_cinic(folder: Path) -> Samples:
    paths = [path for kind in cinic.CLASSES for path in sorted((folder / "train" / kind).glob("*.png"))]
    return _pixels(paths), np.array([cinic.CLASSES.index(path.parent.name) for path in paths])


def by_tarfile(folder: Path) -> Samples:
    with tarfile.open(folder / cinic.ARCHIVE) as tar:
        members = {member.name.removeprefix("./"): member for member in tar if member.isfile()}
        names = sorted(name for name in members if name.startswith("train/") and name.endswith(".png"))
        names.sort(key=lambda name: cinic.CLASSES.index(name.split("/")[1]))
        files = [io.BytesIO(tar.extractfile(members[name]).read()) for name in names]  # type: ignore[union-attr]
    return _pixels(files), np.array([cinic.CLASSES.index(name.split("/")[1]) for name in names])


def by_h5py(stem: str, image: str) -> Callable[[Path], Samples]:
    """TFF's images: a group of examples, and in it one of each client."""

    def read(folder: Path) -> Samples:
        with h5py.File(folder / f"{stem}_train.h5") as file:
            clients = [file["examples"][name] for name in file["examples"]]
            x = np.concatenate([client[image][()] for client in clients])
            y = np.concatenate([np.ravel(client["label"][()]) for client in clients])
        return x.transpose(0, 3, 1, 2) if x.ndim == 4 else x, y

    return read


def by_h5py_text(folder: Path) -> Samples:
    with h5py.File(folder / "shakespeare_train.h5") as file:
        snippets = [file["examples"][name]["snippets"].asstr()[()] for name in file["examples"]]
    return _windows(("\n".join(lines) for lines in snippets), tff.LETTERS)


def _windows(texts: Iterable[str], letters: str) -> Samples:
    codes = [[letters.index(letter) for letter in text] for text in texts]
    x = [own[k : k + WINDOW] for own in codes for k in range(len(own) - WINDOW)]
    return np.array(x), np.array([own[k + WINDOW] for own in codes for k in range(len(own) - WINDOW)])


def by_json(folder: Path) -> Samples:
    """LEAF's numbers."""
    users = _users(folder)
    return np.array([row for user in users for row in user["x"]], float), np.array([y for u in users for y in u["y"]])


def by_json_text(folder: Path) -> Samples:
    users = _users(folder)
    x = [[LEAF_LETTERS.index(letter) for letter in row] for user in users for row in user["x"]]
    return np.array(x), np.array([LEAF_LETTERS.index(letter) for user in users for letter in user["y"]])


def _users(folder: Path) -> list[Any]:
    content = json.loads((folder / "train" / "all_data_0.json").read_bytes())
    order = {name: k for k, name in enumerate(content["users"])}
    return [data for name, data in content["user_data"].items() if name in order]
