"""The site of the documentation: built without a warning, all of it in the folder, found by its search."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcfed
from hpcfed import algorithms
from tests.launch import ROOT
from tests.report import browser
from tests.report.test_browser import OVERFLOW

SITE = ROOT / "build" / "docs"
REMOTE = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')


@pytest.fixture(scope="module")
def site() -> Path:
    command = [sys.executable, str(ROOT / ".ci" / "site" / "build.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"build/docs/index.html: \d+ pages in \d+ s\n", done.stdout)
    return SITE


@pytest.mark.deadline(1200)
def test_it_is_whole(site: Path) -> None:
    """Every page of the index, every method with formula, keys, picture and citation, every name of Python's."""
    pages = {str(page.relative_to(site)): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert {f"docs/{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= set(pages)
    assert not [name for name, page in pages.items() if REMOTE.search(page)]
    for name, title in algorithms.titles().items():
        page = html.unescape(pages[f"methods/{name}.html"].replace("<wbr>", ""))
        for part in (f"<h1>{title}<", "client i:", f"{name}.svg", "@", "LOCAL"):
            assert part in page, (name, part)
        for kind in filter(None, algorithms.parts_of(name)):
            assert all(f">{key}</span>" in page for key in kind.model_fields)
    reference = pages["reference/python.html"]
    assert not [name for name in hpcfed.__all__ if name != "__version__" and f'id="hpcfed.{name}"' not in reference]


SEARCHES = {
    "epsilon": "docs/recipe.html#the-methods-and-their-keys",
    "top-k": "docs/updates.html",
    "resume": "docs/recipe.html#resuming-a-run-and-starting-it-again",
    "client column": "docs/own-project.html#your-data",
    "learning rate decay": "docs/recipe.html#every-key-with-its-default",
    "secure aggregation": "docs/updates.html#secure-aggregation",
    "scaffold": "methods/scaffold.html",
}
"""A reader's words, and a section among the first three that are found."""
FOUND = "[...document.querySelectorAll('.results a')].map(e => e.getAttribute('href'))"


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
@pytest.mark.deadline(1200)
def test_readers_find_what_they_search_on_any_screen(site: Path) -> None:
    with browser.started() as chromium:
        for words, section in SEARCHES.items():
            events = chromium.open(site / "search.html", query=words, width=390, dark=True)
            assert section in chromium.value(FOUND)[:3], words
            assert not [event for event in events if event["method"] != "Network.requestWillBeSent"]
        for width, dark in ((390, False), (1400, True)):
            for page in ("README", "docs/recipe", "docs/who-sees-what", "methods/fedexp", "reference/python"):
                chromium.open(site / f"{page}.html", width=width, dark=dark)
                assert chromium.value("document.documentElement.scrollWidth") == width
                beside = "aside, .sidebar-drawer, .table-wrapper"  # a phone's drawers are out of sight
                assert chromium.value(OVERFLOW.replace(".scroll", f".scroll, {beside}")) == []
