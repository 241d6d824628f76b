"""What a forger writes into a run folder, and what an honest author's folder holds: `verify` tells them apart.

The forgeries know hpcfed: where no key of theirs is needed, the certificate is written anew for what they forged.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

import hpcfed
from hpcfed.config.load import load_recipe
from hpcfed.data.content import content_hash
from hpcfed.errors import InputError
from hpcfed.provenance.certify import certify
from hpcfed.provenance.code_of_rounds import Permission
from hpcfed.provenance.slim import write_slim
from hpcfed.provenance.verify.verify import Verification, below_one, verify
from hpcfed.ranks.world import World
from hpcfed.run_folder.certificate import BASIS, CertifiedRounds, faults, write_certificate
from hpcfed.run_folder.checkpoint.layout import HEADER, _digest
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.rounds import iterate_rounds
from tests.cli.elsewhere import claim_other_processor
from tests.launch import ROOT, Completed, launch
from tests.mpi.recipes import small, write_recipe, write_small

pytestmark = pytest.mark.one_mpi

Command = Callable[..., Completed]
ROUNDS = 60
PATIENCE = 30
"""Seconds after which a command waits for a pipe."""


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """A folder with ``small.h5`` and a run of 60 rounds as by default."""
    folder = tmp_path_factory.mktemp("long")
    write_small(folder)
    data = {"data": str(folder / "small.h5"), "rounds": ROUNDS}
    hpcfed.run(small(folder / "run", **data), quiet=True)
    return folder


def edit_rows(run: Path, rounds: range, **changes: object) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for number in rounds:
        lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | changes) + "\n"
    (run / "metrics.jsonl").write_text("".join(lines))


def invent_model(path: Path) -> None:
    save_file({name: np.full_like(own, 7) for name, own in load_file(path).items()}, path)


def certify_anew(run: Path) -> None:
    (run / "certificate.json").unlink(missing_ok=True)
    write_certificate(RunFolder(run), load_recipe(run / "recipe.yaml"), None)


@pytest.fixture
def forged(long, tmp_path) -> Path:
    """A copy of the long run, to be changed."""
    return Path(shutil.copytree(long / "run", tmp_path / "forged"))


@pytest.mark.soak
def test_scores_of_old_rounds_are_measured_from_the_states_that_are_kept(forged, command):
    assert len(list((forged / "checkpoints").glob("*.json"))) == 20
    edit_rows(forged, range(11, ROUNDS + 1), test_accuracy=0.9999)
    certify_anew(forged)
    for options in ([], ["--all"]):
        done = command(["verify", forged, *options], forged.parent)
        assert (done.returncode, "test_accuracy: 0.9999 recorded" in done.stdout) == (1, True), done.stdout


def test_the_last_row_is_measured_from_the_saved_model_where_no_state_is_kept(forged, command):
    shutil.rmtree(forged / "checkpoints")
    edit_rows(forged, range(11, ROUNDS + 1), test_accuracy=0.9999)
    certify_anew(forged)
    done = command(["verify", forged], forged.parent)
    assert done.returncode == 1
    assert "differs from round 60, measured from the model that is kept\n  test_accuracy: 0.9999" in done.stdout


def test_what_cannot_be_entered_is_only_certified_and_no_success(forged, command):
    """Rounds between are forged, and not looked at."""
    shutil.rmtree(forged / "checkpoints")
    edit_rows(forged, range(11, ROUNDS), test_accuracy=0.9999)
    certify_anew(forged)
    done = command(["verify", forged], forged.parent)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 5
    assert last == (
        "verified in part: rounds 1–3 alone were computed, bit for bit, on 1 rank; the rest is only certified, without "
        "a signature"
    )
    done = command(["verify", forged, "--all"], forged.parent)
    assert (done.returncode, "differs from round 11" in done.stdout) == (1, True)


def test_a_chance_that_is_printed_is_below_one():
    chances = [1 - drawn / rounds for drawn, rounds in ((3, 4), (3, 60), (3, 10_100), (1, 10**6))]
    assert [below_one(chance) for chance in chances] == ["0.25", "0.95", "0.9997", "0.999999"]


@pytest.mark.soak
def test_an_honest_long_run_is_spot_checked_with_the_chance_that_is_printed(long, command):
    seeds = set()
    for _ in range(2):
        done = command(["verify", long / "run"], long)
        assert done.returncode == 0, done.stdout
        assert "20 kept states measured; " in done.stdout
        last = done.stdout.splitlines()[-1]
        assert last.startswith("spot-checked: 3 rounds (")
        assert last.endswith("one wrong round is missed with a probability of 0.95 at most")
        seeds.add(done.stdout.splitlines()[0])
    assert len(seeds) == 2


@pytest.mark.every(2)
@pytest.mark.parametrize("machine", ["this", "another"])
def test_an_invented_run_differs_whatever_machine_it_names(machine, tmp_path, command):
    write_small(tmp_path)
    run = hpcfed.run(small(tmp_path / "run", data=str(tmp_path / "small.h5"), rounds=6), quiet=True).folder
    edit_rows(run, range(2, 7), test_accuracy=0.99, test_loss=0.01, hash="0123456789abcdef")
    invent_model(run / "model.safetensors")
    shutil.rmtree(run / "checkpoints")
    if machine == "another":
        claim_other_processor(run)
    certify_anew(run)
    for options in (["--all"], ["--rounds", 1], []):
        done = command(["verify", run, *options], tmp_path)
        assert done.returncode == 1, done.stdout
        assert ("this machine computes other bits" in done.stdout) == (machine == "another")


def test_other_bits_explain_no_more_than_rounding(forged, command):
    """A round of other data is no rounding, though the environment is said to be another."""
    claim_other_processor(forged)
    certify_anew(forged)
    assert command(["verify", forged, "--all"], forged.parent).returncode == 0  # its bits are the same
    first = json.loads((forged / "metrics.jsonl").read_text().splitlines()[0])
    edit_rows(forged, range(20, 21), local_loss=first["local_loss"])
    certify_anew(forged)
    done = command(["verify", forged, "--all"], forged.parent)
    assert (done.returncode, "differs in round 20, by more than 3.1e-05" in done.stdout) == (1, True), done.stdout


@pytest.mark.soak
def test_other_bits_do_not_cover_the_evaluated_model(tmp_path, command):
    """Its statistics are measured anew, with rounding: it is compared by its scores. A round has other last bits."""
    write_small(tmp_path)
    (tmp_path / "normed.py").write_text(NORMED)
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"), python_path=[str(tmp_path)], rounds=4)
    recipe |= {"model": {"factory": "normed:net"}, "parameters": {"buffers": "averaged"}}
    run = hpcfed.run(recipe | {"evaluate": {"statistics": "training"}}, quiet=True).folder
    claim_other_processor(run)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    edit_rows(run, range(2, 3), local_loss=row["local_loss"] * (1 + 1e-9))
    certify_anew(run)
    assert command(["verify", run, "--all"], tmp_path).returncode == 5
    invent_model(run / "model-evaluated.safetensors")
    certify_anew(run)
    done = command(["verify", run, "--all"], tmp_path)
    assert (done.returncode, "differs in round 4, by more than" in done.stdout) == (1, True), done.stdout


NORMED = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
"""


