"""What the pages name exists: files, links, commands, quoted code; docs/recipe.md has all keys and methods."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from runpy import run_path

import pytest

import hpcfed
from hpcfed.config.recipe import Recipe
from tests.launch import ROOT

pytestmark = pytest.mark.one_mpi
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
PAGES = {
    page: page.read_text(encoding="utf-8") for page in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))
}


def blocks(language: str, page: str = "README.md") -> list[str]:
    """A page's fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[ROOT / page], flags=re.MULTILINE | re.DOTALL)


def test_the_recipe_page_names_every_key():
    table = RECIPES.split("## Every key")[1].split("\n## ")[0]
    told = set(re.findall(r"^\| `(\w+)", table.split("## The models")[0], flags=re.MULTILINE))
    of_the_record = {"data_content", "python_path", "secret_commitment"}  # keys that a resolved recipe adds
    assert told == set(Recipe.model_fields) - of_the_record


def test_its_tables_are_those_of_the_code():
    assert run_path(str(ROOT / ".ci" / "generate.py"))["recipe_page"](RECIPES) == RECIPES, "make generated"


def test_every_command_is_found_and_everything_named_can_be_installed():
    assert README.index("source .venv/bin/activate") < README.index("```bash\nhpcfed")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    make = ["make", "-n", "demo", "VENV=.venv"]
    demo = subprocess.run(make, cwd=ROOT, env=kept, capture_output=True, text=True, check=True).stdout
    assert "source .venv/bin/activate" in demo.splitlines()[-1]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.*"), *(ROOT / "hpcfed").rglob("*.py")]
    assert not [page for page in pages if re.search(r"pip install '?hpcfed", page.read_text(encoding="utf-8"))]


def test_what_is_quoted_stands_in_the_code():
    (quoted,) = blocks("python-quoted", "docs/methods.md")
    assert quoted in (ROOT / "hpcfed" / "algorithms" / "fedavgm.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_it_names_exist(page):
    text = PAGES[page]
    named = re.findall(r"`((?:hpcfed|jobs|tests|data_prep)/[\w./-]+)`", text)
    assert not [name for name in named if not (ROOT / name).exists() and "PAPER" not in name]
    missing = []
    for place, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", text):
        target = page.parent / place if place else page
        if not target.exists() or (anchor and anchor[1:] not in anchors(target)):
            missing.append(place + anchor)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_a_table_have_the_cells_of_its_head(page):
    """GitHub drops what is beyond: a `|` in a cell is written with a backslash."""
    text = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert set(cells) == {cells[0]}, table.splitlines()[0]


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings in links, as GitHub makes them."""
    without_code = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", without_code, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_has_every_page():
    linked = re.findall(r"\]\(([\w.-]+)\)", PAGES[ROOT / "docs" / "index.md"])
    pages = {page.name for kind in ("*.md", "*.ipynb") for page in (ROOT / "docs").glob(kind)}
    assert sorted(linked) == sorted(pages - {"index.md"})


def test_the_page_of_the_api_has_every_name():
    named = re.findall(r"^### `hpcfed\.(\w+)", PAGES[ROOT / "docs" / "api.md"], flags=re.MULTILINE)
    assert sorted(named) == sorted(set(hpcfed.__all__) - {"__version__"})


def test_the_readme_is_read_in_minutes():
    assert len(README.encode()) <= 8192
