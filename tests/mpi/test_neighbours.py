"""Products that see a client's slot or neighbours: `compare`, `verify` and `replay` name the client, and no sum."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import hpcfed
from hpcfed.provenance.compare import PART, parting
from hpcfed.provenance.replay.replay import replay
from hpcfed.provenance.replay.show import lines
from hpcfed.provenance.verify.verify import DIFFERS, IN_PART, Verification, verify
from hpcfed.ranks.world import World
from tests.mpi.recipes import METHODS, small
from tests.mpi.test_sentinel import by_fullness, by_neighbour, by_rank, by_slot, round_by
from tests.mpi.test_verify import write_true
from tests.soak import often

pytestmark = pytest.mark.one_mpi
DEPENDS = r"round \d: the update of client \d \(\d\) depends on {} here: [0-9a-f]{{16}} as on "
KINDS = [(by_slot, "the slot of its tile"), (by_neighbour, "its neighbours"), (by_fullness, "its neighbours")]
LOCAL = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": "batched", "matmul": "blas", "tile": 4}


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    world.on_root(lambda: write_true(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def trained(output: str, world: World, **changes: Any) -> Path:
    recipe = {"local": LOCAL, "cohort": {"size": 3}, "checkpoint": {"every": 2}, "rounds": 4, "sentinel": "off"}
    return hpcfed.run(small(output, **{**recipe, **changes}), world=world, quiet=True).folder


def larger(what: Any) -> Any:
    """The same fault, larger, and in the first slot of a tile, too."""

    def rounded(x: Tensor, rank: int) -> Tensor:
        return 1 + 2 * what(x, rank)

    return rounded


@pytest.mark.every(3)
@pytest.mark.thinned
@pytest.mark.parametrize(
    ("hashes", "kind"), often([(True, 0), (False, 1), (True, 2)], [(h, k) for h in (True, False) for k in range(3)])
)
def test_compare_blames_no_sum_for_what_neighbours_do(kind, hashes, world, folder, monkeypatch):
    what, on = KINDS[kind]
    changes = {"update_hashes": hashes, "algorithm": {"name": "scaffold", **METHODS["scaffold"]}}
    trained("honest", world, **changes)
    round_by(monkeypatch, what, world.rank)
    trained("rounded", world, **changes)
    if not world.is_root:
        return
    said: list[str] = []
    assert parting([folder / "honest", folder / "rounded"], None, None, said.append).code == PART
    text = "\n".join(said)
    assert "reduction and algorithm" not in text
    for run in ("honest", "rounded"):  # both are computed on this machine
        assert re.search(f"{re.escape(str(folder / run))}: {DEPENDS.format(on)}", text)


@pytest.mark.parametrize("hashes", [True, False])
def test_what_the_sentinel_found_by_rank_is_blamed_before_a_sum(hashes, world, folder, monkeypatch):
    """One process computes the updates of all ranks alike, so that only the runs themselves can know."""
    if world.size == 1:
        return  # there is no other rank
    changes = {"update_hashes": hashes, "sentinel": "on", "placement": "balanced", "rounds": 8}
    trained("honest", world, **changes)
    with monkeypatch.context() as patch:
        round_by(patch, by_rank, world.rank)
        run = trained("rounded", world, **changes)
    if not world.is_root:
        return
    said: list[str] = []
    assert parting([folder / "honest", folder / "rounded"], None, None, said.append).code == PART
    text = "\n".join(said)
    assert "reduction and algorithm" not in text
    said_by_itself = r"its record says bitwise: false: from round \d on: the update of client \d was another"
    assert re.search(rf"{run}: {said_by_itself} .* on rank \d, not \d \([0-9a-f]{{16}} and ", text)
    verify(Verification(run, rounds=None, seed=0), World(), said.append)
    assert re.search(said_by_itself, "\n".join(said[len(text.splitlines()) :]))


@pytest.mark.every(3)
@pytest.mark.thinned
@pytest.mark.parametrize(("what", "on"), KINDS)
def test_verify_of_an_honest_run_does_not_fail_where_neighbours_decide(what, on, world, folder, monkeypatch):
    with monkeypatch.context() as patch:
        round_by(patch, what, world.rank)
        run = trained("run", world)
    round_by(monkeypatch, larger(what), world.rank)
    said: list[str] = []
    assert verify(Verification(run, rounds=None, seed=0), world, said.append) == IN_PART
    assert re.search(f"this machine computes other bits: {DEPENDS.format(on)}", "\n".join(said))
    assert "not to the bit" in said[-1], said
    found = replay(run, 1, json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["cohort"][0])
    assert not found.agrees
    assert re.search(DEPENDS.format(on), lines(found)[-1])


@pytest.mark.thinned
def test_where_nothing_depends_on_neighbours_the_fault_is_the_records(world, folder):
    run = trained("run", world)

    def tamper() -> None:
        path = run / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[2]["hash"] = f"{int(rows[2]['hash'], 16) ^ 1:016x}"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "certificate.json").unlink()

    world.on_root(tamper)
    said: list[str] = []
    assert verify(Verification(run, rounds=None, seed=0), world, said.append) == DIFFERS
    assert "depends on" not in "\n".join(said)
