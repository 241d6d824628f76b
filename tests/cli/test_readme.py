"""What the README shows is what happens: its commands run, its names exist, what it quotes is in the code."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module

import pytest

from hpcfed.algorithms import names
from hpcfed.config.recipe import Recipe
from tests.launch import ROOT, launcher

pytestmark = pytest.mark.one_mpi
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.deadline(240)
def test_the_ten_minutes_work(environment, tmp_path):
    (tmp_path / "fedexp.yaml").write_text(blocks("yaml")[0])
    oversubscribe = " ".join(launcher(sys.executable).command[1:])  # a flag that Open MPI needs on small machines
    for block in blocks("bash"):
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
    accuracy, parameters = done.stdout.splitlines()[-1].split()
    assert float(accuracy) > 0.8
    assert f"{int(parameters):,} parameters" in README


def test_the_recipe_page_names_every_key():
    table = README.split("## The recipe")[1].split("\nThe methods and their keys")[0]
    told = set(re.findall(r"^\| `(\w+)", table, flags=re.MULTILINE))
    of_the_record = {"data_content", "python_path"}  # keys that a resolved recipe adds
    assert told == set(Recipe.model_fields) - of_the_record


def test_the_recipe_page_names_every_method_with_its_keys():
    table = README.split("\nThe methods and their keys")[1].split("\n## ")[0]
    told = set(re.findall(r"`([\w-]+)", table))
    for name in names():
        module = import_module(f"hpcfed.algorithms.{name.replace('-', '_')}")
        kinds = [getattr(module, role, None) for role in ("LOCAL", "NORMALIZE", "SERVER")]
        assert {name, *(key for kind in kinds if kind is not None for key in kind.model_fields)} <= told


def test_what_is_quoted_stands_in_the_code():
    (quoted,) = blocks("python-quoted")
    assert quoted in (ROOT / "hpcfed" / "algorithms" / "fedavgm.py").read_text(encoding="utf-8")


def test_the_files_it_names_exist():
    named = set(re.findall(r"`((?:hpcfed|jobs|tests|data_prep)/[\w./-]+)", README)) | set(
        re.findall(r"\]\(([\w./-]+)\)", README)
    )
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
