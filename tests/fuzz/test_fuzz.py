"""A short round of `tests.fuzz`; ``make fuzz`` goes on for hours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import NAMES, in_a_child
from tests.fuzz.parsers import PARSERS
from tests.fuzz.raw_files import CASES, read_all


@pytest.mark.deadline(600)
def test_inputs_that_nobody_meant_are_read_or_refused_in_one_line():
    """No traceback, crash, hang, memory of a claimed size, or another answer than the reference library's."""
    endings, trouble = in_a_child([*NAMES], 0, len(CASES))
    assert not trouble, trouble
    assert tuple(PARSERS) == NAMES
    assert set(endings) == {"read", "refused"}
    assert endings.total() >= len(PARSERS) * len(CASES) * 0.9  # hypothesis leaves out what it has drawn before
    assert min(endings.values()) > endings.total() / 10


@pytest.mark.soak
@pytest.mark.deadline(7200)
@pytest.mark.parametrize("parser", PARSERS)
def test_a_thousand_inputs(parser: str):
    for first in (1000, 1500):
        _, trouble = in_a_child([parser], first, 500)
        assert not trouble, trouble


@pytest.mark.parametrize("name", CASES)
def test_undamaged_raw_files_are_read(tmp_path: Path, name: str) -> None:
    CASES[name].write(tmp_path)
    if CASES[name].reference is not None:
        CASES[name].reference(tmp_path)  # which damaged files may make impossible
    read_all(tmp_path, CASES[name])
