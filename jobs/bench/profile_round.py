"""Where a round's time goes: the GPU's kernels and copies, and the host's functions.

    python jobs/bench/profile_round.py WORKLOAD [cpu | cuda] [KEY=VALUE ...]

WORKLOAD is one of `hpcfed bench rounds`, run in this process, warm, without a record. First a round under torch's
profiler: its time, how long the GPU was busy in it, and what took longest; on a CPU its operators. Then a round under
Python's profiler. Both slow a round down: compare parts, not the sum.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.errors import ends_in_a_line
from hpcfed.lab.bench.workloads import workload, write_workload
from hpcfed.ranks.world import World
from hpcfed.simulation import Simulation

WARM_UP, SHOWN = 4, 14


class Rounds:
    """Rounds of a workload, one after another, each ended by the device."""

    def __init__(self, simulation: Simulation, device: torch.device):
        self._simulation, self._device, self._number = simulation, device, 0

    def next(self) -> float:
        """Run a round; return its milliseconds."""
        self._number += 1
        started = time.perf_counter()
        self._simulation.round(self._number)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started)


def of_the_device(rounds: Rounds, *, on_gpu: bool) -> Iterator[str]:
    """Yield lines of a round under torch's profiler."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as found:
        milliseconds = rounds.next()
    if not on_gpu:
        yield found.key_averages().table(sort_by="self_cpu_time_total", row_limit=SHOWN, max_name_column_width=48)
        return
    spans, sums = [], defaultdict(lambda: [0, 0.0])
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            begin, end = event.time_range.start, event.time_range.end
            spans.append((begin, end))
            sums[event.name][0] += 1
            sums[event.name][1] += (end - begin) / 1e3
    busy, last = 0.0, 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, last)) / 1e3
        last = max(last, end)
    copies = sum(count for name, (count, _) in sums.items() if name.startswith(("Memcpy", "Memset")))
    yield f"{milliseconds:.2f} ms profiled, GPU busy {busy:.2f} ms, {len(spans)} operations of it, {copies} copies"
    for name, (count, spent) in sorted(sums.items(), key=lambda row: -row[1][1])[:SHOWN]:
        yield f"{spent:9.3f} ms {count:6} {name[:90]}"
    calls = [event for event in found.key_averages() if event.key.startswith("cuda")]
    for call in sorted(calls, key=lambda event: -event.self_cpu_time_total)[:SHOWN]:
        yield f"{call.self_cpu_time_total / 1e3:9.3f} ms {call.count:6} {call.key}"


def of_the_host(rounds: Rounds) -> None:
    """Print a round under Python's profiler."""
    profiler = cProfile.Profile()
    profiler.runcall(rounds.next)
    pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(SHOWN)


@ends_in_a_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_workload(asked.workload, folder, asked.device)
        changes = [f"rounds={2 * WARM_UP}", f"output={folder / 'run'}", *asked.overrides]
        parts, _ = assemble(resolve(load_recipe(folder / "recipe.yaml", changes)), World())
        with parts.federation, parts.clients:
            rounds = Rounds(Simulation(parts), parts.model.vector.device)
            warm = [rounds.next() for _ in range(WARM_UP)]
            print(f"{workload(asked.workload).title}: {warm[-1]:.2f} ms a round (the first {warm[0]:.0f} ms)")
            for line in of_the_device(rounds, on_gpu=parts.model.vector.device.type == "cuda"):
                print(line)
            of_the_host(rounds)


if __name__ == "__main__":
    main()
