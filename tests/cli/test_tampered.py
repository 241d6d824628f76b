"""Tamperings drawn at random: any file added, removed, changed, swapped, renamed or linked, any number of any JSON.

With a signature nothing that a command reads may differ. Without one the forger writes the certificate anew, and then
the rounds tell: what `verify --all` accepts is what the recipe gives. The seed is new each time; a test that fails says
it, and HPCFED_TAMPERING sets it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import pytest

import hpcfed
from hpcfed.config.load import load_recipe
from hpcfed.data.content import content_hash
from hpcfed.errors import HpcfedError
from hpcfed.provenance.certify import certify
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World
from hpcfed.run_folder.certificate import VARYING_COLUMNS, write_certificate
from hpcfed.run_folder.checkpoint.layout import _digest
from hpcfed.run_folder.contents import contents_of, is_result
from hpcfed.run_folder.folder import RunFolder
from tests.mpi.recipes import small, write_small
from tests.soak import often

pytestmark = [pytest.mark.one_mpi, pytest.mark.deadline(600)]

USUAL, TAMPERINGS, ROUNDS = 5, 40, 8
SEED = int(os.environ.get("HPCFED_TAMPERING") or random.SystemRandom().randrange(1 << 32))
RUNS: Mapping[str, Mapping[str, Any]] = {
    "scaffold": {
        "algorithm": {"name": "scaffold"},
        "cohort": {"size": 3},
        "update_hashes": True,
        "evaluate": {"model": "last-two", "train": {"every": 2}, "clients": {"every": 4}, "batch_size": 64},
        "checkpoint": {"every": 3, "keep": "spaced"},
    },
    "private": {"parameters": {"private": ["*.bias"]}, "evaluate": {"every": 0, "clients": {"every": 2}}},
}
ADDED = (
    *("model-evaluated.safetensors", "clients.csv", "update-hashes.bin", "code.json", "logs/rank-0.log", "notes.txt"),
    *("private/client-3.safetensors", "private/client-77.safetensors", "checkpoints/round-00000099.server"),
)
UNIMPORTANT = ("stopping", "version", "sha256", "recipe", "server_hash", "checksum", "progress")
"""Entries of a checkpoint's manifest that are no numbers of a result."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Signed runs of eight rounds, ``signers``, and the key."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen (OpenSSH's client): signatures are not tested")
    place = tmp_path_factory.mktemp("tampered")
    with h5py.File(write_small(place), "r+") as file:
        file.attrs["content"] = content_hash(file)
    key = place / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
    (place / "signers").write_text(f"alice@example.org {key.with_suffix('.pub').read_text()}")
    for name, changes in RUNS.items():
        recipe = small(place / name, data=str(place / "small.h5"), rounds=ROUNDS, **changes)
        list(certify(hpcfed.run(recipe, quiet=True).folder, key))
    return place


def verified(run: Path, rounds: int | None, seed: int, signers: Path | None) -> tuple[int, str]:
    said: list[str] = []
    try:
        code = verify(Verification(run, rounds, seed, signers=signers), World(), said.append)
    except HpcfedError as error:
        return error.exit_code, str(error)
    return code, "\n".join(said)


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock")


