"""Whether the papers' numbers agree with records: means over seeds with their intervals, and paired differences.

    python -m jobs.bench.agreement runs/reproduce [EXPERIMENT …] [--to 0.85] [--column COLUMN]
    python -m jobs.bench.agreement docs/reproduction-feddyn.md

The tables behind docs/reproduction.md; an experiment is named as for ``hpcfed reproduce``, or is a file.

For every experiment with finished runs below the folder: each method's mean over seeds, half its 95 % interval
(Student's t), the paper's number and whether it lies in the interval; and, paired by seed, the difference from the
method's reference with its interval. ``--to`` adds the rounds to another target, ``--column`` measures another column
of the record. Of rounds to a target also the round in which the mean curve over seeds reaches it, and those of a moving
average over 10 evaluations. A method with a seed that does not arrive has no mean; nor has one of values at the end, or
of the best ones, with a seed that diverged or was stopped. Equal values have no interval. All seeds that lie there
count, whatever the experiment's own are.

Of a page, whose records may be gone: the same of the tables that print rounds by seed, in models sent.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed.config.metrics import direction_of_column
from hpcfed.errors import InputError, ends_in_a_line
from hpcfed.lab.report.measure import ROUNDING, moving
from hpcfed.lab.report.paired import student
from hpcfed.lab.report.read import read_json, run_status
from hpcfed.lab.reproduce.catalogue import experiments, find
from hpcfed.lab.reproduce.experiment import Case, Experiment, Goal
from hpcfed.run_folder.rounds import RECORD, read_rounds

RESULT = "result.json"
"""A run has it once it has ended."""
BEST = ("best", "published")
"""Kinds of measure that are a run's best value."""
WINDOW = 10
"""Evaluations in the moving average."""


@dataclass(frozen=True)
class Curve:
    """A column of a run's record, `values`, nan where it was not evaluated; and whether the run finished."""

    values: np.ndarray
    is_finished: bool


Curves = Mapping[int, Curve]
"""Seed → its curve."""


def curves(runs: Path, case: str, method: str, column: str) -> Curves:
    """Return the records of a method in a case, of all seeds; none of its grids."""
    name = re.compile(rf"{re.escape(case)}\.{re.escape(method)}\.(\d+)")
    found = {}
    for folder in runs.iterdir():
        if (match := name.fullmatch(folder.name)) and (folder / RESULT).is_file():
            rows = [row.get(column) for row in read_rounds(folder / RECORD)]
            values = np.array([math.nan if value is None else value for value in rows], np.float64)
            found[int(match[1])] = Curve(values, run_status(read_json(folder / RESULT), len(rows)) == "finished")
    return dict(sorted(found.items()))


