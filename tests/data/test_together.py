"""Samples of many small clients are read and prepared at once, and come out as each client's own would."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpcfed.data import federation as federation_format
from hpcfed.data import shards as shards_module
from hpcfed.data.cache import ALIGNED, SampleCache
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.errors import EnvironmentFailure, InputError
from tests.federations import write_federation

CPU = torch.device("cpu")
SIZES = (3, 0, 1, 7, 2, 40)
CLIENTS = [4, 1, 3, 0, 5]
LARGE = 5
"""The client that is not read with the others, where `SMALL_FILE` says so."""


@pytest.fixture(params=["contiguous", "chunked", "big-endian"])
def path(request, tmp_path: Path) -> Path:
    """A federation of images of 3 × 5 bytes, normalised."""
    rng = np.random.default_rng(7)
    draw = [(rng.integers(256, size=(n, 1, 3, 5)).astype(np.uint8), rng.integers(4, size=n)) for n in SIZES]
    path = write_federation(tmp_path / "f.h5", draw, num_classes=4)
    with h5py.File(path, "r+") as file:
        file.attrs["normalization"] = '{"mean": [0.3], "std": [0.7]}'
        if request.param != "contiguous":
            for name in ("train/x", "train/y"):
                data = file[name][:]
                del file[name]
                if request.param == "chunked":
                    file.create_dataset(name, data=data, chunks=(4, *data.shape[1:]), compression="gzip")
                else:
                    file[name] = data.astype(data.dtype.newbyteorder(">"))
    return path


@pytest.mark.parametrize("access", ["mmap", "memory"])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_together_as_alone(path, access, checked, dtype, monkeypatch):
    monkeypatch.setattr(shards_module, "SMALL_FILE", SIZES[LARGE] * 15)
    monkeypatch.setattr(federation_format, "LABELS_CHECKED_AT_OPEN", 1000 if checked else 0)
    with Federation.open(path, access) as federation:
        alone, together = (Shards(federation, dtype, CPU, 1 << 20) for _ in range(2))
        together.client(3)
        for _ in range(2):  # read, and held
            for k, samples in zip(CLIENTS, together.clients(CLIENTS), strict=True):
                for one, other in zip(alone.client(k), samples, strict=True):
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other)
                    assert other.is_contiguous()
                    assert other.data_ptr() % ALIGNED == 0


@pytest.mark.parametrize("access", ["mmap", "memory"])
def test_small_clients_cost_one_read_for_all(path, access, monkeypatch):
    asked = []
    monkeypatch.setattr(
        Federation, "clients", lambda self, ks, real=Federation.clients: asked.append(ks) or real(self, ks)
    )
    with Federation.open(path, access) as federation:
        shards = Shards(federation, torch.float32, CPU, 1 << 20)
        shards.clients([4, 1, 3])
        shards.clients([3, 0, 4])
        shards.clients([0, 1])
    assert asked == [[4, 1, 3], [0]]


def test_clients_of_whom_few_come_again_are_not_held(path):
    with Federation.open(path) as federation:
        shards = Shards(federation, torch.float32, CPU, 1 << 20, keeps_clients=False)
        for read in (lambda: shards.clients([4, 3])[0], lambda: shards.client(5)):
            assert read()[0] is not read()[0]
        kept = Shards(federation, torch.float32, CPU, 1 << 20)
        assert kept.clients([4, 3])[0] is kept.clients([4, 3])[0]


def test_what_shares_memory_is_let_go_together_and_the_rest_stays():
    held, sample = SampleCache(100), (torch.zeros(1), torch.zeros(1))
    held.add({("train", k): sample for k in (0, 1, 2)}, 60)
    held.add({("train", 3): sample}, 30)
    assert held.get(("train", 1)) is sample
    held.add({("train", 4): sample}, 30)  # the least recently used is 3
    assert [("train", k) in held for k in range(5)] == [True, True, True, False, True]
    held.add({("train", 5): sample}, 20)
    assert [("train", k) in held for k in range(6)] == [False, False, False, False, True, True]
    held.add({("train", 6): sample}, 500)  # larger than all there is, and still in use
    assert [("train", k) in held for k in range(7)] == [False] * 6 + [True]
    assert held.get(("train", 5)) is None


def test_a_capacity_too_small_changes_nothing_but_time(path):
    with Federation.open(path) as federation:
        roomy, tight = (Shards(federation, torch.float32, CPU, capacity) for capacity in (1 << 20, 0))
        for clients in (CLIENTS, [0, 2], CLIENTS):
            for one, other in zip(roomy.clients(clients), tight.clients(clients), strict=True):
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("access", ["mmap", "memory"])
def test_a_bad_label_among_many_is_reported_with_its_client(tmp_path, access, monkeypatch):
    monkeypatch.setattr(federation_format, "LABELS_CHECKED_AT_OPEN", 0)
    samples = [(np.zeros((2, 3), np.float32), np.array([0, label])) for label in (1, 2, 9, 0)]
    path = write_federation(tmp_path / "f.h5", samples, num_classes=3)
    with Federation.open(path, access) as federation:
        federation.clients([3, 0, 1])
        with pytest.raises(InputError, match=r"labels in /train/y of client 2: expected 0 … 2, got 0 … 9"):
            federation.clients([3, 0, 2, 1])


@pytest.mark.parametrize("access", ["mmap", "memory"])
@pytest.mark.parametrize("labels", [200, 200_000])  # fewer and more than a neighbourhood of pages
def test_a_file_that_became_shorter_is_noticed(tmp_path, access, labels):
    samples = [(np.zeros((labels // 100, 1), np.uint8), np.zeros(labels // 100, np.int64)) for _ in range(100)]
    path = write_federation(tmp_path / "f.h5", samples, num_classes=2)
    with Federation.open(path, access) as federation:
        federation.clients([1, 2])
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 16)
        with pytest.raises(EnvironmentFailure, match=r"f.h5: the data file became shorter: expected at least"):
            federation.clients([1, 98])
