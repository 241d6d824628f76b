"""The sections of a report, with their figures, in the order of the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpcfed.io.figure import literal
from hpcfed.lab.report.group import Group
from hpcfed.lab.report.plots import ClientsPlot, DifferencePlot, LinePlot, SecondsPlot
from hpcfed.lab.report.read import Run
from hpcfed.lab.report.tables import Table, clients_table, sites_table, timing_table

Plot = LinePlot | DifferencePlot | ClientsPlot | SecondsPlot


@dataclass(frozen=True)
class PageSection:
    """A section of the page: heading, figures, and a function that makes the groups' table, or None for no table."""

    title: str
    plots: tuple[Plot, ...]
    table: Callable[[Sequence[Group]], Table | None] = lambda _: None


AGAINST = {
    "round": ("rounds", "rounds"),
    "params": ("params", "parameters sent, up and down"),
    "gradients": ("gradients", "minibatch gradients computed"),
    "seconds": ("seconds", "time, without waits in a queue"),
}
"""Column of the horizontal axis → its names in file names and in captions."""


def _against_all(column: str, what: str) -> Iterator[LinePlot]:
    for against, (short, words) in AGAINST.items():
        yield LinePlot(_file(column, short), column, against, what, f"{what.capitalize()} against {words}.")


def _file(column: str, against: str) -> str:
    return f"{column.replace('_', '-')}-{against}"


ACCURACY = PageSection("Test accuracy", tuple(_against_all("test_accuracy", "test accuracy")))
LOSS = PageSection("Test loss", tuple(_against_all("test_loss", "test loss")))
OVER_ROUNDS = {
    "local_loss": ("local training loss", "Loss of local training: mean over the cohort's minibatches."),
    "train_loss": ("training loss", "Training loss of the global model: unweighted mean over all clients."),
    "train_accuracy": ("training accuracy", "Training accuracy of the global model: unweighted mean over all clients."),
    "server_lr": ("server step size $\\eta_g$", "Server step size η_g of each round."),
}
"""Column drawn against rounds alone → its label and caption."""
TRAINING = PageSection(
    "Training and server",
    tuple(LinePlot(_file(column, "rounds"), column, "round", *words) for column, words in OVER_ROUNDS.items()),
)
SEED_BY_SEED = "Mean difference from the baseline's run of the same seed, with its 95 % confidence interval."
DIFFERENCES = PageSection("Seed by seed", (DifferencePlot("difference-rounds", SEED_BY_SEED),))
WORST_FIRST = "What each client gets from the last model evaluated, clients in order, worst first."
CLIENTS = PageSection("Clients", (ClientsPlot("clients", WORST_FIRST),), clients_table)
SITES = PageSection("Clients by name", (), sites_table)
TIME = PageSection("Time", (SecondsPlot("seconds", "Where the time of a round goes."),), timing_table)


NO_FILE_NAME = re.compile(r"[^\w.+-]")
"""Characters that a metric's name cannot have; a stranger's record may have any, such as the slashes of a path."""


def own_metrics(runs: Sequence[Run]) -> PageSection:
    """Return the section of metrics beside accuracy and loss: a figure for each column in `Run.own_metrics`."""
    columns = dict.fromkeys(column for run in runs for column in run.own_metrics)
    plots = []
    for column in columns:
        kind, _, name = column.partition("_")
        words = f"{name} on the {'test' if kind == 'test' else 'training'} set"
        file = f"{NO_FILE_NAME.sub('-', column)}-rounds"
        plots.append(LinePlot(file, column, "round", literal(words), f"{words} against rounds."))
    return PageSection("Own metrics", tuple(plots))


SECTIONS = (ACCURACY, LOSS, TRAINING, DIFFERENCES, CLIENTS, SITES, TIME)


def files_of(sections: Sequence[PageSection]) -> tuple[str, ...]:
    """Return the names of all files, PNG and PDF, of the figures in `sections`, whether or not they can be drawn."""
    return tuple(
        f"{plot.file}{suffix}" for section in sections for plot in section.plots for suffix in (".png", ".pdf")
    )
