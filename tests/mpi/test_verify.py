"""`hpcfed verify` agrees with true runs on other numbers of ranks, and finds and names what was tampered with."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import hpcfed
from hpcfed.data.content import content_hash
from hpcfed.errors import InputError
from hpcfed.io.pace import Pace
from hpcfed.provenance.certify import certify
from hpcfed.provenance.differences import beyond, lacking, not_computed, of_drawn_model, tolerance_from
from hpcfed.provenance.recorded import placed_recipe
from hpcfed.provenance.slim import write_slim
from hpcfed.provenance.verify import verify as verify_module
from hpcfed.provenance.verify.spot_check import drawn, oddness, reachable, segments
from hpcfed.provenance.verify.verify import Verification, judged, verify
from hpcfed.ranks.world import World
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.files import private_file
from tests.devices import KIND
from tests.mpi.recipes import METHODS, small, write_recipe, write_small

pytestmark = [pytest.mark.one_mpi, pytest.mark.thinned]

ROUNDS = 6
OFTEN = ("fedexp-m", "fedsplit")
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "client-average": {"evaluate": {"model": "client-average", "train": {"every": 2}, "batch_size": 16}},
    "clients-evaluated": {"evaluate": {"every": 2, "clients": {"every": 3}, "batch_size": 64}, "client_state": "disk"},
    "stopped-by-patience": {"stop": {"patience": 2}, "local": {"steps": 1, "batch_size": 10, "lr": 1e-6}},
    "balanced-and-guess": {
        "placement": "balanced",
        "budget": {"low": 1, "high": 7},
        "local": {"steps": 9, "batch_size": 10, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.6, "engine": "sequential"},
        "guess": "remaining",
        "update_hashes": True,
    },
    "float64": {"dtype": "float64", "local": {"epochs": 1, "batch_size": 16, "lr": 0.1}, "cohort": {"size": 1}},
}


def write_true(folder: Path) -> None:
    """Write ``small.h5`` with the hash of its content, as `hpcfed prepare` does."""
    with h5py.File(write_small(folder), "r+") as file:
        file.attrs["content"] = content_hash(file)


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    """A folder with a federation of five clients; the working folder of all ranks."""
    world.on_root(lambda: write_true(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def of(method: str, **changes: Any) -> dict[str, Any]:
    base = {"rounds": ROUNDS, "cohort": {"size": 3}, "checkpoint": {"every": 2, "keep": "spaced"}, "output": "run"}
    return small(algorithm={"name": method, **METHODS[method]}, **{**base, **changes})


def verified(run: Path, world: World, rounds: int | None = None, **options: Any) -> tuple[int, str]:
    """The exit code, and what was said."""
    said: list[str] = []
    code = verify(Verification(run, rounds, 0, **options), world, said.append)
    return code, "\n".join(world.broadcast(said))


@pytest.mark.of_ranks
@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m in OFTEN else pytest.mark.soak) for m in METHODS])
def test_a_run_of_one_rank_is_verified_on_all(method, world, folder):
    world.on_root(lambda: hpcfed.run(of(method), world=World(), quiet=True) and None)
    code, said = verified(folder / "run", world)
    assert (code, said.splitlines()[-1].partition(", on")[0]) == (0, "verified: all 6 rounds, bit for bit")
    assert "files and 6 rounds are as certified\nthe data are sha256:" in said
    code, said = verified(folder / "run", world, 2)
    assert code == 0, said
    assert "spot-checked: 2 rounds (" in said
    assert sorted(path.name for path in folder.iterdir()) == ["run", "small.h5"]


SELDOM = ("client-average", "float64")


@pytest.mark.every(2)
@pytest.mark.of_ranks
@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[pytest.mark.soak] if v in SELDOM else []) for v in VARIANTS]
)
def test_a_run_of_all_ranks_is_verified_on_one(variant, world, folder):
    hpcfed.run(of("scaffold", **VARIANTS[variant]), world=world, quiet=True)

    def alone() -> None:
        for rounds in (2, None):
            code, said = verified(folder / "run", World(), rounds)
            assert code == 0, said
            assert "bit for bit, on 1 rank" in said

    world.on_root(alone)


def test_progress_has_the_time_left(world, folder, monkeypatch):
    hpcfed.run(of("fedavg"), world=world, quiet=True)
    monkeypatch.setattr(Pace, "is_due", lambda pace: True)
    code, said = verified(folder / "run", world)
    assert code == 0
    assert " kB of the data are read, 0:00 left\n" in said
    assert re.search(r"\nround 3 of 6 is as recorded, \d+:\d\d left\n", said)
    _, said = verified(folder / "run", world, 2)
    assert "\nthe state after round 2 is as recorded\n" in said
    assert " of 6 is as recorded, 0:00 left\n" in said  # of the last one of those drawn


def test_a_finished_run_keeps_the_metrics_that_it_has_measured(world, folder):
    """Called again with other metrics, it measures nothing; its recipe and certificate must not say that it did."""
    evaluate = {"every": 1, "metrics": ["f1-macro"]}
    run = hpcfed.run(of("fedavg", evaluate=evaluate, output="run"), world=world, quiet=True).folder
    before = world.on_root(lambda: (run / "recipe.yaml").read_bytes())
    hpcfed.run(of("fedavg", evaluate={**evaluate, "metrics": ["brier"]}, output="run"), world=world, quiet=True)
    assert world.on_root(lambda: (run / "recipe.yaml").read_bytes()) == before
    assert verified(run, world)[0] == 0


def test_a_run_that_went_on_with_a_lower_patience_is_verified(world, folder):
    """The present patience would have ended it in round 3."""
    slow = {"local": {"steps": 1, "batch_size": 10, "lr": 1e-6}, "checkpoint": {"every": 1, "keep": "spaced"}}
    hpcfed.run(of("fedavg", **slow), world=world, quiet=True)
    result = hpcfed.run(of("fedavg", **slow, stop={"patience": 2}, rounds=40), world=world, quiet=True)
    assert ROUNDS <= len(result.metrics) < 40
    for rounds in (1, 3, None):
        code, said = verified(folder / "run", world, rounds)
        assert code == 0, said


def flip(path: Path, place: float = 0.6) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


def edit_row(run: Path, number: int, /, **changes: Any) -> None:
    """Replace columns of a round."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | changes) + "\n"
    (run / "metrics.jsonl").write_text("".join(lines))