def tamper(run: Path, rng: random.Random) -> str:
    """Change a run's folder at random; return how, in words."""
    files, how = files_of(run), rng.choice(["add", "remove", "change", "swap", "rename", "link", *["number"] * 6])
    one, other = rng.sample(files, 2)
    if how == "add":
        target = run / rng.choice(ADDED)
        target.parent.mkdir(exist_ok=True)
        content = one.read_bytes()
        target.write_bytes(content)
        return f"{target.name} added, a copy of {one.name}"
    if how == "remove":
        one.unlink()
    elif how == "change":
        data = bytearray(one.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        one.write_bytes(data)
    elif how == "swap":
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return f"{one.relative_to(run)} and {other.relative_to(run)} swapped"
    elif how == "rename":
        one.rename(other)
        return f"{one.relative_to(run)} renamed to {other.relative_to(run)}"
    elif how == "link":
        one.rename(run.parent / "linked")
        one.symlink_to(run.parent / "linked")
    else:
        return change_number(run, rng)
    return f"{one.relative_to(run)}: {how}"


def change_number(run: Path, rng: random.Random) -> str:
    """Change a number in a JSON file; a manifest gets the checksum that it then must have."""
    files = [path for path in files_of(run) if path.suffix in (".json", ".jsonl")]
    path = rng.choice([*files, *[run / "metrics.jsonl"] * len(files)])
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    content = json.loads(lines[number])
    places = [*numbers_in(content)]
    if not places:
        return f"{path.name}: no number"
    keys = rng.choice(places)
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    was = inner[keys[-1]]
    inner[keys[-1]] = was + 1 if isinstance(was, int) else was * 1.01 + 1e-9
    if "checksum" in content:
        content["checksum"] = _digest({key: value for key, value in content.items() if key != "checksum"})
    lines[number] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")
    return f"{path.relative_to(run)}, line {number + 1}: {keys} {was} → {inner[keys[-1]]}"


def numbers_in(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield keys
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, own in inner:
        yield from numbers_in(own, (*keys, key))


def numbers_and_models(run: Path) -> dict[str, Any]:
    """The rows, without what was measured, and the bytes of all other results that are numbers or models.

    A column that is null claims nothing, whatever its name.
    """
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    claimed = [{k: v for k, v in row.items() if k not in VARYING_COLUMNS and v is not None} for row in rows]
    found: dict[str, Any] = {"rows": claimed}
    for name in contents_of(run).results:
        if name.endswith((".safetensors", ".csv", ".bin")):
            found[name] = (run / name).read_bytes()
    return found


def states(run: Path) -> dict[str, Any]:
    """The kept states: their tensors, and the numbers of their manifests."""
    found: dict[str, Any] = {}
    for name in contents_of(run).results:
        if name.startswith("checkpoints/") and (run / name).with_suffix(".json").exists():  # else it is no state
            content = (run / name).read_bytes()
            found[name] = content
            if name.endswith(".json"):
                kept = json.loads(content)
                found[name] = {key: value for key, value in kept.items() if key not in UNIMPORTANT}
                found[name] |= {key: kept["progress"][key] for key in ("totals", "magnitudes")}
    return found


def is_true(run: Path, original: Path) -> bool:
    """Whether the numbers and models of a folder are those that its recipe gives, and its states those of the run.

    A table that was removed claims nothing.
    """
    if (run / "recipe.yaml").read_bytes() == (original / "recipe.yaml").read_bytes():
        wanted = numbers_and_models(original)
    else:
        again = hpcfed.run(run / "recipe.yaml", [f"output={run.parent / 'again'}"], quiet=True).folder
        wanted = numbers_and_models(again)
        shutil.rmtree(again)
    true_states = states(original)
    found = {**numbers_and_models(run), **states(run)}
    return all((wanted | true_states).get(name) == own for name, own in found.items())


@pytest.mark.parametrize("number", often(range(USUAL), range(TAMPERINGS)))
def test_no_tampering_passes_for_what_the_recipe_gives(number, folder, tmp_path):
    rng = random.Random(SEED * 1000 + number)
    original = folder / rng.choice(list(RUNS))
    run = Path(shutil.copytree(original, tmp_path / "run"))
    results = {name: (run / name).read_bytes() for name in (*contents_of(run).results, "certificate.json")}
    how = f"HPCFED_TAMPERING={SEED}, {original.name}: {tamper(run, rng)}"
    now = contents_of(run).results
    is_as_signed = sorted([*now, "certificate.json"]) == sorted(results) and all(
        (run / name).is_file() and (run / name).read_bytes() == content for name, content in results.items()
    )
    for rounds in (None, 3):
        code, said = verified(run, rounds, number, folder / "signers")
        assert (code == 0) <= is_as_signed, f"{how}\n{said}"
    (run / "certificate.json").unlink(missing_ok=True)
    (run / "certificate.json.sig").unlink(missing_ok=True)
    with suppress(HpcfedError, OSError):
        write_certificate(RunFolder(run), load_recipe(run / "recipe.yaml"), None)
    code, said = verified(run, None, number, None)
    assert code in (0, 1, 2, 5), f"{how}\n{said}"
    if code == 0:
        assert is_true(run, original), f"{how}\n{said}"
    else:
        assert not (is_as_signed and all(is_result(name) for name in now)), f"{how}\n{said}"
    assert verified(run, 3, number, None)[0] in (0, 1, 2, 5), how


@pytest.mark.soak
def test_one_wrong_round_is_missed_no_more_often_than_the_verdict_says(folder, tmp_path):
    """The loss of a round's training is in no state that is kept: the draw alone finds it."""
    missed, tries = 0, 4 * ROUNDS
    for number in range(tries):
        run = Path(shutil.copytree(folder / "scaffold", tmp_path / f"run-{number}"))
        lines = (run / "metrics.jsonl").read_text().splitlines()
        row = json.loads(lines[number % ROUNDS])
        lines[number % ROUNDS] = json.dumps(row | {"local_loss": row["local_loss"] * 1.5})
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        for name in ("certificate.json", "certificate.json.sig"):
            (run / name).unlink()
        code, said = verified(run, 2, SEED + number, None)
        assert "a probability of 0.75 at most" in said or code == 1
        missed += code == 0
        shutil.rmtree(run)
    expected = tries * 0.75
    assert missed <= expected + 3 * (expected * 0.25) ** 0.5, f"HPCFED_TAMPERING={SEED}"
