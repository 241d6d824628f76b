"""The terminal view of runs: curves, one line per run, and the time of a round by phase."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcfed.io.console import Console, short_names
from hpcfed.io.pace import clock
from hpcfed.lab.report.measure import unit_of
from hpcfed.lab.watch.canvas import Series, chart
from hpcfed.lab.watch.follow import WatchedRun
from hpcfed.run_folder.rounds import PHASES

COLOURS = ("#3a9bd1", "#e8743b", "#1fa37a", "#cc79a7", "#c49a1a", "#8592e0", "#8a8a8a")
OF_PHASES = ("#6a8ab8", "#d9634a", "#e0a458", "#8fa35f", "#8d98a5")
"""Colours of the phases, of medium lightness: readable on light and dark terminals."""
STATES = {"finished": "green", "stopped": "yellow", "diverged": "red", "failed": "red"}
CELLS = {"round": 0, "accuracy": 0, "loss": 72, "η_g": 90, "per round": 72, "imbalance": 80, "": 0}
"""Column of the table of runs → terminal width in characters from which it is shown."""
BAR = "bar"
DROPPED = ("imbalance", "η_g", "per round", BAR, "loss")
"""Columns that are left out, in this order, until all others are shown whole."""
LEAST = 7
"""Least height of a chart, in lines."""
SIDE_BY_SIDE = 100
"""Terminal width in characters from which two charts stand side by side."""
CURVES = (("test_accuracy", "test accuracy"), ("test_loss", "test loss"), ("train_loss", "training loss"))
MOST_SITES = 12
"""Maximum number of clients that are shown by name."""
LOCAL = ("local_loss", "local training loss")
IN_A_LINE = {"test loss": "test_loss", "local loss": "local_loss", "η_g": "server_lr"}
"""Word in a run's line of plain text → column of the record."""


def view(runs: Sequence[WatchedRun], width: int, height: int, *, scrolls: bool = False) -> RenderableType:
    """Return a view of `width` × `height` characters: charts, a line per run, and a single run's phases and clients.

    Without the lines for a chart it has none, unless it `scrolls`: then it may be higher than the terminal.
    """
    sites = _sites(runs[0]) if len(runs) == 1 else None
    lines = len(runs) + 3 + (2 if len(runs) == 1 else 0)
    if sites:
        lines += len(Console(width=width).render_lines(sites))
    parts: list[RenderableType] = []
    left = height - lines - 1
    if any(run.done for run in runs) and (left >= LEAST or scrolls):
        parts += [_charts(runs, width, min(max(left, LEAST), 20)), Text()]
    parts.append(_table(runs, width))
    if len(runs) == 1 and runs[0].done:
        parts += [Text(), _phases(runs[0], width)]
        if sites:
            parts.append(sites)
    return Group(*parts)


def plain(run: WatchedRun) -> str:
    """Return a run's progress as one line of plain text."""
    cells = [
        f"round {run.done}/{run.rounds}",
        _accuracy(run) and f"accuracy {_accuracy(run)}",
        *(f"{word} {text}" for word, column in IN_A_LINE.items() if (text := _number(run.last(column)))),
        _pace(run),
        _imbalance(run) and f"imbalance {_imbalance(run)}",
        _state(run).plain,
    ]
    return f"{run.name}: " + "  ".join(cell for cell in cells if cell)


def _imbalance(run: WatchedRun) -> str:
    """Return the mean imbalance of the last rounds as text; "" if it is not recorded, as in private runs."""
    value = run.recent("imbalance") if run.done else math.nan
    return f"{value:.2f}" if math.isfinite(value) else ""


def _charts(runs: Sequence[WatchedRun], width: int, height: int) -> RenderableType:
    recorded = [entry for entry in CURVES if any(math.isfinite(run.last(entry[0])) for run in runs)]
    shown = [*recorded, LOCAL][:2]
    if width < SIDE_BY_SIDE:
        return Group(*_chart(runs, *shown[0], width, height))
    half = (width - 4) // 2
    grid = Table.grid(padding=(0, 4, 0, 0))
    for _ in shown:
        grid.add_column(width=half, no_wrap=True)
    for pair in zip(*(_chart(runs, column, title, half, height) for column, title in shown), strict=True):
        grid.add_row(*pair)
    return grid


