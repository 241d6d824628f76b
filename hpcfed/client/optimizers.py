"""Client optimizers: one fused operation after another, no state kept between rounds.

They step a vector (d,), or the rows of some clients in a stack of parameters (R, …), as their caller likes. The factors
of a step are numbers of the host, or scalars on a device, where a step recorded once is taken with those of later ones.

All begin a round at zero, step along a flat gradient, and can go on without one: a guess lets the first moment decay
for τ' further steps while everything else stays, in one operation:

    y ← y − η (ρ + ρ² + … + ρ^τ') · (the last step's direction)

Reference: Boukhari et al., GeL ("guess and learn"), Section 3.1, Algorithm 1, lines 14-20.

GeL's equations are of SGD with momentum. For Adam and Yogi, which Section 3.1 allows, they leave a choice. The above is
its "nudge in the direction of momentum", from the first moment alone (Section 3.2), in a single operation (Appendix B).
With ``guess_moments: all`` its eq. (3) is taken by the letter: the proxy gradient 0 enters the whole optimizer, so that
the second moment decays (Yogi's stays) and the corrections of the zero start go on:

    y ← y − η Σ_j β₁^j m/(1−β₁^(k+j)) / (√(β₂^j v/(1−β₂^(k+j))) + ε),   j = 1 … τ'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from hpcfed.arithmetic.elementary import power
from hpcfed.arithmetic.operations import LIBRARIES, Arithmetic
from hpcfed.client.effective_steps import guess_factor
from hpcfed.config.recipe import Local

ALL = slice(None)
Number = float | Tensor
"""A factor: the host's, or a scalar on the device of what it multiplies."""
NEGLIGIBLE = 1e-20
"""Share of ε below which a decayed first moment moves nothing."""