def swap(run: Path) -> None:
    """Exchange rounds 3 and 4, renumbered."""
    third, fourth = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[2:4])
    edit_row(run, 3, **{**fourth, "round": 3})
    edit_row(run, 4, **{**third, "round": 4})


def flip_sample(run: Path) -> None:
    """Change one bit of one client's data."""
    with h5py.File(run.parent / "small.h5", "r+") as file:
        x = file["train/x"][7]
        x.view("u4")[3] ^= 1
        file["train/x"][7] = x


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def call(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new, 1))

    return call


def add_private(run: Path) -> None:
    """Add files of more clients than get a line each."""
    (run / "private").mkdir()
    for client in range(30):
        (run / private_file(client)).touch()


TAMPERED: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "model": (lambda run: flip(run / "model.safetensors", 0.99), "model.safetensors: is not the file"),
    "hash": (lambda run: edit_row(run, 3, hash="0123456789abcdef"), "metrics.jsonl: round 3 was changed"),
    "accuracy": (lambda run: edit_row(run, 5, test_accuracy=0.99), "metrics.jsonl: round 5 was changed"),
    "swapped": (swap, "metrics.jsonl: round 4 was changed"),
    "lost": (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl: has 0 rounds, the certificate 6"),
    "data": (flip_sample, "small.h5: the data are sha256:"),
    "state": (lambda run: flip(run / "checkpoints/round-00000002.server", 0.99), "round-00000002.server: is not"),
    "client-state": (lambda run: flip(run / "checkpoints/round-00000002.clients", 0.01), "2.clients: is not the file"),
    "recipe": (replace("recipe.yaml", "lr: 0.1", "lr: 0.2"), "recipe.yaml: is not the file"),
    "recipe-of-certificate": (replace("certificate.json", '"lr": 0.1', '"lr": 0.2'), "do not give its chain"),
    "code": (replace("code.json", "hidden", "hiddem"), "code.json: is not the file"),
    "updates": (lambda run: flip(run / "update-hashes.bin"), "update-hashes.bin: is not the file"),
    "environment": (replace("environment.json", "torch", "torck"), "environment.json: is not the file"),
    "certificate": (lambda run: (run / "certificate.json").write_text("{}"), "certificate.json: "),
    "many": (add_private, "is not named by the certificate\nand 10 more faults: --json names them all\n"),
}

