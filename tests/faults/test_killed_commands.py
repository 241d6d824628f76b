"""`report`, `prepare`, `sweep` and `reproduce`, killed at twenty moments each: the same command then completes them.

What a killed command left is whole or is not taken for good, and once the command has been let to its end there is
nothing but what an undisturbed one leaves.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import killed
from tests.launch import Completed, launch
from tests.mpi.recipes import write_recipe, write_small

MOMENTS = 20
COMMANDS = {
    "report": ["report", "run", "--output", "out/report"],
    "prepare": ["prepare", "feddyn-synthetic", "--clients", "3", "--output", "out/made.h5", "--overwrite"],
    "sweep": ["sweep", "recipe.yaml", "--grid", "local.lr=0.1,0.2", "--seeds", "2", "--output", "out/sweep", "--quiet"],
    "reproduce": ["reproduce", "fedexp-figure2", "--rounds", "2", "--output", "out"],
}
OF_ATTEMPTS = re.compile(r"previous-\d+(/|$)|claims/.*\.\d+$")
"""Names that count attempts: records of rounds that were lost with them, and attempts at a run."""
SAME = (".h5", ".safetensors", ".md", ".csv")
"""Endings of files that an undisturbed command leaves with the same bytes, times apart."""


def left_in(folder: Path) -> dict[str, bytes]:
    """Permanent files by name with their contents; folders by name only."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else b""
        for name, path in found.items()
        if not OF_ATTEMPTS.search(name)
    }


def whole(left: dict[str, bytes]) -> dict[str, bytes]:
    """The files whose bytes are reproducible; a sweep's table without its seconds."""
    kept = {name: data for name, data in left.items() if name.endswith(SAME)}
    return {name: re.sub(rb"\b\d+\.\d+\b", b"", data) if name.endswith(".csv") else data for name, data in kept.items()}


def called(place: Path, name: str, moment: str) -> Completed:
    return launch(0, ["out", moment, *COMMANDS[name]], cwd=place, program=(killed.__file__,), timeout=600)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, bytes], int, float]]:
    """Return, of a command, a folder to start from, what it leaves there, its events and the seconds they take."""
    known: dict[str, tuple[Path, dict[str, bytes], int, float]] = {}

    def run(name: str) -> tuple[Path, dict[str, bytes], int, float]:
        if name not in known:
            place = tmp_path_factory.mktemp(name)
            write_small(place)
            write_recipe(place, checkpoint={"every": 1})
            if name == "report":
                assert launch(0, ["run", "recipe.yaml", "--quiet"], cwd=place).returncode == 0
            (place / "out").mkdir()
            fresh = shutil.copytree(place, tmp_path_factory.mktemp("fresh") / "place")
            done = called(place, name, "0")
            assert done.returncode == 0, done.stderr
            count, seconds = (place / "out.events").read_text().split()
            known[name] = fresh, left_in(place / "out"), int(count), float(seconds)
        return known[name]

    return run


@pytest.mark.soak
@pytest.mark.deadline(1500)
@pytest.mark.parametrize("number", range(MOMENTS))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_is_done_by_the_same_one(name, number, undisturbed, tmp_path):
    """At an event, spread over all, and every third time at any moment between the first and the last."""
    fresh, expected, events, seconds = undisturbed(name)
    place = shutil.copytree(fresh, tmp_path / "place")
    moment = str(1 + number * (events - 1) // (MOMENTS - 1))
    if number % 3 == 1:
        moment = f"{0.001 + random.Random(number).random() * seconds:.6f}"
    first = called(place, name, moment)
    assert first.returncode in ((-9, -14) if "." not in moment else (-9, -14, 0)), first.stderr
    for file, data in left_in(place / "out").items():
        if file.endswith((".h5", "model.safetensors")) and not Path(file).name.startswith("."):
            assert data == expected[file], file
    again = launch(0, COMMANDS[name], cwd=place, timeout=600)
    assert again.returncode == 0, again.stderr
    left = left_in(place / "out")
    assert left.keys() == expected.keys()
    assert whole(left) == whole(expected)
