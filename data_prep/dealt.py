"""`hpcfed.partition`: the schemes of ``hpcfed prepare --partition`` on labels that a notebook holds, with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.as_arrays import as_array, is_dataset
from data_prep.frames import is_frame
from data_prep.split import NUM_CLIENTS, WITHOUT_LABELS, assigned, check_scheme
from data_prep.streams import stream
from hpcfed.data.picture import partition_figure, text_heat_map
from hpcfed.data.sites import Labels
from hpcfed.data.skew import Skew, skew_of
from hpcfed.errors import InputError, nearest, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN = "column"
"""The scheme that has a client for each value of a column."""


@dataclass(frozen=True, eq=False)
class Subset:
    """The samples `indices` of a torch ``Dataset``, as a data set."""

    dataset: Any
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> Any:
        return self.dataset[int(self.indices[number])]


@dataclass(frozen=True, repr=False)
class Partition:
    """An assignment of samples to N clients.

    Attributes:
        owner: (n,) int64, the client of each sample.
        names: of the clients.
        scheme: its name, with all that decided it.
        counts: (N, K), samples of each class at each client; (N, 1) without labels.
        classes: the K labels.
        noise: standard deviation of the noise of the last client (`clients`).
    """

    owner: np.ndarray
    names: list[str]
    scheme: dict[str, Any]
    counts: np.ndarray
    classes: list[str]
    noise: float = 0.0
    _seed: int = 0

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def sizes(self) -> np.ndarray:
        """(N,), samples of each client."""
        return np.bincount(self.owner, minlength=len(self.names))

    @property
    def skew(self) -> Skew:
        """Skew of labels and sizes."""
        return skew_of(self.sizes, self.counts if len(self.classes) > 1 else None)

    def indices(self, client: int) -> np.ndarray:
        """Return the samples of a client, in their order."""
        return np.flatnonzero(self.owner == client)

    def clients(self, x: Any, y: Any = None) -> dict[str, Any]:
        """Return the samples of each client, for `hpcfed.write_federation`: arrays, or `Subset` of a data set.

        Args:
            x: (n, …); or a ``Dataset`` of n samples (x, y), without `y`.
            y: (n, …).

        With `noise` σ client k of N gets features with Gaussian noise of standard deviation σ · k / (N − 1): the
        feature skew of NIID-Bench, but drawn once; x is then float32, of bytes a 255th.

        Raises:
            InputError: x or y has not n samples; or noise is asked for of a ``Dataset``, or a `y` beside it.
        """
        if y is None:
            return self._subsets(x)
        if is_dataset(x) and hasattr(x, "__getitem__") and len(x) and isinstance(x[0], tuple):
            raise InputError("clients: a Dataset, which has its y, and a y", remedy="give the Dataset alone")
        found = []
        for name, part in (("x", x), ("y", y)):
            array = as_array(name, part, can_lack=name == "x")
            if len(array) != len(self.owner):
                raise InputError(name, expected=f"{len(self.owner):,} samples", got=f"{len(array):,}")
            found.append(array)
        return {
            name: (with_noise(found[0][rows], self.noise, k, len(self.names), self._seed), found[1][rows])
            for k, name in enumerate(self.names)
            for rows in (self.indices(k),)
        }

    def _subsets(self, samples: Any) -> dict[str, Any]:
        if not is_dataset(samples) or not hasattr(samples, "__getitem__"):
            remedy = "give x and y, or a torch Dataset of both, such as loader.dataset"
            raise InputError("clients", expected="x and y", got=f"{type(samples).__name__} alone", remedy=remedy)
        if len(samples) != len(self.owner):
            raise InputError("clients", expected=f"{len(self.owner):,} samples", got=f"{len(samples):,}")
        if self.noise:
            raise InputError("clients: noise is added to arrays", got="a Dataset", remedy="give x and y")
        return {name: Subset(samples, self.indices(k)) for k, name in enumerate(self.names)}

    def plot(self, path: str | Path | None = None) -> Figure:
        """Return a figure of clients × classes, sizes and how many classes a client has; also saved as `path`."""
        labels = Labels(self.classes, self.counts) if len(self.classes) > 1 else None
        figure = partition_figure(_described(self.scheme), self.sizes, self.names, labels)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def __str__(self) -> str:
        sizes = f"{len(self.names):,} clients of {self.sizes.min():,} to {self.sizes.max():,} samples"
        head = f"{_described(self.scheme)}: {sizes}\nskew: {self.skew}"
        if len(self.classes) < 2:
            return head
        return "\n".join([head, *(line.plain for line in text_heat_map(self.counts, self.names, self.classes))])

    __repr__ = __str__  # a notebook shows it


def with_noise(x: np.ndarray, noise: float, client: int, num_clients: int, seed: int) -> np.ndarray:
    """Return a client's features with the noise of `Partition.clients`; x itself without any."""
    if not noise:
        return x
    level = np.float32(noise * client / max(1, num_clients - 1))
    drawn = stream(seed, f"feature noise {client}").standard_normal(x.shape, dtype=np.float32)
    return (x.astype(np.float32) / (255 if x.dtype == np.uint8 else 1) + level * drawn).astype(np.float32)


