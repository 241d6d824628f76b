"""Fuzz each parser, some 500 inputs to a child process, and count the endings.

    python -m tests.fuzz                                       20,000 inputs for every parser (hours)
    python -m tests.fuzz --parser recipe --inputs 2000         of one
    python -m tests.fuzz --parser raw --first 4321 --inputs 1  the one that failed
    python -m tests.fuzz --kept /tmp/fuzz                      after an interruption, go on from what was tried

An input is read, or refused in one line. Anything else is a failure: another exception, a crash, longer than
`parsers.MOST_SECONDS`, `SPARE_MEMORY` more than the child began with, or an answer that is not the reference library's.
Children are forks of this process, which imports the parsers once and reads nothing itself.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

NAMES = ("recipe", "override", "run", "schedule", "site", "yaml", "json", "record", "code", "claim", "checkpoint",
         "federation", "raw")  # fmt: skip
"""Of `tests.fuzz.parsers.PARSERS`, which a test of the suite must not import."""
SPARE_MEMORY = 1 << 30
EACH = 500
"""Inputs of a child; it starts with fresh memory."""
SLOWEST = 2.0
"""Seconds that an input may take on average, on a busy machine."""
MEMORY_DISK = Path("/dev/shm")
"""Where children write their files, if it exists: nothing that is read depends on the disk."""


def main() -> int:
    """Try inputs for each parser, and print what came of them."""
    options = _parse()
    from tests.fuzz import parsers

    assert tuple(parsers.PARSERS) == NAMES
    gc.freeze()  # children share what has been imported
    failures = 0
    for name in options.parser or NAMES:
        endings, failed = campaign(name, options.first, options.inputs, options.kept)
        failures += failed
        told = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        print(f"{name}: {endings.total()} inputs ({told}), {failed} failed", flush=True)
    return 1 if failures else 0


def campaign(name: str, first: int, inputs: int, kept: Path | None) -> tuple[Counter[str], int]:
    """Try `inputs` inputs of a parser, child after child; return how often each ending came, and the failed children.

    Children of which `kept` has a line are not repeated, unless they failed. Where hypothesis leaves out what it has
    drawn before, further children make up for it.
    """
    endings, failed, known = Counter[str](), 0, _known(name, kept)
    tried = 0
    while tried < inputs:
        count = min(EACH, inputs - tried)
        found = known.get((first, count))
        if found is None:
            started = time.monotonic()
            found, trouble = in_a_child(name, first, count)
            if trouble:
                failed += 1
                print(f"--- {name}, from {first}: {trouble}", flush=True)
            elif kept is not None:
                line = {"first": first, "count": count, "endings": found, "seconds": time.monotonic() - started}
                with (kept / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        endings += found
        tried += found.total() or count
        first += EACH
    return endings, failed


def _known(name: str, kept: Path | None) -> dict[tuple[int, int], Counter[str]]:
    if kept is None:
        return {}
    kept.mkdir(parents=True, exist_ok=True)
    path = kept / f"{name}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(line["first"], line["count"]): Counter(line["endings"]) for line in map(json.loads, lines)}


def in_a_child(name: str, first: int, count: int) -> tuple[Counter[str], str]:
    """Try inputs of a parser in a child; return how often each ending came, and what went wrong, if anything did."""
    place = tempfile.mkdtemp(prefix="fuzz", dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None)
    try:
        said = Path(place) / "said"
        child = os.fork()
        if child == 0:
            _child(name, Path(place), first, count)
        trouble = _ending(child, 80 + SLOWEST * count)
        lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
    finally:
        shutil.rmtree(place)
    if trouble:
        return Counter(), "\n".join([f"{trouble} after:", *(line[:200] for line in lines[-32:])])
    return Counter(line.split()[1].rstrip(":") for line in lines if line.startswith("= ")), ""


def _child(name: str, place: Path, first: int, count: int) -> None:
    """Try inputs in this process, a fork, and end it."""
    from tests.fuzz.parsers import try_all

    code = 1
    try:
        with (place / "said").open("w", encoding="utf-8", errors="backslashreplace") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.stdout = sys.stderr = said
            os.chdir(place)
            tempfile.tempdir = os.environ["TMPDIR"] = str(place)
            faulthandler.enable(said)
            faulthandler.register(signal.SIGPROF, said, chain=True)  # says where it was
            limit_memory()
            (place / name).mkdir()
            try:
                try_all(name, place / name, first, count)
                code = 0
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def limit_memory() -> None:
    """Let this process have little more memory than it has now: an allocation of a size that a file claims fails."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_MEMORY, used + SPARE_MEMORY))


def _ending(child: int, timeout: float) -> str:
    """Wait for a child; return how it ended, "" for well."""
    watched = os.pidfd_open(child)
    try:
        for number in (0, signal.SIGPROF, signal.SIGKILL):
            if number:
                os.kill(child, number)
            if select.select([watched], [], [], timeout if not number else 10)[0]:
                break
    finally:
        os.close(watched)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        return f"not done in {timeout:.0f} s"
    return f"exit code {code}" if code else ""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parser", action="append", choices=NAMES, help="repeatable; default: all")
    parser.add_argument("--inputs", type=int, default=20_000, metavar="N", help="for each parser")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first input")
    parser.add_argument(
        "--kept", type=Path, metavar="FOLDER", help="where counts are kept, so that another call goes on"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
