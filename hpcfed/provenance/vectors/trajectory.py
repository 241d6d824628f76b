"""The trajectory of a method on the problem of the conformance vectors: each round's cohort, minibatches and model."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hpcfed import algorithms
from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Algorithm, Recipe
from hpcfed.data.batches import minibatches
from hpcfed.errors import InputError
from hpcfed.models.flat import FlatModel
from hpcfed.provenance.vectors.cases import CASES
from hpcfed.provenance.vectors.problem import ROUNDS, SIZES, clients, recipe_of, recipe_of_case, write_problem
from hpcfed.ranks.world import World
from hpcfed.rng import Purpose, stream
from hpcfed.simulation import Simulation
from hpcfed.version import __version__

FORMAT, VERSION = "hpcfed-vectors", 1


def vectors(methods: Collection[str] | None = None, cases: Collection[str] | None = None) -> dict[str, Any]:
    """Return the problem and the trajectories of the named methods and cases (None: all), as plain JSON data."""
    chosen = [name for name in algorithms.names() if methods is None or name in methods]
    with tempfile.TemporaryDirectory(prefix="hpcfed-vectors-") as folder:
        data = Path(folder) / "problem.h5"
        write_problem(data)
        of_methods = {name: trajectory(recipe_of(_with_parameters(name), data)) for name in chosen}
        protocols, of_cases = _of_cases([name for name in CASES if cases is None or name in cases], data)
    return {
        "format": FORMAT,
        "version": VERSION,
        "hpcfed": __version__,
        "problem": {
            "model": "z = weight x + bias; loss: softmax cross-entropy, the mean over a minibatch",
            "clients": [{"x": x.tolist(), "y": y.tolist()} for x, y in clients()],
        },
        "methods": of_methods,
        "protocols": protocols,
        "cases": of_cases,
    }


def trajectory(content: Mapping[str, Any]) -> dict[str, Any]:
    """Train the recipe `content`; return its ``algorithm`` and ``weights``, the initial model and the rounds.

    A round has its cohort with p_i and q(S) (see `Cohort`), its step sizes ``lr`` and ``server_lr``, the minibatches of
    each client, and the model ``w`` after it.
    """
    recipe = resolve(load_recipe(content))
    parts, _ = assemble(recipe, World())
    simulation = Simulation(parts)
    initial = _plain(parts.model, simulation.w)
    rounds = []
    for number in range(1, ROUNDS + 1):
        lr, outcome = parts.stepping.lr(number), simulation.round(number)
        cohort = outcome.cohort
        steps = zip(cohort.clients.tolist(), cohort.steps.tolist(), strict=True)
        rounds.append(
            {
                "round": number,
                "lr": lr,
                "cohort": cohort.clients.tolist(),
                "p": cohort.shares.tolist(),
                "q": cohort.fraction,
                "batches": {str(client): _batches(recipe, client, number, count) for client, count in steps},
                "server_lr": outcome.server_lr,
                "w": _plain(parts.model, simulation.w),
            }
        )
    chosen = recipe.algorithm.model_dump(mode="json")
    return {"algorithm": chosen, "weights": recipe.weights, "initial": initial, "rounds": rounds}


def _of_cases(names: Iterable[str], data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train cases; return the protocols of these cases, by name, and the cases, by name.

    A protocol has the initial model and, for each round, step size, cohort and minibatches. A case names its protocol
    and method; its ``w`` lists the model after each round.
    """
    protocols: dict[str, Any] = {}
    cases: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        found = trajectory(recipe_of_case(case, data))
        rounds = [{key: row[key] for key in ("round", "lr", "cohort", "batches")} for row in found["rounds"]]
        protocols.setdefault(case.protocol, {"initial": found["initial"], "rounds": rounds})
        cases[name] = {
            "protocol": case.protocol,
            "algorithm": found["algorithm"],
            "weights": found["weights"],
            **{key: value for key, value in case.changes.items() if key != "weights"},
            "w": [row["w"] for row in found["rounds"]],
        }
    return protocols, cases


def _with_parameters(name: str) -> dict[str, Any]:
    """Return the recipe's ``algorithm`` for a method: its name, with its example's parameters if any is required."""
    plain = {"name": name}
    try:
        algorithms.build(Algorithm.model_validate(plain))
    except InputError:
        return {**plain, **algorithms.examples()[name]}
    return plain


def _plain(model: FlatModel, w: torch.Tensor) -> dict[str, Any]:
    """Return the parameters of a model vector `w`, (d,), as nested lists by parameter name."""
    return {name: tensor.tolist() for name, tensor in model.named(w).items()}


def _batches(recipe: Recipe, client: int, round: int, steps: int) -> list[list[int]]:
    """Return the minibatches of a client in a round, each as indices into the client's samples."""
    own = torch.arange(SIZES[client])
    rng = stream(recipe.seed.batches, Purpose.BATCHES, round, client)
    return [y.tolist() for _, y in minibatches((own[:, None], own), recipe.local.batch_size, steps, rng)]
