"""Contributions of clients from the finished runs of subsets: tables, a page, and a figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.assembly import assemble
from hpcfed.data.federation import MAX_LISTED
from hpcfed.errors import counted, first_of
from hpcfed.io.atomic import write_files
from hpcfed.io.figure_style import to_files, to_svg
from hpcfed.lab.frame import as_csv, clients_table
from hpcfed.lab.report.page import rendered
from hpcfed.lab.report.paired import MeanEstimate
from hpcfed.lab.sweep.claims import Claims
from hpcfed.lab.sweep.report import RankedSweep
from hpcfed.lab.sweep.run import run_states
from hpcfed.lab.sweep.select import Row
from hpcfed.lab.sweep.table import read_results
from hpcfed.lab.whatif.coalitions import Coalitions, rounds_of
from hpcfed.lab.whatif.figure import figure_of
from hpcfed.lab.whatif.shapley import (
    Subset,
    added_in,
    as_numbers,
    estimates,
    leave_one_out,
    mean_over,
    shapley,
    without_one,
)
from hpcfed.ranks.world import World
from hpcfed.run_folder.contents import FIGURES, refuse_link
from hpcfed.run_folder.rounds import RECORD, read_rounds, skipped_in, why_skipped

NOBODY: Subset = frozenset()
NONE = MeanEstimate(math.nan, None, 0)
TABLE, VALUES, PAGE = "contributions.csv", "values.csv", "contributions.html"


@dataclass(frozen=True)
class Contribution:
    """A client's contribution: what its participation adds to the scores on the common and on its own test set.

    Attributes:
        client, name, samples: the client's number, name and number of training samples.
        left_out: leave-one-out value, positive if the client improves the score.
        shapley: Shapley value, positive likewise; nan for leave-one-out alone.
        with_all, without, alone: mean over seeds of the metric on the client's own test set, for models trained by all
            clients, by all clients but this one, and by this client alone; nan if test set or run is missing.
        takes: gain on the client's own test set from taking part: `with_all` − `without`, negated if smaller is better.
    """

    client: int
    name: str
    samples: int
    left_out: MeanEstimate
    shapley: MeanEstimate
    with_all: float
    without: float
    alone: float
    takes: MeanEstimate


@dataclass(frozen=True)
class CoalitionValues:
    """The value v(S) of each subset, and the contribution of each client.

    Attributes:
        coalitions: the subsets and their runs.
        rows: a row for each run.
        values: for each seed, subset S → v(S), the metric as recorded; for the empty subset, that of the initial model.
        clients: the contribution of each client.
    """

    coalitions: Coalitions
    rows: Sequence[Row]
    values: Sequence[Mapping[Subset, float]]
    clients: Sequence[Contribution]

    @property
    def notes(self) -> list[str]:
        """Remarks below the table: the rule for v(S), v(all), v(none), rounds, diverged runs, skipped clients."""
        own, mean = self.coalitions, mean_over(self.values)
        every = frozenset(range(len(own.names)))
        said = [f"v(S): {own.rule.mean}, on the test set of all clients; {_over(own)}"]
        said.append(f"v(all) {mean[every]:.4g}, v(none) {mean[NOBODY]:.4g}, the initial model's")
        total, computed, needed = rounds_of(own)
        runs = counted(len(own.plan.units), "run")
        most = "up to " if own.base.recipe.stop.by_scores else ""
        said.append(f"{runs}; rounds computed: {most}{computed:,} of {total:,}; needed: {most}{needed:,}")
        if most:
            said.append("each subset's run ends by its own scores (stop), so that numbers of rounds differ")
        if diverged := sum(row.status == "diverged" for row in self.rows):
            said.append(f"{counted(diverged, 'run')} diverged: values that depend on it are empty")
        if skipped := self._skipped():
            each = [f"{own.names[k]} in {counted(count, 'run')}" for k, count in sorted(skipped.items())]
            whose = first_of(each, MAX_LISTED)
            skips = own.base.recipe.on_bad_client == "skip"
            said.append(f"{why_skipped(masked=self._masked, skips=skips)}: {whose}")
        if own.base.recipe.parameters.keeps_private and own.own_tests:
            said.append("clients outside S are measured with the private part of the initial model")
        alone = {one.name: math.isnan(one.alone) for one in self.clients if not math.isnan(one.with_all)}
        if own.orders and any(alone.values()) and not all(alone.values()):
            names = [name for name, is_unknown in alone.items() if is_unknown]
            said.append(f"own: alone was not computed for {first_of(names, 3)}: no random order begins with them")
        return said

    @property
    def _masked(self) -> bool:
        return self.coalitions.base.recipe.secure_aggregation is not None

    def _skipped(self) -> Counter[int]:
        """Return client → number of runs in which at least one round left out its update."""
        runs = [row.unit.recipe for row in self.rows if self._masked or row.unit.recipe.on_bad_client == "skip"]
        records = (read_rounds(recipe.output / RECORD) for recipe in runs if (recipe.output / RECORD).exists())
        return Counter(k for record in records for k in {k for row in record for k in skipped_in(row)})


def _over(coalitions: Coalitions) -> str:
    """Return as text how values were computed, and whether means and intervals are over seeds or random orders."""
    seeds = counted(len(coalitions.seeds), "seed")
    if coalitions.orders:
        return f"Shapley values of {_drawn(coalitions)}, 95 % intervals over them; leave-one-out over {seeds}"
    which = "Shapley values of all subsets" if coalitions.orders is None else "leave-one-out alone"
    return f"{which}, {'means and 95 % intervals over ' if len(coalitions.seeds) > 1 else 'of '}{seeds}"


def _drawn(coalitions: Coalitions) -> str:
    """Return as text the number of seeds or random orders over which the figure's values are means."""
    if coalitions.orders:
        return counted(len(coalitions.orders), "random order")
    return counted(len(coalitions.seeds), "seed")


