"""Error feedback: what was not sent is added to the next round's vector.

    p_i = v_i + e_i;      sent: C(p_i);      e_i ← p_i − C(p_i),  0 at the client's first participation

Reference: Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes",
ICML 2019, Algorithm 2.
"""

from __future__ import annotations

from hpcfed.types import State
from hpcfed.updates._base import Vectors


def no_errors(vectors: Vectors) -> State:
    """Return e_i = 0 for each vector."""
    return {name: vector.new_zeros(vector.shape) for name, vector in vectors.items()}


def with_errors(vectors: Vectors, errors: State) -> Vectors:
    """Return p_i of each vector; the vectors themselves without feedback."""
    return {name: vector + errors[name] for name, vector in vectors.items()} if errors else vectors


def next_errors(owed: Vectors, sent: Vectors, errors: State) -> State:
    """Return the next e_i; those of vectors that this round does not report stay."""
    return {**errors, **{name: owed[name] - sent[name] for name in owed}} if errors else errors