def test_an_unfinished_run_has_no_invented_model(forged, command):
    recipe, result = forged / "recipe.yaml", json.loads((forged / "result.json").read_text())
    recipe.write_text(recipe.read_text().replace(f"rounds: {ROUNDS}\n", "rounds: 99\n"))
    (forged / "result.json").write_text(json.dumps(result | {"status": "stopped"}))
    certify_anew(forged)
    done = command(["verify", forged], forged.parent)
    assert (done.returncode, f"is not finished (stopped): {ROUNDS} of 99" in done.stdout) == (5, True), done.stdout
    invent_model(forged / "model.safetensors")
    certify_anew(forged)
    done = command(["verify", forged], forged.parent)
    assert (done.returncode, f"model.safetensors: is not the model after round {ROUNDS}" in done.stdout) == (1, True)


def twice_in_rows(run: Path) -> None:
    rows = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(rows.replace('"round": 9', '"test_accuracy": 0.9999, "round": 9', 1))


def twice_in_facts(run: Path) -> None:
    facts = (run / "environment.json").read_text()
    (run / "environment.json").write_text(facts.replace('"method"', '"method": "scaffold", "method"', 1))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (twice_in_rows, "metrics.jsonl: has 'test_accuracy' twice, in line 9"),
        (twice_in_facts, "environment.json: has 'method' twice"),
    ],
)
def test_an_entry_that_readers_may_take_from_two_places_is_a_fault(change, told, forged, command):
    change(forged)
    certify_anew(forged)
    done = command(["verify", forged], forged.parent)
    assert (done.returncode, told in done.stdout) == (1, True), done.stdout


def test_a_table_has_no_column_twice(tmp_path, command):
    """Verification would read the last one, and a program the first."""
    write_small(tmp_path)
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"), evaluate={"clients": {"every": 1}})
    run = hpcfed.run(recipe, quiet=True).folder
    header, *rows = (run / "clients.csv").read_text().splitlines()
    place = header.split(",").index("accuracy")
    lines = [("accuracy", header.split(",")), *(("0.9999", row.split(",")) for row in rows)]
    text = [",".join([*cells[:place], first, *cells[place:]]) for first, cells in lines]
    (run / "clients.csv").write_text("\n".join(text) + "\n")
    certify_anew(run)
    done = command(["verify", run, "--all"], tmp_path)
    assert (done.returncode, "a column twice" in done.stderr) == (2, True), done.stdout


def test_scores_that_are_left_out_are_said_to_lack(forged, command):
    """Those of bad rounds, say; the recipe asks for them."""
    edit_rows(forged, range(30, 41), test_accuracy=None)
    certify_anew(forged)
    done = command(["verify", forged, "--all"], forged.parent)
    told = "the record lacks scores of 11 computed rounds that the recipe asks for"
    assert (done.returncode, told in done.stdout) == (5, True), done.stdout