def contributed(coalitions: Coalitions) -> CoalitionValues:
    """Return the clients' contributions from the finished runs of all subsets. Called on rank 0 alone.

    Raises:
        InputError, EnvironmentFailure, Diverged: runs ended without a result, or all diverged.
    """
    plan = coalitions.plan
    rows, _ = read_results(plan, run_states(plan, Claims(plan.folder, "report")), coalitions.rule)
    RankedSweep(plan, tuple(rows), (), coalitions.rule).raise_if_failed(takes_fresh=False)
    scores = {row.unit.name: row.score for row in rows}
    values = []
    for seed in coalitions.seeds:
        own = {subset: scores[coalitions.unit_of[subset, seed].name] for subset in coalitions.subsets}
        values.append({NOBODY: _of_initial_model(coalitions, seed), **own})
    finished = {row.unit.name for row in rows if row.status == "finished"}
    return CoalitionValues(coalitions, rows, values, _clients(coalitions, values, finished))


def _of_initial_model(coalitions: Coalitions, seed: str) -> float:
    """Return v(∅), the initial model's score; nan if it is not a number."""
    every = frozenset(range(len(coalitions.names)))
    recipe = coalitions.unit_of[every, seed].recipe
    parts, evaluator = assemble(recipe, World())
    with parts.clients:
        found = evaluator(parts.initial_w.to("cpu"), test=True, train=False)[coalitions.rule.column]
    return float(found) if isinstance(found, int | float) else math.nan


def _clients(
    coalitions: Coalitions, values: Sequence[Mapping[Subset, float]], finished: Collection[str]
) -> list[Contribution]:
    count, sign = len(coalitions.names), 1.0 if coalitions.rule.largest else -1.0
    scores = [score for own in values for score in own.values()]
    left_out = estimates(sign * np.array([leave_one_out(own, count) for own in values]), scores)
    shares = [NONE] * count
    if coalitions.orders is None:
        shares = estimates(sign * np.array([shapley(own, count) for own in values]), scores)
    elif coalitions.orders:
        shares = estimates(sign * added_in(coalitions.orders, mean_over(values)), scores)
    every, *others = without_one(count)
    found = []
    for k in range(count):
        of_all, of_others, of_one = (
            np.array([_own_score(coalitions, subset, seed, k, finished) for seed in coalitions.seeds])
            for subset in (every, others[k], frozenset({k}))
        )
        (takes,) = estimates(sign * (of_all - of_others)[:, None], [*of_all, *of_others])
        found.append(
            Contribution(
                client=k,
                name=coalitions.names[k],
                samples=coalitions.sizes[k],
                left_out=left_out[k],
                shapley=shares[k],
                with_all=float(of_all.mean()),
                without=float(of_others.mean()),
                alone=float(of_one.mean()),
                takes=takes,
            )
        )
    return found


