"""The tables of a study, as text: methods × sites, differences from the reference, the spread over sites, cross-site.

Values of a split are means over its seeds; intervals are of the mean over splits (`hpcfed.study.statistics`). Where
each split leaves one site out, a site has one value, and intervals are those of the mean over sites.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfed.errors import counted
from hpcfed.report.group import ABSENT
from hpcfed.report.paired import MeanEstimate
from hpcfed.report.tables import Table
from hpcfed.study.arms import ALONE
from hpcfed.study.measured import StudyResults
from hpcfed.study.measures import StudyMetric, metrics_of
from hpcfed.study.plan import Study
from hpcfed.study.rows import StudyRow, reference_of
from hpcfed.study.statistics import corrected, interval

if TYPE_CHECKING:
    from hpcfed.study.bootstrap import Resampled

CONFIDENCE = "95 %"
MEAN = "Mean of sites"
MOST_COUNTED = 12
"""Most sites whose numbers of tested samples stand below each table; the table of the sites has all."""
FEW_EVENTS = 10
"""Events of a site in a split below which a concordance, and differences of it, are no ground for a claim."""
FEW_UNITS = 10
"""Patients below which a percentile interval over patients is far too narrow."""
CORRECTED = "Student's t; variance corrected for training samples that splits share: Nadeau and Bengio, 2003"


@dataclass(frozen=True)
class View:
    """What all tables are made of; `resampled` if patients were resampled."""

    study: Study
    results: StudyResults
    rows: Sequence[StudyRow]
    resampled: Resampled | None = None

    @property
    def sites(self) -> list[str]:
        """The names of the sites, (N,)."""
        return self.study.samples.sites

    def site_values(self, row: StudyRow, metric: StudyMetric) -> np.ndarray:
        """Return a row's values, (N, J); nan where there is none."""
        return np.array([row.values(metric.name, k) for k in range(len(self.sites))])

    def measured(self, metric: StudyMetric) -> np.ndarray:
        """Return the sites that means are over, (N,) bool: all but those without a value in any row and split.

        A site of one class has no AUROC, whatever the model.
        """
        found = np.any([np.isfinite(self.site_values(row, metric)).any(axis=1) for row in self.rows], axis=0)
        return found if found.any() else ~found

    def over_sites(self, values: np.ndarray, measured: np.ndarray) -> np.ndarray:
        """Return the mean over the measured sites of each split, (J,), from values (N, J); nan where one has none.

        Where each split leaves one site out, it is that site's value.
        """
        if self.study.leaves_out:
            return np.diagonal(values)
        return values[measured].mean(axis=0)


def results_table(view: View, metric: StudyMetric) -> Table:
    """A row a method, a column a site, and the mean of the sites: mean, and half of the interval's width."""
    measured = view.measured(metric)
    found = [_estimates(view, view.site_values(row, metric), measured) for row in view.rows]
    rows = [(row.title, row.steps, *_texts(view, each, metric)) for row, each in zip(view.rows, found, strict=True)]
    cells = [one for each in found for one in each]
    note = _note(view, metric) + _some_splits(view, cells) + _one_value(view, cells) + _unmeasured(view, metric)
    note += _positive(view.study, metric) + tested_note(view.study, metric)
    return Table("By site", _header(view, "Gradient steps"), tuple(rows), note)


def differences_table(view: View, metric: StudyMetric) -> Table | None:
    """The same of each method's differences from the reference, split by split; bold where zero lies outside.

    None if there is no other row.
    """
    reference = reference_of(view.study, view.rows)
    theirs, measured = view.site_values(reference, metric), view.measured(metric)
    rows: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    cells: list[MeanEstimate | None] = []
    for row in view.rows:
        if row is reference:
            continue
        found = _estimates(view, view.site_values(row, metric) - theirs, measured)
        strong |= {(len(rows), column) for column, one in enumerate(found, 1) if one is not None and one.is_clear}
        rows.append((row.title, *(_difference_text(one, metric) for one in found)))
        cells += found
    if not rows:
        return None
    points = " in points" if metric.is_share else ""
    note = (
        f"Each split's value minus {reference.title}'s of the same split{points}: mean and {CONFIDENCE} interval, "
        "corrected as above; bold where zero lies outside. With so many comparisons some are bold by chance."
    )
    note += _one_value(view, cells) + few_events_note(view.study)
    return Table(f"Difference from {reference.title}", _header(view), tuple(rows), note, frozenset(strong))


