"""`hpcfed.load`: a run folder as tables and modules, for notebooks and scripts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcfed.api import titled, trained_module
from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.recorded import modules_of, recorded_code
from hpcfed.errors import InputError, counted
from hpcfed.lab.frame import clients_table
from hpcfed.lab.report.read import CLIENTS, RECIPE, read_json
from hpcfed.provenance.code_of_rounds import with_references
from hpcfed.run_folder.certificate import not_kept
from hpcfed.run_folder.code import CodeRecord, references
from hpcfed.run_folder.data import present_data
from hpcfed.run_folder.files import EVALUATED, RESULT, read_mapping
from hpcfed.run_folder.outcome import recorded_status
from hpcfed.run_folder.rounds import RECORD, columns_of, no_rounds, read_rounds

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


def load(
    run: str | Path, *, data: str | Path | None = None, accept_code: bool = False, run_code: bool = False
) -> LoadedRun:
    """Open the folder of a run, finished or still going: the recipe is read now, all else at first use.

    Args:
        run: the folder.
        data: present path of the run's federation file; None if it has not moved.
        accept_code: whether modules may be built by code that has changed since the run.
        run_code: whether user-defined models are built by running the code recorded in the run folder.

    Raises:
        InputError: `run` is not the folder of a run, or its recipe is invalid.
    """
    folder = Path(run).resolve()
    if not (folder / RECIPE).is_file():
        raise InputError("not a run folder", where=str(folder), remedy="name the output folder of a run")
    recipe = load_recipe(folder / RECIPE)
    place = present_data(recipe, folder) if data is None else Path(data).resolve()
    return LoadedRun(recipe.model_copy(update={"output": folder, "data": place}), accept_code, run_code)


@dataclass(frozen=True)
class LoadedRun:
    """The content of a run folder; each part is read at first use. `accept_code`, `run_code`: as in `load`."""

    recipe: Recipe
    accept_code: bool = False
    run_code: bool = False

    def __str__(self) -> str:
        """Return two lines: the run and the rounds that its recipe asks for, and its folder."""
        return f"{titled(self.recipe)}, {counted(self.recipe.rounds, 'round')}\n{self.folder}"

    __repr__ = __str__  # a notebook shows it

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.recipe.output

    @property
    def status(self) -> str:
        """How the run ended: ``finished``, ``stopped``, ``diverged`` or ``failed``; ``unfinished`` if it has not ended.

        ``finished`` is determined from the record and the recipe; the others are read from ``result.json``.

        Raises:
            InputError: the record is damaged.
        """
        record = self.folder / RECORD
        return recorded_status(self.folder, self.recipe, read_rounds(record) if record.exists() else [])

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """``environment.json``: machine, libraries and all else that decides a run's exact bits; empty if missing."""
        return read_json(self.folder / "environment.json")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The record ``metrics.jsonl`` as a table, one row per round; nested objects become dotted columns, such as
        ``seconds.local`` and ``clients.global.test.loss.mean``.

        Raises:
            InputError: the record is damaged or has no rounds yet.
        """
        import pandas

        path = self.folder / RECORD
        rows = read_rounds(path) if path.exists() else []
        if not rows:
            raise no_rounds(self.folder)
        table = pandas.json_normalize(rows).set_index("round")
        numeric = columns_of(rows, path)
        numbers = [name for name in table.columns if name in numeric]
        try:
            table[numbers] = table[numbers].apply(pandas.to_numeric)  # null in all rounds: nan, not None
        except (TypeError, ValueError) as error:
            expected = "numbers in the columns that have one in some round"
            raise InputError("damaged", where=str(path), expected=expected, got=str(error)) from error
        spread = {name.partition(".")[0] for name in table.columns if "." in name}
        return table.drop(columns=[name for name in spread if name in table])  # null in a round, an object in others

    @cached_property
    def clients(self) -> pd.DataFrame | None:
        """The scores in ``clients.csv``, a row per round, model, split and client; None without such a file.

        Raises:
            InputError: the file is damaged.
        """
        path = self.folder / CLIENTS
        return clients_table(path, typed=True) if path.exists() else None

    @cached_property
    def module(self) -> nn.Module:
        """The trained module on the CPU: the last iterate. Private parameters and buffers have their initial values.

        Raises:
            InputError: no model is trained yet; the federation file, which defines the shapes, is missing; or the
                model's code has changed since the run.
        """
        return self._module("model.safetensors")

    @cached_property
    def evaluated(self) -> nn.Module:
        """The module that the last evaluation measured: `module`, or the model that the recipe's ``evaluate`` names."""
        return self._module(EVALUATED) if self._has_evaluated else self.module

    @property
    def _has_evaluated(self) -> bool:
        """Whether the run evaluated a model other than `module`: the recipe asks for it, and its file exists."""
        section = self.recipe.evaluate
        return (section.model, section.statistics) != ("last", "round") and (self.folder / EVALUATED).exists()

    def evaluated_of(self, client: int | str) -> nn.Module:
        """Return the module `evaluated` with a client's private parameters and buffers, or its personal model.

        Raises:
            InputError: as for `module_of`.
        """
        return self._module(EVALUATED, client) if self._has_evaluated else self.module_of(client)

    def module_of(self, client: int | str) -> nn.Module:
        """Return the trained module with the private parameters and buffers of a client, by number or name; for methods
        with personal models, such as Ditto, the client's personal model. These are the initial ones if no cohort
        included the client.

        Raises:
            InputError: as for `module`; the federation has no such client; or a private run keeps no personal models.
        """
        return self._module("model.safetensors", client)

    def _module(self, name: str, client: int | str | None = None) -> nn.Module:
        if not (self.folder / name).exists():
            if name in not_kept(self.folder):
                remedy = f"train it again: hpcfed run {self.folder / RECIPE} output=FOLDER"
                raise InputError("a record without models", where=str(self.folder), remedy=remedy)
            if self.status in ("diverged", "failed"):
                reason = read_mapping(self.folder / RESULT).get("message")
                raise InputError(f"no trained model: {self.status}: {reason}", where=str(self.folder))
            raise InputError("no trained model yet", where=str(self.folder), remedy="let the run end")
        if self.run_code and self.recipe.model.factory is not None:
            with recorded_code_of(self) as recipe:
                return trained_module(recipe, self.folder / name, client, accept_code=True)
        if self.recipe.model.factory is not None:
            places = ", ".join(map(str, self.recipe.python_path))
            _warn_once(f"{self.folder}: the model is code, {self.recipe.model.factory}, which runs from {places}")
        return trained_module(self.recipe, self.folder / name, client, accept_code=self.accept_code)


@cache
def _warn_once(what: str) -> None:
    """Warn, at the line that called hpcfed; of several clients' modules once."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "functools"):
        frame, level = frame.f_back, level + 1
    warnings.warn(what, stacklevel=level)


@contextmanager
def recorded_code_of(loaded: LoadedRun) -> Iterator[Recipe]:
    """Make the code recorded in a run folder importable inside the block; yield the recipe with references to it."""
    version, named = CodeRecord(loaded.folder).versions()[-1], references(loaded.recipe)
    with recorded_code(modules_of(version.files, named)):
        yield with_references(loaded.recipe)
