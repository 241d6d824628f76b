"""Bootstrap over patients: how much a study's values depend on which patients are among the sites' test samples.

Units are patients (groups of samples), or single samples if the data have no groups. A site's units are those with test
samples in any split. Each of B resamples draws, with replacement, as many units of a site as the site has. A site's
value in a resample is the mean, over splits and seeds, of the metric on the split's test samples, each counted as often
as its unit was drawn. All splits and all rows of a table use the same resamples, so differences are paired. Intervals
reach from the 2.5th to the 97.5th percentile. Models are not retrained: the effect of different training sets is in the
intervals over splits.

Reference: Efron, Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from data_prep.streams import stream
from hpcfed.config.recipe import Seeds
from hpcfed.data.cache import Samples
from hpcfed.errors import Stopped
from hpcfed.evaluation.metrics import ranking_scores
from hpcfed.io.output import Output
from hpcfed.io.pace import Pace
from hpcfed.lab.study.arms import ALONE, ENSEMBLE, Arm
from hpcfed.lab.study.ensemble import functions_of, load_run, mean_prediction, test_samples
from hpcfed.lab.study.measures import StudyMetric
from hpcfed.lab.study.results import TUNED
from hpcfed.lab.study.statistics import Ends, auroc_interval

if TYPE_CHECKING:
    from hpcfed.lab.study.plan import Study
    from hpcfed.lab.study.rows import StudyRow
    from hpcfed.lab.study.view import Resampled, Single, View

Outputs = Mapping[int, torch.Tensor]
"""Site → a model's outputs on the site's test samples, (n, …)."""
Weighted = Callable[[np.ndarray], np.ndarray]
"""Multiplicities of n samples in b resamples, (b, n) → the metric in each resample, (b,)."""
Weigh = Callable[[torch.Tensor, torch.Tensor], Weighted]
"""Outputs (n, …) and targets (n, …) → a metric as a function of the samples' multiplicities."""
COUNTS, MOST_AT_ONCE = 1 << 20, 50
"""Most multiplicities, and most resamples, drawn at a time; in between, progress is shown and stops are checked."""


@dataclass(frozen=True)
class _OfSplit:
    """A table row's metric at one site in one split.

    Attributes:
        places: (m,) positions of the split's m test samples among the site's n tested samples of all splits.
        models: the metric of each model of the row, as a function of the samples' multiplicities.
    """

    places: np.ndarray
    models: Sequence[Weighted]

    def __call__(self, times: np.ndarray) -> np.ndarray:
        """Return the metric in b resamples, mean over models, (b,).

        `times` (b, n) says how often each of the site's n tested samples is in each resample.
        """
        own = times[:, self.places]
        return np.mean([metric(own) for metric in self.models], axis=0)


Measures = dict[tuple[str, str], dict[int, list[_OfSplit]]]
"""(Row's key, metric's name) → site → metric in each split where it is defined; resampled values are means of these."""


@dataclass
class ResampleProgress:
    """Prints the progress of resampling on rank 0, at most one line every 10 s.

    Attributes:
        name: the study's name, at the beginning of each line.
        speaks: whether this process prints.
        stops: returns True once resampling has been asked to stop.
        pace: decides when the next line is due, and estimates the time left.
        done: the words after ``done/total`` in a line, if `update` is called without `what`.
    """

    name: str
    speaks: bool = False
    stops: Callable[[], bool] = lambda: False
    pace: Pace = field(default_factory=Pace)
    done: str = "done"

    def begin(self, count: int, sites: int) -> None:
        """Print that there will be `count` resamples at each of `sites` sites, and start the clock."""
        self.pace, self.done = Pace(), f"resamples done, {count:,} at each of {sites} sites"
        self._say(f"{count:,} resamples of the patients of each of {sites} sites")

    def update(self, done: int, total: int, what: str = "") -> None:
        """Print a line if one is due: ``done/total`` and `what` is counted, by default resamples of all sites together.

        Raises:
            Stopped: resampling has been asked to stop.
        """
        if self.stops():
            what = "resampling stopped, the page has no intervals over patients"
            raise Stopped(what, where=self.name, remedy="the same command computes them")
        if done and self.pace.is_due():
            self._say(f"{done:,}/{total:,} {what or self.done}{self.pace.left(done, total)}")

    def _say(self, text: str) -> None:
        if self.speaks:
            print(f"{self.name}: {text}", file=Output(sys.stdout), flush=True)


