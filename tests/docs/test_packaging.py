"""What `jobs/packaging/` asks for is what pyproject.toml does, and its files are of the formats that they claim."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest
from ruamel.yaml import YAML

from hpcfed.version import __version__
from tests.launch import ROOT

PACKAGING = ROOT / "jobs" / "packaging"
CONDA = {"matplotlib-base": "matplotlib", "pytorch": "torch", "python-xxhash": "xxhash"}
"""conda-forge's names → the Python package index's."""


def needed() -> dict[str, str]:
    """Return each dependency of the project and its lowest version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pairs = [re.match(r"([\w.-]+)>=([\d.]+)", line) for line in project["dependencies"]]
    return {pair[1].replace(".", "-"): pair[2] for pair in pairs if pair}


def test_spack_asks_for_what_the_project_does() -> None:
    text, beside = ((PACKAGING / "spack" / f"py_{name}" / "package.py").read_text() for name in ("hpcfed", "ijson"))
    assert [node.name for one in (text, beside) for node in ast.parse(one).body if isinstance(node, ast.ClassDef)] == [
        "PyHpcfed",
        "PyIjson",
    ]
    found = dict(re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):\d*", type=\("build", "run"\)\)', text))
    assert found == needed()


def test_conda_asks_for_what_the_project_does() -> None:
    recipe = YAML(typ="safe").load((PACKAGING / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    pairs = [re.match(r"([\w.-]+) >=([\d.]+)", line) for line in recipe["requirements"]["run"]]
    found = {CONDA.get(pair[1], pair[1].replace(".", "-")): pair[2] for pair in pairs if pair}
    assert found.pop("python") == "3.11"
    assert found == needed()
    assert recipe["context"]["version"] == __version__


@pytest.mark.parametrize("listed", ["%files", "filter"])
def test_what_is_copied_is_there(listed: str) -> None:
    if listed == "%files":
        text = (PACKAGING / "hpcfed.def").read_text(encoding="utf-8")
        block = text.split("%files")[1].split("%post")[0]
        named = [line.split()[0] for line in block.strip().splitlines()]
        assert all(name in text.split("%post")[1].split("%test")[0] for name in ("torch.txt", "mpich.txt"))
    else:
        recipe = YAML(typ="safe").load((PACKAGING / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
        named = [name.removesuffix("/**") for name in recipe["source"]["filter"]]
    assert not [name for name in named if not (ROOT / name).exists()]
    assert {"pyproject.toml", "hpcfed", "data_prep", "README.md", "LICENSE"} <= set(named)
