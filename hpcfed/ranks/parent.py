"""A rank's parent: the process that a launcher starts, whose child is the rank, and that says if a signal kills it.

SIGKILL, which the kernel sends where memory is short, leaves a rank no last word, and a launcher that sees a rank die
ends the others before they miss it. So the parent speaks first, and then ends as the rank did.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
import time
from contextlib import suppress
from types import FrameType

PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""To the rank, if its parent alone got them; SIGINT comes from terminals and launchers, to both."""
RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Variables that number a rank; the size, if known, is `ranks_promised`."""
CONNECTION = "PMI_FD"
"""Variable that numbers the socket between a rank and its launcher."""
OF_PMIX = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Variables of ranks that do not read ``PMI_FD``, and may inherit it from the shell that called their launcher."""
AFTER_A_KILL = "perhaps for want of memory (dmesg on {} says so); give the same command again"
AFTER_A_FAULT = "a fault of a library, which may have said more, or of code of yours in another language than Python"
HEARD_AFTER = 0.5
"""Seconds for the launcher to read the line, before it sees the end and drops what comes."""


def ranks_promised() -> int:
    """Return the number of ranks the launcher announces, 0 if unknown."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return tasks_of_srun()


def tasks_of_srun() -> int:
    """Return the tasks of the srun step that started this process; not used under mpirun, where they are daemons."""
    text = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return int(text) if text.isdigit() and "SLURM_PROCID" in os.environ else 0


def launcher_is_gone() -> bool:
    """Whether a launcher's variables are another process's: the connection to it that ``PMI_FD`` names is not here.

    So it is in a program that a rank starts, by Python's `subprocess` for one; MPI would end the process. Not so in a
    rank of Open MPI whose ``mpirun`` was called in the shell of ``srun --mpi=pmi2 --pty``.
    """
    number = os.environ.get(CONNECTION, "")
    if not number.isdecimal() or any(name in os.environ for name in OF_PMIX):
        return False
    try:
        mode = os.fstat(int(number)).st_mode
    except (OSError, OverflowError):
        return True
    return not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode))


def fork_rank() -> None:
    """Go on in a child, the rank, where a launcher has started several; the parent waits for it and never returns."""
    if ranks_promised() < 2 or launcher_is_gone():
        return
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        child = os.fork()
    except OSError:  # no more processes: it goes without
        child = 0
    if child:
        _wait_for(child)
    if os.getpid() != parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended meanwhile
            os._exit(128 + signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def _wait_for(child: int) -> None:
    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        os._exit(code)
    if -code not in (*PASSED_ON, signal.SIGINT):  # who sends those knows
        rank = next((os.environ[name] for name in RANK if name in os.environ), "?")
        where, name = os.uname().nodename, {one.value: one.name for one in signal.Signals}.get(-code, f"signal {-code}")
        remedy = AFTER_A_KILL.format(where) if -code == signal.SIGKILL else AFTER_A_FAULT
        with suppress(OSError):  # nobody listens
            os.write(2, f"hpcfed: rank {rank} on {where} was ended by {name}; {remedy}\n".encode())
        time.sleep(HEARD_AFTER)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its core
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)
