"""`hpcfed.run`: from a recipe to a finished run folder. Imports torch only after the recipe is checked."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from hpcfed.algorithms import trains_personal
from hpcfed.assembly import build_model, resolve
from hpcfed.config.factory import named_code
from hpcfed.config.limits import watchdog_limit
from hpcfed.config.load import NO_KEYS, Source, given_twice, load_recipe, load_recipes
from hpcfed.config.objects import named_objects
from hpcfed.config.recipe import Recipe
from hpcfed.config.user_code.blame import own_code_named
from hpcfed.config.user_code.given import GIVEN, GivenCode, is_given
from hpcfed.config.user_code.modules import forget, outdated, run_begins
from hpcfed.config.user_code.one_thread import ONE_THREAD, other_threads
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, counted, nearest
from hpcfed.io.figure import literal
from hpcfed.io.output import Output
from hpcfed.io.pace import nobody
from hpcfed.ranks.platform.collector import uncollected
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World, connect
from hpcfed.run_folder.code import CodeRecord
from hpcfed.run_folder.data import DataOfRuns
from hpcfed.run_folder.files import EVALUATED, INITIAL, private_file, read_environment
from hpcfed.run_folder.folder import RunFolder, refuse_both
from hpcfed.run_folder.progress import Reporter
from hpcfed.run_folder.rounds import RECORD, read_rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from data_prep.from_python import GivenData
    from hpcfed.loop import Look, Round


def run(
    source: Source = NO_KEYS,
    overrides: Sequence[str] = (),
    *,
    world: World | None = None,
    quiet: bool = False,
    fresh: bool = False,
    accept_code: bool = False,
    **keys: Any,
) -> Result:
    """Run a recipe, alone or on all ranks of an MPI program, and return its result.

    A module, class or function may stand where a recipe has a name (`hpcfed.config.objects`): its source and the
    values that it uses are recorded in the run folder, by which the run is verified and replayed elsewhere. Samples may
    stand for the data: what `write_federation` takes as ``clients``, or a mapping of its arguments. Rank 0's are
    written to the run folder's ``federation/``, in a file named by its content.

    Args:
        source: a recipe file, or a mapping of the same keys.
        overrides: ``section.key=value`` texts.
        keys: sections of the recipe, each in place of the source's: ``model=net, local={"epochs": 1, "lr": 0.1}``,
            ``data={"north": (x, y), …}``, ``data={"clients": frame, "client": "hospital", "target": "ill"}``.
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
    called = _called(_one, source, overrides, keys, world, quiet=quiet, fresh=fresh, accept_code=accept_code)
    with called as (call, (recipe,)):
        return call.run(recipe)


def rounds(
    source: Source = NO_KEYS,
    overrides: Sequence[str] = (),
    *,
    world: World | None = None,
    quiet: bool = True,
    fresh: bool = False,
    accept_code: bool = False,
    with_updates: bool = False,
    **keys: Any,
) -> Iterator[Round]:
    """Run a recipe as `run` does, and yield each round, to look at; what is done with it changes nothing.

    Leaving the loop stops the run with a checkpoint, from which the same call goes on; under MPI each rank iterates,
    and where one leaves its loop, all loops end. A finished run has no round left to yield: `run` returns its result.

    Args:
        source, overrides, world, quiet, fresh, accept_code, keys: as of `run`.
        with_updates: whether each round has its clients' updates and their mean, by an Allreduce of |S| models, which
            each rank then holds.

    Raises:
        HpcfedError: as in `run`; of `with_updates`, too little memory, ``secure_aggregation``, or a method without Δ_i.
    """
    called = _called(_one, source, overrides, keys, world, quiet=quiet, fresh=fresh, accept_code=accept_code)
    made = _rounds(called, with_updates)
    _loops.add(made)
    return made


_loops: WeakSet[Generator[Round, None, None]] = WeakSet()


@atexit.register
def _leave_loops() -> None:
    """Leave the loops that a program has left open: later, imports and threads that their runs need are gone."""
    for loop in list(_loops):
        loop.close()


