"""What ends a run, after how long and with which line, under each launcher; for ``docs/network.md``, not a test.

    python -m tests.network.faults [--faults kill,full] [--launchers mpich,openmpi,srun]        a minute each, as root

Two ranks on two hosts train; the fault strikes the second one, its link, or the folder, once checkpoints are there.
Afterwards the run goes on in one process, and its model is compared with that of a run that nothing befell.
The run folder is a small disk, which ``full`` fills. For ``slow`` and ``hung`` a third host serves it by SFTP; its
server stands still for 20 s, or for good: then a rank in a system call cannot even be killed before the server is.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import hpcfed
from tests.launch import own_lines
from tests.mpi.recipes import write_small
from tests.network import share
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
WAKING = ("stop 20 s", "slow")
ON_A_DISK, ON_A_SERVER = ("full",), ("slow", "hung")


@dataclass
class Job:
    """A run of two ranks on hosts h1 and h2.

    Attributes:
        network: with two hosts.
        launcher: one of `LAUNCHERS`.
        room: the folder of the recipe, as it is seen here.
        cwd: the same folder, as the hosts see it.
        env: of the launcher.
    """

    network: Hosts
    launcher: str
    room: Path
    cwd: Path
    env: Mapping[str, str]

    def __post_init__(self) -> None:
        python = os.environ[OPEN_MPI_PYTHON] if self.launcher == "openmpi" else sys.executable
        mpi = self.network.mpirun(python, 2, ["h1", "h2"])
        if self.launcher == "srun":
            mpi = ["srun", "--nodelist=h1,h2", "--nodes=2", "--ntasks-per-node=1", "--mpi=pmi2", "--quiet", "--wait=30"]
        run = [*mpi, python, "-m", "hpcfed", "run", "recipe.yaml", "--quiet"]
        self.process = self.network.start(run, self.cwd, self.env)
        until(lambda: self.rounds() >= 12 or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()

    def rounds(self) -> int:
        """Return the number of rounds recorded."""
        return Place(self.room).rounds()

    def end(self, since: float) -> str:
        """Wait until all has ended; return cells: seconds, exit code, the line."""
        gone: float | None = None
        while self.process.poll() is None and time.monotonic() < since + LIMIT:
            if gone is None and not (self.network.ranks("h1") or self.network.ranks("h2")):
                gone = time.monotonic()
            if gone is not None and time.monotonic() > gone + LAUNCHER_LIMIT:
                break
            time.sleep(0.05)
        code = self.process.poll()
        if code is None:
            ended = f"{gone - since:.0f}, the launcher not" if gone is not None else "never"
        else:
            ended = f"{time.monotonic() - since:.0f}"
        self.relieve()
        _, stderr = self.process.communicate()
        lines = own_lines(stderr.replace("\0", ""))  # which Open MPI ends some lines with
        line = next((line for line in lines if line.startswith("hpcfed: ")), f"(the launcher's) {_first(stderr)}")
        return f"{ended} | {'–' if code is None else code} | {line.replace('|', '/')}"

    def relieve(self) -> None:
        """Let a server that stands still go on, and end all ranks."""
        for server in self.servers():
            server.send_signal(signal.SIGCONT)
        self.network.kill("h1", "h2")

    def servers(self) -> list[psutil.Process]:
        """Return the processes that serve the folder."""
        found = []
        for one in self.network.processes(self.network.names[-1]):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found += [one] if one.name() == share.SFTP.name else []
        return found

    def wakes(self) -> str:
        """Wait until rounds go on; return the cells that `end` returns."""
        since, rounds = time.monotonic(), self.rounds()
        until(lambda: self.rounds() > rounds + 5 or self.process.poll() is not None)
        if self.process.poll() is not None:
            return self.end(since)
        said = f"goes on after {time.monotonic() - since:.0f}"
        self.relieve()
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
        if fault in ON_A_DISK:
            ends.enter_context(_small_disk(room / "run"))
        network = ends.enter_context(hosts(3 if fault in ON_A_SERVER else 2))
        network.link(rate=100e6, delay=0.001)
        write_small(room, 7)
        os.utime(room / "small.h5", (1e9, 1e9))  # SFTP knows whole seconds
        limit = PATIENT if fault in WAKING else WATCHDOG
        Place(room).write(rounds=100_000, checkpoint={"every": 5}, evaluate={"every": 0}, watchdog=limit)
        cwd = room
        if fault in ON_A_SERVER:
            cwd = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="mounts-"))) / "shared"
            ends.enter_context(share.shared(network, room, "h3", ["h1", "h2"], cwd))
        env = ends.enter_context(slurm_on(network)) if launcher == "srun" else {}
        job = Job(network, launcher, room, cwd, env)
        since = time.monotonic()
        DEEDS[fault](job)
        cells = job.wakes() if fault in WAKING else job.end(since)
        return f"{cells} | {_resumed(room)}"


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _fill(job: Job) -> None:
    """Fill the disk until the job ends, and make room then."""
    filler = job.room / "run" / ".filler"
    with filler.open("wb", buffering=0) as file:
        while job.process.poll() is None:
            with suppress(OSError):
                file.write(bytes(4096))
            time.sleep(0.005)
    filler.unlink()


def _freeze(job: Job, seconds: float = math.inf) -> None:
    """Have the server of the folder stand still, for ever or for some seconds."""
    for server in job.servers():
        server.send_signal(signal.SIGSTOP)
    if seconds < math.inf:
        time.sleep(seconds)
        for server in job.servers():
            server.send_signal(signal.SIGCONT)


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
    (rank,) = job.network.ranks("h2")
    for number in signals:
        rank.send_signal(number)
        if number == signal.SIGSTOP and len(signals) > 1:
            time.sleep(PAUSE)


DEEDS: dict[str, Callable[[Job], None]] = {
    "kill": lambda job: _signal(job, signal.SIGKILL),
    "stop": lambda job: _signal(job, signal.SIGSTOP),
    "stop 20 s": lambda job: _signal(job, signal.SIGSTOP, signal.SIGCONT),
    "cut": lambda job: job.network.pull("h2"),
    "full": _fill,
    "slow": lambda job: _freeze(job, PAUSE),
    "hung": _freeze,
}


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