def test_values_that_are_left_out_are_said_to_lack(forged, command):
    """Without its hash a round is compared by less than its bits."""
    edit_rows(forged, range(7, 9), hash=None, delta_sq=None)
    certify_anew(forged)
    done = command(["verify", forged, "--all"], forged.parent)
    told = "computed rounds have values that the record lacks, which are not checked: delta_sq, hash"
    assert (done.returncode, told in done.stdout) == (5, True), done.stdout


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("per_rank", 1, "per_rank: expected a list of objects, got one of type int"),
        ("per_rank", ["cpu"], "per_rank: expected a list of objects, got one of type list"),
        ("packages", "torch", "packages: expected an object, got one of type str"),
        ("privacy", [], "privacy: expected an object, got one of type list"),
    ],
)
def test_an_environment_of_other_types_is_one_line(key, value, told, forged, command):
    path = forged / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    (forged / "certificate.json").unlink()
    for arguments in (["verify", forged], ["compare", forged, forged]):
        done = command(arguments, forged.parent)
        assert (done.returncode, told in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["method", "evaluated_samples"])
def test_facts_that_recipe_and_data_give_are_compared(name, forged, command):
    """Reports say them, and no round is computed from them."""
    path = forged / "environment.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {name: {"method": "scaffold", "evaluated_samples": {"test": 10**6}}[name]}))
    certify_anew(forged)
    done = command(["verify", forged, "--rounds", 1], forged.parent)
    assert (done.returncode, f"environment.json: {name}: " in done.stdout) == (1, True), done.stdout


def test_a_certificate_has_no_further_entries(forged, command):
    certificate = json.loads((forged / "certificate.json").read_text())
    (forged / "certificate.json").write_text(json.dumps(certificate | {"best_accuracy": 0.9999}))
    done = command(["verify", forged], forged.parent)
    assert (done.returncode, "has an entry 'best_accuracy', which is none of" in done.stdout) == (1, True), done.stdout


