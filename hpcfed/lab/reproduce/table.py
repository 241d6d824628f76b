"""Tables of new results beside the paper's numbers: a row per method and case, and per target if there are any."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hpcfed.lab.report.group import ABSENT
from hpcfed.lab.report.measure import Spread
from hpcfed.lab.report.tables import Table
from hpcfed.lab.report.text import count_text, criterion_text, difference_text, rounds_text, target_text
from hpcfed.lab.reproduce import published
from hpcfed.lab.reproduce.experiment import OWN_PAPER, Case, Experiment, Goal, Number
from hpcfed.lab.reproduce.measure import (
    SettingRuns,
    TargetCost,
    best_of,
    beyond,
    by_case,
    criterion_of,
    final_of,
    reached,
    tuned_to,
)

Row = tuple[str, ...]
BYTES = 4
"""Bytes per parameter sent, in float32."""


def make_table(experiment: Experiment, measured: Sequence[SettingRuns]) -> Table:
    """Return the table of the results so far; a cell says if a run is missing or did not reach its target."""
    kinds = {"rounds": _rounds, "final": _final, "best": _final, "published": published.rows, "tuned": _tuned}
    rows_of = kinds[experiment.measure.kind]
    header, words = _head(experiment)
    rows: list[Row] = []
    for case, settings in by_case(experiment, measured).values():
        rows += rows_of(experiment, case, settings)
    if experiment.paper == OWN_PAPER and not any(case.paper or case.paper_beyond for case in experiment.cases.values()):
        header, *rows = _without_papers([header, *rows])
    remarks = [words, so_far(measured) if experiment.measure.kind == "tuned" else "", experiment.note]
    return Table(experiment.title, header, tuple(rows), " ".join(filter(None, remarks)))


def _without_papers(rows: Sequence[Row]) -> list[Row]:
    """Return header and rows without the columns of a paper's numbers; a "Ratio" belongs to the column before it."""
    named = itertools.pairwise(("", *rows[0]))
    titles = [f"{before}, {title}" if title == "Ratio" else title for before, title in named]
    papers = ("Paper", "Code", "Its score", "Place")
    kept = [place for place, title in enumerate(titles) if not title.startswith(papers)]
    return [tuple(row[place] for place in kept) for row in rows]


def so_far(grid: Sequence[SettingRuns]) -> str:
    """Return a remark if runs of a grid are missing or have not had all their rounds; else ""."""
    there, wanted = sum(len(one.runs) for one in grid), sum(len(one.setting.folders) for one in grid)
    short = sum(run.num_rounds < one.setting.rounds for one in grid for run in one.runs.values())
    words = [
        f"{there} of {wanted} runs" if there < wanted else "",
        f"{short} without all their rounds" if short else "",
    ]
    return f"So far: {', '.join(filter(None, words))}." if any(words) else ""


def _head(experiment: Experiment) -> tuple[Row, str]:
    measure, criterion = experiment.measure, criterion_of(experiment)
    deviation = "± one standard deviation over seeds."
    if measure.intervals:
        deviation = "± half the 95 % interval of the mean over seeds."
    in_mean = f" in the mean of {measure.window} evaluations" if measure.window > 1 else ""
    if measure.kind in ("final", "best"):
        what = "the last evaluation" if measure.last == 1 else f"the last {measure.last} evaluations"
        words = f"Mean {criterion.title} over {what}, {deviation}"
        if measure.kind == "best":
            words = f"Best {criterion.title}{in_mean} of any round, {deviation}"
        return ("Case", "Method", criterion.title.capitalize(), "Rounds", "Seeds", "Paper"), words
    if measure.kind == "published":
        return published.HEADER, published.NOTE
    if measure.kind == "tuned":
        last = "in the last evaluation" if measure.last == 1 else f"over the last {measure.last} evaluations"
        what = f"{criterion.title} {last}"
        whose = f"{measure.choice}'s choice"
        words = f"The grid's best by its mean {what}, {deviation[:-1]}, and the place of the {whose} in our grid."
        return ("Case", "Method", "Best", "Score", whose.capitalize(), "Its score", "Place"), words
    counted = ("Rounds", "Models") if measure.unit == "models" else ("Rounds",)
    words = f"To the first evaluation with this {criterion.title} or better{in_mean}, {deviation}"
    if measure.unit == "models":
        words += " Models: rounds × models sent in one (SCAFFOLD: 2), as the paper counts."
    references = {experiment.methods[name].title for name in _references(experiment).values()}
    if references:
        words += f" Ratio: the method's {counted[-1].lower()} over those of {' or '.join(sorted(references))}."
    head = ("Case", "Target", "Method", *counted, "Params sent", "Ratio", f"Paper: {counted[-1].lower()}", "Ratio")
    if measure.beyond:
        words += " Beyond: how much better than the target the ratio's reference is once the method gets there."
        head = (*head, "Beyond", "Paper: beyond")
    if measure.savings:
        words += " Saved: what the ratio's reference sends (up and down, float32) and computes less than the method."
        head = (*head, "Saved: network", "Saved: gradients")
    return head, words


