"""Commands that write files, killed at twenty moments: the same command then completes each.

What a killed command left is whole or is not taken for good, and once the command has been let to its end there is
nothing but what an undisturbed one leaves.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults import killed, struck
from tests.launch import ROOT, launch
from tests.mpi import shrinking
from tests.mpi.recipes import write_recipe, write_small

MOMENTS = 20
COMMANDS = {
    "run": ["run", "own.yaml", "--quiet"],
    "report": ["report", "run", "--output", "out/report"],
    "prepare": ["prepare", "feddyn-synthetic", "--clients", "3", "--output", "out/made.h5", "--overwrite"],
    "sweep": ["sweep", "recipe.yaml", "--grid", "local.lr=0.1,0.2", "--seeds", "2", "--output", "out/sweep", "--quiet"],
    "study": [
        *("study", "recipe.yaml", "rounds=2", "--tune", "local.lr=0.05,0.1", "--splits", "2", "--baselines", "none"),
        *("--bootstrap", "100", "--output", "out/study", "--quiet"),
    ],
    "reproduce": ["reproduce", "fedexp-figure2", "--rounds", "2", "--output", "out"],
    "without": ["without", "run", "--client", "3", "--evaluate", "all", "--output", "out/without", "--quiet"],
    "contributions": ["contributions", "run", "--permutations", "1", "--output", "out/brings", "--quiet"],
}
OWN = {
    "output": "out/run",
    "rounds": 5,
    "dtype": "float64",
    "algorithm": {"factory": "shrinking:method"},
    "checkpoint": {"every": 2},
    "evaluate": {"every": 1, "clients": {"every": 1}},
}
"""Changes for a run of own code, every round of which but the first is run twice."""
OF_A_RUN = {
    "without": {"rounds": 8, "cohort": {"schedule": [[0, 1], [1, 2], [3, 4], [0, 3]]}, "checkpoint": {"every": 1}},
    "contributions": {"rounds": 4, "cohort": {"size": 2}, "checkpoint": {"every": 1, "keep": "spaced"}},
}
"""Recipes of runs from which a command begins; some rounds, and their states, are the recorded ones."""
OF_ATTEMPTS = re.compile(r"previous-\d+(/|$)|claims/.*\.\d+$|checkpoints/round-\d+\.")
"""Names that depend on attempts: records of rounds lost with them, who has tried a run, and which checkpoints are kept
where one is still being written when the next is due.
"""
SAME = (".h5", ".safetensors", ".md", ".csv", ".tex", "study.html", "study.yaml", "metrics.jsonl", "code.json")
"""Endings of files that an undisturbed command leaves with the same bytes, times apart."""
FRACTIONS = rb"\b\d+\.\d+\b"
DIFFERENT = {
    "results.csv": FRACTIONS, "summary.csv": FRACTIONS, "metrics.jsonl": rb'"seconds": .*', "code.json": rb'"path": .*',
    "study.html": rb" /\S+",  # absolute paths in recipes
}  # fmt: skip
"""What differs in a file, times and places; other columns of fractions in a sweep's tables go with them."""


