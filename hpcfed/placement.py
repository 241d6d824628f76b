"""Which rank trains which client.

A client's home is fixed for the run: homes are balanced by samples, and a client with a state stays at home. Where
clients have no state any rank may train any of them, so each round's cohort is spread evenly instead. Results do not
depend on it, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def homes(sizes: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return each client's home rank, (N,) int64, from the clients' samples, (N,).

    Clients are dealt largest first, back and forth over the ranks, so that any two ranks differ by at most the samples
    of one client, and N log N work is enough for a million clients.
    """
    back_and_forth = np.concatenate([np.arange(num_ranks), np.arange(num_ranks)[::-1]])
    owner = np.empty(len(sizes), dtype=np.int64)
    owner[np.argsort(-sizes, kind="stable")] = np.resize(back_and_forth, len(sizes))
    return owner


def spread(costs: Sequence[float], home: Sequence[int], num_ranks: int) -> list[int]:
    """Return a rank for each cohort member: longest first, at home while home has room, else where least is to do.

    Args:
        costs: expected work of each member, in any unit, (S,).
        home: home rank of each member, (S,); trained there its data is more often in memory already.
        num_ranks: P.
    """
    fair_share = sum(costs) / num_ranks
    load = [0.0] * num_ranks
    chosen = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        rank = home[place]
        if load[rank] + costs[place] > fair_share:
            rank = min(range(num_ranks), key=load.__getitem__)
        chosen[place] = rank
        load[rank] += costs[place]
    return chosen
