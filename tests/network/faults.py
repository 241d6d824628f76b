"""What ends a run, after how long and with which line, under each launcher; for ``docs/network.md``, not a test.

    python -m tests.network.faults [--faults kill,stop] [--launchers mpich,openmpi,srun]        a minute each, as root

Two ranks on two hosts train; the fault strikes the second one, or its link, once checkpoints are there.
Afterwards the run goes on in one process, and its model is compared with that of a run that nothing befell.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import hpcfed
from tests.launch import own_lines
from tests.mpi.recipes import write_small
from tests.network.conftest import Place
from tests.network.hosts import Hosts, hosts
from tests.network.slurm import slurm_on
from tests.slurm.conftest import OPEN_MPI_PYTHON

WATCHDOG = "1s"
"""The least: a rank may be silent for 10 s. The default waits for five minutes."""
PATIENT = "1min"
PAUSE = 20.0
LIMIT = 240.0
LAUNCHER_LIMIT = 45.0
"""Seconds for a launcher to end after its ranks; Open MPI's waits for its daemon on a lost host for longer."""
LAUNCHERS = ("mpich", "openmpi", "srun")
WAKING = ("stop 20 s",)


@dataclass
class Job:
    """A run of two ranks on hosts h1 and h2.

    Attributes:
        network: with two hosts.
        launcher: one of `LAUNCHERS`.
        room: the folder of the recipe.
        env: of the launcher.
    """

    network: Hosts
    launcher: str
    room: Path
    env: Mapping[str, str]

    def __post_init__(self) -> None:
        python = os.environ[OPEN_MPI_PYTHON] if self.launcher == "openmpi" else sys.executable
        mpi = self.network.mpirun(python, 2, ["h1", "h2"])
        if self.launcher == "srun":
            mpi = ["srun", "--nodelist=h1,h2", "--nodes=2", "--ntasks-per-node=1", "--mpi=pmi2", "--quiet", "--wait=30"]
        run = [*mpi, python, "-m", "hpcfed", "run", "recipe.yaml", "--quiet"]
        self.process = self.network.start(run, self.room, self.env)
        until(lambda: self.rounds() >= 12 or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()

    def rounds(self) -> int:
        """Return the number of rounds recorded."""
        return Place(self.room).rounds()

    def ranks(self, host: str) -> list[int]:
        """Return the processes of ranks on a host."""
        found = [one for one in self.network.processes(host) if one.name().startswith("python")]
        return [one.pid for one in found if "hpcfed" in one.cmdline()]

    def end(self, since: float) -> str:
        """Wait until all has ended; return cells: seconds, exit code, the line."""
        gone: float | None = None
        while self.process.poll() is None and time.monotonic() < since + LIMIT:
            if gone is None and not (self.ranks("h1") or self.ranks("h2")):
                gone = time.monotonic()
            if gone is not None and time.monotonic() > gone + LAUNCHER_LIMIT:
                break
            time.sleep(0.05)
        code = self.process.poll()
        if code is None:
            ended = f"{gone - since:.0f}, the launcher not" if gone is not None else "never"
        else:
            ended = f"{time.monotonic() - since:.0f}"
        self.network.kill("h1", "h2")
        _, stderr = self.process.communicate()
        lines = own_lines(stderr)
        line = lines[0] if lines else f"(the launcher's) {_first(stderr)}"
        return f"{ended} | {'–' if code is None else code} | {line.replace('|', '/')}"

    def wakes(self) -> str:
        """Wait until rounds go on; return the cells that `end` returns."""
        since, rounds = time.monotonic(), self.rounds()
        until(lambda: self.rounds() > rounds + 5 or self.process.poll() is not None)
        if self.process.poll() is not None:
            return self.end(since)
        said = f"goes on after {time.monotonic() - since:.0f}"
        self.network.kill("h1", "h2")
        self.process.communicate()
        return f"{said} | – | –"


def main() -> None:
    """Strike, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", default=",".join(DEEDS))
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    asked = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; watchdog: {WATCHDOG}, a minute where a rank wakes")
    print("| fault | launcher | seconds to the end | exit code | the line | bits after resuming |")
    print("|---|---|---|---|---|---|", flush=True)
    for launcher in asked.launchers.split(","):
        for fault in asked.faults.split(","):
            began = time.monotonic()
            row = strike(launcher, fault)
            print(f"| {fault} | {launcher} | {row} |", flush=True)
            print(
                f"  {time.monotonic() - began:.0f} s in all, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True
            )


def strike(launcher: str, fault: str) -> str:
    """Run, strike, resume, compare; return the row's cells."""
    with ExitStack() as ends:
        room = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        network = ends.enter_context(hosts(2))
        network.link(rate=100e6, delay=0.001)
        env = ends.enter_context(slurm_on(network)) if launcher == "srun" else {}
        write_small(room, 7)
        limit = PATIENT if fault in WAKING else WATCHDOG
        Place(room).write(rounds=100_000, checkpoint={"every": 5}, evaluate={"every": 0}, watchdog=limit)
        job = Job(network, launcher, room, env)
        since = time.monotonic()
        DEEDS[fault](job)
        cells = job.wakes() if fault in WAKING else job.end(since)
        return f"{cells} | {_resumed(room)}"


def _resumed(room: Path) -> str:
    """Go on for some rounds in one process, and tell whether the model is that of a run from the beginning."""
    rounds = Place(room).rounds() + 3
    words = [sys.executable, "-m", "hpcfed", "run", "recipe.yaml", "--quiet", f"rounds={rounds}"]
    done = subprocess.run(words, cwd=room, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode != 0:
        return f"not resumed: {done.stderr.strip()}"
    goes_on = not list((room / "run").glob("previous-*"))
    whole = hpcfed.run(room / "recipe.yaml", [f"rounds={rounds}", f"output={room / 'whole'}"], quiet=True)
    same = (room / "run" / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    return ("equal" if same else "DIFFER") if goes_on else "equal, from the beginning" if same else "DIFFER"


def _signal(job: Job, *signals: int) -> None:
    (rank,) = job.ranks("h2")
    for number in signals:
        os.kill(rank, number)
        if number == signal.SIGSTOP and len(signals) > 1:
            time.sleep(PAUSE)


DEEDS: dict[str, Callable[[Job], None]] = {
    "kill": lambda job: _signal(job, signal.SIGKILL),
    "stop": lambda job: _signal(job, signal.SIGSTOP),
    "stop 20 s": lambda job: _signal(job, signal.SIGSTOP, signal.SIGCONT),
    "cut": lambda job: job.network.pull("h2"),
}
"""To the second rank, or to its host's link."""


def until(condition: Callable[[], bool], timeout: float = LIMIT) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not after {timeout:g} s"
        time.sleep(0.05)


def _first(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip(" =")]
    return lines[0].strip() if lines else "nothing"


if __name__ == "__main__":
    main()
