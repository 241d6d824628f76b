"""Estimate of a run's time and memory on P ranks, from training a few clients in this process.

Measured on one core or GPU: training time per sample, times of a server step and of an evaluation, and memory.
Computed for P ranks: the load of each rank, from the cohorts that the recipe draws, and the bytes of samples, states,
messages and files.
Assumed: the bandwidth of an Allreduce between the ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import prod
from statistics import fmean
from typing import Any

import numpy as np
import psutil
from numpy.typing import ArrayLike
from torch import Tensor

from hpcfed.assembly import assemble
from hpcfed.cluster.doctor.probe import seconds_of
from hpcfed.cohort import Cohort, Cohorts
from hpcfed.config.recipe import Recipe
from hpcfed.errors import Diverged, InputError
from hpcfed.parts import Parts
from hpcfed.ranks.accelerators import accelerator
from hpcfed.ranks.placement import homes, loads_of, spread
from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import KINDS
from hpcfed.reduce.masks import Masks
from hpcfed.run_folder.checkpoint.keeper import Checkpoints
from hpcfed.run_folder.folder import RunFolder
from hpcfed.simulation import Simulation

MASKED_WORDS = 1 << 20
"""Number of words of the secure-aggregation mask whose computation is timed."""
CLIENTS, ROUNDS = 2, 6
"""Clients per round, or as many as a tile has slots, and rounds to train for the measurement; the first warms up."""
ENOUGH = 5.0
"""Seconds after which no further round is measured."""
DRAWN_ROUNDS = 100
"""Number of rounds, spread over the run, whose cohorts are drawn to compute the load of each rank."""
FORWARD = 3
"""Assumed ratio of a sample's training time to the time of its forward pass, if no evaluation has been measured."""
A_ROUND, A_LINE, A_NUMBER = 1000, 60, 20
"""Approximate bytes: of a round's line in ``metrics.jsonl`` without its cohort; of a client's line in ``clients.csv``
without its metrics; of each metric in that line.
"""


@dataclass(frozen=True)
class StepTimes:
    """Times and memory measured in this process.

    Attributes:
        device: name of the GPU, or ``one core``.
        clients: number of clients trained, summed over the measured rounds.
        sample_seconds: training time per sample.
        server_seconds: time of a round's reduction and server step.
        evaluate_seconds: time of one evaluation on the test set; 0 if the run has none.
        host_bytes: resident memory of this process.
        device_bytes: peak GPU memory of this process; None on the CPU.
    """

    device: str
    clients: int
    sample_seconds: float
    server_seconds: float
    evaluate_seconds: float
    host_bytes: int
    device_bytes: int | None


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a run on `ranks` ranks; bytes are totals unless named ``_per_rank``.

    Attributes:
        round_seconds: mean time of a round on its slowest rank: training, reduction, server step; without evaluations.
        imbalance: work of the slowest rank divided by the mean work of all ranks.
        idle: a remark if some ranks have nothing to train; "" otherwise.
        hours: time of all rounds and evaluations, for all seeds; `evaluation_hours` is the evaluations' share of it.
        core_hours: `hours` times the number of ranks and of cores per rank.
        gpu_hours: `hours` times the number of GPUs; 0 on CPUs; None if GPUs were requested but this machine has none to
            measure on.
        device_bytes_per_rank: peak GPU memory of a rank; None on CPUs.
        reduced_bytes: size of one round's Allreduce, the same on each rank.
        state_bytes: size of the clients' states once all possible participants have taken part.
        checkpoint_bytes: size of one checkpoint with these states.
        num_checkpoints: number of checkpoints that are kept; 0 if the recipe writes none.
        checkpoints_bytes: size of all checkpoints on disk at once: the kept ones and one that is being written.
        record_bytes: size of ``metrics.jsonl`` and ``clients.csv``, for all seeds.
        models_bytes: size of the last model, the evaluated model and the clients' personal models, for all seeds.
    """

    measured: StepTimes
    ranks: int
    rounds: int
    seeds: int
    allreduce_gb_per_s: float
    round_seconds: float
    imbalance: float
    idle: str
    hours: float
    evaluation_hours: float
    core_hours: float
    gpu_hours: float | None
    host_bytes_per_rank: int
    device_bytes_per_rank: int | None
    reduced_bytes: int
    state_bytes: int
    checkpoint_bytes: int
    num_checkpoints: int
    checkpoints_bytes: int
    record_bytes: int
    models_bytes: int

    @property
    def rounds_per_second(self) -> float:
        """Rounds per second, with the time of evaluations included."""
        return self.rounds * self.seeds / (3600 * self.hours)


class _FirstClients(Cohorts):
    """The recipe's cohorts, each reduced to its first `most` clients, with shares rescaled to sum to one."""

    def __init__(self, recipe: Recipe, sizes: np.ndarray, most: int):
        super().__init__(recipe, sizes)
        self._most = most

    def round(self, round: int) -> Cohort:
        whole = super().round(round)
        kept = slice(self._most)
        total = float(whole.shares[kept].sum())
        cut = {name: getattr(whole, name)[kept] for name in ("clients", "steps", "guessed", "work")}
        shares = whole.shares[kept] / total if total else whole.shares[kept]
        return replace(whole, **cut, shares=shares, counts=len(shares) * shares)


