"""The machine that a suite's result holds for: bits follow from the processor and the kernels that torch has for it."""

from __future__ import annotations

import torch

from hpcfed.ranks.cpu import cpu_model


def machine() -> str:
    """Return the processor's name, torch's version, and the instruction set of its kernels."""
    return f"{cpu_model()}, torch {torch.__version__}, kernels for {torch.backends.cpu.get_cpu_capability()}"