def resample(view: View, metrics: Sequence[StudyMetric], count: int, progress: ResampleProgress) -> Resampled:
    """Return (row's key, metric's name) → values in `count` resamples, (N + 1, `count`).

    The first N rows of the array are the sites', the last is their mean, over the sites of `View.measured`. Undefined
    values are nan. Table rows without stored models, such as fine-tuned ones, have no entry.

    Raises:
        InputError: a model of the runs cannot be read.
        Stopped: resampling has been asked to stop.
    """
    sites, done = len(view.sites), 0
    progress.begin(count, sites)
    measures = _measures(view, [one.name for one in metrics], progress)
    progress.pace.begin()
    found = {key: np.full((sites + 1, count), np.nan) for key in measures}
    for site in range(sites):
        for start, times in _draws(view.study, site, count):
            for key, places in measures.items():
                if site in places:
                    values = np.mean([one(times) for one in places[site]], axis=0)
                    found[key][site, start : start + len(times)] = values
            done += len(times)
            progress.update(done, count * sites)
    for metric in metrics:
        kept = np.flatnonzero(view.measured(metric))
        for row, name in measures:
            if name == metric.name and len(kept):
                found[row, name][-1] = found[row, name][kept].mean(axis=0)
    return found


def single_intervals(view: View) -> Single:
    """Return (row's key, metric's name) → site → DeLong's interval of two-class AUROC.

    A site has no entry if it has no interval (`auroc_interval`). The result is empty if several splits test on a site,
    if samples have groups, or if no metric is a two-class AUROC.

    Raises:
        InputError: a model of the runs cannot be read.
    """
    study, dataset = view.study, view.study.samples.dataset
    names = [name for name, metric in study.recipe.evaluate.metrics.items() if metric == "auroc"]
    two = dataset.task == "classification" and dataset.num_classes == 2
    if not (names and two and study.samples.group is None and (study.leaves_out or len(study.splits.each) == 1)):
        return {}
    found: dict[tuple[str, str], dict[int, Ends]] = {}
    for split in range(len(study.splits.each)):
        outputs = _outputs(view, split)
        for site, (_, target) in test_samples(study, split).items():
            for row in view.rows:
                each = [ranking_scores(one.numpy()) for one in _of_row(row, outputs, site)]
                finite = bool(each) and all(np.isfinite(one).all() for one in each)
                if finite and (ends := auroc_interval(each, target.numpy() == 1)) is not None:
                    for name in names:
                        found.setdefault((row.key, name), {})[site] = ends
    return found


def _measures(view: View, names: Sequence[str], progress: ResampleProgress) -> Measures:
    """Return row and metric → site → one `_OfSplit` for each split in which the metric is defined."""
    study, found = view.study, Measures()
    for split, one in enumerate(study.splits.each):
        progress.update(split, len(study.splits.each), "splits' models read")
        weighs = {name: weigh for name, weigh in _weighs(study, split).items() if name in names}
        outputs = _outputs(view, split)
        for site, (_, target) in test_samples(study, split).items():
            own = study.samples.owner == site
            places = np.searchsorted(_tested(study, site), np.flatnonzero(one.tests & own))
            for row in view.rows:
                each = _of_row(row, outputs, site)
                for name, weigh in weighs.items() if each else ():
                    of_split = _OfSplit(places, [weigh(output, target) for output in each])
                    at_sites = found.setdefault((row.key, name), {})
                    if np.isfinite(of_split(np.ones((1, len(_tested(study, site))), dtype=int))).all():
                        at_sites.setdefault(site, []).append(of_split)
    return found


def _tested(study: Study, site: int) -> np.ndarray:
    """Return the indices of a site's n samples that are test samples in any split, (n,)."""
    return np.flatnonzero(np.any([split.tests for split in study.splits.each], axis=0) & (study.samples.owner == site))


