"""Bootstrap over patients: how far a study's values depend on which patients of the sites are tested on.

Units are the groups of samples (patients), or single samples without groups, that any split of a site tests on. Each of
B resamples draws as many units of a site as there are, with replacement. A site's value in a resample is the mean over
splits, and over seeds, of the metric on the split's test samples, each as often as its unit was drawn; splits share the
draw, and so do all rows, so that differences are paired. Intervals are from the 2.5th to the 97.5th percentile. Models
are not trained again: what another training set would change is in the intervals over splits.

Reference: Efron, Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from data_prep.streams import stream
from hpcfed.config.recipe import Seeds
from hpcfed.data.cache import Samples
from hpcfed.evaluation.metrics import ranking_scores, whole_metrics
from hpcfed.loaded import load
from hpcfed.models.losses import ACCURACY, metrics_for
from hpcfed.study.arms import ALONE, ENSEMBLE, Arm
from hpcfed.study.ensemble import mean_prediction, test_samples
from hpcfed.study.measures import StudyMetric

if TYPE_CHECKING:
    from hpcfed.study.plan import Study
    from hpcfed.study.rows import StudyRow
    from hpcfed.study.tables import View

Outputs = Mapping[int, torch.Tensor]
"""Site → output of a model on its test samples, (n, …)."""
Resampled = dict[tuple[str, str], np.ndarray]
"""Row and metric → values of each site, then of the mean of the sites, (N + 1, B); nan where undefined."""
Weighted = Callable[[torch.Tensor, torch.Tensor, np.ndarray], np.ndarray]
"""Output (n, …), target (n, …) and how often each sample is there (B, n) → values (B,)."""


def resample(view: View, metrics: Sequence[StudyMetric], count: int) -> Resampled:
    """Return the values of `count` resamples of each row that has models, by row and metric.

    Raises:
        InputError: a model of the runs cannot be read.
    """
    study, times = view.study, _times(view.study, count)
    found: dict[tuple[str, str], dict[int, list[np.ndarray]]] = {}
    functions = {name: metric for name, metric in _weighted(study).items() if name in [one.name for one in metrics]}
    for split in range(len(study.splits.each)):
        targets = {site: samples[1] for site, samples in test_samples(study, split).items()}
        outputs = _outputs(view, split)
        tests = study.splits.each[split].tests
        numbers = {site: np.flatnonzero(tests & (study.samples.owner == site)) for site in targets}
        for row in view.rows:
            for site, target in targets.items():
                each = _of_row(study, row, outputs, site)
                for name, metric in functions.items():
                    if each:
                        values = np.mean([metric(one, target, times[:, numbers[site]]) for one in each], axis=0)
                        found.setdefault((row.key, name), {}).setdefault(site, []).append(values)
    return {key: _with_mean(values, len(view.sites), count) for key, values in found.items()}


def _with_mean(values: Mapping[int, Sequence[np.ndarray]], sites: int, count: int) -> np.ndarray:
    """Return the means over splits of each site, and the mean of the sites that have values, (N + 1, B)."""
    found = np.full((sites + 1, count), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resamples that no split has a value in
        for site, each in values.items():
            found[site] = np.nanmean(each, axis=0)
    found[-1] = found[sorted(values)].mean(axis=0)
    return found


def _times(study: Study, count: int) -> np.ndarray:
    """Return how often each of the study's n samples is in each resample, (B, n)."""
    samples = study.samples
    tested = np.any([split.tests for split in study.splits.each], axis=0)
    times = np.zeros((count, len(tested)), np.int64)
    for site in range(len(samples.sites)):
        rows = np.flatnonzero(tested & (samples.owner == site))
        units = np.arange(len(rows)) if samples.group is None else samples.group[rows]
        names, unit = np.unique(units, return_inverse=True)
        rng = stream(study.asked.split_seed, f"bootstrap of site {site}")
        times[:, rows] = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), count)[:, unit]
    return times


