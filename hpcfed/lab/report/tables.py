"""The tables of a report, in plain text: the same on the page and in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpcfed.errors import first_of
from hpcfed.lab.report.clients import GLOBAL, Clients, Fairness
from hpcfed.lab.report.group import ABSENT, Group, differences, flatten, joined, settings
from hpcfed.lab.report.measure import (
    Criterion,
    Quantity,
    Reach,
    Spread,
    best,
    core_hours,
    final,
    mean_seconds,
    reach,
    spread,
    unit_of,
)
from hpcfed.lab.report.paired import (
    CONFIDENCE,
    MeanEstimate,
    paired_differences,
    samples_note,
    shared_draws,
)
from hpcfed.lab.report.read import Run
from hpcfed.lab.report.text import (
    count_text,
    criterion_text,
    difference_text,
    hours_text,
    rounds_difference_text,
    rounds_text,
    seconds_text,
    target_text,
)
from hpcfed.run_folder.machines import BEFORE, MOST_NAMED, earlier
from hpcfed.run_folder.rounds import TIMERS

Format = Callable[[Spread], str]
MOST_SITES, MOST_COLUMNS = 30, 12
"""Maximum number of clients with a row each, and of columns with their measures."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. The first column names the row; ``rows[i][j]`` is bold if `strong` has (i, j)."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    strong: frozenset[tuple[int, int]] = frozenset()


def results_table(groups: Sequence[Group], criterion: Criterion, window: int = 1) -> Table:
    """Return the table of results, a row per group: final and best value of the criterion, costs of a run, status.

    Final and best values are means of `window` evaluations in a row.
    """
    final_title, best_title = f"Final {criterion.title}", f"Best {criterion.title}"
    seeds = "Seed" if all(len(group.runs) == 1 for group in groups) else "Seeds"
    sent = _sent(groups)
    header = ("Method", seeds, "Rounds", final_title, best_title, *sent.values(), "Gradients", "Per round", "Status")
    notes = [f"Final and best: means of {window} evaluations in a row."] if window > 1 else []
    if criterion.column.startswith("test_"):
        notes.append("Best is the best round on the test set itself, so it is optimistic.")
    if differ := samples_note(groups, criterion.column):
        notes.append(differ)
    if own := [group.label for group in groups if _is_own(group)]:
        notes.append(
            f"Params sent of {', '.join(own)}: dense equivalents; what a method of yours compresses counts whole."
        )
    return Table("Results", header, tuple(_result(group, criterion, window, sent) for group in groups), " ".join(notes))


def _sent(groups: Sequence[Group]) -> dict[str, str]:
    """Return column of the record → title: parameters sent, and bytes sent if a recipe has ``updates`` or ``down``."""
    packed = {"updates": ("bytes_up", "Bytes up"), "down": ("bytes_down", "Bytes down")}
    used = [column for key, column in packed.items() if any(group.recipe.get(key) for group in groups)]
    return {"params": "Params sent", **dict(used)}


def _is_own(group: Group) -> bool:
    """Whether the method is user-defined, by a factory; such a method may send less than dense vectors."""
    algorithm = group.runs[0].recipe.get("algorithm")
    return isinstance(algorithm, Mapping) and algorithm.get("factory") is not None


def _result(group: Group, criterion: Criterion, window: int, sent: Iterable[str]) -> tuple[str, ...]:
    def over_runs(value: Callable[[Run], float], text: Format) -> str:
        return _cell(spread(value(run) for run in group.runs), text, len(group.runs))

    def in_units(value: Spread) -> str:
        return criterion_text(value, criterion)

    return (
        group.label,
        group.seeds,
        _range([run.num_rounds for run in group.runs]),
        over_runs(lambda run: final(run, criterion.column, window), in_units),
        over_runs(lambda run: best(run, criterion, window), in_units),
        *(over_runs(partial(final, column=column), count_text) for column in sent),
        over_runs(lambda run: final(run, "gradients"), count_text),
        over_runs(lambda run: mean_seconds([run], "total"), seconds_text),
        _status(group),
    )


