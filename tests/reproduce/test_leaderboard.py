"""The leaderboard: records of finished runs, kept without models, and the page that is made from them alone."""

from __future__ import annotations

import json
import shutil
from operator import itemgetter
from pathlib import Path
from runpy import run_path
from statistics import mean, stdev

import pytest

import hpcfed
from hpcfed.config.load import dump_yaml
from hpcfed.errors import InputError
from hpcfed.io.text import parse_yaml
from hpcfed.run_folder.certificate import BASIS, CertifiedRounds, sha256_of
from hpcfed.run_folder.files import CERTIFICATE, RECIPE, read_mapping, read_recipe
from hpcfed.run_folder.rounds import RECORD, iterate_rounds
from jobs.bench.leaderboard import RECORDS, keep, page
from tests.launch import ROOT
from tests.mpi.recipes import write_small
from tests.reproduce.test_command import OWN

pytestmark = pytest.mark.one_mpi
KEPT = "niid-fcube/corners.fedavg.0"


@pytest.mark.serial
def test_the_page_is_that_of_the_records():
    text = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    assert run_path(str(ROOT / ".ci" / "generate.py"))["leaderboard_page"]() == text, "make generated"


@pytest.mark.serial
def test_the_page_of_the_protocol_has_the_numbers_of_the_records():
    text = (ROOT / "docs" / "reproduction-niid.md").read_text(encoding="utf-8")

    def seeds(runs: str) -> list[list[float]]:
        return [
            [100 * row["test_accuracy"] for row in iterate_rounds(run / RECORD)] for run in sorted(RECORDS.glob(runs))
        ]

    def spread(numbers: list[float], digits: int) -> str:
        return f"{mean(numbers):.{digits}f} ± {stdev(numbers):.{digits}f}"

    for title in ("FedAvg", "FedProx", "SCAFFOLD", "FedNova"):
        cases = [seeds(f"niid-fcube/{case}.{title.lower()}.?") for case in ("corners", "iid")]
        cells = [spread([of(run) for run in runs], 2) for runs in cases for of in (max, itemgetter(-1))]
        assert f"| {' | '.join([title, *cells])} |" in text
    runs = seeds("niid-mnist/c1.fedavg.?")
    best, last = [max(run) for run in runs], [run[-1] for run in runs]
    bests = ", ".join(f"{score:.1f}" for score in best)
    assert f"| hpcfed | {bests} % | {spread(best, 1)} % | {spread(last, 1)} % |" in text
    first = [next(round for round, score in enumerate(run, 1) if score > 20) for run in runs]
    assert "above 20 % for the first time in rounds {}, {} and {};".format(*first) in text


@pytest.mark.serial
def test_records_have_no_path_of_a_machine():
    for file in RECORDS.rglob("*.*"):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            assert not [words for words in ('"/', ": /", "- /") if words in text], file


def test_finished_runs_are_kept_and_verified(command, tmp_path):
    write_small(tmp_path)
    (tmp_path / "own.yaml").write_text(OWN)
    run = ["reproduce", str(tmp_path / "own.yaml"), "--seeds", "1"]
    assert command([*run, "--method", "fedavg"], tmp_path).returncode == 0
    assert command([*run, "--method", "fedexp", "--rounds", "1"], tmp_path).returncode == 0
    said = list(keep(tmp_path / "runs" / "reproduce", str(tmp_path / "own.yaml"), tmp_path / "records"))
    assert [line.partition(" bytes")[0].partition(":")[0] for line in said] == ["ours.fedavg.0", "ours.fedexp.0"]
    assert said[1] == "ours.fedexp.0: finished, 1 of 3 rounds: not kept"
    (kept,) = (tmp_path / "records" / "own").iterdir()
    with pytest.raises(InputError, match="a record without models; train it again"):
        _ = hpcfed.load(kept).module
    with pytest.raises(InputError, match="no case 'our'; did you mean 'ours'"):
        list(keep(tmp_path / "runs" / "reproduce", str(tmp_path / "own.yaml"), tmp_path / "records", ["our"]))
    assert sorted(file.name for file in kept.iterdir()) == [
        *("certificate.json", "environment.json", "metrics.jsonl", "recipe.yaml", "result.json")
    ]
    certificate = kept / "certificate.json"
    before = certificate.read_bytes()
    again = ["reproduce", str(tmp_path / "own.yaml"), "--output", "again", "--method", "fedavg", "--seeds", "1"]
    assert command(again, tmp_path).returncode == 0
    list(keep(tmp_path / "again", str(tmp_path / "own.yaml"), tmp_path / "records"))
    assert certificate.read_bytes() == before  # the same run, trained at another time
    certificate.write_text(certificate.read_text().replace('"chain": "', '"chain": "0'))
    with pytest.raises(InputError, match="the record of another run"):
        list(keep(tmp_path / "again", str(tmp_path / "own.yaml"), tmp_path / "records"))
    certificate.write_bytes(before)
    done = command(["verify", str(kept), "--all", "--data", "small.h5"], tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "verified: all 3 rounds, bit for bit, on 1 rank")


CHANGES = {
    "a score": ("metrics.jsonl", '"test_accuracy":0.9', '"test_accuracy":0.99', "metrics.jsonl: is not the file"),
    "a key": ("recipe.yaml", "momentum: 0.9", "momentum: 0.8", "recipe.yaml: is not the file"),
}


