"""The time of a round on P ranks: a model of five parameters, fitted to measurements by least squares.

    T(P, S) = fixed + member·S + placing(P, S) + sample·W + 2⌈log₂ P⌉·latency + 2(P − 1)/P·B·byte

W is the number of samples that the slowest rank visits, S the cohort's size, and B the bytes of the round's one
Allreduce, which is assumed to be Rabenseifner's: a reduce-scatter and an allgather of ⌈log₂ P⌉ messages each. `placing`
is the time in which every rank assigns the whole cohort to ranks. It is not fitted but measured, for any P and S, on
the machine that computes the prediction. Every rank has its own core or GPU; contention for memory, power or the
network is not modelled.

`latency` and `byte` come from the smallest and the largest bare Allreduces, `sample` from the slowest rank's local
seconds, `member` from the rest of the round, and `fixed` from both. No parameter is negative; the fit minimizes errors
relative to the measured Allreduce or round.

Reference: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpcfed.lab.scaling.measure import RankTimes, Sample
from hpcfed.lab.scaling.plan import Load


@dataclass(frozen=True)
class CostModel:
    """The cost model of a round: its five fitted parameters.

    Attributes:
        fixed: seconds of every round, on every rank: server step, record.
        member: seconds for each client of the cohort, on every rank.
        sample: seconds for each sample that a rank visits in training.
        latency: seconds for each message of the Allreduce.
        byte: seconds for each byte sent in the Allreduce; the inverse of the bandwidth.
    """

    fixed: float
    member: float
    sample: float
    latency: float
    byte: float

    def allreduce(self, ranks: int, num_bytes: float) -> float:
        """Return the modelled seconds of an Allreduce of `num_bytes` bytes."""
        latency, volume = _allreduce_terms(ranks, num_bytes)
        return self.latency * latency + self.byte * volume

    def round(self, ranks: int, cohort: float, load: Load, num_bytes: float) -> float:
        """Return the modelled seconds of a round with `cohort` clients and an Allreduce of `num_bytes` bytes."""
        everywhere = self.fixed + self.member * cohort + load.placing
        return everywhere + self.sample * load.slowest + self.allreduce(ranks, num_bytes)

    def on(self, latency: float, byte: float) -> CostModel:
        """Return the model of the same machines on another network, with its `latency` and `byte`."""
        return replace(self, latency=latency, byte=byte)

    def of(self, sample: Sample) -> float:
        """Return the modelled seconds of a measured round."""
        return self.round(sample.ranks, sample.cohort, sample.load, bytes_of(sample))


@dataclass(frozen=True)
class TestedPrediction:
    """A measured round that the fit did not use, and its prediction, in seconds; `what` names the test."""

    what: str
    ranks: int
    cohort: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement; positive if the predicted time is too long."""
        return self.predicted / self.measured - 1


def fit(measured: Sequence[RankTimes]) -> CostModel:
    """Return the model fitted to all samples that are neither held out nor crowded, of which there is at least one."""
    samples = [sample for one in measured for sample in one.samples if _fits(sample)]
    probes = [(one.ranks, size, seconds) for one in measured if _fits_any(one) for size, seconds in one.allreduce]
    latency, byte = network_of(probes)
    network = CostModel(0.0, 0.0, 0.0, latency, byte)
    total = [sample.seconds["total"] for sample in samples]
    local = [sample.seconds["local"] for sample in samples]
    begin, each = _least_squares([(1.0, sample.load.slowest) for sample in samples], local, total)
    known = [network.allreduce(sample.ranks, bytes_of(sample)) + sample.load.placing for sample in samples]
    left = [sample.seconds["rest"] - seconds for sample, seconds in zip(samples, known, strict=True)]
    end, member = _least_squares([(1.0, sample.cohort) for sample in samples], left, total)
    return CostModel(begin + end, member, each, latency, byte)


def network_of(probes: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Return the latency and the seconds per byte that best fit bare Allreduces, `probes` of (ranks, bytes, seconds).

    For each number of ranks, only the smallest and the largest Allreduce are used: in between, MPI libraries switch
    algorithms, and a fit to all sizes would be wrong at both ends.
    """
    sizes = {ranks: [size for other, size, _ in probes if other == ranks] for ranks, *_ in probes}
    ends = [probe for probe in probes if probe[1] in (min(sizes[probe[0]]), max(sizes[probe[0]]))]
    probed = [seconds for *_, seconds in ends]
    return _least_squares([_allreduce_terms(ranks, size) for ranks, size, _ in ends], probed, probed)


def held_out_errors(measured: Sequence[RankTimes]) -> list[TestedPrediction]:
    """Return tests of the model: predictions of rounds that the fit did not use.

    For each number of ranks, its rounds are predicted by a fit to the other numbers of ranks; rounds of held-out
    settings are predicted by a fit to all that were not held out.
    """
    usable = [one for one in measured if _fits_any(one)]
    tested = []
    for one in usable if len(usable) > 1 else []:
        model = fit([other for other in usable if other is not one])
        what = f"{one.ranks} rank{'s' if one.ranks > 1 else ''}, by the others"
        tested += [_tested(what, model, sample) for sample in one.samples if _fits(sample)]
    if usable:
        model = fit(usable)
        held_out = [sample for one in usable for sample in one.samples if sample.held_out and not sample.crowded]
        tested += [_tested("another cohort", model, sample) for sample in held_out]
    return tested


def bytes_of(sample: Sample) -> float:
    """Return the bytes of the Allreduce in a measured round."""
    return reduced_bytes(sample, sample.ranks, sample.cohort)


def reduced_bytes(like: Sample, ranks: int, cohort: float) -> float:
    """Return the bytes of a round's Allreduce on `ranks` ranks, for the model and method measured in `like`."""
    return like.vector_bytes + like.client_bytes * cohort + like.rank_bytes * ranks


def _fits(sample: Sample) -> bool:
    return not (sample.held_out or sample.crowded)


def _fits_any(one: RankTimes) -> bool:
    return any(_fits(sample) for sample in one.samples)


def _tested(what: str, model: CostModel, sample: Sample) -> TestedPrediction:
    return TestedPrediction(what, sample.ranks, sample.cohort, sample.seconds["total"], model.of(sample))


def _allreduce_terms(ranks: int, num_bytes: float) -> tuple[float, float]:
    return 2.0 * math.ceil(math.log2(ranks)), 2.0 * (ranks - 1) / ranks * num_bytes


def _least_squares(
    terms: Sequence[tuple[float, float]], seconds: Sequence[float], scale: Sequence[float]
) -> tuple[float, float]:
    """Return nonnegative factors of two terms, (n, 2), fitted to `seconds`, (n,); errors are relative to `scale`, (n,).

    Both terms are scaled to the same norm first; if they are collinear, the second factor is 0.
    """
    from scipy.optimize import nnls  # slow to import

    if not terms:
        return 0.0, 0.0
    relative = np.array(terms) / np.array(scale)[:, None]
    lengths = np.linalg.norm(relative, axis=0)
    lengths[lengths == 0] = 1
    fitted, _ = nnls(relative / lengths, np.array(seconds) / np.array(scale))
    first, second = fitted / lengths
    return float(first), float(second)
