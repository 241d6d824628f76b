"""Contenders of a benchmark: commands that are timed in turn, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from types import FrameType

import psutil

from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.io.atomic import write_whole
from hpcfed.lab.bench.phases import phases_ms
from hpcfed.lab.bench.workloads import WORKLOADS
from hpcfed.ranks.code import python_options
from hpcfed.ranks.signals import ASKING
from hpcfed.ranks.threads import start
from hpcfed.run_folder.rounds import RECORD, read_rounds

SCRIPTS = Path(__file__).resolve().parents[3] / "jobs" / "bench"
BARE, FLOORS = SCRIPTS / "bare.py", SCRIPTS / "floors.py"
SIDE_BY_SIDE = """
import json, subprocess, sys
sys.exit(any([process.wait() for process in [subprocess.Popen(command) for command in json.loads(sys.argv[1])]]))
"""
"""Python program that runs commands at the same time; it succeeds if all of them do."""
AS_IN_LONG_RUNS = "checkpoint.keep=2"
"""A run keeps 20 evenly spaced states besides: of each round, if it has no more, but of one in 75 of 1,500."""
SAMPLED_EVERY = 0.1
"""Seconds between samples of a contender's memory."""
GRACE = 5.0
"""Seconds between asking a process to end and killing it."""
ERROR_PREFIX = "hpcfed: "
"""Prefix of the line in which hpcfed reports an error."""


@dataclass(frozen=True)
class FinishedProcess:
    """A process that has succeeded: its standard output, wall seconds, and peak resident memory in bytes.

    The memory includes the pages of mapped files that the process has read.
    """

    output: str
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Turn:
    """A contender's measurements in one turn.

    Attributes:
        wall: wall-clock milliseconds of a round: the median over the turn's rounds, or the mean if evaluations are
            timed, too; for start-up, those of the whole process.
        cpu: CPU milliseconds of a round on rank 0, median or mean like `wall`; None if not reported.
        peak_bytes: peak memory of the process; None under a launcher.
        phases: milliseconds of a round by phase, medians or means like `wall`; empty if not reported.
    """

    wall: float
    cpu: float | None = None
    peak_bytes: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Contender:
    """A program to time; `read` returns a turn's measurements when it has ended; only if `optional` may it fail."""

    name: str
    command: Sequence[str]
    read: Callable[[FinishedProcess], Turn]
    optional: bool = False


@dataclass(frozen=True)
class Timing:
    """A contender's turns, in order."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def wall(self) -> float:
        """Wall-clock milliseconds of a round, median over the turns."""
        return median(turn.wall for turn in self.turns)

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds of a round by phase, medians over the turns."""
        return {name: median(turn.phases[name] for turn in self.turns) for name in self.turns[0].phases}

    def over(self, other: Timing) -> tuple[float, float, float]:
        """Return the least, median and largest ratio, over turns, of this wall time to that of `other`."""
        ratios = sorted(mine.wall / theirs.wall for mine, theirs in zip(self.turns, other.turns, strict=True))
        return ratios[0], median(ratios), ratios[-1]

    def cpu_over(self, other: Timing) -> float | None:
        """Return the median ratio, over turns, of this CPU time to that of `other`; None if either reports none."""
        pairs = zip(self.turns, other.turns, strict=True)
        ratios = [mine.cpu / theirs.cpu for mine, theirs in pairs if mine.cpu and theirs.cpu]
        return median(ratios) if ratios else None


@dataclass(frozen=True)
class ByHand:
    """What loops by hand are asked for: rounds on the files in `folder`, on a device, with products of a precision.

    `warm_up` rounds come first, and are not timed.
    """

    folder: Path
    rounds: int
    warm_up: int
    device: str = "cpu"
    precision: str = "float32"

    def bare(self, workload: str, batch_size: int = 0) -> Contender:
        """Return the repository's bare training loop as a contender.

        `workload` is a key of `WORKLOADS`, which has a batch size, or a user's model, ``module:function``, which is
        trained with `batch_size`.

        Raises:
            InputError: the script is missing, since this is not a checkout of the repository.
        """
        return own("bare", [*self._script(BARE, workload), str(batch_size)])

    def floors(self, workload: str) -> list[Contender]:
        """Return lower bounds of a workload's time as contenders. On a GPU they use CUDA graphs.

        Raises:
            InputError: the script is missing, since this is not a checkout of the repository.
        """
        is_recurrent = WORKLOADS[workload].model.get("name") == "lstm"
        mapped = [] if is_recurrent else ["vmap", "round-graph"]  # torch maps no LSTM
        arguments = self._script(FLOORS, workload)
        return [own(f"floor: {kind}", [*arguments, kind], optional=True) for kind in ("client-graph", *mapped)]

    def _script(self, path: Path, workload: str) -> list[str]:
        if not path.is_file():
            raise InputError(f"bench needs jobs/bench/{path.name}", remedy="run it from a checkout of the repository")
        model = workload if ":" in workload else workload.partition("-")[0]
        asked = [model, str(self.folder), str(self.rounds), str(self.warm_up), self.device]
        return [sys.executable, str(path), "--precision", self.precision, *asked]


