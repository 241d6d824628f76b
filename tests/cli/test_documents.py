"""``--json``: one document on standard output, as its schema says, with the exit code of the command without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from hpcfed.cli.documents import commands, schema_of
from hpcfed.cli.main import main
from tests.cli.test_output import full, unread
from tests.launch import ROOT, Completed, launch
from tests.mpi.recipes import write_recipe
from tests.study.conftest import write_sites

pytestmark = pytest.mark.one_mpi


@pytest.fixture
def document(command: Callable[..., Completed]) -> Callable[..., dict[str, Any]]:
    """Call a command with ``--json``; return its document, once the schema and the exit code have been checked."""

    def call(arguments: list[object], folder: Path, code: int = 0) -> dict[str, Any]:
        done = command([*arguments, "--json"], folder)
        assert done.returncode == code, done.stderr
        found = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        Draft202012Validator(schema_of(str(arguments[0]))).validate(found)
        return found

    return call


@pytest.mark.usefixtures("blank_pictures")
def test_a_federation_and_its_runs(folder, document, command):
    raw = folder / "raw"
    raw.mkdir()
    rows = [f"{k % 7},{k % 3 or ''},{'yes' if k % 4 else 'no'}" for k in range(40)]
    for site, part in (("Łódź", rows), ("rural", rows[:9])):
        (raw / f"{site}.csv").write_text("\n".join(["age,dose,outcome", *part, ""]), encoding="utf-8")
    own = ["prepare", "own", "--raw", "raw", "-o", "own.h5", "--missing", "mean", "--test-fraction", "0.2"]
    written = document(own, folder)
    shown = document(["inspect", "own.h5", "--verify"], folder)
    assert written["federation"] == shown["federation"]
    assert written["bytes"] == (folder / "own.h5").stat().st_size
    assert any("dose" in remark or "missing" in remark for remark in written["remarks"])
    assert {client["name"] for client in shown["clients"]} == {"Łódź", "rural"}
    assert sum(sum(client["labels"]) for client in shown["clients"]) == shown["federation"]["num_samples"]
    assert (shown["verified"], [*shown["missing"]]) == (True, ["dose"])
    assert document(["inspect", "small.h5"], folder)["verified"] is None

    for name, change in (("one", []), ("two", []), ("other", ["local.lr=0.2"])):
        assert command(["run", "recipe.yaml", f"output={name}", *change], folder).returncode == 0
    verified = document(["verify", "one", "--rounds", "1", "--seed", "3"], folder)
    assert (verified["verdict"], verified["seed"], verified["rounds"]) == ("verified", 3, 3)
    assert verified["bitwise"]
    assert set(verified["drawn"]) <= set(verified["computed"]) <= {1, 2, 3}
    assert verified["lines"] == command(["verify", "one", "--rounds", "1", "--seed", "3"], folder).stdout.splitlines()
    record = folder / "two" / "metrics.jsonl"
    whole = record.read_text()
    record.write_text(whole.replace('"round": 2', '"round": 2, "test_loss": 9.0', 1).replace('"round":2', '"round":20'))
    wrong = document(["verify", "two"], folder, code=1)
    assert (wrong["verdict"], wrong["computed"]) == ("differs", [])
    assert "metrics.jsonl" in {fault["place"] for fault in wrong["faults"]}
    record.write_text(whole)

    same = document(["compare", "one", "two"], folder)
    assert (same["parts_in"], same["columns"], same["rounds"]) == (None, [], [3, 3])
    parted = document(["compare", "one", "other"], folder, code=1)
    assert (parted["parts_in"], parted["exit_code"]) == (1, 1)
    assert "hash" in {one["column"] for one in parted["columns"]}
    assert any("local.lr" in line for line in parted["recipe"])
    assert parted["clients"]
    assert parted["reason"] == parted["lines"][-1]

    page = document(["report", "one", "other", "--page-only", "-o", "page", "--target", "0.01"], folder)
    assert (folder / page["page"]).is_file()
    assert page["figures"] is None
    assert [len(method["runs"]) for method in page["methods"]] == [1, 1]
    assert all(0 <= method["final"]["mean"] <= 1 for method in page["methods"])
    assert [cost["rounds"]["mean"] for cost in page["costs"]] == [1, 1]
    assert [one["seeds"] for one in page["differences"]] == [["0"]]


@pytest.mark.usefixtures("blank_pictures")
def test_a_sweep_of_which_a_run_diverges(folder, document, command):
    """Numbers that are not finite are null; the exit code is the sweep's; a stream that fails does not lose runs."""
    sweep = ["sweep", "recipe.yaml", "-g", "local.lr=0.1,1e15", "rounds=2", "--output", "swept"]
    found = document(sweep, folder)
    assert [run["status"] for run in found["runs"]] == ["finished", "diverged"]
    assert [run["score"] is None for run in found["runs"]] == [False, True]
    assert [one["rank"] for one in found["configurations"]] == [1, None]
    assert found["configurations"][0]["values"] == {"local.lr": 0.1}
    assert r"0.1 &" in (folder / "swept" / "summary.tex").read_text(encoding="utf-8")
    done = command([*sweep, "--json", "--array", "2", "--time", "1:00:00"], folder)
    assert done.returncode == 2
    assert "--json with --array" in error_in(done)["message"]


