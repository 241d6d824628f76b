"""``hpcfed scale`` through the queue, and the batch script that measures all in one allocation."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.launch import ROOT
from tests.slurm.conftest import Cluster

HPCFED = (sys.executable, "-m", "hpcfed")


def test_what_is_not_measured_is_submitted_and_the_rest_is_shown(cluster: Cluster, place: Path) -> None:
    asked = ("scale", "recipe.yaml", "--ranks", "1,4", "--rounds", "3", "--slurm", "--time", "3")
    asked = (*asked, "--notice", "10", "--ranks-per-node", "2", "--predict", "1024", "--output", "study")
    first = cluster.call(*HPCFED, *asked, cwd=place)
    assert first.returncode == 0, first.stderr
    assert "not measured yet: 1, 4 ranks" in first.stdout
    numbers = re.findall(r"submitted as job (\d+)", first.stdout)
    assert len(numbers) == 2
    for number in numbers:
        cluster.wait(number, JobState="COMPLETED")
    then = cluster.call(*HPCFED, *asked, cwd=place)
    assert then.returncode == 0, then.stderr
    assert "submitted" not in then.stdout
    # Three rounds on shared cores may be too noisy for a model: then it says so instead of predicting.
    assert "not verified on a network" in then.stdout or "nothing is predicted: " in then.stdout
    told = json.loads((place / "study" / "scaling.json").read_text())
    assert [row["ranks"] for row in told["rows"]] == [1, 4]


def test_the_batch_script_compares_the_bits_and_ends_with_the_table(cluster: Cluster, place: Path, pmi: str) -> None:
    program = place / "bin" / "hpcfed"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpcfed "$@"\n')
    program.chmod(0o755)
    script = (ROOT / "jobs" / "slurm" / "scaling.sbatch").read_text().replace("--mpi=pmi2", f"--mpi={pmi}")
    (place / "scaling.sbatch").write_text(script)
    size = ("--nodes=2", "--ntasks-per-node=1", f"--export=ALL,PATH={program.parent}:{cluster.env['PATH']}")
    number = cluster.submit(*size, "scaling.sbatch", "recipe.yaml", "study", cwd=place)
    cluster.wait(number, JobState="COMPLETED", timeout=180)
    assert (place / "study" / "scaling.png").exists()
    assert (place / "study" / "ranks-2" / "cohort-5" / "model.safetensors").exists()
