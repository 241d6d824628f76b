"""Fuzz each parser, some 500 inputs to a child process, and count the endings.

    python -m tests.fuzz                                       20,000 inputs for every parser (hours)
    python -m tests.fuzz --parser recipe --inputs 2000         of one
    python -m tests.fuzz --parser raw --first 4321 --inputs 1  the one that failed

An input is read, or refused in one line. Anything else is a failure: another exception, a crash, longer than
`parsers.MOST_SECONDS`, `SPARE_MEMORY` more than the child began with, or an answer that is not the reference library's.
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
from pathlib import Path

from tests.launch import Overtime, launch

NAMES = ("recipe", "override", "run", "schedule", "site", "yaml", "json", "record", "checkpoint", "federation", "raw")
"""Of `tests.fuzz.parsers.PARSERS`, which only children import."""
SPARE_MEMORY = 1 << 30
EACH = 500
"""Inputs of a child; it starts with fresh memory."""
SLOWEST = 2.0
"""Seconds that an input may take on average, on a busy machine."""


def limit_memory() -> None:
    """Let this process have little more memory than it has now: an allocation of a size that a file claims fails."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_MEMORY, used + SPARE_MEMORY))


def in_a_child(names: list[str], first: int, count: int) -> tuple[Counter[str], str]:
    """Try inputs of parsers in one child; return how often each ending came, and what went wrong, if anything did."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        arguments = ["--child", folder, "--first", str(first), "--inputs", str(count)]
        for name in names:
            arguments += ["--parser", name]
        timeout = 80 + SLOWEST * count * len(names)
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
        from tests.fuzz.parsers import try_all

        for name in options.parser:
            folder = options.child / name
            folder.mkdir()
            if name == options.parser[0]:
                limit_memory()
            try_all(name, folder, options.first, options.inputs)
        return 0
    failures = 0
    for name in options.parser or NAMES:
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
    parser.add_argument("--parser", action="append", choices=NAMES, help="repeatable; default: all")
    parser.add_argument("--inputs", type=int, default=20_000, metavar="N", help="for each parser")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first input")
    parser.add_argument("--child", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
