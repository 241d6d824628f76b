"""The settings of torch that decide a run's numbers, which user code may change, and a run changes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settings_kept() -> Iterator[None]:
    """Leave them as they were: threads, default type, gradients, deterministic kernels."""
    import torch

    threads, dtype, gradients = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = _deterministic()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if _deterministic() != deterministic:  # the call itself imports a compiler
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def _deterministic() -> tuple[bool, bool]:
    """Return whether torch chooses deterministic kernels, and whether it only warns where there is none."""
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