OWN = """
from torch import nn

def model(hidden):
    return nn.Sequential(nn.Linear(12, hidden), nn.Tanh(), nn.Linear(hidden, 4))
"""


@pytest.fixture
def own(folder, world) -> Path:
    """A run of code of one's own, with a hash of each update."""
    world.on_root(lambda: (folder / "own_net.py").write_text(OWN) and None)
    model = {"factory": "own_net:model", "args": {"hidden": 5}}
    hpcfed.run(of("scaffold", model=model, update_hashes=True), world=world, quiet=True)
    world.gather(None)
    return folder / "run"


def test_what_was_tampered_with_is_found_and_named(own, world, folder):
    assert verified(own, world, 1)[0] == 0
    kept = folder / "kept"

    def put(source: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)

    world.on_root(lambda: put(own, kept))
    data = (folder / "small.h5").read_bytes()
    for name, (tamper, told) in TAMPERED.items():
        world.on_root(lambda tamper=tamper: tamper(own) and None)
        code, said = verified(own, world, 1)
        assert (code, told in said) == (1, True), (name, said)
        assert said.endswith("differs: this is not what the run left")
        world.on_root(lambda: put(kept, own))
        world.on_root(lambda: (folder / "small.h5").write_bytes(data) and None)


UNCERTIFIED: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "hash": (
        lambda run: edit_row(run, 3, hash="0123456789abcdef"),
        "differs from round 3 (of rounds 1 to 6)\n  hash",
    ),
    "loss": (lambda run: edit_row(run, 4, local_loss=0.5), "local_loss: 0.5 recorded, "),
    "model": (lambda run: flip(run / "model.safetensors", 0.99), "model.safetensors: is not the model after round 6"),
    "state": (lambda run: flip(run / "checkpoints/round-00000002.server", 0.99), "does not match its checksum"),
}


def test_without_a_certificate_the_rounds_tell(world, folder):
    """By all rounds, and a model by its last state."""
    hpcfed.run(of("fedavg"), world=world, quiet=True)
    world.gather(None)
    world.on_root(lambda: (folder / "run" / "certificate.json").unlink())
    world.on_root(lambda: shutil.copytree(folder / "run", folder / "kept") and None)
    for name, (tamper, told) in UNCERTIFIED.items():
        world.on_root(lambda tamper=tamper: tamper(folder / "run") and None)
        code, said = verified(folder / "run", world, 1 if name == "model" else None)
        assert (code, told in said) == (1, True), (name, said)
        world.on_root(lambda: shutil.rmtree(folder / "run"))
        world.on_root(lambda: shutil.copytree(folder / "kept", folder / "run") and None)


def test_without_a_certificate_rounds_are_computed_without_the_table_of_clients(world, folder):
    """Which may be large, and was removed."""
    hpcfed.run(of("fedavg", **VARIANTS["clients-evaluated"]), world=world, quiet=True)
    for name in ("certificate.json", "clients.csv"):
        world.on_root(lambda name=name: (folder / "run" / name).unlink())
    code, said = verified(folder / "run", world, 2)
    assert code == 0, said


def make_other(run: Path) -> None:
    """Make a run one of another machine: its packages are others, and so are the last digits of its losses."""
    (run / "certificate.json").unlink()
    replace("environment.json", '"numpy": "', '"numpy": "0.')(run)
    for round, line in enumerate((run / "metrics.jsonl").read_text().splitlines(), 1):
        row = json.loads(line)
        edit_row(run, round, local_loss=row["local_loss"] * (1 + 1e-6))


