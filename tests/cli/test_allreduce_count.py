"""Training takes one Allreduce a round, evaluation one more, and nothing else: counted at the MPI library itself."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.launch import launch
from tests.mpi.recipes import METHODS, write_recipe, write_small

RANKS, CLIENTS = 3, 5
ENTRIES = 96 + 16 + 32 + 16
"""d of the small model: its four parameter tensors, each padded to 64 bytes."""
WORDS_OF_A_CLIENT, WORDS_OF_A_RANK = 5, 2
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


class Tally:
    """Calls by name and bytes reduced, the same on all ranks."""

    def __init__(self, folder: Path):
        per_rank = [self._read(path) for path in folder.glob("counts.*")]
        assert len(per_rank) == RANKS
        assert per_rank.count(per_rank[0]) == RANKS
        self.calls, self.bytes = per_rank[0]

    @staticmethod
    def _read(path: Path) -> tuple[Counter[str], int]:
        rows = [line.split() for line in path.read_text().splitlines()]
        return Counter({name: int(calls) for name, calls, _ in rows}), sum(int(size) for _, _, size in rows)

    @property
    def allreduces(self) -> int:
        return sum(calls for name, calls in self.calls.items() if "allreduce" in name.lower())

    @property
    def others(self) -> dict[str, int]:
        return {name: calls for name, calls in self.calls.items() if "allreduce" not in name.lower() and calls}


def tally(folder: Path, shim: Path, **changes: object) -> Tally:
    """Run the small recipe on 3 ranks, and count."""
    folder.mkdir()
    write_small(folder, CLIENTS)
    write_recipe(folder, **changes)
    preloaded = {"LD_PRELOAD": str(shim), "COUNT_COLLECTIVES": str(folder / "counts")}
    done = launch(RANKS, ["run", "recipe.yaml", "--quiet"], cwd=folder, env=preloaded)
    assert (done.returncode, done.stderr) == (0, "")
    return Tally(folder)


@pytest.mark.parametrize("method", ["fedexp", pytest.param("feddyn", marks=pytest.mark.soak)])
def test_a_round_is_one_allreduce_and_nothing_else(method, shim, tmp_path):
    training = {"algorithm": {"name": method, **METHODS[method]}, "evaluate": {"every": 0}}
    short = tally(tmp_path / "short", shim, rounds=3, **training)
    long = tally(tmp_path / "long", shim, rounds=8, **training)
    assert (short.allreduces, long.allreduces) == (3, 8)
    assert short.others == long.others
    assert sum(short.others.values()) > 0  # setting up does use some: the shim sees more than Allreduce
    words = ENTRIES + CLIENTS * WORDS_OF_A_CLIENT + RANKS * WORDS_OF_A_RANK
    assert long.bytes == 8 * words * 8


def test_an_evaluating_round_takes_one_more(shim, tmp_path):
    evaluating = {"evaluate": {"every": 2, "train": {"every": 1}, "batch_size": 64}}
    short = tally(tmp_path / "short", shim, rounds=3, **evaluating)
    long = tally(tmp_path / "long", shim, rounds=8, **evaluating)
    assert (short.allreduces, long.allreduces) == (6, 16)
    assert short.others == long.others
