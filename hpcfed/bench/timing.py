"""Contenders, each a process of its own, timed in turn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hpcfed.errors import EnvironmentFailure, InputError

BARE = Path(__file__).resolve().parents[2] / "jobs" / "bench" / "bare.py"


@dataclass(frozen=True)
class Contender:
    """Something that trains the workload's rounds: its name, its command, and how to read its milliseconds a round."""

    name: str
    command: Sequence[str]
    read: Callable[[str], float]


@dataclass(frozen=True)
class Timing:
    """A contender's milliseconds a round, one median per repeat, in the order of the repeats."""

    name: str
    milliseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over the repeats."""
        return median(self.milliseconds)

    def over(self, other: Timing) -> tuple[float, float, float]:
        """Return the least, the median and the largest ratio to `other`, repeat by repeat."""
        ratios = sorted(a / b for a, b in zip(self.milliseconds, other.milliseconds, strict=True))
        return ratios[0], median(ratios), ratios[-1]


def bare(workload: str, folder: Path, rounds: int, warm_up: int) -> Contender:
    """The bare loop of the repository.

    Raises:
        InputError: this is not a checkout, so the script is not there.
    """
    if not BARE.is_file():
        raise InputError("bench needs jobs/bench/bare.py", remedy="run it from a checkout of the repository")
    command = [sys.executable, str(BARE), workload, str(folder), str(rounds), str(warm_up)]
    return Contender("bare", command, lambda output: last_json(output)["ms_med"])


def ours(folder: Path, rounds: int, warm_up: int, ranks: int) -> Contender:
    """`hpcfed run` on some ranks; a round's time is from the start of one to the start of the next."""
    output = folder / f"run-{ranks}"
    arguments = [f"rounds={rounds + warm_up}", f"output={output}"]
    command = [sys.executable, "-m", "hpcfed", "run", "--quiet", str(folder / "recipe.yaml"), *arguments]
    if ranks > 1:
        command = [mpirun(), "-n", str(ranks), *command]

    def read(_: str) -> float:
        with (output / "metrics.jsonl").open(encoding="utf-8") as record:
            total = [json.loads(line)["seconds"]["total"] for line in record]
        shutil.rmtree(output)
        return 1e3 * median(total[warm_up:])

    return Contender(f"hpcfed, {ranks} rank{'s' if ranks > 1 else ''}", command, read)


def own(name: str, command: Sequence[str]) -> Contender:
    """The user's own loop: a command whose last line with a JSON object holds ``ms_med``."""
    return Contender(name, command, lambda output: last_json(output)["ms_med"])


def in_turn(contenders: Sequence[Contender], repeats: int, tell: Callable[[str], None]) -> list[Timing]:
    """Run A B C A B C …, so that a machine whose speed drifts is unfair to nobody.

    Raises:
        EnvironmentFailure: a contender failed.
    """
    found: list[list[float]] = [[] for _ in contenders]
    for repeat in range(1, repeats + 1):
        for contender, milliseconds in zip(contenders, found, strict=True):
            done = subprocess.run(contender.command, capture_output=True, text=True)
            if done.returncode != 0:
                last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
                raise EnvironmentFailure(f"{contender.name} failed with exit code {done.returncode}", got=last)
            milliseconds.append(contender.read(done.stdout))
        tell(
            f"  {repeat}/{repeats}  "
            + "  ".join(f"{c.name} {m[-1]:.1f} ms" for c, m in zip(contenders, found, strict=True))
        )
    return [Timing(c.name, tuple(m)) for c, m in zip(contenders, found, strict=True)]


def mpirun() -> str:
    """Return the launcher beside this Python, or the one on the PATH.

    Raises:
        InputError: there is none.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise InputError("mpirun is not on the PATH", remedy="pip install 'hpcfed[mpich]', or load the site's MPI")
    return found


def last_json(output: str) -> dict[str, float]:
    """Return the last JSON object that a command printed on a line of its own, or after a word.

    Raises:
        InputError: there is none.
    """
    for line in reversed(output.splitlines()):
        if "{" in line:
            try:
                return json.loads(line[line.index("{") :])
            except ValueError:
                continue
    raise InputError("the command printed no JSON object", expected='a line with {"ms_med": …}')
