"""LEAF's json: ``{"users": […], "num_samples": […], "user_data": {user: {"x": […], "y": […]}}}``, in many files.

Files are streamed, with one client in memory at a time. Three of LEAF's data sets, by their x and y:

    femnist       784 numbers in [0, 1], background 1, not inverted, and one of 62 classes; uint8 where all are k / 255
    shakespeare   80 characters, and the one after them
    vectors       numbers, and a class: LEAF's and FedProx's synthetic sets

Reference: Caldas et al., "LEAF: a benchmark for federated settings", arXiv 1812.01097; data/ of its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources._halves import Half, joined, of_halves
from data_prep.sources.files import AGAIN, DataSource, Origin, check_folder, damaged, examine, listed
from data_prep.sources.json_stream import members
from data_prep.sources.text import LEAF_LETTERS, WINDOW, Alphabet
from data_prep.spool import Spool, UnitImages, alike
from hpcfed.errors import InputError

URL = "https://github.com/TalwalkarLab/leaf"
LAYOUT = (
    "the folders train and test of LEAF's preprocessing; or json files, those with 'test' in their name for testing"
)
FEMNIST = Origin("FEMNIST from LEAF: characters by some 3,600 writers, 62 classes, 28 × 28", URL, layout=LAYOUT)
SHAKESPEARE = Origin("Shakespeare from LEAF: 80 characters in, the next one out, by role", URL, layout=LAYOUT)
VECTORS = Origin("LEAF's or FedProx's synthetic sets as they wrote them: vectors and classes", URL, layout=LAYOUT)
SIDE = 28
FEMNIST_CLASSES = 62
MOST_CLASSES = 1 << 20
OF_OTHERS = "test: by other clients than those of training, so one set for all"


class Sink(Protocol):
    """Destination of samples, client after client."""

    def append(self, rows: np.ndarray) -> None: ...

    def finish(self) -> np.ndarray: ...


@dataclass
class LeafHalf:
    """A half while it is read: samples of `clients`, with each row's client in `owner`."""

    x: Sink
    y: list[np.ndarray] = field(default_factory=list)
    owner: list[np.ndarray] = field(default_factory=list)
    clients: dict[str, int] = field(default_factory=dict)

    def finish(self) -> Half:
        return Half(self.x.finish(), joined(self.y), joined(self.owner), tuple(self.clients))


Decode = Callable[[list[Any], list[Any]], tuple[np.ndarray, np.ndarray]]