@pytest.fixture
def signed(long, tmp_path) -> Path:
    """A signed copy of the long run, and ``signers``."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen (OpenSSH's client): signatures are not tested")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
    (tmp_path / "signers").write_text(f"alice@example.org {key.with_suffix('.pub').read_text()}")
    run = Path(shutil.copytree(long / "run", tmp_path / "signed"))
    list(certify(run, key))
    return run


def add_model(run: Path) -> None:
    shutil.copyfile(run / "model.safetensors", run / "model-evaluated.safetensors")
    invent_model(run / "model-evaluated.safetensors")


def edit_result(run: Path) -> None:
    (run / "result.json").write_text((run / "result.json").read_text().replace("finished", "stopped"))


def add_private(run: Path) -> None:
    (run / "private").mkdir()
    shutil.copyfile(run / "model.safetensors", run / "private" / "client-3.safetensors")


def add_clients(run: Path) -> None:
    (run / "clients.csv").write_text("round,client,model,split,loss,accuracy,n,name\n1,0,global,train,0.1,0.99,9,0\n")


def add_checkpoint(run: Path) -> None:
    for suffix in ("json", "server"):
        shutil.copyfile(run / f"checkpoints/round-00000003.{suffix}", run / f"checkpoints/round-00000004.{suffix}")


def link_model(run: Path) -> None:
    (run / "model.safetensors").rename(run.parent / "elsewhere")
    (run / "model.safetensors").symlink_to(run.parent / "elsewhere")


def link_checkpoints(run: Path) -> None:
    (run / "checkpoints").rename(run.parent / "states")
    (run / "checkpoints").symlink_to(run.parent / "states")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (add_model, "model-evaluated.safetensors: is not named by the certificate"),
        (edit_result, "result.json: is not the file that the certificate names"),
        (add_private, "private/client-3.safetensors: is not named by the certificate"),
        (add_clients, "clients.csv: is not named by the certificate"),
        (add_checkpoint, "checkpoints/round-00000004.server: is not named by the certificate"),
        (link_model, "model.safetensors: is a link, or no file"),
        (link_checkpoints, "checkpoints: is a link, or no file"),
    ],
)
def test_a_signed_folder_is_as_it_was_signed(change, told, signed, command):
    change(signed)
    for options in (["--all"], ["--rounds", 1]):
        done = command(["verify", signed, "--signers", "signers", *options], signed.parent)
        assert (done.returncode, told in done.stdout) == (1, True), done.stdout


def test_the_rest_of_a_signed_run_is_only_signed(signed, command):
    """Its author kept no states, and signed the folder so."""
    shutil.rmtree(signed / "checkpoints")
    (signed / "certificate.json").unlink()
    list(certify(signed, signed.parent / "key"))
    done = command(["verify", signed, "--signers", "signers"], signed.parent)
    words = "verified in part: rounds 1–3 alone were computed, bit for bit, on 1 rank; the rest is only signed"
    assert (done.returncode, done.stdout.splitlines()[-1]) == (5, words)


def test_an_added_model_is_not_the_evaluated_one(signed):
    add_model(signed)
    run = hpcfed.load(signed)
    evaluated, last = ([p.detach().numpy() for p in one.parameters()] for one in (run.evaluated, run.module))
    assert all(map(np.array_equal, evaluated, last))


def test_what_is_not_a_runs_is_a_remark(signed, command):
    (signed / "notes.txt").write_text("mine")
    (signed / "figures").mkdir()
    (signed / "previous-1").mkdir()
    (signed / "report.html").write_text("<html>")
    done = command(["verify", signed, "--signers", "signers"], signed.parent)
    assert (done.returncode, "not a run's, and not looked at: notes.txt\n" in done.stdout) == (0, True), done.stdout


def test_a_certificate_names_no_other_file(forged, command):
    certificate = json.loads((forged / "certificate.json").read_text())
    certificate["files"]["../../../etc/hostname"] = "0" * 64
    (forged / "certificate.json").write_text(json.dumps(certificate))
    done = command(["verify", forged, "--all"], forged.parent)
    assert done.returncode == 1
    assert "certificate.json: names '../../../etc/hostname', which is no result of a run" in done.stdout


def test_a_certificate_that_is_not_of_its_files_is_found(forged, command):
    wrong = {"repeatable": False, "bits": "portable", "stopped": "stop.patience", "name": "other", "arithmetic": 99}
    for entry, value in wrong.items():
        certificate = json.loads((forged / "certificate.json").read_text())
        (forged / "certificate.json").write_text(json.dumps(certificate | {entry: value}))
        done = command(["verify", forged, "--all"], forged.parent)
        assert (done.returncode, f"certificate.json: its {entry!r} is not that of" in done.stdout) == (1, True)
        (forged / "certificate.json").write_text(json.dumps(certificate))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data": "sha256:00"}, "its 'data' is not that of recipe.yaml"),
        ({"named_files": {"budget.schedule": "0" * 64}}, "names a file for budget.schedule, recipe.yaml none"),
        ({"recipe.model.args": {"scale": 2}}, "its recipe has model.args.scale: 2, recipe.yaml (no such key)"),
        ({"recipe.loss.args": 1}, "its recipe has loss.args: 1, recipe.yaml (no such key)"),
        ({"recipe.local.lr_2": 0.1}, "its recipe has local.lr_2: 0.1, recipe.yaml (no such key)"),
        ({"recipe.stop.patience": ...}, "its recipe has stop.patience: (no such key), recipe.yaml None"),
    ],
)
def test_a_chain_begins_with_the_runs_own_recipe_and_data(change, told, forged, command):
    """An entry that nothing is computed from would give the rounds another chain."""
    certificate = json.loads((forged / "certificate.json").read_text())
    ((path, value),) = change.items()
    *sections, key = path.split(".")
    place = certificate
    for section in sections:
        place = place[section]
    place[key] = value
    if value is ...:
        del place[key]
    certificate["chain"] = chain_of(certificate, forged)
    (forged / "certificate.json").write_text(json.dumps(certificate))
    done = command(["verify", forged], forged.parent)
    assert (done.returncode, f"certificate.json: {told}" in done.stdout) == (1, True), done.stdout


def chain_of(certificate: dict, run: Path) -> str:
    rounds = CertifiedRounds({key: certificate[key] for key in BASIS if key in certificate})
    for row in iterate_rounds(run / "metrics.jsonl"):
        rounds.add(row)
    return rounds.chain


def test_a_certificate_of_another_version_is_written_anew_unless_it_is_signed(forged, command):
    certificate = json.loads((forged / "certificate.json").read_text())
    (forged / "certificate.json").write_text(json.dumps(certificate | {"version": 1}))
    (forged / "certificate.json.sig").write_text("somebody's")
    done = command(["certify", forged], forged.parent)
    assert (done.returncode, "a certificate of another version, and signed" in done.stderr) == (2, True)
    assert (forged / "certificate.json.sig").read_text() == "somebody's"
    (forged / "certificate.json.sig").unlink()
    done = command(["verify", forged], forged.parent)
    assert (done.returncode, "'hpcfed certify RUN' writes one of this version" in done.stderr) == (2, True)
    done = command(["certify", forged], forged.parent)
    assert (done.returncode, "in place of one of another version" in done.stdout) == (0, True)
    assert json.loads((forged / "certificate.json").read_text()) == certificate
    (forged / "certificate.json").write_text(json.dumps(certificate | {"version": 1}))
    (forged / "environment.json").write_text('{"arithmetic": 1}')
    done = command(["verify", forged], forged.parent)  # a new certificate would be refused next
    assert (done.returncode, "another arithmetic" in done.stderr, "certify" in done.stderr) == (2, True, False)


NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 4))
"""


@pytest.fixture
def changed(tmp_path) -> Path:
    """A run of six rounds, of which the last three had other code, which was accepted; its code lies beside it."""
    write_small(tmp_path)
    (tmp_path / "own_changed.py").write_text(NET)
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"), python_path=[str(tmp_path)])
    recipe["model"] = {"factory": "own_changed:net"}
    hpcfed.run(recipe, quiet=True)
    (tmp_path / "own_changed.py").write_text(NET.replace("ReLU", "Tanh"))
    hpcfed.run(recipe | {"rounds": 6}, quiet=True, accept_code=True)
    return tmp_path / "run"