class Optimizer(Protocol):
    """Steps y in place: all of what it was made for, or some of its rows.

    Attributes:
        taken: steps since `reset`, counted by the caller; guesses read it.
    """

    taken: int

    def reset(self) -> None:
        """Forget everything: a client begins."""
        ...

    def numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return the factors of a step, counted from 1."""
        ...

    def move(self, y: Tensor, g: Tensor, numbers: Sequence[Number], rows: slice = ALL) -> None:
        """Take the step of these `numbers` along a gradient like y, which it may overwrite."""
        ...

    def guess(self, y: Tensor, lr: float, steps: float, rows: slice = ALL) -> None:
        """Extrapolate y along the momentum, without gradients: by `steps` steps, or for ``inf`` to their limit."""
        ...


class Sgd:
    """v ← ρ v + g;  y ← y − η v.  Without momentum v is g and is not kept."""

    def __init__(self, like: Tensor, momentum: float, arithmetic: Arithmetic = LIBRARIES):
        self._momentum, self._arithmetic = momentum, arithmetic
        self._velocity = torch.zeros_like(like) if momentum else None
        self.taken = 0

    def reset(self) -> None:
        self.taken = 0
        if self._velocity is not None:
            self._velocity.zero_()

    def numbers(self, lr: float, step: int) -> tuple[float, ...]:
        return (-lr,)

    def move(self, y: Tensor, g: Tensor, numbers: Sequence[Number], rows: slice = ALL) -> None:
        v = g
        if self._velocity is not None:
            v = self._velocity[rows]
            self._arithmetic.decay_and_add(v, self._momentum, g)
        self._arithmetic.add_scaled(y, v, numbers[0])

    def guess(self, y: Tensor, lr: float, steps: float, rows: slice = ALL) -> None:
        if self._velocity is not None:
            scale = -lr * guess_factor(self._momentum, steps)
            self._arithmetic.add_scaled(y, self._velocity[rows], scale)


class Adam:
    """m ← β₁ m + (1−β₁) g;  v ← β₂ v + (1−β₂) g²;  y ← y − η m̂ / (√v̂ + ε),  m̂ = m/(1−β₁^k), v̂ = v/(1−β₂^k).

    Reference: Kingma and Ba, ICLR 2015, Algorithm 1.
    """

    v_decays: ClassVar[bool] = True
    """Whether a gradient of 0 lets v decay."""

    def __init__(self, like: Tensor, beta1: float, beta2: float, eps: float, *, guesses_all: bool = False):
        self._beta1, self._beta2, self._eps, self._guesses_all = beta1, beta2, eps, guesses_all
        self._m, self._v, self._scratch = (torch.zeros_like(like) for _ in range(3))
        self.taken = 0

    def reset(self) -> None:
        self._m.zero_()
        self._v.zero_()
        self.taken = 0

    def numbers(self, lr: float, step: int) -> tuple[float, ...]:
        return (1 - self._beta2**step) ** 0.5, -lr / (1 - self._beta1**step)

    def move(self, y: Tensor, g: Tensor, numbers: Sequence[Number], rows: slice = ALL) -> None:
        self._m[rows].lerp_(g, 1 - self._beta1)
        self._second_moment(self._v[rows], g, self._scratch[rows])
        self._move(y, numbers, rows)

    def guess(self, y: Tensor, lr: float, steps: float, rows: slice = ALL) -> None:
        if self.taken and self._guesses_all:
            self._follow_zeros(y, lr, steps, rows)
        elif self.taken:
            self._move(y, self.numbers(lr * guess_factor(self._beta1, steps), self.taken), rows)

    def _follow_zeros(self, y: Tensor, lr: float, steps: float, rows: slice) -> None:
        """Take steps with gradients of 0, up to those that add nothing in the arithmetic's precision."""
        if not self._beta1:
            return
        last, root = math.ceil(math.log(NEGLIGIBLE * self._eps) / math.log(self._beta1)), self._v[rows].sqrt()
        for j in range(1, 1 + int(min(steps, last))):
            k = self.taken + j
            decay = power(self._beta2, j) if self.v_decays else 1.0
            below = torch.mul(root, (decay / (1 - power(self._beta2, k))) ** 0.5, out=self._scratch[rows])
            share = power(self._beta1, j) / (1 - power(self._beta1, k))
            y.addcdiv_(self._m[rows], below.add_(self._eps), value=-lr * share)

    def _second_moment(self, v: Tensor, g: Tensor, scratch: Tensor) -> None:
        v.mul_(self._beta2).addcmul_(g, g, value=1 - self._beta2)

    def _move(self, y: Tensor, numbers: Sequence[Number], rows: slice) -> None:
        root, share = numbers
        below = torch.sqrt(self._v[rows], out=self._scratch[rows]).div_(root).add_(self._eps)
        if isinstance(share, Tensor):
            y.addcdiv_(self._m[rows], below.div_(share))
        else:
            y.addcdiv_(self._m[rows], below, value=share)


class Yogi(Adam):
    """Adam with v ← v − (1−β₂) sign(v − g²) g², which changes by g² at most.

    Reference: Zaheer et al., "Adaptive methods for nonconvex optimization", NeurIPS 2018, Algorithm 2; here with Adam's
    correction of the zero start, where the paper starts v from a first gradient.
    """

    v_decays = False

    def _second_moment(self, v: Tensor, g: Tensor, scratch: Tensor) -> None:
        squared = g.mul_(g)
        torch.sub(v, squared, out=scratch).sign_()
        v.addcmul_(scratch, squared, value=-(1 - self._beta2))


def _adaptive(kind: type[Adam], like: Tensor, section: Local) -> Adam:
    every = section.guess_moments == "all"
    return kind(like, section.beta1, section.beta2, section.eps, guesses_all=every)


OPTIMIZERS: Mapping[str, Callable[[Tensor, Local, Arithmetic], Optimizer]] = {
    "sgd": lambda like, section, arithmetic: Sgd(like, section.momentum, arithmetic),
    "adam": lambda like, section, _: _adaptive(Adam, like, section),
    "yogi": lambda like, section, _: _adaptive(Yogi, like, section),
}
"""By the recipe's ``local.optimizer``; portable arithmetic is SGD's alone."""


def optimizer_for(section: Local, like: Tensor, arithmetic: Arithmetic = LIBRARIES) -> Optimizer:
    """Return the recipe's client optimizer for vectors shaped as `like`, (d,)."""
    return OPTIMIZERS[section.optimizer](like, section, arithmetic)