def test_what_code_of_the_users_prints_is_not_in_the_document(folder, document):
    (folder / "mine.py").write_text(
        "import torch\nprint('read')\ndef net():\n    print('called')\n    return torch.nn.Linear(12, 4)\n"
    )
    write_recipe(folder, model={"factory": "mine:net"})
    found = document(["sweep", "recipe.yaml", "-g", "local.lr=0.1", "rounds=1", "--output", "swept"], folder)
    assert found["runs"][0]["status"] == "finished"


@pytest.mark.usefixtures("blank_pictures")
def test_a_study(folder, document):
    write_sites(folder / "sites.h5")
    write_recipe(folder, data="sites.h5", rounds=2)
    study = ["study", "recipe.yaml", "--methods", "fedavg,fedexp", "--splits", "2", "--baselines", "none"]
    found = document([*study, "--bootstrap", "100", "--output", "studied"], folder)
    assert (found["complete"], found["stopped"], found["sites"]) == (True, False, ["north", "south", "west"])
    assert {one["site"] for one in found["values"]} >= {"north", "Mean of sites"}
    assert len({one["method"] for one in found["intervals"]}) == 2
    page = Path(found["page"]).read_text(encoding="utf-8")
    assert "--json" not in page


@pytest.mark.parametrize(("stream", "code"), [(full, 4), (unread, 0)])
def test_a_document_that_cannot_be_printed_is_missed_unless_its_reader_has_left(
    stream, code, folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdout", stream())
    sweep = ["sweep", "recipe.yaml", "-g", "local.lr=0.1", "rounds=1", "--output", "swept", "--json", "--quiet"]
    with pytest.raises(SystemExit) as left:
        main(sweep)
    assert left.value.code == code
    said = "hpcfed: standard output: cannot be written: got No space left on device\n"
    assert capsys.readouterr().err == (said if code else "")
    assert (folder / "swept" / "summary.csv").is_file()


def error_in(done: Completed) -> dict[str, Any]:
    """Return the error of a document, which is its schema's, and of which standard error has the usual line."""
    found = json.loads(done.stdout)
    Draft202012Validator(schema_of("error")).validate(found)
    assert found["error"]["exit_code"] == done.returncode
    assert done.stderr.splitlines()[-1] == f"hpcfed: {found['error']['message']}"
    return found["error"]


WRONG: dict[str, list[str]] = {
    "inspect": ["gone.h5"],
    "prepare": ["own", "--raw", "gone", "-o", "own.h5"],
    "verify": ["gone"],
    "compare": ["gone", "gone"],
    "report": ["gone", "--page-onyl"],
    "sweep": ["recipe.yaml", "-g", "local.lt=0.1"],
    "study": ["recipe.yaml", "--splits", "two"],
    "estimate": ["gone.yaml"],
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_a_document_and_the_usual_line(name, folder, command):
    plain, done = command([name, *WRONG[name]], folder), command([name, *WRONG[name], "--json"], folder)
    assert plain.returncode == done.returncode == 2
    assert plain.stderr.splitlines()[-1] == f"hpcfed: {error_in(done)['message']}"


@pytest.mark.soak
def test_several_ranks_print_one_document(folder, command):
    assert command(["run", "recipe.yaml", "-q"], folder).returncode == 0
    done = launch(2, ["verify", "run", "--all", "--json"], cwd=folder)
    found = json.loads(done.stdout)
    Draft202012Validator(schema_of("verify")).validate(found)
    assert (done.returncode, found["ranks"], found["seed"], found["computed"]) == (0, 2, None, [1, 2, 3])
    assert error_in(launch(2, ["verify", "gone", "--json"], cwd=folder))["exit_code"] == 2


@pytest.mark.parametrize("name", commands())
def test_every_key_of_a_schema_is_described(name, command, tmp_path):
    printed = json.loads(command(["schema", "--of", name], tmp_path).stdout)
    Draft202012Validator.check_schema(printed)
    assert printed == schema_of(name)
    places = [printed, *printed.get("$defs", {}).values()]
    assert all(len(entry.get("description", "")) > 3 for place in places for entry in place["properties"].values())
    assert all({*place["properties"]} == {*place["required"]} for place in places), "every key is always there"


def test_the_page_has_all_keys():
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    assert run_path(str(ROOT / ".ci" / "generate.py"))["json_page"](page) == page, "make generated"
