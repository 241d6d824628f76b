"""Forest plots of a study: their marks are the tables' numbers, and what has no number is no mark."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpcfed.io.figure_style import to_files
from hpcfed.lab.study.forest import PAPER, Forest, ForestMark, ForestPanel, draw_forest, forest_of
from hpcfed.lab.study.measures import StudyMetric
from hpcfed.lab.study.statistics import corrected
from hpcfed.lab.study.tables import bootstrap_table
from hpcfed.lab.study.view import View
from tests.study.conftest import planned
from tests.study.test_study import view_of

AUROC = StudyMetric("auroc", True)
FEDAVG = [[0.5, 0.6, None], [0.6, 0.7, None], [0.7, 0.65, None]]
FEDEXP = [[0.6, 0.8, None], [0.6, None, None], [0.8, 0.7, None]]


@pytest.fixture
def view(folder) -> View:
    """Three splits of three sites, of which the last one has no AUROC, and one method lacks it in a split."""
    return view_of(planned(folder, "fedavg,fedexp", splits=3, baselines="none"), {"fedavg": FEDAVG, "fedexp": FEDEXP})


def text_of(panel: ForestPanel, forest: Forest) -> list[str]:
    """Return the texts inside a panel, drawn alone."""
    (axes,) = draw_forest(forest, [panel], PAPER).axes
    return [text.get_text() for text in axes.texts]


def test_marks_are_the_numbers_of_the_tables(view):
    """Means and corrected intervals of values, and of differences split by split; sites without a value have none."""
    forest = forest_of(view, AUROC)
    assert [panel.title for panel in forest.values] == ["north", "south", "west", "Mean of sites"]
    notes = ["8 tested", "6 tested, 2 to 3 of 3 splits", "6 tested, undefined", "1 of 3 sites, 21 of 48 tested"]
    assert [panel.note for panel in forest.values] == notes
    for panel, values in ((forest.values[0], (0.6, 0.6, 0.8)), (forest.differences[0], (0.1, 0.0, 0.1))):
        right = corrected(values, view.study.ratio, share=panel.minus is None)
        mark = panel.marks[1]
        assert mark.mean == pytest.approx(right.mean)
        assert mark.corrected == pytest.approx(right.interval)
        assert mark.over_patients is None
    assert forest.values[0].line == pytest.approx(0.6)
    assert forest.differences[0].line == 0
    assert forest.values[2].marks == [None, None]
    assert text_of(forest.values[2], forest) == ["–", "–", "6 tested, undefined"]
    assert text_of(forest.differences[1], forest) == ["6 tested, 2 to 3 of 3 splits"]  # the reference stands at zero
    assert forest.differences[2].line is None
    assert text_of(forest.differences[2], forest) == ["–", "–", "6 tested, undefined"]
    assert "smaller is better" in forest_of(view, replace(AUROC, larger_is_better=False)).values[0].axis


def test_intervals_over_patients_are_those_of_the_page(view):
    """The 2.5th and 97.5th percentile of the resamples, of differences those of paired ones."""
    rng = np.random.default_rng(0)
    resampled = {(key, "auroc"): rng.random((4, 200)) + shift for key, shift in (("fedavg", 0.0), ("fedexp", 0.1))}
    forest = forest_of(replace(view, resampled=resampled), AUROC)
    _, row = bootstrap_table(replace(view, resampled=resampled), AUROC).rows
    whole, theirs = (resampled[key, "auroc"][-1] for key in ("fedexp", "fedavg"))
    ends = [np.percentile(values, (2.5, 97.5)) for values in (whole, whole - theirs)]
    assert row[1] == f"{(0.6 + 0.6 + 0.8) / 3:.3f} [{ends[0][0]:.3f},\u00a0{ends[0][1]:.3f}]"
    assert row[2] == f"[{ends[1][0]:+.3f},\u00a0{ends[1][1]:+.3f}]".replace("-", "−")
    own, theirs = (resampled[key, "auroc"][0] for key in ("fedexp", "fedavg"))
    assert forest.values[0].marks[1].over_patients == pytest.approx(np.percentile(own, (2.5, 97.5)))
    assert forest.differences[0].marks[1].over_patients == pytest.approx(np.percentile(own - theirs, (2.5, 97.5)))


def test_an_interval_beyond_the_axis_ends_in_an_arrow(view):
    """Lines and grey bars alike; an interval inside of the axis has none."""
    forest = forest_of(view, AUROC)
    for ends, arrows in (((0.4, 0.6), 0), ((0.1, 0.6), 1), ((0.1, 0.9), 2)):
        for mark in (ForestMark(0.5, (0.45, 0.55), ends), ForestMark(0.5, ends, (0.45, 0.55))):
            panel = replace(forest.values[0], marks=[mark, None], limits=(0.3, 0.7))
            (axes,) = draw_forest(forest, [panel], PAPER).axes
            assert sum(isinstance(line.get_marker(), list) for line in axes.lines) == arrows


def test_a_title_stands_above_its_note(view):
    """A note of two lines, such as that of the mean of sites, is not overlapped by the title above it."""
    forest = forest_of(view, AUROC)
    panels = [*forest.values[:2], replace(forest.values[-1], note="4 of 5 sites, 369 of 408 tested, 2 of 5 splits")]
    figure = draw_forest(forest, panels, PAPER)
    figure.draw_without_rendering()
    axes = figure.axes[2]
    note = next(text for text in axes.texts if text.get_text().startswith("4 of 5"))
    title = next(text for text in axes.get_children() if getattr(text, "get_text", str)() == "Mean of sites")
    assert "\n" in note.get_text()
    assert title.get_window_extent().y0 >= note.get_window_extent().y1


def test_nothing_is_drawn_of_nothing(folder):
    """A metric without any value has no figures, one method no differences, and of many sites their mean is drawn."""
    study = planned(folder, "fedavg", splits=2, baselines="none")
    none = forest_of(view_of(study, {"fedavg": [[None] * 3] * 2}), AUROC)
    assert (none.values, none.differences) == ([], [])
    one = forest_of(view_of(study, {"fedavg": [[0.5, 0.6, 0.7]] * 2}), AUROC)
    assert len(one.values) == 4
    assert one.differences == []


def test_scales_differ_where_a_common_one_would_hide_marks(view):
    """A site whose errors are 50 times as large has a scale of its own, and so have the others."""
    values = [[[1.0, 50.0, 2.0], [1.1, 52.0, 2.2]], [[1.1, 53.0, 2.1], [1.2, 51.0, 2.3]]]
    named = dict(zip(("fedavg", "fedexp"), values, strict=True))
    errors = forest_of(view_of(view.study, named, "rmse"), StudyMetric("rmse", False))
    assert errors.has_own_scales
    assert not forest_of(view, AUROC).has_own_scales


def test_intervals_over_sites_are_called_so(folder):
    """Where each site is left out once its value has no interval; the mean of the sites has one, over sites."""
    study = planned(folder, "fedavg", kind="leave-one-site-out", baselines="none")
    values = [[0.5, None, None], [None, 0.6, None], [None, None, 0.7]]
    forest = forest_of(view_of(study, {"fedavg": values}), AUROC)
    assert [panel.marks[0].corrected is None for panel in forest.values] == [True] * 3 + [False]
    (legend,) = draw_forest(forest, forest.values, PAPER).legends
    assert "95 % interval over sites" in [text.get_text() for text in legend.get_texts()]


@pytest.mark.soak
def test_names_are_drawn_as_they_are(view, drawn):
    """Signs of mathematics, long names and ones that begin with an underscore; the same bytes each time."""
    sites = ["$10 & $20 clinic", "_University_Hospital of the Northern Lakes and Mountains " * 3, 'Zürich <b>"x"</b>']
    dataset = replace(view.study.samples.dataset, clients=sites)
    samples = replace(view.study.samples, dataset=dataset)
    forest = forest_of(replace(view, study=replace(view.study, samples=samples)), AUROC)
    first, again = (to_files(draw_forest(forest, forest.values, PAPER)) for _ in range(2))
    assert first == again
    assert first[".png"].startswith(b"\x89PNG")
    titles = [axes.get_title(loc="left") for axes in draw_forest(forest, forest.values, PAPER).axes]
    assert titles[0].startswith(r"\$10 & \$20")
    assert titles[1].startswith("_University_")
    assert "…" in titles[1]
