"""How a run tells of itself besides its metrics: a log per rank, and how it ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.errors import Diverged, EnvironmentFailure, HpcfedError, Stopped, visible
from hpcfed.ranks.world import World
from hpcfed.run_folder.folder import RunFolder
from hpcfed.user_code.blame import blamed

log = logging.getLogger("hpcfed")

ENDED_BY: dict[type[HpcfedError], str] = {Diverged: "diverged", Stopped: "stopped"}


def status_of(error: BaseException | None) -> str:
    """Return how a run ends with an error, or with none."""
    if error is None:
        return "finished"
    return next((status for kind, status in ENDED_BY.items() if isinstance(error, kind)), "failed")


@dataclass
class Ending:
    """What the block tells of its end: why a run that went well ended before its last round, if it did."""

    stopped: str | None = None


@contextmanager
def recorded_ending(folder: RunFolder, world: World) -> Iterator[Ending]:
    """Leave ``result.json`` however the block ends."""
    started = time.perf_counter()
    status, message, ending = "failed", "", Ending()
    try:
        with own_code_named(world):
            yield ending
        status = "finished"
    except HpcfedError as error:
        status, message = status_of(error), str(error)
        raise
    finally:
        if world.is_root:
            seconds = round(time.perf_counter() - started, 6)
            told = {"status": status, "rounds": folder.rounds(), "seconds": seconds, "message": message}
            failing = suppress(EnvironmentFailure) if status == "failed" else nullcontext()
            with failing:  # a full disk must not hide what was said of it first
                folder.write("result.json", told | {"stopped": ending.stopped})


@contextmanager
def own_code_named(world: World | None = None) -> Iterator[None]:
    """Turn an exception of the user's own code into one line that names its place; the traceback goes to the log.

    Raises:
        InputError: the user's code raised.
        EnvironmentFailure: it met a full disk, or the like.
    """
    try:
        yield
    except HpcfedError:
        raise
    except Exception as error:  # the user's code may raise anything
        told = blamed(error, remedy=see_log(world))
        if told is None:
            raise
        if world is not None:
            log.error("the user's code raised", exc_info=error)
        raise told from error


def see_log(world: World | None) -> str:
    """Return where a rank's traceback is to be found."""
    return "correct it there" if world is None else f"see the run folder's logs/rank-{world.rank}.log"


class _Lines(logging.Formatter):
    """What a log says of an event, free of control characters: they would steer the terminal that shows the log."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _LogFile(logging.FileHandler):
    """A log file whose folder, too, appears with the first thing there is to say."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:
        """Let a disk that is full end the run with what the run says of it."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def own_log(folder: RunFolder, world: World) -> Iterator[None]:
    """Send this rank's log and warnings to ``logs/rank-R.log``, which exists only where there was something to say."""
    handler = _LogFile(folder.path / "logs" / f"rank-{world.rank}.log", delay=True, encoding="utf-8")
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger("hpcfed"), logging.getLogger("py.warnings")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    logging.captureWarnings(True)
    try:
        with own_code_named(world):
            yield
    except Exception as error:
        if not isinstance(error, HpcfedError):
            loggers[0].exception("unexpected")
        raise
    finally:
        logging.captureWarnings(False)
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
