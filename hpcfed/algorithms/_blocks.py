"""The server's step: on whole vectors, or in blocks where a rule works entry by entry.

In blocks nothing but the result is as long as the model, where a step on whole vectors takes w, the result and each
intermediate in float64.

The step is taken where w and the state's vectors lie: on the host, or on a GPU, where the package's own rules leave the
host's bits. Element by element a GPU rounds as IEEE 754 says, too, if each operation is a kernel of its own: rules
multiply and add in two (torch's ``alpha``, ``addcmul`` and ``lerp`` round once), divide by `quotient` and add up by
`hpcfed.arithmetic.sums`. A state's scalars, (), stay on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from hpcfed.types import Means, RoundContext, ServerMethod, ServerUpdate, State

if TYPE_CHECKING:
    from torch import Tensor

BLOCK, GPU_BLOCK = 1 << 16, 1 << 24
"""Entries of a block: what a core's cache holds of some vectors of float64; on a GPU a gigabyte of them."""
Step = TypeVar("Step", bound=Callable[..., ServerUpdate])


def elementwise(step: Step) -> Step:
    """Mark a rule's `step` as one whose entries depend on the same entries of its vectors alone, and on scalars.

    Large models are stepped in blocks, and `server_lr` and `metrics` are those of the last block: neither may depend on
    entries of vectors. A step that overrides it needs a mark of its own.
    """
    step.elementwise = True  # type: ignore[attr-defined]
    return step


def server_step(rule: ServerMethod, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
    """Return a rule's step from the model `w`, (d,) in the run's dtype; the next model is in that dtype, too."""
    whole = any(tensor.dim() and tensor.shape != w.shape for tensor in state.values())
    size = BLOCK if w.device.type == "cpu" else GPU_BLOCK
    if whole or not getattr(rule.step, "elementwise", False) or len(w) <= size:
        update = rule.step(w.double(), state, means, context)
        return replace(update, w=update.w.to(w.dtype))
    after = w.new_empty(w.shape)
    states: dict[str, Tensor] = {}
    for first in range(0, len(w), size):
        block = slice(first, first + size)
        of_block = replace(means, vectors={name: vector[block] for name, vector in means.vectors.items()})
        before = {name: tensor[block] if tensor.dim() else tensor for name, tensor in state.items()}
        update = rule.step(w[block].double(), before, of_block, context)
        after[block] = update.w
        for name, tensor in update.state.items():
            if not tensor.dim():
                states[name] = tensor
                continue
            if name not in states:
                states[name] = tensor.new_empty(w.shape)
            states[name][block] = tensor
    return replace(update, w=after, state=states)
