"""The federation file: one HDF5 file that holds the data of all clients, and its read-only view `Federation`.

Opening reads attributes and the offsets index and maps the arrays: it costs the same for three clients of a million
samples and for a million clients of three, and every rank may do it on the same file.

    attributes  format version name task num_classes vocabulary partition source normalization content
    /train      x (n, ...)   y (n,) or (n, ...)   offsets (N+1,)   client (N,)   row (n,) or (n, 2)
                filled (n, p): 1 for a cell of x that was missing   group (n,): the sample's patient, …
    /test       x, y, offsets, filled, group, all optional

``format``, ``version``, ``task``, ``num_classes`` (unless targets are numbers) and ``/train/{x, y, offsets}`` must be
there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from hpcfed.data.attributes import FileAttributes, text
from hpcfed.data.heaps import heaps_are_sound
from hpcfed.data.storage import Elsewhere, Storage, StoredRows, flaw, is_numbers, member, open_hdf5
from hpcfed.errors import EnvironmentFailure, InputError, did_you_mean, nearest, system_failure

FORMAT = "hpcfed-federation"
VERSION = 1
TASKS = ("classification", "multi-label", "regression", "survival", "next-token")
OF_NUMBERS = ("regression", "survival")
"""Tasks without classes. A target of ``survival`` is (event, time): 1 for an event or 0 for censored; its time."""
MEMBERS = tuple(
    f"{part}/{name}" for part in ("train", "test") for name in ("x", "y", "offsets", "client", "row", "filled", "group")
)
REMEDY = "write it with `hpcfed prepare`"
LOCKED = "file locking flag values don't match"
"""HDF5's words where this process has a file open with locks."""

EVENTS = "event 0 or 1, and a time of at least 0"
# Labels of larger files are checked a client at a time, when they are read: reading them all would make opening slow.
LABELS_CHECKED_AT_OPEN = 10_000_000
# More are treated as damage: counting or predicting classes allocates memory for all of them.
MOST_CLASSES = 1 << 20
MAX_COMPARED = 10_000
"""Most clients' names that are searched for the one nearest to a wrong one."""
LONGEST_NAME = 1 << 16
"""Bytes of a client's name of fixed length: memory is allocated for all clients' names of this length."""
MAX_LISTED = 6
"""Most clients of one name that a message lists."""


def flaw_of_events(targets: np.ndarray) -> str:
    """Return the first entry of survival targets (n, 2) that is no event or time, in words; "" if all are."""
    event, time = targets[:, 0], targets[:, 1]
    if len(strange := event[(event != 0) & (event != 1)]):
        return f"event {strange[0]:g}"
    return f"time {time[time < 0][0]:g}" if (time < 0).any() else ""


