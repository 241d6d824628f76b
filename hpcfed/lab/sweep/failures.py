"""Errors raised if runs of a sweep, study or experiment have no result."""

from __future__ import annotations

from collections.abc import Mapping

from hpcfed.errors import EnvironmentFailure, InputError, counted
from hpcfed.lab.sweep.claims import RETRYABLE, Claim, Claims
from hpcfed.lab.sweep.plan import Plan
from hpcfed.lab.sweep.run import run_states


def endings(plan: Plan) -> dict[str, Claim]:
    """Return run name → the claim that decided the run, else its last one, with ending and error message.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    states = run_states(plan, Claims(plan.folder, "report"))
    return {name: one.claim for name, one in states.items()}


def raise_if_failed(plan: Plan, ended: Mapping[str, Claim], *, takes_fresh: bool = True) -> None:
    """Raise an error if runs were refused, failed or lost; it states their number and the first one's message.

    `ended` is the result of `endings`; `takes_fresh` says whether the command has ``--fresh``, to suggest it.

    Raises:
        InputError: all of these runs were refused, so that the recipe must change.
        EnvironmentFailure: at least one of them failed or was lost, so that ``--retry`` may help.
    """
    broken = [unit for unit in plan.units if ended[unit.name].ending in RETRYABLE]
    if not broken:
        return
    first = ended[broken[0].name]
    what = f"{len(broken)} of {counted(len(plan.units), 'run')} have no result; the first was {first.ending}"
    where = str(broken[0].recipe.output)
    if any(ended[unit.name].ending != "refused" for unit in broken):
        remedy = "the same command with --retry tries them again"
        raise EnvironmentFailure(what, where=where, got=first.message, remedy=remedy)
    kept = takes_fresh and any(unit.recipe.output.exists() for unit in plan.units)
    fresh = ", with --fresh where other runs change with it" if kept else ""
    remedy = f"mend the recipe{fresh}; if the cause lies elsewhere, --retry tries them again"
    raise InputError(what, where=where, got=first.message, remedy=remedy)