def _rounds(called: Called, with_updates: bool) -> Generator[Round, None, None]:
    with called as (call, (recipe,)):
        with uncollected():
            from hpcfed.loop import Left, Look

        look = Look(with_updates=with_updates)
        with suppress(Left):
            for each in call.train(recipe, look):
                try:
                    yield each
                except GeneratorExit:  # the loop was left; the run comes to its end
                    look.left = True


def run_seeds(
    source: Source = NO_KEYS,
    overrides: Sequence[str] = (),
    *,
    world: World | None = None,
    quiet: bool = False,
    fresh: bool = False,
    accept_code: bool = False,
    **keys: Any,
) -> list[Result]:
    """Run a recipe once for each of its ``seeds``, one after another, as `run` does; one result a seed.

    All are checked before the first one starts.

    Args:
        source, overrides, world, quiet, fresh, accept_code, keys: as of `run`, for every seed.

    Raises:
        HpcfedError: as in `run`; the seeds before are finished, and calling it again goes on with this one.
    """
    called = _called(load_recipes, source, overrides, keys, world, quiet=quiet, fresh=fresh, accept_code=accept_code)
    with called as (call, recipes):
        return [call.run(recipe) for recipe in recipes]


def _one(*found: Any) -> list[Recipe]:
    return [load_recipe(*found)]


@contextmanager
def _called(
    load: Callable[..., list[Recipe]],
    source: Source,
    overrides: Sequence[str],
    keys: Mapping[str, Any],
    world: World | None,
    *,
    quiet: bool,
    fresh: bool,
    accept_code: bool,
) -> Iterator[tuple[RunCall, list[Recipe]]]:
    """Yield, on every rank, a call and its resolved recipes; the code of objects in them is importable.

    Other threads' calls wait. User modules that changed on disk are imported anew. Objects are those of rank 0, where a
    text stands for them, and so are samples, whose file is removed where the block refuses a recipe before its run
    names it.
    """
    world = world or connect()
    watchdog = Watchdog(world)
    with ONE_THREAD, watchdog.watching(), world.united():
        watchdog.stage("start: recipe and federation")
        content = dict(source) if isinstance(source, Mapping) else {}
        named, given = world.together(lambda: named_objects({**content, **keys}))
        given = given.on_all_ranks(world)
        data = DataOfRuns()

        def resolve_all() -> tuple[list[Recipe], list[str]]:
            samples = _samples(named.get("data"))
            if samples is not None:
                named["data"] = data.UNWRITTEN
            recipes = load(*((named, overrides) if isinstance(source, Mapping) else (source, overrides, named)))
            recipes = [_finding(recipe, given.folders) for recipe in recipes]
            old = outdated(recipes[0].python_path)
            forget(old)
            run_begins()
            if samples is not None:
                with own_code_named():  # the samples' own
                    say = nobody if quiet else partial(print, file=Output(sys.stdout), flush=True)
                    recipes = data.written(recipes, partial(samples.write, say=say))
            return [resolve(recipe) for recipe in recipes], old

        with data.removed_if_unused():
            recipes, old = world.on_root(resolve_all)
            if not world.is_root:
                forget(old)
            yield RunCall(world, watchdog, quiet, fresh, accept_code, given_twice(overrides), given), recipes


def _samples(data: Any) -> GivenData | None:
    """Return the samples that stand for the data; None for a path."""
    if data is None or isinstance(data, str | PathLike | int | float):
        return None
    from data_prep.from_python import given_data

    return given_data(data)


def _finding(recipe: Recipe, folders: Sequence[Path]) -> Recipe:
    """Return the recipe with these folders behind those in which its code is searched."""
    further = [folder for folder in folders if folder not in recipe.python_path]
    return recipe.model_copy(update={"python_path": [*recipe.python_path, *further]}) if further else recipe


