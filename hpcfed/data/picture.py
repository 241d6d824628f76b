"""Distribution of classes and samples over the clients of a federation: counts, a text heat map, a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from hpcfed.data.federation import Federation
from hpcfed.data.samples import draw_samples, has_pictures, samples_height
from hpcfed.data.sites import MOST_LABELS, MOST_SITES, Labels, site_names
from hpcfed.errors import InputError
from hpcfed.io.atomic import write_whole
from hpcfed.io.console import short_names
from hpcfed.io.figure import literal, rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

MAX_TEXT_ROWS, MAX_TEXT_COLUMNS = 100, 60
MAX_FIGURE_ROWS = 1000
MOST_CELLS = 60
"""Most cells of the picture that show their number of samples."""
LEVELS = (0.0, 0.05, 0.15, 0.35, 0.60)
"""Exclusive lower bounds of the shares of a client's samples shown by `SHADES`; a blank stands for no samples."""
SHADES = "·░▒▓█"
STYLES = ("bright_black", "blue", "cyan", "yellow", "bright_red")
FIGURE_3_SHARES = (0.4, 0.6, 0.8)
FIGURE_TYPES = (".png", ".pdf", ".svg")


def check_picture(path: Path | None) -> None:
    """Refuse a picture of an unknown type.

    Raises:
        InputError: the file's suffix is no picture's.
    """
    if path is not None and path.suffix not in FIGURE_TYPES:
        got = path.suffix or "no ending"
        raise InputError("unknown type of picture", where=str(path), expected=", ".join(FIGURE_TYPES), got=got)


def classes_for_share(counts: np.ndarray, share: float = 0.8) -> np.ndarray:
    """Return how many of each client's largest classes hold `share` of its samples, (N,) int64, from counts (N, K)."""
    held = np.cumsum(np.sort(counts, axis=1)[:, ::-1], axis=1)
    return np.minimum(1 + (held < share * held[:, -1:]).sum(axis=1), counts.shape[1])


def text_heat_map(counts: np.ndarray, client_names: Sequence[str] = (), classes: Sequence[str] = ()) -> list[Text]:
    """Return lines of text: clients down, classes across, the share of a client's samples as a shade.

    Neighbouring clients and classes are merged if there are too many to fit. Where names of classes do not fit, or
    there are none, columns have their numbers.
    """
    cells, clients = _merge(counts, MAX_TEXT_ROWS)
    cells, columns = _merge(cells.T, MAX_TEXT_COLUMNS)
    cells = cells.T
    shares = cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)
    merged = len(cells) < len(counts)
    if merged or not client_names:
        names = [_span(clients, row) for row in range(len(cells))]
    else:
        names = short_names(client_names)
    heads = short_names(classes) if len(classes) == len(cells.T) else []
    if not heads or len(heads) * (max(map(len, heads)) + 1) > MAX_TEXT_COLUMNS:
        heads = [str(column) for column in columns[:-1]]
    margin, width = max(6, *map(len, names)), max(2, *(len(head) + 1 for head in heads))
    if width * len(heads) > MAX_TEXT_COLUMNS:
        width = 1
    head = "".join(head[-max(1, width - 1) :].rjust(width) for head in heads)
    lines = [Text(f"{'client':>{margin}} {head}", style="bold")]
    for name, row in zip(names, shares, strict=True):
        line = Text(f"{name:>{margin}} ")
        for value in row:
            level = int(np.searchsorted(LEVELS, value)) - 1
            shade, style = (SHADES[level], STYLES[level]) if level >= 0 else (" ", "")
            line.append(" " * (width > 1) + shade * max(1, width - 1), style=style)
        lines.append(line)
    bounds = [f"{SHADES[0]} below {LEVELS[1]:.0%}"]
    bounds += [f"{shade} from {low:.0%}" for shade, low in zip(SHADES[1:], LEVELS[1:], strict=True)]
    lines.append(Text(f"share of a client's samples: {'  '.join(bounds)}", style="dim"))
    return lines


def save_figure(federation: Federation, labels: Labels | None, path: Path) -> None:
    """Draw clients × classes (if any), the clients' sizes, histograms of both, and a few samples.

    Few clients and labels are named; without `labels` their panels are left out. The suffix of `path` sets the type.
    The histogram of classes is that of FedDyn's Figure 3: in how many classes 40, 60 and 80 % of a client's data lie.

    Raises:
        OSError: the file can't be written.
    """
    title, further = f"{federation.name}: {describe_partition(federation)}", has_pictures(federation)
    names = site_names(federation) if federation.num_clients <= MOST_SITES else None
    figure = partition_figure(
        title, federation.sizes, names, labels, *([samples_height(federation)] if further else [])
    )
    if further:
        draw_samples(federation, figure.subfigs[2])
    write_whole(path, rendered(figure, path.suffix[1:], dpi=150))


