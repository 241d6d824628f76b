"""The module's averaged buffers, such as BatchNorm's running statistics, over a run's rounds.

    floating-point ones   b ← b − Σ_{i∈S} p_i (b − b_i)      p_i of the method; no part of any norm or server step
    all others            n ← max_{i∈S} n_i

b_i and n_i are client i's after its last step. The differences ride in the round's reduction as one more vector of m
entries, so buffers that training leaves alone keep their bits; integers are scalars of the clients' slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, from_numpy

from hpcfed.errors import InputError
from hpcfed.models.buffers import BUFFERS, INTEGERS
from hpcfed.models.flat import FlatModel
from hpcfed.reduce.slots import DONE, Sums
from hpcfed.types import State

MOST = 1 << 53
"""Largest whole number that is exact in float64."""
MOST_INTEGERS = 4096
"""Entries of integer buffers that may be averaged: each is 8 bytes of every client's slot."""


class AveragedBuffers:
    """The averaged buffers after the last round; the same on every rank.

    Args:
        model: takes them at each round, for training and evaluation.

    Attributes:
        state: ``buffers`` (m,) in the run's dtype and ``integers`` (k,) int64 on the host; those that exist.
        entries: m by the name of the reduced vector; empty if m = 0.
        scalars: names of the integers among the clients' scalars.
        sent_bytes: of them, in one direction.

    Raises:
        InputError: there are more integers than `MOST_INTEGERS`.
    """

    def __init__(self, model: FlatModel):
        self._model = model
        self.state: State = {name: tensor.cpu() for name, tensor in model.averaged.items()}
        self.entries = {name: len(tensor) for name, tensor in self.state.items() if name == BUFFERS}
        count = len(self.state.get(INTEGERS, ()))
        if count > MOST_INTEGERS:
            raise InputError(
                "parameters.buffers: averaged, of the buffers that are no floating-point numbers",
                expected=f"at most {MOST_INTEGERS} entries",
                got=str(count),
                remedy="name those that stay constant in parameters.frozen",
            )
        self.scalars = tuple(f"{INTEGERS}.{number}" for number in range(count))
        self.sent_bytes = sum(tensor.nbytes for tensor in self.state.values())

    def changes(self, trained: State) -> Mapping[str, Tensor]:
        """Return b − b_i of a client after training, (m,) on the device; empty if m = 0."""
        return {name: self._model.averaged[name] - trained[name] for name in self.entries}

    def counts(self, trained: State) -> Mapping[str, float]:
        """Return n_i of a client after training, by their names among its scalars.

        Raises:
            InputError: one has more digits than a slot's float64.
        """
        if not self.scalars:
            return {}
        counts = trained[INTEGERS].cpu().tolist()
        if any(abs(count) > MOST for count in counts):
            expected, remedy = f"whole numbers up to {MOST}", "name the buffer in parameters.frozen, or make it private"
            raise InputError(
                "parameters.buffers: averaged", expected=expected, got=str(max(counts, key=abs)), remedy=remedy
            )
        return dict(zip(self.scalars, counts, strict=True))

    def step(self, sums: Sums, kept: float) -> None:
        """Take the round's averages, where clients with a share of `kept` in all are not skipped."""
        following = {}
        for name in self.entries:
            old = self.state[name]
            following[name] = (old.double() - sums.vectors[name].to(old.device) / kept).to(old.dtype)
        if self.scalars:
            done = sums.status == DONE
            largest = [sums.scalars[name][done].max() for name in self.scalars]
            following[INTEGERS] = from_numpy(np.array(largest).astype(np.int64))
        self.restore(following)

    def restore(self, state: State) -> None:
        """Set all of them, from tensors on the host."""
        self.state = {name: state[name] for name in self.state}
        device = self._model.vector.device
        self._model.averaged = {name: tensor.to(device, copy=True) for name, tensor in self.state.items()}
