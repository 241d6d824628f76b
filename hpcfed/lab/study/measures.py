"""The metrics of a study: the recipe's or the task's default ones, and a confusion matrix if there are few classes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from hpcfed.config.load import load_recipe, to_plain
from hpcfed.config.metrics import (
    BY_HAND,
    CLASS_ABSENT,
    CLASSES,
    DIRECTIONS,
    LABELS,
    NUMBERS,
    TIMES,
    is_matrix,
    is_percentage,
    larger_is_better,
    targets_of,
    undefined,
)
from hpcfed.config.recipe import Recipe

MOST_CLASSES = 10
"""Most classes of a confusion matrix on the page."""
CONFUSION = "confusion-matrix"
DEFAULT_METRICS = {
    CLASSES: ("auroc", "calibration-error"),
    LABELS: ("auroc",),
    NUMBERS: ("rmse",),
    TIMES: ("concordance",),
}
"""Kind of target → the metrics of a study whose recipe names none, the main one first."""
ACCURACY, LOSS = "accuracy", "loss"
OF_PREDICTIONS = ("balanced-accuracy", "f1-macro")
"""Metrics that average over the classes that occur or are predicted."""


@dataclass(frozen=True)
class StudyMetric:
    """A scalar metric that the tables compare.

    Attributes:
        name: the metric's name in the recipe and in files.
        larger_is_better: whether larger values are better; None if unknown.
        best_by_one_class: whether, on samples of a single class, always predicting this class gives the best value.
        undefined: the condition, in words, under which the metric is undefined; "" if it is always defined.
        is_percentage: whether values are written in percent.
    """

    name: str
    larger_is_better: bool | None
    best_by_one_class: bool = False
    undefined: str = ""
    is_percentage: bool = False

    @property
    def needs_all_labels(self) -> bool:
        """Whether the metric is undefined on samples that lack a label value."""
        return self.undefined == CLASS_ABSENT

    @property
    def without_direction(self) -> str:
        """Sentence for the user that the metric has no known direction; "" if it is known which values are better."""
        known = self.larger_is_better is not None
        return "" if known else f"{self.title} has no direction (better: {' or '.join(DIRECTIONS)})"

    @property
    def in_text(self) -> str:
        """The metric's name within a sentence."""
        return self.title if self.title.isupper() else self.name.replace("-", " ")

    @property
    def title(self) -> str:
        """The metric's name at the beginning of a sentence."""
        return self.name.upper() if self.name in ("auroc", "mae", "rmse") else self.name.replace("-", " ").capitalize()


def with_metrics(recipe: Recipe, task: str, num_classes: int | None) -> Recipe:
    """Return the recipe with default metrics if it names none, and a confusion matrix if there are few classes.

    Metrics that need scikit-learn are added only if it is installed.
    """
    named, kind = dict(recipe.evaluate.metrics), targets_of(task, num_classes)
    has_sklearn = find_spec("sklearn") is not None
    usual = DEFAULT_METRICS.get(kind, ())
    if not named and usual and (has_sklearn or usual[0] in BY_HAND):
        named = {name: name for name in usual}
    few = kind == CLASSES and (num_classes or 0) <= MOST_CLASSES
    if few and has_sklearn and not any(is_matrix(metric) for metric in named.values()):
        named[CONFUSION] = CONFUSION
    content = to_plain(recipe)
    plain = named | content["evaluate"]["metrics"]
    return load_recipe({**content, "evaluate": {**content["evaluate"], "metrics": plain}})


def metrics_of(recipe: Recipe, task: str) -> list[StudyMetric]:
    """Return the scalar metrics of a recipe, then accuracy if the task has it; if there are neither, the loss.

    The first is the study's main metric, except that `read_study` prefers accuracy to a default metric that is
    undefined everywhere.
    """
    found = [
        StudyMetric(
            name,
            larger_is_better(metric),
            metric in OF_PREDICTIONS,
            undefined(metric),
            is_percentage(f"test_{name}", recipe.evaluate.metrics),
        )
        for name, metric in recipe.evaluate.metrics.items()
        if not is_matrix(metric)
    ]
    if task in ("classification", "multi-label"):
        found.append(StudyMetric(ACCURACY, True, True, is_percentage=True))
    return found or [StudyMetric(LOSS, False)]


def matrix_of(recipe: Recipe) -> str | None:
    """Return the name of the confusion matrix among a recipe's metrics; None if there is none."""
    return next((name for name, metric in recipe.evaluate.metrics.items() if is_matrix(metric)), None)
