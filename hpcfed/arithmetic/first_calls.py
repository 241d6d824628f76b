"""The first call of each of MKL's vector functions, made for one number, which a single thread computes.

torch computes √, exp and others of whole vectors by MKL's vector functions, a part of the vector in each thread. MKL
chooses a function's code at its first call. Where the first calls of two threads meet, MKL 2024.2, which torch 2.13
has, now and then gives one of them the code of least accuracy: its part of that one vector is off by up to 4,000 units
of the last place in float32, 280,000 in float64 (`python jobs/bench/first_calls.py`; docs/bits.md).
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
    *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)
"""torch's names of the functions that it takes from MKL."""


def make_first_calls() -> None:
    """Call every vector function once in float32 and float64, so that no later call is a first one.

    Costs some milliseconds in a process, and 50 microseconds thereafter.
    """
    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in FUNCTIONS:
            getattr(torch, function)(half)