def targets_table(
    groups: Sequence[Group], criterion: Criterion, targets: Sequence[float], window: int, note: str
) -> Table:
    """Return the table of costs to reach each target, a row per target and group; `note` is shown below it.

    Costs are rounds, parameters sent, gradients and time until the mean of `window` evaluations reaches the target;
    also bytes sent if a recipe compresses them.
    """
    sent = _sent(groups)
    header = ("Method", "Target", "Rounds", *sent.values(), "Gradients", "Time")
    costs = ((group, reach(group, criterion, goal, window)) for goal in targets for group in groups)
    rows = [_reach_row(group, criterion, cost, sent) for group, cost in costs]
    return Table("Cost to reach a target", header, tuple(rows), note)


def _reach_row(group: Group, criterion: Criterion, cost: Reach, sent: Collection[str]) -> tuple[str, ...]:
    target = target_text(cost.target, criterion)
    if not cost.reached:
        ongoing = any(run.status == "unfinished" for run in group.runs)
        measured = any(np.isfinite(run.column(criterion.column)).any() for run in group.runs)
        said = "not reached yet" if ongoing else "not reached" if measured else "not measured"
        return group.label, target, said, *[ABSENT] * (len(sent) + 2)
    rounds, seconds = _cell(cost.spent["rounds"], rounds_text, cost.runs), cost.spent["seconds"]
    counts = [_cell(cost.spent[column], count_text, cost.reached) for column in (*sent, "gradients")]
    return group.label, target, rounds, *counts, _cell(seconds, seconds_text, cost.reached)


def differences_table(
    groups: Sequence[Group], baseline: Group, criterion: Criterion, targets: Sequence[float], window: int
) -> Table | None:
    """Return the table of mean paired differences from the baseline, a row per group that shares a seed with it.

    None if no group shares a seed. Cells are dashes for a group that was scored on samples other than the baseline's.
    """
    rows: list[tuple[str, ...]] = []
    strong: set[tuple[int, int]] = set()
    shared: dict[str, list[str]] = {}
    notes: list[str] = []
    found = paired_differences(groups, baseline, criterion, targets, window)
    has_several = any(len(apart.seeds) > 1 for apart in found)
    for apart in found:
        label, seeds = apart.group.label, joined(apart.seeds)
        if apart.why_not:
            rows.append((label, seeds, *[ABSENT] * (1 + len(targets))))
            notes.append(f"{label} has no difference: {apart.why_not}.")
            continue
        shared.setdefault(shared_draws(*apart.paired[0]), []).append(label)
        values = [apart.final, *apart.rounds]
        texts = [lambda value: difference_text(value, criterion), *[rounds_difference_text for _ in targets]]
        cells = [_difference(value, text, len(apart.paired)) for value, text in zip(values, texts, strict=True)]
        strong |= {(len(rows), column) for column, value in enumerate(values, start=2) if value and value.is_clear}
        rows.append((label, seeds, *cells))
    if not rows:
        return None
    unit = ", points" if criterion.is_fraction else ""
    goals = (f"Rounds to {target_text(target, criterion)}" for target in targets)
    header = (
        "Method",
        "Seeds" if has_several else "Seed",
        f"Final {criterion.title}{unit}",
        *goals,
    )
    if shared:
        what = (
            f"Each run minus the baseline's of the same seed: mean, and in brackets the {CONFIDENCE:.0%} confidence "
            f"interval of the mean (Student's t). It is bold where zero lies outside; of many some are so by chance. "
            f"{_shared_note(shared)}"
        )
        notes.insert(0, what.replace("%", " %", 1))
    return Table(f"Difference from {baseline.label}", header, tuple(rows), " ".join(notes), frozenset(strong))


