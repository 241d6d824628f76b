"""docs/papers.md has every table and figure of the papers, and what it says of each agrees with files and results."""

from __future__ import annotations

import re

from hpcfed.lab.reproduce.catalogue import experiments, find
from tests.launch import ROOT

PAPERS = {"FedExP": ("fedexp", 6, 17), "FedDyn": ("feddyn", 6, 13), "GeL": ("gel", 6, 9)}
"""Title → its name, and how many tables and figures the paper has."""
RUN = ("full", "partly", "stand-in")
VERDICT = re.compile(r"(yes, |no, |no: |not comparable, )\S.{3,}")
"""A cell of the column *agrees?* of an item that was run: a word, and within what, or why not."""
STATED = {
    "FedExP": ("Theorems 1 and 2", "Lemma 11"),
    "FedDyn": ("Theorem 2", "Theorem 3", "Theorem 4"),
    "GeL": ("Theorem 2",),
}
"""Statements of each paper's own that have a row."""
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
RESULTS = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("reproduction-*.md")))


def rows(title: str) -> list[list[str]]:
    """Item, subject, command, status, agreement and result of each row of a paper."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return found[2:]


def commands(page: str) -> dict[str, set[str]]:
    """The fragments by which a page's headings are linked to, and the experiments that a heading's command runs."""
    found = {}
    for heading in re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        named = re.match(r"`hpcfed reproduce (\S+?)[ `]", heading)
        found[anchor] = {one.name for one in find(named[1])} if named else set()
    return found


def test_every_item_of_each_paper_has_its_rows_and_no_other():
    for title, (paper, tables, figures) in PAPERS.items():
        told = {row[0].partition(" ")[::2] for row in rows(title)}
        numbers = {(kind, int(re.match(r"\d+", number)[0])) for kind, number in told if kind != "Section"}
        assert numbers == {("Table", n + 1) for n in range(tables)} | {("Figure", n + 1) for n in range(figures)}
        shown = {(item, one.name) for one in experiments().values() if one.paper == paper for item in one.shows}
        listed = [(re.sub("[ .]", "", row[0].lower()), row[2].strip("`").rpartition(" ")[2]) for row in rows(title)]
        assert {pair for pair, row in zip(listed, rows(title), strict=True) if row[3] != "no run"} == shown
        assert len(set(listed)) == len(listed)


def test_what_was_run_has_its_result_and_what_was_not_its_reason():
    known = commands(RESULTS)
    for title in PAPERS:
        for item, _, command, status, agrees, result in rows(title):
            assert status in (*RUN, "not run", "no run"), item
            assert bool(VERDICT.fullmatch(agrees)) == (status in RUN), (item, agrees)
            assert status in RUN or agrees == "–", item
            assert (status == "no run") == (command == "–"), item
            links, _, rest = result.partition("; the rest: ")
            targets = re.findall(r"\[[^\]]+\]\(reproduction-\w+\.md#([^)]+)\)", links)
            assert bool(targets) == (status in RUN), item
            assert not targets or not re.sub(r"\[[^\]]+\]\([^)]+\)(, )?", "", links), item
            for target in targets:
                assert command.strip("`").split()[-1] in known[target], (item, target)
            assert rest or status != "partly", item
            assert result, item


def test_theorems_have_rows_and_cells_can_be_read():
    for title, statements in STATED.items():
        subjects = [row[1] for row in rows(title)]
        assert all(any(statement in subject for subject in subjects) for statement in statements), title
        assert all(len(cell) <= 200 for row in rows(title) for cell in row[:5]), title


def test_what_agrees_has_numbers_in_its_section():
    """A row that says so within a number names one that its section of docs/reproduction-*.md has."""
    sections = dict(anchors(RESULTS))
    for title in PAPERS:
        for item, _, _, _, agrees, result in rows(title):
            found = "".join(sections[anchor] for anchor in re.findall(r"reproduction-\w+\.md#([^)]+)\)", result))
            for number in re.findall(r"\d+\.\d+", agrees if agrees.startswith(("yes", "no,")) else ""):
                assert number in found, (item, number)


def anchors(page: str) -> list[tuple[str, str]]:
    """The sections of a page by the fragments that link to them."""
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)
    heads = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in parts[1::2]]
    return list(zip(heads, parts[2::2], strict=True))
