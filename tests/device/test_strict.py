"""The strict device refuses what a GPU refuses, and what it lets pass only at times."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

from hpcfed.models.losses import LOSSES
from hpcfed.ranks.accelerators import upload
from tests.device.strict import KIND, POISON, UNLIMITED, Stub


@pytest.fixture
def device(stub: Stub) -> torch.device:
    """The first of two devices, both taken."""
    stub.reset(visible=2)
    stub.take(0)
    stub.take(1)
    return torch.device(KIND, 0)


def test_tensors_of_two_devices_do_not_meet(device) -> None:
    here, there = torch.ones(3, device=device), torch.ones(3, device=torch.device(KIND, 1))
    for other in (torch.ones(3), there):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + other
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.ones(3, device=other.device).add_(here)
    assert (here + torch.tensor(2.0)).cpu().tolist() == [3.0] * 3  # a host scalar is a kernel's argument


def test_the_host_does_not_read_its_memory(device, stub, world) -> None:
    here = torch.arange(4, device=device)
    with pytest.raises(RuntimeError, match="numpy"):
        here.numpy()
    with pytest.raises(TypeError):
        np.frombuffer(here)
    assert here.data_ptr() >> 56
    if world.size > 1:
        with pytest.raises(BufferError):
            world.sum_in_place(here)
        stub.mpi_reads_it = True
        with pytest.raises(BufferError, match="has not finished"):
            world.sum_in_place(here)


def test_copies_that_nobody_waits_for_have_not_arrived(device, stub) -> None:
    host = stub.page_locked(4, torch.uint8)
    host.copy_(torch.ones(4, dtype=torch.uint8, device=device), non_blocking=True)
    mark = stub.mark(device)
    assert host.tolist() == [POISON] * 4
    later = stub.page_locked(4, torch.uint8)
    later.copy_(torch.ones(4, dtype=torch.uint8, device=device), non_blocking=True)
    mark()
    assert host.tolist() == [1] * 4
    assert later.tolist() == [POISON] * 4
    stub.synchronize(device)
    assert later.tolist() == [1] * 4
    there = torch.empty(4, dtype=torch.uint8, device=device)
    there.copy_(later, non_blocking=True)
    later.zero_()
    with pytest.raises(AssertionError, match="changed while the device copied"):
        stub.synchronize(device)


def test_counts_and_memory(device, stub) -> None:
    own = stub[0]
    x = upload(torch.ones(8), device)
    assert (own.counts.kernels, own.counts.waits, own.counts.up) == (0, 0, [32])
    y = (x.view(2, 4) * 2).sum()
    assert (own.counts.kernels, own.counts.waits) == (2, 0)
    assert float(y) == 16
    assert (own.counts.waits, own.counts.down) == (1, [8])
    before = own.allocated
    own.limit = before + 100
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"stub out of memory\. Tried to allocate 400 bytes"):
        torch.empty(100, device=device)
    kept = torch.empty(25, device=device)
    del kept
    assert own.allocated == before
    own.limit = UNLIMITED
    x.requires_grad_()
    (x * x).sum().backward()
    assert x.grad.cpu().tolist() == [2.0] * 8


def test_a_device_is_taken_before_it_is_used(stub) -> None:
    with pytest.raises(AssertionError, match="stub:0 is used before it was taken"):
        torch.zeros(3, device=torch.device(KIND, 0))


def test_sums_in_any_order_are_refused_but_where_they_may_be(device, stub) -> None:
    """A loss of several labels a sample is none of them."""
    output, target = torch.ones(2, 3, 5, device=device), torch.ones(2, 5, dtype=torch.int64, device=device)
    sums = partial(functional.cross_entropy, output, target), partial(output.cumsum, 1)
    for sum_up in sums:
        with pytest.raises(AssertionError, match="adds in any order on CUDA"):
            sum_up()
    target.cumsum(1)
    loss = LOSSES["cross-entropy"]("mean").batch(output, target)
    stub.be_deterministic(False)
    assert float(loss) == float(sums[0]())