def _shared_note(shared: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence per kind of pair: whether its two runs have the same cohorts and batches."""
    said = []
    for what, labels in shared.items():
        of_whom = "Both runs" if len(shared) == 1 else f"{', '.join(labels)} and the baseline"
        had = f"had the same {what}" if what else "had other data or draws: such pairs share no more than the seed"
        said.append(f"{of_whom} {had}{', but other batches' if what == 'cohorts' else ''}.")
    return " ".join(said)


def _difference(value: MeanEstimate | None, text: Callable[[float], str], num_pairs: int) -> str:
    """Return a difference as text, ``+0.79 [+0.21, +1.37]``; after ``2 of 3:`` if only 2 of 3 pairs have one."""
    if value is None:
        return ABSENT
    words = text(value.mean)
    if value.interval is not None:
        low, high = value.interval
        words += f" [{text(low)},\u00a0{text(high)}]"
    return words if value.count == num_pairs else f"{value.count} of {num_pairs}: {words}"


def clients_table(groups: Sequence[Group]) -> Table | None:
    """Return the table of the distribution over clients, a row per group and model; None if no client was evaluated."""
    rows: list[tuple[str, ...]] = []
    for group in groups:
        measured = [run.clients for run in group.runs if run.clients]
        for model in dict.fromkeys(name for clients in measured for name in clients.values):
            rows.append((group.label, model, *_fairness([c for c in measured if model in c.values], model)))
    if not rows:
        return None
    header = ("Method", "Model", "Samples", "Round", "Mean", "Deviation", "Worst tenth", "Best tenth")
    note = "All clients count alike. Tenths: means over the tenth of the clients served worst, and best."
    note += _clients_note(groups)
    return Table("Over clients", header, tuple(rows), note)


def _clients_note(groups: Sequence[Group]) -> str:
    """Return a sentence saying that groups were measured on different clients, and on how many; "" if on the same."""
    measured = {group.label: run.clients.names for group in groups for run in group.runs if run.clients}
    if len(set(measured.values())) < 2:
        return ""
    if len({len(names) for names in measured.values()}) == 1:
        return " They are not the same clients in all rows."
    return f" Clients differ: {'; '.join(f'{len(names):,} for {label}' for label, names in measured.items())}."


def sites_table(groups: Sequence[Group]) -> Table | None:
    """Return the table of clients by name: a row per client, a column per group and measure of the group's main model.

    A column's title names the main model if it is not the global one. None if no run evaluated its clients, if runs
    have different clients, or if there are more than `MOST_SITES`.
    """
    measured = {group.label: [run.clients for run in group.runs if run.clients] for group in groups}
    every = [clients for entry in measured.values() for clients in entry]
    if not every or len({clients.names for clients in every}) > 1 or len(every[0].names) > MOST_SITES:
        return None
    runs = {group.label: group.runs for group in groups}
    columns = [(label, name) for label, entry in measured.items() if entry for name in entry[0].measures]
    if len(columns) > MOST_COLUMNS:
        columns = [(label, entry[0].measure) for label, entry in measured.items() if entry]
    models = {label: entry[0].model for label, entry in measured.items() if entry}
    named = [(label, name if models[label] == GLOBAL else f"{name}, {models[label]}") for label, name in columns]
    heads = [name if len(measured) == 1 else f"{label}: {name}" for label, name in named]
    rows = [
        (
            name,
            " or ".join(dict.fromkeys(clients.sizes[k] for clients in every)),
            *(
                _of_client(measured[label], measure, k, unit_of(f"test_{measure}", runs[label]))
                for label, measure in columns
            ),
        )
        for k, name in enumerate(every[0].names)
    ]
    splits = " or ".join(dict.fromkeys(clients.split for clients in every))
    note = f"Of the last model evaluated, on the clients' {splits} samples; – where undefined."
    return Table("By client", ("Client", "Samples", *heads), tuple(rows), note)


def _of_client(measured: Sequence[Clients], measure: str, client: int, unit: Quantity) -> str:
    """Return a measure of one client as text: mean and standard deviation over the runs of a group."""
    values = [entry.measures[measure][client] for entry in measured if measure in entry.measures]
    what = Criterion(measure, measure, True, unit)
    return _cell(spread(values), lambda one: criterion_text(one, what), len(values))


def _fairness(measured: Sequence[Clients], model: str) -> tuple[str, ...]:
    is_accuracy = measured[0].measure == "accuracy"
    found = [Fairness.of(clients.values[model], higher_is_better=is_accuracy) for clients in measured]
    what = Criterion(f"test_{measured[0].measure}", measured[0].measure, higher_is_better=is_accuracy)

    def cell(name: str) -> str:
        over_runs = spread(getattr(entry, name) for entry in found)
        return _cell(over_runs, lambda value: criterion_text(value, what), len(found))

    rounds = _range([clients.round for clients in measured])
    return measured[0].split, rounds, *(cell(name) for name in ("mean", "std", "worst_tenth", "best_tenth"))


def timing_table(groups: Sequence[Group]) -> Table:
    """Return the table of times, a row per group.

    Columns: mean time of a round for each of `TIMERS`, imbalance, ranks × threads, and core-hours.
    """
    rows = []
    for group in groups:
        seconds = [_cell(spread([mean_seconds(group.runs, timer)]), seconds_text, 1) for timer in TIMERS]
        imbalance = np.concatenate([run.column("imbalance") for run in group.runs])
        imbalance = imbalance[np.isfinite(imbalance)]
        text = f"{imbalance.mean():.2f} ({imbalance.max():.2f})" if len(imbalance) else ABSENT
        hours = spread([core_hours(group.runs)])
        rows.append((group.label, *seconds, text, _places(group), _cell(hours, hours_text, 1)))
    timers = (timer.capitalize() for timer in TIMERS)
    header = ("Method", *timers, "Imbalance, mean (max)", "Ranks × threads", "Core-hours")
    note = (
        "Means over all rounds of all runs of a group. Local is the slowest rank's work, wait the mean time that ranks "
        "wait for it. Core-hours: ranks × threads × time of the rounds, all runs together, without start-up."
    )
    return Table("Time of a round", header, tuple(rows), note)


def _places(group: Group) -> str:
    """Return the combinations of ranks × threads in a group's runs, as text: ``4 × 1, 8 × 1``."""
    keys = ("ranks", "threads_per_rank")
    places = {tuple(str(run.environment.get(key, ABSENT)) for key in keys): None for run in group.runs}
    return ", ".join(" × ".join(place) for place in places)


def recipes_table(groups: Sequence[Group]) -> Table:
    """Return the table of what differs between groups: a row per recipe key or file of the user's code."""
    apart = differences([settings(group.runs[0]) for group in groups])
    rows = tuple((key, *values) for key, values in apart.items())
    runs = [run for group in groups for run in group.runs]
    note = f"All other keys{' and recorded files of code' if any(run.code for run in runs) else ''} are equal."
    factories = [flatten(run.recipe).get("algorithm.factory") for run in runs if not run.code]
    unknown = ", ".join(dict.fromkeys(name for name in factories if name))
    if unknown:
        note += f" Whether the code of {unknown} is the same was not recorded."
    return Table("What differs between the recipes", ("Key", *(group.label for group in groups)), rows, note)


def environment_table(groups: Sequence[Group]) -> Table:
    """Return the table of runs, including repeats of a seed: folder, method, seed, status, and all entries of
    ``environment.json`` that differ between runs.
    """
    runs = [(group, run) for group in groups for run in (*group.runs, *group.repeats)]
    apart = differences([_without_moves(run.environment) for _, run in runs])
    rows = [
        (str(run.folder), group.label, run.seed, run.status, *(values[index] for values in apart.values()))
        for index, (group, run) in enumerate(runs)
    ]
    titles = ("Algorithm" if key == "method" else key[:1].upper() + key[1:] for key in apart)  # Method is the label
    return Table("Runs", ("Folder", "Method", "Seed", "Status", *titles), tuple(rows))


def _without_moves(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``environment.json``; of machines from which the run went on, their last rounds alone."""
    last = [str(one["until"]) for one in earlier(environment)]
    before = {BEFORE: f"until round {first_of(last, MOST_NAMED)}"} if last else {}
    return {key: value for key, value in environment.items() if key != BEFORE} | before


def _cell(value: Spread | None, text: Format, num_runs: int) -> str:
    """Return a value as text, ``41 ± 2``, or ``2 of 3: 41 ± 2`` if only 2 of the group's 3 runs have one."""
    if value is None:
        return ABSENT
    return text(value) if value.count == num_runs else f"{value.count} of {num_runs}: {text(value)}"


def _range(rounds: Sequence[int]) -> str:
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{min(rounds)} to {max(rounds)}"


def _status(group: Group) -> str:
    counts = Counter(run.status for run in group.runs)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {status}" for status, n in counts.items())