def test_another_machine_is_compared_round_by_round_within_a_tolerance(world, folder):
    hpcfed.run(of("fedavg"), world=world, quiet=True)
    world.gather(None)
    world.on_root(lambda: make_other(folder / "run"))
    code, said = verified(folder / "run", world)
    assert code == 5
    assert "this machine computes other bits: numpy: 0." in said
    assert "agrees within 3.1e-05, not to the bit: " in said
    assert "each from its recorded state; at most 1.0e-06" in said
    code, said = verified(folder / "run", world, tolerance=1e-8)
    assert code == 1
    assert "differs in round 1, by more than 1e-08, from its recorded state\n  local_loss: " in said


def test_a_record_without_its_models_is_verified_by_all_rounds(world, folder):
    """The models computed again have the certified SHA-256; a few rounds say nothing about them."""
    hpcfed.run(of("fedexp", rounds=24), world=world, quiet=True)
    run, slim = folder / "run", folder / "slim"
    chain = world.on_root(lambda: write_slim(run, slim, "../small.h5")["chain"])
    assert chain == json.loads((run / "certificate.json").read_text())["chain"]
    text = "".join(path.read_text() for path in slim.iterdir())
    assert str(folder) not in text
    assert platform.node() not in json.loads((slim / "environment.json").read_text())["per_rank"][0].values()
    code, said = verified(slim, world)
    assert (code, said.splitlines()[-1].partition(", on")[0]) == (0, "verified: all 24 rounds, bit for bit")
    assert f"{', '.join(MODELS)}: not kept here; computed again, with the certified SHA-256" in said
    code, said = verified(slim, world, 1)
    assert (code, "nor computed to the bit: only the certified" in said) == (5, True), said
    assert "verified in part: rounds 1–2 alone were computed" in said
    world.on_root(lambda: shutil.copyfile(run / MODELS[0], slim / MODELS[0]) and None)  # put back
    code, said = verified(slim, world)
    assert (code, f"{MODELS[1]}: not kept here" in said) == (0, True), said


def test_of_a_record_of_another_machine_only_the_first_round_can_be_compared(world, folder):
    hpcfed.run(of("fedavg"), world=world, quiet=True)
    world.gather(None)

    def make_record() -> None:
        make_other(folder / "run")
        list(certify(folder / "run", None))
        write_slim(folder / "run", folder / "slim", "../small.h5")

    world.on_root(make_record)
    code, said = verified(folder / "slim", world)
    assert (code, "model.safetensors: not kept here, nor computed to the bit" in said) == (5, True), said
    assert "not to the bit: round 1 of 6, each from its recorded state" in said
    assert said.endswith("; the last models are not kept here")


def of_another_model(certificate: dict[str, Any]) -> None:
    certificate["not_kept"][MODELS[1]] = "0" * 64


def of_no_model(certificate: dict[str, Any]) -> None:
    certificate["not_kept"]["metrics.jsonl"] = certificate["files"].pop("metrics.jsonl")


FORGED = {
    "another model": (of_another_model, f"{MODELS[1]}: is not the model after round 6"),
    "no model": (of_no_model, "certificate.json: does not keep 'metrics.jsonl', which is no model"),
    "nothing": (lambda certificate: certificate.update(not_kept={}), "certificate.json: has an entry 'not_kept'"),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_a_certificate_says_of_models_that_are_not_kept_is_checked(case, world, folder):
    hpcfed.run(of("fedexp"), world=world, quiet=True)
    change, words = FORGED[case]

    def forge() -> None:
        certificate = write_slim(folder / "run", folder / "slim", "../small.h5")
        change(certificate)
        (folder / "slim" / "certificate.json").write_text(json.dumps(certificate))

    world.on_root(forge)
    code, said = verified(folder / "slim", world)
    assert (code, words in said) == (1, True), said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": {"private": ["*.bias"]}, "evaluate": {"every": 0}}, "private/"),
        ({"cohort": {"schedule": "schedule.json"}}, "named by the recipe: cohort.schedule"),
    ],
)
def test_a_run_that_needs_more_than_its_federation_is_not_kept_as_a_record(changes, words, world, folder):
    world.on_root(lambda: (folder / "schedule.json").write_text(json.dumps([[0]] * ROUNDS)))
    hpcfed.run(of("fedavg", **changes), world=world, quiet=True)
    with pytest.raises(InputError, match=words):
        world.on_root(lambda: write_slim(folder / "run", folder / "slim", "../small.h5") and None)


