"""Partition schemes, one file each: assignments of one data set's samples to clients.

Every scheme is a pure function

    assign(labels, num_clients, rng, *, <its own options>) -> owner

with labels (n,), and owner (n,) int64: the client of each sample, so no sample can be lost or assigned twice.
A new scheme is a new file here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np

from hpcfed.config import registry

Scheme = Callable[..., np.ndarray]

SCHEMES: dict[str, Scheme] = {name: registry.entry(__name__, name).assign for name in registry.names(__name__)}


def options(scheme: Scheme) -> dict[str, object]:
    """Return the options a scheme takes, with their defaults."""
    parameters = inspect.signature(scheme).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
