"""Base class, limits and validators of recipe sections; the sections for stopping, checkpoints, step sizes by round."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_serializer, model_validator

MAX_COUNT = 10**9
"""Largest count of rounds, steps, clients or samples in a recipe."""
REAL_RANGE = (1e-30, 1e15)
"""Smallest and largest magnitude of nonzero real numbers: the product of any two is a float32."""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Period = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A period in rounds; 0 means never."""


class Section(BaseModel):
    """Base of all recipe sections: frozen, no unknown key, no conversion between types, finite numbers only.

    Attributes:
        later: keys added since 0.1.0. A recorded recipe omits them at their default, so that runs and checkpoints of
            earlier versions go on.
        noun: what a file of this is called in messages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    later: ClassVar[frozenset[str]] = frozenset()
    noun: ClassVar[str] = "recipe"

    @model_serializer(mode="wrap")
    def _later_where_set(self, serialize: Any) -> dict[str, Any]:
        unset = {key for key, default in _defaults_of_later(type(self)).items() if getattr(self, key) == default}
        return {key: value for key, value in serialize(self).items() if key not in unset}


@cache
def _defaults_of_later(section: type[Section]) -> dict[str, Any]:
    return {key: section.model_fields[key].get_default(call_default_factory=True) for key in section.later}


class Stop(Section):
    """When to end before the last round; every rank decides from the same reduced numbers.

    `test_accuracy` must be reached in `for` evaluations in a row; `patience` is how many evaluations may pass without a
    better test accuracy (test loss, in a regression); `max_hours` is by rank 0's clock, from the start of this job.
    `metric` names one of `evaluate.metrics`, `accuracy` or `loss`: `patience` then follows its value on the test set,
    and `target` is the value to reach, at least or at most, as the metric's better direction says.
    """

    later: ClassVar[frozenset[str]] = frozenset({"metric", "target"})

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)
    test_accuracy: float | None = Field(None, gt=0, le=1)
    """Test accuracy to reach."""
    for_: Count = Field(1, alias="for")
    """Evaluations in a row that have to reach it."""
    patience: Count | None = None
    """Early stopping: evaluations without a better test accuracy (regression: loss), or `metric`."""
    max_hours: float | None = Field(None, gt=0, le=1e6)
    """Hours of this job; the run stops with a checkpoint (exit code 75)."""
    metric: str | None = None
    """One of `evaluate.metrics`, `accuracy` or `loss`, on the test set."""
    target: float | None = None
    """Value of `metric` to reach."""

    @model_validator(mode="after")
    def _something_given(self) -> Stop:
        if self.test_accuracy is not None and self.target is not None:
            raise ValueError("'test_accuracy' or 'target', not both")
        if self.test_accuracy is None and self.target is None and self.for_ != 1:
            raise ValueError("'for' only beside 'test_accuracy' or 'target'")
        if self.target is not None and self.metric is None:
            raise ValueError("'metric', which is to reach it, beside 'target'")
        if self.metric is not None and self.target is None and self.patience is None:
            raise ValueError("'target' or 'patience' beside 'metric'")
        return self

    @property
    def by_scores(self) -> str:
        """The first key that ends a run by its scores, "" if none does."""
        return next((key for key in ("test_accuracy", "target", "patience") if getattr(self, key) is not None), "")


PERIOD = re.compile(r"([0-9]{1,8}(?:\.[0-9]{1,8})?)\s*(s|min|h)")
SECONDS = {"s": 1, "min": 60, "h": 3600}


_TIME = {"type": "string", "pattern": rf"^(?![0.]+\s*[a-z]+$){PERIOD.pattern}$"}
A_PERIOD = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_COUNT}, _TIME]}
"""JSON Schema of the values that `a_period` accepts."""
A_WATCHDOG = {"anyOf": [{"enum": ["auto", 0]}, _TIME]}
"""JSON Schema of the values that `a_watchdog` accepts."""


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_COUNT


def a_period(value: Any) -> Any:
    """Validate a number of rounds, or a time."""
    if _is_count(value, 0):
        return value
    if isinstance(value, str) and seconds_of(value):
        return value
    raise ValueError(f"a number of rounds, at most {MAX_COUNT}, or a time such as '10min' (s, min, h)")


def a_watchdog(value: Any) -> Any:
    """Validate ``auto``, a time, or 0 for none."""
    if value is not False and (value in ("auto", 0) or (isinstance(value, str) and seconds_of(value))):
        return value
    raise ValueError("auto, a time such as '30min' (s, min, h), or 0 for none")


def watchdog_limit(value: int | str) -> float | Literal["auto"] | None:
    """Return the limit of a watchdog in seconds; None for none."""
    return "auto" if value == "auto" else seconds_of(value)


def seconds_of(every: int | str) -> float | None:
    """Return a period in seconds; None for one in rounds."""
    match = PERIOD.fullmatch(every) if isinstance(every, str) else None
    return float(match[1]) * SECONDS[match[2]] if match else None


def on_or_off(value: Any) -> Any:
    """Return ``on`` and ``off`` for true and false, which older YAML makes of them."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def a_batch_size(value: Any) -> Any:
    """Validate a number of samples, or ``full``."""
    if value == "full" or _is_count(value, 1):
        return value
    raise ValueError(f"a whole number from 1 to {MAX_COUNT}, or 'full'")


