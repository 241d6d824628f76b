"""FedDyn's figure 3: the fewest classes that hold 40, 60 and 80 % of a client's data, as a table and histograms."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.report.tables import Table
from hpcfed.lab.reproduce.experiment import Experiment
from hpcfed.lab.reproduce.figures import draw_lines
from hpcfed.lab.reproduce.inputs import Places

SHARES = (0.4, 0.6, 0.8)


def class_counts(labels: np.ndarray, offsets: np.ndarray, num_classes: int, share: float) -> np.ndarray:
    """Return for each client the smallest number of classes that hold at least `share` of its samples, (N,).

    The number is 1 for a client without samples.

    Args:
        labels: (n,) labels of all samples, sorted by client.
        offsets: (N+1,); client k has samples ``offsets[k]:offsets[k+1]``.
        num_classes: number of classes; labels are 0 to ``num_classes − 1``.
        share: fraction of a client's samples, in (0, 1].
    """
    counts = []
    for start, end in itertools.pairwise(offsets):
        sizes = np.sort(np.bincount(labels[start:end], minlength=num_classes))[::-1]
        counts.append(int(np.searchsorted(np.cumsum(sizes), share * (end - start) - 1e-9) + 1))
    return np.array(counts)


def compare_classes(experiment: Experiment, places: Places, folder: Path) -> tuple[Table, list[Path]]:
    """Return a table of class counts per case and share of `SHARES`, and the PNG files in `folder`, one per share.

    Raises:
        InputError: a case's samples have no labels.
        EnvironmentFailure: the disk refuses.
    """
    found = {case.title: _of_file(places.federation(case.data, 0)) for case in experiment.cases.values()}
    rows = []
    for case in experiment.cases.values():
        for share, counts in found[case.title].items():
            deviation = f" ± {counts.std(ddof=1):.2f}" if len(counts) > 1 else ""
            rows.append((case.title, f"{share:.0%}", f"{counts.mean():.2f}{deviation}"))
    header = ("Case", "Share of the data", "Classes")
    note = f"Mean ± standard deviation over clients. {experiment.note}".strip()
    pictures = [_draw(found, share, folder) for share in SHARES]
    return Table(experiment.title, header, tuple(rows), note), pictures


def _of_file(path: Path) -> dict[float, np.ndarray]:
    with Federation.open(path) as federation:
        if federation.task != "classification":
            expected = "a label per sample, for kind: classes"
            raise InputError("data", where=str(path), expected=expected, got=federation.task)
        labels = federation.train()[1]
        return {share: class_counts(labels, federation.offsets, federation.num_classes or 0, share) for share in SHARES}


def _draw(found: Mapping[str, Mapping[float, np.ndarray]], share: float, folder: Path) -> Path:
    """Draw the number of clients against the number of classes that hold `share` of their data; return the PNG file."""
    counts = {title: np.unique(counts[share], return_counts=True) for title, counts in found.items()}
    labels = f"classes that hold {share:.0%} of a client's data", "clients"
    return draw_lines(folder, f"classes-{share:.0%}".rstrip("%"), counts, labels, marker="o")
