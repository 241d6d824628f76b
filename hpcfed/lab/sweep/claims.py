"""Claims on runs: files in the sweep's folder that coordinate the groups of one job, and independent jobs.

    claims/<run>.<n>     the n-th claim on a run: the process that holds it, and in the end how the run ended

A claim is made with O_EXCL, which is atomic on NFS, Lustre and GPFS too: exactly one of several contenders gets it,
without locks. Its holder touches it every few seconds. A claim is dead when its process is gone from this node or, if
made on another node, when it has not been touched for `LEASE`; the process that then creates the next number holds the
run and resumes it from its checkpoint. Times are compared by the file server's clock alone. A holder that revives and
finds a successor ends its job. The files stay, as a log of which job ran what, and when.
"""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import psutil
from pydantic import ConfigDict, TypeAdapter

from hpcfed.errors import EnvironmentFailure
from hpcfed.io.atomic import write_whole
from hpcfed.io.node import process_space
from hpcfed.io.text import parse_json, read_text
from hpcfed.ranks.threads import start

BEAT = 10.0
"""Seconds between two touches of a claim."""
LEASE = 90.0
"""Seconds without a touch after which a claim is dead; NFS may show a touch a minute late."""
POLL = 1.0
"""Seconds between two checks of a claim that may be dead."""
DEATHS = 3
"""Number of dead claims after which a run counts as lost: the run itself may kill its process."""

NUMBERED = re.compile(r"(.+)\.([1-9][0-9]{0,8})", re.DOTALL)
"""Name of a claim's file: the run's name, a dot, and the number of the claim."""

DECIDED = ("finished", "diverged", "refused", "failed", "lost")
"""Final endings: the run is not claimed again."""
RETRYABLE = ("refused", "failed", "lost")
"""Endings that `--retry` makes claimable again: their cause may lie outside the run."""


@dataclass(frozen=True)
class Claim:
    """A process's claim on a run: the content of a claim's file.

    Attributes:
        session: identifier of the job that made the claim; the same for all its groups.
        node, pid, born: the holding process: node, process number, and start in seconds since the node was booted.
        host: the node's host name.
        recipe: digest of the run's recipe.
        taken, ended: UTC times in ISO 8601; `ended` is "" while the claim is held.
        ending: one of `DECIDED`; ``stopped``, ``busy`` or ``again`` if the run may be claimed anew; None while held.
        message: the final error message; "" without an error.
        seconds: time that the process spent on the run.
    """

    __pydantic_config__: ClassVar = ConfigDict(strict=True, revalidate_instances="always")
    session: str = ""
    node: str = ""
    pid: int = 0
    born: float = 0.0
    host: str = ""
    recipe: str = ""
    taken: str = ""
    ended: str = ""
    ending: str | None = None
    message: str = ""
    seconds: float = 0.0


CLAIM = TypeAdapter(Claim)


@dataclass(frozen=True)
class RunState:
    """State of a run: decided (ended for good), held by a process, or open (may be claimed).

    Attributes:
        last: number of the run's last claim; 0 without claims.
        claim: the claim that decided the run, else the last one.
        held: whether a process that is not known to be dead holds the run.
        vouched: whether that process is known to be alive.
        deaths: number of claims that died since the run was last stopped, reopened or given another recipe.
    """

    last: int = 0
    claim: Claim = Claim()
    held: bool = False
    vouched: bool = False
    deaths: int = 0

    @property
    def decided(self) -> bool:
        """Whether the run has ended for good."""
        return self.claim.ending in DECIDED

    @property
    def open(self) -> bool:
        """Whether the run may be claimed."""
        return not self.decided and not self.held