def spread_table(view: View, metric: StudyMetric) -> Table:
    """A row a method: the mean of the sites, the worst site, and the range over sites."""
    rows, measured = [], view.measured(metric)
    cells: list[MeanEstimate | None] = []
    for row in view.rows:
        values = view.site_values(row, metric)
        means, mean = _means(values), _estimates(view, values, measured)[-1]
        cells.append(mean)
        whole = corrected(row.whole(metric.name), 0.0) if not view.study.leaves_out else None
        rows.append((
            row.title,
            _texts(view, [mean], metric)[0],
            *_extremes(view, means, metric),
            _plain(float(np.nanstd(means)) if np.isfinite(means).any() else math.nan, metric),
            _plain(whole.mean if whole is not None else math.nan, metric),
        ))  # fmt: skip
    header = ("Method", MEAN, "Worst site", "Best site", "Range", "Deviation over sites", "All samples together")
    note = (
        "Worst and best site, range and deviation (divided by the number of sites) are of the means over splits. All "
        "samples together: the metric of the sites' test samples as one set, mean over splits; – where sites have "
        "models of their own."
    )
    note += _some_splits(view, cells) + _one_value(view, cells) + tested_note(view.study, metric)
    return Table("Over sites", header, tuple(rows), note)


def cross_table(view: View, metric: StudyMetric) -> Table | None:
    """A row for each site's model, a column for each site it is tested on; None if sites are not trained alone."""
    matrix = cross_matrix(view, metric)
    if matrix is None:
        return None
    rows = tuple(
        (f"{name} alone", *(_plain(value, metric) for value in line))
        for name, line in zip(view.sites, matrix, strict=True)
    )
    note = "The model of the row's site on the test samples of the column's, mean over splits and seeds."
    if view.study.leaves_out:
        note = "The model of the row's site, where the column's was left out: its training samples are all but those."
    return Table(f"Cross-site {metric.in_text}", ("Trained at", *view.sites), rows, note)


def cross_matrix(view: View, metric: StudyMetric) -> np.ndarray | None:
    """Return the mean over splits of site i's model on site j, (N, N); None if sites are not trained alone."""
    arms = [arm for arm in view.study.arms if arm.kind == ALONE]
    if not arms:
        return None
    count, sites = len(view.study.splits.each), range(len(view.sites))
    values = np.array([[view.results.values(arm.key, metric.name, k, count) for k in sites] for arm in arms])
    return _means(values)


def tidy(view: View, metrics: Sequence[StudyMetric]) -> list[dict[str, Any]]:
    """Return the rows of ``results.csv``: a method, site and metric each, with numbers in full."""
    reference, found = reference_of(view.study, view.rows), []
    for metric in metrics:
        theirs, measured = view.site_values(reference, metric), view.measured(metric)
        for row in view.rows:
            values = view.site_values(row, metric)
            pairs = zip(*(_estimates(view, each, measured) for each in (values, values - theirs)), strict=True)
            for site, (own, apart) in zip([*view.sites, MEAN], pairs, strict=True):
                found.append({
                    "method": row.title, "steps": row.steps, "metric": metric.name, "site": site,
                    **_numbers("", own), **_numbers("difference_", apart), "splits": own.count if own else 0,
                })  # fmt: skip
    return found


def raw(view: View) -> list[dict[str, Any]]:
    """Return the rows of ``values.csv``: a run, model and site each, with every metric."""
    return [
        {"arm": key, "split": run.split, "seed": run.seed, "model": model, "site": view.sites[site], **values}
        for key, runs in view.results.runs.items()
        for run in runs
        for (model, site), values in run.sites.items()
    ]


def splits_table(study: Study) -> Table:
    """A row a site: samples, the labels among them, and how many are tested on in each split."""
    samples, held = study.samples, _held(study)
    labels = [] if samples.label is None else list(samples.labels)
    rows = []
    for k, name in enumerate(samples.sites):
        own = samples.owner == k
        counts = [] if samples.label is None else np.bincount(samples.label[own], minlength=len(labels)).tolist()
        rows.append((name, f"{own.sum():,}", *(f"{count:,}" for count in counts), _range(held[:, k])))
    header = ("Site", "Samples", *labels, "Tested in a split")
    return Table("Sites", header, tuple(rows))


def _positive(study: Study, metric: StudyMetric) -> str:
    """Return a sentence on the class that average precision is of, where there are two; else ""."""
    labels = study.samples.labels
    if study.recipe.evaluate.metrics.get(metric.name) != "average-precision" or len(labels) != 2:
        return ""
    return f" Of the class {labels[1]!r}, the positive one."


