"""docs/papers.md has every table and figure of the papers, and what it says of each agrees with files and results."""

from __future__ import annotations

import re

from hpcfed.lab.reproduce.catalogue import experiments, find
from tests.launch import ROOT

PAPERS = {"FedExP": ("fedexp", 6, 17), "FedDyn": ("feddyn", 6, 13), "GeL": ("gel", 6, 9)}
"""Title → its name, and how many tables and figures the paper has."""
RUN = ("full", "partly", "stand-in")
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """Item, subject, command, status and result of each row of a paper."""
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
        for item, _, command, status, result in rows(title):
            assert status in (*RUN, "not run", "no run"), item
            assert (status == "no run") == (command == "–"), item
            links, _, rest = result.partition("; the rest: ")
            targets = re.findall(r"\[[^\]]+\]\(reproduction\.md#([^)]+)\)", links)
            assert bool(targets) == (status in RUN), item
            assert not targets or not re.sub(r"\[[^\]]+\]\([^)]+\)(, )?", "", links), item
            for target in targets:
                assert command.strip("`").split()[-1] in known[target], (item, target)
            assert rest or status != "partly", item
            assert result, item
