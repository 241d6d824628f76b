"""How different the clients of a federation are, in two numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Skew:
    """Skew of labels and of sizes."""

    labels: float | None
    """Mean over clients with samples of ½ Σ_c |p_kc − p_c|, the total variation between the shares of classes at client
    k and among all samples: 0 where all clients are alike, near 1 where each has a rare class of its own; undefined
    without classes."""
    sizes: float
    """Standard deviation of the clients' sizes over their mean: 0 where they are equal."""

    def __str__(self) -> str:
        sizes = f"sizes {self.sizes:.2f} (standard deviation over mean)"
        if self.labels is None:
            return sizes
        return f"labels {self.labels:.2f} (mean total variation from all clients' labels, 0 to 1), {sizes}"


def skew_of(sizes: np.ndarray, counts: np.ndarray | None = None) -> Skew:
    """Return the skew of clients with these sizes, (N,), and numbers of samples by class, (N, K)."""
    spread = float(sizes.std() / sizes.mean()) if sizes.any() else 0.0
    if counts is None or not counts.any():
        return Skew(None, spread)
    own = counts[counts.sum(axis=1) > 0]
    shares = own / own.sum(axis=1, keepdims=True)
    return Skew(float(0.5 * np.abs(shares - own.sum(axis=0) / own.sum()).sum(axis=1).mean()), spread)