def tested_note(study: Study, metric: StudyMetric) -> str:
    """Return a sentence on how many samples of each site are tested on, which sites have one class, and their events.

    Of more than `MOST_COUNTED` sites those of one class alone are named; "" if there are none.
    """
    held, alone, events = _held(study), _one_class(study), _events(study)
    said = []
    for k, name in enumerate(study.samples.sites):
        if alone[k] or len(study.samples.sites) <= MOST_COUNTED:
            of_one = f" (one class in {alone[k]} of {(held[:, k] > 0).sum()})" if alone[k] else ""
            of_events = "" if events is None else f" ({_events_text(events[held[:, k] > 0, k])})"
            said.append(f"{name} {_range(held[:, k])}{of_one}{of_events}")
    doubt = ""
    if any(alone) and metric.best_by_one_class:
        doubt = " Of one class, a model that always says it is right in all; means count each site alike."
    return (f" Tested samples of a split: {', '.join(said)}.{doubt}" if said else "") + few_events_note(study)


def few_events_note(study: Study) -> str:
    """Return a sentence on the sites where a split tests on fewer than `FEW_EVENTS` events; "" without any."""
    held, events = _held(study), _events(study)
    if events is None:
        return ""
    few = [
        name
        for k, name in enumerate(study.samples.sites)
        if events[held[:, k] > 0, k].min(initial=FEW_EVENTS) < FEW_EVENTS
    ]
    return f" Fewer than {FEW_EVENTS} events at {', '.join(few)}: numbers only, no claim." if few else ""


def _events(study: Study) -> np.ndarray | None:
    """Return how many events of each site each split tests on, (J, N); None for other tasks than survival."""
    samples = study.samples
    if samples.label is None or samples.dataset.task != "survival":
        return None
    return _counts(study, samples.label == 1)


def _events_text(counts: np.ndarray) -> str:
    """Return the events of a site in the splits that test on it, (J,), as text."""
    low, high = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
    return counted(high, "event") if low == high else f"{low:,} to {high:,} events"


def _held(study: Study) -> np.ndarray:
    """Return how many samples of each site each split tests on, (J, N)."""
    return _counts(study, np.ones(len(study.samples.owner), bool))


def _counts(study: Study, kept: np.ndarray) -> np.ndarray:
    """Return how many of the samples `kept`, (n,) bool, of each site each split tests on, (J, N)."""
    owner, sites = study.samples.owner, len(study.samples.sites)
    return np.array([np.bincount(owner[one.tests & kept], minlength=sites) for one in study.splits.each])


def _range(counts: np.ndarray) -> str:
    """Return the numbers of tested samples of a site, (J,), as text; splits that leave it out do not count."""
    some = counts[counts > 0]
    low, high = (some.min(), some.max()) if len(some) else (0, 0)
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _one_class(study: Study) -> list[int]:
    """Return in how many splits each site's tested samples are of one class, (N,); zeros for other tasks."""
    samples, sites = study.samples, range(len(study.samples.sites))
    if samples.label is None or samples.dataset.task != "classification":
        return [0 for _ in sites]
    of_sites = [[samples.label[one.tests & (samples.owner == k)] for one in study.splits.each] for k in sites]
    return [sum(len(np.unique(labels)) == 1 for labels in each) for each in of_sites]


def _few_units(study: Study) -> list[str]:
    """Return the sites with fewer than `FEW_UNITS` patients, or samples, to resample, with their numbers."""
    tested = np.any([split.tests for split in study.splits.each], axis=0)
    group = np.arange(len(tested)) if study.samples.group is None else study.samples.group
    counts = [len(np.unique(group[tested & (study.samples.owner == k)])) for k in range(len(study.samples.sites))]
    return [f"{name} ({n})" for name, n in zip(study.samples.sites, counts, strict=True) if n < FEW_UNITS]


