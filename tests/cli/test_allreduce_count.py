"""Training takes one Allreduce a round, evaluation one more, and nothing else: counted at the MPI library itself.

Where the ranks share the memory of large sums, the Allreduce has the slots alone, and two barriers go with it.
"""

from __future__ import annotations

import ctypes
import json
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hpcfed.reduce.memory import SHARED_BYTES
from hpcfed.reduce.slots import RANK_SLOT, client_slot
from tests.launch import launch
from tests.mpi.recipes import write_recipe, write_small

RANKS, CLIENTS = 2, 5
ENTRIES = 96 + 16 + 32 + 16
"""d of the small model: its four parameter tensors, each padded to 64 bytes."""
WHICH_LIBRARY = """
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    paths = {line.split(None, 5)[-1].strip() for line in maps}
print(*(path for path in paths if path.rsplit("/", 1)[-1].startswith(("libmpi.so", "libmpi_abi.so"))), sep="\\n")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The counting library, linked to the MPI library that mpi4py loads."""
    gcc = shutil.which("gcc")
    if gcc is None or platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux":
        pytest.skip("needs gcc on 64-bit Linux to count calls at the MPI library")
    (library,) = launch(0, [], program=("-c", WHICH_LIBRARY)).stdout.split()
    shim = tmp_path_factory.mktemp("shim") / "count_collectives.so"
    source = Path(__file__).with_name("count_collectives.c")
    command = [gcc, "-shared", "-fPIC", "-O1", "-Wall", "-o", shim, source, library]
    if hasattr(ctypes.CDLL(library), "PMPI_Allreduce_c"):
        command.insert(1, "-DLARGE_COUNTS")
    subprocess.run([*command, f"-Wl,-rpath,{Path(library).parent}"], check=True, timeout=60)
    return shim


COUNTED = """
import ctypes, json, os, sys
import hpcfed
from hpcfed.ranks.world import connect
from hpcfed.reduce import memory

rank = connect().rank
count = ctypes.CDLL(None).count_collectives  # of the preloaded library: writes the counts so far, and starts anew
for number, (shared_bytes, *changes) in enumerate(json.loads(sys.argv[1])):
    memory.SHARED_BYTES = shared_bytes
    count(os.devnull.encode())
    hpcfed.run("recipe.yaml", [*changes, f"output=run-{number}"], quiet=True)
    count(b"counts.%d.%d" % (number, rank))
"""
SHORT, LONG = 3, 8
KINDS = {
    "fedexp": ["algorithm.name=fedexp", "evaluate.every=0"],
    "scaffold": ["algorithm.name=scaffold", "evaluate.every=0"],
    "scaffold-unequal": ["algorithm.name=scaffold", "evaluate.every=0", "budget={low: 1, high: 9}"],
    "too-large": ["evaluate.every=0", "local={steps: 1, lr: 1.0e+12, clip_norm: 1}"],
    "evaluating": ["evaluate.every=2", "evaluate.train.every=1"],
    "geometric": ["evaluate.every=0", "means=[{geometric-median: {steps: 3}}]"],
    "shared": ["algorithm={name: feddyn, alpha: 0.05}", "evaluate.every=0"],
}
"""What is counted, each for a short and for a long run."""


class Tally:
    """Calls by name and bytes reduced in one run, the same on all ranks.

    `Isend` does not count: before the first round and after the last, signs of life go by the clock.
    """

    def __init__(self, folder: Path, number: int):
        per_rank = [self._read(folder / f"counts.{number}.{rank}") for rank in range(RANKS)]
        assert per_rank.count(per_rank[0]) == RANKS
        self.calls, self.bytes = per_rank[0]

    @staticmethod
    def _read(path: Path) -> tuple[Counter[str], int]:
        rows = [line.split() for line in path.read_text().splitlines() if not line.startswith("Isend")]
        return Counter({name: int(calls) for name, calls, _ in rows}), sum(int(size) for _, _, size in rows)

    @property
    def allreduces(self) -> int:
        return sum(calls for name, calls in self.calls.items() if "allreduce" in name.lower())

    @property
    def others(self) -> dict[str, int]:
        return {name: calls for name, calls in self.calls.items() if "allreduce" not in name.lower() and calls}


@pytest.fixture(scope="module")
def tallies(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tally, Tally]]:
    """The counts of a short and of a long run of each kind, from one job."""
    folder = tmp_path_factory.mktemp("counted")
    write_small(folder, CLIENTS)
    write_recipe(folder)
    runs = [
        [1 if kind == "shared" else SHARED_BYTES, *changes, f"rounds={rounds}"]
        for kind, changes in KINDS.items()
        for rounds in (SHORT, LONG)
    ]
    done = launch(
        RANKS, [json.dumps(runs)], program=("-m", "mpi4py", "-c", COUNTED), cwd=folder, env={"LD_PRELOAD": str(shim)}
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return {kind: (Tally(folder, 2 * number), Tally(folder, 2 * number + 1)) for number, kind in enumerate(KINDS)}


@pytest.mark.parametrize(("method", "vectors"), [("fedexp", 1), ("scaffold", 1), ("scaffold-unequal", 2)])
def test_a_round_is_one_allreduce_and_nothing_else(method, vectors, tallies):
    short, long = tallies[method]
    assert (short.allreduces, long.allreduces) == (SHORT, LONG)
    assert short.others == long.others
    assert sum(short.others.values()) > 0  # setting up does use some: the shim sees more than Allreduce
    slots = CLIENTS * client_slot(vectors, watched=True).itemsize + RANKS * RANK_SLOT.itemsize
    entries = vectors * ENTRIES * 8
    assert long.bytes == LONG * (entries + slots) + entries  # a first round's vectors have two words


def test_a_round_whose_units_did_not_suit_is_run_once_more(tallies):
    short, long = tallies["too-large"]
    assert (short.allreduces, long.allreduces) == (SHORT + 1, LONG + 1)
    assert short.others == long.others


def test_a_robust_mean_takes_two_more_each_time_that_it_looks(tallies):
    short, long = tallies["geometric"]
    assert (short.allreduces, long.allreduces) == ((1 + 2 * 3) * SHORT, (1 + 2 * 3) * LONG)
    assert short.others == long.others


def test_an_evaluating_round_takes_one_more(tallies):
    short, long = tallies["evaluating"]
    assert (short.allreduces, long.allreduces) == (2 * SHORT, 2 * LONG)
    assert short.others == long.others


def test_a_round_whose_ranks_share_memory_is_two_barriers_and_an_allreduce_of_slots(tallies):
    short, long = tallies["shared"]
    assert (short.allreduces, long.allreduces) == (SHORT, LONG)
    assert long.bytes == LONG * (CLIENTS * client_slot(1, watched=True).itemsize + RANKS * RANK_SLOT.itemsize)
    more = Counter(long.others)
    more.subtract(short.others)
    assert {name: calls for name, calls in more.items() if calls} == {"Barrier": 2 * (LONG - SHORT)}
