"""The ranks of a run. The only module that imports mpi4py.

Everything else uses a `World`: its rank, its size and a few collectives. A world of one works without MPI, and no
caller distinguishes the two kinds.

Ranks leave together: `leave` gathers how each rank ended, prints the message of the first that failed (else rank 0's),
and returns the same exit code on all. A rank that fails while another is stuck in a collective ends the job instead.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rich.filesize import decimal

from hpcfed.errors import RAISED, Diverged, EnvironmentFailure, HpcfedError, InputError, Stopped, system_failure
from hpcfed.io.output import Output
from hpcfed.ranks.accelerators import MPI_KIND, MPI_QUERY, MPI_SWITCHES
from hpcfed.ranks.code import digest, folders
from hpcfed.ranks.parent import CONNECTION, launcher_is_gone, ranks_promised, tasks_of_srun
from hpcfed.ranks.pulse import Pulse
from hpcfed.ranks.threads import start

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI
    from torch import Tensor

T = TypeVar("T")

LAUNCHED = ("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PALS_RANKID")
"""Variables that a launcher sets for each rank; srun without a PMI sets only SLURM's own."""
KINDS = {kind.exit_code: kind for kind in (InputError, Diverged, EnvironmentFailure, Stopped)}
CONNECT_TIMEOUT = 1800.0
"""Seconds within which all ranks must have met after MPI has started: the default of the recipe's watchdog."""
LARGEST_MESSAGE = 1 << 28
"""Bytes of a broadcast; older MPI libraries count them in 32 bits."""
LINGER = 600.0
"""Seconds for which threads of the user's code, which may be uploading, keep a process that has ended otherwise."""
PATIENCE = 5.0
"""Seconds a failing rank waits for the others to arrive before it ends the job."""
SHM = Path("/dev/shm")
SHM_BYTES = 32 * 2**20
"""Shared memory of one rank for messages to ranks of the same host; MPICH needs a third of it."""
PASSED_ON = 0.5
"""Seconds in which a launcher passes a line on, before what may end the job at once."""
SCANT = 0.4
"""Share of it below which a run says so before MPI starts, as MPICH then ends by a bus error and no word."""
LOCAL_RANKS = (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"))
"""Variables of launchers: a rank's number on its host, and how many the host has."""


class World:
    """A world of one rank, without MPI; the interface of every world."""

    rank: int = 0
    size: int = 1
    hosts: tuple[str, ...] = (socket.gethostname(),)
    """Host name of each rank."""
    code: tuple[str, ...] = ("",)
    """Digest of each rank's copy of hpcfed (`hpcfed.ranks.code`); empty in a world of one, which compares none."""

    @property
    def is_root(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0

    pulse: Pulse | None = None
    """Signs of life between the ranks; None if there are none."""

    shares_memory: bool = True
    """Whether ranks of one host may sum in memory that they share; the same on all ranks."""

    reads_gpu_memory: bool | None = None
    """Whether MPI accepts buffers in a GPU's memory; None if unknown."""

    def sum_in_place(self, buffer: np.ndarray | Tensor) -> None:
        """Replace a buffer of int64 or float32 by its sum over ranks: one Allreduce."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.gather(None)

    def broadcast(self, value: T, root: int = 0) -> T:
        """Return the value of rank `root` on every rank."""
        return value

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return rank 0's tensors, on the host, on every rank."""
        return self.broadcast(tensors)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank."""
        return [value]

    def exchange(
        self, outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        """Begin to send tensors to ranks and to receive tensors from ranks, in place; all in host memory.

        Messages between two ranks arrive in the order sent. Returns a function that waits for completion; until then
        the tensors must not be touched.
        """
        return lambda: None

    def on_root(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 alone; every rank gets its result, or the same error."""
        value, failure = None, None
        if self.is_root:
            try:
                value = function()
            except HpcfedError as error:
                failure = self._placed(error)
        value, failure = self.broadcast((value, failure))
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def together(self, function: Callable[[], T]) -> T:
        """Call `function` on every rank; if any raises an `HpcfedError`, all raise the lowest failing rank's."""
        value, failure = None, None
        try:
            value = function()
        except HpcfedError as error:
            failure = self._placed(error)
        for other in self.gather(failure):
            if other is not None:
                raise other
        return value  # type: ignore[return-value]

    def _placed(self, error: HpcfedError) -> HpcfedError:
        """Return an error of this rank; one that the system raised names the rank and its host, of several."""
        cause = error.__cause__ or error.__context__
        if self.size == 1 or not (isinstance(error, EnvironmentFailure) and isinstance(cause, OSError)):
            return error
        return EnvironmentFailure(f"rank {self.rank} on {self.hosts[self.rank]}: {error}")

    def split(self, groups: int) -> World:
        """Return the world of this rank's group, one of `groups` groups of neighbouring ranks of nearly equal size.

        Raises:
            InputError: there are fewer ranks than groups.
        """
        if not 1 <= groups <= self.size:
            raise InputError("groups", expected=f"1 to {self.size}, the number of ranks", got=str(groups))
        return self

    @contextmanager
    def ends_within(self, seconds: float, error: HpcfedError) -> Iterator[None]:
        """End the job with an error if the block, a collective that another rank may never reach, takes longer."""
        yield

    @contextmanager
    def united(self) -> Iterator[None]:
        """Make the block end alike on all ranks: an error on one is raised on all, or ends a job that is stuck."""
        yield

    def end_at_once(self, code: int, message: str) -> None:
        """Print a message and end all ranks, from any thread, even while they wait in a collective."""
        _say(message)
        os._exit(code)

    def leave(self, code: int, message: str, document: str = "") -> int:
        """Agree on how the run ended, print the first message, and return the exit code of all.

        Args:
            document: for standard output, of the rank whose message it is.
        """
        _say(message, document)
        return code

    def describe(self) -> dict[str, Any]:
        """Return the facts about the ranks for ``environment.json`` and ``doctor``."""
        return {"ranks": self.size, "hosts": list(self.hosts), "mpi": None}


class MpiWorld(World):
    """The ranks of an MPI communicator; `code` is this one's digest, where it is known."""

    def __init__(self, comm: MPI.Comm, code: str | None = None):
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self._ending = threading.Lock()
        self.rank, self.size = comm.rank, comm.size
        with self.ends_within(CONNECT_TIMEOUT, self._unmet()):
            self._control = comm.Dup()  # so that leaving cannot pair with a collective of the run
            places = comm.allgather((socket.gethostname(), folders()))
            self.hosts = tuple(host for host, _ in places)
            self.code = self._digests(places) if code is None else tuple(comm.allgather(code))
            if MPI.Query_thread() == MPI.THREAD_MULTIPLE and comm.size > 1:
                self.pulse = Pulse(MPI, comm.Dup(), self._control)
        self.reads_gpu_memory = _reads_gpu_memory(MPI)

    def _digests(self, places: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[str, ...]:
        """Return each rank's digest: of those on one host with the same folders, the first one reads the files."""
        if self.size == 1:
            return ("",)
        first = {place: rank for rank, place in reversed(list(enumerate(places)))}
        found = self._comm.allgather(digest() if first[places[self.rank]] == self.rank else "")
        return tuple(found[first[place]] for place in places)

    def _unmet(self) -> EnvironmentFailure:
        what = f"start, rank {self.rank} on {socket.gethostname()}: not all {self.size} ranks have met"
        return EnvironmentFailure(what, remedy="check the hosts and the network; then give the same command again")

    def sum_in_place(self, buffer: np.ndarray | Tensor) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, buffer, op=self._mpi.SUM)

    def barrier(self) -> None:
        self._comm.Barrier()

    def broadcast(self, value: T, root: int = 0) -> T:
        return self._comm.bcast(value, root=root)

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        import torch

        described = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        described = self.broadcast(described)
        if not self.is_root:
            tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in described.items()}
        for tensor in tensors.values():
            for piece in tensor.contiguous().view(-1).view(torch.uint8).split(LARGEST_MESSAGE):
                self._comm.Bcast(piece.numpy())
        return tensors

    def gather(self, value: T) -> list[T]:
        return self._comm.allgather(value)

    def split(self, groups: int) -> World:
        super().split(groups)
        return MpiWorld(self._comm.Split(self.rank * groups // self.size, self.rank), self.code[self.rank])

    def exchange(
        self, outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        requests = [self._comm.Irecv(tensor, source=rank) for tensor, rank in incoming]
        requests += [self._comm.Isend(tensor, dest=rank) for tensor, rank in outgoing]
        return lambda: self._mpi.Request.Waitall(requests)

    @contextmanager
    def ends_within(self, seconds: float, error: HpcfedError) -> Iterator[None]:
        watch = threading.Timer(seconds, self._abort, (error.exit_code, f"hpcfed: {error}"))
        watch.daemon = True
        start(watch)
        try:
            yield
        finally:
            watch.cancel()
            watch.join()  # never returns if it is ending the job

    @contextmanager
    def united(self) -> Iterator[None]:
        own: BaseException | None = None
        try:
            yield
        except RAISED as error:
            known = error if isinstance(error, HpcfedError) else system_failure(error)
            own = error if known is None else self._placed(known)
        code = 0 if own is None else getattr(own, "exit_code", 1)
        name = f"rank {self.rank}: {type(own).__name__}: " if code == 1 else ""
        endings = self._agree(code, f"{name}{own}" if own is not None else "")
        if own is not None:
            raise own
        for code, message in endings:
            if code != 0:
                raise KINDS.get(code, HpcfedError)(message)

    def leave(self, code: int, message: str, document: str = "") -> int:
        endings = self._agree(code, message)
        speaker, ending = next(((r, e) for r, e in enumerate(endings) if e[0] != 0), (0, endings[0]))
        if self.rank == speaker:
            with self._ending:
                _say(ending[1], document)
        self._control.Barrier()
        return ending[0]

    def _agree(self, code: int, message: str) -> list[tuple[int, str]]:
        """Return how each rank ended; if this one failed and another does not arrive, end the job."""
        arrived = self._control.Ibarrier()
        deadline = time.monotonic() + PATIENCE
        while not arrived.Test():
            if code != 0 and time.monotonic() > deadline:
                self._abort(code, f"hpcfed: {message.removeprefix('hpcfed: ')}")
            time.sleep(0.001)
        return self._control.allgather((code, message))

    def describe(self) -> dict[str, Any]:
        mpi = self._mpi
        version = mpi.Get_library_version().split("\0")[0].strip()
        levels = (mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE)
        threads = ("single", "funneled", "serialized", "multiple")[levels.index(mpi.Query_thread())]
        return {
            "ranks": self.size,
            "hosts": list(self.hosts),
            "mpi": version.splitlines()[0],
            "mpi_threads": threads,
            "mpi_reads_gpu_memory": self.reads_gpu_memory,
        }

    def end_at_once(self, code: int, message: str) -> None:
        self._abort(code, message)

    def _abort(self, code: int, message: str) -> NoReturn:
        self._ending.acquire()  # never released: only one thread ends the job
        _say(message)
        time.sleep(0.5)  # the launcher may drop what a rank wrote just before Abort
        try:
            self._comm.Abort(code)
        finally:  # MPICH's may return, and leaves the rest to the launcher
            time.sleep(PATIENCE)
            os._exit(code)


def _reads_gpu_memory(mpi: Any) -> bool | None:
    """Return whether an MPI accepts a GPU's memory, None if unknown.

    Sources: MPI 4.1's info key, the variables `MPI_SWITCHES`, and `MPI_QUERY` of MPICH and Open MPI.
    """
    info = mpi.COMM_WORLD.Get_info()
    if MPI_KIND in (info.get("mpi_memory_alloc_kinds") or ""):
        return True
    if any(os.environ.get(name) == "1" for name in MPI_SWITCHES):
        return True
    try:
        return bool(getattr(ctypes.CDLL(mpi.__file__), MPI_QUERY)())
    except (OSError, AttributeError):
        return None


def _say(message: str, document: str = "") -> None:
    if message:
        print(message, file=Output(sys.stderr), flush=True)
    if document:
        print(document, file=Output(sys.stdout, matters=False), end="", flush=True)


_world: World | None = None


def connect(*, mixed: bool = False) -> World:
    """Return the world this process belongs to: MPI's where a launcher or mpi4py started it, else a world of one.

    Args:
        mixed: whether ranks may run different code of hpcfed, as they may to be examined, and to leave.

    Raises:
        EnvironmentFailure: a launcher started several ranks, but MPI sees only this one, or the launcher's variables
            are another process's; or, on all ranks, they run different code.
    """
    global _world
    if _world is None:
        _world = _find_world()
        _leave_with_errors(_world)
    if not mixed:
        refuse_mixed_code(_world)
    return _world


def _leave_with_errors(world: World) -> None:
    """End all ranks with an error that a user's script does not catch: another may wait in a collective for ever."""
    if world.size == 1 or "mpi4py.run" in sys.modules:  # ``python -m mpi4py`` ends them itself
        return
    report = sys.excepthook

    def report_and_leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report(kind, error, trace)
        what = f"rank {world.rank} on {world.hosts[world.rank]}: the script ended with {kind.__name__}: {error}"
        world.leave(getattr(error, "exit_code", 1), f"hpcfed: {what}")

    sys.excepthook = report_and_leave


def refuse_mixed_code(world: World) -> None:
    """Refuse ranks that run different code of hpcfed; no collective, and the same on all ranks.

    Raises:
        EnvironmentFailure: naming a rank and its host for each copy.
    """
    first = {code: rank for rank, code in reversed(list(enumerate(world.code)))}
    if len(first) > 1:
        copies = sorted((rank, code) for code, rank in first.items())
        raise EnvironmentFailure(
            "the ranks run different code of hpcfed",
            got=", ".join(f"{code} on {world.hosts[rank]} (rank {rank})" for rank, code in copies),
            remedy="unpack the same copy on every node",
        )


def leave(code: int, message: str, document: str = "", *, alone: bool = False) -> int:
    """Leave the world of this process.

    Args:
        code, message, document: as of `World.leave`.
        alone: whether the command needs no ranks. In the shell of ``srun --pty`` one task of several runs it, and MPI
            would wait for the others, or refuse, as in a program that a rank starts: it ends by itself, unless it has
            looked for them.
    """
    is_one = ("SLURM_PROCID" in os.environ or launcher_is_gone()) and "mpi4py.MPI" not in sys.modules
    if alone and is_one and _world is None:
        return World().leave(code, message, document)
    try:
        return connect(mixed=True).leave(code, message, document)
    except EnvironmentFailure as error:
        _say(message or f"hpcfed: {error}")
        return code or error.exit_code


def exit_without_threads(code: int) -> None:
    """End this process with `code` after `LINGER`: Python would wait for the threads of the user's code without end."""
    left = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    if not left:
        return
    if (mpi := sys.modules.get("mpi4py.MPI")) is not None and not mpi.Is_finalized():
        mpi.Finalize()  # else the launcher takes the end for a failure
    start(threading.Thread(target=_join_or_exit, args=(left, code), daemon=True))


def _join_or_exit(threads: Sequence[threading.Thread], code: int) -> None:
    """End the process after `LINGER`, unless `threads` have ended before; it may then end as slowly as it likes."""
    end = time.monotonic() + LINGER
    _join(threads, min(end, time.monotonic() + PATIENCE))
    if names := ", ".join(one.name for one in threads if one.is_alive()):
        _say(f"hpcfed: waits {LINGER:g} s at most for your thread {names}; join your threads, or make them daemons")
    _join(threads, end)
    if any(one.is_alive() for one in threads):
        os._exit(code)


def _join(threads: Sequence[threading.Thread], end: float) -> None:
    for one in threads:
        one.join(max(0.0, end - time.monotonic()))


def world_over(comm: MPI.Comm) -> World:
    """Return the world of the caller's communicator.

    Raises:
        EnvironmentFailure: on all ranks, they run different code of hpcfed.
    """
    world = MpiWorld(comm)
    refuse_mixed_code(world)
    return world


def _find_world() -> World:
    launched = any(name in os.environ for name in LAUNCHED) or tasks_of_srun() > 1
    if not launched and "mpi4py.MPI" not in sys.modules:
        return World()
    if "mpi4py.MPI" not in sys.modules:
        if launcher_is_gone():
            if max(ranks_promised(), tasks_of_srun()) < 2:  # such as a notebook's kernel in a job of one task
                return World()
            what = f"a launcher's variables are set, but {CONNECTION}={os.environ[CONNECTION]} is no connection to it"
            remedy = "this process is none of its ranks: unset PMI_FD, PMI_RANK and PMI_SIZE to run alone"
            raise EnvironmentFailure(what, remedy=remedy)
        _warn_of_scant_memory()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if ranks_promised() > 1:
            raise EnvironmentFailure(
                f"the launcher started {ranks_promised()} ranks, but MPI cannot be loaded ({error})",
                remedy="install an MPI library ('pip install mpich') or load the site's module",
            ) from None
        return World()
    if MPI.COMM_WORLD.size == 1 and ranks_promised() > 1:
        raise EnvironmentFailure(
            f"the launcher started {ranks_promised()} ranks, but MPI ({MPI.get_vendor()[0]}) sees only one",
            remedy="use the launcher of that MPI, or under srun the matching --mpi (MPICH: pmi2, Open MPI 5: pmix)",
        )
    return MpiWorld(MPI.COMM_WORLD)


def _warn_of_scant_memory() -> None:
    """Say once per host that its /dev/shm is too small for MPI's own memory, and wait for launchers to pass that on."""
    for number, of in LOCAL_RANKS:
        ranks = os.environ.get(of, "")
        if number in os.environ and ranks.isdigit() and int(ranks) > 1 and SHM.is_dir():
            free = shutil.disk_usage(SHM).free
            if free < SCANT * SHM_BYTES * int(ranks):
                what = f"{SHM} has {decimal(free)} free for {ranks} ranks of MPI, which may end by a bus error"
                remedy = "enlarge it (docker run --shm-size=1g), or remove what others left there"
                _say(f"hpcfed: {what}: {remedy}" if os.environ[number] == "0" else "")
                time.sleep(PASSED_ON)