@dataclass(frozen=True)
class Standardization:
    """Constants of ``(x - mean) / std`` along axis 1 of x, applied after uint8 was scaled to [0, 1].

    Each tuple has length 1, or one entry per channel (per feature, if x is (n, p)).
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Federation:
    """Read-only view of one federation file of N clients and n training samples.

    Attributes:
        path, name, content: its file, its name, and the hash of its data ("" if the writer stored none).
        task: one of `TASKS`.
        num_classes: C: labels and tokens are 0 … C - 1, multi-label targets C zeros and ones; None for `OF_NUMBERS`.
        vocabulary: the tokens' meaning, as the writer stored it; None if absent.
        partition, source: provenance, {} if absent.
        normalization: None if x is used as it is (uint8 is still scaled to [0, 1]).
        features: names of the p features of x (n, p); None without names.
        num_clients, num_samples, num_test: N, n and the size of the test set (0 if absent).
        offsets: (N+1,) int64; the rows of client k are ``offsets[k]:offsets[k+1]``.
        sizes: samples per client, (N,) int64, 0 allowed.
        test_offsets: (N+1,) int64 for per-client test sets; None if absent.
        feature_shape, target_shape: of one sample; target_shape is () for labels.
        x_dtype, y_dtype: of the returned arrays, in native byte order.
    """

    def __init__(self, path: Path, file: h5py.File, access: str = "mmap", *, labels_checked: bool = False):
        self.path = path
        self._file, self._targets_checked = file, labels_checked
        for name in MEMBERS:
            self._member(name)
        self._storage = Storage(file, path, access)
        self._refuse_claims()
        if not heaps_are_sound(file, self._storage):
            raise self._wrong("damaged HDF5 file: its texts cannot be read", remedy="copy or prepare it again")
        self._read_attributes()
        self._x, self._y = self._pair("train")
        self.num_samples = len(self._x)
        self.feature_shape: tuple[int, ...] = self._x.shape[1:]
        self.target_shape: tuple[int, ...] = self._y.shape[1:]
        if not (math.prod(self.feature_shape) and math.prod(self.target_shape)):
            got = f"{self._x.shape} and {self._y.shape}"
            raise self._wrong("/train/x and /train/y", expected="at least one number a sample", got=got)
        self.x_dtype, self.y_dtype = self._x.dtype, self._y.dtype
        self.offsets = self._index("train/offsets", self.num_samples)
        self.sizes = np.diff(self.offsets)
        self.num_clients = len(self.sizes)
        self._read_test()
        self._check_targets()
        self.normalization = self._read_normalization()
        self.features = self._read_features()

    @classmethod
    def open(cls, path: str | Path, access: str = "mmap", *, labels_checked: bool = False) -> Federation:
        """Open and validate a federation file.

        Args:
            path: of the file.
            access: one of `hpcfed.data.storage.ACCESS`.
            labels_checked: whether its labels are not to be read and checked, since another rank does so.

        Raises:
            InputError: it is missing, not HDF5, truncated, not a federation, of another version, or inconsistent.
            EnvironmentFailure: the machine fails, or gives no more open files or memory.
        """
        path = Path(path)
        try:
            if path.is_dir():
                raise InputError("is a folder, not a federation file", where=str(path), remedy="name the .h5 file")
            if path.exists() and not path.is_file():  # a pipe would be waited on
                raise InputError("is a device or a pipe, not a federation file", where=str(path), remedy=REMEDY)
            file = open_hdf5(path)
        except FileNotFoundError:
            raise InputError("no such federation file", where=str(path), remedy=REMEDY) from None
        except PermissionError:
            raise InputError("may not be read", where=str(path), remedy="check its permissions") from None
        except (OSError, ValueError) as error:  # ValueError: not a valid path
            if failure := system_failure(error, str(path)):
                raise failure from error
            if LOCKED in str(error):
                what, remedy = "open in this process already, with locks", "close it, or open it with locking=False"
                raise InputError(what, where=str(path), remedy=remedy) from error
            truncated = "truncated" in str(error)
            what = "truncated HDF5 file" if truncated else "not an HDF5 file, or damaged"
            remedy = "copy or prepare it again" if truncated else REMEDY
            raise InputError(what, where=str(path), remedy=remedy) from error
        try:
            return cls(path, file, access, labels_checked=labels_checked)
        except InputError:
            file.close()
            raise
        except (EnvironmentFailure, OSError, KeyError, RuntimeError, TypeError, ValueError) as error:  # h5py's errors
            file.close()
            if failure := system_failure(error.__cause__ or error, str(path)):  # the cause: of `Storage`
                raise failure from error
            raise InputError(
                "damaged HDF5 file", where=str(path), got=str(error), remedy="copy or prepare it again"
            ) from error

    def client(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x (n_k, ...) and y (n_k, ...) of client k: read-only views if the file is mapped, else copies.

        Raises:
            InputError: labels out of range, in a file with too many labels to check at opening.
            EnvironmentFailure: the file changed or failed since it was opened.
        """
        rows = slice(int(self.offsets[k]), int(self.offsets[k + 1]))
        y = self._y[rows]
        if not self._targets_checked:
            self._check_values(y, f"/train/y of client {k}")
        return self._x[rows], y

    def clients(self, clients: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of x (n, ...) and y (n, ...) of some clients, concatenated.

        Raises:
            InputError, EnvironmentFailure: as `client`.
        """
        parts = self._parts(clients)
        y = self._y.joined(parts, touched=self._targets_read)
        if not self._targets_checked:
            for k, own in zip(clients, np.split(y, np.cumsum(self.sizes[clients])[:-1]), strict=True):
                self._check_values(own, f"/train/y of client {k}")
        return self._x.joined(parts), y

    def expect(self, clients: Iterable[int]) -> None:
        """Start reading the samples of some clients from disk in the background."""
        parts = self._parts(clients)
        self._x.expect(parts)
        if not self._targets_read:  # at opening
            self._y.expect(parts)

    def train(self, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return rows start:stop of all clients' training samples, x and y; default: all. As `client` does.

        Raises:
            InputError, EnvironmentFailure: as `client`.
        """
        x, y = self._x[start:stop], self._y[start:stop]
        if not self._targets_checked:
            self._check_values(y, "/train/y")
        return x, y

    def test(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows start:stop of the test set, x and y, as `client` does."""
        return self._test_x[start:stop], self._test_y[start:stop]

    def num_test_of(self, clients: np.ndarray) -> int:
        """Return the number of test samples of a mask's clients, (N,) bool; all if the test set is no client's."""
        return self.num_test if self.test_offsets is None else int(np.diff(self.test_offsets)[clients].sum())

    def client_name(self, k: int) -> str:
        """Return the name of client k, read singly from the file; its number if the file has no names."""
        with suppress(IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError):  # too short, or damaged
            names = self._member("train/client")
            if names is not None and h5py.check_string_dtype(names.dtype) is not None:
                return text(names[k])
        return str(k)

    def client_names(self) -> list[str]:
        """Return the names of all clients, (N,), as `client_name` does."""
        names = self._member("train/client")
        if names is not None and names.shape == (self.num_clients,) and names.dtype.kind == "S":
            return [text(name) for name in names[:]]
        return [self.client_name(k) for k in range(self.num_clients)]

    def client_number(self, client: int | str) -> int:
        """Return a client's number from its number, an int, or from text: its name, or else its number.

        Raises:
            InputError: there is no such client, or several have this name.
        """
        names = self.client_names() if isinstance(client, str) else []
        if numbers := [k for k, name in enumerate(names) if name == client]:
            if len(numbers) > 1:
                got = ", ".join(map(str, numbers[:MAX_LISTED])) + (", …" if numbers[MAX_LISTED:] else "")
                remedy = "name the client by its number"
                raise InputError(f"several clients are named {client!r}", where=str(self.path), got=got, remedy=remedy)
            return numbers[0]
        text = str(client)
        if text.isascii() and text.isdecimal() and int(text) < self.num_clients:
            return int(text)
        expected = f"a name of the federation, or a number below {self.num_clients}"
        remedy = did_you_mean(text, names[:MAX_COMPARED], cutoff=0.6)
        raise InputError(f"no client {text!r}", where=str(self.path), expected=expected, remedy=remedy)

    def close(self) -> None:
        """Close the file; arrays returned before stay valid."""
        self._storage.close()
        self._file.close()

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _parts(self, clients: Iterable[int]) -> np.ndarray:
        """Return start and stop of each client's rows, (C, 2)."""
        first = np.fromiter(clients, np.int64)
        return np.column_stack((self.offsets[first], self.offsets[first + 1]))

    def _wrong(self, what: str, *, expected: str = "", got: str = "", remedy: str = REMEDY) -> InputError:
        return InputError(what, where=str(self.path), expected=expected, got=got, remedy=remedy)

    def _read_attributes(self) -> None:
        attrs = FileAttributes(self._file, self._wrong)
        if attrs.text("format") != FORMAT:
            raise self._wrong("not a federation file", expected=f"attribute format={FORMAT!r}")
        version = attrs.integer("version")
        if version != VERSION:
            raise self._wrong(
                "federation file of another version",
                expected=f"version {VERSION}",
                got="none" if version is None else str(version),
                remedy="prepare it again with this hpcfed",
            )
        self.name = attrs.text("name") or self.path.stem
        self.content = attrs.text("content")
        self.task = attrs.text("task")
        if self.task not in TASKS:
            raise self._wrong("attribute 'task'", got=repr(self.task), remedy=nearest(self.task, TASKS))
        self.num_classes = None if self.task in OF_NUMBERS else attrs.integer("num_classes")
        if self.num_classes is None and self.task not in OF_NUMBERS:
            raise self._wrong("attribute 'num_classes' is missing")
        if self.num_classes is not None and not 1 <= self.num_classes <= MOST_CLASSES:
            expected = f"1 … {MOST_CLASSES:,}"
            raise self._wrong("attribute 'num_classes'", expected=expected, got=str(self.num_classes))
        self.partition: dict[str, Any] = attrs.json_object("partition") or {}
        self.source: dict[str, Any] = attrs.json_object("source") or {}
        self.vocabulary: Any = attrs.json("vocabulary")

    @property
    def statistics(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Means and deviations, (N, C) each, by which the file scaled each client's x (n, C, …); None if it did not."""
        mean, std = self._member("train/mean"), self._member("train/std")
        shape = (self.num_clients, *(self.feature_shape[:1] or (1,)))
        if (
            mean is None
            or std is None
            or not mean.shape == std.shape == shape
            or {mean.dtype.kind, std.dtype.kind} != {"f"}
        ):
            return None
        return mean[:], std[:]

    def filled(self, part: str) -> np.ndarray | None:
        """Return 1 for each cell of x of ``train`` or ``test`` that was missing and filled, (n, p); None without any.

        Raises:
            InputError: they do not fit x.
        """
        return self._beside(part, "filled", self.feature_shape)

    def groups(self, part: str) -> np.ndarray | None:
        """Return the groups of the samples of ``train`` or ``test``, such as their patients, (n,) int64; None without.

        Raises:
            InputError: they do not fit x.
        """
        found = self._beside(part, "group", ())
        return None if found is None else found.astype(np.int64)

    def _beside(self, part: str, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return integers that stand beside the samples of a part, (n, *shape); None if absent."""
        dataset = self._member(f"{part}/{name}")
        if dataset is None:
            return None
        wanted = (self.num_samples if part == "train" else self.num_test, *shape)
        if dataset.dtype.kind not in "iu" or dataset.shape != wanted:
            got = f"{dataset.dtype} {dataset.shape}"
            raise self._wrong(f"/{part}/{name}", expected=f"integers of shape {wanted}", got=got)
        self._refuse_unstored(dataset)
        return dataset[:]

    def _read_features(self) -> list[str] | None:
        names = FileAttributes(self._file, self._wrong).json("features")
        sound = isinstance(names, list) and self.feature_shape == (len(names),)
        return names if sound and all(isinstance(name, str) for name in names) else None

    def _read_normalization(self) -> Standardization | None:
        value = FileAttributes(self._file, self._wrong).json_object("normalization")
        if not value:
            return None
        channels = self.feature_shape[0] if self.feature_shape else 1
        try:
            mean, std = (tuple(float(v) for v in np.atleast_1d(value[key])) for key in ("mean", "std"))
        except (KeyError, TypeError, ValueError):
            raise self._wrong("attribute 'normalization'", expected='{"mean": [..], "std": [..]}') from None
        if len(mean) != len(std) or len(mean) not in (1, channels):
            lengths = f"{len(mean)} and {len(std)}"
            expected = "1" if channels == 1 else f"1 or {channels}"
            raise self._wrong("lengths of mean and std in attribute 'normalization'", expected=expected, got=lengths)
        if not (np.isfinite(mean).all() and np.isfinite(std).all() and min(std) > 0):
            raise self._wrong("attribute 'normalization'", expected="finite means, positive stds", got=str(value))
        return Standardization(mean, std)

    def _member(self, name: str) -> h5py.Dataset | None:
        """Return a dataset of this file, None if absent."""
        try:
            found = member(self._file, name)
        except Elsewhere as place:
            remedy = "copy what it leads to into the file (h5repack, h5copy), or prepare it again"
            raise self._wrong(f"dataset /{name} {place}", remedy=remedy) from None
        return found if isinstance(found, h5py.Dataset) else None

    def _dataset(self, name: str) -> h5py.Dataset:
        dataset = self._member(name)
        if dataset is None:
            raise self._wrong(f"dataset /{name} is missing")
        return dataset

    def _pair(self, part: str) -> tuple[StoredRows, StoredRows]:
        x, y = self._dataset(f"{part}/x"), self._dataset(f"{part}/y")
        for dataset in (x, y):
            if dataset.shape is None or not dataset.shape or not is_numbers(dataset.dtype):
                raise self._wrong(f"dataset {dataset.name}", expected="an array of numbers, a row per sample")
            self._refuse_unstored(dataset)
        if len(x) != len(y):
            raise self._wrong(f"/{part}/x and /{part}/y differ in length", got=f"{len(x)} and {len(y)} rows")
        return StoredRows(x, self._storage), StoredRows(y, self._storage)

    def _refuse_claims(self) -> None:
        """Refuse names and statistics that claim more than the file holds, before any is read."""
        for name in ("train/client", "train/mean", "train/std"):
            dataset = self._member(name)
            if dataset is not None and dataset.shape is not None:
                if dataset.dtype.itemsize > LONGEST_NAME:
                    raise self._wrong(f"/{name}", expected=f"entries of at most {LONGEST_NAME:,} bytes")
                self._refuse_unstored(dataset)

    def _refuse_unstored(self, dataset: h5py.Dataset) -> None:
        """Refuse a dataset whose header claims more than the file holds."""
        why = flaw(dataset, self._storage.size)
        if why is not None:
            raise self._wrong(f"dataset {dataset.name} {why}", remedy="copy or prepare it again")

    def _index(self, name: str, num_rows: int) -> np.ndarray:
        dataset = self._dataset(name)
        if dataset.dtype.kind not in "iu" or dataset.shape is None or dataset.ndim != 1:
            raise self._wrong(f"/{name}", expected="one row of integers", got=f"{dataset.dtype} {dataset.shape}")
        self._refuse_unstored(dataset)
        offsets = dataset[:].astype(np.int64)
        if len(offsets) < 2:
            raise self._wrong(f"a federation of no clients: /{name} has {len(offsets)} entries")
        if offsets[0] != 0 or offsets[-1] != num_rows:
            got = f"{offsets[0]} … {offsets[-1]}"
            raise self._wrong(f"/{name} does not cover the samples", expected=f"0 … {num_rows}", got=got)
        if (offsets[1:] < offsets[:-1]).any():
            k = int(np.argmax(offsets[1:] < offsets[:-1]))
            raise self._wrong(f"/{name} decreases at client {k}", got=f"{offsets[k]} then {offsets[k + 1]}")
        return offsets

    def _read_test(self) -> None:
        self.test_offsets: np.ndarray | None = None
        self.num_test = 0
        if self._member("test/x") is None and self._member("test/y") is None:
            self._test_x: StoredRows | np.ndarray = np.empty((0, *self.feature_shape), self.x_dtype)
            self._test_y: StoredRows | np.ndarray = np.empty((0, *self.target_shape), self.y_dtype)
            return
        self._test_x, self._test_y = self._pair("test")
        self.num_test = len(self._test_x)
        shapes = (self._test_x.shape[1:], self._test_y.shape[1:])
        if shapes != (self.feature_shape, self.target_shape):
            expected = f"{self.feature_shape} and {self.target_shape}"
            raise self._wrong("a test sample has another shape", expected=expected, got=f"{shapes[0]} and {shapes[1]}")
        if self._member("test/offsets") is not None:
            self.test_offsets = self._index("test/offsets", self.num_test)
            if len(self.test_offsets) != len(self.offsets):
                got = str(len(self.test_offsets))
                raise self._wrong("/test/offsets", expected=f"{len(self.offsets)} entries", got=got)

    def _check_targets(self) -> None:
        if self.task == "classification" and self.target_shape:
            raise self._wrong("/train/y", expected="one label per sample", got=f"shape {self.target_shape} each")
        if self.task == "multi-label" and self.target_shape != (self.num_classes,):
            expected = f"{self.num_classes} zeros and ones"
            raise self._wrong("/train/y", expected=expected, got=f"shape {self.target_shape} each")
        if self.task == "survival" and self.target_shape != (2,):
            raise self._wrong("/train/y", expected="event and time", got=f"shape {self.target_shape} each")
        if self.task == "next-token" and "f" in (self._x.dtype.kind, self._test_x.dtype.kind):
            raise self._wrong("/train/x and /test/x", expected="integer tokens", got="floating point")
        if self.task not in OF_NUMBERS and "f" in (self._y.dtype.kind, self._test_y.dtype.kind):
            raise self._wrong("/train/y and /test/y", expected="integer labels", got="floating point")
        are_few = math.prod(self._y.shape) <= LABELS_CHECKED_AT_OPEN
        self._targets_read = are_few and not self._targets_checked
        if self._targets_read:
            self._check_values(self._y[:], "/train/y")
        if math.prod(self._test_y.shape) <= LABELS_CHECKED_AT_OPEN and not self._targets_checked:
            self._check_values(self._test_y[:], "/test/y")
        self._targets_checked = are_few

    def _check_values(self, targets: np.ndarray, where: str) -> None:
        """Refuse labels outside the classes, and targets that are not finite."""
        if self.num_classes is None:
            if targets.dtype.kind == "f" and not np.isfinite(targets).all():
                raise self._wrong(f"targets in {where}", expected="finite numbers", got="NaN or infinity")
            if self.task == "survival" and (wrong := flaw_of_events(targets)):
                raise self._wrong(f"targets in {where}", expected=EVENTS, got=wrong)
            return
        top = 1 if self.task == "multi-label" else self.num_classes - 1
        if targets.size and (targets.min() < 0 or targets.max() > top):
            raise self._wrong(f"labels in {where}", expected=f"0 … {top}", got=f"{targets.min()} … {targets.max()}")