def estimate(
    recipe: Recipe, *, ranks: int, seeds: int = 1, gpus: int | None = None, allreduce: float = 1.0
) -> Estimate:
    """Train a few clients of a resolved recipe, and estimate the time and memory of the whole run.

    Args:
        ranks: number of ranks of the run.
        seeds: number of runs of the recipe, one after another.
        gpus: total number of GPUs; None: one per rank if the recipe's device is a GPU, else 0.
        allreduce: bandwidth of an Allreduce over the ranks, in GB/s (``hpcfed doctor`` measures it).

    Raises:
        InputError: the recipe cannot be run, or its first rounds diverge.
    """
    parts, evaluator = assemble(recipe, World())
    whole = parts.cohorts
    few = parts
    if parts.chain.robust is None:
        few = replace(few, cohorts=_FirstClients(recipe, parts.federation.sizes, max(CLIENTS, parts.engine.tile)))
    if parts.masks is not None:
        few = replace(few, masks=replace(parts.masks, dropout=0.0, survivors=1))
    simulation = Simulation(few)
    with parts.clients:
        measured, num_vectors = _measure(recipe, few, simulation, evaluator)
        checkpoints = Checkpoints(recipe, RunFolder(recipe.output), parts, simulation)
        checkpoint, num_kept = checkpoints.bytes_at_most(), checkpoints.most_kept()
        states = _state_bytes(parts, simulation.w)
    slowest, average, trained = _work(recipe, parts, whole, ranks)
    kind = KINDS[recipe.reduction]
    reduced = num_vectors * kind.usual_words(simulation.w.dtype) * simulation.w.numel() * kind.word.itemsize
    round_seconds = trained * measured.sample_seconds + measured.server_seconds
    if parts.masks is not None:
        round_seconds += _mask_seconds(parts.masks, whole.most_members, num_vectors * simulation.w.numel(), ranks)
    if ranks > 1:
        round_seconds += reduced / (1e9 * allreduce)
    evaluations = _evaluation_seconds(recipe, parts, measured) / ranks
    hours = seeds * (recipe.rounds * round_seconds + evaluations) / 3600
    on_gpu = measured.device_bytes is not None
    share = (states + _data_bytes(recipe, parts)) // ranks
    return Estimate(
        measured=measured,
        ranks=ranks,
        rounds=recipe.rounds,
        seeds=seeds,
        allreduce_gb_per_s=allreduce,
        round_seconds=round_seconds,
        imbalance=slowest / average if average else 1.0,
        idle=whole.idle(ranks),
        evaluation_hours=seeds * evaluations / 3600,
        hours=hours,
        core_hours=hours * ranks * recipe.threads,
        gpu_hours=hours * (gpus if gpus is not None else ranks) if on_gpu else None if gpus else 0.0,
        host_bytes_per_rank=measured.host_bytes + (0 if on_gpu else share),
        device_bytes_per_rank=measured.device_bytes + share if measured.device_bytes is not None else None,
        reduced_bytes=reduced,
        state_bytes=states,
        checkpoint_bytes=checkpoint,
        num_checkpoints=num_kept if recipe.checkpoint.every else 0,
        checkpoints_bytes=checkpoint * (num_kept + 1) if recipe.checkpoint.every else 0,
        record_bytes=seeds * _record_bytes(recipe, parts),
        models_bytes=seeds * _model_bytes(recipe, parts),
    )


