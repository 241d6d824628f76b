"""The page on one's own data and method does what it says: its files are written and its commands run, in its order."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcfed.data.federation import Federation
from tests.launch import ROOT, launcher

PAGE = (ROOT / "docs" / "own-project.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:`(?P<name>[\w.]+)`:\n\n)?^```(?P<language>bash|python|yaml)\n(?P<text>.*?)^```$", re.M | re.S)


def follow(folder: Path, variables: dict[str, str]) -> None:
    """Write each named block to its file, run each of bash's."""
    oversubscribe = " ".join(launcher(sys.executable).command[1:])  # a flag that Open MPI needs on small machines
    for block in BLOCK.finditer(PAGE):
        if block["language"] != "bash":
            assert block["name"], f"no file's name before:\n{block['text']}"
            (folder / block["name"]).write_text(block["text"], encoding="utf-8")
            continue
        script = block["text"].replace("mpirun", f"mpirun {oversubscribe}")
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


@pytest.mark.deadline(240)
def test_the_page_leads_from_tables_to_a_figure(environment: dict[str, str], tmp_path: Path) -> None:
    follow(tmp_path, environment)
    for name in ("hospitals.png", "comparison/report.html"):
        assert (tmp_path / name).stat().st_size > 0
    assert list((tmp_path / "comparison" / "figures").iterdir())
    check_federations(tmp_path)
    fedavg, bounded = (check_run(tmp_path / "runs" / name) for name in ("fedavg", "bounded"))
    assert {row["server_lr"] for row in fedavg} == {1}
    assert all(row["delta_sq"] ** 0.5 * row["server_lr"] < 0.3001 for row in bounded)
    assert min(row["server_lr"] for row in bounded) < 1
    check_baselines(tmp_path)


def check_baselines(project: Path) -> None:
    """Each takes the gradient steps that the page says; metrics are there by hospital."""
    for name in ("pooled", "alone", "cyclic"):
        rows = [json.loads(line) for line in (project / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["gradients"] == 15 * 20, name
        assert rows[-1]["test_accuracy"] > 0.6
    clients = (project / "runs" / "metrics" / "clients.csv").read_text().splitlines()
    assert clients[0].endswith("n,name,auroc,balanced-accuracy")
    assert "hospital-11" in clients[-1]
    assert "hospital-03" in (project / "baselines" / "report.html").read_text()


def check_federations(project: Path) -> None:
    """The one from files and the one from Python hold the same."""
    with Federation.open(project / "hospitals.h5") as files, Federation.open(project / "again.h5") as python:
        assert files.content == python.content
        assert files.client_names() == python.client_names() == [f"hospital-{k:02}" for k in range(12)]
        assert files.source["classes"] == ["ill", "well"]
        assert (files.num_test, files.num_classes) == (400, 2)


def check_run(run: Path) -> list[dict]:
    """Return the rounds of a run that has learnt something."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 15
    assert rows[-1]["test_loss"] < rows[0]["test_loss"]
    assert rows[-1]["test_accuracy"] > 0.85
    return rows


def test_the_pages_loss_is_0_of_a_certain_and_right_output() -> None:
    (text,) = (block["text"] for block in BLOCK.finditer(PAGE) if block["name"] == "losses.py")
    found: dict[str, Any] = {}
    exec(text, found)
    target = torch.arange(2 * 4 * 4).view(2, 4, 4) % 3
    output = 50.0 * torch.nn.functional.one_hot(target, 3).movedim(-1, 1)
    each = found["dice"]()
    assert each(output, target.float()).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert (each(-output, target) > 0.5).all()


def test_the_page_counts_right() -> None:
    assert f"# {5 * 16 + 16 + 16 * 2 + 2} parameters" in PAGE
