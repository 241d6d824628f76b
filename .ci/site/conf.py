"""Sphinx's settings for the site, and what turns the repository's Markdown and docstrings into its pages."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import searched
from docutils.nodes import document
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

from hpcfed.version import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
BESIDE = {
    "First meeting": ["docs/index"],
    "Methods": ["methods/index"],
    "Reference": ["reference/python", "reference/types", "reference/commands"],
    "Inside": sorted(f"jobs/bench/{page.stem}" for page in (ROOT / "jobs" / "bench").glob("*.md")),
}
"""Pages that docs/index.md does not link to, generated ones among them, by the section that they follow."""

project, version, release = "hpcfed", __version__, __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
include_patterns = ["*.md", "docs/*.md", "docs/*.ipynb", "jobs/bench/*.md", "methods/*.md", "reference/*.md"]
myst_heading_anchors = 6
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # a block with "…" is no fault
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"exclude-members": "model_config, model_post_init"}
python_maximum_signature_line_length = 80
html_theme = "furo"
pygments_style, pygments_dark_style = "a11y-light", "github-dark"
html_title = f"hpcfed {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_use_index = html_domain_indices = False  # the search finds names, too
html_copy_source = html_show_sourcelink = html_show_sphinx = html_show_copyright = False


class Notebook(MystParser):
    """Cells of a notebook as a page, code as blocks."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: document) -> None:
        parts = []
        for cell in json.loads(inputstring)["cells"]:
            text = "".join(cell["source"])
            language = "bash" if text.startswith("!") else "python"
            parts.append(text if cell["cell_type"] == "markdown" else f"```{language}\n{text}\n```")
        super().parse("\n\n".join(parts), document)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Give blocks the language that the tests' names (``python-grads``) begin with; README the site's contents."""
    source[0] = re.sub(r"^```(python|yaml)-\w+$", r"```\1", source[0], flags=re.MULTILINE)
    if name == root_doc:
        source[0] += contents((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))


def contents(index: str) -> str:
    """Return the tree of all pages: the sections of docs/index.md with the pages that each of them links to."""
    parts = re.split(r"^\*\*(.+)\*\*$", index, flags=re.MULTILINE)[1:]
    trees = []
    for caption, table in zip(parts[::2], parts[1::2], strict=True):
        links = re.findall(r"\]\(([\w./-]+)\.(?:md|ipynb)\)", table)
        named = [posixpath.normpath(posixpath.join("docs", link)) for link in links]
        lines = "\n".join([*named, *BESIDE.get(caption, ())])
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```")
    return "\n\n" + "\n\n".join(trees) + "\n"


def docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make reStructuredText of a docstring: indented formulas are literal, bars of |S| no substitutions."""
    found: list[str] = []
    formula = section = False
    for line in lines:
        if line and not line.startswith(" "):
            section, formula = bool(re.fullmatch(r"(Args|Returns|Yields|Raises|Attributes):", line)), False
        elif line and not section and not formula:
            formula = True
            found += ["::", ""]
        found.append(line if formula else re.sub(r"(`[^`]*`)|([|*])", _escaped, line))
    lines[:] = found


def _escaped(match: re.Match[str]) -> str:
    return match[1] or "\\" + match[2]


def breakable(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: document | None) -> None:
    """Let names in the text break behind dots, slashes and underscores, as the columns of a phone need it."""
    names, inside = r'(?<=<span class="pre">)[^<]+', r"(?<=\w)[._/:](?=\w)"
    if "body" in context:
        context["body"] = re.sub(names, lambda name: re.sub(inside, r"\g<0><wbr>", name[0]), context["body"])


def finish(app: Sphinx, failed: Exception | None) -> None:
    """Write what the search reads, in place of Sphinx's index."""
    if not failed:
        (Path(app.outdir) / "_static" / "sections.js").write_text(searched.script(app.env), encoding="utf-8")
        (Path(app.outdir) / "searchindex.js").unlink()


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("html-page-context", breakable)
    app.connect("build-finished", finish)
    app.add_source_parser(Notebook)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", docstring, priority=400)  # before napoleon, at 500
