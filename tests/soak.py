"""Parameters of which some run each time, and the others in the soak."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def often(chosen: Container[Any], every: Iterable[Any]) -> list[Any]:
    """Return every parameter, or tuple of parameters; those that are not `chosen` are for the soak alone."""
    each = [(one, one if isinstance(one, tuple) else (one,)) for one in every]
    return [pytest.param(*values, marks=[] if one in chosen else pytest.mark.soak) for one, values in each]