def _state_bytes(parts: Parts, w: Tensor) -> int:
    """Return the bytes of the states of all clients that can have taken part."""
    if not parts.method.local.stateful:
        return 0
    return parts.cohorts.most_participants * sum(each.nbytes for each in parts.method.local.begin(w).values())


def _model_bytes(recipe: Recipe, parts: Parts) -> int:
    """Return the bytes of a run's models: the last, the evaluated one if it is another, and clients' own."""
    of_server = (1 + (recipe.evaluate.model != "last")) * parts.initial_w.nbytes
    private = sum(tensor.nbytes for tensor in parts.model.own.values())
    return of_server + parts.cohorts.most_participants * (private + parts.trains_personal * parts.initial_w.nbytes)


def _measure(recipe: Recipe, parts: Parts, simulation: Simulation, evaluator: Any) -> tuple[StepTimes, int]:
    """Train on the cohorts of `parts` for a few rounds; return the measurements, and how many vectors a round sums."""
    began, timed, server, clients, num_vectors = time.perf_counter(), [], [], 0, 1
    for round in range(1, min(ROUNDS, recipe.rounds) + 1):
        try:
            outcome = simulation.round(round)
        except Diverged as diverged:
            raise InputError("the recipe diverges at once", got=str(diverged)) from None
        work, num_vectors = outcome.cohort.work, len(outcome.vectors)
        trained = float(_in_tiles(parts, np.zeros(len(work), np.int64), work, 1)[0])
        timed.append(outcome.seconds["local"] / max(trained, 1))
        server.append(outcome.seconds["server"] + outcome.seconds["reduce"])
        clients += len(outcome.cohort.clients)
        if time.perf_counter() - began > ENOUGH:
            break
    evaluated = 0.0
    if recipe.evaluate.every and parts.federation.num_test:
        model = simulation.evaluated()
        evaluated = min(seconds_of(lambda: evaluator(model, test=True, train=False)) for _ in range(2))
    device = parts.model.vector.device
    measured = StepTimes(
        device="one core" if device.type == "cpu" else accelerator(device).name(device),
        clients=clients,
        sample_seconds=fmean(timed[1:] or timed),
        server_seconds=fmean(server[1:] or server),
        evaluate_seconds=evaluated,
        host_bytes=psutil.Process().memory_info().rss,
        device_bytes=None if device.type == "cpu" else accelerator(device).peak_bytes(device),
    )
    return measured, num_vectors


def _mask_seconds(masks: Masks, size: int, words: int, ranks: int) -> float:
    """Return the seconds that a rank spends on a round's pairwise masks, also on those shared with dropped clients.

    The masks of two clients on the same rank cancel, and are not computed; on a single rank those that are left over
    are its own.

    Args:
        size: number of clients in the round.
        words: total length of a client's masked vectors.
    """
    some = min(words, MASKED_WORDS)
    pair = masks.of_round(1, (0, 1), np.ones(2), np.ones(2))
    a_word = min(seconds_of(lambda: pair.of([0], some)) for _ in range(2)) / some
    left = size * (1 - masks.dropout)
    mine = left / ranks
    return a_word * words * (mine * (size - mine) + (ranks > 1) * left * (size - left))


