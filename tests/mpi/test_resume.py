"""A run that goes on from a checkpoint leaves, bit for bit, what one that was never interrupted leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import hpcfed
from hpcfed.config.limits import Stop
from hpcfed.data.content import content_hash
from hpcfed.errors import Busy, EnvironmentFailure, InputError, Stopped
from hpcfed.lab.report.read import read_run
from hpcfed.ranks.world import World
from hpcfed.run_folder.checkpoint.layout import _digest
from hpcfed.run_folder.clock import Clock
from hpcfed.run_folder.files import LOCK, unusable
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.lock import FolderLock
from hpcfed.run_folder.stopping import TimeLeft
from hpcfed.simulation import Simulation
from hpcfed.types import Request
from tests.mpi.recipes import METHODS, small, write_recipe, write_small
from tests.mpi.test_same_result import left_by

pytestmark = [pytest.mark.one_mpi, pytest.mark.thinned]

ROUNDS, EVERY = 7, 2
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"evaluate": {"model": "last-two", "batch_size": 64}},
    "fedavg-and-guess": {
        "budget": {"low": 1, "high": 7},
        "local": {"steps": 9, "batch_size": 10, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.6},
        "guess": "remaining",
    },
    "scaffold": {"cohort": {"size": 3}},
    "feddyn": {"cohort": {"size": 3}, "client_state": "disk"},
    "fedexp-m": {"evaluate": {"model": "step-average", "batch_size": 64}},
    "fedadam": {"evaluate": {"model": "cohort-average", "batch_size": 64}},
    "fedsplit": {"dtype": "float64", "cohort": {"size": 2}},
    "scaffold-exp": {"evaluate": {"model": "client-average", "batch_size": 64}, "cohort": {"size": 3}},
}

OFTEN = ("fedavg-and-guess", "scaffold", "feddyn", "fedexp-m", "scaffold-exp")
"""Run every time: a guess, client states in memory and on disk, a server state, and the clients' last models."""


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation of five clients; the working folder of all ranks."""
    world.on_root(lambda: write_small(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def of(variant: str, **changes: Any) -> dict[str, Any]:
    """The recipe of a variant, named by the method it is of."""
    method = variant.partition("-and")[0]
    base = {"rounds": ROUNDS, "checkpoint": {"every": EVERY, "keep": 2}, "output": "run", **VARIANTS[variant]}
    return small(algorithm={"name": method, **METHODS[method]}, **{**base, **changes})


WHOLE: dict[str, Any] = {}


def whole_of(variant: str, world: World) -> Any:
    """Return what a variant's run leaves that is never interrupted, in a world of one; each rank computes it once."""
    if variant not in WHOLE:
        found = hpcfed.run(of(variant, output=f"whole-{world.rank}"), world=World(), quiet=True)
        WHOLE[variant] = left_by(found)
    return WHOLE[variant]


def stopped(recipe: Mapping[str, Any], world: World, *after: int) -> Path:
    """Run a recipe to smaller numbers of rounds than it asks for, each with a checkpoint, as if it had been stopped."""
    for rounds in after or (2, 4):
        result = hpcfed.run({**recipe, "rounds": rounds}, world=world, quiet=True)
        world.on_root((result.folder / "result.json").unlink)
    return result.folder


def by_the_first(world: World, call: Callable[[World], Any]) -> None:
    """Let rank 0 alone, in a world of its own, do something; the others wait."""
    world.on_root(lambda: call(World()) and None)


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("round-")) for path in (run / "checkpoints").glob("*.json"))


@pytest.mark.every(3)
@pytest.mark.of_ranks
@pytest.mark.parametrize("together_first", [True, False], ids=["together-alone", "alone-together"])
@pytest.mark.parametrize("variant", [pytest.param(v, marks=[] if v in OFTEN else pytest.mark.soak) for v in VARIANTS])
def test_a_run_goes_on_with_the_same_bits(variant, together_first, world, folder):
    """Its first rounds on all ranks and the others on one, and the other way round; in one go for comparison."""
    whole = whole_of(variant, world)
    recipe, left = of(variant), []
    if together_first:
        stopped(recipe, world)
        by_the_first(world, lambda alone: left.append(left_by(hpcfed.run(recipe, world=alone, quiet=True))))
    else:
        by_the_first(world, lambda alone: stopped(recipe, alone))
        left.append(left_by(hpcfed.run(recipe, world=world, quiet=True)))
    assert checkpoints(folder / "run") == [6, 7]
    assert all(found == whole for found in left)
    assert len(left) == 1 or world.rank > 0


