"""Exponential, logarithm, roots and whole powers from exact or singly rounded operations.

    exp     x = k ln 2 + r, |r| ≤ ln 2 / 2:  2^k Σ r^j / j!  (to 1.2 ulp; beyond ±700 x is cut)
    log     x = 2^k m, m in [√½, √2), t = (m − 1) / (m + 1):  k ln 2 + 2 (t + t³/3 + t⁵/5 + …)  (to 3 ulp)
    log1p   of 0 ≤ x ≤ 1:  the same series with t = x / (2 + x)  (to 3 ulp)

in float64; ``tests/numerics/test_portable_arithmetic.py`` measures the errors. k ln 2 is taken in two parts, the first
with so many zeros at its end that its product is exact (Cody and Waite, 1980).
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
PER_LN2 = float.fromhex("0x1.71547652b82fep+0")
REACH = 700.0
EXP_TERMS = [1 / math.factorial(j) for j in range(13, -1, -1)]
LOG_TERMS = [2 / (2 * j + 1) for j in range(11, -1, -1)]
LOG1P_TERMS = [2 / (2 * j + 1) for j in range(18, -1, -1)]
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
"""√½ as an integer: bits of larger numbers up to √2 differ from it by less than 2^52."""
DIGITS = Context(prec=50)


def exp(x: Tensor) -> Tensor:
    """Return e^x, float64."""
    x = x.clamp(-REACH, REACH)
    k = (x * PER_LN2).round_()
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    return _polynomial(EXP_TERMS, r) * ((k.long() + 1023) << 52).view(x.dtype)


def log(x: Tensor) -> Tensor:
    """Return ln x, float64, of normal positive numbers."""
    import torch

    bits = x.contiguous().view(torch.int64)
    k = (bits - SQRT_HALF_BITS) >> 52
    f = (bits - (k << 52)).view(x.dtype) - 1
    k = k.to(x.dtype)
    return k * LN2_HIGH + (k * LN2_LOW + _series(LOG_TERMS, f / (f + 2)))


def log1p(x: Tensor) -> Tensor:
    """Return ln(1 + x), float64, of numbers between 0 and 1."""
    return _series(LOG1P_TERMS, x / (x + 2))


def sqrt(x: Tensor) -> Tensor:
    """Return √x to the nearest number: on the host NumPy's, since torch's is MKL's, which errs by 1 ulp on Intel's."""
    import numpy as np
    import torch

    if x.device.type != "cpu":
        return x.sqrt()
    return torch.from_numpy(np.sqrt(x.numpy()))


def quotient(x: Tensor, number: float) -> Tensor:
    """Return x / number, rounded once; a GPU multiplies by the rounded inverse of a number of Python's."""
    return x / (number if x.device.type == "cpu" else x.new_full((), number))


@lru_cache(maxsize=1 << 10)  # asked for by each client, and each block of a server step
def power(base: float, exponent: float) -> float:
    """Return base^exponent of a whole exponent ≥ 0, to the nearest float64, by decimal integers."""
    return float(DIGITS.power(Decimal(base), Decimal(int(exponent)))) if exponent else 1.0


def _series(terms: list[float], t: Tensor) -> Tensor:
    return t * _polynomial(terms, t * t)


def _polynomial(terms: list[float], x: Tensor) -> Tensor:
    """Return the polynomial with these coefficients, the highest first: each product and each sum is rounded."""
    total = x.new_full(x.shape, terms[0])
    for term in terms[1:]:
        total.mul_(x).add_(term)
    return total
