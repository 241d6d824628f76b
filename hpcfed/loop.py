"""The round loop, and `run`, which goes from a recipe to a finished run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Recipe
from hpcfed.data.format import Federation
from hpcfed.endings import own_log, recorded_ending
from hpcfed.evaluate import Evaluator, Scores
from hpcfed.folder import RunFolder
from hpcfed.progress import Reporter
from hpcfed.record import Recorder, environment
from hpcfed.setup import assemble, build_model, resolve
from hpcfed.simulation import Outcome, Parts, Simulation
from hpcfed.world import World, connect

if TYPE_CHECKING:
    from torch import nn


def train(recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder, reporter: Reporter) -> None:
    """Train all rounds of a recipe: sample, train, reduce, step, evaluate, record."""
    simulation = Simulation(parts)
    ended = time.perf_counter()
    for round in range(1, recipe.rounds + 1):
        started = ended  # so that writing the record counts, with the round after it
        outcome = simulation.round(round)
        trained = time.perf_counter()
        scores = _evaluate(recipe, round, outcome, evaluator)
        ended = time.perf_counter()
        seconds = {"evaluate": ended - trained, "total": ended - started}
        reporter.update(recorder.add(round, outcome, scores, seconds))
    recorder.keep_models(parts.model, simulation.w, outcome.evaluated)


def run(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    world: World | None = None,
    quiet: bool = False,
) -> Result:
    """Run a recipe, alone or on all ranks of an MPI program, and return where it left its record.

    Args:
        source: a recipe file, or a mapping of the same keys.
        overrides: ``section.key=value`` texts.
        world: the ranks to run on; by default all that this process was started with.
        quiet: whether rank 0 keeps its progress to itself.

    Raises:
        InputError, Diverged, EnvironmentFailure: the same on every rank.
    """
    world = world or connect()
    recipe = world.on_root(lambda: resolve(load_recipe(source, overrides)))
    folder = RunFolder(recipe.output)
    with Reporter(recipe.name, recipe.rounds, speaks=world.is_root and not quiet, live=world.size == 1) as reporter:
        if world.on_root(lambda: folder.is_finished(recipe)):
            reporter.say(f"{recipe.name}: finished already, see {folder.path}")
            return Result(recipe)
        parts, evaluator = world.together(lambda: assemble(recipe, world))
        world.on_root(lambda: folder.claim(recipe))
        with own_log(folder, world), recorded_ending(folder, world):
            facts = environment(world, parts.model.vector.device, parts.model.vector.dtype)
            world.on_root(lambda: folder.write("environment.json", facts))
            with Recorder(folder, parts.method, parts.model.num_parameters, world) as recorder:
                train(recipe, parts, evaluator, recorder, reporter)
        reporter.say(f"{recipe.name}: {recipe.rounds} rounds done, see {folder.path}")
    return Result(recipe)


def _evaluate(recipe: Recipe, round: int, outcome: Outcome, evaluator: Evaluator) -> Scores:
    """Measure the round's model where the recipe asks for it; the last round always counts as asked for."""

    def due(every: int) -> bool:
        return every > 0 and (round % every == 0 or round == recipe.rounds)

    return evaluator(outcome.evaluated, test=due(recipe.evaluate.every), train=due(recipe.evaluate.train.every))


@dataclass(frozen=True)
class Result:
    """A finished run: its resolved recipe, and what its folder holds."""

    recipe: Recipe

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.recipe.output

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The record, one mapping a round."""
        with (self.folder / "metrics.jsonl").open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    @cached_property
    def module(self) -> nn.Module:
        """The trained module, the last iterate, on the CPU."""
        trained = self.recipe.model.model_copy(update={"init": self.folder / "model.safetensors"})
        recipe = self.recipe.model_copy(update={"model": trained})
        with Federation.open(recipe.data) as federation:
            model = build_model(recipe, federation, getattr(torch, recipe.dtype), torch.device("cpu"))
        return model.module.eval()
