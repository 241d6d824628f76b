"""The HTML page of a report: tables, figures in the reader's light or dark scheme, and recipes, in one file.

A script lets the reader hide curves, smooth them and read values off them; without it, the page is still complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from hpcfed.config.load import dump_yaml
from hpcfed.errors import first_of, visible
from hpcfed.io.figure_style import DARK, DASHES, LIGHT
from hpcfed.lab.report.group import Group, flatten
from hpcfed.lab.report.read import read_json, run_status
from hpcfed.lab.report.tables import Table
from hpcfed.lab.report.unlike import unlike
from hpcfed.lab.report.write import MARKER
from hpcfed.run_folder.certificate import changed
from hpcfed.run_folder.files import CLIENTS, RESULT
from hpcfed.run_folder.private import NOT_COVERED, in_words
from hpcfed.run_folder.rounds import MOST_NAMED, RECORD, interval_of, skipped_in_words
from hpcfed.version import __version__

TITLED, LONGEST = 4, 80
"""Maximum number of groups in the title, and of characters if it names more than one."""


@dataclass(frozen=True)
class Picture:
    """A figure on the page: file name without suffix, caption, ``svg`` element, and result of `curves_of`."""

    file: str
    caption: str
    svg: str
    curves: str = ""


@dataclass(frozen=True)
class Chapter:
    """A section of the page: heading, figures and table; `has_keys`: whether its figures need the legend of groups."""

    title: str
    pictures: tuple[Picture, ...]
    table: Table | None
    has_keys: bool

    @property
    def anchor(self) -> str:
        """The chapter's HTML identifier, the target of links."""
        return self.title.lower().replace(" ", "-")


def render_page(
    groups: Sequence[Group],
    results: Sequence[Table],
    chapters: Sequence[Chapter],
    recipes: Table | None,
    runs: Table,
    *,
    waiting: Sequence[Path] = (),
    has_files: bool,
) -> str:
    """Return the HTML of the page: results, chapters, recipes and runs; the page loads no other file.

    `recipes` is the table of the keys in which recipes differ, None for a single group. `waiting` has the run folders
    left out because they have no rounds yet; `has_files` says whether figures and tables are also written as files.
    """
    return rendered(
        "page.html.j2",
        "lab/report",
        marker=MARKER,
        title=_title([group.label for group in groups]),
        num_runs=sum(len(group.runs) for group in groups),
        keys={group.label: line_key(index) for index, group in enumerate(groups)} if len(groups) > 1 else {},
        warnings=[*warnings(groups), *left_out(waiting)],
        results=results,
        chapters=chapters,
        differing=recipes,
        runs=runs,
        has_files=has_files,
        data=_data(groups),
        environment=_shared([run.environment for group in groups for run in group.runs]),
        recipes=[(group, dump_yaml(group.recipe)) for group in groups],
    )