def load_femnist(raw: str | Path) -> Dataset:
    """Read FEMNIST: x (n, 1, 28, 28) uint8, or float32 if pixels are not all k / 255; y (n,) int64, split by writer.

    Raises:
        InputError: files are missing or damaged, or have other contents.
    """

    def decode(x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        images = _numbers(x, SIDE * SIDE)
        if images.size and not (images.min() >= 0 and images.max() <= 1):
            raise ValueError("pixels beyond 0 … 1")
        return images, _labels(y, FEMNIST_CLASSES)

    train, test, source, remarks = _read(Path(raw), FEMNIST, decode, lambda: UnitImages((1, SIDE, SIDE)))
    train.x, test.x = alike(train.x, test.x)
    return of_halves("femnist", train, test, FEMNIST_CLASSES, source, remarks, of_others=OF_OTHERS)


def load_shakespeare(raw: str | Path) -> Dataset:
    """Read Shakespeare: x (n, 80) uint8, y (n,) int64, split by role; see `load_femnist`."""
    alphabet = Alphabet(LEAF_LETTERS)

    def decode(x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        for items, length in ((x, WINDOW), (y, 1)):
            if not all(isinstance(item, str) and len(item) == length for item in items):
                raise ValueError(f"texts of another length than {length}")
        return alphabet.encode("".join(x)).reshape(-1, WINDOW), alphabet.encode("".join(y)).astype(np.int64)

    train, test, source, remarks = _read(Path(raw), SHAKESPEARE, decode, lambda: Spool((WINDOW,), np.uint8))
    remarks += alphabet.verdict(str(raw))
    others, letters = OF_OTHERS, LEAF_LETTERS
    return of_halves("shakespeare", train, test, len(letters), source, remarks, of_others=others, vocabulary=letters)


def load_vectors(raw: str | Path) -> Dataset:
    """Read vectors: x (n, d) float64, y (n,) int64, with classes 0 to the largest label; see `load_femnist`."""
    dimension = _first_dimension(Path(raw))

    def decode(x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        return _numbers(x, dimension), _labels(y, MOST_CLASSES)

    train, test, source, remarks = _read(Path(raw), VECTORS, decode, lambda: Spool((dimension,), np.float64))
    classes = int(max(half.y.max(initial=0) for half in (train, test))) + 1
    return of_halves("leaf-vectors", train, test, classes, source, remarks, of_others=OF_OTHERS)


def files(raw: Path) -> tuple[list[Path], list[Path]]:
    """Return the training and the test files; if `raw` is a file, it is for training.

    Raises:
        InputError: there are no training files.
    """
    if raw.is_file():
        return [raw], []
    check_folder(raw)
    if (raw / "train").is_dir():
        train, test = (listed(raw / part, "*.json") for part in ("train", "test"))
    else:
        found = listed(raw, "*.json")
        train, test = ([path for path in found if ("test" in path.stem) == of_test] for of_test in (False, True))
    if not train:
        got = f"only {', '.join(path.name for path in test[:3])}" if test else "no *.json"
        remedy = "put LEAF's train and test folders there, or name one file by --raw to train on it"
        raise InputError("no json files to train on", where=str(raw), got=got, remedy=remedy)
    return train, test


def _read(
    raw: Path, origin: Origin, decode: Decode, sink: Callable[[], Sink]
) -> tuple[Half, Half, dict[str, Any], tuple[str, ...]]:
    """Return both halves, their provenance, and the verdict on the files."""
    of_train, of_test = files(raw)
    halves = LeafHalf(sink()), LeafHalf(sink())
    for half, paths in zip(halves, (of_train, of_test), strict=True):
        for path in paths:
            _read_file(path, half, decode)
    if not any(map(len, halves[0].owner)):
        raise damaged(of_train[0], "holds no samples")
    entries, verdict = examine(origin, of_train + of_test, title=origin.title)
    return halves[0].finish(), halves[1].finish(), {"files": entries}, (verdict,)


def _read_file(path: Path, half: LeafHalf, decode: Decode) -> None:
    said: dict[str, Any] = {}  # metadata that precede the clients' data
    promised: dict[str, int | None] | None = None
    for key, value in members(path, "user_data"):
        if key != "user_data":
            said[key] = value
            continue
        if promised is None:
            promised = _promised(path, said)
            _add_clients(path, half, promised)
            awaited = set(promised)
        name, data = value
        if not promised:
            _add_clients(path, half, [name])
        elif name not in awaited:
            raise damaged(path, f"client {name[:40]!r} comes twice, or is none of its users")
        awaited.discard(name)
        x, y = _samples(path, name, data, promised.get(name))
        try:
            rows, labels = decode(x, y)
        except (ValueError, TypeError, OverflowError) as error:
            raise damaged(path, f"samples of client {name[:40]!r}", error) from error
        half.x.append(rows)
        half.y.append(labels)
        half.owner.append(np.full(len(labels), half.clients[name]))
    if promised and awaited:
        raise damaged(path, f"no data of client {min(awaited)[:40]!r}")


def _promised(path: Path, said: dict[str, Any]) -> dict[str, int | None]:
    """Return user → number of samples, None if the file does not state it; {} if it has named no users yet."""
    users = said.get("users", [])
    sizes = said.get("num_samples", [None] * len(users) if isinstance(users, list) else None)
    if not isinstance(users, list) or not isinstance(sizes, list) or not all(isinstance(user, str) for user in users):
        raise damaged(path, "users and num_samples are no lists")
    if len(set(users)) != len(users) or (users and len(sizes) != len(users)):
        raise damaged(path, f"{len(users)} users, {len(sizes)} numbers of samples, or a user twice")
    return dict(zip(users, sizes, strict=True)) if users else {}


def _add_clients(path: Path, half: LeafHalf, names: Iterable[str]) -> None:
    for name in names:
        if name in half.clients:
            raise damaged(path, f"client {name[:40]!r} comes twice")
        half.clients[name] = len(half.clients)


def _samples(path: Path, name: str, data: Any, promised: int | None) -> tuple[list[Any], list[Any]]:
    if not (isinstance(data, dict) and isinstance(data.get("x"), list) and isinstance(data.get("y"), list)):
        raise damaged(path, f"client {name[:40]!r} has no lists x and y")
    x, y = data["x"], data["y"]
    if len(x) != len(y) or promised not in (None, len(x)):
        got = f"{len(x)} x, {len(y)} y, num_samples {str(promised)[:40]}"
        raise InputError(f"samples of client {name[:40]!r} don't fit", where=str(path), got=got, remedy=AGAIN)
    return x, y


def _first_dimension(raw: Path) -> int:
    for path in files(raw)[0]:
        for key, value in members(path, "user_data"):
            x = value[1].get("x") if key == "user_data" and isinstance(value[1], dict) else None
            if isinstance(x, list) and x and isinstance(x[0], list) and x[0]:
                return len(x[0])
    raise InputError("no vectors in it", where=str(raw), expected="user_data of x and y")


def _numbers(rows: list[Any], dimension: int) -> np.ndarray:
    """Return rows of numbers as (m, d) float64."""
    if not all(isinstance(row, list) and len(row) == dimension for row in rows):
        raise ValueError(f"rows of another length than {dimension}")
    array = np.array(rows, np.float64).reshape(-1, dimension)
    if not np.isfinite(array).all():
        raise ValueError("numbers that are not finite")
    return array


def _labels(values: list[Any], classes: int) -> np.ndarray:
    """Return labels, which may be written as floating-point numbers, as (m,) int64."""
    array = np.array(values, np.float64)
    if array.ndim != 1 or not ((array >= 0) & (array < classes) & (array == np.floor(array))).all():
        raise ValueError(f"labels other than 0 … {classes - 1}")
    return array.astype(np.int64)


SOURCES = {
    "femnist": DataSource(load_femnist, FEMNIST),
    "leaf-shakespeare": DataSource(load_shakespeare, SHAKESPEARE),
    "leaf-vectors": DataSource(load_vectors, VECTORS),
}