def bootstrap_table(view: View, metric: StudyMetric) -> Table | None:
    """A row a method: means over splits with intervals over patients, and the difference from the reference."""
    reference = reference_of(view.study, view.rows)
    theirs = (view.resampled or {}).get((reference.key, metric.name))
    if view.resampled is None or theirs is None:
        return None
    rows, measured = [], view.measured(metric)
    for row in view.rows:
        found = view.resampled.get((row.key, metric.name))
        if found is None:
            continue
        own = view.site_values(row, metric)
        means = _means(np.vstack([own, view.over_sites(own, measured)]))
        cells = [_ranged(float(mean), interval(values), metric) for mean, values in zip(means, found, strict=True)]
        apart = ABSENT if row is reference else _ranged(None, interval(found[-1] - theirs[-1]), metric)
        rows.append((row.title, *cells, apart))
    unit = "patients or groups" if view.study.samples.group is not None else "samples"
    note = (
        f"Mean over splits, and 95 % percentile interval over {view.study.asked.bootstrap:,} resamples of the {unit} "
        "that each site is tested on, with the models as they are: other test samples are in it, other training "
        f"samples are not. {ABSENT}: one resample in 20 or more has no value. Last column: of the paired difference. "
        f"[{ABSENT}]: all resamples have one value, which says nothing of other {unit}."
    ) + _unmeasured(view, metric)
    if few := _few_units(view.study):
        note += f" Fewer than {FEW_UNITS} {unit} are tested on at {', '.join(few)}: intervals there are too narrow."
    header = (*_header(view), f"{MEAN}, minus {reference.title}")
    return Table("Bootstrap over patients", header, tuple(rows), note)


def bootstrap_records(view: View, metrics: Sequence[StudyMetric]) -> list[dict[str, Any]]:
    """Return the rows of ``bootstrap.csv``: a method, metric and site each, with intervals in full."""
    reference, found = reference_of(view.study, view.rows), []
    for metric in metrics:
        for row in view.rows:
            values = (view.resampled or {}).get((row.key, metric.name))
            theirs = (view.resampled or {}).get((reference.key, metric.name))
            if values is None or theirs is None:
                continue
            for site, own, other in zip([*view.sites, MEAN], values, theirs, strict=True):
                low, high = interval(own) or (None, None)
                low_apart, high_apart = interval(own - other) or (None, None)
                found.append({
                    "method": row.title, "metric": metric.name, "site": site, "low": low, "high": high,
                    "difference_low": low_apart, "difference_high": high_apart,
                    "resamples": int(np.isfinite(own).sum()),
                })  # fmt: skip
    return found


def _ranged(mean: float | None, found: tuple[float, float] | None, metric: StudyMetric) -> str:
    """Return a mean and its interval as text: ``0.81 [0.70, 0.90]``; ``0.00 [–]`` if all resamples have one value."""
    if found is None or (mean is not None and not math.isfinite(mean)):
        return ABSENT
    form = _signed if mean is None else _plain
    if mean is not None and found[0] == found[1]:
        return f"{_plain(mean, metric)} [{ABSENT}]"
    ends = f"[{form(found[0], metric)},\u00a0{form(found[1], metric)}]"
    return ends if mean is None else f"{_plain(mean, metric)} {ends}"


def tuning_table(study: Study) -> Table | None:
    """A row an arm: how many splits chose which values; None if nothing was tuned."""
    if study.tuned is None:
        return None
    rows = []
    for arm in study.arms:
        own = [
            study.tuned.chosen[arm.key, k] for k in range(len(study.splits.each)) if (arm.key, k) in study.tuned.chosen
        ]
        counts = Counter(one.point.label for one in own)
        if counts:
            rows.append(
                (arm.title, "; ".join(f"{label} ({count} of {len(own)})" for label, count in counts.most_common()))
            )
    metric = metrics_of(study.recipe, study.samples.dataset.task)[0]
    note = (
        f"By {metric.in_text} on an inner holdout of each split's training samples ({100 * study.asked.fraction:g} %), "
        f"mean over sites, seed {study.seeds[0].model}; ties: the smaller loss. The split's test samples had no part."
    )
    return Table("Chosen values", ("Arm", "Values, and the splits that chose them"), tuple(rows), note)


def tuning_records(study: Study) -> list[dict[str, Any]]:
    """Return the rows of ``tuning-points.csv``: an arm, split and point each."""
    if study.tuned is None:
        return []
    return [
        {
            "arm": one.arm, "split": one.split, "point": one.point.label, "value": _known(one.value),
            "loss": _known(one.loss), "chosen": int(study.tuned.chosen[one.arm, one.split] is one),
        }
        for one in study.tuned.candidates
    ]  # fmt: skip


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _estimates(view: View, values: np.ndarray, measured: np.ndarray) -> list[MeanEstimate | None]:
    """Return the estimate of each site, and of the mean of the sites, from values (N, J)."""
    ratio = view.study.ratio
    found = [corrected(line.tolist(), ratio) for line in values]
    return [*found, corrected(view.over_sites(values, measured).tolist(), ratio)]


def _means(values: np.ndarray) -> np.ndarray:
    """Return means over the last axis, nan left out; nan where there is none."""
    kept = np.isfinite(values)
    total = np.where(kept, values, 0.0).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        return total / kept.sum(axis=-1)