def left_in(folder: Path) -> dict[str, bytes]:
    """Permanent files by name with their contents; folders by name only."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else b""
        for name, path in found.items()
        if not OF_ATTEMPTS.search(name)
    }


def whole(left: dict[str, bytes]) -> dict[str, bytes]:
    """The files whose bytes are reproducible, without times."""
    kept = {name: data for name, data in left.items() if name.endswith(SAME)}
    differ = {name: DIFFERENT.get(Path(name).name, rb"(?!)") for name in kept if "/tables/" not in name}  # of a study
    return {name: re.sub(differ.get(name, rb"(?!)"), b"", data) for name, data in kept.items()}


class Called(NamedTuple):
    """How a command ended."""

    returncode: int
    stderr: str


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[[Path, Sequence[str], str], Called]]:
    """Return what calls a command in a folder, to be killed at a moment; at "" it is let be."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, killed.__file__]
    with subprocess.Popen(program, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def ask(place: Path, arguments: Sequence[str], moment: str = "") -> Called:
            request = {"place": str(place), "folder": "out", "moment": moment, "arguments": [*arguments]}
            print(json.dumps(request), file=server.stdin, flush=True)
            return Called(*json.loads(server.stdout.readline()))

        yield ask
        server.stdin.close()


@pytest.fixture(scope="module")
def undisturbed(
    call, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, dict[str, bytes], int, float]]:
    """Return, of a command, a folder to start from, what it leaves there, its events and the seconds they take."""
    known: dict[str, tuple[Path, dict[str, bytes], int, float]] = {}

    def run(name: str) -> tuple[Path, dict[str, bytes], int, float]:
        if name not in known:
            place = tmp_path_factory.mktemp(name)
            write_small(place)
            write_recipe(place, checkpoint={"every": 1})
            if name == "report":
                assert call(place, ["run", "recipe.yaml", "--quiet", "evaluate.every=0"]).returncode == 0  # few figures
            elif name in OF_A_RUN:
                write_recipe(place, **OF_A_RUN[name])
                assert call(place, ["run", "recipe.yaml", "--quiet"]).returncode == 0
            elif name == "run":
                shutil.copy(shrinking.__file__, place / "shrinking.py")
                write_recipe(place, "own.yaml", **OWN)
            (place / "out").mkdir()
            fresh = shutil.copytree(place, tmp_path_factory.mktemp("fresh") / "place")
            done = call(place, COMMANDS[name], "0")
            assert done.returncode == 0, done.stderr
            count, seconds = (place / "out.events").read_text().split()
            known[name] = fresh, left_in(place / "out"), int(count), float(seconds)
        return known[name]

    return run


@pytest.mark.soak
@pytest.mark.deadline(1500)
@pytest.mark.parametrize("number", range(MOMENTS))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_is_done_by_the_same_one(name, number, undisturbed, call, tmp_path):
    """At an event, spread over all, and every third time at any moment between the first and the last."""
    fresh, expected, events, seconds = undisturbed(name)
    place = shutil.copytree(fresh, tmp_path / "place")
    moment = str(1 + number * (events - 1) // (MOMENTS - 1))
    if number % 3 == 1:
        moment = f"{0.001 + random.Random(number).random() * seconds:.6f}"
    first = call(place, COMMANDS[name], moment)
    assert first.returncode in ((-9, -14) if "." not in moment else (-9, -14, 0)), first.stderr
    for file, data in left_in(place / "out").items():
        if file.endswith((".h5", "model.safetensors")) and not Path(file).name.startswith("."):
            assert data == expected[file], file
    again = call(place, COMMANDS[name])
    assert again.returncode == 0, again.stderr
    left = left_in(place / "out")
    assert left.keys() == expected.keys()
    assert whole(left) == whole(expected)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(MOMENTS))
def test_a_killed_study_of_two_ranks_is_done_by_the_same_command(number, undisturbed, tmp_path):
    """One of the ranks is killed, by turns at an event and at any moment; all files are those of one rank."""
    fresh, expected, events, seconds = undisturbed("study")
    place = shutil.copytree(fresh, tmp_path / "place")
    moment = str(1 + number * (events // 2) // MOMENTS)
    if number % 3 == 1:
        moment = f"{0.001 + random.Random(number).random() * seconds:.6f}"
    first = launch(2, [str(number % 2), moment, "out", *COMMANDS["study"]], cwd=place, program=(struck.__file__,))
    assert first.returncode not in (2, 3, 4), first.stderr
    if number % 2 == 0 and number % 3 != 1:  # rank 0 has that many events
        assert first.returncode != 0
    again = launch(2, COMMANDS["study"], cwd=place, program=(struck.__file__, "-1", "", "out"))
    assert again.returncode == 0, again.stderr
    left = left_in(place / "out")
    assert left.keys() == expected.keys()
    assert whole(left) == whole(expected)
