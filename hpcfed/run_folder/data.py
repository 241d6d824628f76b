"""Federation files in ``federation/`` of a run folder, written from samples that were passed in Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError
from hpcfed.run_folder.contents import refuse_link
from hpcfed.run_folder.files import FEDERATION, RECIPE


class DataOfRuns:
    """The federation file of samples passed in one call from Python, for one run or for the runs of several seeds."""

    UNWRITTEN = Path("/samples given from Python")
    """The recipe's ``data`` until the file is written."""

    def __init__(self) -> None:
        self._new: Path | None = None
        self._folders: list[Path] = []

    def written(self, recipes: Sequence[Recipe], write: Callable[[Path, str], Path]) -> list[Recipe]:
        """Write the file; return the recipes with its path. Recipes that name another file are returned unchanged.

        Args:
            recipes: the recipes of the runs.
            write: called with a folder and a name; writes the file there and returns its path.

        Raises:
            InputError, EnvironmentFailure: `write` raised it.
        """
        if all(recipe.data != self.UNWRITTEN for recipe in recipes):  # an override named a file
            return [*recipes]
        self._folders = [recipe.output for recipe in recipes]
        folder = Path(os.path.commonpath(self._folders)) / FEDERATION
        refuse_link(folder)
        before = {*folder.glob("*")}
        path = write(folder, recipes[0].name)
        self._new = None if path in before else path
        return [recipe.model_copy(update={"data": path}) for recipe in recipes]

    @contextmanager
    def removed_if_unused(self) -> Iterator[None]:
        """If the block raises an InputError, remove the file, provided it is new and in no run's recipe."""
        try:
            yield
        except InputError:
            if self._new is not None and not any(self._is_named(folder / RECIPE) for folder in self._folders):
                with suppress(OSError):
                    self._new.unlink(missing_ok=True)
                    for folder in (self._new.parent, *self._folders, self._new.parent.parent):
                        folder.rmdir()  # where it is empty
            raise

    def _is_named(self, recipe: Path) -> bool:
        assert self._new is not None
        try:
            return self._new.name in recipe.read_text(encoding="utf-8")
        except OSError:
            return False


def present_data(recipe: Recipe, run: Path) -> Path:
    """Return the path of a run's federation file: the recipe's, if it exists.

    Else a file of that name in ``federation/`` of the run folder, or of its parent folder, which runs of several seeds
    share; else the recipe's path.
    """
    if recipe.data.exists():
        return recipe.data
    places = (place / FEDERATION / recipe.data.name for place in (run, run.parent))
    return next((own for own in places if own.is_file() and not own.is_symlink()), recipe.data)