NAMED_KEEPS = ("even", "spaced")
A_KEEP = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_COUNT}, {"enum": [*NAMED_KEEPS]}]}
"""JSON Schema of the values that `a_keep` accepts."""
MOST_STATES, MOST_BYTES_OF_STATES = 20, 1 << 30
"""Evenly spaced checkpoints that ``keep: even`` keeps, while they take less than so many bytes."""


def a_keep(value: Any) -> Any:
    """Validate a number of checkpoints, ``even`` or ``spaced``."""
    if value in NAMED_KEEPS or _is_count(value, 1):
        return value
    raise ValueError(f"a whole number from 1 to {MAX_COUNT}, {' or '.join(map(repr, NAMED_KEEPS))}")


def a_guess(value: Any) -> Any:
    """Validate ``guess``; 0 steps mean ``none``."""
    if value in ("none", "remaining", "limit"):
        return value
    if _is_count(value, 0):
        return value or "none"
    raise ValueError(f"'none', 'remaining', 'limit' or a number of steps up to {MAX_COUNT}")


A_SCHEDULE = {
    "anyOf": [
        {"type": "string", "format": "path"},
        {"type": "array", "minItems": 1, "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
        {"type": "null"},
    ],
}
"""JSON Schema of the values that `a_schedule` accepts."""


def a_schedule(value: Any) -> Any:
    """Validate a file, or a list over rounds of lists of clients."""
    if value is None or isinstance(value, str | Path):
        return value if value is None else Path(value)
    rows = value if isinstance(value, list) else []
    if rows and all(isinstance(row, list) and all(type(client) is int for client in row) for row in rows):
        return value
    raise ValueError("a file, or a list over rounds of lists of clients, such as [[0], [1]]")


def a_tuple(value: Any) -> Any:
    """Turn a list, as YAML has it, into a tuple."""
    return tuple(value) if isinstance(value, list) else value


class LrFrom(Section):
    """The step size from a round on."""

    round: int = Field(ge=2, le=MAX_COUNT)
    """First round of the step size."""
    lr: float = Field(gt=0)
    """Step size from then on."""


class SecureAggregation(Section):
    """Secure aggregation, simulated: the server sees sums alone, of pairwise masked words (docs/updates.md)."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which a client drops out of a round before it sends."""
    survivors: int = Field(2, ge=2)
    """Least number of clients of whom a sum is opened; with fewer the model stays as it is."""


class Checkpoint(Section):
    """When to save the run, in rounds or in time (0: only if it is stopped early), and which checkpoints to keep.

    ``keep: even`` keeps the newest two and, so that `verify` and `replay` can enter near any round, 20 more at equal
    distances, which are written even if none is due by `every`; fewer where they would take 1 GiB. ``keep: spaced``
    keeps the newest two, and each whose round is at least 5/4 of the one kept before it: ten a decade.
    """

    every: Annotated[int | str, PlainValidator(a_period), WithJsonSchema(A_PERIOD)] = "10min"
    """In rounds (`50`) or in time (`10min`); 0: only when the run is stopped early."""
    keep: Annotated[int | Literal["even", "spaced"], PlainValidator(a_keep), WithJsonSchema(A_KEEP)] = "even"
    """`even`: two, and 20 at equal distances for `verify` and `replay`, while they take less than 1 GiB; `spaced`:
    of those that are due by `every`, ten a decade of rounds; `2`: two."""

    def num_states(self, rounds: int, each: int) -> int:
        """Return how many evenly spaced checkpoints a run of so many rounds keeps, of at most `each` bytes."""
        if not self.every or self.keep != "even":
            return 0
        return min(MOST_STATES, (MOST_BYTES_OF_STATES - 1) // max(each, 1), rounds)

    @property
    def newest_kept(self) -> int:
        """How many of the newest checkpoints are kept."""
        return self.keep if isinstance(self.keep, int) else 2

    def most_kept(self, rounds: int) -> int:
        """Return how many checkpoints a run of so many rounds keeps at most, without evenly spaced ones."""
        if self.keep != "spaced":
            return self.newest_kept
        count, round = 2, 1
        while round <= rounds:
            count, round = count + 1, next_kept(round)
        return count


def next_kept(round: int) -> int:
    """Return the first round whose checkpoint ``keep: spaced`` keeps after one of `round`."""
    return round + max(1, -(-round // 4))


def stretch_of(round: int, rounds: int, states: int) -> int:
    """Return the stretch that begins with the state after a round, of `states` equal ones over all rounds.

    A state is due after each round with which another stretch begins: after the first, ⌈T/states⌉.
    """
    return round * states // rounds
