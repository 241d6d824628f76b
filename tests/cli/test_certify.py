"""`hpcfed certify`, `verify` and `replay` as commands: keys, signers, exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import pytest

import hpcfed
from hpcfed.config.load import load_recipe
from hpcfed.run_folder.certificate import certificate_of, faults
from hpcfed.run_folder.cut import cut

pytestmark = pytest.mark.one_mpi


@pytest.fixture
def run(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return hpcfed.run("recipe.yaml", quiet=True).folder


@pytest.fixture
def key(tmp_path) -> Path:
    """A new SSH key, and ``signers`` with its public half as alice's."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen (OpenSSH's client): signatures are not tested")
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    (tmp_path / "signers").write_text(f"alice@example.org {path.with_suffix('.pub').read_text()}")
    return path


def test_a_signed_run_is_verified_by_its_signer(run, key, folder, command):
    done = command(["certify", "run", "--key", key], folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "certificate.json.sig: signed with key SHA256:" in done.stdout
    done = command(["verify", "run", "--rounds", 1, "--signers", "signers", "--seed", 5], folder)
    assert done.returncode == 0, done.stdout
    assert "signed by alice@example.org, key SHA256:" in done.stdout
    assert "3 kept states measured; " in done.stdout
    assert re.search(
        r"\nspot-checked: round [123] of 3, from recorded states, bit for bit, on 1 rank; one wrong", done.stdout
    )
    (folder / "signers").write_text("bob@example.org ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGgHt\n")
    done = command(["verify", "run", "--rounds", 1, "--signers", "signers"], folder)
    assert (done.returncode, "which is not among the allowed signers" in done.stdout) == (1, True)


def test_a_changed_certificate_breaks_its_signature(run, key, folder, command):
    command(["certify", "run", "--key", key], folder)
    path = run / "certificate.json"
    path.write_text(path.read_text() + " ")
    done = command(["verify", "run", "--all"], folder)
    assert (done.returncode, "certificate.json.sig: " in done.stdout) == (1, True)
    (run / "certificate.json.sig").unlink()
    done = command(["verify", "run", "--all", "--signers", "signers"], folder)
    assert (done.returncode, "certificate.json.sig: is missing" in done.stdout) == (1, True)
    assert command(["verify", "run", "--all"], folder).returncode == 0


def test_a_tampered_run_is_not_signed(run, folder, command):
    (run / "environment.json").write_text("{}")
    done = command(["certify", "run", "--key", "anything"], folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the folder is not what its certificate says: got environment.json: is not the file" in done.stderr


def test_what_cannot_be_signed_is_one_line(run, folder, command, monkeypatch):
    if shutil.which("ssh-keygen") is not None:
        done = command(["certify", "run", "--key", "nobody"], folder)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "the certificate was not signed" in done.stderr
    monkeypatch.setenv("PATH", str(folder))
    done = command(["certify", "run", "--key", "nobody"], folder)
    assert (done.returncode, done.stderr) == (
        2,
        "hpcfed: no ssh-keygen on the path; install OpenSSH's client (version 8.2 or later)\n",
    )


def test_a_run_of_an_earlier_version_gets_its_certificate(run, folder, command):
    before = (run / "certificate.json").read_bytes()
    (run / "certificate.json").unlink()
    done = command(["certify", "run"], folder)
    assert (done.returncode, "written, for the run had none" in done.stdout) == (0, True)
    assert (run / "certificate.json").read_bytes() == before
    (run / "result.json").unlink()
    (run / "certificate.json").unlink()
    done = command(["certify", "run"], folder)
    assert (done.returncode, "only finished runs have a certificate: got unfinished" in done.stderr) == (2, True)


def test_what_cannot_be_verified_is_one_line(run, folder, command):
    for arguments, told in (
        (["verify", "nowhere"], "not a run folder"),
        (["verify", "run", "--rounds", 0], "--rounds: expected at least 1"),
        (["verify", "run", "--all", "--rounds", 2, "--seed", 1], "--rounds and --seed with --all: no round is drawn"),
        (["verify", "run", "--data", "nothing.h5"], "no such federation file"),
    ):
        done = command(arguments, folder)
        assert (done.returncode, told in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


def test_a_client_is_replayed_with_a_picture(run, folder, command):
    (run / "checkpoints" / "round-00000001.json").unlink()
    done = command(["replay", "run", "--round", 2, "--client", 3, "--picture", "steps.svg"], folder)
    assert (done.returncode, done.stderr) == (0, "")
    head, *_, recorded, picture = done.stdout.splitlines()
    assert head == "round 1 is computed, from w⁰"
    assert "run, round 2, client 3 (3): 4 steps" in done.stdout
    assert recorded.endswith("the round's hash is as recorded")
    assert picture == "picture: steps.svg"
    assert "<svg" in (folder / "steps.svg").read_text()
    done = command(["replay", "run", "--round", 2, "--client", 3, "--picture", "steps.doc"], folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.soak
def test_a_long_record_is_never_in_memory_whole(run):
    """Certified and cut in less than its bytes; its rows take some nine times them."""
    record, recipe = run / "metrics.jsonl", load_recipe(run / "recipe.yaml")
    row = json.loads(record.read_text().splitlines()[0])
    record.write_text("".join(json.dumps({**row, "round": number}) + "\n" for number in range(1, 3001)))
    bytes_of_record = record.stat().st_size
    tracemalloc.start()
    certificate = certificate_of(run, recipe, None)
    cut(run, 2999, row["hash"])
    assert tracemalloc.get_traced_memory()[1] < bytes_of_record
    tracemalloc.stop()
    found = [str(fault) for fault in faults(run, certificate)]
    assert "metrics.jsonl: has 2999 rounds, the certificate 3000" in found
