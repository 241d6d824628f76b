"""Figures and one self-contained page from run folders, finished or still going; reads files and nothing alive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcfed.errors import InputError
from hpcfed.report import tables
from hpcfed.report.figures import DARK, LIGHT, PLOTS, to_png
from hpcfed.report.group import Group, group_runs
from hpcfed.report.measure import Criterion, choose_criterion, default_target
from hpcfed.report.page import Picture, render_page
from hpcfed.report.read import Run, read_runs
from hpcfed.report.write import choose_folder, write_report

__all__ = ["Comparison", "compare", "make_report", "write_comparison"]


@dataclass(frozen=True)
class Comparison:
    """What a report says: the runs in groups, and the tables that a reader looks at first."""

    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    criterion: Criterion
    targets: tuple[float, ...]
    results: tuple[tables.Table, ...]


def make_report(runs: Sequence[Path], output: Path | None = None, targets: Sequence[float] = ()) -> Path:
    """Write ``report.html`` and ``figures/*.png`` from run folders, and return the page's path.

    `output` defaults to the run's own folder for one run, and to ``report`` for several. `targets` are fractions for
    accuracies, else losses; without any, the report chooses what even the worst run reached.

    Raises InputError: a folder is no run or has no rounds yet, a target makes no sense, or `output` holds other files.
    """
    return write_comparison(compare(runs, targets), output)


def compare(runs: Sequence[Path], targets: Sequence[float] = (), window: int = 1) -> Comparison:
    """Read the run folders and compute the tables; `window` evaluations are averaged before they meet a target."""
    read = read_runs([Path(run) for run in runs])
    if not read:
        raise InputError("no run given", remedy="name the output folder of a run")
    groups = group_runs(read)
    criterion = choose_criterion(read)
    goals, note = _goals(groups, criterion, targets)
    note += " Runs that did not reach it are counted, but part of no mean."
    if window > 1:
        note += f" Reached means: by the mean of {window} evaluations in a row."
    results = [tables.results_table(groups, criterion)]
    if goals:
        results.append(tables.targets_table(groups, criterion, goals, window, note))
    return Comparison(tuple(read), tuple(groups), criterion, goals, tuple(results))


def write_comparison(comparison: Comparison, output: Path | None = None) -> Path:
    """Draw the figures, write them and the page into the folder that `make_report` describes, and return the page."""
    folder = choose_folder(comparison.runs, None if output is None else Path(output))
    groups = comparison.groups
    pictures = []
    for plot in PLOTS:
        goals = comparison.targets if plot.column == comparison.criterion.column else ()
        light, dark = (plot.draw(groups, goals, theme) for theme in (LIGHT, DARK))
        if light and dark:
            pictures.append(Picture(plot.file, plot.caption, to_png(light), to_png(dark)))
    details = [tables.timing_table(groups), tables.environment_table(groups)]
    if len(groups) > 1:
        details.insert(1, tables.recipes_table(groups))
    page = render_page(groups, comparison.results, pictures, details)
    figures = {picture.file: picture.light for picture in pictures}
    return write_report(folder, page, figures, known=[plot.file for plot in PLOTS])


def _goals(groups: Sequence[Group], criterion: Criterion, targets: Sequence[float]) -> tuple[tuple[float, ...], str]:
    """Return the targets, given or chosen, and a sentence that says which."""
    is_accuracy = criterion.column.endswith("accuracy")
    for target in targets:
        if not math.isfinite(target) or target <= 0 or (is_accuracy and target > 1):
            expected = "a fraction above 0 and up to 1" if is_accuracy else "a loss above 0"
            remedy = f"write {target / 100:g} for {target:g} %" if is_accuracy and 1 < target <= 100 else ""
            raise InputError("target", where=criterion.title, expected=expected, got=f"{target:g}", remedy=remedy)
    if targets:
        return tuple(dict.fromkeys(targets)), f"The first evaluated round with this {criterion.title} or better."
    chosen = default_target(groups, criterion)
    if chosen is None:
        return (), ""
    note = f"No target was given: this is the {criterion.title} that even the worst finished run ended with, rounded."
    return (chosen,), note