@pytest.mark.of_ranks
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"client_state": "device"}, {"client_state": "disk"}),
        ({"client_state": "disk"}, {"client_state": "host"}),
        ({"placement": "balanced"}, {"placement": "static"}),
        ({}, {"placement": "balanced"}),
    ],
    ids=str,
)
def test_client_states_may_lie_elsewhere_from_a_checkpoint_on(before, after, world, folder):
    """As after a full disk; and the finished run is finished, wherever they are to lie."""
    whole = left_by(hpcfed.run(of("scaffold", output="whole"), world=world, quiet=True))
    stopped(of("scaffold", **before), world)
    assert left_by(hpcfed.run(of("scaffold", **after), world=world, quiet=True)) == whole
    world.on_root(lambda: shutil.rmtree(folder / "run" / "checkpoints"))
    assert left_by(hpcfed.run(of("scaffold", **before), world=world, quiet=True)) == whole
    assert world.on_root(lambda: (folder / "run" / "checkpoints").exists()) is False


@pytest.mark.every(2)
@pytest.mark.parametrize("variant", ["scaffold", "fedexp-m"])
def test_a_finished_run_takes_more_rounds(variant, world, folder):
    whole = whole_of(variant, world)
    hpcfed.run(of(variant, rounds=3), world=world, quiet=True)
    assert left_by(hpcfed.run(of(variant), world=world, quiet=True)) == whole


def test_a_shorter_run_than_the_checkpoint_is_refused(world, folder):
    stopped(of("fedexp-m"), world)
    with pytest.raises(InputError, match=r"rounds: expected at least 4.*got 3; set rounds=4; .* or --fresh"):
        hpcfed.run(of("fedexp-m", rounds=3), world=world, quiet=True)


def test_a_run_that_ended_with_its_last_checkpoint_is_finished_without_a_round(world, folder):
    """As if it had been killed before it could write its models."""
    result = hpcfed.run(of("scaffold"), world=world, quiet=True)
    whole = left_by(result)
    world.gather(None)

    def forget() -> None:
        for name in ("result.json", "model.safetensors"):
            (result.folder / name).unlink()

    world.on_root(forget)
    assert left_by(hpcfed.run(of("scaffold"), world=world, quiet=True)) == whole


@pytest.mark.every(2)
@pytest.mark.parametrize(("keep", "left"), [(1, [7]), (9, [2, 4, 6, 7])])
def test_the_last_ones_are_kept(keep, left, world, folder):
    recipe = of("feddyn", checkpoint={"every": EVERY, "keep": keep})
    stopped(recipe, world)
    hpcfed.run(recipe, world=world, quiet=True)
    assert checkpoints(folder / "run") == left
    assert len(list((folder / "run" / "checkpoints").iterdir())) == 3 * len(left)


def test_none_is_written_where_none_is_asked_for(world, folder):
    hpcfed.run(of("feddyn", checkpoint={"every": 0}), world=world, quiet=True)
    assert list((folder / "run" / "checkpoints").iterdir()) == []


def test_a_method_without_client_state_takes_one_file_and_its_manifest(world, folder):
    stopped(of("fedexp-m"), world)
    names = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert names == [f"round-0000000{round}.{suffix}" for round in (2, 4) for suffix in ("json", "server")]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def flip_in_the_first_record(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)


def another_number(path: Path) -> None:
    """A manifest that is still JSON."""
    path.write_text(path.read_text().replace('"params_up": ', '"params_up": 1'))


