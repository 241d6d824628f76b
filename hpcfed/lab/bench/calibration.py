"""Calibration: a recipe's rounds timed in turn with each local engine and matrix-product library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpcfed.assembly import resolve
from hpcfed.config.load import load_recipe, of_rounds_alone
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.lab.bench.timing import (
    Contender,
    FinishedProcess,
    Timing,
    Turn,
    in_turn,
    recorded,
    run_command,
    run_to_end,
)
from hpcfed.run_folder.files import RECIPE

CHOICES = (("sequential", "blas"), ("batched", "blas"), ("batched", "onednn"))
RECOMMENDED_BELOW = 0.95
"""Fraction of `auto`'s time below which another choice is recommended."""


@dataclass(frozen=True)
class Calibration:
    """Timings of a recipe with each choice of engine and matrix-product library.

    Attributes:
        timings: one per choice, named by the overrides that select it; what ``auto`` chooses comes first.
        refused: name of a choice that cannot run → the error of the attempt.
    """

    timings: list[Timing]
    refused: dict[str, str]

    @property
    def advice(self) -> str:
        """The recommended choice, in a sentence."""
        auto = self.timings[0]
        best = min(self.timings, key=lambda timing: timing.over(auto)[1])
        ratio = best.over(auto)[1]
        if ratio > RECOMMENDED_BELOW:
            return f"auto takes {auto.name}, and nothing is clearly faster here"
        return f"{best.name} takes {ratio:.2f} of the time of what auto takes: write it into the recipe"


def calibrate(
    source: Path,
    changes: Sequence[str],
    folder: Path,
    rounds: int,
    warm_up: int,
    repeats: int,
    ranks: int,
    say: Callable[[str], None],
) -> Calibration:
    """Time a recipe's rounds with each of `CHOICES`, each run in a process of its own.

    Each of `repeats` turns has `warm_up` rounds and then `rounds` timed ones, on `ranks` ranks. `changes` are overrides
    of the recipe `source`; the runs write into `folder`; `say` receives a line of progress per turn.

    Raises:
        InputError, EnvironmentFailure: the recipe cannot be run.
    """
    automatic = _chosen(source, changes, folder, ranks)
    contenders: list[Contender] = []
    refused: dict[str, str] = {}
    for choice in sorted(CHOICES, key=lambda choice: choice != automatic):
        name = "local.engine={} local.matmul={}".format(*choice)
        chosen = (*changes, *name.split())
        try:
            resolve(load_recipe(source, chosen))
            trial = of_rounds_alone(1, folder / "-".join(("trial", *choice)))
            run_to_end(name, run_command(source, ranks, *chosen, *trial))
        except (InputError, EnvironmentFailure) as error:
            if not contenders:
                raise
            refused[name] = str(error)
        else:
            output = folder / "-".join(choice)
            command = run_command(source, ranks, *chosen, *of_rounds_alone(rounds + warm_up, output))
            contenders.append(Contender(name, command, partial(_read, output, warm_up)))
    return Calibration(in_turn(contenders, repeats, say), refused)


def _chosen(source: Path, changes: Sequence[str], folder: Path, ranks: int) -> tuple[str, str]:
    """Return the engine and the matrix-product library that ``auto`` chooses, as recorded by a run of one round."""
    output = folder / "auto"
    asked = (*changes, "local.engine=auto", "local.matmul=auto")
    run_to_end("auto", run_command(source, ranks, *asked, *of_rounds_alone(1, output)))
    found = load_recipe(output / RECIPE).local
    return found.engine, found.matmul


def _read(output: Path, warm_up: int, _: FinishedProcess) -> Turn:
    return recorded(output, warm_up)
