"""A model that makes a rank signal itself, or its launcher, at the moment set in ``aim.json``.

Without that file beside it, it is an ordinary model. Where the main thread and the one that writes checkpoints are when
the signal goes out is read off their stacks and left in ``landed.json``, for any aim. An aim is at
the first moment of its kind in round t or later.

    {"stage": …, "round": t, "attempt": 1 or 2, "rank": r, "signal": "SIGKILL", "after": seconds, "launcher": false}
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch

LOCAL, REDUCTION, EVALUATION, WRITING, RENAMED, ELSEWHERE = (
    "local work", "reduction", "evaluation", "checkpoint writing", "between rename and manifest", "elsewhere",
)  # fmt: skip
STAGES = {
    "train_tile": LOCAL,
    "sum_in_place": REDUCTION,
    "_evaluate": EVALUATION,
}
"""Functions of the main thread that identify a stage."""
TEMPORARY = re.compile(r"/\.round-(\d{8})\.(json)?[^/]*$")
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun")


class Net(torch.nn.Module):
    """Two layers on 12 features and 4 classes; with BatchNorm before and after them if `norms`."""

    def __init__(self, hidden: int = 64, norms: bool = False):
        super().__init__()
        inner = torch.nn.Linear(12, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 4)
        ends = (torch.nn.BatchNorm1d(12), torch.nn.BatchNorm1d(4)) if norms else (torch.nn.Identity(),) * 2
        self.layers = torch.nn.Sequential(ends[0], *inner, ends[1])
        aim = Path(__file__).with_name("aim.json")
        self._aim = _Aim(json.loads(aim.read_text())) if aim.exists() else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._aim is not None:
            self._aim.visit()
        return self.layers(x)


class _Aim:
    """Sends the signal once, at its moment."""

    def __init__(self, aim: dict[str, Any]):
        self._stage, self._round, self._attempt, self._after = aim["stage"], aim["round"], aim["attempt"], aim["after"]
        self._signal, self._at_launcher = signal.Signals[aim["signal"]], aim["launcher"]
        self._is_victim = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == aim["rank"]
        self._is_spent = False
        if self._is_victim and self._stage in (WRITING, RENAMED):
            sys.addaudithook(self._opened)

    def visit(self) -> None:
        """The model is asked for its output."""
        stage, round = client_label()
        if self._is_spent or round < self._round or attempt() < self._attempt:
            return
        if self._stage == REDUCTION and stage == LOCAL:
            self._is_spent = True
            if self._is_victim:  # which soon waits for the others
                threading.Timer(0.4, self._strike).start()
            else:
                time.sleep(1.2)
        elif self._is_victim and self._stage == stage:
            self._wait_and_strike()

    def _opened(self, event: str, details: tuple[Any, ...]) -> None:
        """A file is opened: of the checkpoint, or its manifest, both under a temporary name."""
        if self._is_spent or event != "open" or not isinstance(details[0], str | os.PathLike):
            return
        found = TEMPORARY.search(os.fsdecode(details[0]))
        if found and int(found[1]) >= self._round and bool(found[2]) == (self._stage == RENAMED):
            self._wait_and_strike()

    def _wait_and_strike(self) -> None:
        """Send the signal now, or shortly afterwards from another thread."""
        self._is_spent = True
        if self._after:
            threading.Timer(self._after, self._strike).start()
        else:
            self._strike()

    def _strike(self) -> None:
        stage, round = client_label()
        here = Path(__file__).parent
        writes = any(thread.name == "checkpoint" for thread in threading.enumerate())
        told = {
            "stage": stage,
            "writes": writes,
            "round": round,
            "attempt": attempt(),
            "manifests": len(list(here.glob("run/checkpoints/round-*.json"))),
        }
        (here / "landed.json").write_text(json.dumps(told))
        os.kill(_launcher() if self._at_launcher else os.getpid(), self._signal)
        if self._at_launcher and stage == LOCAL:  # so that it comes while this stage lasts
            time.sleep(0.5)


def client_label() -> tuple[str, int]:
    """Return the stage and round that the main thread is in; on the thread that makes checkpoints valid, its own."""
    main = list(_stack(sys._current_frames()[threading.main_thread().ident or 0]))
    round = next((frame.f_locals["round"] for frame in main if isinstance(frame.f_locals.get("round"), int)), 0)
    stage = next((STAGES[frame.f_code.co_name] for frame in main if frame.f_code.co_name in STAGES), ELSEWHERE)
    return RENAMED if threading.current_thread().name == "validity" else stage, round


def attempt() -> int:
    """Return which attempt at its round the main thread is in; 0 outside of rounds."""
    main = _stack(sys._current_frames()[threading.main_thread().ident or 0])
    rounds = (frame.f_locals for frame in main if frame.f_code.co_qualname == "Simulation.round")
    return next((2 if "first" in local else 1 for local in rounds if "units" in local), 0)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _launcher() -> int:
    return next(process.pid for process in psutil.Process().parents() if process.name() in LAUNCHERS)
