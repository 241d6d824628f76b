"""FedProx's synthetic(α, β): α spreads the clients' models, β their features; a test set by the same clients.

Client k of N has n_k samples (x, y) with x in R^d and y in {0, …, K−1}; z stands for fresh standard normal numbers:

    n_k = 50 + ⌊exp(4 + 2 z)⌋
    y = argmax(softmax(W_k x + b_k))     W_k, b_k ~ N(u_k, 1) entry by entry     u_k ~ N(0, α²)
    x ~ N(v_k, Σ)                        v_k ~ N(B_k, 1) entry by entry          B_k ~ N(0, β²)
    Σ diagonal, Σ_jj = j^−1.2 for j = 1 … d
    iid: W and b ~ N(0, 1) for all clients, v_k = 0

The paper writes N(0, α); its authors' code takes α and β for standard deviations, and so they are here (of its values
0, 0.5 and 1 that matters for 0.5). u_k adds the same number to every logit of a sample, so α changes no label: each
client has its own model at any α. Of each client ⌊0.9 n_k⌋ samples are for training. The code draws without a
seed, so its numbers can't be reproduced: compare laws and orders. Their experiment: N = 30, d = 60, K = 10.

Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous networks", MLSys 2020,
section 5.1 and appendix C.1; data/synthetic_1_1/generate_synthetic.py of its code.
"""

from __future__ import annotations

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import DataSource, Origin
from data_prep.streams import stream
from data_prep.synthetic._draws import TRAIN_FRACTION, checked_spread, features, for_training, labels, models
from hpcfed.errors import InputError

NAME = "fedprox-synthetic"
SMALLEST = 50
LOG_MEAN, LOG_DEVIATION = 4, 2


def generate(
    seed: int,
    *,
    alpha: float | None = None,
    beta: float | None = None,
    iid: bool = False,
    clients: int = 30,
    dimension: int = 60,
    classes: int = 10,
) -> Dataset:
    """Return x (n, d) float64 and y (n,) int64, split into clients of adjacent rows, and their test samples.

    Args:
        seed: of every draw.
        alpha, beta: α and β, at least 0; None for 1.
        iid: one model and one law of the features for all clients; takes neither α nor β.
        clients, dimension, classes: N, d and K.

    Raises:
        InputError: α or β is negative, absurdly large, or set beside `iid`.
    """
    if not iid:
        alpha, beta = (checked_spread(f"{name} of {NAME}", value) for name, value in (("alpha", alpha), ("beta", beta)))
    elif (alpha, beta) != (None, None):
        raise InputError("alpha and beta have no effect with iid", remedy="leave them out")
    draws = stream(seed, f"{NAME}: sizes").lognormal(LOG_MEAN, LOG_DEVIATION, clients)
    sizes = SMALLEST + draws.astype(np.int64)
    own = models(alpha, clients, dimension, classes, stream(seed, f"{NAME}: models"))
    x, owner = features(beta, sizes, dimension, stream(seed, f"{NAME}: features"))
    return Dataset(
        name=NAME,
        task="classification",
        x=x,
        y=labels(x, sizes, *own),
        num_classes=classes,
        source={
            "generator": "FedProx, section 5.1: synthetic data",
            "alpha": alpha,
            "beta": beta,
            "iid": iid,
            "clients": clients,
            "dimension": dimension,
            "classes": classes,
            "train_fraction": TRAIN_FRACTION,
            "seed": seed,
        },
        owner=owner,
    ).with_tests(~for_training(NAME, seed, sizes))


SOURCES = {NAME: DataSource(generate, Origin("FedProx's synthetic(α, β), made from the seed"))}
