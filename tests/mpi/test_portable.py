"""``bits: portable`` on any number of ranks, resumed, verified and replayed: the same bits."""

from __future__ import annotations

import json

import pytest

import hpcfed
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World
from hpcfed.run_folder.certificate import read_certificate
from tests.mpi.recipes import METHODS, small, write_small

pytestmark = pytest.mark.one_mpi


AFTER = {"name": "scaffold", "correction": "after-momentum", "c_scale": "uniform"}
"""NIID-Bench's SCAFFOLD."""


@pytest.mark.every(3)
@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fednova", "after-momentum"])
def test_the_same_on_ranks_resumed_verified_and_replayed(method, world, shared_tmp, monkeypatch):
    world.on_root(lambda: write_small(shared_tmp) and None)
    monkeypatch.chdir(shared_tmp)
    after = method == "after-momentum"
    recipe = small(
        "together",
        model={"name": "logistic"},
        bits="portable",
        algorithm=AFTER if after else {"name": method, **METHODS[method]},
        weights="samples" if after else None,
        budget={"low": 1, "high": 6},
        guess="none" if after else "remaining",
        local={"steps": 6, "batch_size": 9, "lr": 0.1, "momentum": 0.5, **({"clip_norm": 0.5} if after else {})},
        checkpoint={"every": 1},
        rounds=4,
        cohort={"size": 4},
        update_hashes=True,
        placement="balanced",
    )
    hpcfed.run({**recipe, "rounds": 2}, world=world, quiet=True)
    together = hpcfed.run(recipe, world=world, quiet=True)
    alone = hpcfed.run({**recipe, "output": f"alone-{world.rank}"}, world=World(), quiet=True)
    assert [row["hash"] for row in together.metrics] == [row["hash"] for row in alone.metrics]
    models = [(one.folder / "model.safetensors").read_bytes() for one in (together, alone)]
    assert models[0] == models[1]
    certificate = read_certificate(together.folder) or {}
    assert (certificate["bits"], certificate["repeatable"]) == ("portable", True)
    assert certificate["chain"] == (read_certificate(alone.folder) or {})["chain"]
    environment = json.loads((together.folder / "environment.json").read_text(encoding="utf-8"))
    assert (environment["bits"], environment["bitwise"]) == ("portable", True)
    said: list[str] = []
    world.broadcast(None)  # all are done
    assert verify(Verification(shared_tmp / "alone-0", None, 0), world, said.append) == 0
    client = alone.metrics[2]["cohort"][0]
    assert hpcfed.replay(alone.folder, 3, client).agrees
