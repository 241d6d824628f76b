"""Measurements of a scaling study on the ranks of this job, and the files that hold them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfed.assembly import resolve
from hpcfed.config.load import load_recipe, to_plain
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.io.atomic import write_whole
from hpcfed.io.text import parse_json, read_text
from hpcfed.lab.bench.machine import describe
from hpcfed.lab.scaling.plan import Load, StudySetting, load, overrides, settings
from hpcfed.ranks.world import World

if TYPE_CHECKING:
    from hpcfed.api import Result

TIMERS = ("total", "local", "convert", "wait", "reduce", "server")
PROBED = (8, 1 << 16, 1 << 20)
"""Sizes in bytes of the bare Allreduces that are timed, besides the size of a round's vectors."""
IRRELEVANT_KEYS = ("rounds", "output", "evaluate", "stop", "checkpoint", "observers", "python_path")
"""Recipe keys that a measurement overrides, or that do not affect its time."""


@dataclass(frozen=True)
class Sample:
    """Measured rounds of one setting on P ranks, summarized.

    Attributes:
        ranks, hosts, cores: P, the number of hosts, and the fewest cores available on a host.
        cohort: mean number of clients per round.
        held_out: whether the sample is kept out of the fit, to test the model.
        load: the work of a round.
        vector_bytes, client_bytes, rank_bytes: parts of a round's Allreduce: the bytes of the vectors, those added per
            client of the cohort, and those added per rank.
        seconds: timer → median seconds of a round, for some timers of the record and ``rest``, the total minus the
            slowest rank's local work.
        imbalance: local seconds of the slowest rank divided by the ranks' average, mean over rounds.
    """

    ranks: int
    hosts: int
    cores: int
    cohort: float
    held_out: bool
    load: Load
    vector_bytes: int
    client_bytes: int
    rank_bytes: int
    seconds: dict[str, float]
    imbalance: float

    @property
    def crowded(self) -> bool:
        """Whether ranks shared cores, which the cost model does not describe."""
        return -(-self.ranks // self.hosts) > self.cores


@dataclass(frozen=True)
class RankTimes:
    """All measurements of one job on P ranks.

    Attributes:
        ranks: P.
        recipe: the measured recipe without the keys in `IRRELEVANT_KEYS`.
        mode, rounds: ``strong`` or ``weak``, and the number of rounds of each run.
        machine: see `hpcfed.lab.bench.machine`; ``load`` is the one-minute load average of rank 0's host at the end.
        samples: the measured rounds of each setting.
        allreduce: (bytes, seconds) of each bare Allreduce; empty on one rank.
    """

    ranks: int
    recipe: dict[str, Any]
    mode: str
    rounds: int
    machine: dict[str, Any]
    samples: list[Sample]
    allreduce: list[tuple[int, float]]


def identity(recipe: Recipe) -> dict[str, Any]:
    """Return the part of a resolved recipe that must be equal in all measurements of a study, as plain data."""
    return {key: value for key, value in to_plain(recipe).items() if key not in IRRELEVANT_KEYS}


def path_of(folder: Path, ranks: int) -> Path:
    """Return the path of the file with the measurements on `ranks` ranks."""
    return folder / f"ranks-{ranks}.json"


def measure_here(source: Path, changes: Sequence[str], mode: str, rounds: int, folder: Path, world: World) -> RankTimes:
    """Measure a recipe in all `settings` on the ranks of `world`; write the result to `folder`. Called on every rank.

    `source` is the recipe's file and `changes` its overrides; each setting runs for `rounds` rounds.

    Raises:
        InputError, EnvironmentFailure: the recipe cannot be run, or a rank failed; the same on every rank.
    """
    from hpcfed.api import run

    with world.united(), _by_mpi(world):
        recipe = world.on_root(lambda: resolve(load_recipe(source, changes)))
        with Federation.open(recipe.data) as federation:
            sizes = federation.sizes
        samples = []
        for setting in settings(recipe, len(sizes), mode, world.size):
            output = folder / f"ranks-{world.size}" / f"cohort-{setting.cohort or 'own'}"
            done = run(source, [*changes, *overrides(recipe, setting, rounds, output)], world=world, quiet=True)
            work = load(done.recipe, sizes, world.size, None)
            samples.append(_sample(setting, done, work, _bytes_of(done, sizes, world), world))
        probed = _probe(world, samples[0].vector_bytes)
        machine = describe() | {"load": round(os.getloadavg()[0], 1)}
        found = RankTimes(world.size, identity(recipe), mode, rounds, machine, samples, probed)
        world.on_root(lambda: write_whole(path_of(folder, world.size), json.dumps(asdict(found), indent=1) + "\n"))
    return found


@contextmanager
def _by_mpi(world: World) -> Iterator[None]:
    """Make sums go through MPI inside the block, as between hosts, even if all ranks share one host's memory."""
    shares, world.shares_memory = world.shares_memory, False
    try:
        yield
    finally:
        world.shares_memory = shares


def read(folder: Path, ranks: int) -> RankTimes | None:
    """Return the measurements on `ranks` ranks from their file; None if there is no file.

    Raises:
        InputError: the file is malformed.
    """
    path = path_of(folder, ranks)
    if not path.exists():
        return None
    try:
        stored = parse_json(read_text(path))
        samples = [Sample(**{**row, "load": Load(**row["load"])}) for row in stored.pop("samples")]
        probed = [(int(size), float(seconds)) for size, seconds in stored.pop("allreduce")]
        return RankTimes(**stored, samples=samples, allreduce=probed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise InputError("not a measurement", where=str(path), got=got, remedy="remove the file") from None


def _sample(setting: StudySetting, done: Result, work: Load, num_bytes: tuple[int, int, int], world: World) -> Sample:
    """Return a summary of a run's record without its first rounds."""
    rows = world.on_root(lambda: done.metrics)
    kept = rows[min(max(2, len(rows) // 5), len(rows) - 1) :]
    vector_bytes, client_bytes, rank_bytes = num_bytes
    rest = median(row["seconds"]["total"] - row["seconds"]["local"] for row in kept)
    return Sample(
        ranks=world.size,
        hosts=len(set(world.hosts)),
        cores=min(world.gather(describe()["cores"])),
        cohort=fmean(len(row["cohort"]) for row in kept),
        held_out=setting.held_out,
        load=work,
        vector_bytes=vector_bytes,
        client_bytes=client_bytes,
        rank_bytes=rank_bytes,
        seconds={timer: median(row["seconds"][timer] for row in kept) for timer in TIMERS} | {"rest": rest},
        imbalance=fmean(row["imbalance"] for row in kept),
    )


def _bytes_of(done: Result, sizes: np.ndarray, world: World) -> tuple[int, int, int]:
    """Return the bytes of a round's Allreduce in three parts: of the vectors, for each client, and for each rank."""
    import torch

    from hpcfed import algorithms
    from hpcfed.client.averaged_buffers import AveragedBuffers
    from hpcfed.client.solver import Stepping
    from hpcfed.client.work import are_ones, common_to_all, effective_steps_and_factors
    from hpcfed.cohort import Cohorts
    from hpcfed.models.flat import FlatModel
    from hpcfed.reduce.buffer import KINDS, RoundBuffer

    recipe = done.recipe
    dtype, cpu = getattr(torch, recipe.dtype), torch.device("cpu")
    method = algorithms.build(recipe.algorithm, recipe.python_path)
    cohort = Cohorts(recipe, sizes).round(1)
    effective_steps, factors = effective_steps_and_factors(method, Stepping(recipe.local), cohort, 1)
    alike = common_to_all(effective_steps) is not None and are_ones(factors)
    kind = KINDS[recipe.reduction]
    model = FlatModel(done.module, dtype, cpu, recipe.parameters)
    averaged = AveragedBuffers(model)
    size, others = model.vector.numel(), averaged.entries
    buffer = RoundBuffer(
        size, dtype, cpu, world, kind=recipe.reduction, others=others, watched=recipe.sentinel != "off"
    )
    names, scalars = [*method.reported(alike), *others], len(method.local.scalars) + len(averaged.scalars)
    sizes_in_words = buffer.sizes([kind.usual_words(dtype)] * len(names), 1, scalars, names)
    vectors, client, ranks = (words * kind.word.itemsize for words in sizes_in_words)
    return vectors, client, ranks // world.size


def _probe(world: World, vector_bytes: int) -> list[tuple[int, float]]:
    from hpcfed.lab.bench.reduction import allreduce_seconds

    if world.size == 1:
        return []
    sizes = sorted({*PROBED, max(vector_bytes, 8)})
    return list(zip(sizes, allreduce_seconds(world, sizes), strict=True))
