"""The tables of a study: methods × sites, differences from the reference, spread over sites, cross-site, and more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hpcfed.lab.report.group import ABSENT
from hpcfed.lab.report.paired import MeanEstimate
from hpcfed.lab.report.tables import Table
from hpcfed.lab.study.cells import difference_text, estimate_text, percentile_text, signed_interval_text, value_text
from hpcfed.lab.study.measures import ACCURACY, LOSS, StudyMetric
from hpcfed.lab.study.plan import Study
from hpcfed.lab.study.statistics import CORRECTED, DELONG, interval
from hpcfed.lab.study.tested import FEW_UNITS, few_events_note, few_units, tested_note
from hpcfed.lab.study.view import MEAN, TOGETHER, View, means_over

CONFIDENCE = "95 %"
TENTH = 10
"""With more sites than this, a table has a column of the worst tenth beside the worst site."""
EXPLAINED = "Student's t, variance corrected for training samples that splits share (Nadeau and Bengio, 2003)"


def results_table(view: View, metric: StudyMetric) -> Table:
    """Return the table of results: a row per method with gradient steps, means and intervals.

    Columns of values: mean of sites; all test samples together, unless each split leaves one site out; each site.
    """
    found = [_shown(view, view.estimates(row, metric)) for row in view.rows]
    rows = [
        (row.title, row.steps, *(estimate_text(one, metric, view.num_values) for one in each))
        for row, each in zip(view.rows, found, strict=True)
    ]
    cells = [one for each in found for one in each]
    note = _note(view, metric) + _methods(cells) + _some_splits(view, cells) + _one_value(view, cells)
    note += _unmeasured(view, metric) + _together(view, metric) + _positive(view.study, metric)
    note += tested_note(view.study, metric)
    return Table("By site", _header(view, metric, "Gradient steps"), tuple(rows), note)


def differences_table(view: View, metric: StudyMetric) -> Table | None:
    """Return the table of differences from the reference, paired by split, in the columns of values of `results_table`.

    Cells whose interval excludes zero are bold. None if the reference is the only row.
    """
    reference = view.reference
    rows: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    cells: list[MeanEstimate | None] = []
    for row in view.rows:
        if row is reference:
            continue
        found = _shown(view, view.differences(row, metric))
        strong |= {(len(rows), column) for column, one in enumerate(found, 1) if one is not None and one.is_clear}
        rows.append((row.title, *(difference_text(one, metric) for one in found)))
        cells += found
    if not rows:
        return None
    points = " in points" if metric.is_percentage else ""
    note = (
        f"Each split's value minus {reference.title}'s of the same split{points}: mean and {CONFIDENCE} interval; bold "
        "where zero lies outside. With so many comparisons some are bold by chance."
    )
    note += _methods(cells) + _one_value(view, cells) + few_events_note(view.study)
    header = _header(view, metric)
    return Table(f"Difference from {reference.title}", header, tuple(rows), note, frozenset(strong))


def spread_table(view: View, metric: StudyMetric) -> Table:
    """Return the table of the spread over sites: each method's mean, worst and best site, range, standard deviation."""
    rows, measured = [], view.measured(metric)
    cells: list[MeanEstimate | None] = []
    for row in view.rows:
        means = np.where(measured, means_over(view.site_values(row, metric)), math.nan)
        mean, whole = view.estimates(row, metric)[-2:]
        cells.append(mean)
        rows.append((
            row.title,
            estimate_text(mean, metric, view.num_values),
            *_extremes(view, means, metric),
            *([_worst_tenth(means, metric)] if measured.sum() > TENTH else []),
            value_text(float(np.nanstd(means)) if np.isfinite(means).any() else math.nan, metric),
            value_text(whole.mean if whole is not None and not view.study.leaves_out else math.nan, metric),
        ))  # fmt: skip
    tenth = ("Worst tenth",) if measured.sum() > TENTH else ()
    extremes = ("Worst site", "Best site", "Range", *tenth, "Deviation over sites")
    header = ("Method", view.mean_title(metric), *extremes, TOGETHER)
    note = (
        "Worst and best site, range and deviation (divided by the number of sites) are of the means over splits, of "
        f"the sites that means are over.{_together(view, metric)}"
    )
    if metric.without_direction:
        note += f" {metric.without_direction}: no worst and best site."
    note += _methods(cells) + _some_splits(view, cells) + _one_value(view, cells) + tested_note(view.study, metric)
    return Table("Over sites", header, tuple(rows), note)