def test_accepted_code_accuses_nobody(changed, command):
    """Each round is verified with the code that it was trained with, if that may run."""
    certificate = json.loads((changed / "certificate.json").read_text())
    assert certificate["repeatable"] is False
    assert certificate["why_not"] == "code of the user's was changed once on the way (code.json)"
    assert [one["since"] for one in certificate["code_before"]] == [1, 4]
    done = command(["verify", changed, "--all"], changed.parent)
    assert done.returncode == 5, done.stdout
    assert "rounds 1 to 3 had other code: own_changed.py differs from line 5; name the folder" in done.stdout
    assert "verified in part: rounds 4–6 alone were computed" in done.stdout.splitlines()[-1]
    done = command(["verify", changed, "--all", "--run-code"], changed.parent)
    assert done.returncode == 0, done.stdout
    assert "runs the code own_changed:net for rounds 1 to 3, from code.json: own_changed.py" in done.stdout
    assert "verified: all 6 rounds, bit for bit, on 1 rank" in done.stdout
    for rounds in (1, 2):
        assert command(["verify", changed, "--rounds", rounds, "--run-code"], changed.parent).returncode == 0
    done = command(["replay", changed, "--round", 2, "--client", 0], changed.parent)
    assert (done.returncode, "the code is not this run's: own_changed.py differs" in done.stderr) == (2, True)
    done = command(["replay", changed, "--round", 2, "--client", 0, "--run-code"], changed.parent)
    assert (done.returncode, "the round's hash is as recorded" in done.stdout) == (0, True), done.stdout + done.stderr


def test_recorded_code_runs_after_a_question_alone(changed, command):
    (changed.parent / "own_changed.py").unlink()
    ran = changed.parent / "ran"
    text = json.loads((changed / "code.json").read_text())
    for one in (text, *text["before"]):
        entry = one["files"]["own_changed"]
        entry["text"] = entry["text"] + f"\nopen({str(ran)!r}, 'w').write('yes')\n"
        entry["hash"] = xxhash.xxh3_128_hexdigest(entry["text"].encode())
    (changed / "code.json").write_text(json.dumps(text))
    certify_anew(changed)
    done = command(["verify", changed, "--all"], changed.parent)
    assert (done.returncode, ran.exists()) == (2, False)
    assert "own_changed.py" in done.stderr
    assert "--run-code" in done.stderr
    questions: list[str] = []
    for answer in (False, True):
        permission = Permission(ask=lambda what, answer=answer: questions.append(what) or answer)
        request = Verification(changed, None, 0, permission=permission)
        if answer:
            assert verify(request, World(), lambda text: None) == 0
        else:
            with pytest.raises(InputError):
                verify(request, World(), lambda text: None)
        assert ran.exists() == answer
    assert questions[0] == questions[1]
    assert f"code.json of {changed}, not signed by anybody, has code that would run" in questions[0]
    assert f"of rounds 1 to 3: {changed.parent}/own_changed.py (7 lines)" in questions[0]
    ran.unlink()
    assert command(["verify", changed, "--all", "--run-code"], changed.parent).returncode == 0
    assert ran.exists()


def test_text_and_hash_of_recorded_code_belong_together(changed, command):
    text = (changed / "code.json").read_text()
    (changed / "code.json").write_text(text.replace("nn.Tanh", "nn.Sigmoid"))
    certify_anew(changed)
    done = command(["verify", changed, "--all", "--run-code"], changed.parent)
    assert (done.returncode, "does not have its" in done.stdout + done.stderr) in ((1, True), (2, True))


VERSIONS = {
    "later": {"since": 4, "before": []},
    "later, of more": {"since": 4, "before": [{"files": {}, "since": 5}]},
    "after the end": {"since": 4, "before": [{"files": {}, "since": 1}, {"files": {}, "since": 99}]},
}


@pytest.mark.parametrize("record", VERSIONS)
def test_no_round_is_without_code(record, tmp_path):
    """Rounds before the first version of the code that is recorded are computed, too: their rows are invented here."""
    write_small(tmp_path)
    changes = {"data": str(tmp_path / "small.h5"), "rounds": 6, "checkpoint": {"every": 3, "keep": 2}}
    run = hpcfed.run(small(tmp_path / "run", **changes), quiet=True).folder
    (run / "code.json").write_text(json.dumps({"files": {}, **VERSIONS[record]}))
    certify_anew(run)
    said: list[str] = []
    assert verify(Verification(run, None, 0), World(), said.append) == 0, said
    edit_rows(run, range(1, 3), test_accuracy=0.9999, hash="0123456789abcdef")
    certify_anew(run)
    assert verify(Verification(run, None, 0), World(), said.append) == 1, said
    assert "differs from round 1 (of rounds 1 to 6)" in said or "differs from round 1 (of rounds 1 to 3)" in said


def test_rounds_before_a_metric_of_ones_own_are_computed(tmp_path):
    write_small(tmp_path)
    (tmp_path / "own_metric.py").write_text(
        "def right(output, target):\n    return (output.argmax(1) == target).sum(), len(target)\n"
    )
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"), python_path=[str(tmp_path)])
    hpcfed.run(recipe, quiet=True)
    recipe["evaluate"] = {**recipe["evaluate"], "metrics": {"right": "own_metric:right"}}
    run = hpcfed.run(recipe | {"rounds": 5}, quiet=True).folder
    said: list[str] = []
    assert verify(Verification(run, None, 0), World(), said.append) == 5, said
    assert said[-2:] == [
        "the record lacks scores of 3 computed rounds that the recipe asks for",
        "verified in part: all 5 rounds, bit for bit, on 1 rank",
    ]