def partition(
    labels: Any,
    scheme: str,
    *,
    clients: int | None = None,
    seed: int = 0,
    column: str | None = None,
    noise: float = 0.0,
    **options: Any,
) -> Partition:
    """Deal samples to clients, as ``hpcfed prepare --partition`` does with the same seed.

    Args:
        labels: (n,) of numbers or words; or a data frame, whose `column` they are.
        scheme: ``iid``, ``iid-per-class``, ``dirichlet-client``, ``dirichlet-class``, ``shards``, ``classes`` (#C = k),
            ``quantity``; or ``column``: a client for each value.
        clients: N; default: 100.
        column: of a data frame, the labels; with the scheme ``column``, the client.
        noise: of the features: see `Partition.clients`.
        options: ``alpha``, ``sizes``, ``sigma``, ``shards``, ``per_client``, ``capped``, ``min_samples``.

    Raises:
        InputError: an unknown scheme or option, or numbers that cannot be met.
    """
    if is_frame(labels):
        labels = _column(labels, column)
    elif column is not None:
        raise InputError("column", expected="a data frame", got=type(labels).__name__)
    values = as_array("labels", labels, can_lack=False)
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "biufU":
        raise InputError("labels", expected="one number or word a sample", got=f"{values.dtype} {values.shape}")
    if not isinstance(noise, int | float | np.integer | np.floating) or not 0 <= noise < np.inf:
        raise InputError("noise", expected="a number from 0", got=shown(noise))
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError("seed", expected="a whole number from 0", got=shown(seed))
    if not isinstance(scheme, str):
        raise InputError("scheme", expected="a name", got=shown(scheme))
    noise, seed = float(noise), int(seed)
    distinct, numbers = np.unique(values, return_inverse=True)
    if scheme == COLUMN:
        if clients is not None or options:
            raise InputError(
                "scheme 'column'", expected="no number of clients and no option", got=shown(options or clients)
            )
        owner, said, names = numbers.astype(np.int64), {"column": column}, [str(one) for one in distinct.tolist()]
        return Partition(owner, names, {"scheme": COLUMN, **said}, np.bincount(owner)[:, None], [""], noise, seed)
    if scheme == "natural":
        raise InputError("scheme 'natural'", remedy="use 'column' with the client of each sample")
    check_scheme(scheme)
    scheme, count = scheme.lower(), NUM_CLIENTS if clients is None else clients
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise InputError("clients", expected="a whole number from 1", got=shown(clients))
    if scheme not in WITHOUT_LABELS and values.dtype.kind == "f" and (values != np.rint(values)).any():
        raise InputError(
            f"scheme {scheme!r}: labels", expected="classes", got="real numbers", remedy="use 'iid' or 'quantity'"
        )
    owner, settings = assigned(numbers, scheme, int(count), seed, options)
    whole = {"scheme": scheme, "clients": int(count), **settings, "seed": seed, **({"noise": noise} if noise else {})}
    has_classes = len(distinct) < len(values)
    classes = [str(one) for one in distinct.tolist()] if has_classes else [""]
    table = owner * len(classes) + (numbers if has_classes else 0)
    counts = np.bincount(table, minlength=count * len(classes)).reshape(count, len(classes))
    return Partition(owner, [f"client-{k}" for k in range(count)], whole, counts, classes, noise, seed)


def _column(table: Any, column: str | None) -> Any:
    frame = table.to_pandas() if hasattr(table, "to_pandas") else table
    names: Sequence[str] = [str(name) for name in frame.columns]
    if column is None:
        raise InputError("a data frame without its column of labels", remedy=f"name it: column={names[-1]!r}")
    if column not in names:
        raise InputError(f"no column {column!r}", remedy=nearest(column, names))
    return np.asarray(frame[column], dtype=None if isinstance(frame[column].dtype, np.dtype) else object)


def _described(scheme: dict[str, Any]) -> str:
    rest = [f"{key} {value}" for key, value in scheme.items() if key != "scheme" and value is not None]
    return ", ".join([str(scheme["scheme"]), *rest])