@pytest.mark.skipif(KIND == "stub", reason="knows no CUDA")
def test_where_there_is_no_gpu_a_gpus_run_is_computed_by_the_cpu(world, folder):
    world.on_root(lambda: (folder / "gpus").mkdir() or write_recipe(folder / "gpus", device="cuda"))
    assert placed_recipe(folder / "gpus", None, None).device == ("cuda" if torch.cuda.is_available() else "cpu")


def test_code_and_data_that_have_moved_are_named(own, world, folder):
    def move() -> None:
        (folder / "there").mkdir()
        for name in ("own_net.py", "small.h5"):
            (folder / name).rename(folder / "there" / name)

    world.on_root(move)
    with pytest.raises(InputError, match=r"no such federation file; name its place with --data"):
        verified(own, world, 1)
    data = folder / "there" / "small.h5"
    assert verified(own, world, 1, data=data, code=folder / "there")[0] == 0
    world.on_root(lambda: (folder / "there" / "own_net.py").write_text(OWN.replace("Tanh", "ReLU")) and None)
    with pytest.raises(InputError, match=r"the code is not this run's: own_net.py differs from line 5.*--code"):
        verified(own, world, 1, data=data, code=folder / "there")


def test_schedules_and_weights_are_found_by_their_content(world, folder):
    def begin() -> None:
        rows = [[k % 5, (k + 2) % 5] for k in range(ROUNDS)]
        (folder / "cohorts.json").write_text(json.dumps(rows))
        (folder / "budgets.json").write_text(json.dumps([[1, 3]] * ROUNDS))
        first = hpcfed.run(of("fedavg", output="first"), world=World(), quiet=True)
        shutil.move(first.folder / "model.safetensors", folder / "init.safetensors")

    world.on_root(begin)
    named = {"cohort": {"schedule": "cohorts.json"}, "budget": {"schedule": "budgets.json"}}
    model = {"name": "mlp", "hidden": [8], "init": "init.safetensors"}
    hpcfed.run(of("fedavg", model=model, **named), world=world, quiet=True)
    world.gather(None)
    assert verified(folder / "run", world, 1)[0] == 0

    def move() -> None:
        (folder / "there").mkdir()
        for name in ("cohorts.json", "budgets.json", "init.safetensors", "small.h5"):
            (folder / name).rename(folder / "there" / name)
        (folder / "budgets.json").write_text("[]")

    world.on_root(move)
    data = folder / "there" / "small.h5"
    assert verified(folder / "run", world, data=data)[0] == 0
    for name, key in (("cohorts.json", "cohort.schedule"), ("init.safetensors", "model.init")):
        kept = (folder / "there" / name).read_bytes()
        world.gather(None)
        world.on_root((folder / "there" / name).unlink)
        with pytest.raises(InputError, match=rf": {key}: no such file.*put the run's {name} \(sha256 [0-9a-f]{{16}}…"):
            verified(folder / "run", world, 1, data=data)
        world.on_root(lambda kept=kept, name=name: (folder / "there" / name).write_bytes(kept) and None)
    world.on_root(lambda: flip(folder / "there" / "budgets.json"))
    with pytest.raises(InputError, match=r": budget.schedule: is not the file that the run used"):
        verified(folder / "run", world, 1, data=data)


