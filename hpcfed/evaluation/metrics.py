"""Metrics that need all samples at once, since they are not sums over samples: scikit-learn's, ours, and the user's.

They take outputs and targets of n samples in the data set's order. Outputs are logits, as for the losses. Samples of
two classes are ranked by the single logit, or by the difference of the two logits, since probabilities saturate.

    auroc, average-precision   two classes: the second is the positive one; more: unweighted mean over the classes,
                               each against the rest
    f1-macro                   unweighted mean over the classes that occur or are predicted
    balanced-accuracy          unweighted mean of the recall over the classes that occur
    calibration-error          Σ_b n_b/n |accuracy_b − confidence_b| over 15 bins of the largest probability: Guo,
                               Pleiss, Sun, Weinberger, "On calibration of modern neural networks", ICML 2017, eq. 3
    brier                      two classes: mean of (p − y)², in [0, 1], p = probability of the second; more: mean of
                               Σ_c (p_c − y_c)², in [0, 2], as scikit-learn's `brier_score_loss`: Brier, "Verification
                               of forecasts expressed in terms of probability", Monthly Weather Review 78, 1950
    dice                       2|A ∩ B| / (|A| + |B|) of a sample's labels, mean over samples; 1 where both are empty
    concordance                Harrell's C: the share of comparable pairs in which the earlier event has the larger
                               output, ties ½; i with an event is comparable with j if t_i < t_j, or t_i = t_j and j
                               is censored (as `lifelines.utils.concordance_index` of −output)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan, prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpcfed.config.factory import imported
from hpcfed.config.metrics import BUILT_IN, Metric, OwnMetric, is_matrix
from hpcfed.config.user_code.blame import blamed
from hpcfed.errors import RAISED, InputError
from hpcfed.models.losses import unwritten

BINS = 15
"""Number of bins of the calibration error."""
Found = float | np.ndarray | None


@dataclass(frozen=True)
class WholeMetric:
    """A metric that needs all samples at once.

    Attributes:
        function: outputs (n, …) and targets (n, …) on the CPU → a number or an array; None if the metric is undefined.
        shape: shape of the metric's value; () for a number.
    """

    function: Callable[[Tensor, Tensor], Found]
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of entries of the metric's value."""
        return prod(self.shape)

    def cells(self, output: Tensor, target: Tensor) -> np.ndarray:
        """Return the metric's cells, (size, 2): (number, 1) for each number of its value; zeros if it is undefined."""
        found = self.function(output, target)
        if found is None or (self.shape and np.ndim(found) == 0):  # nan, since an output is not finite
            return np.zeros((self.size, 2))
        return np.stack([np.ravel(found), np.ones(self.size)], axis=1)


def whole_metrics(
    metrics: Mapping[str, Metric], task: str, num_classes: int | None, python_path: Sequence[Path]
) -> dict[str, WholeMetric]:
    """Return those of ``evaluate.metrics``, `metrics`, that need all samples at once, by name.

    `num_classes` is None if the `task` has no classes; `python_path` lists the folders of the user's modules.

    Raises:
        InputError: a function of the user cannot be imported.
    """
    found = {}
    for name, metric in metrics.items():
        key = f"evaluate.metrics.{name}"
        if isinstance(metric, OwnMetric):
            if metric.whole is not None:
                found[name] = WholeMetric(_OwnWhole(key, imported(metric.whole, python_path, key)))
        elif metric in BUILT_IN:
            classes = 2 if num_classes == 1 else num_classes or 0
            shape = (classes, classes) if is_matrix(metric) else ()
            found[name] = WholeMetric(partial(_finite, FUNCTIONS[metric], task == "multi-label"), shape)
    return found


def _finite(
    function: Callable[[np.ndarray, np.ndarray, bool], Found], multi_label: bool, output: Tensor, target: Tensor
) -> Found:
    """Compute a built-in metric in float64; nan if an output is not finite, for which scikit-learn would raise."""
    numbers = output.double().numpy().reshape(len(output), -1)
    if not np.isfinite(numbers).all():
        return nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on classes that are predicted but absent
        return function(numbers, (target.long() if multi_label else target).numpy(), multi_label)


def _labels(target: np.ndarray, multi_label: bool) -> np.ndarray:
    """Return one class per sample, (n,); if the task is multi-label, the only column of the targets, (n, 1)."""
    return target[:, 0] if multi_label else target


def ranking_scores(output: np.ndarray) -> np.ndarray:
    """Return the scores by which samples are ranked, from logits (n, C).

    If C is 1, they are the logits, (n,); if C is 2, the second logit minus the first, (n,); else the classes'
    probabilities, (n, C).
    """
    if output.shape[1] <= 2:
        return output[:, -1] - (output[:, 0] if output.shape[1] == 2 else 0.0)
    return probabilities(output)


