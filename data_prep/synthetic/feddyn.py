"""FedDyn's synthetic classification: one source of heterogeneity at a time, its strength γ, no test set.

Client i of N holds n_i samples (x, y) with x in R^d and y in {0, …, K−1}:

    y = argmax(θ_iᵀ x + b_i)          x ~ N(ν_i, Σ)     Σ diagonal, Σ_jj = j^−1.2 for j = 1 … d

    type 0, homogeneous:   θ_i = θ, b_i = b for all clients, ~ N(0, 1)     ν_i = 0     n_i = 200
    type 1, models:        θ_i, b_i ~ N(μ_i, 1) entry by entry     μ_i ~ N(0, γ²)
    type 2, features:      ν_i ~ N(β_i, 1) entry by entry          β_i ~ N(0, γ²)
    type 3, sizes:         n_i = max(1, ⌊200 exp(γ z_i)⌋)          z_i ~ N(0, 1)

Types 1 to 3 differ from type 0 in their own line alone, also in the numbers drawn: each of the three has a separate
random stream. γ = 0 still gives every client its own model or features, of one law; and since μ_i adds the
same number to every logit of a sample, the γ of type 1 changes no label. The paper calls γ a variance and 200 the
average size; in its authors' code γ is a standard deviation and 200 the median, and so they are here. The paper prints
no γ; 1 reproduces the order of its methods. Labels have no noise, and no client is without a sample. Their experiment:
N = 20, d = 30, K = 5, and the metric is the loss on the training data.

Reference: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic
regularization", ICLR 2021, appendix A.1.1; utils_dataset.py of its code.
"""

from __future__ import annotations

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import DataSource, Origin
from data_prep.streams import stream
from data_prep.synthetic._draws import checked_spread, features, labels, models
from hpcfed.errors import InputError

NAME = "feddyn-synthetic"
HETEROGENEITY = ("homogeneous", "models", "features", "sizes")
MEDIAN_SIZE = 200
LARGEST_TOTAL = 10**8


def generate(
    seed: int,
    *,
    type: int = 0,
    gamma: float | None = None,
    clients: int = 20,
    dimension: int = 30,
    classes: int = 5,
) -> Dataset:
    """Return x (n, d) float64 and y (n,) int64, split into clients of adjacent rows; n = 200 N except in type 3.

    Args:
        seed: of every draw.
        type: 0, 1, 2 or 3, the paper's types of heterogeneity as above.
        gamma: γ ≥ 0 of that type; None for 1. Type 0 has none.
        clients, dimension, classes: N, d and K.

    Raises:
        InputError: an unknown type, a γ that is negative or absurdly large, or a γ for type 0.
    """
    gamma = _strength(type, gamma)
    of_models, of_features, of_sizes = (gamma if type == kind else None for kind in (1, 2, 3))
    sizes = _sizes(of_sizes, clients, stream(seed, f"{NAME}: sizes"))
    own = models(of_models, clients, dimension, classes, stream(seed, f"{NAME}: models"))
    x, owner = features(of_features, sizes, dimension, stream(seed, f"{NAME}: features"))
    return Dataset(
        name=NAME,
        task="classification",
        x=x,
        y=labels(x, sizes, *own),
        num_classes=classes,
        source={
            "generator": "FedDyn, appendix A.1.1: synthetic data",
            "type": type,
            "heterogeneity": HETEROGENEITY[type],
            "gamma": gamma,
            "clients": clients,
            "dimension": dimension,
            "classes": classes,
            "seed": seed,
        },
        owner=owner,
    )


def _strength(type: int, gamma: float | None) -> float | None:
    """Return γ, checked; None for type 0."""
    if type not in range(len(HETEROGENEITY)):
        kinds = ", ".join(f"{kind} ({what})" for kind, what in enumerate(HETEROGENEITY))
        raise InputError("type of heterogeneity", expected=kinds, got=str(type))
    if type == 0:
        if gamma is not None:
            raise InputError("gamma has no effect with type 0, which is homogeneous", remedy="leave it out")
        return None
    return checked_spread("gamma", gamma)


def _sizes(gamma: float | None, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Return n_i (N,) int64: 200 without a γ."""
    if gamma is None:
        return np.full(num_clients, MEDIAN_SIZE)
    drawn = np.maximum(1, MEDIAN_SIZE * rng.lognormal(0, gamma, num_clients))
    if drawn.sum() > LARGEST_TOTAL:
        raise InputError(f"gamma {gamma:g} makes {drawn.sum():.2g} samples", remedy="ask for a smaller gamma")
    return drawn.astype(np.int64)


SOURCES = {NAME: DataSource(generate, Origin("FedDyn's synthetic classification, made from the seed"))}
