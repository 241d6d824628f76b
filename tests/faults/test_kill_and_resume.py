"""A job that is killed, or asked to stop, at any moment goes on with the same command, to the same bits."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import hpcfed
from hpcfed.ranks.world import World
from tests.faults import aimed
from tests.faults.aimed import EVALUATION, LOCAL, REDUCTION, RENAMED, WRITING
from tests.launch import Completed, launch, own_line
from tests.mpi import shrinking
from tests.mpi.recipes import METHODS, small, write_recipe, write_small
from tests.mpi.test_parameters import everything

pytestmark = pytest.mark.one_mpi

ROUNDS, EVERY = 14, 3
CASES, EACH_TIME = 40, 1
AT_LEAST = 5
FIRST = "before the first checkpoint"
SECOND = "a round's second attempt"
TWICE = "run-twice"
"""Variant of which every round but the first is run twice."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "scaffold": {"algorithm": {"name": "scaffold", **METHODS["scaffold"]}},
    TWICE: {"algorithm": {"factory": "shrinking:method"}, "dtype": "float64"},
    "feddyn": {"algorithm": {"name": "feddyn", **METHODS["feddyn"]}, "client_state": "disk"},
    "private-parts": {
        "algorithm": {"name": "fedavg", **METHODS["fedavg"]},
        "model": {"factory": "aimed:Net", "args": {"hidden": 4000, "norms": True}},
        "parameters": {"private": ["layers.0.*", "layers.3.*"], "buffers": "averaged"},
        "evaluate": {"every": 0, "clients": {"every": 1}},
    },
    "fedexp-m": {"algorithm": {"name": "fedexp-m", **METHODS["fedexp-m"]}, "evaluate": {"model": "last-two"}},
    "gel": {
        "algorithm": {"name": "fedavg", "server_lr": 1.0},
        "guess": "remaining",
        "budget": {"low": 1, "high": 6},
        "local": {"steps": 8, "batch_size": 10, "lr": 0.05, "momentum": 0.5},
    },
}


@dataclass(frozen=True)
class Case:
    """The signal, the run it hits, and the numbers of ranks before and after."""

    variant: str
    stage: str
    round: int
    attempt: int
    rank: int
    ranks: int
    ranks_after: int
    signal: str
    launcher: bool
    after: float

    def __str__(self) -> str:
        target = "launcher" if self.launcher else f"rank {self.rank}"
        return f"{self.variant}, {self.signal} to {target} of {self.ranks}, {self.stage} of round {self.round}"


