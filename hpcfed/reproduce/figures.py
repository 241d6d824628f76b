"""The paper's figures from our runs: a column of the record against rounds, a line a method, a picture a case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcfed.errors import EnvironmentFailure
from hpcfed.files import write_whole
from hpcfed.report.plots import HORIZONTAL, LinePlot, PathPlot, Scene
from hpcfed.report.style import PAPER, to_files
from hpcfed.reproduce.experiment import Case, Experiment, Goal
from hpcfed.reproduce.measure import Measured, best_of, by_case, criterion_of

AGAINST = " against "
"""In a figure's name: what it is drawn against, where that is not rounds; another coordinate, and it is a path."""


def draw(experiment: Experiment, measured: Sequence[Measured], folder: Path) -> list[Path]:
    """Write each case's figures as PNG and PDF, and return the PNG files; none where nothing was run.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    written = []
    for name, (case, settings) in by_case(experiment, measured).items():
        for file, content in _figures(experiment, name, case, settings):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / file, content)
            except OSError as error:
                raise EnvironmentFailure(error.strerror or "cannot be written", where=str(folder)) from None
            written.append(folder / file)
    return [path for path in written if path.suffix == ".png"]


def _figures(
    experiment: Experiment, name: str, case: Case, settings: Sequence[Measured]
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of a case's files; of a grid, the best point of each method is drawn."""
    if experiment.measure.kind == "tuned":
        grids = [[one for one in settings if one.setting.method == method] for method in experiment.methods_of(case)]
        settings = [best_of(experiment, grid)[0] for grid in grids if best_of(experiment, grid)]
    groups = [one.group for one in settings if one.runs]
    if not groups:
        return
    targets = [target for target in case.targets if not isinstance(target, Goal)]
    scene = Scene(groups, criterion_of(experiment), targets, experiment.measure.window, groups[0])
    for entry in experiment.measure.figures:
        column, _, against = entry.partition(AGAINST)
        file = f"{name}-{entry.replace(AGAINST, '-')}"
        label = column.replace("train_", "training ").replace("_lr", " step size").replace("_", " ")
        plot: LinePlot | PathPlot = LinePlot(file, column, against or "round", label, case.title)
        if against and against not in HORIZONTAL:
            plot = PathPlot(file, (against, column), case.title)
        figure = plot.draw(scene, PAPER)
        if figure is not None:
            yield from ((file + suffix, content) for suffix, content in to_files(figure).items())