def reached(curve: np.ndarray, target: float, *, larger: bool) -> float:
    """Return the first round with the target or better, up to `ROUNDING`; nan without one."""
    slack = ROUNDING * abs(target)
    there = np.flatnonzero(curve >= target - slack if larger else curve <= target + slack)
    return float(there[0] + 1) if len(there) else math.nan


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half its 95 % interval; nan for both if a value is, and for the second of equal values.

    A deviation of zero would claim a mean without uncertainty. Values are equal up to `ROUNDING`.
    """
    mean = float(np.mean(values)) if len(values) else math.nan
    if len(values) < 2 or np.ptp(values) <= ROUNDING * np.abs(values).max():
        return mean, math.nan
    return mean, student(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def value(experiment: Experiment, curve: Curve, *, larger: bool) -> float:
    """Return a run's best value, or its mean over the last evaluations, as the paper's number is one or the other.

    nan for a run that diverged, or was stopped before its end.
    """
    seen = curve.values[np.isfinite(curve.values)]
    if not len(seen) or not curve.is_finished:
        return math.nan
    if experiment.measure.kind in BEST:
        return float(seen.max() if larger else seen.min())
    return float(seen[-experiment.measure.last :].mean())


def targets(
    experiment: Experiment, case: str, runs: Path, to: float | None
) -> Iterator[tuple[str, Mapping[int, float]]]:
    """Yield each target of a case in words, and then `to`, with its number for each seed; -1 stands for all seeds."""
    for target in (*experiment.cases[case].targets, *([] if to is None else [to])):
        if not isinstance(target, Goal):
            yield f"{target:g}", {-1: float(target)}
            continue
        of = {seed: one.values for seed, one in curves(runs, case, target.of, experiment.measure.column).items()}
        found = {seed: float(each[target.round - 1]) for seed, each in of.items() if len(each) >= target.round}
        yield f"{target.of} at {target.round}", found


def table(experiment: Experiment, root: Path, to: float | None = None) -> Iterator[tuple[str, ...]]:
    """Yield the rows of an experiment's table, with those of another target `to`."""
    runs, measure = root / experiment.name / "sweep" / "runs", experiment.measure
    larger = bool(direction_of_column(measure.column, experiment.metrics))
    for name, case in experiment.cases.items():
        found = {method: curves(runs, name, method, measure.column) for method in experiment.methods_of(case)}
        if not any(found.values()):
            continue
        for place, (words, numbers) in enumerate(targets(experiment, name, runs, to)):
            yield from _rounds(experiment, case, found, words, numbers, place, larger=larger)
        if measure.kind != "rounds":
            scores = {m: {s: value(experiment, c, larger=larger) for s, c in of.items()} for m, of in found.items()}
            what = "best" if measure.kind in BEST else measure.kind
            whole = 100 if measure.kind == "published" else 1  # in percent
            for method, of_seed in ((method, values) for method, values in scores.items() if values):
                reference, paper = scores.get(_reference(experiment, method), {}), _paper(case, method, 0) / whole
                words = what + _lengths(found[method])
                yield _row(experiment, case.title, method, words, of_seed, reference, paper, ("", ""))


def _lengths(of_seed: Curves) -> str:
    """Return in words the numbers of rounds of a method's finished runs; "" if they are equal."""
    lengths = {len(curve.values) for curve in of_seed.values() if curve.is_finished}
    return f" of {min(lengths)} to {max(lengths)} rounds" if len(lengths) > 1 else ""


def printed(page: Path) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a page's tables with a column of rounds by seed: of the models that these rounds send.

    An empty cell of a case or a target is that of the line above; the experiment is that of the section's command.
    """
    experiment, header, case, target, sent = Experiment.model_construct(), [], "", "", {}
    for line in page.read_text(encoding="utf-8").splitlines():
        if command := re.match(r"#+ `hpcfed reproduce ([\w-]+)", line):
            (experiment,) = find(command[1])
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        rounds = [name for name in header if name.startswith("Rounds, ")]
        if not cells or not header:
            header = cells
        elif rounds and not cells[0].startswith("---"):
            row = dict(zip(header, cells, strict=False))  # of two columns of one name, the last
            case, target = row["Case"] or case, row["Target"] or target
            method = next(name for name, its in experiment.methods.items() if its.title == row["Method"])
            counts = [_number(text) * experiment.methods[method].models for text in row[rounds[0]].split(", ")]
            sent[case, target, method] = values = dict(enumerate(counts))
            reference, paper = sent[case, target, _reference(experiment, method)], _number(row["Paper: models"])
            yield _row(experiment, case, method, f"models to {target}", values, reference, paper, ("", ""))


def _rounds(
    experiment: Experiment,
    case: Case,
    found: Mapping[str, Curves],
    words: str,
    numbers: Mapping[int, float],
    place: int,
    *,
    larger: bool,
) -> Iterator[tuple[str, ...]]:
    def goal(seed: int) -> float:
        return numbers.get(seed, numbers.get(-1, math.nan))

    rounds = {m: {s: reached(c.values, goal(s), larger=larger) for s, c in of.items()} for m, of in found.items()}
    for method, of_seed in ((method, values) for method, values in rounds.items() if values):
        extra = ("", "")
        if -1 in numbers:
            each = [curve.values for curve in found[method].values()]
            mean = np.mean([values[: min(map(len, each))] for values in each], axis=0)
            smooth = [reached(moving(values, WINDOW), numbers[-1], larger=larger) for values in each]
            extra = (_plain(reached(mean, numbers[-1], larger=larger)), _with_half(*interval(smooth)))
        reference = rounds.get(_reference(experiment, method), {})
        paper = _paper(case, method, place) if experiment.measure.kind == "rounds" else math.nan
        paper /= experiment.methods[method].models
        yield _row(experiment, case.title, method, f"to {words}", of_seed, reference, paper, extra)


def _reference(experiment: Experiment, method: str) -> str:
    """Return the method that a method is compared with: its own, the experiment's, or the first one."""
    return experiment.methods[method].reference or experiment.measure.reference or next(iter(experiment.methods))


