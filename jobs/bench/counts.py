"""What a round asks of a GPU: kernels, synchronisations and bytes, counted on a device that is none.

    python -m jobs.bench.counts [mlp] [cnn] [logistic] [resnet18] [lstm]          all: a minute or two

The tests' strict device (tests/device/strict.py) runs everything on the CPU and counts operators that launch kernels on
a GPU, waits of the host for the device, and the bytes of each copy. Counted is the third round of some workloads of
`hpcfed bench`, the ResNet-18 with fewer images, by each engine, beside the bare loop's: data are on the device by then.
Prints one table a workload; `d` in it is a copy as large as the model's vector or larger.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import torch

from hpcfed.assembly import assemble, auto_device, resolve
from hpcfed.config.load import load_recipe
from hpcfed.errors import InputError
from hpcfed.lab.bench.workloads import WORKLOADS, write_files
from hpcfed.ranks.accelerators import ACCELERATORS, Accelerator
from hpcfed.ranks.world import World
from hpcfed.simulation import Simulation
from jobs.bench import bare
from tests.device.strict import KIND, STUB, Counts, register

ROUND = 3
COUNTED = {name: WORKLOADS[name] for name in ("mlp", "cnn", "logistic", "resnet18", "lstm")}
COUNTED["resnet18"] = replace(COUNTED["resnet18"], samples=8, cohort=2, batch_size=4)


def of_hpcfed(recipe: Path, *overrides: str) -> tuple[Counts, int]:
    """Return what a recipe's third round asks of the device, and the bytes of the model's vector."""
    STUB.reset()
    STUB.stack_bytes = Accelerator.stack_bytes
    parts, _ = assemble(resolve(load_recipe(recipe, ["device=auto", "rounds=300", *overrides])), World())
    simulation = Simulation(parts)
    with parts.clients:
        parts.shards.clients(range(parts.federation.num_clients))
        for number in range(1, ROUND + 1):
            STUB[0].counts = Counts()
            simulation.round(number)
    return STUB[0].counts, parts.model.vector.nbytes


def of_bare(name: str, folder: Path) -> Counts:
    """Return what the bare loop's third round asks of the device."""
    STUB.reset()
    STUB.take(0)
    device = torch.device(KIND, 0)
    build, _ = bare.MODELS[name]
    server = build().to(device)
    model = build().to(device)
    with h5py.File(folder / "federation.h5") as file:
        x, y = torch.from_numpy(file["train/x"][()]).to(device), torch.from_numpy(file["train/y"][()]).long().to(device)
        bounds = file["train/offsets"][()].tolist()
    clients = [(x[a:b], y[a:b]) for a, b in pairwise(bounds)]
    for cohort in json.loads((folder / "cohorts.json").read_text())[:ROUND]:
        STUB[0].counts = Counts()
        bare.train_round(server, model, clients, cohort, COUNTED[name].batch_size)
    return STUB[0].counts


def row(name: str, counts: Counts, d: int) -> str:
    """Return a line of the table."""
    large = [sum(size >= d for size in sizes) for sizes in (counts.up, counts.down)]
    up, down = (f"{len(sizes)} ({sum(sizes):,} B)" for sizes in (counts.up, counts.down))
    return f"| {name} | {counts.kernels:,} | {counts.waits} | {up} | {down} | {large[0]} + {large[1]} |"


def table(name: str, folder: Path) -> Iterator[str]:
    """Yield the lines of a workload's table."""
    write_files(name, COUNTED[name], folder)
    recipe = folder / "recipe.yaml"
    yield f"| {name} | operators | waits | copies up | copies down | of size d, up + down |"
    yield "|---|---|---|---|---|---|"
    ours, d = of_hpcfed(recipe, "local.engine=sequential")
    yield row("bare loop", of_bare(name, folder), d)
    yield row("sequential", ours, d)
    try:
        yield row("batched", *of_hpcfed(recipe, "local.engine=batched"))
    except InputError as error:
        yield f"| batched | {error} | | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(COUNTED)}; all without any")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in COUNTED]:
        parser.error(f"no workload {unknown[0]!r}; known: {', '.join(COUNTED)}")
    register()
    ACCELERATORS.clear()
    ACCELERATORS[KIND] = STUB
    auto_device.LEAST_ON_GPU = 0
    for name in names or COUNTED:
        with tempfile.TemporaryDirectory() as scratch:
            for line in table(name, Path(scratch)):
                print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