@dataclass(frozen=True)
class RunCall:
    """A call that runs recipes on all ranks, and what it was asked besides them.

    Attributes:
        world: the ranks.
        watchdog: which watches already.
        quiet, fresh, accept_code: as of `run`.
        twice: overrides that replaced others of their key.
        given: the code of objects that the call gave.
    """

    world: World
    watchdog: Watchdog
    quiet: bool = False
    fresh: bool = False
    accept_code: bool = False
    twice: Sequence[str] = ()
    given: GivenCode = field(default_factory=GivenCode)

    def run(self, recipe: Recipe) -> Result:
        """Run a resolved recipe, the same on every rank."""
        for _ in self.train(recipe):
            pass
        return Result(recipe, self.given)

    def train(self, recipe: Recipe, look: Look | None = None) -> Generator[Round, None, None]:
        """Train a resolved recipe; with `look` yield each round."""
        world, watchdog = self.world, self.watchdog
        refuse_both(self.fresh, self.accept_code)
        watchdog.limit = watchdog_limit(recipe.watchdog)
        watchdog.stage("start: run folder")
        folder = RunFolder(recipe.output, fresh=self.fresh)
        if self.accept_code:
            world.on_root(lambda: folder.accept_code(recipe))
        speaks = world.is_root and not self.quiet
        with Reporter(recipe.name, recipe.rounds, speaks=speaks, live=world.size == 1) as reporter:
            for text in self.twice:
                key, _, _ = text.partition("=")
                reporter.say(f"{recipe.name}: {key} is given more than once; the last, {text}, holds")
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
                    from hpcfed.config.user_code.settings import settings_kept
                    from hpcfed.loop import training

                if self.given.hindrance:
                    why = f"{self.given.hindrance}; verify and replay will find no code"
                    reporter.say(f"{recipe.name}: the objects given from Python cannot be recorded: {why}")
                if code := [one for one in named_code(recipe) if not is_given(one)]:
                    looked = ", ".join(map(str, recipe.python_path))
                    runs = f"runs the code {', '.join(code)}, from {looked} or the installed packages"
                    reporter.say(f"{recipe.name}: {runs}")
                with (
                    generators_kept() as own_generators,
                    settings_kept() as own_settings,
                    inference_mode(False),
                    enable_grad(),
                ):
                    for each in training(recipe, folder, reporter, world, None, watchdog, look):
                        with own_generators(), own_settings(), other_threads():
                            yield each
                reporter.say(f"{recipe.name}: {counted(folder.rounds(), 'round')} done, see {folder.path}")


Called = AbstractContextManager[tuple[RunCall, list[Recipe]]]
"""A call that has not begun, and its recipes."""

SCORES = ("test_accuracy", "test_loss", "train_accuracy", "train_loss", "local_loss")
"""Columns of the record that a result shows."""
RECORDED = "--run-code (run_code=True of hpcfed.load) takes its text from code.json"
PRESENT = "--accept-code (accept_code=True of hpcfed.load), which builds the model by the present code"


