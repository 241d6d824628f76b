"""CPython's garbage collector, paused while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import modules without looking for garbage: they make none, and the search takes a seventh of torch's import.

    What they leave counts as old afterwards, as if several collections had found it in use.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
        gc.enable()
