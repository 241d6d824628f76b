"""`hpcfed.run`: from a recipe to a finished run folder. Imports torch only after the recipe is checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcfed.assembly import build_model, resolve
from hpcfed.config.factory import named_code
from hpcfed.config.limits import watchdog_limit
from hpcfed.config.load import given_twice, load_recipe, load_recipes
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.modules import forget, outdated
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, counted
from hpcfed.ranks.platform.collector import uncollected
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World, connect
from hpcfed.run_folder.code import CodeRecord
from hpcfed.run_folder.files import EVALUATED, INITIAL, private_file
from hpcfed.run_folder.folder import RunFolder, refuse_both
from hpcfed.run_folder.progress import Reporter
from hpcfed.run_folder.rounds import RECORD, read_rounds

if TYPE_CHECKING:
    from torch import nn


def run(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    world: World | None = None,
    quiet: bool = False,
    fresh: bool = False,
    accept_code: bool = False,
) -> Result:
    """Run a recipe, alone or on all ranks of an MPI program, and return its result.

    Args:
        source: a recipe file, or a mapping of the same keys.
        overrides: ``section.key=value`` texts.
        world: the ranks to run on; by default all that this process was started with.
        quiet: whether rank 0 prints no progress.
        fresh: whether to start anew; a run in the folder is kept under ``previous-1``, then ``-2``, ….
        accept_code: whether to go on although the user's code has changed since the run in the folder.

    Raises:
        InputError: a mistake in the recipe, its data or its code; also ``seeds``, which are for `run_seeds`.
        Diverged: a number that is not finite.
        EnvironmentFailure: the machine, e.g. a full disk.
        Stopped: a signal or ``stop.max_hours`` ended the run early, with a checkpoint; call it again to go on.

    Each of them, an `HpcfedError`, is raised on every rank.
    """
    world = world or connect()
    watchdog = Watchdog(world)
    with watchdog.watching(), world.united():
        (recipe,) = _resolved(lambda: [load_recipe(source, overrides)], world, watchdog)
        return run_resolved(recipe, world, quiet, fresh, accept_code, given_twice(overrides), watchdog)


def run_seeds(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    world: World | None = None,
    quiet: bool = False,
    fresh: bool = False,
    accept_code: bool = False,
) -> list[Result]:
    """Run a recipe once for each of its ``seeds``, one after another, as `run` does; one result a seed.

    All are checked before the first one starts.

    Args:
        source, overrides, world, quiet, fresh, accept_code: as of `run`, for every seed.

    Raises:
        HpcfedError: as in `run`; the seeds before are finished, and calling it again goes on with this one.
    """
    world = world or connect()
    watchdog = Watchdog(world)
    with watchdog.watching(), world.united():
        recipes = _resolved(lambda: load_recipes(source, overrides), world, watchdog)
        twice = given_twice(overrides)
        return [run_resolved(recipe, world, quiet, fresh, accept_code, twice, watchdog) for recipe in recipes]


def _resolved(load: Callable[[], list[Recipe]], world: World, watchdog: Watchdog) -> list[Recipe]:
    """Return resolved recipes on every rank; user modules that changed on disk are imported anew."""
    watchdog.stage("start: recipe and federation")

    def resolve_all() -> tuple[list[Recipe], list[str]]:
        recipes = load()
        old = outdated(recipes[0].python_path)
        forget(old)
        return [resolve(recipe) for recipe in recipes], old

    recipes, old = world.on_root(resolve_all)
    if not world.is_root:
        forget(old)
    return recipes


def run_resolved(
    recipe: Recipe,
    world: World,
    quiet: bool,
    fresh: bool,
    accept_code: bool,
    twice: Sequence[str],
    watchdog: Watchdog,
) -> Result:
    """Run a resolved recipe, the same on every rank; `twice` are overrides that replaced others of their key."""
    refuse_both(fresh, accept_code)
    watchdog.limit = watchdog_limit(recipe.watchdog)
    watchdog.stage("start: run folder")
    folder = RunFolder(recipe.output, fresh=fresh)
    if accept_code:
        world.on_root(lambda: folder.accept_code(recipe))
    speaks = world.is_root and not quiet
    with Reporter(recipe.name, recipe.rounds, speaks=speaks, live=world.size == 1) as reporter:
        for text in twice:
            reporter.say(f"{recipe.name}: {text.partition('=')[0]} is given more than once; the last, {text}, holds")
        finished, word = world.on_root(lambda: (folder.is_finished(recipe), folder.code_remark(recipe)))
        if word:
            reporter.say(f"{recipe.name}: {word}")
        if finished:
            reporter.say(f"{recipe.name}: finished already, see {folder.path}")
        else:
            watchdog.stage("start: imports")
            with uncollected():
                from torch import enable_grad, inference_mode

                from hpcfed.config.user_code.generators import generators_kept
                from hpcfed.loop import train

            if code := named_code(recipe):
                looked = ", ".join(map(str, recipe.python_path))
                reporter.say(f"{recipe.name}: runs the code {', '.join(code)}, from {looked} or the installed packages")

            with generators_kept(), inference_mode(False), enable_grad():
                train(recipe, folder, reporter, world, watchdog=watchdog)
            reporter.say(f"{recipe.name}: {counted(folder.rounds(), 'round')} done, see {folder.path}")
    return Result(recipe)


PRESENT = "--accept-code (accept_code=True of hpcfed.load), which builds the model by the present code"


@dataclass(frozen=True)
class Result:
    """A finished run: its resolved recipe, and the content of its folder."""

    recipe: Recipe

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.recipe.output

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The record, one mapping a round."""
        return read_rounds(self.folder / RECORD)

    @cached_property
    def module(self) -> nn.Module:
        """The trained module, the last iterate, on the CPU."""
        return trained_module(self.recipe, self.folder / "model.safetensors")

    @cached_property
    def evaluated(self) -> nn.Module:
        """The module that the record's last scores are of; `module` where ``evaluate.model`` is the last iterate."""
        weights = self.folder / EVALUATED
        return trained_module(self.recipe, weights) if weights.exists() else self.module


