"""The command of a batch job: run the ranks, pass signals on to them, and decide whether to requeue the job."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType

from hpcfed.cluster.step.mps import serve, shares_gpus
from hpcfed.cluster.step.scheduler import JobScheduler, Step
from hpcfed.errors import EnvironmentFailure, HpcfedError, InputError
from hpcfed.io.atomic import write_whole
from hpcfed.ranks.early import take_noted

STOPPED = 75
"""Exit code of a run that has saved itself and can be resumed."""
ENDED = (0, 2, 3)
"""Exit codes after which waiting jobs cannot resume anything: the run is done, or its error would occur again."""
KILLED = (6, 7, 8, 9, 11, 14, 125)
"""Exit codes of killed ranks, without the 128 that srun and Open MPI's mpirun add: the signals ABRT, BUS, FPE, KILL and
SEGV; 14 of an Open MPI rank whose peer was killed; 125 for lack of memory.
"""
MOST_DEATHS = 3
"""Largest number of consecutive requeues after a rank was killed."""
SURVIVED = 128 + 9
"""Exit code used in place of srun's 0 if the run is unfinished: srun could not kill ranks blocked by a hung folder."""
STARTING = 5
"""Seconds until started ranks listen to signals."""
CHECKPOINT = re.compile(r"round-.*\.json")


def run_step(step: Step, scheduler: JobScheduler) -> int:
    """Run a job's ranks to their end, requeue the job if its run can be resumed, and return the job's exit code.

    On SIGUSR1 the ranks finish their round, save the run and exit with 75. The job is requeued if a new checkpoint was
    saved and either the ranks exited with 75, or a rank was killed (for example for lack of memory). After kills, it is
    requeued at most three times in a row.

    Raises:
        InputError: the recipe's file cannot be read, or has changed since the job was submitted.
        EnvironmentFailure: the ranks cannot be started.
    """
    code = 1
    try:
        _check_unchanged(step)
        code = _run(step, scheduler)
    except HpcfedError as error:
        code = error.exit_code
        raise
    finally:
        if step.chain and code in ENDED:
            scheduler.cancel_waiting(step.chain)
    return code


def _check_unchanged(step: Step) -> None:
    if step.unchanged is None:
        return
    path, digest = step.unchanged
    try:
        is_same = hashlib.sha256(path.read_bytes()).hexdigest() == digest
    except OSError:
        is_same = False
    if not is_same:
        raise InputError(
            "has changed since the job was submitted, or cannot be read", where=str(path), remedy="submit it again"
        )


def _run(step: Step, scheduler: JobScheduler) -> int:
    ranks = Ranks(step, scheduler)
    before, variables = saved(step.output), scheduler.prepare(step)
    with _mps(step) as service:
        code = ranks.run({**variables, **service})
    if code == 0 and _is_unfinished(step.output):
        code = SURVIVED
    _send_back(step, scheduler, code, can_go_on=not ranks.cancelled and saved(step.output) != before)
    return code


def _mps(step: Step) -> AbstractContextManager[dict[str, str]]:
    shared = shares_gpus() if step.mps is None else step.mps
    return serve() if shared else nullcontext({})


class Ranks:
    """The ranks of a job, started by `run`.

    From its creation on, an instance handles this process's signals. SIGUSR1, SIGALRM, and a SIGTERM that cancels the
    job are passed on to the ranks as SIGUSR1; if they come before the ranks have started, `STARTING` seconds after the
    start. SIGINT and other SIGTERMs are ignored, since the ranks receive them, too.

    Attributes:
        cancelled: whether a SIGTERM has cancelled the job (see `JobScheduler.CANCELS_BY_TERM`).
    """

    def __init__(self, step: Step, scheduler: JobScheduler):
        self._step, self._scheduler = step, scheduler
        self._process: subprocess.Popen[bytes] | None = None
        self._early = step.early
        self.cancelled = False
        for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)  # ranks begin with the default actions
        self._early |= bool(take_noted())

    def run(self, variables: dict[str, str]) -> int:
        """Run the ranks with additional environment variables; return the launcher's exit code, 128 + n for signal n.

        Raises:
            EnvironmentFailure: the command cannot be started.
        """
        try:
            self._process = subprocess.Popen(
                self._step.command, stdin=subprocess.DEVNULL, env={**os.environ, **variables}
            )
        except OSError as error:
            raise EnvironmentFailure(f"{self._step.command[0]} cannot be started", got=error.strerror or "") from None
        if self._early:
            signal.alarm(STARTING)
        elif self._step.signal_after is not None:
            signal.alarm(max(1, self._step.signal_after))
        code = self._process.wait()
        signal.alarm(0)
        return code if code >= 0 else 128 - code

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.cancelled |= self._scheduler.CANCELS_BY_TERM
        if number == signal.SIGINT or (number == signal.SIGTERM and not self.cancelled):
            return  # a terminal or the scheduler sends it to the ranks, too
        if self._process is None:
            self._early = True
        else:
            self._scheduler.signal_ranks(self._step, self._process)


def saved(output: Path) -> set[Path]:
    """Return the paths of all checkpoints in an output folder, which may be a link, and in its subfolders."""
    folders = ((Path(folder), names) for folder, _, names in os.walk(output.resolve()))
    return {
        folder / name
        for folder, names in folders
        if folder.name == "checkpoints"
        for name in names
        if CHECKPOINT.fullmatch(name)
    }


def _is_unfinished(output: Path) -> bool:
    """Return whether a folder has checkpoints of a run, but no ``result.json`` with the status ``finished``."""
    if not (output / "checkpoints").is_dir():
        return False
    try:
        return json.loads((output / "result.json").read_bytes())["status"] != "finished"
    except (OSError, ValueError, LookupError, TypeError):
        return True


def _send_back(step: Step, scheduler: JobScheduler, code: int, can_go_on: bool) -> None:
    """Requeue the job if its run can be resumed.

    Consecutive deaths of ranks are counted in ``<output>-<name>.deaths``, with the name from `JobScheduler.name_of`, or
    in ``<output>.deaths`` if the name is "".
    """
    death = code & 127 in KILLED
    file = Path("-".join(filter(None, (str(step.output), scheduler.name_of(step)))) + ".deaths")
    deaths = _read(file) + 1 if death else 0
    goes_on = (death or code & 127 == STOPPED) and step.requeue and can_go_on and deaths <= MOST_DEATHS
    if goes_on and scheduler.is_wanted(step) and _count(file, deaths):
        if death:
            _say(f"a rank was killed (exit code {code}); requeued, {deaths} of at most {MOST_DEATHS} in a row")
        if not scheduler.send_back(step):
            _say("the job could not be sent back into the queue; submit it again to go on")
        return
    _count(file, 0)
    if death:
        _say(f"a rank was killed (exit code {code}), and the job is not requeued; submit it again to go on")


def _read(file: Path) -> int:
    """Return the integer in a file; 0 if it is missing or unreadable."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def _count(file: Path, deaths: int) -> bool:
    """Write the number of deaths to a file, or delete the file if the number is 0; return whether that succeeded."""
    try:
        if deaths:
            write_whole(file, f"{deaths}\n")
        else:
            file.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    print(f"hpcfed: {text}", file=sys.stderr, flush=True)
