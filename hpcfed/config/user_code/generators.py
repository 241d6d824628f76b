"""The global random generators of torch, NumPy and Python, from which a user's code may draw.

They are set to a stream's address before each piece of work that calls such code: what it draws depends neither on the
rank nor on what ran there before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hpcfed.ranks.accelerators import ACCELERATORS, generator
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
def generators_kept() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Leave the global generators as they were: a notebook may draw from them before, in and after a run.

    Yields a context for code outside of the run meanwhile, a loop over its rounds: it draws on from where it was.
    """
    outside = _read(_global_generators())

    @contextmanager
    def for_code_outside() -> Iterator[None]:
        nonlocal outside
        inside, outside = _read(_global_generators()), _with_first(outside)
        _write(outside)
        try:
            yield
        finally:
            outside = _read([each for each, _ in outside.torch])
            _write(inside)

    try:
        yield for_code_outside
    finally:
        _write(_with_first(outside))


@dataclass(frozen=True)
class _States:
    """States of torch's generators, each beside its own, and of NumPy's and Python's."""

    torch: list[tuple[torch.Generator, torch.Tensor]]
    numpy: Any
    python: Any


def _global_generators() -> list[torch.Generator]:
    """Return torch's: of the CPU and of all devices that this process has used."""
    return [generator(CPU), *(one for kind in ACCELERATORS.values() for one in kind.generators())]


def _with_first(states: _States) -> _States:
    """Return states with the first ones of generators that this process has come to use since they were read."""
    known = [each for each, _ in states.torch]
    first = (pair for kind in ACCELERATORS.values() for pair in kind.first_states)
    return replace(states, torch=[*states.torch, *(pair for pair in first if not any(pair[0] is one for one in known))])


def _read(of_torch: Sequence[torch.Generator]) -> _States:
    states = [(each, each.get_state()) for each in of_torch]
    return _States(states, np.random.get_state(), random.getstate())  # noqa: NPY002


def _write(states: _States) -> None:
    for each, state in states.torch:
        each.set_state(state)
    np.random.set_state(states.numpy)  # noqa: NPY002
    random.setstate(states.python)


class Generators:
    """A saved state of the global generators, from which code draws within `here`."""

    def __init__(self, device: torch.device, seed: int, purpose: Purpose, round: int = 0, client: int = 0):
        self._torch = [generator(each) for each in {CPU, device}]
        before = _read(self._torch)
        seed_generators(device, seed, purpose, round, client)
        self._state = _read(self._torch)
        _write(before)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let code draw from this state within the block, and from where the generators were after it."""
        before = _read(self._torch)
        _write(self._state)
        try:
            yield
        finally:
            self._state = _read(self._torch)
            _write(before)
