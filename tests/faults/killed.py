"""``hpcfed`` in processes that are killed at chosen moments: each a fork of this one, which imports everything once.

A line of standard input asks for one, ``{"place": …, "folder": …, "moment": …, "arguments": […]}`` in JSON: the working
folder, the one in it that is watched, and the command. The line that answers has its exit code, as `subprocess` has it,
and what it wrote to standard error.

Moments are counted by what the process does to names below FOLDER: files opened to be written, renamed or removed,
folders made or removed. A whole MOMENT kills it just before that event; one with a fraction, so many seconds after the
first. At 0 it goes on to its end and leaves ``FOLDER.events``: the number of events, and the seconds from the first to
the last.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


def watch(folder: str, moment: str) -> None:
    """Count events from now on, and end the process when its moment has come."""
    count, times = 0, [0.0, 0.0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if not (event in CHANGES or (event == "open" and arguments[2] & WRITES)):
            return
        if not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if not os.path.abspath(os.fsdecode(arguments[0])).startswith(folder + os.sep):  # noqa: PTH100
            return
        count += 1
        times[1] = time.monotonic()
        if count == 1:
            times[0] = times[1]
            if "." in moment:
                signal.setitimer(signal.ITIMER_REAL, float(moment))  # whose signal ends the process
        if str(count) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def leave() -> None:
        Path(f"{folder}.events").write_text(f"{count} {times[1] - times[0]}", encoding="utf-8")

    sys.addaudithook(hook)
    if moment == "0":
        atexit.register(leave)


def serve() -> None:
    """Answer requests until there are no more."""
    for name in ("report", "prepare", "sweep", "reproduce", "run"):
        importlib.import_module(f"hpcfed.cli.{name}")
    for name in (
        "hpcfed.loop",
        "hpcfed.lab.sweep.run",
        "hpcfed.lab.report.comparison",
        "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_pdf",
    ):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
            child = os.fork()
            if child == 0:
                _call(request, said)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            print(json.dumps([code, said.read()]), flush=True)


def _call(request: dict[str, Any], said: TextIO) -> None:
    """Be the command, in a fork, and end with it."""
    from hpcfed.cli.main import main

    code: Any = 1
    try:
        os.setsid()
        os.chdir(request["place"])
        nowhere = os.open(os.devnull, os.O_RDWR)
        for source, target in ((nowhere, 0), (nowhere, 1), (said.fileno(), 2)):
            os.dup2(source, target)
        if request["moment"]:
            watch(str(Path(request["folder"]).resolve()), request["moment"])
        main(request["arguments"])
    except SystemExit as left:
        code = left.code
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    serve()
