"""Table of final models on each site's test set and on all sites', beside published means (``measure.kind: sites``).

An experiment has two cases: ``sites``, whose clients have test sets, and ``pooled``, with a common test set of all
sites' samples. Every model is measured on each site's test set and on the common one, scaled as for pooled training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcfed.config.metrics import is_percentage
from hpcfed.data.cache import Samples
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.errors import InputError
from hpcfed.evaluation.metrics import whole_metrics
from hpcfed.lab.loaded import load
from hpcfed.lab.report.group import ABSENT
from hpcfed.lab.report.measure import Spread, spread
from hpcfed.lab.report.tables import Table
from hpcfed.lab.reproduce.experiment import Experiment
from hpcfed.lab.reproduce.inputs import Places
from hpcfed.lab.reproduce.measure import SettingRuns, shown
from hpcfed.lab.reproduce.table import so_far
from hpcfed.models.losses import ACCURACY, metrics_for

SITES, POOLED = "sites", "pooled"
MARKED_FROM = 2.0
"""Size, in standard errors, above which the difference of two means is marked."""
MARK = "*"
SEEDS = 5
"""Number of seeds behind each published mean."""


@dataclass(frozen=True)
class Tests:
    """The test sets by name, in the order of the table's columns, and the metric, a function of output and target."""

    sets: dict[str, Samples]
    metric: Callable[[Tensor, Tensor], float]

    def measure(self, module: nn.Module) -> list[float]:
        """Return the metric of a module on each test set, in the order of `sets`."""
        with torch.no_grad():
            return [self.metric(module(x), y) for x, y in self.sets.values()]


def compare_sites(experiment: Experiment, measured: Sequence[SettingRuns], places: Places) -> Table:
    """Return the table: a row per method, followed by a row of its published numbers if there are any."""
    tests = _tests(experiment, places)
    column = experiment.measure.column
    percent = is_percentage(column, experiment.metrics)
    rows = []
    for one in measured:
        values = [tests.measure(load(run.folder).evaluated) for run in one.runs.values() if run.status == "finished"]
        ours = [spread(column) for column in zip(*values, strict=True)] or [None] * len(tests.sets)
        theirs = [_parsed(text) for text in experiment.cases[one.setting.case].paper.get(one.setting.method, [])]
        theirs += [None] * (len(ours) - len(theirs))
        sizes = [len(y) for _, y in tests.sets.values()]
        marks = [MARK if _far(a, b, n) else "" for a, b, n in zip(ours, theirs, sizes, strict=True)]
        cells = [_text(shown(experiment, value), percent) for value in (*ours, *theirs)]
        rows.append((one.title, *(cell + mark for cell, mark in zip(cells, marks, strict=False))))
        if any(theirs):
            rows.append(("published", *cells[len(ours) :]))
    unit = column.removeprefix("test_").capitalize() + (" in %" if percent else "")
    deviation = "one standard deviation over seeds (n − 1)"
    if experiment.measure.intervals:
        deviation = "half the 95 % confidence interval of the mean over seeds (Student's t)"
    words = (
        f"{unit} of the last evaluated model, ± {deviation}. {MARK}: the means differ by more "
        f"than {MARKED_FROM:g} standard errors of their difference and by more than one sample of the test set."
    )
    head = ("Method", *(f"{name} ({len(y)})" for name, (_, y) in tests.sets.items()))
    note = " ".join(filter(None, [words, so_far(measured), experiment.note]))
    return Table(experiment.title, head, tuple(rows), note)


def check_sites(experiment: Experiment, places: Places) -> None:
    """Check that the data of case ``sites`` has a test set per client, and that of ``pooled`` one common test set.

    Raises:
        InputError: either has the wrong kind of test set, or a method has more published means than test sets.
    """
    with _federations(experiment, places):
        pass


@contextmanager
def _federations(experiment: Experiment, places: Places) -> Iterator[tuple[Federation, Federation]]:
    with (
        Federation.open(places.federation(experiment.cases[SITES].data, 0)) as sites,
        Federation.open(places.federation(experiment.cases[POOLED].data, 0)) as pooled,
    ):
        if sites.test_offsets is None or pooled.test_offsets is not None:
            expected = "clients' test sets in case 'sites' and a common one in case 'pooled', for kind: sites"
            raise InputError("data", where=experiment.name, expected=expected)
        most = sites.num_clients + 1
        for name, case in experiment.cases.items():
            if more := next((len(numbers) for numbers in case.paper.values() if len(numbers) > most), 0):
                expected = f"at most {most} numbers, of each client's test set and of all"
                raise InputError(f"cases.{name}.paper", where=experiment.name, expected=expected, got=str(more))
        yield sites, pooled


def _tests(experiment: Experiment, places: Places) -> Tests:
    with _federations(experiment, places) as (sites, pooled):
        of_sites, of_all = (Shards(one, torch.float32, torch.device("cpu"), 1 << 30) for one in (sites, pooled))
        found = {name: of_sites.client_test(k) for k, name in enumerate(sites.client_names())}
        found["all sites"] = of_all.test_chunk(0, pooled.num_test)
        return Tests(found, _metric(experiment, sites))


def _metric(experiment: Experiment, federation: Federation) -> Callable[[Tensor, Tensor], float]:
    """Return the measured metric as a function of output and target: the recipes' metric of that name, or built in."""
    name = experiment.measure.column.removeprefix("test_")
    metrics = {name: experiment.metrics.get(name, name)}
    python_path = experiment.recipe.get("python_path") or ()
    sums = {name: ACCURACY[federation.task]} if name == "accuracy" else metrics_for(metrics, python_path)
    if name in sums:

        def ratio(output: Tensor, target: Tensor) -> float:
            total, count = sums[name](output, target)
            return total / count if count else math.nan

        return ratio
    metric = whole_metrics(metrics, federation.task, federation.num_classes, python_path)[name]

    def value(output: Tensor, target: Tensor) -> float:
        number, defined = metric.cells(output, target)[0]
        return float(number) if defined else math.nan

    return value


def _parsed(text: object) -> Spread | None:
    """Parse a published ``0.7308 ± 0.0192`` over `SEEDS` seeds; its deviation, with divisor n, is rescaled to n − 1."""
    if text is None:
        return None
    mean, _, std = str(text).partition("±")
    return Spread(float(mean), float(std or 0) * math.sqrt(SEEDS / (SEEDS - 1)), SEEDS)


def _far(ours: Spread | None, theirs: Spread | None, size: int) -> bool:
    """Whether two means differ by more than `MARKED_FROM` standard errors, and by more than one sample in `size`.

    Never if there is one run of `ours`, whose standard error is not known.
    """
    if ours is None or ours.std is None or theirs is None or math.isnan(ours.mean):
        return False
    error = math.sqrt(sum((one.std or 0.0) ** 2 / one.count for one in (ours, theirs)))
    return abs(ours.mean - theirs.mean) > max(MARKED_FROM * error, 1 / size + 1e-9)


def _text(value: Spread | None, percent: bool) -> str:
    if value is None:
        return ABSENT
    factor, digits = (100, 1) if percent else (1, 3)
    deviation = "" if value.std is None else f" ± {factor * value.std:.{digits}f}"
    return f"{factor * value.mean:.{digits}f}{deviation}"
