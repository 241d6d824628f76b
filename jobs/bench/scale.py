"""Limits on the size of a federation, of a run and of a model on one host: time, memory and bytes, in a table.

    python jobs/bench/scale.py clients    FOLDER [--clients 1000000] [--rounds 12] [--ranks 1] [KEY=VALUE ...]
    python jobs/bench/scale.py rounds     FOLDER [--rounds 100000] [--ranks 1] [KEY=VALUE ...]
    python jobs/bench/scale.py parameters FOLDER [--parameters 100000000] [--ranks 2] [KEY=VALUE ...]

``clients``: SCAFFOLD and a linear model (10 features, d = 11), each client with two samples; the cohorts are parts of
the federation in turn, so that every client has a state after the sixth round. ``rounds``: FedAvg on four clients, the
first and the last thousand rounds beside each other. ``parameters``: a perceptron of two hidden layers; its memory a
rank, less that of the same run with a small model, over the size of the model in float32. Further arguments are
overrides of the recipe. FOLDER must be empty or missing; it is left as it is, and may be removed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil

from data_prep.dataset import Dataset
from data_prep.write import write
from hpcfed.config.load import dump_yaml
from hpcfed.provenance.verify.verdict import IN_PART

FEATURES, SAMPLES, PARTS = 10, 2, 6
SPAN = 1000
"""Rounds at each end of a long run that are compared."""
LOOK_SECONDS = 0.1
MIB = 1 << 20


class Finished(NamedTuple):
    """A command that has ended: its seconds by the clock and of processors, and each process's largest memory, MiB."""

    seconds: float
    cpu: float
    peaks: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description="Sizes that a federation, a run and a model can have on one host.")
    parser.add_argument("what", choices=("clients", "rounds", "parameters"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--ranks", type=int)
    options = parser.parse_intermixed_args()  # overrides may stand behind options
    options.folder.mkdir(parents=True, exist_ok=True)
    if any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty")
    measure = {"clients": _clients, "rounds": _rounds, "parameters": _parameters}[options.what]
    for row in measure(options):
        print("| " + " | ".join(row) + " |", flush=True)


def _clients(options: argparse.Namespace) -> Iterator[Sequence[str]]:
    """Yield rows on a federation of many clients with states."""
    folder, rounds, ranks = options.folder.resolve(), options.rounds or 2 * PARTS, options.ranks or 1
    started = time.perf_counter()
    _write_federation(folder / "federation.h5", options.clients, SAMPLES, FEATURES)
    yield f"{options.clients:,} clients", f"{ranks} ranks"
    yield "writing the federation", f"{time.perf_counter() - started:.1f} s, {_size(folder / 'federation.h5')}"
    in_turn = np.array_split(np.arange(options.clients), PARTS)
    (folder / "cohorts.json").write_text(json.dumps([in_turn[t % PARTS].tolist() for t in range(rounds + 1)]))
    recipe = _write_recipe(folder, algorithm={"name": "scaffold"}, cohort={"schedule": "cohorts.json"}, rounds=rounds)
    ran = _run(recipe, ranks, *options.overrides)
    yield from _of_run(folder / "run", ran)
    seconds = _seconds(folder / "run")
    yield "rounds without states and with", f"{median(seconds[1:PARTS]):.2f}, {median(seconds[PARTS:]):.2f} s"
    yield "clients.csv", _timed(recipe, ranks, f"rounds={rounds + 1}", "evaluate.clients.every=1", *options.overrides)
    yield "inspect", _timed_command("inspect", folder / "federation.h5")
    yield from _reading(folder / "run")


def _rounds(options: argparse.Namespace) -> Iterator[Sequence[str]]:
    """Yield rows on a run of many rounds."""
    folder, rounds, ranks = options.folder.resolve(), options.rounds or 100_000, options.ranks or 1
    _write_federation(folder / "federation.h5", 4, 20, 4)
    recipe = _write_recipe(folder, cohort={"size": 2}, rounds=rounds)
    seen: list[tuple[int, float]] = []

    def look(processes: Sequence[psutil.Process]) -> None:
        record = folder / "run" / "metrics.jsonl"
        if record.exists():
            seen.append((record.stat().st_size, max(each.memory_info().rss for each in processes) / MIB))

    ran = _run(recipe, ranks, *options.overrides, look=look)
    yield f"{rounds:,} rounds", f"{ranks} ranks"
    yield from _of_run(folder / "run", ran)
    whole = (folder / "run" / "metrics.jsonl").stat().st_size
    for share in (0.01, 0.1, 0.5, 1.0):
        memory = [memory for written, memory in seen if 0 < written <= share * whole]
        yield f"memory after {share:.0%} of the rounds", f"{memory[-1]:.1f} MiB" if memory else "not looked at by then"
    for clock in ("total", "cpu"):
        seconds = _seconds(folder / "run", clock)
        first, last = median(seconds[:SPAN]) * 1e3, median(seconds[-SPAN:]) * 1e3
        yield f"{clock} of the first and last {SPAN} rounds", f"{first:.3f}, {last:.3f} ms, {last / first:.2f}"
    yield "one more round, from the checkpoint", _timed(recipe, ranks, f"rounds={rounds + 1}", *options.overrides)
    yield from _reading(folder / "run")


def _parameters(options: argparse.Namespace) -> Iterator[Sequence[str]]:
    """Yield rows on a large model's memory."""
    folder, ranks = options.folder.resolve(), options.ranks or 2
    _write_federation(folder / "federation.h5", 2 * ranks, SAMPLES, FEATURES)
    peaks = []
    for count in (1000, options.parameters):
        width = int(count**0.5)
        recipe = _write_recipe(folder / str(count), model={"name": "mlp", "hidden": [width, width]}, rounds=3)
        ran = _run(recipe, ranks, *options.overrides)
        peaks.append(max(ran.peaks))
    size = 4 * options.parameters / MIB
    yield f"{options.parameters:,} parameters", f"{ranks} ranks, {size:.0f} MiB in float32"
    yield from _of_run(folder / str(options.parameters) / "run", ran)
    yield "memory a rank, less a small model's", f"{peaks[1] - peaks[0]:.0f} MiB, {(peaks[1] - peaks[0]) / size:.2f} ×"


def _write_federation(path: Path, num_clients: int, samples: int, features: int) -> None:
    rng = np.random.Generator(np.random.Philox(0))
    x = rng.standard_normal((num_clients * samples, features), np.float32)
    dataset = Dataset(name="scale", task="regression", x=x, y=x[:, :1])
    write(path, dataset, np.repeat(np.arange(num_clients), samples), num_clients, partition={"scheme": "equal"})


def _write_recipe(folder: Path, **keys: Any) -> Path:
    folder.mkdir(exist_ok=True)
    federation = next(
        place / "federation.h5" for place in (folder, folder.parent) if (place / "federation.h5").exists()
    )
    recipe = {
        "data": str(federation),
        "algorithm": {"name": "fedavg"},
        "model": {"name": "linear"},
        "local": {"steps": 2, "batch_size": SAMPLES, "lr": 0.01},
        "evaluate": {"every": 0},
        "device": "cpu",
        "output": str(folder / "run"),
        **keys,
    }
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    return folder / "recipe.yaml"


def _run(recipe: Path, ranks: int, *overrides: str, look: Callable[..., None] | None = None) -> Finished:
    launcher = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    return _finish([*launcher, sys.executable, "-m", "hpcfed", "run", "-q", str(recipe), *overrides], look)


def _finish(command: Sequence[str], look: Callable[..., None] | None = None, good: Sequence[int] = (0,)) -> Finished:
    """Run a command to one of its `good` exit codes; `look` is called now and then with its processes of hpcfed."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    job, peaks = psutil.Popen(command, stdout=subprocess.DEVNULL), dict[int, float]()
    while job.poll() is None:
        ours = [each for each in (job, *job.children(recursive=True)) if _runs_hpcfed(each)]
        peaks |= {each.pid: _peak(each) or peaks.get(each.pid, 0.0) for each in ours}
        if look is not None and ours:
            look(ours)
        time.sleep(LOOK_SECONDS)
    if job.returncode not in good:
        raise SystemExit(f"{command} ended with {job.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Finished(time.perf_counter() - started, cpu, list(peaks.values()))


def _runs_hpcfed(process: psutil.Process) -> bool:
    try:
        return "hpcfed" in process.cmdline() and "python" in process.name()
    except psutil.Error:
        return False


def _peak(process: psutil.Process) -> float:
    """Return the largest memory that a process has had, MiB; 0 if it has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return next(float(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0.0


def _of_run(run: Path, ran: Finished) -> Iterator[Sequence[str]]:
    seconds = _seconds(run)
    yield "whole run", f"{ran.seconds:.1f} s, {ran.cpu:.1f} s of processors, at most {max(ran.peaks):.0f} MiB a rank"
    yield "all but its rounds", f"{ran.seconds - sum(seconds):.1f} s"
    yield "a round", f"first {seconds[0]:.4f} s, median {median(seconds):.4f} s, last {seconds[-1]:.4f} s"
    for name in ("metrics.jsonl", "model.safetensors"):
        yield name, _size(run / name)
    for path in sorted((run / "checkpoints").glob("*")):
        yield f"checkpoints/{path.name}", _size(path)


def _reading(run: Path) -> Iterator[Sequence[str]]:
    """Yield what reading a run's record takes."""
    yield "report", _timed_command("report", run, "--output", run.parent / "report")
    yield "watch", _timed_command("watch", "--once", run)
    yield "verify two rounds", _timed_command("verify", run, "--rounds", 2, good=(0, IN_PART))


def _timed(recipe: Path, ranks: int, *overrides: str) -> str:
    return _in_words(_run(recipe, ranks, *overrides))


def _timed_command(*arguments: object, good: Sequence[int] = (0,)) -> str:
    return _in_words(_finish([sys.executable, "-m", "hpcfed", *map(str, arguments)], good=good))


def _in_words(ran: Finished) -> str:
    return f"{ran.seconds:.1f} s, {ran.cpu:.1f} s of processors, {max(ran.peaks, default=0):.0f} MiB"


def _seconds(run: Path, clock: str = "total") -> list[float]:
    with (run / "metrics.jsonl").open() as record:
        return [json.loads(line)["seconds"][clock] for line in record]


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:,.1f} MB"


if __name__ == "__main__":
    main()
