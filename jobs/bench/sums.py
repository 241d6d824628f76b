"""Error of a round's mean, beside sums in the run's dtype, for |Δ| from 1e-30 to 1e30 and 2 to 2^21 clients.

    mpirun -n 3 python jobs/bench/sums.py [--most 2097152]

For each case: the l2 error of Δ̄ relative to the exact mean, that of plain sums (p_i Δ_i added in order in the run's
dtype), their ratio, and how often the round was run. The exact mean is computed with `math.fsum`. A hash of all means
ends the table: it is the same on any number of ranks. Several ranks print the hash alone, since equal bits have equal
errors.
"""

from __future__ import annotations

import argparse
import math
from itertools import product

import numpy as np
import torch
import xxhash

from hpcfed.ranks.world import World, connect
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.units import Magnitudes, exact_terms, suffice, units_for

COHORTS = 2, 10, 1000, 100_000, 2**21
POWERS = -30, -15, -8, -3, 0, 8, 15, 30
ENTRIES = 6


def mean(vectors: torch.Tensor, counts: np.ndarray, world: World) -> tuple[torch.Tensor, int]:
    """Return the mean of vectors (S, d) that a first round finds, and the attempts that it takes."""
    buffer = RoundBuffer(vectors.shape[1], vectors.dtype, vectors.device, world)
    units = Magnitudes(vectors.shape[1], vectors.dtype).predict({"delta": counts})["delta"]
    attempts = 0
    while True:
        attempts += 1
        buffer.open({"delta": units}, len(vectors))
        for place in range(world.rank, len(vectors), world.size):
            buffer.add(place, float(counts[place]), {"delta": vectors[place]}, loss_sum=0.0, steps=1)
        sums = buffer.reduce(0, 0.0)
        terms = exact_terms(sums.bounds["delta"], counts, vectors.shape[1])
        if suffice(units, terms, vectors.dtype):
            return sums.vectors["delta"], attempts
        units = units_for(terms, vectors.dtype)


def exact_sums(vectors: np.ndarray, sizes: np.ndarray) -> list[tuple[float, float]]:
    """Return Σ n_i x_i of each column as an unevaluated sum of two float64."""
    found = []
    for column in vectors.T.astype(np.float64):
        high = (column * 134217729.0) - (column * 134217729.0 - column)  # 26 bits, so that products are exact
        terms = np.concatenate([sizes * high, sizes * (column - high)]).tolist()
        first = math.fsum(terms)
        found.append((first, math.fsum([*terms, -first])))
    return found


def errors(vectors: torch.Tensor, sizes: np.ndarray, found: torch.Tensor) -> tuple[float, float]:
    """Return the relative l2 errors of `found` and of plain sums, against the exact mean by sizes (S,)."""
    weights = torch.from_numpy(sizes / sizes.sum()).to(vectors.dtype)
    plain = torch.zeros_like(vectors[0])
    for vector in vectors * weights[:, None]:
        plain += vector
    scale = 2.0 ** -math.frexp(float(vectors.abs().max()))[1]
    exact = exact_sums((vectors.double() * scale).numpy(), sizes)
    total = int(sizes.sum())

    def error(own: torch.Tensor) -> float:
        means = (own.double() * scale).tolist()
        off = [_off(mean, total, high, low) for mean, (high, low) in zip(means, exact, strict=True)]
        return math.hypot(*off) / math.hypot(*(high for high, _ in exact))

    return error(found), error(plain)


def _off(mean: float, total: int, high: float, low: float) -> float:
    """Return mean · total − (high + low)."""
    first = (mean * 134217729.0) - (mean * 134217729.0 - mean)
    return math.fsum([first * total, (mean - first) * total, -high, -low])


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of exact sums beside plain ones.")
    parser.add_argument("--most", type=int, default=2**21, help="largest cohort (2097152)")
    most, world, digest = parser.parse_args().most, connect(), xxhash.xxh3_64()
    torch.set_num_threads(1)
    if world.size == 1:
        print(f"{'dtype':9}{'|S|':>9} {'weights':9}{'|Δ|':>7}{'error':>11}{'plain':>11}{'ratio':>8}  attempts")
    worst = 0.0
    for dtype, number, equal in product((torch.float32, torch.float64), COHORTS, (True, False)):
        if number > most:
            continue
        for power in POWERS if number <= 1000 else (-30, -8, 30):
            rng = np.random.default_rng(number)
            vectors = torch.from_numpy(rng.normal(size=(number, ENTRIES)) * 10.0**power).to(dtype)
            sizes = np.ones(number, np.int64) if equal else rng.integers(1, 1000, size=number)
            found, attempts = mean(vectors, number * sizes / sizes.sum(), world)
            digest.update(found.numpy().data)
            if world.size > 1:
                continue
            ours, plain = errors(vectors, sizes, found)
            ratio = ours / plain if plain else math.inf if ours else 0.0
            worst = max(worst, ratio)
            row = f"{str(dtype)[6:]:9}{number:9} {'equal' if equal else 'unequal':9}{10.0**power:7.0e}"
            print(f"{row}{ours:11.2e}{plain:11.2e}{ratio:8.3f}  {attempts}", flush=True)
    if world.size == 1:
        print(f"largest ratio {worst:.3f}")
    if world.is_root:
        print(f"hash of all means {digest.hexdigest()}")


if __name__ == "__main__":
    main()
