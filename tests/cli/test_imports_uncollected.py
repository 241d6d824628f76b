"""Imports without garbage collection: it is on again afterwards, and what was imported counts as old."""

from __future__ import annotations

import gc

from hpcfed.ranks.platform.collector import uncollected


def test_what_is_made_meanwhile_counts_as_old() -> None:
    gc.unfreeze()  # what earlier tests of this process froze
    with uncollected():
        assert not gc.isenabled()
        made: list[list[int]] = [[]]
    assert gc.isenabled()
    assert any(one is made for one in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
