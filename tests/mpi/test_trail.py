"""The trail of a run: hashes of updates, spaced checkpoints and the certificate, on any number of ranks."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import hpcfed
from hpcfed.config.limits import Checkpoint
from hpcfed.errors import InputError
from hpcfed.io.atomic import to_disk
from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.update_hash import hash_of_update
from hpcfed.reduce.weighted_update import WeightedUpdate
from hpcfed.run_folder.certificate import faults, read_certificate
from hpcfed.run_folder.checkpoint.restore import damage_of
from hpcfed.run_folder.checkpoint.writer import Retention, manifests, remove_all_but, round_of
from hpcfed.run_folder.rounds import count_rounds
from hpcfed.run_folder.update_hashes import read_update_hashes
from tests.mpi.recipes import METHODS, small, write_small

pytestmark = [pytest.mark.one_mpi, pytest.mark.thinned]


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation of five clients; the working folder of all ranks."""
    world.on_root(lambda: write_small(shared_tmp) and None)
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def of(method: str, **changes) -> dict:
    return small(**{"algorithm": {"name": method, **METHODS[method]}, "cohort": {"size": 3}, "rounds": 4, **changes})


@pytest.mark.every(3)
@pytest.mark.of_ranks
@pytest.mark.parametrize("method", ["fedexp", "scaffold", "fedsplit"])
def test_hashes_of_updates_are_the_same_on_any_number_of_ranks_and_resumed(method, world, folder):
    recipe = of(method, update_hashes=True, checkpoint={"every": 1}, output="together")
    hpcfed.run({**recipe, "rounds": 2}, world=world, quiet=True)
    together = hpcfed.run(recipe, world=world, quiet=True)
    alone = hpcfed.run(of(method, update_hashes=True, output=f"alone-{world.rank}"), world=World(), quiet=True)
    found = (together.folder / "update-hashes.bin").read_bytes()
    assert found == (alone.folder / "update-hashes.bin").read_bytes()
    sizes = [len(row["cohort"]) for row in together.metrics]
    assert len(found) == 8 * sum(sizes)
    assert len(set(np.frombuffer(found, "<u8"))) == sum(sizes)  # all different
    third = read_update_hashes(together.folder / "update-hashes.bin", sizes, 3)
    assert third is not None
    assert third.tolist() == np.frombuffer(found, "<u8")[6:9].tolist()


def test_hashes_of_updates_leave_the_result_as_it_is(world, folder):
    without, with_them = (
        hpcfed.run(of("fedexp", output=f"{on}", **({"update_hashes": True} if on else {})), world=world, quiet=True)
        for on in (False, True)
    )
    assert [row["hash"] for row in without.metrics] == [row["hash"] for row in with_them.metrics]
    assert not (without.folder / "update-hashes.bin").exists()
    assert "update_hashes" not in (without.folder / "recipe.yaml").read_text()


def test_lost_hashes_of_updates_end_a_resumed_run(world, folder):
    recipe = of("fedexp", update_hashes=True, checkpoint={"every": 1}, output="run")
    result = hpcfed.run({**recipe, "rounds": 2}, world=world, quiet=True)
    record = result.folder / "metrics.jsonl"

    def spoil() -> bytes:
        (result.folder / "update-hashes.bin").unlink()
        with record.open("a") as file:
            file.write('{"round": 3}\n')  # after the checkpoint
        return record.read_bytes()

    before = world.on_root(spoil)
    with pytest.raises(InputError, match=r"hashes are missing: expected 48 bytes, got 0"):
        hpcfed.run(recipe, world=world, quiet=True)
    assert record.read_bytes() == before


def test_a_skipped_client_has_no_hash():
    buffer = RoundBuffer(4, torch.float32, torch.device("cpu"), World(), hashes_updates=True)
    buffer.open({"delta": (2.0**-20,)}, 2)
    good, bad = torch.ones(4), torch.full((4,), torch.inf)
    assert [
        buffer.add(WeightedUpdate(place, 1.0, {"delta": v}, loss_sum=0.0, steps=1), skips=True)
        for place, v in ((0, bad), (1, good))
    ] == [
        False,
        True,
    ]
    hashes = buffer.reduce(0, 0.0).update_hashes
    assert hashes is not None
    assert hashes.tolist() == [0, hash_of_update({"delta": good}, ["delta"])]


