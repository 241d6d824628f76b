"""A strict device in place of the GPU that this machine has not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpcfed.client import engine
from hpcfed.ranks.accelerators import ACCELERATORS
from tests.device.strict import KIND, Stub, register

register()  # at collection: autograd counts the devices of a process at its first backward pass


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """The one accelerator of this process, which ``device: auto`` takes; one device of it is visible.

    Clients on the CPU are trained by the same operations, so that bits can be compared.
    """
    monkeypatch.setattr(engine, "on_device", lambda device: True)
    found = register()
    found.reset()
    for kind in [*ACCELERATORS]:
        monkeypatch.delitem(ACCELERATORS, kind)
    monkeypatch.setitem(ACCELERATORS, KIND, found)
    monkeypatch.setattr("hpcfed.assembly.auto_device.LEAST_ON_GPU", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield found
    found.reset()
