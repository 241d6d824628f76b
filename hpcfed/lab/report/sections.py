"""The sections of a report, with their figures, in the order of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcfed.lab.report.plots import ClientsPlot, DifferencePlot, LinePlot, SecondsPlot
from hpcfed.lab.report.read import Run

Plot = LinePlot | DifferencePlot | ClientsPlot | SecondsPlot


@dataclass(frozen=True)
class PageSection:
    """A heading of the page, and the figures under it."""

    title: str
    plots: tuple[Plot, ...]


AGAINST = {
    "round": ("rounds", "rounds"),
    "params": ("params", "parameters sent, up and down"),
    "gradients": ("gradients", "minibatch gradients computed"),
    "seconds": ("seconds", "time, without waits in a queue"),
}
"""Columns of the horizontal axis, with their names in file names and in captions."""


def _against_all(column: str, what: str) -> Iterator[LinePlot]:
    for against, (short, words) in AGAINST.items():
        file = f"{column.replace('_', '-')}-{short}"
        yield LinePlot(file, column, against, what, f"{what.capitalize()} against {words}.")


ACCURACY = PageSection("Test accuracy", tuple(_against_all("test_accuracy", "test accuracy")))
LOSS = PageSection("Test loss", tuple(_against_all("test_loss", "test loss")))
TRAINING = PageSection(
    "Training and server",
    (
        LinePlot(
            "local-loss-rounds",
            "local_loss",
            "round",
            "local training loss",
            "Loss of local training: mean over the cohort's minibatches.",
        ),
        LinePlot(
            "train-loss-rounds",
            "train_loss",
            "round",
            "training loss",
            "Training loss of the global model: unweighted mean over all clients.",
        ),
        LinePlot(
            "train-accuracy-rounds",
            "train_accuracy",
            "round",
            "training accuracy",
            "Training accuracy of the global model: unweighted mean over all clients.",
        ),
        LinePlot(
            "server-lr-rounds",
            "server_lr",
            "round",
            "server step size $\\eta_g$",
            "Server step size η_g of each round.",
        ),
    ),
)
DIFFERENCES = PageSection(
    "Seed by seed",
    (
        DifferencePlot(
            "difference-rounds",
            "Mean difference from the baseline's run of the same seed, with its 95 % confidence interval.",
        ),
    ),
)
CLIENTS = PageSection(
    "Clients",
    (ClientsPlot("clients", "What each client gets from the last model evaluated, clients in order, worst first."),),
)
SITES = PageSection("Clients by name", ())
TIME = PageSection("Time", (SecondsPlot("seconds", "Where the time of a round goes."),))


def own_metrics(runs: Sequence[Run]) -> PageSection:
    """Return the section of the recipes' own metrics; empty without any."""
    columns = dict.fromkeys(column for run in runs for column in run.own_metrics)
    plots = []
    for column in columns:
        kind, _, name = column.partition("_")
        words = f"{name} on the {'test' if kind == 'test' else 'training'} set"
        plots.append(LinePlot(f"{column}-rounds", column, "round", words, f"{words} against rounds."))
    return PageSection("Own metrics", tuple(plots))


SECTIONS = (ACCURACY, LOSS, TRAINING, DIFFERENCES, CLIENTS, SITES, TIME)


def files_of(sections: Sequence[PageSection]) -> tuple[str, ...]:
    """Return the names of all files that the figures of these sections can have."""
    return tuple(
        f"{plot.file}{suffix}" for section in sections for plot in section.plots for suffix in (".png", ".pdf")
    )
