"""``hpcfed bench``: times of rounds, start-up, the reduction and a large index, each beside a bare minimum."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcfed.cli.options import OVERRIDES

if TYPE_CHECKING:
    from rich.table import Table

    from hpcfed.lab.bench.timing import Contender, Timing
    from hpcfed.lab.bench.workloads import Workload

WORKLOADS = ("mlp", "mlp-100", "cnn", "logistic", "logistic-200")
PAPERS = ("fedexp", "resnet18", "lstm", "lstm256", "pfl-cifar10")
OWN = ("mlp-layers", "mlp-class", "cnn-class", "logistic-class", "residual", "transformer")
ENTRIES = (100_000, 1_000_000, 11_000_000)

repeats = click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Turns of each.")
json_file = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write all figures, and the machine's, here."
)


def rounds_of(count: int) -> Any:
    """Return the options for the counted rounds and the warm-up rounds of a turn."""
    counted = click.option(
        "--rounds", type=click.IntRange(1, 300), default=count, show_default=True, help="Rounds of a turn."
    )
    warm_up = click.option(
        "--warm-up", type=click.IntRange(0, 99), default=5, show_default=True, help="Rounds before them, not counted."
    )
    return lambda function: counted(warm_up(function))


class _RoundsUnlessNamed(click.Group):
    """A group whose default subcommand is ``rounds``: ``hpcfed bench mlp --repeats 3``.

    ``--calibrate`` is an alias of ``calibrate``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--calibrate" in args:
            args = ["calibrate", *(arg for arg in args if arg != "--calibrate")]
        if not args or (args[0] not in self.commands and args[0] not in self.get_help_option_names(ctx)):
            args = ["rounds", *args]
        return super().parse_args(ctx, args)


@click.group("bench", cls=_RoundsUnlessNamed)
def command() -> None:
    """Time hpcfed beside the least that its work could take; the default subcommand is `rounds`.

    Contenders are separate processes, one thread a rank, and take turns; ratios are computed turn by turn. On a busy
    machine trust nothing but the ratios, and those only roughly.
    """


