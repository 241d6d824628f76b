"""The preparation of a model's input, as JSON: features, categories, fill values, scaling and classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcfed.data.federation import Federation
from hpcfed.data.sites import class_names, site_names

SUFFIX = ".input.json"


def preparation(federation: Federation, dtype: str) -> str:
    """Return, as JSON, how rows become the model's input x and what the model's outputs mean.

    x has the run's `dtype` unless samples are tokens.
    """
    source = federation.source
    found = {
        "task": federation.task,
        "dtype": dtype_of(federation, dtype),
        "shape": list(federation.feature_shape),
        "steps": list(_steps(federation)),
        "features": federation.features,
        "categories": source.get("categories"),
        "missing_codes": source.get("missing_codes"),
        "fill": fill_of(federation),
        "divide_by": 255 if is_bytes(federation) else None,
        "scaling": scaling(federation),
        "target": source.get("target"),
        "classes": None if federation.task in ("next-token", "survival") else class_names(federation) or None,
        "vocabulary": federation.vocabulary,
    }
    return json.dumps({key: value for key, value in found.items() if value is not None}, indent=1) + "\n"


def dtype_of(federation: Federation, dtype: str) -> str:
    """Return the dtype of the model's input: that of the run, `dtype`, or int64 for tokens."""
    return "int64" if federation.task == "next-token" else dtype


def is_bytes(federation: Federation) -> bool:
    """Whether x is stored as uint8, which runs scale to [0, 1]."""
    return federation.x_dtype == np.uint8 and federation.task != "next-token"


def fill_of(federation: Federation) -> dict[str, Any] | None:
    """Return the fill values of missing cells, in the units before scaling; None if nothing is filled.

    Keys: ``mean`` or ``median`` → {feature: value}; ``most frequent`` → list of the one-hot features, ``column=level``,
    that are 1 for a missing cell.
    """
    filled = federation.source.get("filled")
    return filled if isinstance(filled, dict) else None


def scaling(federation: Federation) -> dict[str, Any] | None:
    """Return the constants of (x − mean) / std; None if x is not scaled.

    Keys: ``mean`` and ``std``, the same for all sites; or ``sites``, a list with the ``name``, ``mean`` and ``std`` of
    each; or, if samples scaled by site were partitioned anew, only ``by``, words that name the original data.
    """
    if federation.statistics is not None:
        columns = (site_names(federation), *(part.tolist() for part in federation.statistics))
        return {"sites": [{"name": name, "mean": mean, "std": std} for name, mean, std in zip(*columns, strict=True)]}
    if by := federation.source.get("standardized"):
        return {"by": str(by)}
    if federation.normalization is not None:
        return {name: list(values) for name, values in vars(federation.normalization).items()}
    return None


def _steps(federation: Federation) -> Iterator[str]:
    """Yield, in order and in words, the steps that turn a row or an image into the model's input."""
    if "missing_codes" in federation.source:
        yield "take cells that are in 'missing_codes', or equal a number there, for missing"
    if fill_of(federation) is not None:
        yield "fill missing cells by 'fill'; columns without a value there had no missing cell"
    if "categories" in federation.source:
        equal = "numbers that are equal are one level however they are written"
        yield f"encode 'categories' one-hot: the feature column=level is 1 in rows of that level, and else 0; {equal}"
    if federation.features is not None:
        yield "order the columns of x as 'features'"
    if federation.vocabulary is not None:
        yield "number the tokens by 'vocabulary'"
    if is_bytes(federation):
        yield "divide by 'divide_by'"
    constants = scaling(federation) or {}
    if "sites" in constants:
        yield "compute (x - mean) / std along axis 1 by the row's site in 'scaling'; a new site's by its training rows"
    elif "by" in constants:
        yield "compute (x - mean) / std along axis 1 as 'scaling' says; its constants are in the file named there"
    elif constants:
        yield "compute (x - mean) / std along axis 1 by 'scaling'"
