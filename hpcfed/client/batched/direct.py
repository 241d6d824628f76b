"""Steps of plain SGD along operators: each parameter is stepped as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hpcfed.client.batched.operators.network import OperatorNetwork
from hpcfed.client.batched.tiles import Stacks
from hpcfed.client.shorts import Short
from hpcfed.client.solver import Stepping, Task, constant_of
from hpcfed.config.recipe import Local as LocalSection


class DirectDescent:
    """y ← keep·y − lr·∇f − lr·constant, where tilt and decay are the factor keep and a constant, as in `FusedDescent`.

    On a CPU, without momentum and clip; tilts with an offset or a radius need `FlatDescent`. The gradient of a large
    matrix is never written: the product that makes it steps the matrix.
    """

    def __init__(self, network: OperatorNetwork, section: LocalSection, stacks: Stacks):
        self._network, self._stepping, self.stacks = network, Stepping(section), stacks

    def begin(self, tasks: Mapping[int, Task], w: Tensor, lr: float, mu: float) -> None:
        """Prepare; see `hpcfed.client.batched.steps.Descent`."""
        self._lr, self._keep = lr, 1 - lr * sum(self._stepping.scales(mu))
        self._constants = self.stacks.holding({slot: constant_of(task.tilt, w, 0.0) for slot, task in tasks.items()})

    def take_steps(
        self, x: Tensor, y: Tensor, short: Sequence[Short | None], losses: Tensor, keys: Tensor | None = None
    ) -> None:
        """Take S steps; see `hpcfed.client.batched.steps.Descent`."""
        parameters = self.stacks.each
        of_steps = [None] * len(short) if keys is None else keys.unbind(1)
        each = zip(x.unbind(1), y.unbind(1), short, of_steps, strict=True)
        for step, (x_step, y_step, of_step, own) in enumerate(each):
            losses[:, step] = self._network.descend(parameters, x_step, y_step, self._keep, self._lr, of_step, own)
            if self._constants is not None:
                self.stacks.flat.sub_(self._constants.flat, alpha=self._lr)

    def guess(self, slot: int, steps: float, taken: int) -> None:
        """Do nothing: without momentum there is nothing to guess from."""

    def take(self, first: int, last: int, out: Tensor) -> Tensor:
        """Write iterates; see `hpcfed.client.batched.steps.Descent`."""
        return self.stacks.take(first, last, out)

    def take_private(self, slot: int) -> Tensor:
        """Return private parameters; see `hpcfed.client.batched.steps.Descent`."""
        return self.stacks.take_private(slot)