def partition_figure(
    title: str, sizes: np.ndarray, names: Sequence[str] | None, labels: Labels | None, *further: float
) -> Figure:
    """Return a figure of clients × classes with the clients' sizes, and of histograms of both; its subfigures.

    Args:
        sizes: (N,), samples of each client.
        names: of the clients; None for their numbers.
        further: heights of empty subfigures below.
    """
    from hpcfed.io.shown_figure import ShownFigure

    heights = [5.0, 2.5, *further]
    figure = ShownFigure(figsize=(8.5, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_clients(sizes, names, labels, parts[0])
    _draw_histograms(sizes, None if labels is None else labels.counts, parts[1])
    figure.suptitle(literal(title), fontsize=10)
    return figure


def _draw_clients(sizes: np.ndarray, names: Sequence[str] | None, labels: Labels | None, figure: SubFigure) -> None:
    """Draw clients × classes, and the clients' sizes beside them."""
    from matplotlib.ticker import MaxNLocator

    counts = None if labels is None else labels.counts
    panels = 1 if counts is None else 2
    axes = figure.subplots(1, panels, squeeze=False, sharey=True, width_ratios=[3, 2][-panels:])[0]
    top = len(sizes) - 0.5
    if counts is not None:
        cells, _ = _merge(counts, MAX_FIGURE_ROWS)
        shares = cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)
        extent = (-0.5, counts.shape[1] - 0.5, top, -0.5)
        image = axes[0].imshow(shares, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest", extent=extent)
        axes[0].set_xlabel("class")
        axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
        if labels is not None and len(labels.names) <= MOST_LABELS:
            axes[0].set_xticks(range(len(labels.names)), map(literal, short_names(labels.names)))
        if counts.size <= MOST_CELLS:
            for (row, column), share in np.ndenumerate(shares):
                colour = "white" if share > 0.6 * shares.max() else "black"
                axes[0].text(
                    column, row, f"{counts[row, column]:,}", ha="center", va="center", color=colour, fontsize=8
                )
        figure.colorbar(image, ax=axes[0], label="share of the client's samples")
    if len(sizes) <= MOST_SITES:
        axes[-1].barh(np.arange(len(sizes)), sizes, color="0.6")
    else:
        bars, edges = _merge(sizes[:, None], MAX_FIGURE_ROWS)
        axes[-1].stairs(bars[:, 0] / np.diff(edges), edges - 0.5, orientation="horizontal", fill=True, color="0.6")
    axes[-1].set_xlabel("samples per client")
    axes[0].set_ylabel("client")
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    if names is not None and len(names) <= MOST_SITES:
        axes[0].set_yticks(range(len(names)), map(literal, short_names(names)))
    axes[0].set_ylim(top, -0.5)


def _draw_histograms(sizes: np.ndarray, counts: np.ndarray | None, figure: SubFigure) -> None:
    """Draw histograms of the clients' sizes and of the number of classes that hold most of a client's data."""
    from matplotlib.ticker import MaxNLocator

    from hpcfed.io.figure_style import DASHES

    axes = figure.subplots(1, 1 if counts is None else 2, squeeze=False)[0]
    axes[-1].hist(sizes, bins=min(30, max(1, len(np.unique(sizes)))), color="0.6", edgecolor="white")
    axes[-1].set_xlabel("samples per client")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # two need fractions for equal sizes
    for each in axes:
        each.set_ylabel("clients")
        each.yaxis.set_major_locator(MaxNLocator(integer=True))
    if counts is None:
        return
    filled = counts[counts.sum(axis=1) > 0]
    classes = np.arange(counts.shape[1] + 2) - 0.5
    for share, dash in zip(FIGURE_3_SHARES, DASHES, strict=False):
        held = np.histogram(classes_for_share(filled, share), classes)[0]
        axes[0].stairs(held, classes, label=f"{share:.0%} of the data", linestyle=dash)
    axes[0].set_xlabel("classes that hold most of a client's data")
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].legend(fontsize=7)


def describe_partition(federation: Federation) -> str:
    """Return the partition in one line, such as ``dirichlet-client, alpha 0.3, seed 0``."""
    rest = [f"{key} {value}" for key, value in federation.partition.items() if key != "scheme"]
    return ", ".join([str(federation.partition.get("scheme", "unknown partition")), *rest])


def _merge(counts: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Add up neighbouring rows of (n, m) so that at most `limit` remain; return them and their edges, 0 … n."""
    edges = np.linspace(0, len(counts), min(limit, len(counts)) + 1).astype(np.int64)
    return np.add.reduceat(counts, edges[:-1], axis=0), edges


def _span(edges: np.ndarray, row: int) -> str:
    first, last = int(edges[row]), int(edges[row + 1]) - 1
    return str(first) if first == last else f"{first}-{last}"