def _extremes(view: View, means: np.ndarray, metric: StudyMetric) -> tuple[str, str, str]:
    """Return the worst and the best site, with their values, and the range, from means (N,)."""
    if metric.larger_is_better is None or not np.isfinite(means).any():
        return ABSENT, ABSENT, ABSENT
    low, high = int(np.nanargmin(means)), int(np.nanargmax(means))
    worst, best = (low, high) if metric.larger_is_better else (high, low)
    shown = [f"{view.sites[k]} {_plain(float(means[k]), metric)}" for k in (worst, best)]
    return shown[0], shown[1], _plain(float(means[high] - means[low]), metric)


def _header(view: View, *more: str) -> tuple[str, ...]:
    return ("Method", *more, *view.sites, MEAN)


def _note(view: View, metric: StudyMetric) -> str:
    study, unit = view.study, " in %" if metric.is_share else ""
    seeds = f", each a mean over {len(study.seeds)} seeds" if len(study.seeds) > 1 else ""
    if study.leaves_out:
        return (
            f"{metric.title}{unit} on the site that was left out{seeds}. {MEAN}: ± half of its {CONFIDENCE} interval "
            f"over sites ({CORRECTED})."
        )
    count = len(study.splits.each)
    if count == 1:
        return f"{metric.title}{unit} of one split{seeds}: no interval; --splits asks for more."
    return f"{metric.title}{unit}, mean over {count} splits{seeds}, ± half of its {CONFIDENCE} interval ({CORRECTED})."


def _some_splits(view: View, cells: Sequence[MeanEstimate | None]) -> str:
    """Return a sentence on cells that are defined in some splits alone, "" without any."""
    splits = len(view.study.splits.each)
    if view.study.leaves_out or not any(one is not None and one.count < splits for one in cells):
        return ""
    return f" 1 of {splits}: defined in so many splits."


def _one_value(view: View, cells: Sequence[MeanEstimate | None]) -> str:
    """Return a sentence on cells of several values without interval, "" without any."""
    what = "sites" if view.study.leaves_out else "splits"
    without = any(one is not None and one.half_width is None and one.count > 1 for one in cells)
    return f" A number without interval is the same in all {what}." if without else ""


def _unmeasured(view: View, metric: StudyMetric) -> str:
    """Return a sentence on the sites that means leave out, "" for none."""
    names = [name for name, kept in zip(view.sites, view.measured(metric), strict=True) if not kept]
    return (
        f" {metric.title} is defined in no split at {', '.join(names)}: means are over the other sites."
        if names
        else ""
    )


def _plain(value: float, metric: StudyMetric) -> str:
    if not math.isfinite(value):
        return ABSENT
    return f"{100 * value:.1f}" if metric.is_share else f"{value:.3f}"


def _texts(view: View, values: Sequence[MeanEstimate | None], metric: StudyMetric) -> list[str]:
    """Return estimates as text, with the number of splits where some have no value: ``1 of 5: 0.375``."""
    splits = 0 if view.study.leaves_out else len(view.study.splits.each)
    return [
        f"{value.count} of {splits}: {_text(value, metric)}" if value and value.count < splits else _text(value, metric)
        for value in values
    ]


def _text(value: MeanEstimate | None, metric: StudyMetric) -> str:
    if value is None:
        return ABSENT
    width = "" if value.half_width is None else f"\u00a0±\u00a0{_plain(value.half_width, metric)}"
    return f"{_plain(value.mean, metric)}{width}"


def _difference_text(value: MeanEstimate | None, metric: StudyMetric) -> str:
    if value is None:
        return ABSENT
    shown = (
        [value.mean]
        if value.half_width is None
        else [value.mean, value.mean - value.half_width, value.mean + value.half_width]
    )
    words = [_signed(one, metric) for one in shown]
    return words[0] if len(words) == 1 else f"{words[0]} [{words[1]},\u00a0{words[2]}]"


def _signed(value: float, metric: StudyMetric) -> str:
    text = f"{100 * value:+.1f}" if metric.is_share else f"{value:+.3f}"
    return text.replace("-", "−") if float(text) else "0"


def _numbers(prefix: str, value: MeanEstimate | None) -> dict[str, float | None]:
    """Return mean and interval as columns."""
    if value is None:
        return dict.fromkeys((f"{prefix}mean", f"{prefix}low", f"{prefix}high"))
    low, high = (
        (None, None) if value.half_width is None else (value.mean - value.half_width, value.mean + value.half_width)
    )
    return {f"{prefix}mean": value.mean, f"{prefix}low": low, f"{prefix}high": high}
