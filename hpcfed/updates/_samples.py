"""The mechanism that hides samples, DP-SGD at each client, and what it costs: ε of the site that pays most.

    site i     Poisson sampling with q_i = B / n_i, Gaussian z, in each of its steps so far
               public minibatches: Gaussian z alone, as if a sample were in each of them

A site's sample is hidden by what this site does. n_i are public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from hpcfed.updates._accounting import Epsilon, least_multiplier, loss_of_poisson
from hpcfed.updates._mechanism import generator_of_noise

Work = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""From a round to its clients, (S,), and their steps, (S,)."""


@dataclass(frozen=True)
class SampleMechanism:
    """The noise of clients' steps.

    Attributes:
        clip: C, of a sample's gradient.
        multiplier: z; 0 where it is to be solved for.
        delta: δ.
        rounds: T.
        rates: q_i of each client, (N,); 0 without samples.
        is_secret: whether minibatches are drawn from a secret seed.
    """

    clip: float
    multiplier: float
    delta: float
    rounds: int
    rates: tuple[float, ...]
    is_secret: bool

    @property
    def drawn(self) -> str:
        """The sampling in words."""
        rates = [rate for rate in self.rates if rate]
        how = f"minibatches of each site's samples, each with probability {min(rates):.3g} to {max(rates):.3g}"
        return f"{how}, {'secretly' if self.is_secret else 'from a public seed, so without amplification'}"

    @property
    def neighbours(self) -> str:
        """The neighbouring relation in words."""
        return "add or remove one sample"

    def facts(self) -> dict[str, Any]:
        """Return what ``environment.json``, the certificate, the report and the card say of it."""
        return {
            "level": "sample",
            "noise_by": "each client",
            "neighbours": self.neighbours,
            "delta": self.delta,
            "noise_multiplier": self.multiplier,
            "clip": self.clip,
            "cohorts": self.drawn,
            "accountant": "RDP, by dp-accounting; the largest ε of any site",
            "noise": generator_of_noise(self.is_secret),
            "withheld": ["local_loss"],
        }


def sample_accountant(mechanism: SampleMechanism, work: Work) -> Epsilon:
    """Return ε after round t, the largest of all sites.

    Raises:
        InputError: dp-accounting is not installed.
    """
    steps = _Steps(work, len(mechanism.rates))
    return _epsilon(mechanism, steps)


def sample_multiplier_for(mechanism: SampleMechanism, epsilon: float, work: Work) -> float:
    """Return the least noise multiplier with which ε after the last round is at most `epsilon`.

    Raises:
        InputError: none is; or dp-accounting is not installed.
    """
    steps = _Steps(work, len(mechanism.rates))

    def spent(multiplier: float) -> float:
        return _epsilon(replace(mechanism, multiplier=multiplier), steps)(mechanism.rounds)

    return least_multiplier(spent, epsilon)


def _epsilon(mechanism: SampleMechanism, steps: _Steps) -> Epsilon:
    rates = np.array(mechanism.rates) if mechanism.is_secret else np.ceil(mechanism.rates)

    @cache
    def loss(rate: float) -> Callable[[int], float]:
        return loss_of_poisson(rate, mechanism.multiplier, mechanism.delta)

    @cache
    def epsilon(round: int) -> float:
        taken = steps(round)
        return max((loss(rate)(count) for rate, count in _costliest(rates, taken)), default=0.0)

    return epsilon


def _costliest(rates: np.ndarray, counts: np.ndarray) -> Iterator[tuple[float, int]]:
    """Yield the q and steps of sites than which no other has at least as much of both."""
    most = 0
    for place in np.lexsort((-counts, -rates)).tolist():
        if rates[place] > 0 and counts[place] > most:
            most = int(counts[place])
            yield float(rates[place]), most


class _Steps:
    """The steps that each client has taken up to any round."""

    def __init__(self, work: Work, num_clients: int):
        self._work, self._taken = work, [np.zeros(num_clients, np.int64)]

    def __call__(self, round: int) -> np.ndarray:
        while len(self._taken) <= round:
            clients, steps = self._work(len(self._taken))
            now = self._taken[-1].copy()
            now[clients] += steps
            self._taken.append(now)
        return self._taken[round]
