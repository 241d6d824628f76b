"""The HTML page of a study, one file without script, and its tables as CSV and LaTeX."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpcfed.config.load import dump_yaml
from hpcfed.data.federation import MAX_LISTED
from hpcfed.errors import counted, first_of
from hpcfed.io.figure_style import to_files, to_svg
from hpcfed.lab.frame import as_csv
from hpcfed.lab.report.files import csv_of_table, file_name, latex_of_table
from hpcfed.lab.report.group import ABSENT
from hpcfed.lab.report.page import Picture, line_key, rendered
from hpcfed.lab.report.read import read_recipe
from hpcfed.lab.report.tables import Table
from hpcfed.lab.study import tables
from hpcfed.lab.study.arms import FEDERATED, counted_text
from hpcfed.lab.study.figures import curves_of, draw_confusion, draw_cross, draw_curves
from hpcfed.lab.study.forest import MOST_PANELS, PAPER, Forest, draw_forest, forest_of
from hpcfed.lab.study.forest import PAGE as ON_PAGE
from hpcfed.lab.study.measures import StudyMetric, matrix_of
from hpcfed.lab.study.plan import FIGURES, PAGE, TABLES, Study
from hpcfed.lab.study.records import bootstrap_records, result_records, tuning_records, value_records
from hpcfed.lab.study.rows import at_each, steps_of
from hpcfed.lab.study.splits import FOLDS, HOLDOUT
from hpcfed.lab.study.tested import splits_table
from hpcfed.lab.study.view import View
from hpcfed.run_folder.rounds import why_skipped

MARKER = '<meta name="generator" content="hpcfed study'
STANDARDIZED = {
    "client": "Each site's features are scaled by its own training samples of the split.",
    "pooled": "Features are scaled by all training samples of the split.",
    "none": "Features are used as they are in the file.",
}


@dataclass(frozen=True)
class StudyChapter:
    """A chapter of the page with tables and figures.

    Attributes:
        title: the heading.
        tables, pictures: the tables and figures.
        keys: entries of the figures' common legend, which are titles of table rows; empty without a legend.
        note: text below the heading; "" for none.
        is_small: whether figures are shown small, with more of them side by side.
    """

    title: str
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    keys: tuple[str, ...] = ()
    note: str = ""
    is_small: bool = False

    @property
    def anchor(self) -> str:
        """The chapter's anchor, to which links on the page lead."""
        return file_name(self.title)


def write_results(view: View, words: Sequence[str], remarks: Sequence[str]) -> dict[str, str | bytes]:
    """Return the files of a study's results, path in its folder → content: page, tables, and forest plots.

    The page has the command's arguments `words`, so that it can be run again, and `remarks` on splits and methods.
    """
    metrics = view.study.metrics
    forest = forest_of(view, metrics[0])
    chapters = list(_chapters(view, metrics, forest))
    files: dict[str, str | bytes] = {}
    named = [(_full_title(chapter, table), table) for chapter in chapters for table in chapter.tables]
    if intervals := bootstrap_records(view, metrics):
        files[f"{TABLES}/bootstrap.csv"] = as_csv(intervals)
    if points := tuning_records(view.study):
        files[f"{TABLES}/tuning-points.csv"] = as_csv(points)
    for title, table in [*named, ("sites", splits_table(view.study))]:
        name = f"{TABLES}/{file_name(title)}"
        files |= {f"{name}.csv": csv_of_table(table), f"{name}.tex": latex_of_table(table)}
    files[f"{TABLES}/results.csv"] = as_csv(result_records(view, metrics))
    files[f"{TABLES}/values.csv"] = as_csv(value_records(view))
    for name, shown in (("by-site", forest.values), ("differences", forest.differences)):
        drawn = to_files(draw_forest(forest, shown, PAPER)) if shown else {}
        files |= {f"{FIGURES}/{name}{suffix}": content for suffix, content in drawn.items()}
    files[PAGE] = _render(view, chapters, words, remarks)
    return files


def _full_title(chapter: StudyChapter, table: Table) -> str:
    """Return a title unique on the page: the table's, after the chapter's title unless it begins with that."""
    return table.title if table.title.startswith(chapter.title) else f"{chapter.title} {table.title}"


