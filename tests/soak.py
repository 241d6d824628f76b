"""Parameters of which some run each time, and the others in the soak."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import pytest


def often(chosen: Container[Any], every: Iterable[Any]) -> Iterator[Any]:
    """Yield every parameter, or tuple of parameters; those that are not `chosen` for the soak alone."""
    for one in every:
        each = one if isinstance(one, tuple) else (one,)
        yield pytest.param(*each, marks=[] if one in chosen else pytest.mark.soak)
