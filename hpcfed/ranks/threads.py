"""Start of threads, with an explanation if the system refuses one."""

from __future__ import annotations

import threading

from hpcfed.errors import EnvironmentFailure

NO_MORE = "can't start new thread"
"""Python's message if the system refuses a thread."""


def start(thread: threading.Thread) -> threading.Thread:
    """Start a thread and return it.

    Raises:
        EnvironmentFailure: the system refuses.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise no_more_threads(thread.name) from error
    return thread


def no_more_threads(what: str) -> EnvironmentFailure:
    """Return the error of a thread that could not be started."""
    remedy = "start fewer ranks on a node, or raise its limits of processes and memory (ulimit -u, ulimit -v, pids.max)"
    return EnvironmentFailure(f"the system gives no more threads ({what})", got=NO_MORE, remedy=remedy)