def _work(recipe: Recipe, parts: Parts, cohorts: Cohorts, ranks: int) -> tuple[float, float, float]:
    """Return means over drawn rounds: samples per round on the slowest rank, per rank, and as trained in tiles.

    The last is of the rank that computes the most, empty slots among them.
    """
    home = homes(np.where(cohorts.present, parts.federation.sizes, 0), ranks)
    slowest, average, trained = [], [], []
    for round in np.unique(np.linspace(1, recipe.rounds, DRAWN_ROUNDS).astype(int)).tolist():
        cohort = cohorts.round(round)
        at_home = home[cohort.clients]
        where = spread(cohort.work, at_home, ranks) if recipe.balances(parts.method.local.stateful) else at_home
        load = np.bincount(where, weights=cohort.work, minlength=ranks)
        slowest.append(load.max())
        average.append(load.mean())
        trained.append(_in_tiles(parts, where, cohort.work, ranks).max())
    return float(np.mean(slowest)), float(np.mean(average)), float(np.mean(trained))


def _in_tiles(parts: Parts, where: ArrayLike, work: np.ndarray, ranks: int) -> np.ndarray:
    """Return the samples that each rank computes, (P,): a tile takes its largest member's work for each of its slots.

    Args:
        where, work: rank of each member of the cohort, and its samples, (S,).
    """
    tile = parts.engine.tile
    slots = np.arange(len(work)) % tile if parts.engine.fixed_slots else None
    return tile * loads_of(where, work, work, ranks, tile, slots)[1]


def _evaluations(recipe: Recipe, every: int) -> int:
    """Return the number of rounds that are evaluated: one in `every`, and the last."""
    return -(-recipe.rounds // every)


def _evaluation_seconds(recipe: Recipe, parts: Parts, measured: StepTimes) -> float:
    """Return the seconds that one rank would take for all evaluations of a run: test set, training set and clients."""
    section, federation = recipe.evaluate, parts.federation
    tested, trained = federation.num_test, int(federation.sizes.sum())
    a_sample = measured.evaluate_seconds / tested if measured.evaluate_seconds else measured.sample_seconds / FORWARD
    total = _evaluations(recipe, section.every) * measured.evaluate_seconds if section.every else 0.0
    if section.train.every:
        total += _evaluations(recipe, section.train.every) * trained * a_sample
    if section.clients.every:
        own = tested if federation.test_offsets is not None else 0
        each = len(section.clients.models) * (trained + own) * a_sample
        if "fine-tuned" in section.clients.models and (tune := section.clients.fine_tune) is not None:
            batch = trained / max(federation.num_clients, 1)
            if recipe.local.batch_size != "full":
                batch = min(batch, int(recipe.local.batch_size))
            each += federation.num_clients * tune.steps * batch * measured.sample_seconds
        total += _evaluations(recipe, section.clients.every) * each
    return total


def _record_bytes(recipe: Recipe, parts: Parts) -> int:
    """Return the bytes of a run's record: a line for each round, and one for each client, model and split evaluated."""
    federation, clients = parts.federation, recipe.evaluate.clients
    digits = len(str(federation.num_clients))
    drawn = np.unique(np.linspace(1, recipe.rounds, DRAWN_ROUNDS).astype(int)).tolist()
    members = fmean(len(parts.cohorts.round(round).clients) for round in drawn)
    total = recipe.rounds * (A_ROUND + members * (digits + 2))
    if clients.every:
        splits = 1 + (federation.test_offsets is not None)
        lines = int(np.count_nonzero(federation.sizes)) * len(clients.models) * splits
        a_line = A_LINE + digits + A_NUMBER * len(recipe.evaluate.metrics)
        total += _evaluations(recipe, clients.every) * lines * a_line
    return int(total)


def _data_bytes(recipe: Recipe, parts: Parts) -> int:
    """Return the bytes of all samples in memory: features in the run's dtype, and 8 bytes for each target value."""
    samples = int(parts.federation.sizes.sum()) * parts.shards.keeps_clients + parts.federation.num_test
    each = prod(parts.federation.feature_shape) * (8 if recipe.dtype == "float64" else 4)
    return samples * (each + 8 * max(prod(parts.federation.target_shape), 1))