def trained_module(recipe: Recipe, weights: Path, client: int | None = None, *, accept_code: bool = False) -> nn.Module:
    """Build a resolved recipe's module with the parameters of a run's file, on the CPU, ready for evaluation.

    Its private parameters and buffers, if it has any, are those of a client; the initial ones without `client`, or
    where the client was never drawn. A module that is code is built by the run's code alone, unless `accept_code`.

    Raises:
        InputError: the federation, which defines the shapes, is missing, it has no such client, a file is another
            module's, or the code is not the run's.
    """
    import torch

    from hpcfed.config.user_code.generators import generators_kept

    if recipe.model.factory is not None and not accept_code:
        _check_code(recipe, weights.parent)
    trained = recipe.model_copy(update={"model": recipe.model.model_copy(update={"init": weights})})
    with Federation.open(recipe.data) as federation, generators_kept():
        if client is not None and not 0 <= client < federation.num_clients:
            raise InputError("client", expected=f"0 to {federation.num_clients - 1}", got=str(client))
        model = build_model(trained, federation, getattr(torch, recipe.dtype), torch.device("cpu"))
    own = weights.parent / (INITIAL if client is None else private_file(client))
    if model.own:
        model.load_private_file(own if own.exists() else weights.parent / INITIAL)
    return model.module.eval()


def _check_code(recipe: Recipe, folder: Path) -> None:
    """Refuse a model whose own file is another than the run's; warn where other code is.

    Raises:
        InputError: naming the file.
    """
    record, module = CodeRecord(folder), str(recipe.model.factory).partition(":")[0]
    changes = f"your code is another than this run's: {record.changes(recipe)}"
    changed = record.changed(recipe)
    if any(name == module or name.startswith(f"{module}:") for name in changed):
        raise InputError(changes, where=str(folder), remedy=f"restore it, from code.json in that folder; or {PRESENT}")
    if changed:
        warnings.warn(f"{folder}: {changes}, beside the model's file", stacklevel=5)
