"""``hpcfed`` in a process that is killed at a chosen moment: ``python killed.py FOLDER MOMENT ARGUMENTS…``.

Moments are counted by what the process does to names below FOLDER: files opened to be written, renamed or removed,
folders made or removed. A whole MOMENT kills it just before that event; one with a fraction, so many seconds after the
first. At 0 it goes on to its end and leaves ``FOLDER.events``: the number of events, and the seconds from the first to
the last.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

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


if __name__ == "__main__":
    watch(str(Path(sys.argv[1]).resolve()), sys.argv[2])
    from hpcfed.cli.main import main

    main(sys.argv[3:])