def test_each_round_is_drawn_with_the_same_chance_and_entered_from_near_by():
    everywhere = [*reachable([0, 10, 20, 30], 40, 40, 3)]
    assert everywhere == [*range(1, 41)]
    draws = [drawn(everywhere, np.ones(40), 3, seed)[0] for seed in range(2000)]
    counts = np.bincount(np.concatenate(draws), minlength=41)[1:]
    assert (len(counts), counts.sum()) == (40, 6000)
    assert counts.min() > 110  # of 150; 4 standard deviations are 47
    assert counts.max() < 200
    assert [(one.start, one.stop) for one in segments([40, 3, 7, 12], [0, 10, 20, 30])] == [(0, 7), (10, 12), (30, 40)]


@pytest.mark.serial
def test_what_is_drawn_and_the_last_round_are_computed_and_the_chance_is_of_even_draws(folder, monkeypatch):
    run, asked = hpcfed.run(of("fedavg", rounds=8), world=World(), quiet=True).folder, list[int]()
    monkeypatch.setattr(verify_module, "drawn", lambda rounds, weights, count, seed: asked.append(count) or ([1, 4], 6))
    verdict = judged(Verification(run, 2, 0), World(), [].append)
    assert (verdict.code, asked, verdict.computed, verdict.drawn) == (0, [2], [1, 3, 4, 5, 6, 7, 8], [1, 4])
    assert verdict.chance_missed == 1 - 2 / 8


def test_rounds_far_from_any_state_are_out_of_reach():
    assert [*reachable([0], 60, 60, 3)] == [1, 2, 3]
    assert [*reachable([0, 40], 60, 60, 3)] == [1, 2, 3, 41, 42, 43]
    assert [*reachable([0, 50], 60, 60, 3)] == [1, 2, 3, *range(51, 61)]
    assert [*reachable([0], 6, 6, 1)] == [*range(1, 7)]
    assert [*reachable([0, 10, 20], 30, 30, 12)] == [*range(1, 31)]
    assert [*reachable([3], 6, 60, 1)] == [4, 5, 6]


def test_short_minibatches_beside_others_are_drawn_more_often():
    sizes = np.array([20, 21, 30, 33])
    assert oddness([[0, 2], [1, 3], [1], [0, 1, 2]], sizes, 10).tolist() == [1, 3, 1, 2]
    assert oddness([[0, 1]], sizes, "full").tolist() == [1]
    weights = oddness([[0, 2]] * 9 + [[1, 3]], sizes, 10)
    odd = [drawn(range(1, 11), weights, 1, seed)[1] for seed in range(400)]
    assert 70 < odd.count(10) < 130  # a quarter of them


def test_tolerances_follow_a_change_in_the_last_bits_within_limits():
    assert [tolerance_from(changed, "float32") for changed in (0.0, 2.0**-20, 0.1)] == [2.0**-15, 2.0**-12, 1e-3]
    assert [tolerance_from(changed, "float64") for changed in (0.0, 2.0**-37, 0.1)] == [2.0**-44, 1e-9, 1e-9]
    assert [of_drawn_model(2.0**-44, "float64"), of_drawn_model(1e-9, "float64")] == [2.0**-15, 1e-3]
    assert of_drawn_model(1e-4, "float32") == 1e-4


def test_what_rounding_explains_and_what_it_does_not():
    row = {"hash": "a", "unit": [1], "gradients": 8, "test_loss": 1.0, "test_accuracy": 0.5, "test_rmse": 900.0}
    for changed in ({"hash": "b", "unit": [2]}, {"test_loss": 1.0009}, {"test_accuracy": 0.509}, {"test_rmse": 908.0}):
        assert beyond(row, row | changed, 1e-3) == []
    for changed in ({"gradients": 9}, {"test_loss": 1.002}, {"test_accuracy": 0.511}, {"test_rmse": 910.0}):
        assert [one.column for one in beyond(row, row | changed, 1e-3)] == [*changed]
    assert beyond(row, row | {"test_accuracy": 0.52}, 0.03) == []
    assert [one.column for one in beyond(row, row | {"test_accuracy": None}, 1.0)] == ["test_accuracy"]
    assert lacking(row | {"test_loss": None}, row | {"test_auc": 0.5, "train_loss": None}) == {"test_loss", "test_auc"}
    assert not_computed(row | {"test_auc": 0.5, "train_loss": None}, row | {"test_loss": None}) == {"test_auc"}