def without_results(view: View) -> list[str]:
    """Return warnings: a line per arm in which runs have no result, and a line per arm in which runs skip updates."""
    found = []
    for arm in view.study.arms:
        there, all_of = len(view.results.runs[arm.key]), view.results.planned[arm.key]
        if there < all_of:
            others = "; means are over the others" if there else ""
            found.append(f"{arm.title}: {all_of - there} of {all_of} runs have no result{others}.")
        skipped = Counter(site for run in view.results.runs[arm.key] for site in run.skipped)
        if skipped:
            whose = first_of([f"{view.sites[site]} in {count}" for site, count in sorted(skipped.items())], MAX_LISTED)
            recipe = view.study.recipe
            why = why_skipped(masked=recipe.secure_aggregation is not None, skips=recipe.on_bad_client == "skip")
            found.append(f"{arm.title}: {why}, of {counted(there, 'run')}: {whose}.")
    return found


def _warnings(view: View) -> list[str]:
    """Return what a reader must know before comparing methods: missing runs and intervals, and left-out updates."""
    found = without_results(view)
    if view.study.options.bootstrap and view.resampled is None:
        found.append(
            "Intervals over patients are not here yet: they are computed last. If that was stopped, the same command "
            "goes on."
        )
    return found


def _chapters(view: View, metrics: Sequence[StudyMetric], forest: Forest) -> Iterator[StudyChapter]:
    for number, metric in enumerate(metrics):
        made = (tables.results_table, tables.differences_table, tables.spread_table, tables.bootstrap_table)
        found = [make(view, metric) for make in made]
        yield StudyChapter(metric.title, tuple(table for table in found if table is not None))
        if number == 0 and forest.values:
            yield _comparison(view, forest)
    main = metrics[0]
    matrix, cross = view.cross_values(main), tables.cross_table(view, main)
    if matrix is not None and cross is not None:
        svg = to_svg(draw_cross(matrix, view.sites, main), "cross-site")
        others = [table for metric in metrics[1:] if (table := tables.cross_table(view, metric)) is not None]
        unit = " in %" if main.is_percentage else ""
        picture = Picture("cross-site", f"{main.title}{unit} of each site's model at each site.", svg)
        yield StudyChapter("Cross-site", (cross, *others), (picture,))
    if (tuned := tables.tuning_table(view.study)) is not None:
        yield StudyChapter("Tuning", (tuned,))
    yield from _curves(view, main)
    yield from _confusions(view)


def _comparison(view: View, forest: Forest) -> StudyChapter:
    """Return the chapter of the forest plots: one picture per site, values beside differences from the reference."""
    pictures = []
    for k, panel in enumerate(forest.values):
        apart = [replace(forest.differences[k], title="", note="")] if forest.differences else []
        svg = to_svg(draw_forest(forest, [panel, *apart], ON_PAGE), f"forest-{k}")
        pictures.append(Picture(f"forest-{k}", f"{panel.title}: {panel.note}.", svg))
    title = forest.metric.title
    beside = f", and its difference from {view.reference.title}'s" if forest.differences else ""
    note = (
        f"{title} of each method{beside}. Diamond and dashed line: {view.reference.title}; discs: other methods; "
        f"rings: baselines; {ABSENT}: undefined. "
    )
    marks = [mark for panel in forest.values for mark in panel.marks if mark is not None]
    if any(mark.corrected for mark in marks):
        note += f"Lines: 95 % intervals over {forest.over}, as in the tables. "
    if forest.of_patients:
        note += "Grey bars: 95 % intervals over patients. "
    if any(mark.intervals for mark in marks):
        note += "An arrow: the interval goes on. "
    if forest.has_own_scales:
        note += "Sites have scales of their own. "
    if len(view.sites) > MOST_PANELS:
        note += f"Of more than {MOST_PANELS} sites their mean alone is drawn; the tables have all. "
    names = " and ".join(["by-site", *(["differences"] if forest.differences else [])])
    return StudyChapter("Comparison", (), tuple(pictures), (), f"{note}In figures/ as PNG and PDF: {names}.")


def _curves(view: View, metric: StudyMetric) -> Iterator[StudyChapter]:
    places = {row.title: number for number, row in enumerate(view.rows)}
    pictures: list[Picture] = []
    lacking: list[str] = []
    keys: dict[str, None] = {}
    for k, name in enumerate(view.sites):
        curves = curves_of(view, metric, k)
        if curves:
            keys |= dict.fromkeys(curves)
            svg = to_svg(draw_curves(curves, places, metric), f"curve-{k}")
            pictures.append(Picture(f"curve-{k}", f"{name}: {metric.in_text} on its test samples.", svg))
        else:
            lacking.append(name)
    note = (
        "Means over splits and seeds. Baselines of more rounds than the methods are drawn against the same share of "
        "their training."
    )
    if lacking:
        where = first_of(lacking, MAX_LISTED) if pictures else "any site: there is none to draw"
        note += f" {metric.title} is defined in no evaluation at {where}."
    if pictures or any(view.results.runs.values()):
        yield StudyChapter("Learning curves", (), tuple(pictures), tuple(keys), note)