def _chart(runs: Sequence[WatchedRun], column: str, title: str, width: int, height: int) -> list[Text]:
    series = [
        Series(_colour(number), range(1, run.done + 1), run.columns.get(column, ())) for number, run in enumerate(runs)
    ]
    rounds = max(run.done for run in runs)  # not the recipe's: the first hundred of 20,000 would be one stroke
    return chart(title, series, rounds, width, height, is_percentage=unit_of(column) == "fraction")


def _table(runs: Sequence[WatchedRun], width: int) -> Table:
    rows = [_cells(run) for run in runs]
    has_accuracy = any(_accuracy(run) for run in runs)
    shown = [name for name, room in CELLS.items() if width >= room and (name != "accuracy" or has_accuracy)]
    widths = {name: max(cell_len(name), *(cell_len(str(row[name])) for row in rows)) for name in shown}
    widths[BAR] = max(8, min(24, width // 6))
    longest = max(3, *(cell_len(run.name) for run in runs))

    def room() -> int:
        return width - sum(each + 2 for each in widths.values())

    for name in DROPPED:
        if room() < min(longest, max(width // 5, 12)):
            widths.pop(name, None)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=max(room(), 8))
    if BAR in widths:
        table.add_column("", width=widths[BAR])
    shown = [name for name in shown if name in widths]
    for name in shown:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for number, (run, row) in enumerate(zip(runs, rows, strict=True)):
        colour = _colour(number)
        bar = ProgressBar(run.rounds, run.done, complete_style=colour, finished_style=colour)
        table.add_row(Text(run.name, colour), *([bar] if BAR in widths else []), *(row[name] for name in shown))
    return table


def _cells(run: WatchedRun) -> dict[str, str | Text]:
    """Return a run's cells in the columns of `CELLS`."""
    loss = next((text for name in ("test_loss", "local_loss") if (text := _number(run.last(name)))), "–")
    return {
        "round": f"{run.done}/{run.rounds}",
        "accuracy": _accuracy(run) or "–",
        "loss": loss,
        "η_g": _number(run.last("server_lr")) or "–",
        "per round": _pace(run).removesuffix("/round") or "–",
        "imbalance": _imbalance(run) or "–",
        "": _state(run),
    }


def _phases(run: WatchedRun, width: int) -> RenderableType:
    """Return the mean time of the last rounds by phase, as a divided bar and as percentages."""
    seconds = {phase: run.recent(f"seconds.{phase}") for phase in PHASES}
    seconds["local"] -= seconds["wait"]  # recorded is the slowest rank's local time; waiting is a phase of its own
    total = sum(value for value in seconds.values() if value > 0)
    bar, words, length = Text().append("time of a round  ", "dim"), Text(), max(10, min(40, width - 20))
    for (phase, value), colour in zip(seconds.items(), OF_PHASES, strict=True):
        share = value / total if total > 0 and value > 0 else 0.0
        bar.append("█" * round(share * length), colour)
        if share >= 0.005:
            words.append("■ ", colour).append(f"{phase} {100 * share:.0f} %  ", "dim")
    return Group(bar, Text(" " * 17) + words)


def _sites(run: WatchedRun) -> Text | None:
    """Return each client's score at the last evaluation; None for more than `MOST_SITES` clients or without scores."""
    clients = run.clients
    if clients is None or len(clients.names) > MOST_SITES:
        return None
    words = Text().append("clients  ", "dim")
    for name, value in zip(short_names(clients.names), clients.main.tolist(), strict=True):
        text = f"{100 * value:.1f} %" if clients.measure == "accuracy" else _number(value)
        words.append(f"{name} ").append(f"{text if math.isfinite(value) else '–'}  ", "bold")
    return words


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _state(run: WatchedRun) -> Text:
    """Return the run's state as text: how it ended, that it is silent, or the time left."""
    if run.is_over:
        return Text(run.status, STATES.get(run.status, ""))
    if run.is_silent():
        return Text(f"silent for {clock(run.silent)}", "yellow")
    if not run.done:
        return Text("no rounds yet", "dim")
    left = run.seconds_left()
    return Text(f"{clock(left)} left" if math.isfinite(left) else "")


def _pace(run: WatchedRun) -> str:
    seconds = run.recent("seconds.total")
    if not math.isfinite(seconds):
        return ""
    return f"{1000 * seconds:.0f} ms/round" if seconds < 1 else f"{seconds:.3g} s/round"


def _accuracy(run: WatchedRun) -> str:
    value = run.last("test_accuracy")
    return f"{100 * value:.2f} %" if math.isfinite(value) else ""


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else ""