def _draws(study: Study, site: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield batches of resamples of a site: the index of the batch's first resample, and multiplicities (b, n).

    The multiplicities say how often each of the site's n tested samples is in each of the batch's b resamples.
    """
    rows = _tested(study, site)
    units = np.arange(len(rows)) if study.samples.group is None else study.samples.group[rows]
    names, unit = np.unique(units, return_inverse=True)
    rng = stream(study.options.split_seed, f"bootstrap of site {site}")
    size = min(MOST_AT_ONCE, max(1, COUNTS // len(rows)))
    for start in range(0, count, size):
        drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), min(size, count - start))
        yield start, drawn[:, unit]


def _outputs(view: View, split: int) -> dict[str, list[Outputs]]:
    """Return arm → the outputs of its models in one split, one entry per seed with a finished run.

    For `ENSEMBLE`, the outputs are the mean predictions of the models that the sites train alone.
    """
    study, tests = view.study, test_samples(view.study, split)
    found: dict[str, list[Outputs]] = {}
    alone: dict[int, list[Outputs]] = {}
    for arm in study.arms:
        done = {run.seed for run in view.results.runs[arm.key] if run.split == split}
        seeds = [seed for seed in study.seeds if seed.model in done]
        found[arm.key] = [_of_arm(study, arm, split, seed, tests) for seed in seeds]
        if arm.kind == ALONE:
            for seed, one in zip(seeds, found[arm.key], strict=True):
                alone.setdefault(seed.model, []).append(one)
    task, sites = study.samples.dataset.task, len(study.trainers(split))
    found[ENSEMBLE] = [
        {site: mean_prediction([one[site] for one in models], task) for site in tests}
        for models in alone.values()
        if len(models) == sites  # no ensemble while a site's model is missing
    ]
    return found


def _of_arm(study: Study, arm: Arm, split: int, seed: Seeds, tests: Mapping[int, Samples]) -> Outputs:
    """Return a run's outputs on each site's test samples, in float64.

    With private parameters or personal models, a site that trained is tested with its own model; otherwise all sites
    are tested with the shared one.
    """
    run, trainers = load_run(study, arm, split, seed), study.trainers(split)
    private = run.recipe.parameters.keeps_private or arm.personal
    modules = {k: run.evaluated_of(trainers.index(k)) if private and k in trainers else run.evaluated for k in tests}
    with torch.no_grad():
        return {site: modules[site](x).double() for site, (x, _) in tests.items()}


def _of_row(row: StudyRow, outputs: Mapping[str, list[Outputs]], site: int) -> list[torch.Tensor]:
    """Return the outputs of a row's models on a site; empty for fine-tuned models, which are not stored."""
    arms = () if row.model == TUNED else row.arms[site]
    return [one[site] for arm in arms for one in outputs.get(arm, ())]


def _weighs(study: Study, split: int) -> dict[str, Weigh]:
    """Return metric → function that takes outputs and targets, and returns the metric as a function of multiplicities.

    Matrices, such as the confusion matrix, are left out.
    """
    recipe, dataset = study.recipe, study.samples.dataset
    sums, wholes = functions_of(study, split)
    found: dict[str, Weigh] = {name: partial(_of_sums, metric) for name, metric in sums.items()}
    for name, metric in wholes.items():
        two = dataset.task == "classification" and dataset.num_classes == 2
        if metric.shape == ():
            fast = two and recipe.evaluate.metrics[name] == "auroc"
            found[name] = auroc if fast else partial(_of_all, metric.cells)
    return found


def _of_sums(
    metric: Callable[[torch.Tensor, torch.Tensor], tuple[float, float]], output: torch.Tensor, target: torch.Tensor
) -> Weighted:
    """Return a metric that is a mean of per-sample terms as a function of multiplicities; terms are computed once."""
    each = [metric(output[k : k + 1], target[k : k + 1]) for k in range(len(output))]
    columns = [np.array(column, np.float64) for column in zip(*each, strict=True)]

    def values(times: np.ndarray) -> np.ndarray:
        total, count = ((times * column).sum(axis=1) for column in columns)
        with np.errstate(invalid="ignore"):
            return total / count

    return values


def _of_all(
    cells: Callable[[torch.Tensor, torch.Tensor], np.ndarray], output: torch.Tensor, target: torch.Tensor
) -> Weighted:
    """Return a metric of a whole set of samples as a function of multiplicities, computed anew for each resample."""

    def values(times: np.ndarray) -> np.ndarray:
        found = np.full(len(times), np.nan)
        for place, one in enumerate(times):
            rows = torch.from_numpy(np.repeat(np.arange(len(one)), one))
            if len(rows):
                ((value, defined),) = cells(output[rows], target[rows])
                found[place] = value if defined else np.nan
        return found

    return values


def auroc(output: torch.Tensor, target: torch.Tensor) -> Weighted:
    """Return the function from multiplicities to two-class AUROC, (b,), for n samples with `output` and `target`.

    Multiplicities, (b, n), say how often each sample is in each of b resamples. AUROC is the share of (positive,
    negative) pairs in which the positive has the larger score, ties ½; nan if a class is absent or an output is not
    finite. Samples are sorted once. In a resample, each distinct score adds its number of positives times the number of
    negatives with a lower score, those with the same score counted half.
    """
    scores = ranking_scores(output.double().numpy())
    if not np.isfinite(scores).all():
        return lambda times: np.full(len(times), np.nan)
    order = np.argsort(scores)
    ranked, positive = scores[order], target.numpy()[order] == 1
    starts = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))  # the first sample of each score

    def values(times: np.ndarray) -> np.ndarray:
        drawn = times[:, order]
        ones = np.add.reduceat(np.where(positive, drawn, 0), starts, axis=1)
        zeros = np.add.reduceat(drawn, starts, axis=1) - ones
        below = zeros.cumsum(axis=1) - zeros
        twice = (ones * (2 * below + zeros)).sum(axis=1)
        with np.errstate(invalid="ignore"):
            return twice / (2 * ones.sum(axis=1) * zeros.sum(axis=1))

    return values
