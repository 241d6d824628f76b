"""The paper's figures from new runs: a column of the record against rounds, a line per method, a figure per case.

A method tuned over two grids also gets a heat map (FedExP's figure 1, GeL's figure 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from numpy.typing import ArrayLike

from hpcfed.io.atomic import write_files
from hpcfed.io.figure_style import DASHES, LIGHT, PAPER, blank, to_files
from hpcfed.lab.report.plots import HORIZONTAL, LinePlot, PathPlot, Scene
from hpcfed.lab.reproduce.experiment import AGAINST, Case, Experiment, Goal
from hpcfed.lab.reproduce.measure import (
    SettingRuns,
    best_of,
    by_case,
    criterion_of,
    final_of,
    last_rounds,
    reached,
    rounds_apart,
    tuned_to,
)
from hpcfed.lab.sweep.figures import draw as draw_sweep
from hpcfed.lab.sweep.grid import Grid
from hpcfed.lab.sweep.plan import Plan
from hpcfed.lab.sweep.select import Candidate, Rule


def draw(experiment: Experiment, measured: Sequence[SettingRuns], folder: Path) -> list[Path]:
    """Write each case's figures into `folder` as PNG and PDF; return the PNG files' paths, [] without runs.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    files: dict[str, bytes] = {}
    for name, (case, settings) in by_case(experiment, measured).items():
        files |= dict(_figures(experiment, name, case, settings))
    write_files(folder, files)
    return [folder / file for file in files if file.endswith(".png")]


def draw_lines(
    folder: Path,
    name: str,
    lines: Mapping[str, tuple[ArrayLike, ArrayLike]],
    labels: tuple[str, str],
    *,
    marker: str = "",
    logarithmic: bool = False,
    level: float | None = None,
) -> Path:
    """Write a figure with a line per title as PNG and PDF; return the PNG file's path.

    Args:
        folder, name: folder of the files, and their name without suffix.
        lines: title → x and y, of equal lengths.
        labels: of the horizontal and the vertical axis.
        marker: matplotlib's marker at each point; "": none.
        logarithmic: whether the vertical axis is logarithmic.
        level: height of a horizontal line; None: no line.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    figure, axes = blank(PAPER)
    for index, (title, (x, y)) in enumerate(lines.items()):
        colour, dashes = LIGHT.groups[index % len(LIGHT.groups)], DASHES[index % len(DASHES)]
        axes.plot(x, y, label=title, color=colour, linestyle=dashes, marker=marker)
    if level is not None:
        axes.axhline(level, color=LIGHT.helper, linewidth=1)
    if logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    if lines:
        axes.legend(frameon=False)
    write_files(folder, {name + suffix: content for suffix, content in to_files(figure).items()})
    return folder / f"{name}.png"


def _figures(
    experiment: Experiment, name: str, case: Case, settings: Sequence[SettingRuns]
) -> Iterator[tuple[str, bytes]]:
    """Yield file name and content of a case's figures; a method with grids is drawn at its best point."""
    if experiment.measure.kind == "tuned":
        grids = {
            method: [one for one in settings if one.setting.method == method] for method in experiment.methods_of(case)
        }
        for method, grid in grids.items():
            maps = heat_map(experiment, grid)
            yield from ((f"{name}-{method}-grid{Path(file).suffix}", content) for file, content in maps.items())
        settings = [best_of(experiment, grid)[0] for grid in grids.values() if best_of(experiment, grid)]
    elif experiment.measure.kind == "rounds":
        costs = [reached(experiment, one, settings, case.targets[0]) for one in settings]
        settings = [settings[place] for place in tuned_to(settings, costs).values()]
    groups = [one.group for one in settings if one.runs]
    if not groups:
        return
    targets = [target for target in case.targets if not isinstance(target, Goal)]
    rounds = experiment.measure.window * rounds_apart(settings, criterion_of(experiment).column)
    for entry in experiment.measure.figures:
        column, _, against = entry.partition(AGAINST)
        window = max(1, rounds // rounds_apart(settings, column))
        scene = Scene(groups, criterion_of(experiment), targets, window, groups[0])
        file = f"{name}-{entry.replace(AGAINST, '-')}"
        label = column.replace("train_", "training ").replace("_lr", " step size").replace("_", " ")
        plot: LinePlot | PathPlot = LinePlot(file, column, against or "round", label, case.title)
        if against and against not in HORIZONTAL:
            plot = PathPlot(file, (against, column), case.title)
        figure = plot.draw(scene, PAPER)
        if figure is not None:
            yield from ((file + suffix, content) for suffix, content in to_files(figure).items())


def heat_map(experiment: Experiment, grid: Sequence[SettingRuns]) -> Mapping[str, bytes]:
    """Return the heat map over a method's two grids, file name → content; cells are final means of ``measure.cells``.

    `grid` has the runs of each grid point. The best cell by the measured column is outlined. The mapping is empty if
    the method does not have two grids, or if no grid point has a final value with every seed.
    """
    points = tuple(one.setting.point for one in grid)
    if not points or len(points[0].keys) != 2:
        return {}
    values = [dict.fromkeys(point.values[axis] for point in points) for axis in range(2)]
    grids = tuple(Grid(key, tuple(own)) for key, own in zip(points[0].keys, values, strict=True))
    column = experiment.measure.cells or experiment.measure.column
    shown = experiment.model_copy(update={"measure": experiment.measure.model_copy(update={"column": column})})
    best, whole = best_of(experiment, grid)[:1], {id(one) for one in best_of(shown, grid)}
    ranked = []
    for number, one in enumerate(grid):
        value = final_of(shown, one) if id(one) in whole else None
        ranked.append(Candidate(number, (), value.mean if value else math.nan, math.nan, 1 if one in best else None))
    criterion, last = criterion_of(shown), last_rounds(experiment, grid, column)
    rule = Rule(column, last, criterion.higher_is_better, criterion.is_fraction)
    return draw_sweep(Plan(experiment.name, Path(), grids, points, ()), ranked, rule)