def _row(
    experiment: Experiment,
    case: str,
    method: str,
    words: str,
    values: Mapping[int, float],
    reference: Mapping[int, float],
    paper: float,
    extra: tuple[str, str],
) -> tuple[str, ...]:
    mean, half = interval(list(values.values()))
    both = [seed for seed in values if seed in reference]
    difference, within = interval([values[seed] - reference[seed] for seed in both])
    inside = "–" if math.isnan(paper) or math.isnan(half) else "yes" if abs(paper - mean) <= half else "no"
    paired = "" if values is reference or not both else _with_half(difference, within)
    title = experiment.methods[method].title
    return (case, title, words, str(len(values)), _with_half(mean, half), paired, *extra, _plain(paper), inside)


def _paper(case: Case, method: str, place: int) -> float:
    """Return the paper's number, nan without one."""
    numbers = case.paper.get(method, [])
    return _number(str(numbers[place])) if place < len(numbers) else math.nan


def _number(text: str) -> float:
    """Return the number that is printed, nan for one that was not reached; a share for a percentage."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?: ± [\d.]+)?( ?%)?", text)
    return math.nan if match is None else float(match[1]) / (100 if match[2] else 1)


def _plain(number: float) -> str:
    return "–" if math.isnan(number) else f"{number:.4g}"


def _with_half(mean: float, half: float) -> str:
    within = "" if math.isnan(half) else f" ± {float(f'{half:.2g}'):g}"
    return "–" if math.isnan(mean) else f"{mean:.4g}{within}"


def of_column(experiment: Experiment, column: str) -> Experiment:
    """Return an experiment that measures another column, whose targets are not the experiment's."""
    kind = "final" if experiment.measure.kind == "rounds" else experiment.measure.kind
    measure = experiment.measure.model_copy(update={"column": column, "kind": kind})
    cases = {name: case.model_copy(update={"targets": [], "paper": {}}) for name, case in experiment.cases.items()}
    return experiment.model_copy(update={"measure": measure, "cases": cases})


def show(name: str, rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table of an experiment or of a page, which has rows."""
    head = (
        "Case",
        "Method",
        "Measured",
        "Seeds",
        "Mean",
        "Minus reference",
        "Mean curve",
        f"By {WINDOW}",
        "Paper",
        "In it",
    )
    if rows:
        print(f"\n{name}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))


@ends_in_a_line()
def main(root: Path, names: Sequence[str], to: float | None = None, column: str = "") -> None:
    """Print a table for each experiment that has records, with rounds `to` another target, or of another column."""
    if root.is_file():
        show(root.name, list(printed(root)))
        return
    asked = [one for name in names for one in find(name)] if names else experiments().values()
    recorded = [one for one in asked if (root / one.name / "sweep" / "runs").is_dir()]
    if not recorded:
        raise InputError("nothing has been run", where=str(root), expected="an --output of `hpcfed reproduce`")
    for experiment in recorded:
        measured = of_column(experiment, column) if column else experiment
        show(experiment.name, list(table(measured, root, to)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT")
    parser.add_argument("--to", type=float)
    parser.add_argument("--column", default="")
    asked = parser.parse_intermixed_args()
    main(asked.root, asked.names, asked.to, asked.column)
