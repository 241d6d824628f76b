"""What every rank computes for all ranks in a round, on 64, 1,024 and 4,096 of them, by calling it in one process.

    python jobs/bench/many_ranks.py          half a minute

Cohorts have as many members as there are ranks, of four times as many clients. Prints CPU milliseconds, the least of
some rounds, and how many members are trained away from home.
"""

from __future__ import annotations

import time

import numpy as np

from hpcfed.ranks.placement import Placement, homes
from hpcfed.ranks.pulse import neighbours
from hpcfed.reduce.slots import RANK_SLOT

RANKS = (64, 1024, 4096)
ROUNDS = 12
SIZES = {"equal": 0.0, "lognormal": 1.0}
"""Standard deviation of the logarithm of clients' sizes."""


def placing(ranks: int, deviation: float, spread_of_speeds: float) -> tuple[float, float, float]:
    """Return milliseconds to place a cohort and to learn from its times, and the mean number of members away."""
    rng = np.random.default_rng(ranks)
    sizes = np.maximum(1, 150 * rng.lognormal(0, deviation, 4 * ranks)).astype(np.int64)
    speeds = rng.normal(1, spread_of_speeds, ranks).clip(0.5)
    placement = Placement(homes(sizes, ranks), ranks, balanced=True)
    places, learns, away = [], [], []
    for _ in range(ROUNDS):
        clients = np.sort(rng.choice(len(sizes), ranks, replace=False))
        samples, steps = sizes[clients], -(-sizes[clients] // 10)
        started = time.process_time()
        chosen = placement.place(clients, samples, steps)
        placed = time.process_time()
        away.append(int(np.sum(chosen != placement.home_of(clients))))
        seconds = 1e-4 * np.bincount(chosen, samples, ranks) / speeds
        began = time.process_time()
        placement.learn(chosen, samples, steps, seconds)
        learns.append(time.process_time() - began)
        places.append(placed - started)
    return 1e3 * min(places), 1e3 * min(learns), float(np.mean(away))


def main() -> None:
    """Print the table."""
    print("ranks  clients    speeds  placing ms  learning ms  away from home")
    for ranks in RANKS:
        for name, deviation in SIZES.items():
            for spread_of_speeds in (0.0, 0.03):
                place, learn, away = placing(ranks, deviation, spread_of_speeds)
                speeds = f"± {spread_of_speeds:.0%}"
                print(f"{ranks:5}  {name:9}  {speeds:>6}  {place:10.2f}  {learn:11.2f}  {away:14.0f}", flush=True)
    print("ranks  partners of signs of life  bytes of all ranks in an Allreduce")
    for ranks in RANKS:
        partners = max(len(neighbours(rank, ranks)) for rank in range(ranks))
        print(f"{ranks:5}  {partners:25}  {RANK_SLOT.itemsize * ranks:34}")


if __name__ == "__main__":
    main()
