"""Early stopping, by scores or by time. All ranks take the same decision, from the same reduced numbers."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hpcfed.config.limits import Stop
from hpcfed.config.metrics import Metric, larger_is_better, plain, references
from hpcfed.config.recipe import Evaluate, Recipe
from hpcfed.errors import InputError, counted

SELECTS, ROUNDS_SCORES = ("model", "statistics"), ("batch_size", "precision")
"""Keys of ``evaluate`` that select the scored model, and by which its scores are rounded otherwise."""
OF_CLIENTS = "clients."
"""Beginning of those that belong to clients' scores alone."""
RECENT_ROUNDS = 10
"""The next round is expected to take as long, without evaluation, as the longest of this number of last rounds."""
RESERVE = 1.5
"""Time kept free before the deadline, as a multiple of the time that a round and a checkpoint take."""


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


@dataclass
class BestScore:
    """The best score of a measure so far, larger being better, and the number of evaluations since."""

    best: float | None = None
    since: int = 0

    def add(self, score: float | None) -> None:
        """Add an evaluation; a score that is None (undefined) or nan counts as not better."""
        if score is not None and not math.isnan(score) and (self.best is None or not self.best >= score):
            self.best, self.since = score, 0
        else:
            self.since += 1


DEFAULT_MEASURE = ""
"""Key of the best score used without ``stop.metric``: of test accuracy, or of test loss if the task has no accuracy."""


