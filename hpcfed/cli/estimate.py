"""``hpcfed estimate``: time, memory and disk of a run, before it is submitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from hpcfed.cli.documents import text_of
from hpcfed.cli.options import MOST_RANKS, OVERRIDES, RANKS, Finite
from hpcfed.errors import counted

if TYPE_CHECKING:
    from hpcfed.cluster.estimate import Estimate


@click.command("estimate")
@click.argument("recipe", type=click.Path())
@OVERRIDES
@click.option("--ranks", type=RANKS, default=1, show_default=True)
@click.option(
    "--gpus", type=click.IntRange(0, MOST_RANKS), help="GPUs of all ranks together; default: one for each rank."
)
@click.option(
    "--allreduce", type=Finite(0, min_open=True), default=1.0, show_default=True, metavar="GB/S",
    help="Speed of an Allreduce over those ranks; hpcfed doctor measures it.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(
    recipe: str, overrides: tuple[str, ...], ranks: int, gpus: int | None, allreduce: float, as_json: bool
) -> None:
    """Estimate the time, memory and disk that RECIPE takes on --ranks ranks.

    A few clients are trained here to measure; no file is written.
    """
    from hpcfed.ranks.world import connect

    connect().on_root(lambda: _estimate(recipe, overrides, ranks, gpus, allreduce, as_json=as_json))


def _estimate(
    recipe: str, overrides: tuple[str, ...], ranks: int, gpus: int | None, allreduce: float, *, as_json: bool
) -> None:
    from hpcfed.assembly import resolve
    from hpcfed.config.load import load_recipes

    runs = [resolve(run) for run in load_recipes(recipe, overrides)]

    from hpcfed.cluster.estimate import estimate

    costs = estimate(runs[0], ranks=ranks, seeds=len(runs), gpus=gpus, allreduce=allreduce)
    if as_json:
        click.echo(text_of({**asdict(costs), "rounds_per_second": costs.rounds_per_second}))
        return
    rows = list(_rows(costs))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, source in rows:
        click.echo(f"{name:{widths[0]}}  {value:>{widths[1]}}  {source}")


def _rows(costs: Estimate) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, source), the source being a measurement or a computation."""
    from rich.filesize import decimal

    measured, computed = costs.measured, "computed"
    yield "measured on", measured.device, f"{counted(measured.clients, 'training')} of a client in this process"
    yield "one client, one sample", f"{measured.sample_seconds * 1e6:.3g} µs", "measured"
    yield "server's step", f"{measured.server_seconds * 1e3:.3g} ms", "measured"
    yield "test set, by one rank", f"{measured.evaluate_seconds * 1e3:.3g} ms", "measured"
    speed = f"at {costs.allreduce_gb_per_s:g} GB/s, assumed (--allreduce)"
    yield (
        "Allreduce of a round",
        decimal(costs.reduced_bytes),
        f"{computed}; {speed if costs.ranks > 1 else 'no other rank'}",
    )
    ranks = f"{costs.ranks} rank{'s' if costs.ranks > 1 else ''}"
    yield "round", f"{costs.round_seconds * 1e3:.3g} ms", f"{computed} for {ranks} as fast as this one"
    yield "imbalance", f"{costs.imbalance:.2f}", f"{computed}: the slowest rank's work over the average"
    if costs.idle:
        yield "idle", "", costs.idle
    yield "rounds a second", f"{costs.rounds_per_second:.3g}", f"{computed}, evaluations included"
    each = f" of {costs.seeds} seeds" if costs.seeds > 1 else ""
    yield (
        "time",
        _duration(costs.hours),
        f"{computed}: {costs.rounds} rounds{each} at most, without start and checkpoints",
    )
    if costs.evaluation_hours:
        yield "evaluations, of it", _duration(costs.evaluation_hours), f"{computed}: of test set, training set, clients"
    yield "core-hours", f"{costs.core_hours:.3g}", computed
    if costs.gpu_hours is None:
        yield "GPU-hours", "unknown", "not measured on a GPU: none is here, or the recipe says device: cpu"
    else:
        yield "GPU-hours", f"{costs.gpu_hours:.3g}", computed
    yield (
        "host memory, a rank",
        decimal(costs.host_bytes_per_rank),
        "measured here, and its share of data and states",
    )
    if costs.device_bytes_per_rank is not None:
        yield "GPU memory, a rank", decimal(costs.device_bytes_per_rank), "measured here, and its share likewise"
    yield "clients' states", decimal(costs.state_bytes), f"{computed}, over all ranks"
    yield "a checkpoint", decimal(costs.checkpoint_bytes), f"{computed}, at most"
    yield "checkpoints on disk", decimal(costs.checkpoints_bytes), f"{computed}: {costs.num_checkpoints} kept, at most"
    yield "record on disk", decimal(costs.record_bytes), f"{computed}, roughly"
    yield (
        "models on disk",
        decimal(costs.models_bytes),
        f"{computed}: the last one, the evaluated one if it is another, and clients' own",
    )


def _duration(hours: float) -> str:
    for unit, size in (("s", 1 / 3600), ("min", 1 / 60)):
        if hours < 100 * size:
            return f"{hours / size:.3g} {unit}"
    return f"{hours:.3g} h"
