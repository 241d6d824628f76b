"""The example notebook runs from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.launch import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.mark.deadline(240)
def test_the_notebook_runs(environment, tmp_path, monkeypatch):
    missing = [name for name in ("nbclient", "ipykernel") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (pip install -e '.[test]')")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # nobody's history or settings
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    said = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert len(pictures) == 1
    measured, recorded = map(float, re.search(r"(\S+) of the test set, (\S+) in the record", said).groups())
    assert measured == recorded > 0.8
    assert "jhunjhunwala2023fedexp" in said
    assert "bit for bit" in said
