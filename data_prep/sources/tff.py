"""TensorFlow Federated's HDF5 files: ``examples/<client>/<field>``, a file for training and one for testing.

    fed_emnist     pixels (m, 28, 28) float32, background 1 · label (m,), 62 classes     3,400 writers
    fed_cifar100   image (m, 32, 32, 3) uint8 · label (m,), 100 classes                  500 clients, 100 others to test
    shakespeare    snippets (m,) text                                                    715 roles

A client's snippets are joined by newlines and cut into samples like plain text (see `text`), with the 86 characters
of TFF's text generation tutorial. A test set with the clients of training stays split by client.

Reference: Reddi et al., "Adaptive federated optimization", ICLR 2021, appendix C; tff.simulation.datasets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources._halves import Half, joined, of_halves
from data_prep.sources.cifar import FEDDYN
from data_prep.sources.files import DataSource, Origin, Published, damaged, examine, locate
from data_prep.sources.text import Alphabet, TextSamples, windows
from data_prep.spool import Spool, UnitImages, alike
from hpcfed.data.content import rows_per_block
from hpcfed.data.federation import Standardization
from hpcfed.data.heaps import heaps_are_sound
from hpcfed.data.storage import Storage

URL = "https://storage.googleapis.com/tff-datasets-public/"
LETTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
DEFLATE_AT_MOST = 1032
"""Largest expansion of a deflate stream; a dataset that claims more is damaged."""


@dataclass(frozen=True)
class TffSet:
    """One of the three data sets.

    Attributes:
        stem: the files are ``<stem>_train.h5`` and ``<stem>_test.h5``.
        name: of the federation.
        origin: the published files.
        fields: of a client: name → shape of a row and kinds of its numbers, ``O`` for text.
        num_classes: of the labels, or characters.
        normalization: of the images.
    """

    stem: str
    name: str
    origin: Origin
    fields: dict[str, tuple[tuple[int, ...], str]]
    num_classes: int
    normalization: Standardization | None = None


def _origin(title: str, stem: str, archive: str, sha256: str) -> Origin:
    published = Published(archive, sha256=sha256, unpack=f"unpack {stem}_train.h5 and {stem}_test.h5")
    return Origin(title, URL + archive, (published,), f"{stem}_train.h5 and {stem}_test.h5")


EMNIST = TffSet(
    "fed_emnist",
    "fed-emnist",
    _origin(
        "Federated EMNIST of TFF: 671,585 and 77,483 characters by 3,400 writers, 62 classes, 28 × 28",
        "fed_emnist",
        "fed_emnist.tar.bz2",
        "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
    ),
    {"pixels": ((28, 28), "f"), "label": ((), "iu")},
    62,
)
CIFAR100 = TffSet(
    "fed_cifar100",
    "fed-cifar100",
    _origin(
        "Federated CIFAR-100 of TFF: 500 clients of 100 images by Pachinko allocation, 10,000 images to test",
        "fed_cifar100",
        "fed_cifar100.tar.bz2",
        "e8575e22c038ecef1ce6c7d492d7abee7da13b1e1ba9b70a7fc18531ba7590de",
    ),
    {"image": ((32, 32, 3), "iu"), "label": ((), "iu")},
    100,
    FEDDYN,
)
SHAKESPEARE = TffSet(
    "shakespeare",
    "fed-shakespeare",
    _origin(
        "Shakespeare of TFF: 16,068 and 2,356 lines by 715 roles",
        "shakespeare",
        "shakespeare.tar.bz2",
        "0285be9906cb5f268092eee4edeeacfc2af4574f2941f7cc2f08a321d7f5c707",
    ),
    {"snippets": ((), "O")},
    len(LETTERS),
)


def load_emnist(raw: str | Path) -> Dataset:
    """Read Federated EMNIST: x (n, 1, 28, 28) uint8, or float32 if pixels are not all k / 255; y (n,) int64."""
    halves = _both(Path(raw), EMNIST, lambda path: _images(path, EMNIST, UnitImages((1, 28, 28)), _unit))
    train, test = halves
    train.x, test.x = alike(train.x, test.x)
    return _dataset(Path(raw), EMNIST, halves)


def load_cifar100(raw: str | Path) -> Dataset:
    """Read Federated CIFAR-100: x (n, 3, 32, 32) uint8, y (n,) int64."""

    def read(path: Path) -> Half:
        return _images(path, CIFAR100, Spool((3, 32, 32), np.uint8), _colours)

    return _dataset(Path(raw), CIFAR100, _both(Path(raw), CIFAR100, read))


def load_shakespeare(raw: str | Path) -> Dataset:
    """Read Shakespeare: x (n, 80) uint8, y (n,) uint8; roles of fewer than 81 characters have no samples."""
    alphabet = Alphabet(LETTERS)
    halves = _both(Path(raw), SHAKESPEARE, lambda path: _texts(path, alphabet))
    return _dataset(Path(raw), SHAKESPEARE, halves, LETTERS, alphabet.verdict(str(raw)))


def _both(raw: Path, kind: TffSet, read: Callable[[Path], Half]) -> tuple[Half, Half]:
    """Return both halves.

    Raises:
        InputError: a file is missing, not HDF5, damaged, or has other contents.
    """
    paths, halves = _paths(raw, kind), []
    for path in paths.values():
        try:
            halves.append(read(path))
        except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:  # how h5py reports damage
            raise damaged(path, f"not {path.name} of TFF, or damaged", error) from error
    if not len(halves[0].y):
        raise damaged(paths["train"], "holds no samples")
    return halves[0], halves[1]


def _paths(raw: Path, kind: TffSet) -> dict[str, Path]:
    return locate(raw, {half: (f"{kind.stem}_{half}.h5",) for half in ("train", "test")})


def _unit(pixels: np.ndarray) -> np.ndarray:
    if not (np.isfinite(pixels).all() and pixels.min(initial=0) >= 0 and pixels.max(initial=0) <= 1):
        raise ValueError("pixels beyond 0 … 1")
    return pixels[:, None]


def _colours(images: np.ndarray) -> np.ndarray:
    if images.min(initial=0) < 0 or images.max(initial=0) > np.iinfo(np.uint8).max:
        raise ValueError("pixels beyond 0 … 255")
    return images.transpose(0, 3, 1, 2)


def _images(path: Path, kind: TffSet, sink: Spool | UnitImages, shown: Callable[[np.ndarray], np.ndarray]) -> Half:
    """Return images and labels of a file, read with one block in memory at a time.

    Raises:
        ValueError: they do not fit `kind`.
    """
    image = next(iter(kind.fields))
    names: list[str] = []
    labels, owner = [], []
    for name, fields in _clients(path, kind):
        for block in _blocks(fields[image]):
            sink.append(shown(block))
        own = np.concatenate([np.empty(0, np.int64), *_blocks(fields["label"])]).astype(np.int64)
        if own.min(initial=0) < 0 or own.max(initial=0) >= kind.num_classes:
            raise ValueError(f"labels of client {name[:40]} beyond 0 … {kind.num_classes - 1}")
        owner.append(np.full(len(own), len(names)))
        names.append(name)
        labels.append(own)
    return Half(sink.finish(), joined(labels), joined(owner), tuple(names))


def _texts(path: Path, alphabet: Alphabet) -> Half:
    samples, names = TextSamples(), list[str]()
    for name, fields in _clients(path, SHAKESPEARE):
        snippets = [bytes(snippet) for block in _blocks(fields["snippets"]) for snippet in block]
        samples.append(len(names), *windows(alphabet.encode(b"\n".join(snippets).decode("utf-8"))))
        names.append(name)
    return Half(*samples.finish(), tuple(names))


def _clients(path: Path, kind: TffSet) -> Iterator[tuple[str, dict[str, h5py.Dataset]]]:
    """Yield the clients of a file in the order of their names, each with its fields, checked."""
    with h5py.File(path, "r", locking=False) as file:
        with closing(Storage(file, path, "memory")) as storage:
            sound = heaps_are_sound(file, storage)
        if not sound:
            raise ValueError("texts that cannot be walked to their end")
        examples = file.get("examples")
        if not isinstance(examples, h5py.Group) or not len(examples):
            raise ValueError("no group 'examples' of clients")
        for name in examples:
            if not isinstance(name, str):  # h5py returns names that are not UTF-8 as bytes
                raise ValueError("a client's name is no text")
            fields = {field: examples[name][field] for field in kind.fields}
            for field, (shape, numbers) in kind.fields.items():
                _check(fields[field], shape, numbers)
            if len({len(field) for field in fields.values()}) > 1:
                raise ValueError(f"fields of client {name[:40]} that differ in length")
            yield name, fields


def _check(dataset: h5py.Dataset, shape: tuple[int, ...], numbers: str) -> None:
    """Refuse a dataset with rows of another shape or type, or of a size that its bytes in the file cannot hold."""
    if not isinstance(dataset, h5py.Dataset) or dataset.dtype.kind not in numbers or not dataset.shape:
        raise ValueError(f"a field that is not an array of kind {numbers}")
    if dataset.shape[1:] not in (shape, shape or (1,)):
        raise ValueError(f"rows of shape {dataset.shape[1:]}, not {shape}")
    stored = dataset.id.get_storage_size()
    most = stored * DEFLATE_AT_MOST if dataset.compression else stored
    if math.prod(dataset.shape) * dataset.dtype.itemsize > most:
        raise ValueError(f"{dataset.name[:80]} claims the shape {dataset.shape} and has {stored} bytes")


def _blocks(dataset: h5py.Dataset) -> Iterator[np.ndarray]:
    """Yield the rows of a dataset in blocks, with rows (m, 1) as (m,)."""
    size = rows_per_block(dataset.shape[1:], dataset.dtype)
    for start in range(0, len(dataset), size):
        block = dataset[start : start + size]
        yield block[:, 0] if block.shape[1:] == (1,) else block


def _dataset(
    raw: Path, kind: TffSet, halves: tuple[Half, Half], vocabulary: str | None = None, remarks: tuple[str, ...] = ()
) -> Dataset:
    entries, verdict = examine(kind.origin, _paths(raw, kind).values(), title=kind.name)
    return of_halves(
        kind.name,
        *halves,
        kind.num_classes,
        {"files": entries},
        (verdict, *remarks),
        vocabulary=vocabulary,
        normalization=kind.normalization,
    )


SOURCES = {
    "fed-emnist": DataSource(load_emnist, EMNIST.origin),
    "fed-cifar100": DataSource(load_cifar100, CIFAR100.origin),
    "fed-shakespeare": DataSource(load_shakespeare, SHAKESPEARE.origin),
}
