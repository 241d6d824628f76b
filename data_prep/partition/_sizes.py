"""Client sizes, for the schemes that fix them in advance."""

from __future__ import annotations

import math

import numpy as np

from hpcfed.errors import InputError, counted, nearest

SIZES = ("equal", "lognormal")
DRAWS = 1000
SIGMA = 0.3
"""σ of FedDyn's unbalanced splits."""
LARGEST_LOGARITHM = 600
"""Of a share of the samples: exp of more, and sums of them, overflow."""


def draw(
    kind: str, sigma: float, num_samples: int, num_clients: int, rng: np.random.Generator, min_samples: int = 1
) -> np.ndarray:
    """Return (N,) int64 sizes, each at least `min_samples`, that sum to `num_samples`.

    ``equal``: the same up to one. ``lognormal``: proportional to exp(σ z), z ~ N(0, 1), as FedDyn's unbalanced splits,
    rounded by largest remainders. σ is the standard deviation of the sizes' logarithms; the paper's 0.3, "standard
    deviation of data amounts", is 0.31 of the mean size for the sizes themselves: √(exp(σ²) − 1). Sizes below
    `min_samples` are raised to it, and the other clients share the rest in the same proportions.

    Raises:
        InputError: not enough samples for the clients, an unknown kind, or a σ that is not positive.

    Reference: Acar et al., ICLR 2021, section 3 and appendix A.1; utils_dataset.py:122-138 of its code.
    """
    enough(num_samples, num_clients, max(min_samples, 1))
    if kind not in SIZES:
        raise InputError(f"unknown --sizes {kind!r}", remedy=nearest(kind, SIZES))
    if kind == "equal":
        return num_samples // num_clients + (np.arange(num_clients) < num_samples % num_clients)
    positive("sigma", sigma)
    z = rng.standard_normal(num_clients)
    if np.abs(z).max() > LARGEST_LOGARITHM / sigma:
        z -= z.max()
    with np.errstate(over="ignore"):  # to 0 shares
        shares = np.exp(sigma * z)
    exact = _with_a_floor(shares, num_samples, max(min_samples, 1))
    sizes = np.floor(exact).astype(np.int64)
    rest = num_samples - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:rest]] += 1
    return sizes


def _with_a_floor(shares: np.ndarray, total: int, floor: int) -> np.ndarray:
    """Return (N,) numbers of sum `total`, proportional to `shares` except for those raised to `floor`."""
    lifted = np.zeros(len(shares), bool)
    while not lifted.all():
        scale = (total - floor * lifted.sum()) / shares[~lifted].sum()
        below = ~lifted & (scale * shares < floor)
        if not below.any():
            return np.where(lifted, floor, scale * shares)
        lifted |= below
    return np.full(len(shares), float(floor))


def counts_of(shares: np.ndarray, num_samples: int) -> np.ndarray:
    """Return (N,) counts that follow shares (N,) and sum to `num_samples`: cuts at the rounded running sum."""
    total = shares.sum()
    cuts = np.rint(np.cumsum(shares if np.isclose(total, 1, atol=1e-12) else shares / total) * num_samples).astype(
        np.int64
    )
    cuts[-1] = num_samples
    return np.diff(cuts, prepend=0)


def none_drawn(num_clients: int, min_samples: int) -> InputError:
    """Return the error for `DRAWS` draws that all left a client with fewer samples."""
    return InputError(
        f"none of {DRAWS} draws gave each of {counted(num_clients, 'client')} {counted(min_samples, 'sample')}",
        remedy="ask for a larger --alpha, fewer clients, or a smaller --min-samples",
    )


def by_class(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the samples (n,) in the order of their classes, shuffled within each."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def enough(num_samples: int, num_clients: int, min_samples: int) -> None:
    """Refuse more clients than there are samples for.

    Raises:
        InputError: with both numbers.
    """
    if num_clients * min_samples > num_samples:
        least = f" of at least {min_samples}" if min_samples > 1 else ""
        got = f"{counted(num_clients, 'client')}{least} for {counted(num_samples, 'sample')}"
        raise InputError("more clients than samples", got=got, remedy="ask for fewer clients")


def positive(name: str, value: float) -> None:
    """Refuse an option that is not a positive finite number.

    Raises:
        InputError: naming the option and its value.
    """
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"--{name}", expected="a positive number", got=str(value))
