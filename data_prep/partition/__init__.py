"""Partition schemes, one file each: assignments of one data set's samples to clients.

Every scheme is a pure function

    assign(labels, num_clients, rng, *, <its own options>) -> owner

with labels (n,), and owner (n,) int64: the client of each sample, so no sample can be lost or assigned twice.
To add a scheme, write its file and name it in `SCHEMES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np

from data_prep.partition import dirichlet_class, dirichlet_client, iid, iid_per_class, shards

Scheme = Callable[..., np.ndarray]

SCHEMES: dict[str, Scheme] = {
    "iid": iid.assign,
    "iid-per-class": iid_per_class.assign,
    "dirichlet-client": dirichlet_client.assign,
    "dirichlet-class": dirichlet_class.assign,
    "shards": shards.assign,
}


def options(scheme: Scheme) -> dict[str, object]:
    """Return the options a scheme takes, with their defaults."""
    parameters = inspect.signature(scheme).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
