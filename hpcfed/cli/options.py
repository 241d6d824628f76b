"""Types that options of several commands share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

MOST_RANKS = 1_000_000
"""Most ranks that a command computes with: a placement is found for each in 20 µs."""
RANKS = click.IntRange(1, MOST_RANKS)


def _complete_override(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from hpcfed.cli.completion import complete_override

    return complete_override(ctx, param, incomplete)


OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_complete_override)
"""Values of a recipe's keys, which the shell completes."""


class Finite(click.FloatRange):
    """A number within bounds, neither ``nan`` nor ``inf``, which `click.FloatRange` takes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; end with a usage error if it is not finite or out of bounds."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def given(*names: str) -> list[str]:
    """Return the options of these parameters that stand on the command line, in the order of ``--help``."""
    context = click.get_current_context()
    return [
        "/".join(sorted(one.opts, key=len))
        for one in context.command.params
        if one.name in names and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    ]


def asked_on_terminal() -> Callable[[str], bool] | None:
    """Return a question to the user, who reads what is said and answers yes or no; None without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    return lambda what: click.confirm(f"{what}\nRun it?", default=False)