def ours(
    folder: Path, rounds: int, warm_up: int, ranks: int, *, mean: bool = False, written: str = "", factory: str = ""
) -> Contender:
    """Return `hpcfed run` on `ranks` ranks as a contender; a round is timed until the next one starts.

    The recipe is in `folder`. The first `warm_up` rounds are not counted; the time is the median, or with `mean` the
    mean, over the next `rounds`. `factory`, if not "", names a function that makes the recipe's network as users write
    it in PyTorch; `written` describes the style, such as ``as layers``.
    """
    output = folder / f"run-{ranks}{'-'.join(('', *written.split()))}"
    changes = [f"model={{factory: '{factory}'}}"] if factory else []
    changes += [f"rounds={rounds + warm_up}", f"output={output}", AS_IN_LONG_RUNS]
    command = run_command(folder / "recipe.yaml", ranks, *changes)

    def read(done: FinishedProcess) -> Turn:
        turn = recorded(output, warm_up, mean=mean)
        return replace(turn, peak_bytes=done.peak_bytes) if ranks == 1 else turn

    name = f"hpcfed, {written}" if written else f"hpcfed, {ranks} rank{'s' if ranks > 1 else ''}"
    return Contender(name, command, read)


def ours_apart(folder: Path, rounds: int, warm_up: int, count: int) -> Contender:
    """Return `count` simultaneous runs on one rank each as a contender; each trains a share of every cohort.

    The runs never wait for each other: their speed is an upper bound for one run on `count` ranks of this machine,
    whose cores share caches and memory.
    """
    cohorts = json.loads((folder / "cohorts.json").read_text(encoding="utf-8"))
    commands, outputs = [], [folder / f"apart-{number}-of-{count}" for number in range(count)]
    for number, output in enumerate(outputs):
        share = output.with_suffix(".json")
        write_whole(share, json.dumps([cohort[number::count] for cohort in cohorts]))
        changes = (f"rounds={rounds + warm_up}", f"cohort.schedule={share}", f"output={output}", AS_IN_LONG_RUNS)
        commands.append(run_command(folder / "recipe.yaml", 1, *changes))

    def read(_: FinishedProcess) -> Turn:
        return Turn(wall=fmean(recorded(output, warm_up).wall for output in outputs))

    together = [sys.executable, *python_options(), "-c", SIDE_BY_SIDE, json.dumps(commands)]
    return Contender(f"hpcfed, {count} apart", together, read)


def recorded(output: Path, warm_up: int, *, mean: bool = False) -> Turn:
    """Return a run's round times after `warm_up` rounds, medians or with `mean` means; delete its folder, `output`."""
    seconds = [row["seconds"] for row in read_rounds(output / RECORD)][warm_up:]
    shutil.rmtree(output)
    middle = fmean if mean else median
    wall, cpu = (1e3 * middle(row[name] for row in seconds) for name in ("total", "cpu"))
    return Turn(wall=wall, cpu=cpu, phases=phases_ms(seconds, middle))


def own(name: str, command: Sequence[str], *, optional: bool = False) -> Contender:
    """Return as a contender a command that times its own rounds, such as a user's loop.

    The last JSON object that it prints has the milliseconds of a round: ``ms_mean`` or else ``ms_med``, and optionally
    ``cpu_ms_mean`` or ``cpu_ms_med``. It may have ``peak_bytes``, the memory of all processes together; otherwise, the
    sampled memory of the command's first process is used.
    """

    def read(done: FinishedProcess) -> Turn:
        report = last_json(done.output)
        wall, cpu = (report.get(f"{kind}ms_mean", report.get(f"{kind}ms_med")) for kind in ("", "cpu_"))
        if wall is None:
            raise InputError(f"{name} printed no time", expected='a line with {"ms_med": …}')
        return Turn(wall=wall, cpu=cpu, peak_bytes=int(report.get("peak_bytes", done.peak_bytes)))

    return Contender(name, command, read, optional)


