"""Privacy cost of a client-level mechanism, (ε, δ) after any number of rounds, by dp-accounting's RDP accountant.

    cohort                  neighbours        mechanism of a round
    bernoulli, secret       add or remove     Poisson sampling with q, Gaussian z
    size, secret            replace one       |S| of N without replacement, Gaussian z/2, for two updates differ by 2C
    all clients             add or remove     Gaussian z
    others, public seed     as above          Gaussian z, or z/2, in the rounds of the client that takes part most
    any, noise by clients   replace one       Gaussian z/2, in the same rounds, or in all where they are secret
    any, masked sums        replace one       likewise; noise of clients adds up: Gaussian √m z/2, m ``survivors``

All compose by their Rényi divergences, each a vector over orders, which add up. The library is loaded here alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from math import ceil
from typing import Any

import numpy as np

from hpcfed.errors import InputError
from hpcfed.updates._mechanism import Mechanism

DIGITS = 4
"""Digits after the point of a noise multiplier that was solved for."""
LARGEST = 2.0**20
"""Noise multiplier beyond which none is looked for."""
Epsilon = Callable[[int], float]
"""From a round t to ε after it."""
Costs = tuple[np.ndarray, np.ndarray]
"""Orders, and a mechanism's Rényi divergence of each."""


def default_delta(count: int, of_what: str) -> float:
    """Return n^-1.1 of so many clients, or samples of a client.

    Raises:
        InputError: of one it is 1, and any mechanism has ε = 0 at δ = 1.
    """
    if count == 1:
        raise InputError(f"noise: delta, by default n^-1.1 of {of_what}", expected="below 1", got="1", remedy="set it")
    return count**-1.1


def accountant(mechanism: Mechanism, cohort: Callable[[int], np.ndarray]) -> Epsilon:
    """Return ε after round t as a function; `cohort` returns the clients of a round, asked for where they are public.

    Raises:
        InputError: dp-accounting is not installed.
    """
    loss, joined = _loss(mechanism), _Joined(cohort)

    @cache
    def epsilon(round: int) -> float:
        return loss(joined(round) if mechanism.counts_draws else round)

    return epsilon


def multiplier_for(mechanism: Mechanism, epsilon: float, cohort: Callable[[int], np.ndarray]) -> float:
    """Return the least noise multiplier, in steps of 10^-4, with which ε after the last round is at most `epsilon`.

    Raises:
        InputError: none is; or dp-accounting is not installed.
    """
    count = mechanism.rounds
    if mechanism.counts_draws:
        count = _Joined(cohort)(count)
        if not count:
            return 10.0**-DIGITS

    def spent(multiplier: float) -> float:
        return _loss(mechanism.with_multiplier(multiplier))(count)

    return least_multiplier(spent, epsilon)


def least_multiplier(spent: Callable[[float], float], epsilon: float) -> float:
    """Return the least noise multiplier, in steps of 10^-4, whose ε, `spent`, is at most a target.

    Raises:
        InputError: none is.
    """
    from scipy.optimize import brentq

    step, low, high = 10.0**-DIGITS, 0.5, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > LARGEST:
            raise InputError("noise: epsilon", expected="one that some noise reaches", got=f"{epsilon:g}")
    while low > step and spent(low) <= epsilon:
        low, high = low / 2, low
    if low <= step:
        return step
    near = ceil(brentq(lambda one: min(spent(one), 2 * LARGEST) - epsilon, low, high, xtol=step / 10) / step)
    while spent(near * step) > epsilon:
        near += 1
    while spent((near - 1) * step) <= epsilon:
        near -= 1
    return near / 10**DIGITS


class _Joined:
    """The rounds in which the client that has taken part most has taken part, up to any round."""

    def __init__(self, cohort: Callable[[int], np.ndarray]):
        self._cohort, self._counts, self._most = cohort, Counter[int](), [0]

    def __call__(self, round: int) -> int:
        while len(self._most) <= round:
            clients = self._cohort(len(self._most)).tolist()
            self._counts.update(clients)
            self._most.append(max([self._most[-1], *(self._counts[client] for client in clients)]))
        return self._most[round]


def _loss(mechanism: Mechanism) -> Callable[[int], float]:
    """Return ε of so many rounds of a mechanism, or of one client's so many."""
    multiplier = mechanism.seen_multiplier / 2 if mechanism.replaces else mechanism.seen_multiplier
    if not mechanism.is_amplified:
        costs = _costs(multiplier, replaces=mechanism.replaces)
    elif mechanism.replaces:
        costs = _costs(multiplier, replaces=True, of=(mechanism.num_clients, round(mechanism.expected)))
    else:
        costs = _costs(multiplier, rate=mechanism.fraction)
    return partial(_epsilon_of, costs, mechanism.delta)


def loss_of_poisson(rate: float, multiplier: float, delta: float) -> Callable[[int], float]:
    """Return ε of so many Gaussian mechanisms, each of a sample of this rate; add or remove one."""
    return partial(_epsilon_of, _costs(multiplier, rate=rate), delta)


def _epsilon_of(costs: Costs, delta: float, count: int) -> float:
    """Return ε of so many mechanisms of these costs."""
    _, rdp = _library()
    orders, divergences = costs
    with _quiet():
        return float(rdp.compute_epsilon(orders, divergences * count, delta)[0]) if count else 0.0


@cache
def _costs(multiplier: float, *, rate: float = 1.0, of: tuple[int, int] | None = None, replaces: bool = False) -> Costs:
    """Return a Gaussian mechanism's Rényi divergences and their orders, on a sample of a rate, or of m of N."""
    dp, rdp = _library()
    event = dp.GaussianDpEvent(multiplier)
    if of is not None:
        event = dp.SampledWithoutReplacementDpEvent(*of, event)
    elif rate < 1:
        event = dp.PoissonSampledDpEvent(rate, event)
    relation = dp.NeighboringRelation.REPLACE_ONE if replaces else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    one = rdp.RdpAccountant(neighboring_relation=relation)
    with _quiet():
        one.compose(event)
    return one.orders, one.rdp


def _library() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError as error:
        what = "noise is accounted for by dp-accounting, which is not installed"
        raise InputError(what, remedy="pip install 'dp-accounting>=0.6,<0.7'") from error
    return dp_accounting, rdp


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's lines on orders that it leaves out."""
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
