"""When a run ends before its last round. Every rank decides alike, from numbers that all of them have."""

from __future__ import annotations

import time

from hpcfed.config.recipe import Stop
from hpcfed.evaluate import Scores


class Stopping:
    """Follows a run's scores, and the clock.

    Args:
        rule: the recipe's ``stop``.
    """

    def __init__(self, rule: Stop):
        self._rule = rule
        self._deadline = None if rule.max_hours is None else time.monotonic() + 3600 * rule.max_hours
        self._reached = 0
        self._best: float | None = None
        self._since_best = 0

    def is_late(self) -> bool:
        """Whether ``max_hours`` are over by this rank's clock; rank 0's is the one that counts."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def reason(self, scores: Scores, *, late: bool) -> str | None:
        """Take a round's scores in, and return why the run ends with it, if it does.

        Args:
            scores: of the round, the same on every rank; None in them where the round was not evaluated.
            late: whether rank 0 found ``max_hours`` over, as all ranks were told in the round's reduction.
        """
        if late:
            return f"stop.max_hours: {self._rule.max_hours:g} hours are over"
        if scores.test_loss is None:
            return None
        return self._target(scores) or self._patience(scores)

    def _target(self, scores: Scores) -> str | None:
        target, accuracy = self._rule.test_accuracy, scores.test_accuracy
        if target is None or accuracy is None:
            return None
        self._reached = self._reached + 1 if accuracy >= target else 0
        if self._reached < self._rule.for_:
            return None
        times = f" {self._reached} times in a row" if self._reached > 1 else ""
        return f"stop.test_accuracy: {accuracy:.4f} reaches {target:g}{times}"

    def _patience(self, scores: Scores) -> str | None:
        if self._rule.patience is None or scores.test_loss is None:
            return None
        score = -scores.test_loss if scores.test_accuracy is None else scores.test_accuracy
        if self._best is None or score > self._best:
            self._best, self._since_best = score, 0
        else:
            self._since_best += 1
        if self._since_best < self._rule.patience:
            return None
        what = "test loss" if scores.test_accuracy is None else "test accuracy"
        return f"stop.patience: no better {what} in {self._since_best} evaluations"