class Stopping:
    """Early stopping by scores: a target and the patience of ``stop``.

    The best scores of all measures are kept, since a run may continue with another rule. They belong to one model
    (``evaluate.model``): if a run continues with another, they are counted from there.

    Args:
        rule: the recipe's ``stop``.
        progress: result of `progress` in the checkpoint from which the run continues; None: it starts.
        metrics: the recipe's ``evaluate.metrics``.
        measured: result of `measured_by`.
    """

    def __init__(
        self,
        rule: Stop,
        progress: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Metric] = MappingProxyType({}),
        measured: Mapping[str, str] = MappingProxyType({}),
    ):
        self._rule, self._metrics, self._measured = rule, metrics, dict(measured)
        self._plain_rule = rule.model_dump(exclude={"max_hours"})
        if rule.metric is not None and rule.metric in metrics:
            self._plain_rule["of"] = plain(metrics[rule.metric])
        self._name = DEFAULT_MEASURE if rule.metric in (None, "accuracy") else str(rule.metric)
        directions = {"loss": False} | {name: larger_is_better(metric) for name, metric in metrics.items()}
        self._larger_is_better = {name: known for name, known in directions.items() if known is not None}
        saved = progress or {}
        was = self._was = saved.get("measured") or self._measured
        self._before = [*saved.get("measured_before", ())]
        self.changed = {key: was[key] for key in SELECTS if key in was and was[key] != self._measured.get(key)}
        """Entries of `measured` in the checkpoint that select another model than now."""
        if self.changed:  # the model: its scores are not comparable with those to come
            saved = {key: saved.get(key) for key in ("rule", "reason")}
        self._marks = {DEFAULT_MEASURE: BestScore(saved.get("best"), saved.get("since_best", 0))}
        for name, mark in saved.get("marks", {}).items():
            if name in self._larger_is_better and mark["of"] == self._plain_metric(name):
                self._marks[name] = BestScore(mark["best"], mark["since_best"])
        self._follows: str | None = saved.get("follows")  # the measure of the usual mark; None before an evaluation
        self._evaluated: int = saved.get("evaluated", 0)
        before = saved.get("rule") or {}
        same_target = all(before.get(key) == self._plain_rule.get(key) for key in ("test_accuracy", "target"))
        if rule.target is not None:
            same_target &= all(before.get(key) == self._plain_rule.get(key) for key in ("metric", "of"))
        self._reached: int = saved.get("reached", 0) if same_target else 0
        self.reason: str | None = saved.get("reason") if before == self._plain_rule else None
        """Why the run has ended; None if it has not."""

    def progress(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps, as plain JSON."""
        usual = self._marks[DEFAULT_MEASURE]
        return {
            "rule": self._plain_rule,
            "reached": self._reached,
            "best": usual.best,
            "since_best": usual.since,
            "reason": self.reason,
            "follows": self._follows,
            "marks": {
                name: {"of": self._plain_metric(name), "best": mark.best, "since_best": mark.since}
                for name, mark in self._marks.items()
                if name != DEFAULT_MEASURE
            },
            "evaluated": self._evaluated,
            "measured": self._measured,
            "measured_before": self._before,
        }

    def refuse_another_model(self, done: int, rounds: int, where: str) -> None:
        """Refuse to continue a run that has ended if ``evaluate`` now names another model than its last scores are of.

        Args:
            done: number of rounds done.
            rounds: number of rounds of the recipe.
            where: the run folder, for the message.

        Raises:
            InputError: it has, and ``evaluate`` names another model; the message has the key.
        """
        if not self.changed or (done < rounds and self.reason is None):
            return
        key, before = next(iter(self.changed.items()))
        more = "raise rounds" if self.reason is None else "change stop"
        raise InputError(
            f"evaluate.{key}: the run has ended after round {done}, and its last scores are with {key}: {before}",
            where=where,
            remedy=f"set evaluate.{key}={before}, {more}, or choose another output",
        )

    def forget(self) -> None:
        """Forget all scores, and that they have ended the run: later scores are not comparable with them."""
        self._marks, self._reached, self._evaluated, self.reason = {DEFAULT_MEASURE: BestScore()}, 0, 0, None

    def go_on(self, round: int) -> None:
        """Set `reason` for a run that continues after a round, if that was evaluated and the patience is exhausted.

        If the round was not evaluated, the next evaluation decides: the last round of a run is always evaluated. If the
        rounds so far were measured otherwise than those to come, that is kept.
        """
        if self._was != self._measured:
            self._before.append({"until": round, "measured": dict(self._was)})
        if self.reason is None and self._evaluated == round:
            self.reason = self._exhausted()

    def add(self, scores: Mapping[str, Any], round: int = 0) -> None:
        """Add a round's scores by column, the same on every rank."""
        if all(scores.get(f"test_{name}") is None for name in ("loss", *self._metrics)):  # not evaluated
            return
        self._evaluated = round
        loss, accuracy = scores["test_loss"], scores["test_accuracy"]
        if loss is not None:
            self._follows = "loss" if accuracy is None else "accuracy"
            self._marks[DEFAULT_MEASURE].add(-loss if accuracy is None else accuracy)
        for name, larger in self._larger_is_better.items():
            value = scores.get(f"test_{name}")
            if name in self._metrics or value is not None:
                mark = self._marks.setdefault(name, BestScore())
                mark.add(value if value is None or larger else -value)
        self.reason = self._target(scores) or self._exhausted()

    def _target(self, scores: Mapping[str, Any]) -> str | None:
        rule = self._rule
        metric, goal = ("accuracy", rule.test_accuracy) if rule.target is None else (rule.metric, rule.target)
        value = scores.get(f"test_{metric}")
        if goal is None or (value is None and rule.target is None):
            return None
        is_there = value is not None and (value >= goal if self._larger(metric) else value <= goal)
        self._reached = self._reached + 1 if is_there else 0
        if self._reached < rule.for_:
            return None
        times = f" {self._reached} times in a row" if self._reached > 1 else ""
        reached = f"test_accuracy: {value:.4f}" if rule.target is None else f"target: test {metric} {value:.6g}"
        return f"stop.{reached} reaches {goal:g}{times}"

    def _exhausted(self) -> str | None:
        """Return the reason that the patience is exhausted, as text; None if it is not."""
        mark, patience = self._marks.get(self._name), self._rule.patience
        if patience is None or mark is None or mark.since < patience:
            return None
        what = self._follows if self._name == DEFAULT_MEASURE else self._name
        return f"stop.patience: no better test {what} in {counted(mark.since, 'evaluation')}"

    def _larger(self, metric: str | None) -> bool:
        return metric == "accuracy" or self._larger_is_better[str(metric)]

    def _plain_metric(self, name: str) -> Any:
        return plain(self._metrics[name]) if name in self._metrics else None


def stopping_of(recipe: Recipe, progress: Mapping[str, Any] | None) -> Stopping:
    """Return a recipe's early stopping; `progress` as in `Stopping`."""
    return Stopping(recipe.stop, progress, recipe.evaluate.metrics, measured_by(recipe.evaluate))


def measured_by(section: Evaluate) -> dict[str, str]:
    """Return the keys of ``evaluate`` by which a model's scores are others, with their values as text."""
    clients, fine_tune = section.clients, section.clients.fine_tune
    steps = "none" if fine_tune is None else fine_tune.model_dump_json(exclude_defaults=True)
    return {
        **{key: str(getattr(section, key)) for key in (*SELECTS, *ROUNDS_SCORES)},
        f"{OF_CLIENTS}models": ", ".join(clients.models),
        f"{OF_CLIENTS}fine_tune": steps,
    }


def reason_to_stop(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why ``stop`` ends a run after the last of its recorded rounds; None if it does not.

    First the scores of rounds that ``evaluate.every`` names are counted; then, in case it was changed, all scores.
    """
    every, none = recipe.evaluate.every, {"test_loss": None, "test_accuracy": None}
    for counts in (lambda round: bool(every) and round % every == 0, lambda round: True):
        stopping = stopping_of(recipe, None)
        for round, row in enumerate(rows, start=1):
            if counts(round):
                numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
                stopping.add(none | numbers, round)
        if stopping.reason is not None and counts(len(rows)):
            return stopping.reason
    return None


def has_own_scores(recipe: Recipe) -> bool:
    """Whether the user's code computes scores: the loss, or a metric."""
    return recipe.loss.factory is not None or any(references(recipe.evaluate.metrics))


class TimeLeft:
    """Early stopping by time: a last round and a checkpoint must fit before ``stop.max_hours`` and the SLURM job's end.

    Rank 0's clock decides; the other ranks get its decision with the round's reduction.
    """

    def __init__(self, rule: Stop):
        now, wall = time.monotonic(), time.time()
        ends = os.environ.get("SLURM_JOB_END_TIME", "")  # one that is past is another job's
        left = int(ends) - wall if ends.isdecimal() else 0.0
        self._deadlines = {"the job's time limit": now + left} if left > 0 else {}
        if rule.max_hours is not None:
            self._deadlines["stop.max_hours"] = now + 3600 * rule.max_hours
        self._rounds: deque[float] = deque(maxlen=RECENT_ROUNDS)
        self._evaluations: dict[Due, float] = {}

    def add(self, training: float, evaluation: float, due: Due) -> None:
        """Add a round's seconds of training, and of the evaluation of what was `due`."""
        self._rounds.append(training)
        self._evaluations[due] = max(self._evaluations.get(due, 0.0), evaluation)

    def is_up(self, checkpoint: float, due: tuple[Due, Due]) -> bool:
        """Whether the round that begins now should be the last.

        Args:
            checkpoint: seconds that writing a checkpoint takes.
            due: what is evaluated after this round, and after the next one.
        """
        if not self._deadlines:
            return False
        this, following = (max(self._rounds, default=0.0) + self._expected(one) for one in due)
        return time.monotonic() + this + RESERVE * (following + checkpoint) >= min(self._deadlines.values())

    def _expected(self, due: Due) -> float:
        """Return an evaluation's likely seconds: the longest of the same or fewer parts, else the shortest of more."""
        if not any(due):
            return 0.0
        fewer = [seconds for known, seconds in self._evaluations.items() if any(known) and _is_part(known, due)]
        more = [seconds for known, seconds in self._evaluations.items() if _is_part(due, known)]
        return max(fewer, default=min(more, default=0.0))

    def reason(self) -> str:
        """Return the name, for messages, of the limit that comes first."""
        return min(self._deadlines, key=self._deadlines.__getitem__, default="the time limit")


def _is_part(one: Due, other: Due) -> bool:
    """Whether all that is evaluated in `one` is in `other`."""
    return all(there or not here for here, there in zip(one, other, strict=True))
