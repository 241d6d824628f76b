"""Try inputs that nobody meant, some 500 in a child process at a time, and count how each parser ended.

    python -m tests.fuzz                                       20,000 inputs for every parser (hours)
    python -m tests.fuzz --parser recipe --inputs 2000         of one
    python -m tests.fuzz --parser raw --first 4321 --inputs 1  the one that failed

An input is read, or refused in one line. Anything else is a failure: another exception, a crash, longer than
`MOST_SECONDS`, `SPARE_MEMORY` more than the child began with, or an answer that is not the reference library's.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy, lists

from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.text import Malformed
from tests.fuzz import federations, inputs, raw_files, runs, texts
from tests.launch import Overtime, launch

MOST_SECONDS = 20
"""Of the processor, so that a busy machine changes nothing; who only waits runs into the limit of its child."""
SPARE_MEMORY = 1 << 30
EACH = 500
"""Inputs of a child; it starts with fresh memory."""
SLOWEST = 2.0
"""Seconds that an input may take on average, on a busy machine."""


@dataclass(frozen=True)
class Parser:
    """What reads inputs.

    Attributes:
        attempt: reads the input, in a folder of this child's, and raises one of `refusals` where it refuses it.
        inputs: what hypothesis draws; None for the number alone, from which the attempt draws damage.
        refusals: what may be raised.
    """

    attempt: Callable[[Path, Any], object]
    inputs: SearchStrategy[Any] | None = None
    refusals: tuple[type[Exception], ...] = (InputError,)


PARSERS = {
    "recipe": Parser(texts.recipe, inputs.yaml_texts),
    "override": Parser(texts.override, lists(inputs.overrides, min_size=1, max_size=3)),
    "run": Parser(texts.run, lists(inputs.overrides, min_size=1, max_size=3)),
    "schedule": Parser(texts.schedule, inputs.json_texts),
    "site": Parser(texts.site, inputs.yaml_texts),
    "yaml": Parser(texts.yaml_door, inputs.yaml_texts, (Malformed,)),
    "json": Parser(texts.json_door, inputs.json_texts, (Malformed,)),
    "record": Parser(runs.record),
    "checkpoint": Parser(runs.checkpoint),
    "federation": Parser(federations.attempt, refusals=(InputError, EnvironmentFailure)),
    "raw": Parser(raw_files.attempt),
}


def try_all(name: str, folder: Path, first: int, count: int) -> None:
    """Try inputs in this process: a line before each says which, and one after it how it ended."""
    parser = PARSERS[name]

    def try_one(given: Any) -> None:
        print(f"{name} {given!r}"[:400], flush=True)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        ending = "read"
        try:
            parser.attempt(folder, given)
        except parser.refusals as error:
            ending = f"refused: {error}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        assert ending.isprintable(), ending
        assert len(ending) < 2000, ending
        print(f"= {ending}", flush=True)

    if parser.inputs is None:
        for number in range(first, first + count):
            try_one(number)
        return
    checks = settings(
        max_examples=count,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    seed(first)(checks(given(parser.inputs)(try_one)))()


def limit_memory() -> None:
    """Let this process have little more memory than it has now: whoever allocates a size that a file claims fails."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_MEMORY, used + SPARE_MEMORY))


def in_a_child(names: list[str], first: int, count: int) -> tuple[Counter[str], str]:
    """Try inputs of parsers in one child; return how often each ending came, and what went wrong, if anything did."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        arguments = ["--child", folder, "--first", str(first), "--inputs", str(count)]
        for name in names:
            arguments += ["--parser", name]
        timeout = 60 + MOST_SECONDS + SLOWEST * count * len(names)
        try:
            done = launch(0, arguments, program=("-m", "tests.fuzz"), timeout=timeout, cwd=folder)
        except Overtime as overtime:
            return Counter(), "\n".join(line[:200] for line in str(overtime).splitlines()[-30:])
    lines = done.stdout.splitlines()
    endings = Counter(line.split()[1].rstrip(":") for line in lines if line.startswith("= "))
    if done.returncode == 0:
        return endings, ""
    return endings, f"exit code {done.returncode} after:\n" + "\n".join(
        line[:200] for line in (*lines[-2:], *done.stderr.splitlines()[-30:])
    )


def main() -> int:
    """Try inputs for each parser, and print what came of them."""
    options = _parse()
    if options.child:
        faulthandler.register(signal.SIGPROF, chain=True)  # says where it was
        for name in options.parser:
            folder = options.child / name
            folder.mkdir()
            if name == options.parser[0]:
                limit_memory()
            try_all(name, folder, options.first, options.inputs)
        return 0
    failures = 0
    for name in options.parser or PARSERS:
        endings, failed, start = Counter[str](), 0, time.monotonic()
        for first in range(options.first, options.first + options.inputs, EACH):
            count = min(EACH, options.first + options.inputs - first)
            found, trouble = in_a_child([name], first, count)
            endings += found
            if trouble:
                failed += 1
                print(f"--- {name}, from {first}: {trouble}", flush=True)
        failures += failed
        told = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        print(
            f"{name}: {endings.total()} inputs ({told}), {failed} failed; {time.monotonic() - start:.0f} s", flush=True
        )
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parser", action="append", choices=PARSERS, help="repeatable; default: all")
    parser.add_argument("--inputs", type=int, default=20_000, metavar="N", help="for each parser")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first input")
    parser.add_argument("--child", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
