"""The global random generators of torch, NumPy and Python, from which a user's code may draw.

They are set to a stream's address before each piece of work that calls such code: what it draws depends neither on the
rank nor on what ran there before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hpcfed.ranks.accelerators import generator
from hpcfed.rng import Purpose, torch_seed

CPU = torch.device("cpu")


def seed_generators(
    device: torch.device, seed: int, purpose: Purpose, round: int = 0, client: int = 0, place: int = 0
) -> None:
    """Set torch's generators of the CPU and a device, NumPy's and Python's to (seed, purpose, round, client, place)."""
    number = torch_seed(seed, purpose, round, client, place)
    for each in {CPU, device}:
        generator(each).manual_seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 (the one that functions such as np.random.normal draw from)
    random.seed(number)


Own = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
"""Types of random generators that a user's module may keep as attributes."""


def state_of(own: Own) -> Any:
    """Return the state of a generator, by which it is compared and set again."""
    if isinstance(own, torch.Generator):
        return own.get_state().numpy().tobytes()
    if isinstance(own, random.Random):
        return own.getstate()
    if isinstance(own, np.random.RandomState):
        return own.get_state(legacy=False)
    return own.bit_generator.state


def set_state(own: Own, state: Any) -> None:
    """Set a generator to what `state_of` returned."""
    if isinstance(own, torch.Generator):
        own.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(own, random.Random):
        own.setstate(state)
    elif isinstance(own, np.random.RandomState):
        own.set_state(state)
    else:
        own.bit_generator.state = state


def seed_own(own: Own, number: int) -> None:
    """Set a generator to a seed."""
    if isinstance(own, torch.Generator):
        own.manual_seed(number)
    elif isinstance(own, random.Random):
        own.seed(number)
    elif isinstance(own, np.random.RandomState):
        own.seed(number % 2**32)
    else:
        own.bit_generator.state = type(own.bit_generator)(number).state


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave NumPy's and Python's generators as they were: a notebook may draw from them before and after a run."""
    before = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before[0])  # noqa: NPY002
        random.setstate(before[1])


class Generators:
    """A saved state of the global generators, from which code draws within `here`."""

    def __init__(self, device: torch.device, seed: int, purpose: Purpose, round: int = 0, client: int = 0):
        self._torch = [generator(each) for each in {CPU, device}]
        before = self._read()
        seed_generators(device, seed, purpose, round, client)
        self._state = self._read()
        self._write(before)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let code draw from this state within the block, and from where the generators were after it."""
        before = self._read()
        self._write(self._state)
        try:
            yield
        finally:
            self._state = self._read()
            self._write(before)

    def _read(self) -> tuple[Any, ...]:
        return [one.get_state() for one in self._torch], np.random.get_state(), random.getstate()  # noqa: NPY002

    def _write(self, state: tuple[Any, ...]) -> None:
        for one, own in zip(self._torch, state[0], strict=True):
            one.set_state(own)
        np.random.set_state(state[1])  # noqa: NPY002
        random.setstate(state[2])