def forged(path: Path) -> None:
    """A manifest of other content, with its checksum."""
    content = json.loads(path.read_text())
    del content["checksum"], content["progress"]["magnitudes"]["spans"]
    path.write_text(json.dumps({**content, "checksum": _digest(content)}))


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGES: Mapping[str, tuple[str, Callable[[Path], None], str]] = {
    "server-truncated": ("server", truncate, "does not match its checksum"),
    "server-flipped": ("server", flip, "does not match its checksum"),
    "server-lost": ("server", Path.unlink, "cannot be read"),
    "clients-truncated": ("clients", truncate, "ends before the record of client"),
    "clients-flipped": ("clients", flip_in_the_first_record, "does not match its checksum"),
    "clients-lost": ("clients", Path.unlink, "cannot be read"),
    "manifest-truncated": ("json", truncate, "is no manifest"),
    "manifest-changed": ("json", another_number, "does not match its checksum"),
    "manifest-forged": ("json", forged, "not its content: 'progress.magnitudes.spans'"),
    "server-endless": ("server", endless, "is not a file"),
    "clients-endless": ("clients", endless, "is not a file"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(damage, world, folder, capfd):
    suffix, spoil, complaint = DAMAGES[damage]
    whole = whole_of("scaffold", world)
    run = stopped(of("scaffold"), world, 4, 5)
    assert checkpoints(run) == [4, 5]
    world.on_root(lambda: spoil(run / "checkpoints" / f"round-00000005.{suffix}"))
    capfd.readouterr()
    assert left_by(hpcfed.run(of("scaffold"), world=world)) == whole
    lines = [line for line in "".join(capfd.readouterr()).splitlines() if " is damaged (" in line]
    assert len(lines) == world.is_root
    if world.is_root:
        assert "round-00000005" in lines[0]
        assert complaint in lines[0]
        assert lines[0].endswith("; trying round-00000004.json")
        assert "damaged" in (run / "logs" / "rank-0.log").read_text()
    assert checkpoints(run) == [6, 7]


@pytest.mark.every(3)
@pytest.mark.parametrize("suffix", ["json", "server", "clients"])
def test_an_unreadable_checkpoint_is_not_a_damaged_one(suffix, world, folder):
    """Its disk may be back for the next start: neither the one before nor round 1 takes its place."""
    run = stopped(of("scaffold"), world)
    path = run / "checkpoints" / f"round-00000004.{suffix}"

    def hide() -> None:
        path.rename(folder / "whole")
        path.symlink_to("/proc/self/mem")  # reading it is an I/O error, for root too

    world.on_root(hide)
    with pytest.raises(EnvironmentFailure, match=rf"{path.name}: the checkpoint cannot be read: got Input/output err"):
        hpcfed.run(of("scaffold"), world=world, quiet=True)
    world.on_root(lambda: (folder / "whole").replace(path) and None)
    assert hpcfed.run(of("scaffold"), world=world, quiet=True).metrics[3]["round"] == 4
    assert not list(run.glob("previous-*"))


def test_files_have_the_users_umask(world, folder):
    before = os.umask(0o027)
    try:
        run = hpcfed.run(of("scaffold"), world=world, quiet=True).folder
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in run.rglob("*")}
    assert {name for name, mode in modes.items() if mode != 0o640} == {"checkpoints"}
    assert modes["checkpoints"] == 0o750


def test_files_of_the_user_stay(world, folder):
    theirs = [".thesis.tmp", "checkpoints/round-1.txt", "checkpoints/.tmpAb12Cd", "checkpoints/round-00000001.json.bak"]

    def leave() -> None:
        for name in theirs[1:]:
            (folder / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
            (folder / "run" / name).write_text("mine")

    world.on_root(leave)
    hpcfed.run(of("fedexp-m", rounds=2), world=world, quiet=True)
    world.on_root(lambda: (folder / "run" / theirs[0]).write_text("mine") and None)
    hpcfed.run(of("fedexp-m"), world=world, quiet=True)
    assert {(folder / "run" / name).read_text() for name in theirs} == {"mine"}
    world.on_root((folder / "other").mkdir)
    world.on_root((folder / "other" / ".thesis.tmp").touch)
    with pytest.raises(InputError, match=r"files that are not a run's: got \.thesis\.tmp"):
        hpcfed.run(of("fedexp-m", output="other"), world=world, quiet=True)


def of_a_true_hash(folder: Path) -> Path:
    """Record the hash of the data in the federation file; return the file."""
    with h5py.File(folder / "small.h5", "r+") as file:
        file.attrs["content"] = content_hash(file)
    return folder / "small.h5"


def test_data_edited_in_place_are_found_on_resume(world, folder):
    data, recipe = folder / "small.h5", of("fedexp-m")
    world.on_root(lambda: of_a_true_hash(folder) and None)
    stopped(recipe, world)
    world.on_root(lambda: os.utime(data, (0, 0)))  # the same data
    assert hpcfed.run({**recipe, "rounds": 5}, world=world, quiet=True).metrics

    def edit() -> None:
        (folder / "run" / "result.json").unlink()
        times = data.stat()
        with h5py.File(data, "r+") as file:
            file["train/x"][0] += 1
        os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))

    world.on_root(edit)
    before = world.on_root(lambda: (folder / "run" / "metrics.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"small\.h5: the data have changed: expected sha256:\w+, got sha256:"):
        hpcfed.run(recipe, world=world, quiet=True)
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before
    hpcfed.run({**recipe, "output": "new"}, world=world, quiet=True)
    with pytest.raises(InputError, match="the data have changed"):
        hpcfed.run({**recipe, "output": "checked", "verify_data": True}, world=world, quiet=True)


def test_data_without_a_hash_must_keep_their_time_of_change(world, folder):
    stopped(of("fedexp-m"), world)  # what the file names is no hash of ours
    world.on_root(lambda: os.utime(folder / "small.h5", (0, 0)))
    with pytest.raises(InputError, match=r"small\.h5: the file has changed, and has no hash to compare"):
        hpcfed.run(of("fedexp-m"), world=world, quiet=True)


def test_a_damaged_checkpoint_never_counts_as_one_that_is_kept(world, folder):
    """Else, with one to keep, the new ones would go and the damaged one, which has the highest number, would stay."""
    run = stopped(of("scaffold"), world, 4, 6)
    world.on_root(lambda: flip(run / "checkpoints" / "round-00000006.server"))
    hpcfed.run(of("scaffold", rounds=5, checkpoint={"every": 1, "keep": 1}), world=world, quiet=True)
    assert checkpoints(run) == [5]


def test_a_run_whose_checkpoints_are_all_damaged_starts_again(world, folder, capfd):
    recipe = of("feddyn")
    whole = left_by(hpcfed.run({**recipe, "output": f"whole-{world.rank}"}, world=World(), quiet=True))
    run = stopped(recipe, world)
    world.on_root(lambda: [flip(path) for path in (run / "checkpoints").glob("*.server")] and None)
    assert left_by(hpcfed.run(recipe, world=world)) == whole
    assert checkpoints(run / "previous-1") == [2, 4]
    lines = [line for line in capfd.readouterr().out.splitlines() if " is damaged (" in line]
    endings = ["trying round-00000002.json", "no other is left, the run starts again"]
    assert [line.rpartition("; ")[2] for line in lines] == (endings if world.is_root else [])


def test_what_a_killed_job_left_is_removed(world, folder):
    run = stopped(of("scaffold"), world)
    remains = [".round-00000006.0123abcd.server", ".round-00000006.0123abcd.clients", ".round-00000006.json.77.tmp"]
    remains += ["round-00000006.server", "round-00000006.clients"]

    def leave() -> None:
        for name in remains:
            (run / "checkpoints" / name).write_bytes(b"half")
        (run / ".metrics.jsonl.77.tmp").write_bytes(b"half")
        (run / "checkpoints" / ".round-00000006.0123abcd.folder").mkdir()
        (run / "checkpoints" / ".round-00000006.0123abcd.folder" / ".tmpAb12Cd").write_bytes(b"half")

    world.on_root(leave)
    hpcfed.run(of("scaffold", rounds=5, checkpoint={"every": 0}), world=world, quiet=True)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"round-0000000{round}.{suffix}" for round in (2, 4) for suffix in ("clients", "json", "server")
    ]
    assert not list(run.glob(".*.tmp"))


def test_a_checkpoint_of_another_recipe_is_refused(world, folder):
    """Put there by hand: the folder's own recipe fits."""
    run, other = stopped(of("fedexp-m"), world), stopped(of("fedexp-m", seed=5, output="other"), world)

    def exchange() -> None:
        (run / "checkpoints").rename(run / "away")
        (other / "checkpoints").rename(run / "checkpoints")

    world.on_root(exchange)
    before = world.on_root(lambda: (run / "metrics.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"round-00000004\.json: the checkpoint is of another recipe; .* or --fresh"):
        hpcfed.run(of("fedexp-m"), world=world, quiet=True)
    assert (run / "metrics.jsonl").read_bytes() == before
    assert checkpoints(run) == [2, 4]


@pytest.mark.every(2)
@pytest.mark.parametrize("variant", ["scaffold", "fedexp-m"])
def test_a_checkpoint_that_lacks_what_is_evaluated_is_refused(variant, world, folder):
    run = stopped(of(variant), world)
    changed = of(variant, evaluate={"model": "client-average", "batch_size": 64})
    with pytest.raises(InputError, match=r"holds other states.*evaluate\.model"):
        hpcfed.run(changed, world=world, quiet=True)
    assert checkpoints(run) == [2, 4]


def test_a_checkpoint_of_another_version_is_refused(world, folder):
    from hpcfed.run_folder.checkpoint.layout import Manifest

    run = stopped(of("fedexp-m"), world)
    path = run / "checkpoints" / "round-00000004.json"

    def advance() -> None:
        path.write_text(Manifest.read(path).model_copy(update={"version": 99}).to_json())

    world.on_root(advance)
    with pytest.raises(InputError, match=r"another version of hpcfed: expected layout 3, got 99"):
        hpcfed.run(of("fedexp-m"), world=world, quiet=True)


def test_another_runs_record_is_refused(world, folder):
    run = stopped(of("fedexp-m"), world)

    def exchange() -> None:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        other = [json.dumps({**json.loads(line), "hash": "0" * 16}) for line in lines]
        (run / "metrics.jsonl").write_text("\n".join(other) + "\n")

    world.on_root(exchange)
    with pytest.raises(InputError, match="the record is of another run than the checkpoint"):
        hpcfed.run(of("fedexp-m"), world=world, quiet=True)


def test_a_record_that_is_shorter_than_the_checkpoint_is_refused(world, folder):
    run = stopped(of("fedexp-m"), world)
    world.on_root(lambda: truncate(run / "metrics.jsonl"))
    with pytest.raises(InputError, match=r"fewer rounds than the checkpoint: expected at least 4, got [12]"):
        hpcfed.run(of("fedexp-m"), world=world, quiet=True)
    world.on_root((run / "metrics.jsonl").unlink)
    with pytest.raises(InputError, match=r"fewer rounds than the checkpoint: expected at least 4, got 0"):
        hpcfed.run(of("fedexp-m"), world=world, quiet=True)


def test_a_damaged_line_of_the_record_is_refused(world, folder):
    record = stopped(of("fedexp-m"), world) / "metrics.jsonl"
    world.on_root(lambda: record.write_text(record.read_text().replace('"round": 2,', '"round": 7,')) and None)
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2: rounds out of order"):
        hpcfed.run(of("fedexp-m"), world=world, quiet=True)


@pytest.mark.every(2)
@pytest.mark.parametrize("change", [Path.unlink, truncate])
def test_a_record_that_another_program_changes_ends_the_run(change, world, folder, monkeypatch):
    """Nor is the run called finished that had left it."""
    run = hpcfed.run(of("fedexp-m", rounds=4), world=world, quiet=True).folder
    before = world.on_root(lambda: (run / "metrics.jsonl").read_bytes())
    world.on_root(lambda: change(run / "metrics.jsonl"))
    with pytest.raises(InputError, match=r"the record of this finished run was removed or changed: expected 4 rounds"):
        hpcfed.run(of("fedexp-m", rounds=4), world=world, quiet=True)
    world.on_root(lambda: (run / "metrics.jsonl").write_bytes(before) and None)

    ends_the_run(lambda: change(run / "metrics.jsonl"), of("fedexp-m"), world, monkeypatch)


def ends_the_run(deed: Callable[[], Any], recipe: Mapping[str, Any], world: World, patch: pytest.MonkeyPatch) -> None:
    """A run of rank 0 alone in which the record is changed in round 6; others would be ended by rank 0."""

    def in_mid_run(alone: World) -> None:
        train = Simulation.round

        def round(simulation: Simulation, number: int, **asks: Any) -> Any:
            if number == 6:
                deed()
            return train(simulation, number, **asks)

        patch.setattr(Simulation, "round", round)
        with pytest.raises(EnvironmentFailure, match="the record was removed or changed while the run wrote it"):
            hpcfed.run(recipe, world=alone, quiet=True)

    by_the_first(world, in_mid_run)


def put_a_copy(path: Path) -> None:
    """Replace a file by one of the same content, as an editor does."""
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


@pytest.mark.every(4)
@pytest.mark.parametrize("change", [Path.unlink, truncate, put_a_copy])
@pytest.mark.parametrize("name", ["clients.csv", "update-hashes.bin"])
def test_the_other_files_of_a_record_may_not_be_changed_either(name, change, world, folder, monkeypatch):
    """Nor are rows added to those of a run whose ``metrics.jsonl`` was removed before its first checkpoint."""
    evaluate = {"batch_size": 64, "clients": {"every": 1}}
    recipe = of("fedexp-m", update_hashes=True, evaluate=evaluate)
    ends_the_run(lambda: change(folder / "run" / name), recipe, world, monkeypatch)
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    world.on_root(lambda: shutil.rmtree(folder / "run" / "checkpoints"))
    world.on_root((folder / "run" / "metrics.jsonl").unlink)
    whole = left_by(hpcfed.run({**recipe, "output": "whole"}, world=world, quiet=True))
    assert left_by(hpcfed.run(recipe, world=world, quiet=True)) == whole
    for table in ("clients.csv", "update-hashes.bin"):
        assert (folder / "run" / table).read_bytes() == (folder / "whole" / table).read_bytes()
    assert (folder / "run" / "previous-1").is_dir()


def test_damage_in_the_record_before_the_checkpoint_is_refused(world, folder):
    record = stopped(of("fedexp-m"), world) / "metrics.jsonl"
    world.on_root(lambda: record.write_bytes(b"}" + record.read_bytes()))
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1: not JSON"):
        hpcfed.run(of("fedexp-m"), world=world, quiet=True)


def test_checkpoints_that_cannot_fit_are_refused(world, folder):
    recipe = of("scaffold", checkpoint={"every": 2, "keep": 10**9})
    with pytest.raises(EnvironmentFailure, match=r"checkpoints do not fit: .*TB for 1000000001.*checkpoint\.keep"):
        hpcfed.run(recipe, world=world, quiet=True)
    assert left_by(hpcfed.run(of("scaffold"), world=world, quiet=True))[1]


@pytest.mark.serial
def test_checkpoints_that_will_be_replaced_count_as_room(folder, monkeypatch):
    def run(rounds: int) -> None:
        hpcfed.run(of("fedavg", rounds=rounds, checkpoint={"every": 1, "keep": 1}), world=World(), quiet=True)

    run(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    run(2)
    assert checkpoints(folder / "run") == [2]
    shutil.rmtree(folder / "run" / "checkpoints")
    with pytest.raises(EnvironmentFailure, match=r"checkpoints do not fit: .* for 2 of up to .* got 0 bytes free"):
        run(3)


@pytest.mark.serial
def test_a_full_disk_is_no_wrong_input(folder):
    """A lock that cannot name its holder holds all the same; want of space is the machine's failure."""
    (folder / "run").mkdir()
    (folder / "run" / LOCK).symlink_to("/dev/full")
    with RunFolder(folder / "run").held(World()):
        pass
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert isinstance(unusable(folder, full), EnvironmentFailure)
    assert isinstance(unusable(folder, PermissionError(errno.EACCES, "no")), InputError)


def test_a_run_without_a_round_makes_room_for_another_recipe(world, folder, capfd):
    """It failed after it had written its recipe; nothing of it is lost."""
    recipe = of("scaffold", rounds=1)
    run, others = folder / "run", of("scaffold", rounds=1, seed=5, checkpoint={"every": 2, "keep": 10**9})
    with pytest.raises(EnvironmentFailure, match="checkpoints do not fit"):
        hpcfed.run(others, world=world, quiet=True)
    if world.is_root:
        with RunFolder(run).held(World()), pytest.raises(Busy, match="a run is going on in this folder"):
            hpcfed.run(recipe, world=World(), quiet=True)
    world.gather(None)
    capfd.readouterr()
    whole = left_by(hpcfed.run({**recipe, "output": "whole"}, world=world, quiet=True))
    assert left_by(hpcfed.run(recipe, world=world)) == whole
    lines = [line for line in capfd.readouterr().out.splitlines() if "before its first round" in line]
    assert len(lines) == world.is_root
    assert all("/run/previous-1: seed" in line for line in lines)
    assert "checkpoints do not fit" in (run / "previous-1" / "result.json").read_text()


def test_a_run_that_starts_again_or_goes_on_is_not_taken_for_ended(world, folder):
    """Before its first round, too, where it has the result of its first attempt."""
    with pytest.raises(EnvironmentFailure, match="checkpoints do not fit"):
        hpcfed.run(of("fedavg", checkpoint={"every": 2, "keep": 10**9}), world=world, quiet=True)
    loaded = world.on_root(lambda: (hpcfed.load("run").status, (folder / "run" / "result.json").exists()))
    assert loaded == ("failed", True)
    with pytest.raises(InputError, match=r"no trained model: failed: .*checkpoints do not fit"):
        hpcfed.load("run").module  # noqa: B018
    world.gather(None)
    left = ["result.json", "model.safetensors", "model-evaluated.safetensors", "certificate.json"]
    for rounds in (1, 2):  # the second goes on with a run that has ended
        for _ in hpcfed.rounds(of("fedavg", rounds=rounds), world=world, quiet=True):
            assert world.on_root(lambda: [name for name in left if (folder / "run" / name).exists()]) == []
        assert world.on_root(lambda: [name for name in left if (folder / "run" / name).exists()]) == left


def test_a_folder_that_another_job_has_leaves_no_open_file(tmp_path):
    lock = tmp_path / LOCK

    def open_locks() -> int:
        return sum(path.resolve() == lock for path in Path("/proc/self/fd").iterdir())

    held, other = FolderLock(tmp_path), FolderLock(tmp_path)
    held.take()
    with pytest.raises(Busy, match="a run is going on"):
        other.take()
    assert open_locks() == 1
    held.release()
    assert open_locks() == 0


def test_a_recipe_where_no_run_began_is_refused(world, folder):
    """It may be the user's own, and is not to be overwritten."""
    world.on_root((folder / "run").mkdir)
    world.on_root(lambda: write_recipe(folder / "run", seed=5) and None)
    with pytest.raises(InputError, match="output holds another recipe's run"):
        hpcfed.run(of("scaffold"), world=world, quiet=True)


@pytest.mark.of_ranks
def test_what_a_run_was_for_is_remembered(world, folder):
    """A target to be reached several times in a row, and one that had been reached when the job was killed."""
    recipe = of("fedavg", rounds=12, stop={"test_accuracy": 0.3, "for": 5}, checkpoint={"every": 1})
    whole = hpcfed.run({**recipe, "output": f"whole-{world.rank}"}, world=World(), quiet=True)
    length = len(whole.metrics)
    assert 5 < length < 12
    for after in (length - 2, length):
        output = {"output": f"run-{after}"}
        stopped({**recipe, **output}, world, after)
        found = hpcfed.run({**recipe, **output}, world=world, quiet=True)
        assert left_by(found) == left_by(whole)
        ending = json.loads((found.folder / "result.json").read_text())
        assert (ending["status"], ending["rounds"]) == ("finished", length)
        assert "5 times in a row" in ending["stopped"]


def test_patience_is_remembered(world, folder):
    recipe = of("fedavg", rounds=30, stop={"patience": 4}, local={"steps": 1, "batch_size": 10, "lr": 1e-9})
    whole = hpcfed.run({**recipe, "output": f"whole-{world.rank}"}, world=World(), quiet=True)
    assert len(whole.metrics) == 5
    stopped(recipe, world, 3)
    assert left_by(hpcfed.run(recipe, world=world, quiet=True)) == left_by(whole)


def test_a_score_of_a_former_last_round_does_not_count(world, folder):
    """The last round is scored whatever `evaluate.every`; where more rounds follow, a run at once has no such score."""
    recipe = of("fedavg", rounds=30, stop={"patience": 2}, evaluate={"every": 5, "batch_size": 64})
    recipe["local"] = {"steps": 1, "batch_size": 10, "lr": 1e-9}
    whole = hpcfed.run({**recipe, "output": f"whole-{world.rank}"}, world=World(), quiet=True)
    assert len(whole.metrics) == 15
    for rounds in (7, 30):
        found = hpcfed.run({**recipe, "rounds": rounds}, world=world, quiet=True)
    assert len(found.metrics) == 15
    scores, expected = (read_run(run.folder).column("test_loss") for run in (found, whole))
    assert np.array_equal(scores, expected, equal_nan=True)
    assert np.flatnonzero(np.isfinite(scores)).tolist() == [4, 9, 14]


@pytest.fixture
def hangups_count() -> Iterator[None]:
    """Let SIGHUP do what it does to a program started without ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.every(2)
@pytest.mark.parametrize(("every", "number"), [(2, signal.SIGUSR1), (0, signal.SIGHUP)])
def test_a_run_that_is_signalled_stops_with_a_checkpoint_and_goes_on(every, number, world, folder, hangups_count):
    """The signal comes to the last rank only; with `every: 0` there is a checkpoint all the same."""
    recipe = of("scaffold", rounds=100, checkpoint={"every": every}, evaluate={"every": 100, "batch_size": 64})
    whole = left_by(hpcfed.run({**recipe, "output": f"whole-{world.rank}"}, world=World(), quiet=True))
    timer = threading.Thread(target=_signal_after, args=(folder / "run" / "metrics.jsonl", 5, number))
    if world.rank == world.size - 1:
        timer.start()
    with pytest.raises(Stopped, match=r"stopped after round \d+: .*the same command goes on"):
        hpcfed.run(recipe, world=world, quiet=True)
    if world.rank == world.size - 1:
        timer.join()
    done = len((folder / "run" / "metrics.jsonl").read_text().splitlines())
    assert 5 <= done < 100
    assert checkpoints(folder / "run")[-1] == done
    assert left_by(hpcfed.run(recipe, world=world, quiet=True)) == whole


def _signal_after(record: Path, rounds: int, number: int) -> None:
    while not record.exists() or len(record.read_bytes().splitlines()) < rounds:
        time.sleep(0.01)
    os.kill(os.getpid(), number)


@pytest.mark.of_ranks
def test_time_that_is_up_stops_with_a_checkpoint(world, folder):
    recipe = of("fedavg", rounds=100_000, stop={"max_hours": 0.5 / 3600}, evaluate={"every": 0})
    rounds = 0
    for _ in range(2):  # and makes progress each time
        with pytest.raises(Stopped, match=r"stop\.max_hours is near"):
            hpcfed.run(recipe, world=world, quiet=True)
        done = len((folder / "run" / "metrics.jsonl").read_text().splitlines())
        assert checkpoints(folder / "run")[-1] == done > rounds
        rounds = done


@pytest.mark.parametrize(("seconds", "is_up"), [(52, True), (65, False)])
def test_time_is_kept_for_a_round_and_one_and_a_half_of_the_next_and_its_checkpoint(seconds, is_up, monkeypatch):
    """10 + 1.5 · (10 + 20) s, by the longest of the last rounds, before the limit that comes first."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 9999))
    clock, none = TimeLeft(Stop(max_hours=seconds / 3600)), (False, False, False)
    for last in (10.0, 2.0):
        clock.add(last, 0.0, none)
    assert clock.is_up(20.0, (none, none)) == is_up
    assert clock.reason() == "stop.max_hours"


def test_time_is_kept_for_an_evaluation_that_is_due():
    """However many rounds ago the last one was; a long one of the clients is not expected of the test set alone."""
    clock = TimeLeft(Stop(max_hours=300 / 3600))
    none, test, all_parts = (False, False, False), (True, False, False), (True, True, True)
    clock.add(5.0, 600.0, all_parts)
    assert clock.is_up(2.0, (none, test))  # nothing else is known yet
    clock.add(5.0, 0.0, none)
    assert clock.is_up(2.0, (none, test))
    clock.add(5.0, 20.0, (True, True, False))
    assert not clock.is_up(2.0, (none, test))
    for _ in range(20):
        clock.add(5.0, 1.0, test)
        clock.add(5.0, 0.0, none)
    assert not clock.is_up(2.0, (none, none))
    assert not clock.is_up(2.0, (none, test))
    assert not clock.is_up(2.0, (test, (True, True, False)))
    assert clock.is_up(2.0, (none, all_parts))
    for last in (400.0, 1.0):
        clock.add(5.0, last, test)
    assert clock.is_up(2.0, (none, test))


@pytest.mark.serial
@pytest.mark.parametrize("is_root", [True, False])
def test_a_lap_is_a_round_with_its_evaluation_apart(is_root, monkeypatch):
    """From the end of one lap to the next; rank 0 alone decides that the time is up."""
    seconds, due = iter((0.0, 3.0, 5.0, 6.0, 6.5)), (True, False, False)
    times = SimpleNamespace(perf_counter=lambda: next(seconds), process_time=lambda: 0.0)
    monkeypatch.setattr("hpcfed.run_folder.clock.time", times)
    added = list[tuple]()
    monkeypatch.setattr(TimeLeft, "add", lambda self, *about: added.append(about))
    monkeypatch.setattr(TimeLeft, "is_up", lambda self, *about: True)
    idle, world = SimpleNamespace(requests=lambda: Request.NOTHING, seconds=0.0), SimpleNamespace(is_root=is_root)
    clock = Clock(Stop(max_hours=1), SimpleNamespace(name=""), idle, world)
    for evaluated, total in ((2.0, 5.0), (0.5, 1.5)):
        assert clock.requests((due, due)) == (Request.TIME_IS_UP if is_root else Request.NOTHING)
        clock.trained()
        assert clock.lap() == {"evaluate": evaluated, "total": total, "cpu": 0.0}
    assert added == [(3.0, 2.0, due), (1.0, 0.5, due)]


def test_time_for_a_checkpoint_is_by_the_clock(world, folder):
    recipe = of("fedavg", rounds=300, checkpoint={"every": "0.05s", "keep": 300}, evaluate={"every": 0})
    started = time.monotonic()
    hpcfed.run(recipe, world=world, quiet=True)
    most = (time.monotonic() - started) / 0.05 + 1  # and the last
    assert checkpoints(folder / "run")[-1] == 300
    assert 2 <= len(checkpoints(folder / "run")) <= most
