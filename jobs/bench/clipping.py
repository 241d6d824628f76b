"""Whether a clip to norm 10 is reached, and what it changes for FedProx to clip its whole proximal term.

    python -m jobs.bench.clipping runs/reproduce EXPERIMENT CASE --rounds N [--method fedprox] [--raw DATA]

Trains the first seed of a method three times, in this process: as its recipe says, with a norm that no gradient
reaches, and with ``clip: linear``, as FedDyn's experiments had it for FedProx until their correction. If the models of
the first two are equal bit for bit, no minibatch gradient was clipped, and both kinds of clip differ by rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.assembly import assemble
from hpcfed.config.recipe import Recipe
from hpcfed.errors import ends_in_a_line
from hpcfed.lab.reproduce.catalogue import find
from hpcfed.lab.reproduce.inputs import Places, prepare
from hpcfed.lab.reproduce.plan import lay_out
from hpcfed.ranks.world import World

UNREACHED = 1e30
"""A norm that no gradient has: its factor is 1 exactly."""
OTHER: Mapping[str, Mapping[str, Any]] = {"unreached": {"clip_norm": UNREACHED}, "linear": {"clip": "linear"}}
"""Variant → its keys of ``local``."""


def models(recipe: Recipe) -> np.ndarray:
    """Return the server's model after each round, (T, d)."""
    from hpcfed.simulation import Simulation

    parts, _ = assemble(recipe, World())
    simulation, found = Simulation(parts), []
    with parts.clients:
        for number in range(1, recipe.rounds + 1):
            simulation.round(number)
            found.append(simulation.w.clone().numpy())
    return np.array(found)


def compare(recipe: Recipe) -> tuple[int | None, float]:
    """Return the first round in which a gradient is clipped, None without one, and how far the clips' models are apart.

    That is the largest ‖w − w_linear‖ / ‖w‖ of all rounds.
    """
    own = models(recipe)
    unreached, linear = (
        models(recipe.model_copy(update={"local": recipe.local.model_copy(update=dict(keys))}))
        for keys in OTHER.values()
    )
    clipped = np.flatnonzero((own != unreached).any(axis=1))
    apart = np.linalg.norm(own - linear, axis=1) / np.linalg.norm(own, axis=1)
    return (int(clipped[0]) + 1 if len(clipped) else None), float(apart.max())


@ends_in_a_line()
def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("experiment")
    parser.add_argument("case")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--method", default="fedprox")
    parser.add_argument("--raw", type=Path)
    asked = parser.parse_args()
    (experiment,) = (one.limited([asked.case]).model_copy(update={"seeds": 1}) for one in find(asked.experiment))
    places = Places(asked.output, asked.raw)
    list(prepare(experiment.cases[asked.case].data, 0, places))
    unit, *_ = lay_out(experiment, "full", places, asked.rounds, methods=[asked.method]).plan.units
    first, apart = compare(unit.recipe)
    words = "no gradient is clipped" if first is None else f"a gradient is clipped from round {first} on"
    print(f"{unit.recipe.output.name}: {words} in {unit.recipe.rounds} rounds; the clips' models are {apart:.1e} apart")


if __name__ == "__main__":
    main()