def _references(experiment: Experiment) -> dict[str, str]:
    """Return method → the reference method of its ratios; methods without ratios are left out."""
    found = {name: entry.reference or experiment.measure.reference for name, entry in experiment.methods.items()}
    return {name: reference for name, reference in found.items() if reference and reference != name}


def setting_records(experiment: Experiment, measured: Sequence[SettingRuns]) -> list[dict[str, Any]]:
    """Return the rows of ``settings.csv``, one per setting: grid values, number of runs, mean score, its deviation.

    Without grids, there are no rows.
    """
    keys = dict.fromkeys(key for one in measured for key in one.setting.point.keys)
    rows = []
    for one in measured if keys else ():
        values = dict(zip(one.setting.point.keys, one.setting.point.values, strict=True))
        score = final_of(experiment, one)
        rows.append(
            {
                "case": one.setting.case,
                "method": one.setting.method,
                **{key: values[key].label if key in values else None for key in keys},
                "runs": len(one.runs),
                "score": None if score is None else score.mean,
                "±": None if score is None else score.std,
            }
        )
    return rows


def _rounds(experiment: Experiment, case: Case, settings: Sequence[SettingRuns]) -> list[Row]:
    criterion, references = criterion_of(experiment), _references(experiment)
    in_models = experiment.measure.unit == "models"
    sent = {name: entry.models if in_models else 1 for name, entry in experiment.methods.items()}
    rows: list[Row] = []
    for number, target in enumerate(case.targets):
        every = [reached(experiment, one, settings, target) for one in settings]
        tuned = tuned_to(settings, every)
        costs = {name: every[place] for name, place in tuned.items()}
        papers = {name: _nth(case.paper.get(name), number) for name in costs}
        goal = (
            f"{experiment.methods[target.of].title}'s at {target.round}"
            if isinstance(target, Goal)
            else target_text(target, criterion)
        )
        for one in (settings[place] for place in tuned.values()):
            method, reference = one.setting.method, references.get(one.setting.method, "")
            counted = {name: costs[name].mean * sent[name] for name in (method, reference) if name in costs}
            cells = [_reached_text(one, costs[method])]
            if in_models:
                cells.append(_number(counted[method]))
            params = costs[method].params
            cells += [count_text(params) if params else ABSENT, _ratio(counted[method], counted.get(reference))]
            theirs = _ratio(_exact(papers[method]), _exact(papers.get(reference)))
            last = _beyond(experiment, case, one, settings, target) if experiment.measure.beyond else ()
            if experiment.measure.savings:
                last = (*last, *_saved(costs[method], costs.get(reference)))
            title = f"{one.title} ({_point(one)})" if one.setting.point.keys else one.title
            rows.append((case.title, goal, title, *cells, _paper(papers[method]), theirs, *last))
    return rows


def _beyond(
    experiment: Experiment, case: Case, one: SettingRuns, settings: Sequence[SettingRuns], target: float | Goal
) -> Row:
    """Return two cells, measured and from the paper: by how much a setting's reference is better than the target."""
    name = _references(experiment).get(one.setting.method)
    reference = next((other for other in settings if other.setting.method == name), None)
    if reference is None or isinstance(target, Goal):
        return ABSENT, ABSENT
    ours, paper = beyond(experiment, one, reference, target), case.paper_beyond.get(one.setting.method)
    criterion = criterion_of(experiment)
    deviation = f" ± {difference_text(ours.std, criterion)[1:]}" if ours and ours.std is not None else ""
    theirs = paper if paper is None or not criterion.is_fraction else paper / 100
    return (
        difference_text(ours.mean, criterion) + deviation if ours else ABSENT,
        ABSENT if theirs is None else difference_text(theirs, criterion),
    )


