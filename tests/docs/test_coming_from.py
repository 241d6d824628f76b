"""The page on other programs: a plain loop in PyTorch has the numbers of its run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.launch import ROOT


def test_a_plain_loop_has_the_run_s_numbers(environment: dict[str, str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    found = re.search(r"^```python-loop\n(.*?)^```$", page, re.M | re.S)
    assert found is not None
    (tmp_path / "loop.py").write_text(found[1])
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout.splitlines()[-1]) < 1e-6