@command.command("rounds")
@click.argument("workloads", nargs=-1, metavar=f"[{'|'.join(WORKLOADS + PAPERS + OWN)}]...")
@repeats
@rounds_of(25)
@click.option("--ranks", type=click.IntRange(min=1), multiple=True, default=(1,), show_default=True, help="Repeatable.")
@click.option("--apart", is_flag=True, help="Also time as many runs side by side, of which none waits for another.")
@click.option(
    "--own",
    "own_loops",
    multiple=True,
    metavar="[NAME=]COMMAND",
    help="A loop of your own, repeatable; {workload}, {folder}, {rounds}, {warm_up} and {device} in it are replaced. "
    'Its last line is a JSON object with "ms_med" (and "cpu_ms_med"), or means: "ms_mean"; of several processes also '
    '"peak_bytes".',
)
@click.option("--go-on", is_flag=True, help="Leave out loops of your own that fail, as floors that fail are.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "auto", "cuda"]),
    default="cpu",
    show_default=True,
    help="Of all contenders but your own loop; auto: the GPU, if there is one.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "tf32"]),
    default="float32",
    show_default=True,
    help="Of products on a GPU, of all contenders but your own loop.",
)
@click.option(
    "--floors",
    is_flag=True,
    help="Also time the same arithmetic by hand: a client's epoch or a round as one CUDA graph, torch.func's vmap.",
)
@click.option(
    "--as-written",
    is_flag=True,
    help="Also time the same network as people write it, by factory: as layers, as a class; ratios are to the first.",
)
@click.option(
    "--own-model", metavar="MODULE:FUNCTION", help="Time a module of yours, in the working folder, on --data."
)
@click.option("--data", type=click.Path(path_type=Path), help="The federation that --own-model is trained on.")
@click.option(
    "--cohort", type=click.IntRange(min=1), default=10, show_default=True, help="Clients of a round of --own-model."
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=10, show_default=True, help="Its samples of a minibatch."
)
@json_file
def rounds_command(
    workloads: tuple[str, ...],
    repeats: int,
    rounds: int,
    warm_up: int,
    ranks: tuple[int, ...],
    apart: bool,
    own_loops: tuple[str, ...],
    go_on: bool,
    device: str,
    precision: str,
    floors: bool,
    as_written: bool,
    own_model: str | None,
    data: Path | None,
    cohort: int,
    batch_size: int,
    json_file: Path | None,
) -> None:
    """Time rounds of WORKLOADS beside a bare PyTorch loop, and say where their time goes.

    Default: the first five. Others are models of the papers, whose rounds take seconds, and networks as people write
    them. Your own: hpcfed bench --own-model mine:net --data f.h5, an epoch of each client, beside the same bare loop.

    Sampling, data, reduction, server step and record are included, evaluation and start-up are not. Of pfl-cifar10,
    pfl's own benchmark, evaluations count: rounds are rounded up to tens, and a round's time is their mean.
    """
    from hpcfed.errors import InputError
    from hpcfed.lab.bench import tables
    from hpcfed.lab.bench.timing import ByHand, in_turn, own
    from hpcfed.lab.bench.workloads import own_workload, workload, write_workload

    if (own_model is None) != (data is None):
        raise InputError("bench", expected="--own-model and --data", got="one of them")
    if own_model is not None and (workloads or as_written or floors):
        raise InputError("bench --own-model", expected="no workloads, --as-written or --floors beside it")
    if precision == "tf32" and device == "cpu":
        raise InputError("bench --precision tf32", expected="a GPU", got="--device cpu", remedy="add --device cuda")
    for name in workloads:
        workload(name)  # before any is timed
    results = {}
    for name in [own_model] if own_model is not None else workloads or WORKLOADS:
        with tempfile.TemporaryDirectory(prefix="hpcfed-bench-") as scratch:
            folder = Path(scratch)
            if data is not None:
                work = own_workload(name, data, folder, cohort, batch_size, device, precision)
            else:
                work = workload(name)
                write_workload(name, folder, device, precision)
            title = f"{work.letter}: {work.title}" if work.letter else work.title
            _print(f"{title}, {work.clients} clients × {work.samples}, cohort {work.cohort}")
            counted = -(-rounds // work.evaluate_every) * work.evaluate_every if work.evaluates else rounds
            known = {"workload": name, "folder": folder, "rounds": counted, "warm_up": warm_up, "device": device}
            by_hand = ByHand(folder, counted, warm_up, device, precision)
            contenders = [
                by_hand.bare(name, work.batch_size),
                *_ours(work, folder, counted, warm_up, ranks, apart=apart, as_written=as_written),
                *(by_hand.floors(name) if floors else ()),
                *(own(*_named(loop, known), optional=go_on) for loop in own_loops),
            ]
            timings = in_turn(contenders, repeats, _print)
        _show(tables.rounds(timings), tables.phases(timings))
        if work.whole:
            seconds = ", ".join(f"{timing.name} {timing.wall * work.whole / 1e3:.0f} s" for timing in timings)
            _print(f"{work.whole:,} rounds at this speed: {seconds}")
        results[name] = _plain(timings)
    _keep(json_file, "rounds", results)


def _ours(
    work: Workload, folder: Path, rounds: int, warm_up: int, ranks: Sequence[int], *, apart: bool, as_written: bool
) -> Iterator[Contender]:
    """Yield hpcfed's contenders: on each number of ranks, with the network as people write it, and side by side."""
    from hpcfed.lab.bench.timing import ours, ours_apart

    for count in ranks:
        yield ours(folder, rounds, warm_up, count, mean=work.evaluates)
    for how, factory in work.written if as_written else ():
        yield ours(folder, rounds, warm_up, ranks[0], mean=work.evaluates, written=how, factory=factory)
    for count in ranks:
        if apart and count > 1:
            yield ours_apart(folder, rounds, warm_up, count)


def _named(loop: str, known: Mapping[str, object]) -> tuple[str, list[str]]:
    """Return name and command of a loop of the user's, with what is `known` in place of ``{…}``."""
    name, command = re.fullmatch(r"(?:(\w+)=)?(.*)", loop, re.DOTALL).groups()  # type: ignore[union-attr]
    for key, value in known.items():
        command = command.replace(f"{{{key}}}", shlex.quote(str(value)))
    return name or "own loop", shlex.split(command)


@command.command("calibrate")
@click.argument("recipe", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each.")
@rounds_of(10)
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks of each run.")
@json_file
def calibrate_command(
    recipe: Path,
    overrides: tuple[str, ...],
    repeats: int,
    rounds: int,
    warm_up: int,
    ranks: int,
    json_file: Path | None,
) -> None:
    """Time rounds of RECIPE with each `local.engine` and `local.matmul` on this machine, and say which to set in it.

    Left at `auto`, both follow a rule by model and processor. The choice is part of the recipe, since a result's last
    bits depend on it.
    """
    from hpcfed.lab.bench import tables
    from hpcfed.lab.bench.calibration import calibrate

    with tempfile.TemporaryDirectory(prefix="hpcfed-bench-") as scratch:
        found = calibrate(recipe, overrides, Path(scratch), rounds, warm_up, repeats, ranks, _print)
    _show(tables.pairs(found.timings))
    for name, why in found.refused.items():
        _print(f"{name} is no choice: {why}")
    _print(found.advice)
    _keep(json_file, "calibrate", {"timings": _plain(found.timings), "advice": found.advice})


@command.command("start")
@repeats
@click.option("--ranks", type=click.IntRange(min=1), multiple=True, default=(1,), show_default=True, help="Repeatable.")
@json_file
def start_command(repeats: int, ranks: tuple[int, ...], json_file: Path | None) -> None:
    """Time a run of one small round, from start to end, beside importing torch and MPI."""
    from hpcfed.lab.bench import tables
    from hpcfed.lab.bench.startup import contenders
    from hpcfed.lab.bench.timing import in_turn
    from hpcfed.lab.bench.workloads import write_workload

    results = []
    with tempfile.TemporaryDirectory(prefix="hpcfed-bench-") as scratch:
        folder = Path(scratch)
        write_workload("logistic", folder)
        for count in ranks:
            timings = in_turn(contenders(folder, count), repeats, _print)
            _show(tables.pairs(timings))
            results.append(_plain(timings))
    _keep(json_file, "start", results)


@command.command("clients")
@repeats
@rounds_of(40)
@json_file
def clients_command(repeats: int, rounds: int, warm_up: int, json_file: Path | None) -> None:
    """Time rounds of 100 of 1,000,000 clients beside rounds of 100 of 1,000, and show their memory.

    Needs 400 MB in $TMPDIR for the federation.
    """
    from hpcfed.lab.bench import tables
    from hpcfed.lab.bench.clients import contenders
    from hpcfed.lab.bench.timing import in_turn

    with tempfile.TemporaryDirectory(prefix="hpcfed-bench-") as scratch:
        timings = in_turn(contenders(Path(scratch), (1_000, 1_000_000), rounds, warm_up), repeats, _print)
    _show(tables.pairs(timings), tables.phases(timings))
    _keep(json_file, "clients", _plain(timings))


@command.command("reduce")
@click.option("--repeats", type=click.IntRange(min=1), default=31, show_default=True, help="Repetitions of each.")
@click.option(
    "--entries", type=click.IntRange(min=1), multiple=True, default=ENTRIES, show_default=True, help="d; repeatable."
)
@json_file
def reduce_command(repeats: int, entries: tuple[int, ...], json_file: Path | None) -> None:
    """Time a round's reduction beside a bare Allreduce of the same bytes: mpirun -n 2 hpcfed bench reduce.

    Packing (adding one client's vector) and unpacking (the sums as float64) are included and shown separately; the
    floor is what mere copies in their places take, one after another. The ratios are of the whole.
    """
    from hpcfed.errors import InputError
    from hpcfed.lab.bench import tables
    from hpcfed.lab.bench.reduction import measure
    from hpcfed.ranks.platform.malloc import keep_freed_memory
    from hpcfed.ranks.world import connect

    world = connect()
    if world.size == 1:
        remedy = "start it on several: mpirun -n 2 hpcfed bench reduce"
        raise InputError("bench reduce", expected="two ranks or more", got="one", remedy=remedy)
    keep_freed_memory()
    found = [row for count in entries for row in measure(world, count, repeats)]
    if world.is_root:
        _show(tables.reductions(found))
        _keep(json_file, "reduce", {"ranks": world.size, "rows": [asdict(row) for row in found]})


def _plain(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    return [asdict(timing) for timing in timings]


def _print(line: str) -> None:
    click.echo(line)


def _show(*shown: Table) -> None:
    from hpcfed.io.console import Console

    for table in shown:
        Console(width=120).print(table, "", sep="\n")


def _keep(path: Path | None, what: str, results: Any) -> None:
    """Write a benchmark's figures and the machine's description to `path`, if any."""
    if path is None:
        return
    from hpcfed.io.atomic import write_whole, writing
    from hpcfed.lab.bench.machine import describe

    with writing(path):
        write_whole(path, json.dumps({"machine": describe(), what: results}, indent=1) + "\n")
