"""The settings of torch that decide a run's numbers, which user code may change, and a run changes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from hpcfed.ranks.accelerators import ACCELERATORS, accelerator, kinds_of_products

if TYPE_CHECKING:
    import torch


@contextmanager
def settings_kept() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Leave them as they were: threads, default type, gradients, deterministic kernels, precision of products.

    Yields a context for code outside of the run meanwhile, which has its own settings, and leaves the run's alone.
    """
    outside = settings_now()

    @contextmanager
    def for_code_outside() -> Iterator[None]:
        nonlocal outside
        inside = settings_now()
        outside()
        try:
            yield
        finally:
            outside = settings_now()
            inside()

    try:
        yield for_code_outside
    finally:
        outside()


def multiply_exactly(device: torch.device) -> None:
    """Multiply in float32 where the recipe's ``precision`` says no other, whatever code of the user's has set."""
    import torch

    if device.type == "cpu":
        torch.set_float32_matmul_precision("highest")
        for kind in kinds_of_products("mkldnn.conv", "mkldnn.rnn"):
            if kind.fp32_precision not in ("none", "ieee"):
                kind.fp32_precision = "ieee"
    else:
        accelerator(device).be_exact()


def settings_now() -> Callable[[], None]:
    """Return a function that sets torch's settings to what they are now."""
    import torch

    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic, of_devices = _deterministic(), [kind.as_now() for kind in ACCELERATORS.values()]

    def restore() -> None:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if _deterministic() != deterministic:  # the call itself imports a compiler
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        for of_device in of_devices:
            of_device()

    return restore


def _deterministic() -> tuple[bool, bool]:
    """Return whether torch chooses deterministic kernels, and whether it only warns where there is none."""
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
