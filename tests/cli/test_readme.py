"""The README's files exist and its quoted code is the source; docs/recipe.md has all keys and methods."""

from __future__ import annotations

import os
import re
import subprocess
from runpy import run_path

import pytest

from hpcfed.config.recipe import Recipe
from tests.launch import ROOT

pytestmark = pytest.mark.one_mpi
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_recipe_page_names_every_key():
    table = RECIPES.split("## Every key")[1].split("\n## ")[0]
    told = set(re.findall(r"^\| `(\w+)", table, flags=re.MULTILINE))
    of_the_record = {"data_content", "python_path"}  # keys that a resolved recipe adds
    assert told == set(Recipe.model_fields) - of_the_record


def test_the_table_of_methods_is_that_of_their_files():
    assert run_path(str(ROOT / ".ci" / "generate.py"))["recipe_page"](RECIPES) == RECIPES, "make generated"


def test_every_command_is_found_and_everything_named_can_be_installed():
    assert README.index("source .venv/bin/activate") < README.index("```bash\nhpcfed")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    make = ["make", "-n", "demo", "VENV=.venv"]
    demo = subprocess.run(make, cwd=ROOT, env=kept, capture_output=True, text=True, check=True).stdout
    assert "source .venv/bin/activate" in demo.splitlines()[-1]
    pages = [ROOT / "README.md", *(ROOT / "docs").iterdir(), *(ROOT / "hpcfed").rglob("*.py")]
    assert not [page for page in pages if re.search(r"pip install '?hpcfed", page.read_text(encoding="utf-8"))]


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