def _own_score(coalitions: Coalitions, subset: Subset, seed: str, client: int, finished: Collection[str]) -> float:
    """Return a client's metric on its own test set after a run; nan if the run is unfinished or did not record it."""
    unit = coalitions.unit_of.get((subset, seed))
    path = None if unit is None or unit.name not in finished else unit.recipe.output / "clients.csv"
    if path is None or not coalitions.own_tests or not path.exists():
        return math.nan
    measure = coalitions.rule.column.removeprefix("test_")
    scores = clients_table(path)
    own = scores[(scores["client"] == str(client)) & (scores["model"] == "global") & (scores["split"] == "test")]
    last: dict[str, str] = max(own.to_dict("records"), key=lambda row: int(row["round"]), default={})
    return float(last.get(measure) or math.nan)


def write_contributions(found: CoalitionValues) -> Path:
    """Write ``contributions.csv``, ``values.csv``, the HTML page and the figure; return the page's path.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    folder, own = found.coalitions.plan.folder, found.coalitions
    has_shapley = own.orders is None or bool(own.orders)
    figure = figure_of(found.clients, own.rule.column, _drawn(own), has_shapley=has_shapley)
    files = {f"contributions{suffix}": content for suffix, content in to_files(figure).items()}
    refuse_link(folder / FIGURES)
    head, rows = table(found)
    about = {"run": str(own.base.folder), "federation": str(own.base.recipe.data), "seeds": ", ".join(own.seeds)}
    facts = {"name": own.base.recipe.name, "about": about, "head": head, "rows": rows, "notes": found.notes}
    page = rendered("contributions.html.j2", "lab/whatif", **facts, figure=to_svg(figure, "contributions"))
    tables = {TABLE: as_csv([_record(one) for one in found.clients]), VALUES: as_csv(_value_records(found))}
    write_files(folder / FIGURES, files)
    write_files(folder, {**tables, PAGE: page})
    return folder / PAGE


def table(found: CoalitionValues) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of the table of clients, as text; columns without any value are left out."""
    head = ("client", "samples", "leave-one-out", "Shapley", "own: with all", "own: without it", "takes", "own: alone")
    rows = [
        (
            one.name,
            f"{one.samples:,}",
            *(_text(estimate) for estimate in (one.left_out, one.shapley)),
            *(_number(value) for value in (one.with_all, one.without)),
            _text(one.takes),
            _number(one.alone),
        )
        for one in found.clients
    ]
    kept = [place for place in range(len(head)) if place < 3 or any(row[place] != "–" for row in rows)]
    return tuple(head[place] for place in kept), [tuple(row[place] for place in kept) for row in rows]


def _text(estimate: MeanEstimate) -> str:
    if math.isnan(estimate.mean):
        return "–"
    half = "" if estimate.half_width is None else f" ± {estimate.half_width:.2g}"
    return f"{estimate.mean:+.4g}{half}".replace("-", "−") if estimate.mean else f"0{half}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"


def _record(one: Contribution) -> dict[str, Any]:
    """Return a client's row of ``contributions.csv``."""
    pairs = {"leave_one_out": one.left_out, "shapley": one.shapley, "takes": one.takes}
    spread = {
        key: value
        for name, own in pairs.items()
        for key, value in ((name, own.mean), (f"{name}_half_width", own.half_width))
    }
    own = {"own_with_all": one.with_all, "own_without": one.without, "own_alone": one.alone}
    return {"client": one.client, "name": one.name, "samples": one.samples, **spread, **own}


def _value_records(found: CoalitionValues) -> Sequence[dict[str, Any]]:
    """Return the rows of ``values.csv``: v(S) of each subset and seed, as recorded."""
    own, every = found.coalitions, frozenset(range(len(found.coalitions.names)))
    return [
        {
            "subset": as_numbers(subset),
            "left_out": as_numbers(every - subset),
            "seed": seed,
            own.rule.column: value,
            "folder": str(own.unit_of[subset, seed].recipe.output.relative_to(own.plan.folder)) if subset else "",
        }
        for seed, values in zip(own.seeds, found.values, strict=True)
        for subset, value in values.items()
    ]
