"""How many samples each client gets, for the schemes that fix it beforehand."""

from __future__ import annotations

import math

import numpy as np

from hpcfed.errors import InputError, nearest

SIZES = ("equal", "lognormal")


def draw(kind: str, sigma: float, num_samples: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Return (N,) int64 sizes, each at least 1, that sum to `num_samples`.

    ``equal``: the same up to one. ``lognormal``: proportional to exp(σ z), z ~ N(0, 1), as FedDyn's unbalanced
    splits (Acar et al., ICLR 2021, appendix A.1), rounded by largest remainders; nobody is left without a sample.

    Raises:
        InputError: more clients than samples, an unknown kind, or a σ that is not positive.
    """
    if num_clients > num_samples:
        got = f"{num_clients} clients for {num_samples} samples"
        raise InputError("more clients than samples", got=got, remedy="ask for fewer clients")
    if kind not in SIZES:
        raise InputError(f"unknown sizes {kind!r}", remedy=nearest(kind, SIZES))
    if kind == "equal":
        return num_samples // num_clients + (np.arange(num_clients) < num_samples % num_clients)
    positive("sigma", sigma)
    shares = np.exp(sigma * rng.standard_normal(num_clients))
    exact = (num_samples - num_clients) * shares / shares.sum()
    sizes = np.floor(exact).astype(np.int64)
    rest = num_samples - num_clients - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:rest]] += 1
    return 1 + sizes


def positive(name: str, value: float) -> None:
    """Refuse a parameter that is not a positive finite number.

    Raises:
        InputError: naming the parameter and its value.
    """
    if not (math.isfinite(value) and value > 0):
        raise InputError(name, expected="a positive number", got=str(value))
