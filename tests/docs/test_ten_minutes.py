"""The commands of README.md and docs/tour.md run in order, and have the results that they state."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.test_readme import PAGES, README, blocks
from tests.launch import ROOT, launcher

TOUR = "docs/tour.md"


@pytest.mark.deadline(240)
def test_the_ten_minutes_work(environment, tmp_path):
    (tmp_path / "fedexp.yaml").write_text(blocks("yaml")[0])
    oversubscribe = " ".join(launcher(sys.executable).command[1:])  # a flag that Open MPI needs on small machines
    for block in (*blocks("bash"), *blocks("bash", TOUR)):
        script = block.replace("mpirun", f"mpirun {oversubscribe}")
        done = subprocess.run(
            ["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    for name in ("clients.png", "runs/fedexp/model.safetensors", "comparison/report.html"):
        assert (tmp_path / name).stat().st_size > 0
    (block,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    inline = re.findall(r"`(hpcfed (?:replay|export) [^`]*)`", PAGES[ROOT / TOUR])
    assert len(inline) == 2
    found = re.search(r"`(hpcfed\.replay\([^`]*\))`", PAGES[ROOT / TOUR])
    assert found is not None
    for command in (*inline, f"python -c 'import hpcfed; assert {found[1]}.agrees'"):
        ran = subprocess.run(
            ["bash", "-euc", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    ((accuracy, parameters),) = re.findall(r"^(0\.\d+) (\d+)$", done.stdout, flags=re.MULTILINE)
    assert {"FedAvg", "FedExP"} <= {line.split()[0] for line in done.stdout.splitlines() if line}
    assert float(accuracy) > 0.8
    assert f"{int(parameters):,} parameters" in README