def probabilities(output: np.ndarray) -> np.ndarray:
    """Return the classes' probabilities, (n, C), from logits (n, C), or from a single logit, (n, 1), if C = 2."""
    if output.shape[1] == 1:
        output = np.concatenate([np.zeros_like(output), output], axis=1)
    powers = np.exp(output - output.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _predicted(output: np.ndarray) -> np.ndarray:
    """Return the class with the largest output, (n,); for a single logit, 1 if it is positive, else 0."""
    return (output[:, 0] > 0).astype(np.int64) if output.shape[1] == 1 else output.argmax(axis=1)


def _ranking(name: str, output: np.ndarray, target: np.ndarray, multi_label: bool) -> Found:
    """Return scikit-learn's metric `name`, ``roc_auc_score`` or ``average_precision_score``.

    None if a class does not occur in the targets; for several labels, if a label is present in all of them or in none.
    """
    from sklearn import metrics

    if multi_label and output.shape[1] > 1:
        if not ((target > 0).any(axis=0) & (target <= 0).any(axis=0)).all():
            return None
        return float(getattr(metrics, name)(target, output, average="macro"))
    labels, scores = _labels(target, multi_label), ranking_scores(output)
    classes = max(2, output.shape[1])
    if len(np.unique(labels)) < classes:
        return None
    if classes == 2:
        return float(getattr(metrics, name)(labels, scores))
    return float(getattr(metrics, name)(labels[:, None] == np.arange(classes), scores, average="macro"))


def _f1_macro(output: np.ndarray, target: np.ndarray, multi_label: bool) -> Found:
    from sklearn.metrics import f1_score

    if multi_label and output.shape[1] > 1:
        return float(f1_score(target, output > 0, average="macro", zero_division=0))
    return float(f1_score(_labels(target, multi_label), _predicted(output), average="macro", zero_division=0))


def _balanced_accuracy(output: np.ndarray, target: np.ndarray, multi_label: bool) -> Found:
    from sklearn.metrics import balanced_accuracy_score

    return float(balanced_accuracy_score(_labels(target, multi_label), _predicted(output)))


def _confusion(output: np.ndarray, target: np.ndarray, multi_label: bool) -> Found:
    """Return the confusion matrix, (C, C) counts: rows are the targets' classes, columns the predicted ones."""
    from sklearn.metrics import confusion_matrix

    classes = np.arange(max(2, output.shape[1]))
    return confusion_matrix(_labels(target, multi_label), _predicted(output), labels=classes).astype(np.float64)


def _calibration_error(output: np.ndarray, target: np.ndarray, multi_label: bool) -> Found:
    probability = probabilities(output)
    confidence, right = probability.max(axis=1), _predicted(output) == _labels(target, multi_label)
    bins = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, right, BINS) - np.bincount(bins, confidence, BINS)
    return float(np.abs(gaps).sum() / len(target))


def _brier(output: np.ndarray, target: np.ndarray, multi_label: bool) -> Found:
    probability = probabilities(output)
    present = _labels(target, multi_label)[:, None] == np.arange(probability.shape[1])
    squares = (probability - present) ** 2
    return float((squares[:, 1] if squares.shape[1] == 2 else squares.sum(axis=1)).mean())


def _dice(output: np.ndarray, target: np.ndarray, multi_label: bool) -> Found:
    from sklearn.metrics import f1_score

    return float(f1_score(target, output > 0, average="samples", zero_division=1))


def _of_numbers(name: str, output: np.ndarray, target: np.ndarray, multi_label: bool) -> Found:
    from sklearn import metrics

    rows = target.astype(np.float64).reshape(len(target), -1)
    if name == "r2_score" and (rows == rows[:1]).all(axis=0).any():
        return None
    return float(getattr(metrics, name)(rows, output.reshape(rows.shape)))


def _concordance(output: np.ndarray, target: np.ndarray, multi_label: bool) -> Found:
    risk, event, time = output.reshape(-1), target[:, 0] > 0, target[:, 1]
    pairs = right = tied = 0
    for i in np.flatnonzero(event):
        others = risk[(time > time[i]) | ((time == time[i]) & ~event)]
        pairs += len(others)
        right += int((others < risk[i]).sum())
        tied += int((others == risk[i]).sum())
    return (right + tied / 2) / pairs if pairs else None


FUNCTIONS: Mapping[str, Callable[[np.ndarray, np.ndarray, bool], Found]] = {
    "auroc": partial(_ranking, "roc_auc_score"),
    "average-precision": partial(_ranking, "average_precision_score"),
    "f1-macro": _f1_macro,
    "balanced-accuracy": _balanced_accuracy,
    "confusion-matrix": _confusion,
    "calibration-error": _calibration_error,
    "brier": _brier,
    "dice": _dice,
    "mae": partial(_of_numbers, "mean_absolute_error"),
    "rmse": partial(_of_numbers, "root_mean_squared_error"),
    "r2": partial(_of_numbers, "r2_score"),
    "concordance": _concordance,
}
"""Built-in metric → its function: (outputs (n, C) float64, targets (n, …), whether the task is multi-label) → value."""


@dataclass(frozen=True)
class _OwnWhole:
    """A user's metric that needs all samples at once; a value that is not finite counts as undefined (None)."""

    key: str
    function: Callable[[Tensor, Tensor], Any]

    def __call__(self, output: Tensor, target: Tensor) -> Found:
        try:
            with unwritten(self.key, output, target):
                found = self.function(output, target)
        except InputError:
            raise
        except RAISED as error:  # the user's function may raise anything
            raise blamed(error, self.key) or InputError(f"{self.key} raised {type(error).__name__}: {error}") from error
        try:
            value = float(found)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(self.key, expected="a number", got=repr(found)[:100]) from None
        return value if np.isfinite(value) else None
