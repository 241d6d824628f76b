"""Client states are restored bit for bit from device, host and disk, within the memory limits."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcfed.assembly import assemble, resolve
from hpcfed.client.state_store import ClientStates
from hpcfed.config.load import load_recipe
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.ranks.world import World
from hpcfed.simulation import Simulation
from tests.federations import write_federation
from tests.mpi.recipes import small, write_small

CPU = torch.device("cpu")
D = 64
NBYTES = 2 * 4 * D


def state(client: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(client)
    return {name: torch.randn(D, generator=generator) for name in ("c", "last-model")}


@pytest.fixture
def node_disk(tmp_path, monkeypatch) -> Path:
    """The node's temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def bytes_on(disk: Path) -> int:
    """Return the bytes of the files without a name that this process has open on a disk."""
    assert list(disk.iterdir()) == []
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the folder itself
            found += link.stat().st_size if link.readlink().is_relative_to(disk) else 0
    return found


def places_on(disk: Path) -> int:
    """Return how many states the files of a disk have room for."""
    return bytes_on(disk) // NBYTES


@pytest.mark.parametrize("top", ["device", "host", "disk"])
@pytest.mark.parametrize("room", [0, 3 * NBYTES, 100 * NBYTES])
def test_committed_states_are_read_back(top, room, node_disk):
    with ClientStates(top, CPU, {"device": room, "host": room}) as states:
        assert states.get(5) is None
        for round in range(3):  # each client's second state replaces its first, in any of the three places
            for client in range(8):
                states.commit({client: state(100 * round + client)})
            assert sorted(states) == list(range(8))
            assert len(states) == 8
            for client in (*range(8), *reversed(range(8))):
                found = states.get(client)
                assert found is not None
                assert all(torch.equal(found[name], tensor) for name, tensor in state(100 * round + client).items())
        held = 0 if top == "disk" else min(8, room // NBYTES)
        assert 8 - held <= places_on(node_disk) <= (9 if held < 8 else 0)
    assert bytes_on(node_disk) == 0


@pytest.mark.parametrize("room", [0, 3 * NBYTES, 100 * NBYTES])
def test_a_snapshot_stays_as_it_was_taken(room, node_disk):
    """Committed states stay, in memory and on disk, until a release, which removes them."""
    with ClientStates("host", CPU, {"device": 0, "host": room}) as states:
        states.commit({client: state(client) for client in range(8)})
        snapshot = states.snapshot()
        for round in (1, 2):
            states.commit({client: state(100 * round + client) for client in range(8)})
        assert sorted(snapshot) == list(range(8))
        for client in range(8):
            assert all(torch.equal(snapshot[client][name], tensor) for name, tensor in state(client).items())
        states.end_snapshot()
        states.commit({0: state(300)})
        held = min(8, room // NBYTES)
        assert 8 - held <= places_on(node_disk) <= 2 * 8 + 1


def test_memory_is_used_again(node_disk):
    """One state more than there are clients, however often they take part."""
    with ClientStates("host", CPU, {"device": 0, "host": 100 * NBYTES}) as states:
        seen = set()
        for round in range(9):
            for client in range(3):
                states.commit({client: state(10 * round + client)})
                seen.add(states.get(client)["c"].data_ptr())
        assert len(seen) == 4


def test_memory_that_snapshots_held_is_used_again(node_disk):
    """At most a second state of each client, however long snapshots are held and however often they are taken."""
    with ClientStates("host", CPU, {"device": 0, "host": 100 * NBYTES}) as states:
        seen = set()
        for round in range(20):
            if round % 4 == 0:
                states.end_snapshot()
                states.snapshot()
            for client in range(3):
                states.commit({client: state(10 * round + client)})
                seen.add(states.get(client)["c"].data_ptr())
        assert len(seen) <= 2 * 3 + 1


def test_what_has_been_read_is_not_held(node_disk):
    with ClientStates("disk", CPU, {"device": 0, "host": 0}) as states:
        states.commit({client: state(client) for client in range(3)})
        snapshot = states.snapshot()
        states.release(1)
        states.commit({client: state(100 + client) for client in range(3)})
        assert places_on(node_disk) == 3 + 2
        assert all(torch.equal(snapshot[2][name], tensor) for name, tensor in state(2).items())


def test_the_least_recently_committed_moves_down_first(node_disk):
    with ClientStates("host", CPU, {"device": 0, "host": 2 * NBYTES}) as states:
        for client in (1, 2, 1, 3):
            states.commit({client: state(client)})
        assert list(states)[-1] == 2  # the disk's come last
        assert places_on(node_disk) == 1


@pytest.mark.parametrize("client_state", ["device", "disk"])
def test_only_clients_that_took_part_take_memory(client_state, world, shared_tmp):
    """Each on the rank where it is at home, from the commit after its first round on."""
    world.on_root(lambda: write_small(shared_tmp, 12))
    world.on_root(lambda: (shared_tmp / "cohorts.json").write_text("[[1, 7], [7, 2], [1, 7], [11, 2]]"))
    recipe = small(
        shared_tmp / "run",
        data=str(shared_tmp / "small.h5"),
        rounds=4,
        algorithm={"name": "scaffold"},
        cohort={"schedule": str(shared_tmp / "cohorts.json")},
        client_state=client_state,
    )
    parts, _ = assemble(resolve(load_recipe(recipe)), world)
    simulation, taken_part = Simulation(parts), set()
    with parts.clients:
        for round, cohort in enumerate(([1, 7], [7, 2], [1, 7], [11, 2]), 1):
            simulation.round(round)
            taken_part |= {client for client in cohort if parts.placement.home_of(client) == world.rank}
            assert sorted(parts.clients) == sorted(taken_part)


ANCHORED = """
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, Tilt


class Anchored(ClientRule):
    stateful = True

    def begin(self, w):
        return {"first": w.new_zeros(w.shape), "rounds": w.new_zeros(())}

    def tilt(self, w, shared, client, context):
        return Tilt(mu=0.1, anchor=client["first"])

    def next_state(self, sent, local, w, shared, client, context):
        first = client["first"] if client["rounds"] else w - local.delta
        return {"first": first, "rounds": client["rounds"] + 1}


def method():
    return Method("anchored", Anchored(), ServerStep())
"""
"""A module of the user's: a client is drawn to its first model, a tensor of its state that it returns as it is."""


def test_what_a_client_keeps_of_its_state_is_its_own_when_others_move_down(world, shared_tmp):
    """With memory for two states a rank, the others on disk, each round is that with memory for all."""
    world.on_root(lambda: write_small(shared_tmp, 12))
    world.on_root(lambda: (shared_tmp / "anchored.py").write_text(ANCHORED))
    recipe = small(
        shared_tmp / "run",
        data=str(shared_tmp / "small.h5"),
        rounds=4,
        algorithm={"factory": "anchored:method"},
        python_path=[str(shared_tmp)],
        cohort={"size": 9},
    )
    hashes = []
    for room in (1 << 20, 2 * 704):
        parts, _ = assemble(resolve(load_recipe(recipe)), world)
        with ClientStates("host", parts.model.vector.device, {"device": 0, "host": room}) as states:
            simulation = Simulation(replace(parts, clients=states))
            hashes.append([simulation.round(round).hash for round in range(1, 5)])
    assert hashes[0] == hashes[1]


def test_a_full_disk_is_an_environment_failure(node_disk):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ClientStates("disk", CPU, {"device": 0, "host": 0}) as states:
        states.commit({1: state(1)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES, limits[1]))
        try:
            with pytest.raises(EnvironmentFailure, match=r"state of client 2.*TMPDIR"):
                states.commit({2: state(2)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_temporary_folder_that_does_not_exist_is_refused(tmp_path, monkeypatch):
    """Before the first round, where all states or the data go there. /tmp is not used in its place."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    data = write_small(tmp_path)
    changes = {"data": str(data), "algorithm": {"name": "scaffold"}}
    recipe = resolve(load_recipe(small(tmp_path / "run", **changes)))
    for key, value, said in (
        ("client_state", "disk", "no file for clients' states"),
        ("data_access", "stage", "staged"),
    ):
        with pytest.raises(EnvironmentFailure, match=rf"nowhere: .*{said}.*got No such file.*point \$?TMPDIR to"):
            assemble(recipe.model_copy(update={key: value}), World())
    assert len(assemble(recipe, World())[0].clients) == 0
    with ClientStates("host", CPU, {"device": 0, "host": 0}) as states, pytest.raises(EnvironmentFailure):
        states.commit({1: state(1)})


def test_a_message_names_the_data_and_not_their_staged_copy(tmp_path):
    x = np.zeros((2, 12), np.float32)
    data = write_federation(
        tmp_path / "halves.h5", [(x, np.zeros(2, np.uint8)), (x, np.ones(2, np.uint8))], num_classes=2
    )
    changes = {"data": str(data), "data_access": "stage", "loss": {"weights": "balanced-by-site"}}
    recipe = resolve(load_recipe(small(tmp_path / "run", **changes)))
    with pytest.raises(InputError, match=rf"^{data}: loss.weights"):
        assemble(recipe, World())


def test_small_states_are_packed(node_disk):
    """A thousand states of 11 numbers take 64 bytes each, in memory and on disk."""
    with ClientStates("host", CPU, {"device": 0, "host": 500 * 64}) as states:
        for client in range(1000):
            states.commit({client: {"c": torch.full((11,), float(client))}})
        assert bytes_on(node_disk) == 500 * 64
        assert all(states.get(client)["c"].tolist() == [client] * 11 for client in range(1000))
