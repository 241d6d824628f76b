"""The document of ``hpcfed study``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfed.lab.study.plan import FIGURES, PAGE, TABLES
from hpcfed.lab.study.records import bootstrap_records, result_records, tuning_records

if TYPE_CHECKING:
    from hpcfed.lab.study.plan import Study
    from hpcfed.lab.study.view import View


@dataclass(frozen=True)
class StudiedMetric:
    """A metric of the study."""

    name: str
    """In the recipe and in files."""
    larger_is_better: bool | None
    """Its direction, null if unknown."""


@dataclass(frozen=True)
class StudyValue:
    """A method's value of a metric at a site, or over sites: a row of tables/results.csv."""

    method: str
    """Title of the row."""
    steps: str
    """Gradient steps in words."""
    metric: str
    """Its name."""
    site: str
    """Name of the site; "Mean of sites", or "All samples together"."""
    sites: int
    """How many sites the value is of."""
    mean: float | None
    """Mean over splits."""
    low: float | None
    """Lower end of its 95 % interval."""
    high: float | None
    """Upper end."""
    interval: str | None
    """How the interval was computed."""
    difference_mean: float | None
    """Mean difference from the reference, paired by split."""
    difference_low: float | None
    """Lower end of its interval."""
    difference_high: float | None
    """Upper end."""
    difference_interval: str | None
    """How that was computed."""
    splits: int
    """Splits that have a value."""


@dataclass(frozen=True)
class ResampledInterval:
    """An interval over patients: a row of tables/bootstrap.csv."""

    method: str
    """Title of the row."""
    metric: str
    """Its name."""
    site: str
    """Name of the site, or "Mean of sites"."""
    low: float | None
    """Lower end of the 95 % percentile interval."""
    high: float | None
    """Upper end."""
    difference_low: float | None
    """Lower end for the difference from the reference."""
    difference_high: float | None
    """Upper end."""
    resamples: int
    """Resamples that have a value."""


@dataclass(frozen=True)
class TunedPoint:
    """Values tried on an inner split: a row of tables/tuning-points.csv."""

    arm: str
    """Key of the arm."""
    split: int
    """Number of the split."""
    point: str
    """The values in words."""
    value: float | None
    """The metric on the inner test samples."""
    loss: float | None
    """The loss on them."""
    chosen: int
    """1 if this split chose it."""


@dataclass(frozen=True)
class StudyDocument:
    """Results of a study so far."""

    folder: str
    """The study's folder."""
    page: str | None
    """The HTML page; null before a run has finished."""
    tables: str | None
    """Folder of the tables, CSV and LaTeX."""
    figures: str | None
    """Folder of the figures."""
    stopped: bool
    """Whether runs are left, and the same command goes on (exit code 75)."""
    complete: bool
    """Whether all runs have ended."""
    reference: str | None
    """Title of the row that differences are from."""
    sites: list[str]
    """Names of the sites."""
    metrics: list[StudiedMetric]
    """The main metric first."""
    splits: int
    """How many splits."""
    seeds: list[int]
    """Seeds of the models."""
    values: list[StudyValue]
    """Every method, metric and site."""
    intervals: list[ResampledInterval]
    """With --bootstrap, once all runs have ended."""
    tuning: list[TunedPoint]
    """With --tune."""
    remarks: list[str]
    """What must be known before methods are compared."""


DOCUMENT = StudyDocument


def study_document(
    study: Study, view: View | None, remarks: Sequence[str], *, stopped: bool, complete: bool
) -> StudyDocument:
    """Return the document of a study's results; of None if no run has finished."""
    page, tables, figures = (
        str(study.folder / name) if view is not None and (study.folder / name).exists() else None
        for name in (PAGE, TABLES, FIGURES)
    )
    return StudyDocument(
        folder=str(study.folder),
        page=page,
        tables=tables,
        figures=figures,
        stopped=stopped,
        complete=complete,
        reference=None if view is None else view.reference.title,
        sites=[*study.samples.sites],
        metrics=[StudiedMetric(one.name, one.larger_is_better) for one in study.metrics],
        splits=len(study.splits.each),
        seeds=[seed.model for seed in study.seeds],
        values=[] if view is None else [StudyValue(**row) for row in result_records(view, study.metrics)],
        intervals=[] if view is None else [ResampledInterval(**row) for row in bootstrap_records(view, study.metrics)],
        tuning=[TunedPoint(**row) for row in tuning_records(study)],
        remarks=[*remarks],
    )
