"""Early stopping, by scores or by time. Every rank decides alike, from the same reduced numbers."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from hpcfed.config.limits import Stop
from hpcfed.config.recipe import Recipe

RECENT = 10
"""Number of last rounds, the longest of which is the expected time of the next one, without its evaluation."""
RESERVE = 1.5
"""Multiple of the time of a round and a checkpoint that is kept free before the deadline."""


Due = tuple[bool, bool, bool]
"""Whether the test set, the training sets and the clients are evaluated after a round."""


def due_after(recipe: Recipe, round: int) -> Due:
    """Return whether test set, training sets and clients are evaluated after a round; the last one always is."""
    section, is_last = recipe.evaluate, round == recipe.rounds
    test, train, clients = (
        every > 0 and (round % every == 0 or is_last)
        for every in (section.every, section.train.every, section.clients.every)
    )
    return test, train, clients


class Stopping:
    """Early stopping by scores: the target accuracy and the patience of ``stop``.

    Args:
        rule: the recipe's ``stop``.
        progress: result of `progress` when the run was saved, if it goes on from a checkpoint.
    """

    def __init__(self, rule: Stop, progress: Mapping[str, Any] | None = None):
        self._rule, self._plain_rule = rule, rule.model_dump(exclude={"max_hours"})
        saved = progress or {}
        self._best: float | None = saved.get("best")
        self._since_best: int = saved.get("since_best", 0)
        before = saved.get("rule") or {}
        same_target = before.get("test_accuracy") == self._plain_rule["test_accuracy"]
        self._reached: int = saved.get("reached", 0) if same_target else 0
        self.reason: str | None = saved.get("reason") if before == self._plain_rule else None
        """Why the run has ended; None if it has not."""

    def progress(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps, as plain JSON."""
        return {
            "rule": self._plain_rule,
            "reached": self._reached,
            "best": self._best,
            "since_best": self._since_best,
            "reason": self.reason,
        }

    def add(self, scores: Mapping[str, Any]) -> None:
        """Add a round's scores by column, the same on every rank."""
        if scores["test_loss"] is not None:  # evaluated
            self.reason = self._target(scores) or self._patience(scores)

    def _target(self, scores: Mapping[str, Any]) -> str | None:
        target, accuracy = self._rule.test_accuracy, scores["test_accuracy"]
        if target is None or accuracy is None:
            return None
        self._reached = self._reached + 1 if accuracy >= target else 0
        if self._reached < self._rule.for_:
            return None
        times = f" {self._reached} times in a row" if self._reached > 1 else ""
        return f"stop.test_accuracy: {accuracy:.4f} reaches {target:g}{times}"

    def _patience(self, scores: Mapping[str, Any]) -> str | None:
        loss, accuracy = scores["test_loss"], scores["test_accuracy"]
        if self._rule.patience is None or loss is None:
            return None
        score = -loss if accuracy is None else accuracy
        if not math.isnan(score) and (self._best is None or not self._best >= score):
            self._best, self._since_best = score, 0
        else:
            self._since_best += 1
        if self._since_best < self._rule.patience:
            return None
        what = "test loss" if accuracy is None else "test accuracy"
        return f"stop.patience: no better {what} in {self._since_best} evaluations"


class TimeLeft:
    """Early stopping by time, so that a round and a checkpoint fit before ``stop.max_hours`` and the SLURM job's end.

    Rank 0's clock decides; its answer travels in the round's reduction.
    """

    def __init__(self, rule: Stop):
        now, wall = time.monotonic(), time.time()
        ends = os.environ.get("SLURM_JOB_END_TIME", "")  # one that is past is another job's
        left = int(ends) - wall if ends.isdecimal() else 0.0
        self._deadlines = {"the job's time limit": now + left} if left > 0 else {}
        if rule.max_hours is not None:
            self._deadlines["stop.max_hours"] = now + 3600 * rule.max_hours
        self._rounds: deque[float] = deque(maxlen=RECENT)
        self._evaluations: dict[Due, float] = {}

    def add(self, training: float, evaluation: float, due: Due) -> None:
        """Add the seconds of a round: those of its evaluation, of what was `due`, and all others."""
        self._rounds.append(training)
        self._evaluations[due] = max(self._evaluations.get(due, 0.0), evaluation)

    def is_up(self, checkpoint: float, due: tuple[Due, Due]) -> bool:
        """Whether the round that begins now should be the last.

        Args:
            checkpoint: seconds that one takes.
            due: evaluations of this round and of the next one.
        """
        if not self._deadlines:
            return False
        this, following = (max(self._rounds, default=0.0) + self._expected(one) for one in due)
        return time.monotonic() + this + RESERVE * (following + checkpoint) >= min(self._deadlines.values())

    def _expected(self, due: Due) -> float:
        """Return the seconds of an evaluation: the longest of the same or fewer parts; else the shortest of more."""
        if not any(due):
            return 0.0
        fewer = [seconds for known, seconds in self._evaluations.items() if any(known) and _is_part(known, due)]
        more = [seconds for known, seconds in self._evaluations.items() if _is_part(due, known)]
        return max(fewer, default=min(more, default=0.0))

    def reason(self) -> str:
        """Return the name of the nearest limit."""
        return min(self._deadlines, key=self._deadlines.__getitem__, default="the time limit")


def _is_part(one: Due, other: Due) -> bool:
    """Whether all that is evaluated in `one` is in `other`."""
    return all(there or not here for here, there in zip(one, other, strict=True))
