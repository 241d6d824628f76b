"""Numbers of test samples, classes and events by site and split, as a table and as notes below tables."""

from __future__ import annotations

import numpy as np

from hpcfed.errors import counted, first_of
from hpcfed.lab.report.tables import Table
from hpcfed.lab.study.labels import MOST_NAMED, TestedLabels
from hpcfed.lab.study.measures import StudyMetric
from hpcfed.lab.study.plan import Study

MOST_COUNTED = 12
"""Most sites whose numbers of tested samples are noted below each table; the table of sites lists all."""
FEW_EVENTS = 10
"""Number of a site's events in a split below which a concordance, or a difference of two, supports no claim."""
FEW_UNITS = 10
"""Number of patients below which a percentile interval over patients is far too narrow."""


def splits_table(study: Study) -> Table:
    """Return the table of sites: numbers of all samples, of samples with each label, and of test samples in a split."""
    samples, tested = study.samples, tested_sizes(study)
    labels = [] if samples.label is None else list(samples.labels)
    rows = []
    for k, name in enumerate(samples.sites):
        own = samples.owner == k
        counts = [] if samples.label is None else np.bincount(samples.label[own], minlength=len(labels)).tolist()
        rows.append((name, f"{own.sum():,}", *(f"{count:,}" for count in counts), tested[k]))
    header = ("Site", "Samples", *labels, "Tested in a split")
    return Table("Sites", header, tuple(rows))


def tested_sizes(study: Study) -> list[str]:
    """Return each site's number of test samples in a split as text, (N,): ``12``, or ``10 to 14`` if splits differ."""
    return [_range(column) for column in tested_counts(study).T]


def tested_note(study: Study, metric: StudyMetric) -> str:
    """Return a note on each site's test samples: how many, whether of a single class, and how many events.

    With more than `MOST_COUNTED` sites, only those with a single class are named. If there are such sites, and always
    predicting the single class gives the best value of `metric`, the note warns of it. "" if there is nothing to note.
    """
    held, labels, events = tested_counts(study), study.tested_labels, _events(study)
    said = []
    for k, name in enumerate(study.samples.sites):
        of_one = "" if labels is None else _one_class(labels, k)
        if of_one or len(study.samples.sites) <= MOST_COUNTED:
            of_events = "" if events is None else f" ({_events_text(events[held[:, k] > 0, k])})"
            said.append(f"{name} {_range(held[:, k])}{of_one}{of_events}")
    doubt = ""
    if labels is not None and labels.of_one_class.all(axis=2).any() and metric.best_by_one_class:
        doubt = " Of one class, a model that always says it is right in all: such sites are in no mean."
    return (f" Tested samples of a split: {', '.join(said)}.{doubt}" if said else "") + few_events_note(study)


def few_events_note(study: Study) -> str:
    """Return a sentence naming the sites with fewer than `FEW_EVENTS` test events in some split; "" if none has."""
    held, events = tested_counts(study), _events(study)
    if events is None:
        return ""
    few = [
        name
        for k, name in enumerate(study.samples.sites)
        if events[held[:, k] > 0, k].min(initial=FEW_EVENTS) < FEW_EVENTS
    ]
    return f" Fewer than {FEW_EVENTS} events at {', '.join(few)}: numbers only, no claim." if few else ""


def few_units(study: Study) -> list[str]:
    """Return ``site (n)`` for each site with n tested patients, fewer than `FEW_UNITS`.

    If samples have no groups, each sample counts as a patient.
    """
    tested = np.any([split.tests for split in study.splits.each], axis=0)
    group = np.arange(len(tested)) if study.samples.group is None else study.samples.group
    counts = [len(np.unique(group[tested & (study.samples.owner == k)])) for k in range(len(study.samples.sites))]
    return [f"{name} ({n})" for name, n in zip(study.samples.sites, counts, strict=True) if n < FEW_UNITS]


def _events(study: Study) -> np.ndarray | None:
    """Return the number of events among each site's test samples in each split, (J, N); None if not a survival task."""
    samples = study.samples
    if samples.label is None or samples.dataset.task != "survival":
        return None
    return _counts(study, samples.label == 1)


def _events_text(counts: np.ndarray) -> str:
    """Return a site's numbers of tested events in j splits, (j,), as text: ``12 events``, or ``9 to 12 events``."""
    low, high = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
    return counted(high, "event") if low == high else f"{low:,} to {high:,} events"


def tested_counts(study: Study) -> np.ndarray:
    """Return the number of test samples in each split at each site, (J, N)."""
    return _counts(study, np.ones(len(study.samples.owner), bool))


def _counts(study: Study, kept: np.ndarray) -> np.ndarray:
    """Return the number of test samples in each split at each site, (J, N), among the samples `kept`, (n,) bool."""
    owner, sites = study.samples.owner, len(study.samples.sites)
    return np.array([np.bincount(owner[one.tests & kept], minlength=sites) for one in study.splits.each])


def _range(counts: np.ndarray) -> str:
    """Return a site's numbers of test samples, (J,), as text: ``12`` or ``10 to 14``; splits with 0 are ignored."""
    some = counts[counts > 0]
    low, high = (some.min(), some.max()) if len(some) else (0, 0)
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _one_class(labels: TestedLabels, site: int) -> str:
    """Return text on the number of splits in which a site's test samples have a single class, per label; "" for 0."""
    counts, splits = labels.of_one_class[:, site].sum(axis=0), labels.tested[:, site].sum()
    found = [
        f"{f'of label {labels.labels[k]} ' if labels.several else ''}in {count} of {splits}"
        for k, count in enumerate(counts.tolist())
        if count
    ]
    return f" (one class {first_of(found, MOST_NAMED)})" if found else ""