@pytest.mark.serial
@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_record_has_no_page(case, tmp_path):
    name, old, new, words = CHANGES[case]
    shutil.copytree(RECORDS / KEPT, tmp_path / KEPT)
    file = tmp_path / KEPT / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=words):
        page(tmp_path)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("fedavg", "fedprox", r"algorithm\.name 'fedavg', not 'fedprox'"),
        ("corners", "iid", r"data fcube-0-\w+\.h5, not fcube-iid-4-0"),
    ],
)
def test_a_record_in_the_place_of_another_has_no_page(old, new, words, tmp_path):
    shutil.copytree(RECORDS / KEPT, tmp_path / KEPT.replace(old, new))
    with pytest.raises(InputError, match=words):
        page(tmp_path)


FORGED = {
    "a schedule": ("recipe.yaml", ("cohort", "schedule"), [[0]], "not JSON|cohort.schedule|cohort"),
    "a step size": ("recipe.yaml", ("algorithm", "server_lr"), 0.5, r"algorithm\.server_lr 0\.5, not 1\.0"),
    "a clip": ("recipe.yaml", ("local", "clip_norm"), 1.0, r"local\.clip_norm 1\.0, not None"),
    "a model without bias": ("recipe.yaml", ("model", "bias"), False, r"model\.bias False, not True"),
    "a stop": ("recipe.yaml", ("stop", "test_accuracy"), 0.9, r"stop\.test_accuracy 0\.9, not None"),
    "no data": ("recipe.yaml", ("data",), False, "data"),
    "no packages": ("environment.json", ("packages",), {}, "in plain text"),
    "no ranks": ("environment.json", ("per_rank",), [], "in plain text"),
    "a number of ranks": ("environment.json", ("per_rank",), 1, "per_rank: expected a list of objects"),
    "markup": ("environment.json", ("cpu",), "a | <b>", "in plain text"),
    "no last score": ("metrics.jsonl", ("test_accuracy",), None, "no score of the last round"),
    "no digest": ("certificate.json", ("not_kept",), {}, r"no SHA-256 of model\.safetensors"),
    "half a digest": ("certificate.json", ("not_kept", "model.safetensors"), "5b", "has no SHA-256 of it"),
    "a digest of nothing": ("certificate.json", ("not_kept", "model-evaluated.safetensors"), None, "has no SHA-256"),
}


@pytest.mark.serial
@pytest.mark.parametrize("case", FORGED)
def test_a_forged_record_with_its_certificate_has_no_page(case, tmp_path):
    """The forger writes the certificate anew."""
    name, (*sections, key), value, words = FORGED[case]
    run = Path(shutil.copytree(RECORDS / KEPT, tmp_path / KEPT))
    *before, last = (run / name).read_text().splitlines(keepends=True) if name == RECORD else [(run / name).read_text()]
    content = parse_yaml(last)
    place = content
    for section in sections:
        place = place[section]
    place[key] = value
    (run / name).write_text("".join([*before, dump_yaml(content) if name == RECIPE else json.dumps(content) + "\n"]))
    if name != CERTIFICATE:
        certify_anew(run)
    with pytest.raises(InputError, match=words):
        page(tmp_path)


@pytest.mark.serial
@pytest.mark.parametrize("content", ["sha256:" + "0" * 64, None])
def test_methods_of_a_case_have_the_same_data(tmp_path, content):
    """Files of one name have another content where another version of hpcfed wrote them."""
    other = Path(
        shutil.copytree(RECORDS / KEPT.replace("fedavg", "scaffold"), tmp_path / "niid-fcube/corners.scaffold.0")
    )
    shutil.copytree(RECORDS / KEPT, tmp_path / KEPT)
    assert page(tmp_path)
    recipe = read_recipe(other)
    (other / RECIPE).write_text(dump_yaml({**recipe, "data_content": content}))
    certify_anew(other)
    expected = rf"0: data: expected the content of corners\.fedavg\.0's, {recipe['data_content']}, got {content}; "
    with pytest.raises(InputError, match=expected):
        page(tmp_path)


def certify_anew(run: Path) -> None:
    certificate, recipe = read_mapping(run / CERTIFICATE), read_recipe(run)
    certificate |= {
        "recipe": recipe,
        "data": recipe.get("data_content"),
        "environment": read_mapping(run / "environment.json"),
    }
    rounds = CertifiedRounds({key: certificate[key] for key in BASIS if key in certificate})
    for row in iterate_rounds(run / RECORD):
        rounds.add(row)
    certificate |= {"rounds": rounds.entries, "chain": rounds.chain}
    certificate["files"] = {file: sha256_of(run / file) for file in certificate["files"]}
    (run / CERTIFICATE).write_text(json.dumps(certificate))


@pytest.mark.serial
def test_a_row_is_best_last_and_where_to_look(tmp_path):
    shutil.copytree(RECORDS / KEPT, tmp_path / KEPT)
    rows = [json.loads(line) for line in (tmp_path / KEPT / "metrics.jsonl").read_text().splitlines()]
    scores = [row["test_accuracy"] for row in rows]
    (row,) = (line for line in page(tmp_path).splitlines() if line.startswith("| [`corners.fedavg.0`]"))
    best, round = max(scores), scores.index(max(scores)) + 1
    assert f"| {100 * best:.2f} % | {round} | {100 * scores[-1]:.2f} % |" in row
    assert json.loads((tmp_path / KEPT / "certificate.json").read_text())["chain"][:16] in row