def titled(recipe: Recipe) -> str:
    """Return a run's name and method, for what Python prints of it; a user-defined method has its own name."""
    own = recipe.algorithm.factory and str(read_environment(recipe.output).get("method") or "")
    method = recipe.algorithm.name or own or recipe.algorithm.factory or "a combination of parts"
    return f"{recipe.name}: {method}"


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run: its resolved recipe, and the content of its folder."""

    recipe: Recipe
    given: GivenCode = field(default_factory=GivenCode)
    """The objects that the call gave."""

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
        return self._trained("model.safetensors")

    @cached_property
    def evaluated(self) -> nn.Module:
        """The module that the record's last scores are of; `module` where ``evaluate.model`` is the last iterate."""
        return self._trained(EVALUATED) if (self.folder / EVALUATED).exists() else self.module

    def __str__(self) -> str:
        """Return three lines: the run, its last scores, its folder."""
        rows = self.metrics
        scored = [row for row in rows if any(row.get(key) is not None for key in SCORES)]
        scores = [f"{key} {value:.4g}" for key in SCORES if scored and (value := scored[-1].get(key)) is not None]
        return "\n".join(
            [
                f"{titled(self.recipe)}, {counted(len(rows), 'round')}",
                ", ".join(scores) + f" after round {scored[-1]['round']}" if scores else "no scores",
                str(self.folder),
            ]
        )

    __repr__ = __str__  # a notebook shows it

    def plot(self, *columns: str) -> Figure:
        """Return a figure of columns of the record over the rounds; default: what was measured of the scores.

        Raises:
            InputError: the record has no such column, or no number in it.
        """
        from matplotlib.ticker import MaxNLocator

        from hpcfed.io.shown_figure import ShownFigure

        rows = self.metrics
        names = [*columns] or [key for key in SCORES if any(row.get(key) is not None for row in rows)]
        figure = ShownFigure(figsize=(4.5 * max(1, len(names)), 3.2), layout="constrained")
        for axes, name in zip(figure.subplots(1, max(1, len(names)), squeeze=False)[0], names, strict=False):
            points = [(row["round"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
            if not points:
                known = sorted({key for row in rows for key, value in row.items() if isinstance(value, int | float)})
                raise InputError(f"no numbers in column {name!r}", remedy=nearest(name, known))
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None)
            axes.set(xlabel="round", ylabel=literal(name.replace("_", " ")))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.suptitle(literal(self.recipe.name), fontsize=10)
        return figure

    def _trained(self, weights: str) -> nn.Module:
        with ONE_THREAD:
            self.given.install()  # other calls may have given other objects since
            return trained_module(self.recipe, self.folder / weights)


def trained_module(
    recipe: Recipe, weights: Path, client: int | str | None = None, *, accept_code: bool = False
) -> nn.Module:
    """Build a resolved recipe's module with the parameters of a run's file, on the CPU, ready for evaluation.

    Its private parameters and buffers, if it has any, are those of a client, by number or name; the initial ones
    without `client`, or where the client was never drawn. Of a method that trains personal models it is the client's
    own, the initial one where it was never drawn; without `client` the common one. A module that is code is built by
    the run's code alone, unless `accept_code`.

    Raises:
        InputError: the federation, which defines the shapes, is missing, it has no such client, a file is another
            module's, the code is not the run's, or the run is private and keeps no clients' models.
    """
    import torch

    from hpcfed.config.user_code.generators import generators_kept

    if recipe.model.factory is not None and not accept_code:
        _check_code(recipe, weights.parent)
    if isinstance(client, str):
        with Federation.open(recipe.data) as federation:
            client = federation.client_number(client)
    own = weights.parent / (INITIAL if client is None else private_file(client))
    personal = None if recipe.algorithm.factory is not None else trains_personal(recipe.algorithm)
    of_client = client is not None and personal is True
    if of_client and (recipe.is_private or recipe.local.noise is not None):
        raise InputError(f"client {client}: a private run keeps no clients' models", where=str(weights.parent))
    trained = recipe.model_copy(update={"model": recipe.model.model_copy(update={"init": weights})})
    if of_client and not own.exists():
        trained = recipe
    with ONE_THREAD, Federation.open(recipe.data) as federation, generators_kept():
        if client is not None and not 0 <= client < federation.num_clients:
            raise InputError("client", expected=f"0 to {federation.num_clients - 1}", got=str(client))
        model = build_model(trained, federation, getattr(torch, recipe.dtype), torch.device("cpu"))
    if own.exists() and client is not None and (model.own or personal is not False):
        model.load_private_file(own, personal=personal)
    elif model.own:
        model.load_private_file(weights.parent / INITIAL)
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
        if module == GIVEN:
            raise InputError("the model was an object of Python", where=str(folder), remedy=RECORDED)
        raise InputError(changes, where=str(folder), remedy=f"restore it, from code.json in that folder; or {PRESENT}")
    if changed:
        warnings.warn(f"{folder}: {changes}, beside the model's file", stacklevel=5)
