"""The recipe's section ``evaluate.metrics``: built-in metrics by name, and the user's own functions.

[auroc, f1-macro]                                  built-in ones
{auroc: auroc, top3: "module:function"}            and a sum: (output, target) of a batch → (sum, count)
{kappa: {whole: "module:function"}}                and one of all samples at once: (output, target) → number
{top3: {sum: "module:function", better: higher}}   with its direction: higher or lower
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from hpcfed.config.limits import Section, Stop
from hpcfed.config.observer import REFERENCE, Reference
from hpcfed.errors import InputError, nearest

NAME = r"^[A-Za-z][\w-]*$"
ALWAYS_MEASURED = ("loss", "accuracy")
"""Names of what is measured without being asked for."""
ROW_KEYS = ("round", "client", "model", "split")
"""The columns of ``clients.csv`` that tell its rows apart, which are its first."""
CLIENT_COLUMNS = (*ROW_KEYS, *ALWAYS_MEASURED, "n", "name")
"""The columns that ``clients.csv`` always has; the recipe's metrics follow, under other names."""
UNMEASURED_COLUMNS = tuple(name for name in CLIENT_COLUMNS if name not in ALWAYS_MEASURED)
CLASSES, LABELS, NUMBERS, TIMES = "one label a sample", "several labels a sample", "numbers", "event times"
"""The kinds of targets: a single label of zeros and ones (``multi-label`` with one class) is two classes."""


@dataclass(frozen=True)
class Kind:
    """A built-in metric.

    Attributes:
        targets: the kinds of targets that it is defined for.
        larger_is_better: None for a matrix.
        undefined: when it has no value.
        is_share: whether its values are from 0 to 1.
    """

    targets: tuple[str, ...]
    larger_is_better: bool | None
    undefined: str = ""
    is_share: bool = False


CLASS_ABSENT = "a class is absent"
BUILT_IN: Mapping[str, Kind] = {
    "auroc": Kind((CLASSES, LABELS), True, CLASS_ABSENT, is_share=True),
    "average-precision": Kind((CLASSES, LABELS), True, CLASS_ABSENT, is_share=True),
    "f1-macro": Kind((CLASSES, LABELS), True, is_share=True),
    "balanced-accuracy": Kind((CLASSES,), True, is_share=True),
    "confusion-matrix": Kind((CLASSES,), None),
    "calibration-error": Kind((CLASSES,), False, is_share=True),
    "brier": Kind((CLASSES,), False),
    "dice": Kind((LABELS,), True, is_share=True),
    "mae": Kind((NUMBERS,), False),
    "rmse": Kind((NUMBERS,), False),
    "r2": Kind((NUMBERS,), True, "all targets are equal"),
    "concordance": Kind((TIMES,), True, "no two samples can be compared", is_share=True),
}
BY_HAND = ("calibration-error", "brier", "concordance")
"""Metrics that do not need scikit-learn."""


DIRECTIONS = ("higher", "lower")
WITH_ACCURACY = ("classification", "multi-label", "next-token")
"""Tasks that have an accuracy."""


class OwnMetric(Section):
    """The user's metric: a function of a batch, `sum`, or of all samples, `whole`; and which values are better.

    Without `better` nothing chooses or stops by it.
    """

    later: ClassVar[frozenset[str]] = frozenset({"whole", "sum", "better"})
    whole: Reference | None = None
    sum: Reference | None = None
    better: Literal["higher", "lower"] | None = None

    @property
    def reference(self) -> str:
        """The function."""
        return self.whole or self.sum or ""


Metric = str | OwnMetric


def listed(value: Any) -> Any:
    """Expand ``auroc`` and ``[auroc, {top3: "module:function"}]`` to a mapping of names."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    pairs: list[tuple[Any, Any]] = []
    for entry in value:
        pairs += entry.items() if isinstance(entry, Mapping) else [(entry, entry)]
    names = [str(name) for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("different names")
    return {str(name): metric for name, metric in pairs}


def a_metric(value: Any) -> Any:
    """Validate the name of a built-in metric, or the user's function."""
    if isinstance(value, OwnMetric) or (isinstance(value, str) and (value in BUILT_IN or re.match(REFERENCE, value))):
        return value
    keys = dict(value) if isinstance(value, Mapping) else {}
    better = keys.pop("better", None)
    if better not in (None, *DIRECTIONS):
        raise ValueError(" or ".join(map(repr, DIRECTIONS)))
    reference = next(iter(keys.values())) if len(keys) == 1 and keys.keys() <= {"whole", "sum"} else None
    if isinstance(reference, str) and re.match(REFERENCE, reference):
        return OwnMetric(**keys, better=better)
    of_own = "{whole: 'module:function'}, {sum: 'module:function'}, each also with 'better', or 'module:function'"
    raise ValueError(f"{', '.join(BUILT_IN)}, {of_own}")


def plain(metric: Metric) -> Any:
    """Return a metric as plain data."""
    return metric if isinstance(metric, str) else metric.model_dump()


FUNCTION = {"type": "string", "pattern": REFERENCE}
A_METRIC = {
    "anyOf": [
        {"enum": [*BUILT_IN]},
        FUNCTION,
        {
            "type": "object",
            "properties": {"whole": FUNCTION, "sum": FUNCTION, "better": {"enum": [*DIRECTIONS]}},
            "oneOf": [{"required": ["whole"]}, {"required": ["sum"]}],
            "additionalProperties": False,
        },
    ]
}
NAMED_METRICS = {
    "type": "object",
    "propertyNames": {"pattern": NAME, "not": {"enum": [*CLIENT_COLUMNS]}},
    "additionalProperties": A_METRIC,
}
METRICS_SCHEMA = {
    "anyOf": [
        {"enum": [*BUILT_IN]},
        {"type": "array", "items": {"anyOf": [{"enum": [*BUILT_IN]}, NAMED_METRICS]}},
        NAMED_METRICS,
    ]
}
"""JSON Schema of the values that `listed` and `a_metric` accept."""


