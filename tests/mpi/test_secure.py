"""Secure aggregation on ranks: the bits of a run alone, after a resume, in `verify`; no message tells of one client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfed
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World
from hpcfed.reduce.masks import NUMBERS, RoundMasks
from hpcfed.reduce.slots import RANK_SLOT, client_slot
from tests.mpi.recipes import small, write_small
from tests.mpi.test_same_result import left_by

pytestmark = [pytest.mark.one_mpi]


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """The working folder of all ranks."""
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def recipe(name: str, **changes: Any) -> dict[str, Any]:
    scales = {"psi": 5.0} if changes.get("algorithm") == {"name": "scaffold"} else {}
    return small(name, updates=[{"clip": {"norm": 0.3, "scales": scales}}], **changes)


SEED = "8f1c6a0be35d97421b6e0c9d4a7f5328"
NOISED: dict[str, Any] = {"secret_seed": "secret.txt", "means": [{"noise": {"multiplier": 1.0}}]}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["fedexp", "scaffold", "scaffold, with noise"])
def test_a_run_is_the_same_as_alone_and_is_verified(name, world, folder):
    name, noise, _ = name.partition(", with noise")
    world.on_root(lambda: write_small(folder) and (folder / "secret.txt").write_text(SEED) and None)
    about: dict[str, Any] = {
        **(NOISED if noise else {}),
        "algorithm": {"name": name},
        "secure_aggregation": {"dropout": 0.3},
        "budget": {"low": 1, "high": 6},
        "checkpoint": {"every": 1, "keep": 9},
    }

    def run(output: str, where: World, **changes: Any) -> tuple:
        return left_by(hpcfed.run(recipe(output, **{**about, **changes}), world=where, quiet=True))

    together = run("together", world)
    if world.rank == world.size - 1:
        assert run("alone", World()) == together
    world.on_root(lambda: run("resumed", World(), rounds=1) and None)
    assert run("resumed", world) == together
    assert verify(Verification(folder / "together", None, 0), world, [].append) == 0
    if noise and world.rank == 0:
        replays = [hpcfed.replay(folder / "together", 2, client) for client in range(5)]
        assert all(replay.agrees for replay in replays)
        assert {replay.dropped for replay in replays} == {True, False}


def test_no_message_has_a_number_of_one_client(world, folder, monkeypatch):
    """With one client a rank: of its words of the same run without masks none is in what it sends."""
    clients = max(2, world.size)
    world.on_root(lambda: write_small(folder, num_clients=clients) and None)
    found: list[np.ndarray] = []
    summing = type(world).sum_in_place

    def watched(self: World, buffer: Any) -> None:
        found.append(np.array(buffer).reshape(-1).view(np.int64))
        summing(self, buffer)

    def sent(output: str) -> np.ndarray:
        found.clear()
        about = {"evaluate": {"every": 0}, "rounds": 1, "placement": "static"}
        hpcfed.run(recipe(output, secure_aggregation={}, **about), world=world, quiet=True)
        return max(found, key=len)

    monkeypatch.setattr(type(world), "sum_in_place", watched)
    masked = sent("masked")
    monkeypatch.setattr(RoundMasks, "drawn", lambda self, purpose, address, size: np.zeros(size, np.uint64))
    plain = sent("plain")
    slots = clients * client_slot(1).itemsize // 8, world.size * RANK_SLOT.itemsize // 8
    vector, of_clients = len(masked) - NUMBERS - sum(slots), slice(-NUMBERS - sum(slots), -NUMBERS - slots[1])
    own = masked[of_clients].view(client_slot(1))
    assert np.count_nonzero(own["status"]) == (1 if world.size > 1 else clients)
    for field in ("steps", "delta_sq", "loss_sum", "bounds"):
        assert not own[field].any()
    private = [*plain[:vector], *plain[-NUMBERS:]]
    assert np.count_nonzero(private) > 100
    if world.size > 1:  # a single rank sends nothing
        assert not {*private} & {*masked[:vector], *masked[-NUMBERS:]} - {0}
