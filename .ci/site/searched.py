"""What the site's search reads: the text of sections and rows of tables, as a script that pages from files may load."""

from __future__ import annotations

import json

from docutils.nodes import Element, Node, Text, row, section, thead, title
from sphinx.addnodes import desc, desc_signature, toctree
from sphinx.environment import BuildEnvironment

LATER = (
    *("CHANGELOG", "CONTRIBUTING", "jobs/", "docs/index", "docs/json", "docs/network", "docs/bits", "docs/papers"),
    *("docs/reproduction", "docs/vectors", "docs/conformance"),
)
"""Pages of records and lists: behind those that explain, as are sections of code and entries of names."""


def script(env: BuildEnvironment) -> str:
    """Return the script that `static/search.js` reads: [page, anchor, its title, the section's, text, behind] each."""
    rows: list[list[str | int]] = []
    for page in sorted(env.found_docs):
        tree = env.get_doctree(page)
        for anchor, heading, words in _sections(tree, "", env.titles[page].astext()):
            if text := " ".join("".join(words).split()):
                behind = page.startswith(LATER) or heading == "The file" or anchor.startswith("hpcfed.")
                rows.append([page, anchor, env.titles[page].astext(), heading, text, int(behind)])
    return f"const SECTIONS = {json.dumps(rows, ensure_ascii=False, separators=(',', ':'))};\n"


def _sections(node: Element, anchor: str, heading: str) -> list[tuple[str, str, list[str]]]:
    """Return (anchor, heading, words) of the text right below a node, of rows of tables, sections and names in it."""
    own: list[str] = []
    found = [(anchor, heading, own)]

    def walk(inner: Node) -> None:
        if isinstance(inner, Text):
            own.append(str(inner))
        for child in inner.children:
            if isinstance(child, section):
                found.extend(_sections(child, child["ids"][0] if node.parent else "", _heading(child)))
            elif isinstance(child, desc):
                signature = child.next_node(desc_signature)
                place, name = [*signature["ids"], anchor][0], signature.get("fullname") or heading
                found.extend(_sections(child, place, name))
            elif isinstance(child, row) and not isinstance(child.parent, thead):
                found.append((anchor, heading, [f"{cell.astext()} " for cell in child.children]))
            elif not isinstance(child, toctree | title):
                walk(child)
        own.append(" ")

    walk(node)
    return found


def _heading(node: section) -> str:
    return node.next_node(title).astext()
