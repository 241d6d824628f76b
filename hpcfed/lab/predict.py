"""`hpcfed.predict`: predictions of a run's evaluated model for new rows, prepared like its training rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.tables import cells
from data_prep.tables.read import blocks, is_parquet, plain
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, counted, did_you_mean, first_of
from hpcfed.lab.export.formats import private_names, why_initial
from hpcfed.lab.export.preparation import preparation
from hpcfed.lab.loaded import LoadedRun, load, recorded_code_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow


def predict(
    run: str | Path,
    rows: pd.DataFrame | str | Path,
    *,
    site: str | int | None = None,
    data: str | Path | None = None,
    accept_code: bool = False,
    run_code: bool = False,
) -> pd.DataFrame:
    """Return the predictions of a run's evaluated model, a row for each row of a table.

    Missing cells are filled, categories encoded and features scaled as the run's federation file records. The columns
    are, in classification, ``prediction`` and a probability per class, such as ``p(ill)``; with several labels, a
    probability per label; in regression, a value per target; in survival, ``log hazard``.

    Args:
        run: the run folder.
        rows: a data frame or a table's path (.csv, .tsv, .parquet), with at least the columns of the model's features.
        site: name or number of the client whose feature scaling, and private parameters and buffers or personal model,
            are used; required if features are scaled by site, or the model has private parts.
        data: present path of the run's federation file; None if it has not moved.
        accept_code: whether the model may be built by code that has changed since the run.
        run_code: whether a user-defined model is built by running the code recorded in the run folder.

    Raises:
        InputError: the run was not trained on tables, a column is missing, or a cell cannot be prepared; the model has
            private parts and `site` is None; or no cohort included the client, or it has no training samples, so
            that its parts are untrained.
    """
    import pandas
    import torch

    loaded = load(run, data=data, accept_code=accept_code, run_code=run_code)
    with Federation.open(loaded.recipe.data) as federation:
        steps: dict[str, Any] = json.loads(preparation(federation, loaded.recipe.dtype))
        client = None if site is None else federation.client_number(site)
        name = None if client is None else federation.client_name(client)
        _refuse_untrained(loaded, client, name, 0 if client is None else int(federation.sizes[client]))
        targets = int(np.prod(federation.target_shape))
    if "features" not in steps or len(steps["shape"]) != 1:
        remedy = "hpcfed export writes its model and preparation"
        raise InputError("the run was not trained on tables", where=str(loaded.folder), remedy=remedy)
    columns, decimal_comma = _columns(rows, tuple(steps.get("missing_codes", ())))
    if not any(map(len, columns.values())):
        raise InputError("the table has no row to predict")
    is_csv = isinstance(rows, str | Path) and not is_parquet(Path(rows))
    x = prepared(columns, steps, name, first_row=2 if is_csv else 1, decimal_comma=decimal_comma)
    runs_recorded = run_code and loaded.recipe.model.factory is not None
    with recorded_code_of(loaded) if runs_recorded else nullcontext(), torch.no_grad():  # forward may import, too
        module = loaded.evaluated if client is None else loaded.evaluated_of(client)
        output = module(torch.tensor(x, dtype=getattr(torch, steps["dtype"]))).double()
    return pandas.DataFrame(dict(_named(output.reshape(len(x), -1), steps, targets)))


def prepared(
    columns: Mapping[str, pyarrow.Array],
    steps: Mapping[str, Any],
    site: str | None,
    *,
    first_row: int = 1,
    decimal_comma: bool = False,
) -> np.ndarray:
    """Return the model's input, (m, p) float64 for m rows and p features, from a table's `columns` by name.

    `steps` is the content of an ``.input.json``; `site` names the site whose scaling is used, None if all share one.
    Messages count rows from `first_row`: a CSV's header is row 1, as in a spreadsheet. With `decimal_comma`, 1,5 is a
    number.

    Raises:
        InputError: a column is missing; a cell is not a number, or beyond the model's dtype, may have a point for
            thousands among decimal commas, has an unknown level, or is missing without a fill value; or features are
            scaled by site and `site` is None.
    """
    features = steps["features"]
    categories: Mapping[str, list[str]] = steps.get("categories", {})
    hot = {f"{name}={level}": (name, level) for name, known in categories.items() for level in known}
    needed = list(dict.fromkeys(hot[name][0] if name in hot else name for name in features))
    if absent := [name for name in needed if name not in columns]:
        remedy = did_you_mean(absent[0], [name for name in columns if name not in needed])
        raise InputError(f"the table lacks {counted(len(absent), 'column')}: {first_of(absent, 4)}", remedy=remedy)
    largest = float(np.finfo("float64" if steps["dtype"] == "float64" else "float32").max)
    of_numbers = {name: columns[name] for name in needed if name not in categories}
    if decimal_comma:
        _refuse_thousands(of_numbers, first_row)
    numbers = {name: _numbers(name, column, largest, first_row, decimal_comma) for name, column in of_numbers.items()}
    levels = {name: _levels(name, columns[name], known, first_row, decimal_comma) for name, known in categories.items()}
    x = np.empty((len(columns[needed[0]]), len(features)))
    for k, name in enumerate(features):
        if name in hot:
            own, level = hot[name]
            x[:, k] = np.where(levels[own] == "", np.nan, levels[own] == level)
        else:
            x[:, k] = numbers[name]
    _fill(x, features, steps.get("fill") or {}, first_row)
    mean, std = _scaling(steps.get("scaling"), site)
    return (x - mean) / std


def _refuse_untrained(loaded: LoadedRun, client: int | None, site: str | None, num_samples: int) -> None:
    """Refuse to predict by private parts, or a personal model, with their initial values.

    Raises:
        InputError: `client` is None and the model has private parts; or no cohort included the client, or it has no
            training samples (`num_samples`).
    """
    if client is None and (private := private_names(loaded)):
        are = "is" if len(private) == 1 else "are"
        what = f"{counted(len(private), 'tensor')} of the model {are} each client's own"
        raise InputError(what, where=str(loaded.folder), remedy="name the rows' client by --site")
    if client is not None and (why := why_initial(loaded, client, num_samples)):
        own = "private parts are" if private_names(loaded) else "personal model is"
        what, remedy = f"--site {site}: it {why}, so that its {own} untrained", "name another client"
        raise InputError(what, where=str(loaded.folder), remedy=remedy)


def _columns(rows: Any, codes: tuple[str, ...]) -> tuple[dict[str, pyarrow.Array], bool]:
    """Return name → column of a data frame or of a table in a file, and whether 1,5 is a number there.

    Missing cells, `codes` among them, are null.
    """
    if isinstance(rows, str | Path):
        parts: dict[str, list[Any]] = {}
        decimal_comma = False
        for block in blocks(Path(rows), codes):
            decimal_comma = block.decimal_comma
            for name, values in block.columns.items():
                parts.setdefault(name, []).append(values)
        return {name: _joined(found) for name, found in parts.items()}, decimal_comma
    if not hasattr(rows, "columns"):
        raise InputError("rows", expected="a data frame or a table's file", got=type(rows).__name__)
    return {str(name): plain(_array(rows[name]), codes) for name in rows.columns}, False


def _joined(parts: list[Any]) -> Any:
    import pyarrow

    kinds = {part.type for part in parts}
    if len(kinds) > 1 or pyarrow.null() in kinds:
        parts = [part.cast(pyarrow.string()) for part in parts]
    return pyarrow.chunked_array(parts).combine_chunks()


def _array(values: Any) -> Any:
    import pyarrow

    found = pyarrow.array(values.astype(object) if hasattr(values.dtype, "categories") else values, from_pandas=True)
    found = found.combine_chunks() if isinstance(found, pyarrow.ChunkedArray) else found
    return found.cast(pyarrow.string()) if pyarrow.types.is_null(found.type) else found


def _refuse_thousands(columns: Mapping[str, Any], first_row: int) -> None:
    """Refuse 1.234 among numbers with decimal commas, as `hpcfed prepare` does: it may be 1234."""
    import pyarrow.compute as pc

    def first(pattern: str) -> Iterator[tuple[str, int]]:
        for name, values in columns.items():
            row = pc.index(pc.match_substring_regex(values, f"^({pattern})$"), True).as_py()
            if row >= 0:
                yield name, row

    point = next(first(cells.THOUSANDS.pattern), None)
    if point is not None and any(first(cells.DECIMAL_COMMA.pattern)):
        name, row = point
        what = f"row {first_row + row}, column {name!r}: {columns[name][row]}: thousands or a fraction?"
        raise InputError(
            f"{what} Other cells have decimal commas", remedy="write it without the point, or with a comma"
        )


def _numbers(name: str, values: Any, largest: float, first_row: int, decimal_comma: bool) -> np.ndarray:
    try:
        found = cells.numbers(values, decimal_comma)
    except cells.NoNumber as error:
        where = f"row {first_row + error.row}, column {name!r}"
        raise InputError(where, expected="a number", got=repr(error.text)) from None
    beyond = np.abs(found) > largest
    if beyond.any():
        row = int(beyond.argmax())
        raise InputError(f"row {first_row + row}, column {name!r}", expected="a finite number", got=f"{found[row]:g}")
    return found


def _levels(name: str, values: Any, levels: list[str], first_row: int, decimal_comma: bool) -> np.ndarray:
    """Return the category level of each cell, (m,); "" for a missing cell. Equal numbers, 1 and 1.0, are one level."""
    texts, codes = cells.distinct(values)
    known = {cells.number(level, decimal_comma): level for level in levels} | {None: None}  # None: words
    found = [text if text in levels else known.get(cells.number(text, decimal_comma)) for text in texts]
    for k, text in enumerate(texts):
        if found[k] is None:
            row = first_row + int((codes == k).argmax())
            raise InputError(f"row {row}, column {name!r}", expected=first_of(levels, 8), got=repr(text))
    return np.array([*found, ""], dtype=str)[codes]


def _fill(x: np.ndarray, features: list[str], fill: Mapping[str, Any], first_row: int) -> None:
    """Replace missing cells of x, (m, p), by the values of `fill`, in place.

    Raises:
        InputError: a missing cell has no fill value, since no row of the run had one in its column.
    """
    frequent = {*fill.get("most frequent", ())}
    values: dict[str, float] = {}
    for by_feature in fill.values():
        values |= by_feature if isinstance(by_feature, Mapping) else {}
    filled_columns = {name.rpartition("=")[0] for name in frequent}
    for k, name in enumerate(features):
        gone = np.isnan(x[:, k])
        if not gone.any():
            continue
        if name in values:
            x[gone, k] = values[name]
        elif name.rpartition("=")[0] in filled_columns:
            x[gone, k] = float(name in frequent)
        else:
            what = f"row {first_row + int(gone.argmax())}, column {name.partition('=')[0]!r}: a missing cell"
            raise InputError(
                what, remedy="the run's own rows had none there that were filled; fill it, or leave the row out"
            )


def _scaling(scaling: Mapping[str, Any] | None, site: str | None) -> tuple[np.ndarray, np.ndarray]:
    if scaling is None:
        return np.zeros(1), np.ones(1)
    if "by" in scaling:
        raise InputError(
            "the run's features were scaled", got=str(scaling["by"]), remedy="its constants are not recorded"
        )
    if "sites" in scaling:
        names = [one["name"] for one in scaling["sites"]]
        if site is None:
            remedy = f"name the rows' site: {first_of(names, 6)}"
            raise InputError("the run's features are scaled by site", remedy=remedy)
        scaling = scaling["sites"][names.index(site)]
    return np.array(scaling["mean"], float), np.array(scaling["std"], float)


def _named(output: Any, steps: Mapping[str, Any], targets: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, values (m,)) of each column of predictions, from the model's outputs for m rows, (m, outputs)."""
    task, classes = steps["task"], steps.get("classes")
    if task == "regression":
        names = [one.strip() for one in str(steps.get("target", "")).split(",")]
        names = names if len(names) == output.shape[1] == targets else [f"target {k}" for k in range(output.shape[1])]
        yield from ((name, output[:, k].numpy()) for k, name in enumerate(names))
        return
    if task == "survival":
        yield "log hazard", output[:, 0].numpy()
        return
    one = output.sigmoid()
    if task == "classification" and output.shape[1] > 1:
        shares = output.softmax(1).numpy()
    elif task == "classification":
        shares = np.concatenate([1 - one.numpy(), one.numpy()], axis=1)
    else:
        shares = one.numpy()
    names = classes if classes and len(classes) == shares.shape[1] else [str(k) for k in range(shares.shape[1])]
    if task == "classification":
        yield "prediction", np.array(names, dtype=object)[shares.argmax(axis=1)]
    yield from ((f"p({name})", shares[:, k]) for k, name in enumerate(names))
