"""The result of a scaling study: measurements beside the model, tests of the model, and predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hpcfed.config.recipe import Recipe
from hpcfed.errors import counted
from hpcfed.lab.scaling.measure import RankTimes, Sample
from hpcfed.lab.scaling.model import CostModel, TestedPrediction, fit, held_out_errors, reduced_bytes
from hpcfed.lab.scaling.network import Network
from hpcfed.lab.scaling.plan import Load, left_out, load

TOLERATED = 0.3
"""Largest relative error on held-out measurements at which predictions are still made."""
SURE = 0.1
"""Seconds of a round that is long enough for interruptions by the machine, of some milliseconds, to matter little."""
MAX_EXTRAPOLATION = 8
"""Predictions for more than this many times the largest measured cohort carry a caveat: the cost of each client of the
cohort, hardly distinguishable from noise in long rounds, is multiplied by as much."""


@dataclass(frozen=True)
class ScalingRow:
    """A round on one number of ranks, measured or predicted.

    Attributes:
        ranks, cohort: number of ranks, and clients per round.
        seconds: measured seconds of a round; None for a prediction.
        modelled: seconds of a round by the model; None if no model was fitted or ranks shared cores.
        speed: rounds per second, measured or predicted.
        efficiency: time of a round on R ranks, the fewest measured, divided by its time on `ranks`; in strong scaling,
            also divided by `ranks` / R.
        communication: fraction of the round spent in the Allreduce (measured: the timer ``reduce``), without waiting
            for slower ranks.
        imbalance: work of the slowest rank divided by the ranks' average.
        interval: for a prediction, least and largest seconds of the round if the model errs at most as in its tests;
            None for a measured round, or if there were no tests.
        note: a caveat; "" if none.
    """

    ranks: int
    cohort: float
    seconds: float | None
    modelled: float | None
    speed: float
    efficiency: float
    communication: float
    imbalance: float
    note: str = ""
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ScalingStudy:
    """The result of a scaling study.

    Attributes:
        name, mode: the recipe's name; ``strong`` or ``weak``.
        machine: as in `RankTimes`, of the measurement on the fewest ranks.
        rows, predictions: measured and predicted rounds.
        tested: the tests of the model, see `held_out_errors`.
        model: the fitted cost model; None if ranks shared cores in all measurements.
        clients: number of clients in the predictions.
        refused: why requested predictions were not made; "" if all were made, or none requested.
        network: the network of the predictions; None if it is the measured one.
        basis: the measurements that the model was fitted to, in words.
    """

    name: str
    mode: str
    machine: dict[str, Any]
    rows: list[ScalingRow]
    model: CostModel | None
    tested: list[TestedPrediction]
    predictions: list[ScalingRow]
    clients: int
    refused: str = ""
    network: Network | None = None
    basis: str = ""

    @property
    def error(self) -> float | None:
        """The largest relative error, without sign, of the predictions `tested`; None if there are none."""
        return max((abs(entry.error) for entry in self.tested), default=None)

    def plain(self) -> dict[str, Any]:
        """Return the study as plain data for JSON, times in seconds."""
        errors = [{**asdict(entry), "error": entry.error} for entry in self.tested]
        return {**asdict(self), "tested": errors}


def study(
    recipe: Recipe,
    mode: str,
    measured: Sequence[RankTimes],
    sizes: np.ndarray,
    predict: Sequence[int] = (),
    cohort: int | None = None,
    clients: int | None = None,
    network: Network | None = None,
) -> ScalingStudy:
    """Return a study: measurements, the model fitted to them, tests of it, and predictions for other numbers of ranks.

    Args:
        recipe: the measured recipe, resolved.
        mode: ``strong`` or ``weak``.
        measured: measurements on at least one number of ranks, fewest ranks first.
        sizes: sample counts of the recipe's clients, (N,).
        predict: numbers of ranks to predict.
        cohort: cohort size of the predictions, over all ranks; by default the measured one, in ``weak`` mode the
            measured one per rank times the number of ranks.
        clients: number of clients in the predictions, whose sample counts repeat `sizes`; by default N, or more if
            the largest cohort needs them.
        network: network of the predictions; by default the measured one.
    """
    usable = [one for one in measured if not one.samples[0].crowded]
    model = fit(usable) if usable else None
    first = measured[0].samples[0]
    rows = [_row(one.samples[0], first, mode, model) for one in measured]
    per_rank = first.cohort / first.ranks
    asked = [(ranks, cohort or round(per_rank * ranks if mode == "weak" else first.cohort)) for ranks in predict]
    num_clients = clients or max([len(sizes), *(size + left_out(recipe) for _, size in asked)])
    many = np.resize(sizes, num_clients)
    base = ScalingStudy(recipe.name, mode, measured[0].machine, rows, model, held_out_errors(measured), [], num_clients)
    base = replace(base, network=network, basis=_basis(usable))
    if not asked:
        return base
    if model is None:
        return replace(base, refused="every measurement had to share cores, which no model describes")
    if base.error is not None and not base.error <= TOLERATED:
        why = (
            f"the fit is {base.error:.0%} wrong on what it was not fitted to, and more than {TOLERATED:.0%} is no basis"
        )
        return replace(base, refused=f"{why}; {_remedy(usable, len(sizes) - left_out(recipe))}")
    if network is not None:
        model = model.on(network.latency, network.byte)
    predictions = [_predicted(recipe, model, many, ranks, size, measured, mode) for ranks, size in asked]
    for place, row in enumerate(predictions):
        note = _doubts(row, usable, network)
        predictions[place] = replace(row, interval=_interval(row, base.tested), note=note)
    return replace(base, predictions=predictions)


def _remedy(measured: Sequence[RankTimes], num_clients: int) -> str:
    """Return advice for a better fit, with the options to try."""
    if all(len(one.samples) == 1 for one in measured):
        return (
            "cohorts of a single size do not tell the cost of a round from that of a sample; in a schedule's place "
            "give 'cohort.schedule=null cohort.size=16', for which a quarter and a half are measured too"
        )
    loads = [(one.machine.get("load", 0.0), one.ranks / one.samples[0].hosts) for one in measured]
    load, ranks = max(loads, key=lambda pair: pair[0] - pair[1])
    busy = f", not at a load of {load:g} beside {counted(math.ceil(ranks), 'rank')}" if load > ranks + 1 else ""
    quiet = f"where nothing else runs{busy}"
    shortest = min((one.samples[0] for one in measured), key=lambda sample: sample.seconds["total"])
    seconds, rounds = shortest.seconds["total"], f"--rounds {2 * measured[0].rounds} --output FOLDER"
    size = min(num_clients, math.ceil(shortest.cohort * SURE / seconds))
    if seconds < SURE and size > shortest.cohort:
        long = f"{1e3 * SURE:.0f} ms are better than rounds of {1e3 * seconds:.2g} ms"
        return f"{quiet}, measure longer rounds, and more: {long} (cohort.size={size} {rounds})"
    return f"{quiet}, measure more rounds ({rounds})"


def _basis(measured: Sequence[RankTimes]) -> str:
    """Return a description of the measurements behind predictions; "" if there are none."""
    if not measured:
        return ""
    samples = [sample for one in measured for sample in one.samples if not sample.crowded]
    ranks = ", ".join(str(one.ranks) for one in measured)
    hosts = max(sample.hosts for sample in samples)
    fitted = sum(not sample.held_out for sample in samples)
    held_out = len(samples) - fitted
    where = f"{hosts} host{'s' * (hosts > 1)}, {measured[0].machine.get('cpu', 'an unknown processor')}"
    settings = f"{fitted} settings fitted and {held_out} held out, {measured[0].rounds} rounds each"
    return f"{settings}, on {ranks} ranks of {where}"


def _interval(row: ScalingRow, tested: Sequence[TestedPrediction]) -> tuple[float, float] | None:
    if not tested or row.modelled is None:
        return None
    errors = [entry.error for entry in tested]
    return row.modelled / (1 + max(*errors, 0.0)), row.modelled / (1 + min(*errors, 0.0))


def _row(sample: Sample, first: Sample, mode: str, model: CostModel | None) -> ScalingRow:
    seconds, base = sample.seconds["total"], first.seconds["total"]
    growth = sample.ranks / first.ranks if mode == "strong" else 1.0
    return ScalingRow(
        ranks=sample.ranks,
        cohort=sample.cohort,
        seconds=seconds,
        modelled=model.of(sample) if model is not None and not sample.crowded else None,
        speed=1 / seconds,
        efficiency=base / (seconds * growth),
        communication=sample.seconds["reduce"] / seconds,
        imbalance=sample.imbalance,
        note=f"{sample.ranks} ranks share {sample.cores * sample.hosts} cores: not fitted" if sample.crowded else "",
    )


def _predicted(
    recipe: Recipe,
    model: CostModel,
    sizes: np.ndarray,
    ranks: int,
    cohort: int,
    measured: Sequence[RankTimes],
    mode: str,
) -> ScalingRow:
    first = measured[0].samples[0]
    growth = ranks / first.ranks

    def modelled(ranks: int, cohort: int) -> tuple[float, float, Load]:
        work, num_bytes = load(recipe, sizes, ranks, cohort), reduced_bytes(first, ranks, cohort)
        return model.round(ranks, cohort, work, num_bytes), model.allreduce(ranks, num_bytes), work

    seconds, allreduce, work = modelled(ranks, cohort)
    base, *_ = modelled(first.ranks, cohort if mode == "strong" else max(1, round(cohort / growth)))
    return ScalingRow(
        ranks=ranks,
        cohort=cohort,
        seconds=None,
        modelled=seconds,
        speed=1 / seconds,
        efficiency=base / (seconds * (growth if mode == "strong" else 1.0)),
        communication=allreduce / seconds,
        imbalance=work.slowest / work.average if work.average else 1.0,
    )


def _doubts(row: ScalingRow, measured: Sequence[RankTimes], network: Network | None) -> str:
    """Return the caveats of a prediction; "" if measurements support it."""
    samples = [sample for one in measured for sample in one.samples]
    hosts, ranks = max(sample.hosts for sample in samples), max(sample.ranks for sample in samples)
    cohort = max(sample.cohort for sample in samples)
    doubts = []
    if network is not None:
        doubts.append("another network than measured")
    elif hosts == 1 and row.ranks > samples[0].cores:
        doubts.append("not verified on a network")
    elif row.ranks > ranks:
        doubts.append(f"beyond the {ranks} ranks measured")
    if row.cohort > MAX_EXTRAPOLATION * cohort:
        doubts.append(f"{row.cohort / cohort:.0f} × the cohort measured")
    return "; ".join(doubts)