class Claims:
    """The claims of a sweep, read and made by one process.

    Args:
        folder: the sweep's folder.
        session: unique identifier of this job; the same for all its groups.
    """

    def __init__(self, folder: Path, session: str):
        self._folder, self.session = folder / "claims", session
        process = psutil.Process()
        born, host = _born(process), socket.gethostname()
        self._me = Claim(session=session, node=process_space(), pid=process.pid, born=born, host=host)
        self._known: dict[Path, Claim] = {}
        self._touched: dict[Path, float] = {}

    def look(self, runs: Sequence[tuple[str, str]]) -> dict[str, RunState]:
        """Return run name → state, for `runs` given as pairs of name and recipe digest."""
        numbers: dict[str, list[int]] = {}
        try:
            names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            names = []
        for name in names:
            if found := NUMBERED.fullmatch(name):
                numbers.setdefault(found[1], []).append(int(found[2]))
        return {run: self._state_of(run, digest, sorted(numbers.get(run, ()), reverse=True)) for run, digest in runs}

    def take(self, run: str, digest: str, state: RunState) -> int | None:
        """Claim an open run; return the claim's number, or None if another process was faster or the run is lost.

        If `state` has `DEATHS` deaths or more, the run is lost and recorded as such. `digest` is the recipe's.
        """
        number = state.last + 1
        claim = replace(self._me, recipe=digest, taken=_now())
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with self._path(run, number).open("x", encoding="utf-8") as file:
                file.write(json.dumps(asdict(claim)) + "\n")
        except FileExistsError:
            return None
        self._known[self._path(run, number)] = claim
        self._remove_remains(run, number)
        if state.deaths >= DEATHS:
            self.end(run, number, "lost", f"its job died {state.deaths} times")
            return None
        return number

    def end(self, run: str, number: int, ending: str, message: str = "", seconds: float = 0.0) -> None:
        """Record the ending of a run that this process has claimed."""
        claim = self._known[self._path(run, number)]
        ended = replace(claim, ending=ending, message=message, seconds=round(seconds, 3), ended=_now())
        write_whole(self._path(run, number), json.dumps(asdict(ended)) + "\n")

    def reopen(self, run: str, digest: str, state: RunState) -> None:
        """Make a decided run claimable again."""
        number = self.take(run, digest, state)
        if number is not None:
            self.end(run, number, "again")

    @contextmanager
    def held(self, run: str, number: int, end_all: Callable[[int, str], None]) -> Iterator[None]:
        """Touch a claim every `BEAT` seconds in the block; call `end_all` if another job has taken the run over.

        `end_all` gets an exit code and an error message.
        """
        done = threading.Event()
        thread = start(
            threading.Thread(target=self._beat, args=(run, number, end_all, done), name="claim", daemon=True)
        )
        try:
            yield
        finally:
            done.set()
            thread.join()

    def ask_to_stop(self) -> None:
        """Ask all groups of this job to stop, by a file in the claims' folder; a missing folder is made."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f".stop-{self.session}").touch()

    def asked_to_stop(self) -> bool:
        """Return whether any group of this job has asked to stop."""
        return (self._folder / f".stop-{self.session}").exists()

    def forget_stop(self) -> None:
        """Remove the request to stop, once all groups have stopped."""
        (self._folder / f".stop-{self.session}").unlink(missing_ok=True)

    def _beat(self, run: str, number: int, end_all: Callable[[int, str], None], done: threading.Event) -> None:
        while not done.wait(BEAT):
            taken_over = False
            with suppress(OSError):  # the file server may be back for the next touch
                os.utime(self._path(run, number))
            with suppress(OSError):
                successor = self._path(run, number + 1)
                taken_over = successor.exists() and self._read(successor).ending != "busy"
            if taken_over:
                what = f"hpcfed: {run}: another job has taken it over, after this one seemed dead for {LEASE:.0f} s"
                end_all(EnvironmentFailure.exit_code, what)

    def _state_of(self, run: str, digest: str, numbers: Sequence[int]) -> RunState:
        """Return a run's state, derived from its claims; `numbers` has the last claim first."""
        if not numbers:
            return RunState()
        newest, deaths = Claim(), 0
        for number in numbers:
            path = self._path(run, number)
            claim = self._read(path)
            same = claim.recipe == digest
            if number == numbers[0] and same:
                newest = claim
            if claim.ending in DECIDED and same:
                return RunState(numbers[0], claim)
            if claim.ending is None and number == numbers[0]:
                dead, vouched = self._judge(path, claim)
                if not dead:
                    return RunState(number, claim, held=True, vouched=vouched)
            if claim.ending == "again" or not same:
                break
            if claim.ending is None:
                deaths += 1
            elif claim.ending == "stopped":
                break
        return RunState(numbers[0], newest, deaths=deaths)

    def _judge(self, path: Path, claim: Claim) -> tuple[bool, bool]:
        """Return whether a claim's holder is dead, and whether it is known to be alive."""
        if claim.session == self.session:
            return False, True
        if claim.node == self._me.node:
            alive = _lives(claim.pid, claim.born)
            return not alive, alive
        touched = _touched(path)
        first = self._touched.setdefault(path, touched)
        return self._server_time() - touched > LEASE, touched > first

    def _read(self, path: Path) -> Claim:
        """Return the claim in a file; an empty one while the file is being written. Ended claims are cached by path."""
        known = self._known.get(path)
        if known is not None and known.ending is not None:
            return known
        try:
            claim = CLAIM.validate_python(Claim(**parse_json(read_text(path))))
        except (OSError, ValueError, TypeError):
            return Claim()
        self._known[path] = claim
        return claim

    def _remove_remains(self, run: str, number: int) -> None:
        """Remove temporary files that holders of earlier claims left when killed while recording the run's ending."""
        for path in self._folder.glob(f".{glob.escape(run)}.*.tmp"):
            found = re.fullmatch(r"\.([1-9][0-9]*)\.[0-9]+\.tmp", path.name[1 + len(run) :], re.ASCII)
            if found and int(found[1]) < number:
                path.unlink(missing_ok=True)

    def _server_time(self) -> float:
        """Return the time by the clock of the folder's file server."""
        clock = self._folder / f".clock-{uuid.uuid4().hex}"  # of this look alone: sessions of other jobs look, too
        clock.touch()
        try:
            return _touched(clock)
        finally:
            clock.unlink()

    def _path(self, run: str, number: int) -> Path:
        return self._folder / f"{run}.{number}"


def _touched(path: Path) -> float:
    with path.open("rb") as file:  # opening makes NFS ask its server
        return os.fstat(file.fileno()).st_mtime


def _lives(pid: int, born: float) -> bool:
    """Return whether the process with this number and start time is alive and not a zombie."""
    try:
        process = psutil.Process(pid)
        return abs(_born(process) - born) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):  # a number that no process has
        return False


def _born(process: psutil.Process) -> float:
    """Return a process's start in seconds since boot; unlike times of day, it does not move when the clock is set."""
    try:
        line = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(line.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):  # no Linux, or the process is gone
        return float(process.create_time())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
