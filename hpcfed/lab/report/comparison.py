"""The steps from run folders to a report: read, group, compute tables, write."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcfed.errors import InputError
from hpcfed.io.figure_style import PAGE, PAPER, to_files, to_svg
from hpcfed.io.pace import Pace, nobody
from hpcfed.lab.report import tables
from hpcfed.lab.report.curves import curves_of
from hpcfed.lab.report.files import csv_of_table, file_name, latex_of_table
from hpcfed.lab.report.group import Group, group_runs
from hpcfed.lab.report.measure import ENDED, Criterion, choose_criterion, default_target
from hpcfed.lab.report.page import Chapter, Picture, render_page
from hpcfed.lab.report.paired import choose_baseline
from hpcfed.lab.report.plots import Scene
from hpcfed.lab.report.read import Run, find_runs, read_run
from hpcfed.lab.report.sections import DIFFERENCES, SECTIONS, TIME, Plot, files_of, own_metrics
from hpcfed.lab.report.write import choose_folder, write_report
from hpcfed.run_folder.contents import FIGURES, TABLES

RESULTS, TARGETS, RUNS, RECIPES = "results", "targets", "runs", "recipes"
"""Names of the tables that belong to no section."""
KINDS = {".csv": csv_of_table, ".tex": latex_of_table}


@dataclass(frozen=True)
class Comparison:
    """Everything that a report shows.

    Attributes:
        runs, groups: the runs that have rounds, and their groups, one per experiment.
        criterion: the metric by which the groups are compared.
        targets, window, baseline: see `compare`; defaults are filled in. `targets` is empty if there is no default.
        waiting: run folders without rounds yet, which are left out.
        results: the table of results, and that of the costs to reach `targets` if there are any.
        differences: the table of differences from `baseline`; None if no other group shares a seed with it.
    """

    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    criterion: Criterion
    targets: tuple[float, ...]
    window: int
    baseline: Group
    waiting: tuple[Path, ...]
    results: tuple[tables.Table, ...]
    differences: tables.Table | None


def compare(
    runs: Sequence[Path],
    targets: Sequence[float] = (),
    window: int = 1,
    baseline: str | None = None,
    metric: str | None = None,
    say: Callable[[str], None] = nobody,
) -> Comparison:
    """Read run folders, group the runs and compute the tables of a report.

    Args:
        runs: run folders, or folders that contain them.
        targets: values to reach, accuracies as fractions; by default one that even the worst run reached.
        window: number of consecutive evaluations over which values are averaged.
        baseline: label, run name or method of the group to compare the others with; by default the group of FedAvg,
            else the first.
        metric: the metric on the test set to compare; by default accuracy, else the loss.
        say: prints a line on the progress; a run of a few rounds takes some 10 ms.

    Raises InputError: a folder is not a run or has no rounds yet, a target is out of range, `baseline` names no
    group or several, or `metric` cannot be compared.
    """
    found, waiting = find_runs([Path(run) for run in runs])
    read, pace = list[Run](), Pace()
    for folder in found:
        if pace.is_due():
            say(f"{len(read):,} of {len(found):,} runs read{pace.left(len(read), len(found))}")
        read.append(read_run(folder))
    if not read:
        raise InputError("no run named", remedy="name the output folder of a run")
    groups = group_runs(read)
    reference = choose_baseline(groups, baseline)
    criterion = choose_criterion(read, metric)
    goals, note = _goals(groups, criterion, targets, window)
    note += " Runs that did not reach it are counted, but part of no mean."
    if window > 1:
        note += f" Reached means: by the mean of {window} evaluations in a row."
    results = [tables.results_table(groups, criterion, window)]
    if goals:
        results.append(tables.targets_table(groups, criterion, goals, window, note))
    differences = tables.differences_table(groups, reference, criterion, goals, window)
    return Comparison(
        tuple(read), tuple(groups), criterion, goals, window, reference, tuple(waiting), tuple(results), differences
    )


def write_comparison(
    comparison: Comparison,
    output: Path | None = None,
    *,
    figures: bool = True,
    say: Callable[[str], None] = nobody,
) -> Path:
    """Write ``report.html``; with `figures` also ``figures/`` (PNG and PDF) and ``tables/`` (CSV and LaTeX); return the
    page's path.

    `output` is the report's folder: by default the run's own for one run, ``report`` for several. `say` prints a line
    on the progress.

    Raises InputError: `output` holds files that are not a report's.
    """
    folder = choose_folder(comparison.runs, None if output is None else Path(output))
    groups = comparison.groups
    scene = Scene(groups, comparison.criterion, comparison.targets, comparison.window, comparison.baseline)
    chapters: list[Chapter] = []
    files: dict[str, str | bytes] = {}
    shown = dict(zip((RESULTS, TARGETS), comparison.results, strict=False))
    sections = (*SECTIONS, own_metrics(comparison.runs))
    pace = Pace()
    for section in sections:
        if pace.is_due():
            say(f"figures: next those of {section.title}")
        drawn = [(plot, figure) for plot in section.plots if (figure := plot.draw(scene, PAGE))]
        pictures = [
            Picture(plot.file, plot.caption, to_svg(figure, plot.file), curves_of(figure)) for plot, figure in drawn
        ]
        if figures:
            files |= _files([plot for plot, _ in drawn], scene)
        table = comparison.differences if section is DIFFERENCES else section.table(groups)
        shown |= {file_name(section.title): table} if table else {}
        if pictures or table:
            chapters.append(
                Chapter(section.title, tuple(pictures), table, has_keys=bool(pictures) and section is not TIME)
            )
    recipes, runs = tables.recipes_table(groups) if len(groups) > 1 else None, tables.environment_table(groups)
    shown |= {RUNS: runs} | ({RECIPES: recipes} if recipes else {})
    if figures:
        files |= {f"{TABLES}/{name}{kind}": write(t) for name, t in shown.items() for kind, write in KINDS.items()}
    page = render_page(
        groups,
        comparison.results,
        chapters,
        recipes,
        runs,
        waiting=comparison.waiting,
        has_files=figures,
    )
    titles = (RESULTS, TARGETS, RUNS, RECIPES, *(file_name(section.title) for section in sections))
    known = [f"{FIGURES}/{name}" for name in files_of(sections)]
    known += [f"{TABLES}/{name}{kind}" for name in titles for kind in KINDS]
    return write_report(folder, page, files, known)


def _files(plots: Sequence[Plot], scene: Scene) -> dict[str, bytes]:
    """Return the plots as PNG and PDF files for a paper: path → content."""
    drawn = ((plot.file, plot.draw(scene, PAPER)) for plot in plots)
    return {
        f"{FIGURES}/{name}{suffix}": content
        for name, figure in drawn
        if figure is not None
        for suffix, content in to_files(figure).items()
    }


def _goals(
    groups: Sequence[Group], criterion: Criterion, targets: Sequence[float], window: int
) -> tuple[tuple[float, ...], str]:
    """Return the user's targets, or else a default one, and a sentence that explains them.

    Without a default, the targets are empty and the sentence is "".
    """
    is_fraction, is_loss = criterion.is_fraction, criterion.is_loss
    for target in targets:
        if not math.isfinite(target) or (is_fraction and not 0 < target <= 1) or (is_loss and target <= 0):
            expected = "a fraction above 0 and up to 1" if is_fraction else "a loss above 0" if is_loss else "a number"
            remedy = f"write {target / 100:g} for {target:g} %" if is_fraction and 1 < target <= 100 else ""
            raise InputError("target", where=criterion.title, expected=expected, got=f"{target:g}", remedy=remedy)
    if targets:
        return tuple(dict.fromkeys(targets)), f"The first evaluated round with this {criterion.title} or better."
    chosen = default_target(groups, criterion, window)
    if chosen is None:
        return (), ""
    ended = any(run.status in ENDED for group in groups for run in group.runs)
    whose = "the worst finished run ended with" if ended else "the worst run has so far"
    note = f"The default target: the {criterion.title} that even {whose}, rounded."
    return (chosen,), note
