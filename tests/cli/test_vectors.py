"""The shipped vectors are what is computed here, and one file of NumPy computes them anew."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcfed.algorithms import names
from tests.launch import ROOT

pytestmark = pytest.mark.one_mpi

SHIPPED, CONFORMANCE = ROOT / "docs" / "vectors.json", ROOT / "jobs" / "bench" / "conformance"
KIT = CONFORMANCE / "check_vectors.py"


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return json.loads(SHIPPED.read_text())


def kit(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the file for strangers, isolated from hpcfed's folder and environment."""
    return subprocess.run([sys.executable, "-I", str(KIT), *map(str, arguments)], capture_output=True, text=True)


def test_a_stranger_with_numpy_alone_follows_every_trajectory(content, tmp_path):
    nodes = list(ast.walk(ast.parse(KIT.read_text())))
    modules = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert modules == {"argparse", "json", "sys", "pathlib", "numpy"}
    done = kit(SHIPPED)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(" agrees ") == len(content["methods"]) + len(content["cases"])
    mine = {"scaffold/all": content["cases"]["scaffold/all"]["w"], "fedavg/all": content["cases"]["scaffold/all"]["w"]}
    (tmp_path / "mine.json").write_text(json.dumps(mine))
    done = kit(SHIPPED, "--theirs", tmp_path / "mine.json")
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["scaffold/all", "agrees"],
        ["fedavg/all", "differs"],
    ]
    more = {"of-tomorrow": {**content["methods"]["fedavg"], "algorithm": {"name": "of-tomorrow"}}}
    (tmp_path / "more.json").write_text(json.dumps({**content, "methods": {**content["methods"], **more}}))
    done = kit(tmp_path / "more.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "check_vectors: no rule for 'of-tomorrow': write it in Method, and its name in RULES\n"
    for wrong in (["no-such-method"], ["--theirs", SHIPPED]):
        done = kit(SHIPPED, *wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_cases_differ_from_each_other(content):
    """A clip that never binds, or a parameter without effect, would test nothing."""
    models = [json.dumps([case["protocol"], case["w"]]) for case in content["cases"].values()]
    same = {name for name, own in zip(content["cases"], models, strict=True) if models.count(own) > 1}
    assert same == {"fedavg/momentum", "ditto/momentum", "fedavg/all", "fednova/all"}, (
        "Ditto's shared model is FedAvg's"
    )


def test_the_shipped_vectors_are_of_every_method_and_agree(content, tmp_path, command):
    assert list(content["methods"]) == list(names()), f"hpcfed vectors {SHIPPED.name} adds a method's"
    done = command(["vectors", SHIPPED, "--check"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("agrees") == len(names()) + len(content["cases"])
    content["methods"]["fedavg"]["rounds"][2]["w"]["bias"][1] += 1e-9
    content["methods"]["scaffold"]["rounds"][1]["cohort"].reverse()
    content["cases"]["fednova/momentum"]["w"][3]["weight"][0][0] += 1e-9
    few = {
        "methods": {name: content["methods"][name] for name in ("fedavg", "scaffold", "fedprox")},
        "cases": {name: content["cases"][name] for name in ("fednova/momentum", "scaffold/all")},
    }
    (tmp_path / "other.json").write_text(json.dumps({**content, **few}))
    done = command(["vectors", "other.json", "--check"], tmp_path)
    assert (done.returncode, done.stdout.count("agrees")) == (1, 2)
    differing = [line for line in done.stdout.splitlines() if "differs" in line]
    assert [line.partition(" (")[0] for line in differing] == [
        "fedavg: differs",
        "scaffold: differs",
        "fednova/momentum: differs",
    ]
    assert differing[0].endswith(", in round 3)")
    assert differing[1] == "scaffold: differs (inf, in round 2)"


VECTORS = '{"format": "hpcfed-vectors", "version": 1, '


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[1", '{"format": "hpcfed-vectors", "version": 2}'),
        *(VECTORS + own for own in ('"methods": ["fedavg"]}', '"methods": "fedavg"}', '"cases": 5}')),
    ],
)
def test_other_files_are_refused(text, tmp_path, command):
    Path(tmp_path / "other.json").write_text(text)
    done = command(["vectors", "other.json", "--check"], tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_the_page_of_packages_has_what_its_causes_compute(monkeypatch):
    """Each deviating row's numbers, anew, by the rule that is said to be its cause."""
    monkeypatch.syspath_prepend(str(CONFORMANCE))
    from causes import CAUSES
    from run import Reference, Row, deviations, numbers

    reference = Reference()
    page = (ROOT / "docs" / "conformance.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    shown = {
        (row[0].rpartition(" ")[0], row[1]): row for row in rows if len(row) == 6 and row[0] not in ("package", "---")
    }
    agree = {("NIID-Bench", "scaffold/all"), ("NIID-Bench", "scaffold/after-all")}
    assert shown.keys() == CAUSES.keys() - agree
    for key, (_, name, how, by_round, text, where) in shown.items():
        cause, case = CAUSES[key], name.partition(":")[0]
        assert (how == "transcribed", text, where) == (cause.version is not None, cause.text, cause.where)
        found = deviations(reference.by_rule(cause.rule, case), reference.models(case))
        again = numbers(Row("", "", name, how, found, None, None))
        assert [n for n in again.split() if float(n) > 1e-6] == [n for n in by_round.split() if float(n) > 1e-6], key
