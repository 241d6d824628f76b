"""The end of a run, ``result.json``, and the log of each rank, ``logs/rank-R.log``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.blame import own_code_named
from hpcfed.errors import RUN_LOG, Diverged, EnvironmentFailure, HpcfedError, Stopped, visible
from hpcfed.ranks.world import World
from hpcfed.run_folder.certificate import not_kept
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.files import RESULT, read_mapping
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.stopping import reason_to_stop

ENDED_BY: dict[type[HpcfedError], str] = {Diverged: "diverged", Stopped: "stopped"}


def status_of(error: BaseException | None) -> str:
    """Return the ``status`` in ``result.json`` of a run that ended with `error`; None: without one."""
    if error is None:
        return "finished"
    return next((status for kind, status in ENDED_BY.items() if isinstance(error, kind)), "failed")


def has_ended(folder: Path, recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run has ended by its record: by its last round or by ``stop``; and its model is there, or certified as
    not kept.

    A run that was killed after its last round has not ended: it has not written its models.
    """
    is_last = len(rows) == recipe.rounds or reason_to_stop(recipe, rows) is not None
    return is_last and ((folder / MODELS[0]).is_file() or MODELS[0] in not_kept(folder))


def recorded_status(folder: Path, recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a run's status: ``finished`` if its record says so (`has_ended`), else that in ``result.json``.

    ``unfinished`` if ``result.json`` has no such status, or another number of rounds than the record.
    """
    if has_ended(folder, recipe, rows):
        return "finished"
    result = read_mapping(folder / RESULT)
    is_of_record = result.get("rounds") == len(rows) and result.get("status") in (*ENDED_BY.values(), "failed")
    return str(result["status"]) if is_of_record else "unfinished"


@dataclass
class Ending:
    """Why a run ended early without an error, set in the block of `recorded_ending`; None: it did not."""

    stopped: str | None = None


@contextmanager
def recorded_ending(folder: RunFolder, world: World) -> Iterator[Ending]:
    """Write ``result.json`` when the block ends, with or without an error."""
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
            result = {"status": status, "rounds": folder.rounds(), "seconds": seconds, "message": message}
            failing = suppress(EnvironmentFailure) if status == "failed" else nullcontext()
            with failing:  # a full disk must not hide the first error
                folder.write(RESULT, result | {"stopped": ending.stopped})


class _Lines(logging.Formatter):
    """A log formatter that escapes control characters, which a terminal that shows the log would obey."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _LogFile(logging.FileHandler):
    """A log file that is created, with its folder, at the first message; there is none if that is impossible."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # from opening the file
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a failed write: if the disk is full, the run's own error says so."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def own_log(folder: RunFolder, world: World) -> Iterator[None]:
    """Send this rank's log and warnings to ``logs/rank-R.log``, created at the first message."""
    handler = _LogFile(folder.path / "logs" / f"rank-{world.rank}.log", delay=True, encoding="utf-8")
    handler.set_name(RUN_LOG)
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