def forge_state(run: Path, round: int, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the tensors of a kept state, and give its manifest the checksums that it then must have."""
    path = run / "checkpoints" / f"round-{round:08}.server"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    manifest = json.loads(path.with_suffix(".json").read_text())
    del manifest["checksum"]
    manifest["server_hash"] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    path.with_suffix(".json").write_text(json.dumps({**manifest, "checksum": _digest(manifest)}))


STATES = {
    "another module": lambda state: state.update(w=np.zeros(7, np.float32)),
    "no list of clients": lambda state: state.pop("touched"),
    "unknown clients": lambda state: state.update(touched=np.array([99] * len(state["touched"]))),
    "no model": lambda state: state.pop("w"),
    "more": lambda state: state.update(x=np.zeros(3, np.float32)),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_no_run_leaves_is_a_fault(case, tmp_path):
    write_small(tmp_path)
    changes = {"data": str(tmp_path / "small.h5"), "algorithm": {"name": "scaffold"}}
    run = hpcfed.run(small(tmp_path / "run", rounds=4, **changes), quiet=True).folder
    assert (run / "checkpoints" / "round-00000002.json").exists()
    forge_state(run, 2, STATES[case])
    certify_anew(run)
    said: list[str] = []
    assert verify(Verification(run, None, 0), World(), said.append) == 1, said
    assert any("round-00000002" in line or "kept after round 2" in line for line in said), said


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of four rounds, with states of clients and all tables; nothing certifies it."""
    folder = tmp_path_factory.mktemp("whole")
    changes = {"data": str(write_small(folder)), "rounds": 4, "algorithm": {"name": "scaffold"}, "update_hashes": True}
    evaluate = {"batch_size": 64, "clients": {"every": 2}}
    run = hpcfed.run(small(folder / "run", evaluate=evaluate, **changes), quiet=True).folder
    (run / "certificate.json").unlink()
    return run


def edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    if "checksum" in content:
        content["checksum"] = _digest({key: value for key, value in content.items() if key != "checksum"})
    path.write_text(json.dumps(content))


def ask_for_fewer_rounds(run: Path) -> None:
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("rounds: 4\n", "rounds: 3\n"))


def forget_rounds(run: Path) -> None:
    """A state of a later round is left."""
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:1]))
    (run / "result.json").unlink()


def add_to(name: str) -> Callable[[Path], None]:
    """Change a tensor of a state's server file by what no score of the round shows, and no file's checksum."""
    return lambda run: forge_state(run, 2, lambda state: state.update({name: state[name] + np.float32(1e-7)}))


def change_record(run: Path) -> None:
    """Change the last value of a client's state, and the hash of its record."""
    path = run / "checkpoints" / "round-00000002.clients"
    data = bytearray(path.read_bytes())
    magic, client, round, _, size = HEADER.unpack_from(data)
    data[HEADER.size + size - 1] ^= 1
    digest = xxhash.xxh3_64_intdigest(bytes(data[HEADER.size : HEADER.size + size]))
    HEADER.pack_into(data, 0, magic, client, round, digest, size)
    path.write_bytes(data)


def change_progress(run: Path) -> None:
    path = run / "checkpoints" / "round-00000002.json"
    progress = json.loads(path.read_text())["progress"]
    totals = {name: total + 1 for name, total in progress["totals"].items()}
    edit_json(path, progress=progress | {"totals": totals})


def change_update_hash(run: Path) -> None:
    path = run / "update-hashes.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


OTHER_STATE = "the state kept after round 2: is another than is computed"
CONTRADICTIONS: dict[str, tuple[Callable[[Path], None], int | None, str]] = {
    "result's rounds": (lambda run: edit_json(run / "result.json", rounds=3), None, "result.json: says 3 rounds, the"),
    "result's reason": (
        lambda run: edit_json(run / "result.json", stopped="stop.patience"),
        None,
        "result.json: says 'stop.patience', which the record does not bear out",
    ),
    "recipe's rounds": (ask_for_fewer_rounds, None, "metrics.jsonl: has 4 rounds, the recipe 3"),
    "state of no round": (forget_rounds, None, "round-00000002.json: is of a round after the last one, 1"),
    "signed": (lambda run: (run / "certificate.json.sig").touch(), None, "certificate.json: is missing, and was"),
    "model": (add_to("w"), None, OTHER_STATE),
    "server's state": (add_to("shared.c"), None, OTHER_STATE),
    "server's state, spot check": (add_to("shared.c"), 1, "the state kept after round 2: is not the one of the record"),
    "client's state": (change_record, None, OTHER_STATE),
    "counts": (change_progress, None, OTHER_STATE),
    "update's hash": (change_update_hash, None, "update-hashes.bin: another hash of an update of round 1"),
}
"""What is changed, the number of rounds to verify, and what is told."""


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_the_rest_of_a_folder_is_a_fault(case, whole, tmp_path):
    """No certificate tells of it, and no score: a check of its own does."""
    change, rounds, told = CONTRADICTIONS[case]
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    change(run)
    said: list[str] = []
    assert verify(Verification(run, rounds, 0), World(), said.append) == 1, said
    assert any(told in line for line in said), said


def test_what_contradicts_nothing_is_no_fault(whole):
    said: list[str] = []
    assert verify(Verification(whole, None, 0), World(), said.append) == 0, said