def cross_table(view: View, metric: StudyMetric) -> Table | None:
    """Return the cross-site table: a row per site's model, a column per test site; None if no site trains alone."""
    matrix = view.cross_values(metric)
    if matrix is None:
        return None
    rows = tuple(
        (f"{name} alone", *(value_text(value, metric) for value in line))
        for name, line in zip(view.sites, matrix, strict=True)
    )
    note = "The model of the row's site on the test samples of the column's, mean over splits and seeds."
    if view.study.leaves_out:
        note = "The model of the row's site, where the column's was left out: its training samples are all but those."
    return Table(f"Cross-site {metric.in_text}", ("Trained at", *view.sites), rows, note)


def bootstrap_table(view: View, metric: StudyMetric) -> Table | None:
    """Return the table of intervals over patients: a row per method with its means and difference from the reference.

    Methods without resampled values are left out; None if the reference has none.
    """
    reference, resampled = view.reference, view.resampled or {}
    theirs = resampled.get((reference.key, metric.name))
    if theirs is None:
        return None
    rows, measured = [], view.measured(metric)
    for row in view.rows:
        found = resampled.get((row.key, metric.name))
        if found is None:
            continue
        own = view.site_values(row, metric)
        means = means_over(np.vstack([own, view.over_sites(own, measured)]))
        cells = [
            percentile_text(float(mean), interval(values), metric) for mean, values in zip(means, found, strict=True)
        ]
        apart = ABSENT if row is reference else signed_interval_text(interval(found[-1] - theirs[-1]), metric)
        rows.append((row.title, cells[-1], apart, *cells[:-1]))
    unit = "patients or groups" if view.study.samples.group is not None else "samples"
    note = (
        f"Mean over splits, and 95 % percentile interval over {view.study.options.bootstrap:,} resamples of the {unit} "
        "that each site is tested on, with the models as they are: other test samples are in it, other training "
        f"samples are not. {ABSENT}: more than one resample in 20 has no value. Minus {reference.title}: of the paired "
        f"difference. [{ABSENT}]: all resamples have one value, which says nothing of other {unit}."
    ) + _unmeasured(view, metric)
    if few := few_units(view.study):
        note += f" Fewer than {FEW_UNITS} {unit} are tested on at {', '.join(few)}: intervals there are too narrow."
    header = ("Method", view.mean_title(metric), f"{MEAN}, minus {reference.title}", *view.sites)
    return Table("Bootstrap over patients", header, tuple(rows), note)


def tuning_table(study: Study) -> Table | None:
    """Return the table of chosen values by arm, with the number of splits that chose each; None before tuning ends."""
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
    metric, fraction = study.metrics[0], study.options.test_fraction
    by = "loss" if metric.without_direction else metric.in_text
    ties = "" if by == LOSS else "; ties: the smaller loss"
    note = (
        f"By {by} on an inner holdout of each split's training samples ({100 * fraction:g} %), mean over sites, seed "
        f"{study.seeds[0].model}{ties}. The split's test samples had no part."
    )
    if metric.without_direction:
        note = f"{metric.without_direction}, so by loss. {note}"
    elif by_loss := study.tuned.by_loss(metric):
        note += f" {by_loss}."
    return Table("Chosen values", ("Arm", "Values, and the splits that chose them"), tuple(rows), note)


def _extremes(view: View, means: np.ndarray, metric: StudyMetric) -> tuple[str, str, str]:
    """Return the worst site, the best site and the range as text, from the sites' means (N,), nan if undefined.

    All three are dashes if the metric is undefined; the sites also if its direction is unknown.
    """
    if not np.isfinite(means).any():
        return ABSENT, ABSENT, ABSENT
    low, high = int(np.nanargmin(means)), int(np.nanargmax(means))
    spread = value_text(float(means[high] - means[low]), metric)
    if metric.larger_is_better is None:
        return ABSENT, ABSENT, spread
    worst, best = (low, high) if metric.larger_is_better else (high, low)
    shown = [f"{view.sites[k]} {value_text(float(means[k]), metric)}" for k in (worst, best)]
    return shown[0], shown[1], spread