def references(metrics: Mapping[str, Metric]) -> Iterator[str]:
    """Yield the references to user code."""
    for metric in metrics.values():
        if isinstance(metric, OwnMetric):
            yield metric.reference
        elif metric not in BUILT_IN:
            yield metric


def summed(metric: Metric) -> str | None:
    """Return the user's function of a batch, (sum, count); None for other metrics."""
    if isinstance(metric, OwnMetric):
        return metric.sum
    return None if metric in BUILT_IN else metric


def larger_is_better(metric: Metric) -> bool | None:
    """Return the direction of a metric; None for a matrix, and for the user's own without `better`."""
    if isinstance(metric, OwnMetric):
        return None if metric.better is None else metric.better == "higher"
    return BUILT_IN[metric].larger_is_better if metric in BUILT_IN else None


def direction_of(name: str, metrics: Mapping[str, Metric]) -> bool | None:
    """Return whether larger is better of a measure by its name in a recipe with these metrics; None if unknown."""
    return {"accuracy": True, "loss": False}.get(name, larger_is_better(metrics.get(name, name)))


def direction_of_column(column: str, metrics: Mapping[str, Metric]) -> bool | None:
    """Return whether larger values are better in a column of the record, such as ``clients.global.test.loss.mean``.

    None if unknown, as of a variance over clients or of what a method reports.
    """
    if column.startswith("clients."):
        *_, measure, statistic = column.split(".")
        return None if statistic == "variance" else direction_of(measure, metrics)
    part, _, measure = column.partition("_")
    return direction_of(measure, metrics) if part in ("test", "train", "local") else None


def is_share(name: str, metrics: Mapping[str, Metric]) -> bool:
    """Whether the values of a measure, by its name in a recipe with these metrics, are from 0 to 1."""
    metric = metrics.get(name, name)
    return metric == "accuracy" or (isinstance(metric, str) and metric in BUILT_IN and BUILT_IN[metric].is_share)


def is_percentage(column: str, metrics: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether a column of the record is shown in percent: an accuracy, or the built-in ``balanced-accuracy``.

    Own metrics are not, whatever their names. A name that the recipe's `metrics` lack is that of a built-in one.
    """
    part, _, name = column.partition("_")
    return part in ("test", "train") and metrics.get(name, name) in ("accuracy", "balanced-accuracy")


def is_matrix(metric: Metric) -> bool:
    """Whether a metric is a matrix, of one number per pair of classes."""
    return metric == "confusion-matrix"


def undefined(metric: Metric) -> str:
    """Return when a metric has no value, in words."""
    built_in = BUILT_IN.get(metric) if isinstance(metric, str) else None
    if built_in is None:
        return "its count is 0 or its value is not finite"
    return built_in.undefined or "an output is not finite"


def targets_of(task: str, num_classes: int | None) -> str:
    """Return the kind of a federation's targets, ``next-token`` for tokens."""
    kinds = {"classification": CLASSES, "regression": NUMBERS, "survival": TIMES}
    if task == "multi-label":
        return CLASSES if num_classes == 1 else LABELS
    return kinds.get(task, task)


def check_metrics(metrics: Mapping[str, Metric], task: str, num_classes: int | None) -> None:
    """Refuse built-in metrics that the federation's targets or the installed packages do not allow.

    Raises:
        InputError: naming the metric.
    """
    has = targets_of(task, num_classes)
    fitting = [name for name, kind in BUILT_IN.items() if has in kind.targets]
    for metric in metrics.values():
        if not (isinstance(metric, str) and metric in BUILT_IN):
            continue
        if metric not in fitting:
            remedy = f"use {', '.join(fitting)}" if fitting else "use a function of yours"
            what = f"evaluate.metrics: {metric} needs {' or '.join(BUILT_IN[metric].targets)}"
            alone = " of one label" if task == "multi-label" and num_classes == 1 else ""
            raise InputError(what, got=f"a {task} federation{alone}", remedy=remedy)
        if metric not in BY_HAND and find_spec("sklearn") is None:
            raise InputError(f"evaluate.metrics: {metric} needs scikit-learn", remedy="pip install scikit-learn")


def check_stop(stop: Stop, metrics: Mapping[str, Metric], task: str) -> None:
    """Refuse to stop by a metric that is not evaluated, or whose better direction is unknown.

    Raises:
        InputError: naming it.
    """
    name = stop.metric
    always = ["loss", *(["accuracy"] if task in WITH_ACCURACY else [])]
    if name is None or name in always:
        return
    if name == "accuracy":
        remedy = f"use {' or '.join(['loss', *metrics])}"
        raise InputError("stop.metric: no accuracy is evaluated", got=f"a {task} federation", remedy=remedy)
    if name not in metrics:
        remedy = "add it to evaluate.metrics" if name in BUILT_IN else nearest(name, [*always, *metrics])
        raise InputError(f"stop.metric: {name!r} is not evaluated", remedy=remedy)
    if is_matrix(metrics[name]):
        raise InputError(f"stop.metric: {name!r} is a matrix", expected="a metric that is a number")
    if larger_is_better(metrics[name]) is None:
        remedy = f"add better: {' or '.join(DIRECTIONS)} to it in evaluate.metrics"
        raise InputError(f"stop.metric: {name!r} has no direction", remedy=remedy)
