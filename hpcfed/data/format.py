"""The federation file: one HDF5 file that holds the data of all clients, and its read-only view `Federation`.

Opening reads attributes and the offsets index and maps the arrays: it costs the same for three clients of a million
samples and for a million clients of three, and every rank may do it on the same file.

    attributes  format version name task num_classes vocabulary partition source normalization content
    /train      x (n, ...)   y (n,) or (n, ...)   offsets (N+1,)   client (N,)   row (n,) or (n, 2)
    /test       x, y, offsets, all optional

``format``, ``version``, ``task``, ``num_classes`` (unless regression) and ``/train/{x, y, offsets}`` must be there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from hpcfed.errors import InputError, nearest

FORMAT = "hpcfed-federation"
VERSION = 1
TASKS = ("classification", "regression", "next-token")
REMEDY = "write it with `hpcfed prepare`"

# Labels of larger files are checked a client at a time, when they are read: reading them all would make opening slow.
LABELS_CHECKED_AT_OPEN = 10_000_000


@dataclass(frozen=True)
class Normalization:
    """What is subtracted and divided by: ``(x - mean) / std`` along axis 1 of x, after uint8 was scaled to [0, 1].

    Each tuple has length 1, or one entry per channel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Federation:
    """Read-only view of one federation file of N clients and n training samples.

    Attributes:
        path, name, content: where it lies, what it is called, and the hash of its data ("" where the writer gave none).
        task: ``classification``, ``regression`` or ``next-token``.
        num_classes: labels are 0 … num_classes - 1; None for regression.
        vocabulary: what tokens stand for, as the writer stored it; None where absent.
        partition, source: provenance, {} where absent.
        normalization: None where x is used as it is (uint8 is still scaled to [0, 1]).
        num_clients, num_samples, num_test: N, n and the size of the common test set (0 where absent).
        offsets: (N+1,) int64; the rows of client k are ``offsets[k]:offsets[k+1]``.
        sizes: (N,) int64, samples per client; 0 is allowed.
        test_offsets: (N+1,) int64 for per-client test sets; None where absent.
        feature_shape, target_shape: of one sample; target_shape is () for labels.
        x_dtype, y_dtype: as the arrays are returned, in native byte order.
    """

    def __init__(self, path: Path, file: h5py.File):
        self.path = path
        self._file = file
        self._read_attributes()
        self._x, self._y = self._pair("train")
        self.num_samples = len(self._x)
        self.feature_shape: tuple[int, ...] = self._x.shape[1:]
        self.target_shape: tuple[int, ...] = self._y.shape[1:]
        self.x_dtype = self._x.dtype.newbyteorder("=")
        self.y_dtype = self._y.dtype.newbyteorder("=")
        self.offsets = self._index("train/offsets", self.num_samples)
        self.sizes = np.diff(self.offsets)
        self.num_clients = len(self.sizes)
        self._read_test()
        self._check_targets()
        self.normalization = self._read_normalization()

    @classmethod
    def open(cls, path: str | Path) -> Federation:
        """Open and validate a federation file.

        Raises:
            InputError: it is missing, not HDF5, truncated, not a federation, of another version, or inconsistent.
        """
        path = Path(path)
        if path.is_dir():
            raise InputError("is a folder, not a federation file", where=str(path), remedy="name the .h5 file")
        try:
            # Locks often fail on parallel and network file systems, and a file that is only read needs none.
            file = h5py.File(path, "r", locking=False)
        except FileNotFoundError:
            raise InputError("no such federation file", where=str(path), remedy=REMEDY) from None
        except PermissionError:
            raise InputError("may not be read", where=str(path), remedy="check its permissions") from None
        except OSError as error:
            truncated = "truncated" in str(error)
            what = "truncated HDF5 file" if truncated else "not an HDF5 file, or damaged"
            remedy = "copy or prepare it again" if truncated else REMEDY
            raise InputError(what, where=str(path), remedy=remedy) from error
        try:
            return cls(path, file)
        except InputError:
            file.close()
            raise
        except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:  # how h5py reports damage further in
            file.close()
            raise InputError(
                "damaged HDF5 file", where=str(path), got=str(error), remedy="copy or prepare it again"
            ) from error

    def client(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x (n_k, ...) and y (n_k, ...) of client k: read-only views of the mapped file, no copy."""
        rows = slice(self.offsets[k], self.offsets[k + 1])
        y = self._rows(self._y, rows)
        if not self._labels_checked:
            self._check_labels(y, f"/train/y of client {k}")
        return self._rows(self._x, rows), y

    def test(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows start:stop of the test set, x and y, as `client` does."""
        rows = slice(start, stop)
        return self._rows(self._test_x, rows), self._rows(self._test_y, rows)

    def client_name(self, k: int) -> str:
        """Return the name of client k, read from the file one at a time; its number where the file names none."""
        if "train/client" not in self._file:
            return str(k)
        return _text(self._file["train/client"][k])

    def close(self) -> None:
        """Close the file; views handed out before stay valid."""
        self._file.close()

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _wrong(self, what: str, *, expected: str = "", got: str = "", remedy: str = REMEDY) -> InputError:
        return InputError(what, where=str(self.path), expected=expected, got=got, remedy=remedy)

    def _read_attributes(self) -> None:
        attrs = self._file.attrs
        if _text(attrs.get("format", "")) != FORMAT:
            raise self._wrong("not a federation file", expected=f"attribute format={FORMAT!r}")
        version = self._integer("version")
        if version != VERSION:
            raise self._wrong(
                "federation file of another version",
                expected=f"version {VERSION}",
                got="none" if version is None else str(version),
                remedy="prepare it again with this hpcfed",
            )
        self.name = _text(attrs.get("name", "")) or self.path.stem
        self.content = _text(attrs.get("content", ""))
        self.task = _text(attrs.get("task", ""))
        if self.task not in TASKS:
            raise self._wrong("attribute 'task'", got=repr(self.task), remedy=nearest(self.task, TASKS))
        self.num_classes = None if self.task == "regression" else self._integer("num_classes")
        if self.num_classes is None and self.task == "classification":
            raise self._wrong("attribute 'num_classes' is missing")
        if self.num_classes is not None and self.num_classes < 1:
            raise self._wrong("attribute 'num_classes'", expected="at least 1", got=str(self.num_classes))
        self.partition: dict[str, Any] = self._json_object("partition") or {}
        self.source: dict[str, Any] = self._json_object("source") or {}
        self.vocabulary: Any = self._json("vocabulary")

    def _integer(self, name: str) -> int | None:
        if name not in self._file.attrs:
            return None
        value = np.asarray(self._file.attrs[name])
        if value.size != 1 or value.dtype.kind not in "iu":
            raise self._wrong(f"attribute {name!r}", expected="one integer", got=str(value.tolist()))
        return int(value.item())

    def _json(self, name: str) -> Any:
        if name not in self._file.attrs:
            return None
        text = _text(self._file.attrs[name])
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise self._wrong(f"attribute {name!r}", expected="JSON", got=repr(text[:40])) from None

    def _json_object(self, name: str) -> dict[str, Any] | None:
        value = self._json(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(f"attribute {name!r}", expected="a JSON object", got=json.dumps(value)[:40])
        return value

    def _read_normalization(self) -> Normalization | None:
        value = self._json_object("normalization")
        if not value:
            return None
        channels = self.feature_shape[0] if len(self.feature_shape) >= 2 else 1
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
        return Normalization(mean, std)

    def _dataset(self, name: str) -> h5py.Dataset:
        dataset = self._file.get(name)
        if not isinstance(dataset, h5py.Dataset):
            raise self._wrong(f"dataset /{name} is missing")
        return dataset

    def _pair(self, part: str) -> tuple[np.ndarray | h5py.Dataset, np.ndarray | h5py.Dataset]:
        x, y = self._dataset(f"{part}/x"), self._dataset(f"{part}/y")
        for dataset in (x, y):
            if dataset.shape is None or not dataset.shape or dataset.dtype.kind not in "iuf":
                raise self._wrong(f"dataset {dataset.name}", expected="an array of numbers, a row per sample")
        if len(x) != len(y):
            raise self._wrong(f"/{part}/x and /{part}/y differ in length", got=f"{len(x)} and {len(y)} rows")
        return self._map(x), self._map(y)

    def _map(self, dataset: h5py.Dataset) -> np.ndarray | h5py.Dataset:
        """Map a contiguous array of native numbers; others (chunked, foreign byte order, empty) stay with h5py."""
        start = dataset.id.get_offset()
        if start is None or not dataset.dtype.isnative or start % dataset.dtype.itemsize:
            return dataset
        stop = start + math.prod(dataset.shape) * dataset.dtype.itemsize
        if stop > self.path.stat().st_size:
            remedy = "copy or prepare it again"
            raise self._wrong(f"truncated: dataset {dataset.name} ends beyond the file", remedy=remedy)
        mapped = np.memmap(self.path, dtype=dataset.dtype, mode="r", offset=start, shape=dataset.shape)
        return mapped.view(np.ndarray)

    @staticmethod
    def _rows(array: np.ndarray | h5py.Dataset, rows: slice) -> np.ndarray:
        return np.asarray(array[rows], dtype=array.dtype.newbyteorder("="))

    def _index(self, name: str, num_rows: int) -> np.ndarray:
        dataset = self._dataset(name)
        if dataset.dtype.kind not in "iu" or dataset.ndim != 1:
            raise self._wrong(f"/{name}", expected="one row of integers", got=f"{dataset.dtype} {dataset.shape}")
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
        if "test/x" not in self._file and "test/y" not in self._file:
            self._test_x = np.empty((0, *self.feature_shape), self.x_dtype)
            self._test_y = np.empty((0, *self.target_shape), self.y_dtype)
            return
        self._test_x, self._test_y = self._pair("test")
        self.num_test = len(self._test_x)
        shapes = (self._test_x.shape[1:], self._test_y.shape[1:])
        if shapes != (self.feature_shape, self.target_shape):
            expected = f"{self.feature_shape} and {self.target_shape}"
            raise self._wrong("a test sample has another shape", expected=expected, got=f"{shapes[0]} and {shapes[1]}")
        if "test/offsets" in self._file:
            self.test_offsets = self._index("test/offsets", self.num_test)
            if len(self.test_offsets) != len(self.offsets):
                got = str(len(self.test_offsets))
                raise self._wrong("/test/offsets", expected=f"{len(self.offsets)} entries", got=got)

    def _check_targets(self) -> None:
        if self.task == "classification" and self.target_shape:
            raise self._wrong("/train/y", expected="one label per sample", got=f"shape {self.target_shape} each")
        if self.task != "regression" and "f" in (self._y.dtype.kind, self._test_y.dtype.kind):
            raise self._wrong("/train/y and /test/y", expected="integer labels", got="floating point")
        self._labels_checked = self.num_classes is None or self._y.size <= LABELS_CHECKED_AT_OPEN
        if self.num_classes is not None and self._labels_checked:
            self._check_labels(self._y[:], "/train/y")
            self._check_labels(self._test_y[:], "/test/y")

    def _check_labels(self, labels: np.ndarray, where: str) -> None:
        top = (self.num_classes or 0) - 1
        if labels.size and (labels.min() < 0 or labels.max() > top):
            raise self._wrong(f"labels in {where}", expected=f"0 … {top}", got=f"{labels.min()} … {labels.max()}")


def _text(value: Any) -> str:
    """Decode an attribute or a name: other programs write text as str, bytes or fixed-length bytes."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    return value.decode("utf-8").rstrip("\0") if isinstance(value, bytes) else str(value)