def rendered(template: str, *rooms: str, **content: Any) -> str:
    """Return a page's HTML, with the colours of the light and the dark scheme, from a template and its variables.

    The file `template` is sought in the folders `rooms` of the package `hpcfed`, in this order.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader("hpcfed", room) for room in rooms]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    common = {"version": __version__, "light": LIGHT.variables(), "dark": DARK.variables()}
    return visible(environment.get_template(template).render(**common, **content))


def _title(labels: Sequence[str]) -> str:
    named = next((n for n in range(TITLED, 1, -1) if len(", ".join(labels[:n])) <= LONGEST), 1)
    return first_of(labels, named)


def line_key(index: int) -> tuple[str, str]:
    """Return the colour and the dash pattern of the lines of group `index` on the page, as values of SVG attributes."""
    dash = DASHES[index % len(DASHES)]
    lengths = "none" if dash == "-" else " ".join(f"{2 * length:g}" for length in dash[1])
    return f"var(--groups-{index % len(LIGHT.groups)})", lengths


def warnings(groups: Sequence[Group]) -> list[str]:
    """Return warnings on unfinished runs, changed records, skipped updates, privacy, repeats, and what is unequal."""
    notes = []
    for group in groups:
        for status in ("unfinished", "diverged", "failed"):
            names = [f"{run.folder} (round {run.num_rounds})" for run in group.runs if run.status == status]
            if names:
                notes.append(f"{group.label}: {status}: {', '.join(names)}. Its last evaluation stands for its end.")
        if edited := [str(path) for run in group.runs for path in changed(run.folder, RECORD, CLIENTS)]:
            what = "is not the file" if len(edited) == 1 else "are not the files"
            notes.append(f"{group.label}: {first_of(edited, MOST_NAMED)} {what} named in the certificate.")
        if skipped := sum((Counter(run.skipped) for run in group.runs), Counter()):
            rounds, masked = sum(run.num_rounds for run in group.runs), bool(group.recipe.get("secure_aggregation"))
            skips = group.recipe.get("on_bad_client") == "skip"
            notes.append(f"{group.label}: {skipped_in_words(skipped, rounds, masked=masked, skips=skips)}.")
        private = [run for run in group.runs if "privacy" in run.environment and run.num_rounds]
        if private:
            weakest = max(private, key=lambda run: float(run.column("epsilon")[-1]))
            facts = weakest.environment["privacy"]
            promised = in_words(facts, float(weakest.column("epsilon")[-1]))
            withheld = f" Its record withholds {', '.join(facts['withheld'])}." if facts.get("withheld") else ""
            notes.append(f"{group.label}: {promised}. {NOT_COVERED}{withheld}")
        if group.repeats:
            seeds = ", ".join(dict.fromkeys(run.seed for run in group.repeats))
            notes.append(
                f"{group.label}: more than one run of seed {seeds}: each seed counts once; left out: "
                f"{first_of([str(run.folder) for run in group.repeats], MOST_NAMED)}."
            )
    ended = {group.label: _rounds(group) for group in groups}
    if len({rounds for rounds in ended.values() if rounds}) > 1:
        lengths = first_of([f"{label} {rounds}" for label, rounds in ended.items() if rounds], MOST_NAMED)
        notes.append(
            f"Not all ran for the same number of rounds ({lengths}): final and best values are not like for like."
        )
    measured = [(group.label, interval_of("test_accuracy", group.recipe.get("evaluate") or {})) for group in groups]
    if len({every for _, every in measured}) > 1:
        rare = first_of([f"{label} every {every}" for label, every in measured], MOST_NAMED)
        notes.append(
            f"Not all were evaluated in the same rounds ({rare}): best values and rounds to a target are not like for "
            "like."
        )
    if len({group.recipe.get("data_content") or group.recipe.get("data") for group in groups}) > 1:
        notes.append("The groups did not train on the same data: their content hashes differ.")
    lines = unlike([(group.label, group.recipe) for group in groups])
    return [*notes, *(f"{line[0].upper()}{line[1:]}." for line in lines)]


def _rounds(group: Group) -> str:
    """Return the numbers of rounds of a group's finished or stopped runs, ``5`` or ``5 to 8``; "" without any."""
    ended = [run.num_rounds for run in group.runs if run.status in ("finished", "stopped")]
    return " to ".join(map(str, sorted({min(ended), max(ended)}))) if ended else ""


def left_out(waiting: Sequence[Path]) -> list[str]:
    """Return warnings that name the run folders without rounds: those that may yet have some, and those that ended."""
    found: dict[str, list[str]] = {}
    for run in waiting:
        found.setdefault(run_status(read_json(run / RESULT), 0), []).append(str(run))
    return [
        f"Left out, for they {'have no rounds yet' if status == 'unfinished' else f'{status} in their first round'}: "
        f"{first_of(names, MOST_NAMED)}."
        for status, names in found.items()
    ]


def _data(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Return (path, content hash) of every federation file in the report."""
    recipes = [group.recipe for group in groups]
    return list(dict.fromkeys((str(r.get("data", "–")), str(r.get("data_content", "not recorded"))) for r in recipes))


def _shared(mappings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return dotted key → value as text, for the keys whose values are equal in all mappings."""
    flat = [flatten(mapping) for mapping in mappings]
    return {key: value for key, value in flat[0].items() if all(entry.get(key) == value for entry in flat)}