SCRIPT = """
import sys
import torch
from torch import nn
import hpcfed

HIDDEN = 5

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 4))

def net():
    return Net()

def right(output, target):
    return (output.argmax(1) == target).double().sum(), len(target)

result = hpcfed.run({
    "data": sys.argv[1], "output": "run", "rounds": 4, "model": {"factory": "__main__:net"},
    "local": {"steps": 2, "batch_size": 5, "lr": 0.1}, "algorithm": {"name": "fedavg"},
    "evaluate": {"metrics": {"right": "__main__:right"}},
}, quiet=True)
print(result.folder)
"""


def test_a_run_of_a_script_is_verified_and_replayed_elsewhere(tmp_path, command):
    """Its definitions alone are imported: the script itself would start its run again."""
    write_small(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = launch(0, [str(tmp_path / "small.h5")], cwd=tmp_path, program=["train.py"])
    assert done.returncode == 0, done.stderr
    (tmp_path / "train.py").unlink()
    run = tmp_path / "run"
    done = command(["verify", run, "--all"], tmp_path)
    assert (done.returncode, "--run-code" in done.stderr) == (2, True)
    done = command(["verify", run, "--all", "--run-code"], tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "from code.json: recorded_main.py" in done.stdout
    done = command(["replay", run, "--round", 2, "--client", 1, "--run-code"], tmp_path)
    assert (done.returncode, "as recorded" in done.stdout) == (0, True)
    found = hpcfed.replay(run, 2, 1, run_code=True)
    assert found.agrees
    with pytest.raises(InputError, match="--run-code"):
        hpcfed.replay(run, 2, 1)


NOTEBOOK = """
import IPython
shell = IPython.InteractiveShell.instance()
for cell in {cells!r}:
    assert shell.run_cell(cell).success
"""


@pytest.mark.soak
def test_a_run_of_a_notebook_is_verified_elsewhere(tmp_path, command):
    pytest.importorskip("IPython")
    write_small(tmp_path)
    head, _, tail = SCRIPT.replace("sys.argv[1]", repr(str(tmp_path / "small.h5"))).partition("class Net")
    definitions, _, run = f"class Net{tail}".partition("result =")
    cells = [head, definitions, f"result ={run}"]
    (tmp_path / "notebook.py").write_text(NOTEBOOK.format(cells=cells))
    env = {"IPYTHONDIR": str(tmp_path / "ipython")}
    done = launch(0, [], cwd=tmp_path, program=["notebook.py"], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    done = command(["verify", tmp_path / "run", "--all", "--run-code"], tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_an_unfinished_run_is_said_to_be_unfinished(tmp_path, command):
    write_small(tmp_path)
    write_recipe(tmp_path, rounds=6, stop={"max_hours": 1e-9}, checkpoint={"every": 1})
    done = command(["run", "recipe.yaml", "-q"], tmp_path)
    assert done.returncode == 75
    done = command(["verify", "run", "--all"], tmp_path)
    assert done.returncode == 5, done.stdout
    *_, status, last = done.stdout.splitlines()
    assert status.startswith("the run is not finished (stopped): ")
    assert status.endswith(" of 6 rounds")
    assert last.startswith("verified in part: all ")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps(result | {"status": "finished"}))
    done = command(["verify", "run", "--all"], tmp_path)
    assert (done.returncode, "result.json: says finished, but" in done.stdout) == (1, True)


def test_a_run_that_was_killed_at_its_very_end_is_no_forgery(forged, command):
    for name in ("result.json", "certificate.json"):
        (forged / name).unlink()
    done = command(["verify", forged], forged.parent)
    assert done.returncode == 5, done.stdout
    assert "result.json says unfinished, though the last round and the models are there\n" in done.stdout


def test_nothing_is_written_through_a_link_in_a_strangers_folder(tmp_path, command):
    write_small(tmp_path)
    write_recipe(tmp_path)
    command(["run", "recipe.yaml", "-q"], tmp_path)
    victim, place = tmp_path / "victim", tmp_path / "place"
    place.mkdir()
    for name in (".lock", "metrics.jsonl", "clients.csv", "checkpoints", "logs"):
        own = tmp_path / "run" / name
        if own.exists():
            own.rename(tmp_path / "kept")
        victim.write_text("mine")
        own.symlink_to(place if name in ("checkpoints", "logs") else victim)
        done = command(["run", "recipe.yaml", "rounds=4", "-q"], tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), (name, done.stderr)
        assert "got a link to" in done.stderr
        assert (victim.read_text(), list(place.iterdir())) == ("mine", []), name
        own.unlink()
        if (tmp_path / "kept").exists():
            (tmp_path / "kept").rename(own)
    os.mkfifo(tmp_path / "run" / "clients.csv")
    done = command(["run", "recipe.yaml", "rounds=4", "-q"], tmp_path)
    assert (done.returncode, "got a pipe, a socket or a device" in done.stderr) == (2, True), done.stderr
    (tmp_path / "run" / "clients.csv").unlink()
    (tmp_path / "run-contributions").symlink_to(place)
    done = command(["contributions", "run", "--permutations", 0], tmp_path)
    assert (done.returncode, list(place.iterdir())) == (2, []), done.stderr
    (tmp_path / "run" / "figures").symlink_to(place)
    done = command(["report", "run"], tmp_path)
    assert (done.returncode, list(place.iterdir())) == (2, []), done.stderr


WAITS = {
    "model.safetensors": ["run", "sound/recipe.yaml", "output=forged", "-q"],
    "report.html": ["report", "forged", "--page-only"],
    "certificate.json.sig": ["verify", "forged"],
}
"""A file of a run → a command that opens it."""


@pytest.mark.parametrize(("name", "is_link"), [*((name, False) for name in WAITS), ("certificate.json.sig", True)])
def test_no_command_waits_for_a_pipe_in_a_strangers_folder(name, is_link, long, forged, command):
    """Nor does `verify` for one behind a link: it opens none."""
    (forged.parent / "sound").symlink_to(long / "run")
    (forged / name).unlink(missing_ok=True)
    pipe = forged.parent / "pipe" if is_link else forged / name
    os.mkfifo(pipe)
    if is_link:
        (forged / name).symlink_to(pipe)

    def end(number: int, frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(PATIENCE)
    try:
        done = command(WAITS[name], forged.parent)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert done.returncode == (1 if name == "certificate.json.sig" else 2), done.stderr
    assert (done.stdout + done.stderr).count("\n") < 4


def test_the_states_behind_a_link_are_not_opened(forged, command):
    (forged / "checkpoints").rename(forged.parent / "elsewhere")
    (forged / "checkpoints").symlink_to(forged.parent / "elsewhere")
    for path in (forged.parent / "elsewhere").glob("*.json"):
        path.write_text("{}")  # damaged, which a reader would say
    done = command(["verify", forged], forged.parent)
    assert (done.returncode, "no manifest" in done.stdout, "checkpoints: is a link" in done.stdout) == (1, False, True)


ODD_DATA = {
    "a group": lambda file: file.create_group("train/x"),
    "a number": lambda file: file.create_dataset("train/x", data=3.0),
    "a petabyte": lambda file: file.create_dataset("train/x", (1 << 48, 4), "f4", chunks=(1024, 4)),
    "a name of 1 GB": lambda file: file.create_dataset("train/client", (5,), f"S{1 << 30}", chunks=(1,)),
}


@pytest.mark.parametrize("odd", ODD_DATA)
def test_data_are_opened_as_for_a_run_before_their_hash_is_computed(odd, tmp_path, command):
    path = write_small(tmp_path)
    with h5py.File(path, "r+") as file:
        file.attrs["content"] = content_hash(file)
    hpcfed.run(small(tmp_path / "run", data=str(path), rounds=1), quiet=True)
    with h5py.File(path, "r+") as file:
        file.pop("train/client" if "name" in odd else "train/x", None)
        ODD_DATA[odd](file)
    done = command(["verify", "run", "--all"], tmp_path)
    assert (done.returncode, done.stderr) == (1, ""), done.stderr
    assert "small.h5: cannot be read: " in done.stdout


def test_a_record_without_its_models_names_no_host(tmp_path):
    run = hpcfed.run(small(tmp_path / "run", data=str(write_small(tmp_path)), rounds=1), quiet=True).folder
    facts = json.loads((run / "environment.json").read_text())
    facts |= {"hosts": ["north"], "per_rank": [facts["per_rank"][0] | {"host": "north"}]}
    facts |= {"bitwise": False, "bitwise_why_not": "the ranks differ in versions: A on north-2; B on north; and more"}
    facts["per_rank"].append(facts["per_rank"][0] | {"host": "north-2"})
    (run / "environment.json").write_text(json.dumps(facts))
    certify_anew(run)
    certificate = write_slim(run, tmp_path / "slim", "../small.h5")
    assert certificate["why_not"] == "the ranks differ in versions: A on host 2; B on host 1; and more"
    assert not any("north" in path.read_text() for path in (tmp_path / "slim").iterdir())
    assert not faults(tmp_path / "slim", certificate)


@pytest.mark.soak
def test_a_killed_verify_leaves_nothing(tmp_path):
    """It computes in the folder's place, and writes nowhere."""
    write_small(tmp_path)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"), rounds=300, evaluate={"every": 0})
    hpcfed.run(recipe | {"checkpoint": {"every": 150, "keep": 1}}, quiet=True)
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "hpcfed.cli.main", "verify", str(tmp_path / "run"), "--all"]
    job = subprocess.Popen(command, env=env, cwd=temporary, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert any("the data" in line for line in job.stdout)  # the next is said 10 s later
    time.sleep(0.1)
    assert job.poll() is None
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert list(temporary.iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def test_half_a_state_from_before_the_first_one_does_not_stay(tmp_path):
    """A job was killed while it wrote its first checkpoint, after some rounds: its record is kept aside without it."""
    write_small(tmp_path)
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"))
    run = hpcfed.run(recipe, quiet=True).folder
    for name in ("result.json", "certificate.json", "model.safetensors"):
        (run / name).unlink()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / ".round-00000002.71c56eb3.server").write_bytes(bytes(1000))
    (run / "checkpoints" / ".round-00000002.71c56eb3.folder").mkdir()
    hpcfed.run(recipe, quiet=True)
    assert (run / "previous-1" / "metrics.jsonl").exists()
    assert not list(run.rglob(".round-*"))
