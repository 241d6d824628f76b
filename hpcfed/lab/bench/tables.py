"""The benchmarks' results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from hpcfed.lab.bench.timing import Timing

if TYPE_CHECKING:
    from hpcfed.lab.bench.reduction import ReductionTime


def blank(*headings: str) -> Table:
    """Return an empty table, its first column left-aligned, the others right-aligned."""
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def rounds(timings: Sequence[Timing]) -> Table:
    """Return the table of rounds: milliseconds, ratios to the bare loop and to hpcfed's first contender, and memory.

    `timings` begins with these two, in this order. Only rows of hpcfed have the ratio to its first contender.
    """
    table = blank(
        "contender", "ms a round", "over bare", "(least … largest)", "of CPU", "over the first of ours", "MiB"
    )
    base, first = timings[0], timings[1]
    for timing in timings:
        least, middle, largest = timing.over(base)
        of_cpu, peak = timing.cpu_over(base), timing.turns[0].peak_bytes
        table.add_row(
            timing.name,
            f"{timing.wall:.2f}",
            f"{middle:.3f}",
            f"({least:.3f} … {largest:.3f})",
            f"{of_cpu:.3f}" if of_cpu is not None else "",
            f"{timing.over(first)[1]:.3f}" if timing.name.startswith("hpcfed") else "",
            f"{peak / 2**20:.0f}" if peak is not None else "",
        )
    return table


def phases(timings: Sequence[Timing]) -> Table:
    """Return the table of phases: milliseconds, and ratios to the whole round of `timings[0]`.

    A timing without phases gets no columns; at least one timing must have phases.
    """
    base, timed = timings[0], [timing for timing in timings if timing.phases]
    table = blank("phase", *(heading for timing in timed for heading in (f"ms, {timing.name}", f"over {base.name}")))
    for phase in timed[0].phases:
        cells = ((timing.phases[phase], timing.phases[phase] / base.wall) for timing in timed)
        table.add_row(phase, *(text for ms, ratio in cells for text in (f"{ms:.3f}", f"{ratio:.3f}")))
    return table


def pairs(timings: Sequence[Timing], unit: str = "ms") -> Table:
    """Return a table with a row per timing: its time in `unit`, its ratio to `timings[0]`, and peak memory if known."""
    table = blank("contender", unit, f"over {timings[0].name}", "(least … largest)", "MiB")
    for timing in timings:
        least, middle, largest = timing.over(timings[0])
        peak = timing.turns[0].peak_bytes
        shown = f"{peak / 2**20:.0f}" if peak is not None else ""
        table.add_row(timing.name, f"{timing.wall:.2f}", f"{middle:.3f}", f"({least:.3f} … {largest:.3f})", shown)
    return table


def reductions(found: Sequence[ReductionTime]) -> Table:
    """Return the table of reductions: times, and ratios of `whole` to `bare`, to `floor`, and to fast sums' `bare`.

    The last ratio compares equal numbers of entries: for each, `found` must include the kind ``fast``.
    """
    headings = ("d", "sums", "MB", "bare ms", "floor ms", "whole ms", "pack", "allreduce", "unpack")
    table = blank(*headings, "over bare", "over floor", "over fast's bare")
    fast = {row.entries: row.bare for row in found if row.kind == "fast"}
    for row in found:
        times = (row.bare, row.floor, row.whole, row.pack, row.allreduce, row.unpack)
        ratios = (row.over_bare, row.over_floor, row.whole / fast[row.entries])
        table.add_row(
            f"{row.entries:,}",
            row.kind,
            f"{row.num_bytes / 1e6:.1f}",
            *(f"{time:.3f}" for time in times),
            *(f"{ratio:.2f}" for ratio in ratios),
        )
    return table