def run_command(recipe: Path, ranks: int, *overrides: str) -> list[str]:
    """Return the command of a quiet run on `ranks` ranks of this machine."""
    launch = [mpirun(), "-n", str(ranks)] if ranks > 1 else []
    return [*launch, sys.executable, *python_options(), "-m", "hpcfed", "run", "--quiet", str(recipe), *overrides]


def in_turn(contenders: Sequence[Contender], repeats: int, say: Callable[[str], None]) -> list[Timing]:
    """Time contenders in turn, A B C A B C …, so that drifts of the machine's speed affect all of them alike.

    An optional contender that fails is left out; `say` receives its error and a line of times per turn.

    Raises:
        InputError, EnvironmentFailure: a contender that is not optional failed.
    """
    found: dict[Contender, list[Turn]] = {contender: [] for contender in contenders}
    for repeat in range(1, repeats + 1):
        for contender in list(found):
            try:
                found[contender].append(contender.read(run_to_end(contender.name, contender.command)))
            except (EnvironmentFailure, InputError) as error:
                if not contender.optional:
                    raise
                del found[contender]
                say(f"  left out: {error}")
        times = (f"{contender.name} {turns[-1].wall:.1f} ms" for contender, turns in found.items())
        say(f"  {repeat}/{repeats}  {'  '.join(times)}")
    return [Timing(contender.name, tuple(turns)) for contender, turns in found.items()]


def run_to_end(name: str, command: Sequence[str]) -> FinishedProcess:
    """Run a command to its end; return its output, time and memory. If this process is stopped, the command is, too.

    Raises:
        InputError: the command ended with exit code 2.
        EnvironmentFailure: the command failed otherwise.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr, _exit_by_signals():
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        with _ended(process), _watched_memory(process.pid) as seen:
            process.wait()
        seconds = time.perf_counter() - started
        stdout.seek(0)
        stderr.seek(0)
        output, errors = stdout.read(), stderr.read()
    if process.returncode != 0:
        lines = (errors.strip() or output.strip() or "no output").splitlines()
        last = next(
            (line for line in reversed(lines) if line.startswith(ERROR_PREFIX)), lines[-1]
        )  # launchers add theirs
        failure = InputError if process.returncode == InputError.exit_code else EnvironmentFailure
        raise failure(f"{name} failed with exit code {process.returncode}", got=last.removeprefix(ERROR_PREFIX))
    return FinishedProcess(output, seconds, max(seen))


@contextmanager
def _exit_by_signals() -> Iterator[None]:
    """Make signals that ask this process to stop raise SystemExit, so that its children are ended; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in ASKING}
    for number, handler in before.items():
        if handler == signal.SIG_DFL:  # SIGINT raises KeyboardInterrupt; under nohup SIGHUP is ignored
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """On an exception in the block, ask the process group to end, and kill what is left of it after `GRACE` seconds."""
    try:
        yield
    except BaseException:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            leader = psutil.Process(process.pid)
            members = [leader, *leader.children(recursive=True)]  # launchers give ranks groups of their own
            os.killpg(process.pid, signal.SIGTERM)
            for left in psutil.wait_procs(members, timeout=GRACE)[1]:
                with suppress(psutil.NoSuchProcess):
                    left.kill()
        process.wait()
        raise


@contextmanager
def _watched_memory(pid: int) -> Iterator[list[int]]:
    """Yield a list to which a process's resident memory in bytes is appended every `SAMPLED_EVERY` seconds.

    The kernel's own peak is useless: it starts at the peak of the parent process.
    """
    seen, over, process = [0], threading.Event(), psutil.Process(pid)

    def watch() -> None:
        with suppress(psutil.Error):  # it has ended
            while not over.wait(SAMPLED_EVERY):
                seen.append(process.memory_info().rss)

    watcher = start(threading.Thread(target=watch, name="memory", daemon=True))
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


def mpirun() -> str:
    """Return the path of the mpirun beside this Python, else of the one on the PATH.

    Raises:
        InputError: there is no mpirun.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise InputError("mpirun is not on the PATH", remedy="pip install mpich, or load the site's MPI")
    return found


def last_json(output: str) -> dict[str, float]:
    """Return the JSON object at the end of the last output line that contains one.

    Raises:
        InputError: no line contains one.
    """
    for line in reversed(output.splitlines()):
        if "{" in line:
            try:
                return json.loads(line[line.index("{") :])
            except ValueError:
                continue
    raise InputError("the command printed no JSON object", expected='a line with {"ms_med": …}')
