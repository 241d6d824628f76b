"""The precision of the local solve's products; weights, Δ, sums and evaluation keep theirs.

float32      as it says
tf32         float32 with products in TensorFloat-32, on GPUs that have it
bf16-mixed   products in bfloat16, all that adds up and the weights in float32
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from hpcfed.errors import InputError
from hpcfed.ranks.accelerators import accelerator


def computing(
    precision: str, device: torch.device, *, of_one_model: bool = True
) -> Callable[[], AbstractContextManager[object]]:
    """Context manager of a forward and backward pass; if not `of_one_model`, of passes between which weights change.

    autocast keeps its casts of weights until its end, also of weights that are written to meanwhile.

    Raises:
        InputError: the device knows no such precision.
    """
    if precision == "tf32":
        if device.type == "cpu" or not accelerator(device).has_tf32:
            raise InputError("precision: tf32", expected="a GPU", got=f"device {device.type}", remedy="use float32")
        return accelerator(device).in_tf32
    if precision == "bf16-mixed":
        return partial(torch.autocast, device.type, torch.bfloat16, cache_enabled=of_one_model)
    return nullcontext