@pytest.mark.of_ranks
@pytest.mark.parametrize("method", ["feddyn", "fedavg"])
def test_the_chain_of_the_certificate_is_the_same_wherever_a_run_was_computed(method, world, folder):
    recipe = of(method, checkpoint={"every": 1, "keep": "spaced"}, output="together")
    hpcfed.run({**recipe, "rounds": 2}, world=world, quiet=True)
    together = hpcfed.run(recipe, world=world, quiet=True)
    alone = hpcfed.run(of(method, output=f"alone-{world.rank}"), world=World(), quiet=True)
    world.gather(None)
    one, other = (read_certificate(result.folder) for result in (together, alone))
    assert one is not None
    assert other is not None
    assert one["chain"] == other["chain"]
    assert one["rounds"] == other["rounds"]
    assert one["files"]["model.safetensors"] == other["files"]["model.safetensors"]
    assert any(name.endswith(".clients") for name in one["files"]) == (method == "feddyn")
    assert faults(together.folder, one) == []
    assert one["repeatable"]


def test_a_run_whose_bits_depend_on_its_ranks_says_so_in_its_certificate(world, folder):
    result = hpcfed.run(of("fedavg", reduction="fast", output="run"), world=world, quiet=True)
    world.gather(None)
    certificate = read_certificate(result.folder) or {}
    assert not certificate["repeatable"]
    assert "reduction: fast" in certificate["why_not"]


def test_a_manifest_has_the_sha256_of_its_state(world, folder):
    from hpcfed.run_folder.certificate import sha256_of

    result = hpcfed.run(of("scaffold", checkpoint={"every": 2}, output="run"), world=world, quiet=True)
    world.gather(None)
    found = sorted((result.folder / "checkpoints").glob("*.json"))
    assert found
    for path in found:
        assert json.loads(path.read_text())["sha256"] == sha256_of(path.with_suffix(".server"))


def test_spaced_checkpoints_are_few_and_near_to_every_round(tmp_path):
    last = 300
    for round in range(1, last + 1):
        (tmp_path / f"round-{round:08}.json").touch()
        remove_all_but(tmp_path, Retention(Checkpoint(keep="spaced")))
        kept = sorted(map(round_of, tmp_path.iterdir()))
        assert kept[-2:] == [*range(max(1, round - 1), round + 1)]
        assert len(kept) <= Checkpoint(keep="spaced").most_kept(round)
        assert all(later <= earlier + max(1, earlier / 4) + 2 for earlier, later in pairwise(kept))
    assert len(kept) < 25


def test_twenty_states_at_equal_distances_are_kept_by_default(world, folder):
    """On any number of ranks, at the same rounds; of a run that goes on, at those of all its rounds."""
    run = hpcfed.run(of("scaffold", rounds=45, output="run"), world=world, quiet=True).folder
    world.gather(None)

    def kept() -> list[int]:
        return sorted(map(round_of, (run / "checkpoints").glob("*.json")))

    assert world.on_root(kept) == sorted({-(-number * 45 // 20) for number in range(1, 21)})
    hpcfed.run(of("scaffold", rounds=90, output="run"), world=world, quiet=True)
    world.gather(None)
    found = world.on_root(kept)
    assert len(found) <= 22
    assert found[-1] == 90
    assert all(later - earlier <= 6 for earlier, later in pairwise([0, *found]))


def test_rounds_do_not_wait_until_the_states_between_are_on_disk(world, folder, monkeypatch):
    """A disk that takes its time, here until the fifteenth round of twenty; in the end all of them are there."""
    record, found = folder / "run" / "metrics.jsonl", list[int]()

    def slow(path: Path) -> None:
        deadline = time.monotonic() + 60
        while count_rounds(record) < 15 and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(count_rounds(record))
        to_disk(path)

    monkeypatch.setattr("hpcfed.run_folder.checkpoint.writer.to_disk", slow)
    run = hpcfed.run(of("scaffold", rounds=20, output="run"), world=world, quiet=True).folder
    world.gather(None)
    if world.is_root:
        assert min(found) >= 15
        kept = manifests(run / "checkpoints")
        assert sorted(map(round_of, kept)) == [*range(1, 21)]
        assert not any(damage_of(manifest) for manifest in kept)


def test_evenly_spaced_states_take_less_than_a_gibibyte():
    even = Checkpoint()
    assert even.num_states(1000, 1 << 20) == 20
    assert even.num_states(7, 1 << 20) == 7
    assert even.num_states(1000, 100 << 20) == 10
    assert even.num_states(1000, 1 << 30) == 0
    assert Checkpoint(every=0).num_states(1000, 1) == Checkpoint(keep=2).num_states(1000, 1) == 0