def _worst_tenth(means: np.ndarray, metric: StudyMetric) -> str:
    """Return, as text, the mean over the worst tenth of the sites (rounded up), from all sites' means, (N,).

    A dash if no mean is finite, or if the metric's direction is unknown.
    """
    found = np.sort(means[np.isfinite(means)])
    if metric.larger_is_better is None or not len(found):
        return ABSENT
    tenth = -(-len(found) // 10)
    return value_text(float((found[:tenth] if metric.larger_is_better else found[-tenth:]).mean()), metric)


def _shown(view: View, estimates: list[MeanEstimate | None]) -> list[MeanEstimate | None]:
    """Return a row's estimates in the order of the columns: mean of sites, all samples together, each site.

    Means come first, so that they are visible however many sites follow. If each split leaves a site out, there is no
    column of all samples together.
    """
    sites, means = estimates[: len(view.sites)], estimates[len(view.sites) :]
    return [*(means[:-1] if view.study.leaves_out else means), *sites]


def _header(view: View, metric: StudyMetric, *more: str) -> tuple[str, ...]:
    together = () if view.study.leaves_out else (TOGETHER,)
    return ("Method", *more, view.mean_title(metric), *together, *view.sites)


def _methods(cells: Sequence[MeanEstimate | None]) -> str:
    """Return a sentence on how the intervals in the cells were computed; "" if no cell has one."""
    found = dict.fromkeys(one.method for one in cells if one is not None and one.interval is not None and one.method)
    names = ["DeLong" if method == DELONG else method.replace(CORRECTED, EXPLAINED) for method in found]
    return f" Intervals of {CONFIDENCE}: {'; '.join(names)}." if names else ""


def _together(view: View, metric: StudyMetric) -> str:
    """Return a sentence on the column of all samples together; "" if each split leaves one site out."""
    if view.study.leaves_out:
        return ""
    models = "" if metric.name == ACCURACY else "; – where sites have models of their own"
    return f" {TOGETHER}: the metric of all sites' test samples as one set, mean over splits{models}."


def _note(view: View, metric: StudyMetric) -> str:
    study, unit = view.study, " in %" if metric.is_percentage else ""
    seeds = f", each a mean over {len(study.seeds)} seeds" if len(study.seeds) > 1 else ""
    if study.leaves_out:
        return f"{metric.title}{unit} on the site that was left out{seeds}. {MEAN}: with its interval over sites."
    count = len(study.splits.each)
    if count == 1:
        return f"{metric.title}{unit} of one split{seeds}: no interval over splits; --splits asks for more."
    return f"{metric.title}{unit}, mean over {count} splits{seeds}, with its {CONFIDENCE} interval."


def _positive(study: Study, metric: StudyMetric) -> str:
    """Return a sentence that names the positive class; "" if the metric is not the average precision of two classes."""
    labels = study.samples.labels
    if study.recipe.evaluate.metrics.get(metric.name) != "average-precision" or len(labels) != 2:
        return ""
    return f" Of the class {labels[1]!r}, the positive one."


def _some_splits(view: View, cells: Sequence[MeanEstimate | None]) -> str:
    """Return a sentence on cells such as ``1 of 5: 81.2``, defined in only some splits; "" without such cells."""
    splits = view.num_values
    some = any(one is not None and one.count < splits for one in cells)
    mean = f"{MEAN.lower()}: of those in which its sites have a value"
    return f" 1 of {splits}: defined in so many splits; {mean}." if some else ""


def _one_value(view: View, cells: Sequence[MeanEstimate | None]) -> str:
    """Return a sentence on cells that have no interval because all their values are equal; "" without such cells."""
    what = "sites" if view.study.leaves_out else "splits"
    without = any(one is not None and one.interval is None and one.count > 1 for one in cells)
    return f" A number without interval is the same in all {what}." if without else ""


def _unmeasured(view: View, metric: StudyMetric) -> str:
    """Return sentences on sites left out of all means, and on labels that test samples lack; "" without such sites and
    labels.
    """
    measured, labels = view.measured(metric), view.study.tested_labels
    names = [name for name, kept in zip(view.sites, measured, strict=True) if not kept]
    missing = ""
    if labels is not None and metric.needs_all_labels and (found := labels.missing(view.sites)):
        missing = f" Labels that tested samples lack: {found}."
    if not any(view.results.runs.values()) or not names:
        return missing
    if not found_any(view, metric):
        reason = "" if missing or not metric.undefined else f" ({metric.undefined})"
        return f" {metric.title} is defined in no split at any site{reason}.{missing}"
    others = (
        f"means are over {measured.sum()} of {len(measured)} sites" if measured.any() else "there is no mean of sites"
    )
    why = "tested samples of one class in a split, or no value in a split of some method"
    return f" {', '.join(names)}: {why}; so {others}, the same for all methods.{missing}"


def found_any(view: View, metric: StudyMetric) -> bool:
    """Whether some row has a finite value of the metric at some site in some split."""
    return any(np.isfinite(view.site_values(row, metric)).any() for row in view.rows)