def _saved(cost: TargetCost, reference: TargetCost | None) -> Row:
    """Return two cells: bytes sent and minibatch gradients that a method's reference saves, means over seeds."""
    if reference is None or math.isnan(cost.mean) or math.isnan(reference.mean):
        return ABSENT, ABSENT
    params, gradients = _difference(cost.params, reference.params), _difference(cost.gradients, reference.gradients)
    size = BYTES * params
    unit, name = (2**30, "GiB") if abs(size) >= 2**30 else (2**20, "MiB")
    return f"{size / unit:.2f} {name}".replace("-", "−"), f"{gradients:,.0f}".replace("-", "−")


def _difference(one: Spread | None, other: Spread | None) -> float:
    return one.mean - other.mean if one and other else math.nan


def _final(experiment: Experiment, case: Case, settings: Sequence[SettingRuns]) -> list[Row]:
    criterion = criterion_of(experiment)
    rows: list[Row] = []
    for one in settings:
        value = final_of(experiment, one)
        words = criterion_text(value, criterion) if value else one.absent
        rounds = f"{one.rounds} of {one.setting.rounds}"
        paper = _paper(_nth(case.paper.get(one.setting.method), 0))
        rows.append((case.title, one.title, words, rounds, one.seeds, paper))
    return rows


def _tuned(experiment: Experiment, case: Case, settings: Sequence[SettingRuns]) -> list[Row]:
    rows: list[Row] = []
    for method, entry in experiment.methods_of(case).items():
        grid = [one for one in settings if one.setting.method == method]
        ranked = best_of(experiment, grid)
        chosen = case.paper.get(method)
        theirs = next((one for one in grid if chosen and _logarithms(one) == chosen), None)
        cells = [_point(ranked[0]), _score(experiment, ranked[0])] if ranked else ["not run", ABSENT]
        place = f"{ranked.index(theirs) + 1} of {len(grid)}" if theirs in ranked else ABSENT
        cells += [_point(theirs) if theirs else ABSENT, _score(experiment, theirs) if theirs else ABSENT, place]
        rows.append((case.title, entry.title, *cells))
    return rows


def _logarithms(one: SettingRuns) -> list[float]:
    """Return the base-10 logarithms of a grid point's values."""
    numbers = [value.number for value in one.setting.point.values]
    return [round(math.log10(number), 3) for number in numbers if number]


def _point(one: SettingRuns) -> str:
    pairs = zip(one.setting.point.keys, one.setting.point.values, strict=True)
    return ", ".join(f"{key.rpartition('.')[2]} {value.label}" for key, value in pairs)


def _score(experiment: Experiment, one: SettingRuns) -> str:
    value = final_of(experiment, one)
    return criterion_text(value, criterion_of(experiment)) if value else ABSENT


def _reached_text(one: SettingRuns, cost: TargetCost) -> str:
    if not one.runs:
        return one.absent
    if not cost.is_known:
        return "no target yet"
    diverged = f", {one.diverged} diverged" if one.diverged else ""
    if cost.rounds is None:
        return f"not in {max(run.num_rounds for run in one.runs.values())}{diverged}"
    words = rounds_text(cost.rounds)
    return words if cost.arrived == cost.runs else f"{cost.arrived} of {cost.runs}: {words}{diverged}"


def _number(value: float) -> str:
    return ABSENT if math.isnan(value) else rounds_text(Spread(value, None, 1))


def _ratio(number: float, reference: float | None) -> str:
    return ABSENT if not reference or math.isnan(number / reference) else f"{number / reference:.2f}"


def _exact(paper: Number | None) -> float:
    """Return a paper's number as float; nan for a bound such as ``1000+``, and for None."""
    return float(paper) if isinstance(paper, int | float) else math.nan


def _paper(number: Number | None) -> str:
    return ABSENT if number is None else str(number)


def _nth(numbers: Sequence[Number | None] | None, index: int) -> Number | None:
    return numbers[index] if numbers and index < len(numbers) else None


def markdown(table: Table) -> str:
    """Return a table in Markdown, its title above and its note below."""
    head, *body = (
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in (table.header, *table.rows)
    )
    rule = "|" + " --- |" * len(table.header)
    return "\n".join([f"**{table.title}**", "", head, rule, *body, "", table.note, ""])