def _confusions(view: View) -> Iterator[StudyChapter]:
    name = matrix_of(view.study.recipe)
    if name is None:
        return
    pictures = []
    for number, row in enumerate(view.rows):
        counts = view.counts(row, name)
        if counts is not None:
            svg = to_svg(draw_confusion(counts, view.study.samples.labels), f"confusion-{number}")
            pictures.append(Picture(f"confusion-{number}", row.title, svg))
    note = "Test samples of all sites, added up over splits and seeds; shaded by the share of the row."
    if pictures:
        yield StudyChapter("Confusion matrices", (), tuple(pictures), (), note, is_small=True)


def _render(view: View, chapters: Sequence[StudyChapter], words: Sequence[str], remarks: Sequence[str]) -> str:
    study = view.study
    return rendered(
        "page.html.j2", "lab/study", "lab/report",
        marker=MARKER,
        title=f"{study.samples.dataset.name}: {counted(len(study.methods.each), 'method')} at {len(view.sites)} sites",
        lead=_lead(view),
        keys=_keys(view),
        warnings=_warnings(view),
        chapters=chapters,
        sites=splits_table(study),
        how=[*_how(study), *remarks],
        command=shlex.join(["hpcfed", "study", *words]),
        recipes=list(_recipes(view)),
    )  # fmt: skip


def _keys(view: View) -> Mapping[str, tuple[str, str]]:
    """Return row title → colour and dash of its line, as values of SVG attributes."""
    return {row.title: line_key(k) for k, row in enumerate(view.rows)}


def _lead(view: View) -> str:
    study = view.study
    runs = sum(len(runs) for key, runs in view.results.runs.items() if key in view.results.planned)
    splits = len(study.splits.each)
    what = {HOLDOUT: f"{splits} random holdouts", FOLDS: f"{splits} folds"}.get(
        study.options.kind, f"each of {splits} sites left out once"
    )
    seeds = ", ".join(str(seed.model) for seed in study.seeds)
    empty = int((np.bincount(study.samples.owner, minlength=len(view.sites)) == 0).sum())
    sites = counted(len(view.sites) - empty, "site") + (f" with samples ({empty} without)" if empty else "")
    return (
        f"Simulated federated learning on {sites}. "
        f"{runs} runs: {what}, {'seed' if len(study.seeds) == 1 else 'seeds'} {seeds}."
    )


def _how(study: Study) -> Iterator[str]:
    amount, options, seed = study.amount, study.options, f"split seed {study.options.split_seed}"
    if options.kind == HOLDOUT:
        about = "" if study.samples.group is None else "about "
        share = f"{about}{100 * options.test_fraction:g} %"
        yield f"Each split tests on {share} of every site's samples, drawn by label; {seed}."
    elif options.kind == FOLDS:
        yield f"Each sample is tested on once; folds are drawn by site and label; {seed}."
    else:
        yield "Each site is tested on once, by models of all others."
    if study.samples.group is not None:
        yield f"Samples of one {study.samples.grouped_by} are never in both parts of a split."
    if fill := study.samples.dataset.fill:
        yield f"Missing cells are filled by the {fill} of the split's training samples, words by the most frequent."
    yield STANDARDIZED[str(options.standardize)]
    of_reference = next(arm for arm in study.arms if arm.key == study.methods.reference)
    steps = counted_text(steps_of(study, of_reference, 1), "gradient step")
    yield (
        f"A federated run has {counted_text(f'{amount.rounds:,}', 'round')} of {steps} {at_each(amount.sites)}. "
        "Baselines take as many steps as one site, or as all sites of a round together, with the recipe's local keys."
    )
    if study.tuning is None:
        yield "Nothing was tuned by this command: step sizes and methods' keys are the recipe's, or their defaults."
    else:
        where = "See the chapter Tuning." if study.tuned is not None else "It has not ended yet."
        yield f"Tuned inside each split's training part: {'; '.join(options.tune)}. {where}"


def _recipes(view: View) -> Iterator[tuple[str, str]]:
    """Yield each arm's title and recipe as YAML; of the sites that train alone, only the first one's.

    Paths are relative to the parent of the study's folder.
    """
    study = view.study
    here = re.compile(rf"(?<![\w./-]){re.escape(str(study.folder.parent))}(/|$)", re.MULTILINE)
    for arm in study.arms:
        path = study.run_folder(arm, 0, study.seeds[0]) / "recipe.yaml"
        if (arm.kind == FEDERATED or arm.site in (None, 0)) and path.exists():
            yield arm.title, here.sub(lambda found: "" if found[1] else ".", dump_yaml(read_recipe(path)))
