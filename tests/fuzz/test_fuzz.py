"""A short round of `tests.fuzz`; ``make fuzz`` goes on for hours."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.__main__ import NAMES
from tests.fuzz.parsers import PARSERS
from tests.fuzz.raw_files import CASES, read_all
from tests.launch import ROOT, launch

EACH = 5
"""Inputs for each parser; `make fuzz` has 20,000."""


def fuzz(*arguments: str, timeout: float) -> Counter[str]:
    """Run the campaign; return how often each ending came. Fails with what it printed if an input failed."""
    done = launch(0, arguments, program=("-m", "tests.fuzz"), timeout=timeout, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    endings = Counter[str]()
    for count, ending in re.findall(r"(\d+) (read|refused)\b", done.stdout):
        endings[ending] += int(count)
    return endings


@pytest.mark.deadline(600)
def test_inputs_that_nobody_meant_are_read_or_refused_in_one_line():
    """No traceback, crash, hang, memory of a claimed size, or another answer than the reference library's."""
    assert tuple(PARSERS) == NAMES
    endings = fuzz("--inputs", str(EACH), timeout=550)
    assert endings.total() >= len(PARSERS) * EACH
    assert min(endings["read"], endings["refused"]) > endings.total() / 10


@pytest.mark.soak
@pytest.mark.deadline(7200)
@pytest.mark.parametrize("parser", PARSERS)
def test_a_thousand_inputs(parser: str):
    fuzz("--parser", parser, "--first", "1000", "--inputs", "1000", timeout=7000)


@pytest.mark.parametrize("name", CASES)
def test_undamaged_raw_files_are_read(tmp_path: Path, name: str) -> None:
    CASES[name].write(tmp_path)
    if CASES[name].reference is not None:
        CASES[name].reference(tmp_path)  # which damaged files may make impossible
    read_all(tmp_path, CASES[name])