def drawn(number: int) -> Case:
    """Draw a case: stages and methods in turn, all else at random."""
    rng = random.Random(number)
    variant = list(VARIANTS)[(number + number // 6) % len(VARIANTS)]
    stage = (WRITING, LOCAL, RENAMED, REDUCTION, EVALUATION, FIRST)[number % 6]
    ranks = 2 if number < EACH_TIME else rng.choice([2, 2, 3] if stage in (REDUCTION, FIRST) else [1, 2, 3, 4])
    writes = stage in (WRITING, RENAMED)
    signal = (
        "SIGKILL"
        if writes
        else ("SIGTERM", "SIGKILL", "SIGUSR1", "SIGKILL")[number // 6 % 4 if number >= 6 else number % 4]
    )
    return Case(
        variant=variant,
        stage=rng.choice([LOCAL, REDUCTION, EVALUATION]) if stage == FIRST else stage,
        round=rng.choice([6, 9]) if writes else rng.randint(1, EVERY) if stage == FIRST else rng.randint(5, 12),
        attempt=2 if variant == TWICE and stage in (LOCAL, REDUCTION) else 0,
        rank=0 if writes else rng.randrange(ranks),
        ranks=ranks,
        ranks_after=2 if number < 3 else rng.randint(1, 4),
        signal=signal,
        launcher=signal != "SIGKILL" and ranks > 1 and rng.random() < 0.5,
        after=rng.choice([0, rng.uniform(0, 0.004)]) if stage == WRITING else 0.0,
    )


class Place:
    """A folder with a federation and the recipe of one variant, whose runs may be aimed at."""

    def __init__(self, path: Path, variant: str):
        self.path, self.run = path, path / "run"
        write_small(path, 6)
        shutil.copy(aimed.__file__, path / "aimed.py")
        shutil.copy(shrinking.__file__, path / "shrinking.py")
        evaluate = {"batch_size": 16, **VARIANTS[variant].get("evaluate", {})}
        local = VARIANTS[variant].get("local", small(None)["local"])
        self.recipe = write_recipe(
            path,
            rounds=ROUNDS,
            cohort={"size": 5},
            checkpoint={"every": EVERY},
            placement="static",
            **{
                "model": {"factory": "aimed:Net", "args": {"hidden": 4000}},
                **VARIANTS[variant],
                "evaluate": evaluate,
                "local": {**local, "engine": "sequential"},  # which calls the model at each step
            },
        )

    def start(self, ranks: int, aim: Mapping[str, Any] | None = None) -> Completed:
        """Start or resume the run; with an aim, it ends before its time."""
        (self.path / "landed.json").unlink(missing_ok=True)
        (self.path / "aim.json").unlink(missing_ok=True)
        if aim:
            (self.path / "aim.json").write_text(json.dumps(dict(aim)))
        return launch(ranks, ["run", self.recipe, "--quiet"], cwd=self.path)

    def landed(self) -> dict[str, Any]:
        """Return the moment at which the signal arrived; fails if none did."""
        return json.loads((self.path / "landed.json").read_text())

    def manifests(self) -> list[int]:
        return sorted(int(path.stem[6:]) for path in (self.run / "checkpoints").glob("*.json"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each variant's uninterrupted run leaves, as far as it has been asked for."""
    return {}


@pytest.fixture(scope="module")
def table() -> list[tuple[Case, dict[str, Any], int]]:
    """Passed cases: the intended moment, the actual one, and the rounds that were kept."""
    return []


def uninterrupted(variant: str, whole: dict[str, Any], factory: pytest.TempPathFactory) -> Any:
    if variant not in whole:
        place = Place(factory.mktemp(variant), variant)
        output = [f"output={place.path / 'run'}"]
        whole[variant] = everything(hpcfed.run(place.recipe, output, world=World(), quiet=True))
    return whole[variant]


@pytest.mark.deadline(400)
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n < EACH_TIME else pytest.mark.soak) for n in range(CASES)]
)
def test_kill_and_resume(number, whole, table, tmp_path, tmp_path_factory):
    case = drawn(number)
    place = Place(tmp_path, case.variant)
    first = place.start(case.ranks, asdict(case))
    landed, kept = place.landed(), place.manifests()
    if case.signal == "SIGKILL":
        assert first.returncode not in (0, 2, 3, 4, 75), first.stderr
        assert "Traceback" not in first.stderr
    else:
        assert first.returncode == 75, first.stderr
        line = own_line(first.stderr)
        assert f"stopped after round {kept[-1]}: " in line
        assert kept[-1] in (landed["round"], landed["round"] + 1)
        assert json.loads((place.run / "result.json").read_text())["status"] == "stopped"
    again = place.start(case.ranks_after)
    assert again.returncode == 0, again.stderr
    result = hpcfed.run(place.recipe, [f"output={place.run}"], world=World(), quiet=True)  # finished: only read
    models, metrics, *others = everything(result)
    expected = uninterrupted(case.variant, whole, tmp_path_factory)
    assert metrics == expected[1]
    assert models == expected[0]
    assert others == [*expected[2:]]
    assert bool(others[0]) == (case.variant == "private-parts")
    assert not list((place.run / "checkpoints").glob(".*"))
    table.append((case, landed, kept[-1] if kept else 0))


@pytest.mark.soak
def test_the_blows_fell_everywhere(table, capsys):
    """Counted by their actual moment, which may be two stages: a checkpoint is written while a round trains."""
    if len(table) < CASES:
        pytest.skip(f"needs the {CASES} cases above, all well; there are {len(table)}")
    landed = Counter(landed["stage"] for _, landed, _ in table)
    landed[WRITING] = sum(landed["writes"] for _, landed, _ in table)
    landed[FIRST] = sum(landed["manifests"] == 0 for _, landed, _ in table)
    landed[SECOND] = sum(landed["attempt"] == 2 and landed["stage"] in (LOCAL, REDUCTION) for _, landed, _ in table)
    with capsys.disabled():
        print()
        for case, where, kept in table:
            print(f"{case!s:75} landed: {where['stage']}, round {where['round']}; kept {kept}; then {case.ranks_after}")
        for stage, count in landed.most_common():
            print(f"{stage:30} {count}")
    for stage in (LOCAL, REDUCTION, EVALUATION, WRITING, RENAMED, FIRST, SECOND):
        assert landed[stage] >= (2 if stage == SECOND else AT_LEAST), stage