def _outputs(view: View, split: int) -> dict[str, list[Outputs]]:
    """Return arm → the outputs of its models of a split, one a seed."""
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
        if len(models) == sites  # none where a site's model is not there yet
    ]
    return found


def _of_arm(study: Study, arm: Arm, split: int, seed: Seeds, tests: Mapping[int, Samples]) -> Outputs:
    """Return a run's outputs on each site's test samples, with the site's private parts where there are any."""
    run, trainers = load(study.run_folder(arm, split, seed)), study.trainers(split)
    private = run.recipe.parameters.keeps_private
    modules = {k: run.evaluated_of(trainers.index(k)) if private and k in trainers else run.evaluated for k in tests}
    with torch.no_grad():
        return {site: modules[site](x).double() for site, (x, _) in tests.items()}


def _of_row(study: Study, row: StudyRow, outputs: Mapping[str, list[Outputs]], site: int) -> list[torch.Tensor]:
    """Return the outputs whose mean metric is the row's value on a site; none for a row without stored models."""
    if row.key == ALONE:
        arms = [arm.key for arm in study.arms if arm.kind == ALONE and (arm.site == site) != study.leaves_out]
    else:
        arms = [row.key]
    return [one[site] for arm in arms for one in outputs.get(arm, ())]


def _weighted(study: Study) -> dict[str, Weighted]:
    """Return the study's metrics that are numbers, as functions of samples with multiplicities."""
    recipe, dataset = study.recipe, study.samples.dataset
    sums = metrics_for(recipe.evaluate.metrics, recipe.python_path)
    if dataset.task in ACCURACY:
        sums = {"accuracy": ACCURACY[dataset.task], **sums}
    found: dict[str, Weighted] = {name: _of_sums(metric) for name, metric in sums.items()}
    wholes = whole_metrics(recipe.evaluate.metrics, dataset.task, dataset.num_classes, recipe.python_path)
    for name, metric in wholes.items():
        two = dataset.task == "classification" and dataset.num_classes == 2
        if metric.shape == ():
            fast = two and recipe.evaluate.metrics[name] == "auroc"
            found[name] = _auroc if fast else _of_all(metric.cells)
    return found


def _of_sums(metric: Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]) -> Weighted:
    """Return a metric that is a sum over samples: its terms are computed once."""

    def values(output: torch.Tensor, target: torch.Tensor, times: np.ndarray) -> np.ndarray:
        each = [metric(output[k : k + 1], target[k : k + 1]) for k in range(len(output))]
        total, count = (times @ np.array(column, np.float64) for column in zip(*each, strict=True))
        with np.errstate(invalid="ignore"):
            return total / count

    return values


def _of_all(cells: Callable[[torch.Tensor, torch.Tensor], np.ndarray]) -> Weighted:
    """Return a metric of all samples at once, computed on each resample."""

    def values(output: torch.Tensor, target: torch.Tensor, times: np.ndarray) -> np.ndarray:
        found = np.full(len(times), np.nan)
        for place, one in enumerate(times):
            rows = torch.from_numpy(np.repeat(np.arange(len(one)), one))
            if len(rows):
                ((value, defined),) = cells(output[rows], target[rows])
                found[place] = value if defined else np.nan
        return found

    return values


def _auroc(output: torch.Tensor, target: torch.Tensor, times: np.ndarray) -> np.ndarray:
    """Return the AUROC of two classes: the share of pairs whose positive has the larger score, ties ½."""
    scores, positive = ranking_scores(output.double().numpy()), target.numpy() == 1
    first, second = scores[positive][:, None], scores[~positive][None]
    wins = (first > second) + 0.5 * (first == second)
    right = ((times[:, positive] @ wins) * times[:, ~positive]).sum(axis=1)
    pairs = times[:, positive].sum(axis=1) * times[:, ~positive].sum(axis=1)
    with np.errstate(invalid="ignore"):
        return right / pairs
