"""Types that options of several commands share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import click

MOST_RANKS = 1_000_000
"""Most ranks that a command computes with: a placement is found for each in 20 µs."""
RANKS = click.IntRange(1, MOST_RANKS)


class Finite(click.FloatRange):
    """A number within bounds, neither ``nan`` nor ``inf``, which `click.FloatRange` takes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; end with a usage error if it is not finite or out of bounds."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def asked_on_terminal() -> Callable[[str], bool] | None:
    """Return a question to the user, who reads what is said and answers yes or no; None without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    return lambda what: click.confirm(f"{what}\nRun it?", default=False)
