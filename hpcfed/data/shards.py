"""A rank's data on its device: read from the federation file, normalised once, cached while there is room."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.cache import Key, SampleCache, Samples, aligned
from hpcfed.data.client_table import ClientTable
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.ranks.accelerators import upload

SMALL_FILE, SMALL_FOR_A_GPU = 1 << 16, 1 << 20
"""Most bytes in the file of a client that is read and prepared together with others, which is faster."""
SMALL_TABLE, SMALL_TABLE_OF_A_GPU = 1 << 25, 1 << 30
"""Most bytes of the samples of all clients that lie in one table on a CPU, too, and on a GPU if they are read once."""


def types_of(task: str, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of x and y: int64 for tokens and labels, the run's dtype for everything else.

    Multi-label targets are numbers, in the run's dtype.
    """
    x = torch.int64 if task == "next-token" else dtype
    y = torch.int64 if task in ("classification", "next-token") else dtype
    return x, y


class Shards:
    """The data this rank trains and evaluates on, prepared at first use.

    Beyond `capacity` bytes the least recently used pieces are evicted. Preparing them again gives the same bits, so the
    capacity changes a run's time alone.

    Args:
        federation: the file.
        dtype, device: of the returned samples.
        capacity: bytes to cache.
        keeps_clients: whether clients' training samples are cached. Of a million clients, a run sees hardly any twice.
    """

    def __init__(
        self,
        federation: Federation,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int,
        *,
        keeps_clients: bool = True,
    ):
        self._federation = federation
        self._x_dtype, self._y_dtype = types_of(federation.task, dtype)
        self._device = device
        self._test_offsets = np.empty(0, np.int64) if federation.test_offsets is None else federation.test_offsets
        per_sample = (federation.feature_shape, federation.x_dtype), (federation.target_shape, federation.y_dtype)
        self._sample_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in per_sample)
        self.keeps_clients = keeps_clients
        self._table = self._room_for_all(capacity)
        self._resident = SampleCache(capacity)
        self._held = SampleCache(capacity - (0 if self._table is None else self._table.nbytes))
        self._missed = True
        self._centre = self._per_channel(federation)

    def client(self, client: int) -> Samples:
        """Return all samples of a client, in the file's order."""
        return self._get(("train", client), lambda: self._federation.client(client))

    def clients(self, clients: Sequence[int]) -> list[Samples]:
        """Return all samples of each of several clients, (C,), as `client` does; small clients are read together."""
        missing = [k for k in clients if not self._holds(k)]
        most = SMALL_FILE if self._device.type == "cpu" else SMALL_FOR_A_GPU
        small = [k for k in missing if self._federation.sizes[k] * self._sample_bytes <= most]
        read = self._read_together(small) if small else {}
        return [read[k] if k in read else self.client(k) for k in clients]

    def expect(self, clients: Callable[[], Iterable[int]]) -> None:
        """Start reading those clients' samples from disk in the background that are not cached.

        `clients` is called only if samples were read since the last call: once all are cached, nothing is left to read.
        """
        if not self._missed:
            return
        self._missed = False
        self._federation.expect(client for client in clients() if not self._holds(client))

    def client_test(self, client: int) -> Samples:
        """Return a client's test samples, in the file's order, of a federation with per-client test sets."""
        start, stop = self._test_offsets[client : client + 2].tolist()
        return self._get(("client test", client), lambda: self._federation.test(start, stop))

    def rows(self, split: str, start: int, stop: int) -> Samples:
        """Return the rows start:stop of all samples of ``train`` or ``test``, which are not cached."""
        read = self._federation.train if split == "train" else self._federation.test
        return self._prepare(*read(start, stop))

    def test_chunk(self, chunk: int, size: int) -> Samples:
        """Return test samples ``chunk·size : (chunk+1)·size``, fewer in the last chunk."""
        return self._get(("test", chunk), lambda: self._federation.test(chunk * size, (chunk + 1) * size))

    def targets(self, y: np.ndarray) -> Tensor:
        """Return targets of the file, (n, …), as the run has them, in the host's memory."""
        return torch.from_numpy(np.array(y)).to(self._y_dtype)

    def _get(self, key: Key, read: Callable[[], tuple[np.ndarray, np.ndarray]]) -> Samples:
        found = self._held.get(key) or self._resident.get(key)
        if found is not None:
            return found
        self._missed = True
        samples = self._prepare(*read())
        if key[0] == "train" and self._table is not None:
            return self._put([key[1]], *samples)[key[1]]
        if self.keeps_clients or key[0] != "train":
            self._held.add({key: samples}, sum(part.nbytes for part in samples))
        return samples

    def _holds(self, client: int) -> bool:
        key = "train", client
        return key in self._held or key in self._resident

    def _put(self, clients: Sequence[int], x: Tensor, y: Tensor) -> dict[int, Samples]:
        """Keep samples of some clients, one after another, in the table of all."""
        assert self._table is not None
        kept = self._table.put(clients, x, y)
        for client, own in kept.items():
            self._resident.add({("train", client): own}, 0)
        return {**kept}

    def _room_for_all(self, capacity: int) -> ClientTable | None:
        """Return a table for the samples of all clients if there is room for it, on a CPU for a small one."""
        if self._device.type == "cpu":
            most = min(capacity, SMALL_TABLE) if self.keeps_clients else 0
        else:
            most = capacity if self.keeps_clients else min(capacity, SMALL_TABLE_OF_A_GPU)
        if not most:
            return None
        shapes = self._federation.feature_shape, self._federation.target_shape
        table = ClientTable(self._federation.sizes, shapes, (self._x_dtype, self._y_dtype), self._device)
        return table if 0 < table.nbytes <= most else None

    def _read_together(self, clients: Sequence[int]) -> dict[int, Samples]:
        """Read and prepare several clients' samples at once, into shared memory."""
        self._missed = True
        sizes = self._federation.sizes[clients]
        both = self._prepare(*self._federation.clients(clients))
        if self._table is not None:
            return self._put(clients, *both)
        (x, x_bytes), (y, y_bytes) = (aligned(rows, sizes) for rows in both)
        read = dict(zip(clients, zip(x, y, strict=True), strict=True))
        if self.keeps_clients:
            self._held.add({("train", k): samples for k, samples in read.items()}, x_bytes + y_bytes)
        return read

    def _prepare(self, x: np.ndarray, y: np.ndarray) -> Samples:
        return self._prepare_x(x), self._to_device(y, self._y_dtype)

    def _prepare_x(self, x: np.ndarray) -> Tensor:
        if self._federation.task == "next-token":
            self._check_tokens(x)
            return self._to_device(x, self._x_dtype)
        prepared = self._to_device(x, self._x_dtype)
        if x.dtype == np.uint8:
            prepared.div_(255)
        if self._centre is not None:
            prepared.sub_(self._centre[0]).div_(self._centre[1])
        return prepared

    def _check_tokens(self, x: np.ndarray) -> None:
        """Refuse tokens outside the vocabulary: on a GPU, an embedding without their row would abort the process."""
        top = (self._federation.num_classes or 0) - 1
        if x.size and (x.min() < 0 or x.max() > top):
            expected, got = f"0 … {top}", f"{x.min()} … {x.max()}"
            raise InputError("tokens of x", where=str(self._federation.path), expected=expected, got=got)

    def _to_device(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        """Copy into torch's memory, aligned to 64 bytes for rows anywhere in the file.

        uint8 is copied as uint8 and converted on the device; other types are converted by the copy.
        """
        copy = torch.empty(array.shape, dtype=torch.uint8 if array.dtype == np.uint8 else dtype)
        copy.numpy()[...] = array
        return upload(copy, self._device).to(dtype)

    def _per_channel(self, federation: Federation) -> tuple[Tensor, Tensor] | None:
        """Return mean and std, shaped to broadcast along axis 1 of (n, C, …)."""
        if federation.normalization is None:
            return None
        trailing = (1,) * max(len(federation.feature_shape) - 1, 0)
        mean, std = (
            torch.tensor(values, dtype=self._x_dtype, device=self._device).view(-1, *trailing)
            for values in (federation.normalization.mean, federation.normalization.std)
        )
        return mean, std
