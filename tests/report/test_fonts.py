"""Names in figures whose characters matplotlib's own font lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

DRAW = """
import sys
from pathlib import Path
from matplotlib.figure import Figure
from hpcfed.io.figure import rendered

figure = Figure(figsize=(2, 1), layout="constrained")
figure.subplots().set_yticks([0], ["\\ue000"])
for kind in ("png", "pdf"):
    Path(f"names.{kind}").write_bytes(rendered(figure, kind))
"""
SAID = "pictures: no font here has \ue000: boxes in their place; install one (fonts-noto-cjk, …)"


@pytest.mark.every(2)
@pytest.mark.parametrize("has_font", [False, True])
def test_names_are_drawn_with_fonts_of_the_system(tmp_path: Path, has_font: bool) -> None:
    (tmp_path / "fonts").mkdir()
    if has_font:
        font = Path(matplotlib.get_data_path(), "fonts/ttf/STIXNonUni.ttf")  # which has private characters
        shutil.copy(font, tmp_path / "fonts")
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "PYTHONUTF8": "1"}
    drawn = subprocess.run(
        [sys.executable, "-c", DRAW], cwd=tmp_path, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert (drawn.returncode, drawn.stderr.count(SAID)) == (0, not has_font)
    assert (b"STIX" in (tmp_path / "names.pdf").read_bytes()) == has_font
    assert (tmp_path / "names.png").read_bytes().startswith(b"\x89PNG")
