"""What synthetic sets share: linear models and features by client, their labels, and the samples for training."""

from __future__ import annotations

import numpy as np

from data_prep.streams import stream
from hpcfed.errors import InputError

DECAY = 1.2
LARGEST_SPREAD = 1e6
TRAIN_FRACTION = 0.9


def checked_spread(name: str, value: float | None) -> float:
    """Return a standard deviation, 1 for None.

    Raises:
        InputError: it is negative, absurdly large, or no number.
    """
    spread = 1.0 if value is None else float(value)
    if not 0 <= spread <= LARGEST_SPREAD:
        raise InputError(name, expected=f"a number from 0 to {LARGEST_SPREAD:g}", got=str(value))
    return spread


def deviations(dimension: int) -> np.ndarray:
    """Return the standard deviations of features, (d,): the roots of j^−1.2."""
    return np.sqrt(np.arange(1, dimension + 1) ** -DECAY)


def models(
    spread: float | None, num_clients: int, dimension: int, classes: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return W_k (N, d, K) and b_k (N, K): around a number of each client, or without a spread the same for all."""
    found = rng.standard_normal((1 if spread is None else num_clients, dimension + 1, classes))
    if spread is not None:
        found += rng.normal(0, spread, (num_clients, 1, 1))
    found = np.broadcast_to(found, (num_clients, dimension + 1, classes))
    return found[:, :-1], found[:, -1]


def features(
    spread: float | None, sizes: np.ndarray, dimension: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, d) of clients of these sizes, around the origin without a spread; and the owner of each, (n,)."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x = rng.standard_normal((len(owner), dimension)) * deviations(dimension)
    if spread is not None:
        x += rng.normal(rng.normal(0, spread, (len(sizes), 1)), 1, (len(sizes), dimension))[owner]
    return x, owner


def labels(x: np.ndarray, sizes: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the largest logit of each sample by its client's model, (n,); samples are adjacent by client."""
    own = np.split(x, np.cumsum(sizes)[:-1])
    return np.concatenate([np.argmax(rows @ weights[k] + bias[k], axis=1) for k, rows in enumerate(own)])


def for_training(name: str, seed: int, sizes: np.ndarray) -> np.ndarray:
    """Return a mask (n,): true for ⌊0.9 n_k⌋ samples of each client, drawn without replacement."""
    rng = stream(seed, f"{name}: training halves")
    return np.concatenate([rng.permutation(size) < int(TRAIN_FRACTION * size) for size in sizes])
