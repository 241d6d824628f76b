"""Labels in arrays, words or whole numbers: classes by their values, numbered when all labels are known."""

from __future__ import annotations

import numpy as np

from data_prep.tables import cells, labels
from hpcfed.errors import InputError


class ArrayLabels:
    """The different labels met so far, numbered in the order of arrival."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, what: str, y: np.ndarray) -> np.ndarray:
        """Return labels (m,) as numbers in the order of arrival; NaN, fractions and other types as they are.

        Raises:
            InputError: a word is empty, or not UTF-8.
        """
        found = _texts(what, y)
        if found is None:
            return y
        texts, codes = found
        if any(not text.strip() for text in texts):
            raise InputError(f"{what}: a label is empty", remedy="name its class")
        names = map(cells.composed, texts)
        numbers = np.array([*(self._numbers.setdefault(name, len(self._numbers)) for name in names), np.nan])[codes]
        return numbers if np.isnan(numbers).any() else numbers.astype(np.int64)

    def classes(self, positive: str | None) -> labels.Classes:
        """Return the classes of all labels, of two the `positive` one second.

        Raises:
            InputError: as `labels.with_positive`.
        """
        levels = {text: cells.number(text) for text in self._numbers}
        return labels.with_positive(labels.of_texts("y", levels), positive)

    def class_of(self, classes: labels.Classes) -> np.ndarray:
        """Return the class of each number that `add` gave out, (K,), in the type to be stored."""
        small = classes.count - 1 <= np.iinfo(np.uint8).max
        return np.array([classes.codes[text] for text in self._numbers], np.uint8 if small else np.int64)


def _texts(what: str, y: np.ndarray) -> tuple[list[str], np.ndarray] | None:
    """Return distinct labels as texts, and each label's index among them, (m,), -1 for NaN; None for no labels."""
    if y.dtype.kind == "O" and all(isinstance(label, str) for label in y.flat):
        y = y.astype(str)
    if y.dtype.kind not in "USbiuf":
        return None
    values, codes = np.unique(y, return_inverse=True)
    if y.dtype.kind == "S":
        return [cells.decoded(what, value) for value in values.tolist()], codes
    if y.dtype.kind == "U":
        return values.tolist(), codes
    if y.dtype.kind == "f":
        absent = np.isnan(values)
        if (values[~absent] != np.rint(values[~absent])).any() or np.isinf(values).any():
            return None
        codes = np.where(absent[codes], -1, codes) if len(values) else codes
        values = values[~absent]  # NaN comes last
    if y.dtype.kind == "b":
        return [str(value) for value in values.tolist()], codes
    return [str(int(value)) for value in values.tolist()], codes
