"""Checks across the keys of an experiment's file, before data are prepared: names, data, recipes, columns, targets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from data_prep import partition
from data_prep.catalogue import SOURCES
from data_prep.sources.files import DataSource
from data_prep.split import NATURAL, NATURAL_OPTIONS
from hpcfed import algorithms, models
from hpcfed.config.load import load_recipe
from hpcfed.config.metrics import BUILT_IN, DIRECTIONS, direction_of_column, is_matrix, is_share
from hpcfed.config.recipe import CohortSection, Recipe, Seeds
from hpcfed.errors import InputError, nearest, shown
from hpcfed.lab.report.paired import value_at
from hpcfed.lab.reproduce.experiment import AGAINST, STEPS_OF_AVERAGE, Case, Content, Data, Experiment, Goal
from hpcfed.lab.sweep.grid import parse_grids, points
from hpcfed.run_folder.rounds import COLUMNS

UNMEASURED = {
    **dict.fromkeys(("train_loss", "train_accuracy"), "set evaluate: {train: {every: 1}}"),
    **dict.fromkeys(("test_loss", "test_accuracy"), "set evaluate: {every: 1}"),
}
"""Column of an evaluation → remedy if the recipe leaves that evaluation out."""
ALWAYS = {*COLUMNS, "seconds"} - UNMEASURED.keys()
"""Columns that a record may have, independent of the recipe's evaluations."""
OF_A_METHOD = ("method.", "unit.", "clients.")
"""Prefixes of columns whose names depend on the method and the data."""
RANKED = ("rounds", "best", "published", "tuned")
"""Kinds of measure that need to know whether larger or smaller values are better."""
Need = tuple[str, str, Callable[[Recipe], bool]]
UNIFORM: Need = ("weights", "uniform", lambda recipe: recipe.weights == "uniform")
KEYS = {"full": "cases.{}", "small": "small", "images": "small.images"}
"""Scale → key of the section with a case's data and targets."""
BUDGETS: Sequence[Need] = [
    ("local.steps", "the steps that are asked for", lambda recipe: recipe.local.steps is not None),
    ("local.momentum", "above 0", lambda recipe: recipe.local.momentum > 0),
    ("budget", "'low' and 'high'", lambda recipe: recipe.budget is not None and recipe.budget.high is not None),
]
WHOLE: Sequence[Need] = [
    ("local.batch_size", "full", lambda recipe: recipe.local.batch_size == "full"),
    ("local.steps", "a number", lambda recipe: recipe.local.steps is not None),
    ("model.name", "linear", lambda recipe: recipe.model.name == "linear"),
    ("cohort", "all clients", lambda recipe: recipe.cohort == CohortSection()),
    UNIFORM,
]
NEEDS: Mapping[str, Sequence[Need]] = {
    "coefficients": BUDGETS,
    "dynamics": [
        ("algorithm.name", "feddyn", lambda recipe: recipe.algorithm.name == "feddyn"),
        ("algorithm.alpha", "FedDyn's α", lambda recipe: "alpha" in recipe.algorithm.parameters),
        ("model.name", "linear", lambda recipe: recipe.model.name == "linear"),
        UNIFORM,
    ],
    "bounds": [
        ("algorithm.name", "fedexp", lambda recipe: recipe.algorithm.name == "fedexp"),
        *WHOLE,
    ],
    "surrogate": [
        ("algorithm.name", "fedavg", lambda recipe: recipe.algorithm.name == "fedavg"),
        *BUDGETS,
        *WHOLE,
    ],
    "projections": [
        ("model.name", "linear or quadratic", lambda recipe: recipe.model.name in ("linear", "quadratic")),
        ("evaluate.every", "1", lambda recipe: recipe.evaluate.every == 1),
        UNIFORM,
    ],
}
"""Kind of measure → its requirements on every recipe: key, expected value in words, and a test of a recipe."""


def check(experiment: Experiment, where: str) -> None:
    """Check that the keys of an experiment, at full scale, contradict each other neither there nor in a small variant.

    Raises:
        InputError: they do; with the file's path `where`, the key, the expected and the actual value.
    """
    try:
        _check_names(experiment)
        for scale, variant in variants(experiment).items():
            _check_variant(variant, scale)
    except InputError as error:
        raise InputError(str(error), where=where) from None


def variants(experiment: Experiment) -> dict[str, Experiment]:
    """Return scale → experiment for the experiment's scales: ``full``, ``small``, and ``images`` (small, on images)."""
    found = {"full": experiment}
    if experiment.small is not None:
        found["small"] = experiment.at("small")
        if experiment.small.images is not None:
            found["images"] = experiment.at("small", images=True)
    return found


def _check_names(experiment: Experiment) -> None:
    if not experiment.cases:
        raise InputError("cases", expected="at least one", got="none")
    if experiment.measure.kind != "classes" and not experiment.methods:
        raise InputError("methods", expected="at least one", got="none")
    for key, entries in (("cases", experiment.cases), ("methods", experiment.methods)):
        titles = [entry.title for entry in entries.values()]
        if twice := next((title for title in titles if titles.count(title) > 1), None):
            raise InputError(key, expected="a title for each", got=f"{shown(twice)} twice")
    for key, what, name, known in _named(experiment):
        if name not in known:
            raise InputError(key, expected=what, got=repr(name), remedy=nearest(name, known))


def _named(experiment: Experiment) -> Iterator[tuple[str, str, str, Collection[str]]]:
    """Yield (key, ``a case`` or ``a method``, name, known names) for each mention of a case or method in the file."""
    cases, methods, small = experiment.cases, experiment.methods, experiment.small
    for item, named in experiment.shows.items():
        yield from ((f"shows.{item}", "a case", name, cases) for name in named)
    if small is not None:
        yield from (("small.cases", "a case", name, cases) for name in small.cases)
        if small.images is not None:
            yield from (("small.images.cases", "a case", name, cases) for name in small.images.cases)
    if experiment.measure.reference:
        yield "measure.reference", "a method", experiment.measure.reference, methods
    for name, entry in methods.items():
        if entry.reference:
            yield f"methods.{name}.reference", "a method", entry.reference, methods
    for name, case in cases.items():
        for key in ("methods", "grids", "only", "paper", "paper_beyond"):
            yield from ((f"cases.{name}.{key}", "a method", method, methods) for method in getattr(case, key))


def _check_variant(experiment: Experiment, scale: str) -> None:
    small, keys = f", {scale}" if scale != "full" else "", KEYS[scale]
    kind = experiment.measure.kind
    if kind == "sites" and not {"sites", "pooled"} <= experiment.cases.keys():
        raise InputError(
            "cases", expected="cases 'sites' and 'pooled' for kind: sites", got=", ".join(experiment.cases)
        )
    measured: list[Recipe] = []
    for name, case in experiment.cases.items():
        key = keys.format(name)
        _check_data(f"{key}.data", case.data)
        if kind == "projections":
            _check_minimum(f"{key}.data", case.data)
        if kind != "classes":
            recipes = {
                method: _recipe(experiment, name, method, scale, f"recipe of {method!r} in case {name!r}{small}")
                for method in experiment.methods_of(case)
            }
            measured += recipes.values()
            _check_targets(experiment, key, case, recipes)
    if experiment.trains:
        _check_columns(experiment, measured)


def _check_data(key: str, data: Data) -> None:
    if data.file:
        return
    if data.source not in SOURCES:
        expected = "a name of hpcfed prepare --list"
        raise InputError(
            f"{key}.source", expected=expected, got=repr(data.source), remedy=nearest(data.source, SOURCES)
        )
    source, scheme = SOURCES[data.source], data.partition and data.partition.lower()
    if data.raw and not source.takes("raw"):
        expected = f"none, as {data.source} is read from no files"
        raise InputError(f"{key}.raw", expected=expected, got=repr(data.raw))
    if source.takes("raw") and not data.raw:
        raise InputError(f"{key}.raw", expected="the folder of its files, inside --raw", got="none")
    if scheme is not None and scheme not in (NATURAL, *partition.SCHEMES):
        known = [NATURAL, *partition.SCHEMES]
        raise InputError(f"{key}.partition", expected="a scheme", got=repr(scheme), remedy=nearest(scheme, known))
    kinds = _options(source, scheme)
    for option, value in data.options.items():
        if option not in kinds:
            expected = f"an option of {data.source}" + (f" or partition {scheme}" if scheme else "")
            raise InputError(f"{key}.options", expected=expected, got=repr(option), remedy=nearest(option, kinds))
        try:
            TypeAdapter(kinds[option]).validate_python(value, strict=True)
        except ValidationError as error:
            expected = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise InputError(f"{key}.options.{option}", expected=expected, got=shown(value)) from None


def _options(source: DataSource, scheme: str | None) -> dict[str, Any]:
    """Return option → type, for the options that a source and a partition scheme take."""
    found = {"min_samples": int, "test_fraction": float, **get_type_hints(source.load)}
    if scheme in (None, NATURAL):
        found |= {option: bool if option == "shuffle" else int for option in NATURAL_OPTIONS}
    else:
        assign = partition.SCHEMES[scheme]
        found |= {option: get_type_hints(assign)[option] for option in partition.options(assign)}
    return {option: kind for option, kind in found.items() if option not in ("raw", "seed", "clients", "return")}


def _check_minimum(key: str, data: Data) -> None:
    if data.test in ("own", "training"):
        expected = "w* or 'solution', for kind: projections"
        raise InputError(f"{key}.test", expected=expected, got=repr(data.test))
    if data.start is None:
        raise InputError(f"{key}.start", expected="0 or weights, for kind: projections", got="none")


def _recipe(experiment: Experiment, case: str, method: str, scale: str, where: str) -> Recipe:
    """Return the recipe of a run at the first point of its grids; paths of data and output are placeholders.

    Raises:
        InputError: the recipe is invalid at the first or the last point of its grids, or does not meet `NEEDS`.
    """
    one, entry = experiment.cases[case], experiment.methods[method]
    content = experiment.recipe_of(one, method, "full" if scale == "full" else "small")
    grids = one.grids.get(method, entry.grids)
    try:
        whole = {**_with_steps(content), "name": f"{case}.{method}", "data": "data.h5", "output": "run"}
        grid = points(parse_grids([f"{key}={values}" for key, values in grids.items()]))
        recipe, _ = (load_recipe(whole, point.overrides) for point in (grid[0], grid[-1]))
        _check_seeds(experiment, one, whole)
        models.spec(recipe.model)
        if recipe.algorithm.factory is None:  # the user's code is not run yet
            algorithms.build(recipe.algorithm, [])
    except InputError as error:
        what, remedy = str(error).removeprefix("recipe: "), ""
        if what.startswith("unknown key 'recipe'") and method in one.methods:
            what, remedy = "no key 'recipe'", f"cases.{case}.methods.{method} has a recipe's keys themselves"
        raise InputError(what, where=where, remedy=remedy) from None
    for key, expected, has in NEEDS.get(experiment.measure.kind, ()):
        if not has(recipe):
            expected = f"{expected}, for kind: {experiment.measure.kind}"
            raise InputError(key, where=where, expected=expected, got=shown(value_at(recipe.model_dump(), key)))
    return recipe


def _with_steps(content: Content) -> Content:
    """Return the recipe without ``local.steps`` if its value is `STEPS_OF_AVERAGE`, which needs the prepared data.

    Raises:
        InputError: `STEPS_OF_AVERAGE` without numbers for ``local.epochs`` and ``local.batch_size``.
    """
    local = content.get("local")
    if not isinstance(local, dict) or local.get("steps") != STEPS_OF_AVERAGE:
        return content
    for key in ("epochs", "batch_size"):
        if not isinstance(local.get(key), int):
            got = shown(local.get(key))
            raise InputError(f"local.{key}", expected=f"a number, beside 'steps: {STEPS_OF_AVERAGE}'", got=got)
    return {**content, "local": {key: value for key, value in local.items() if key != "steps"}}


def _check_seeds(experiment: Experiment, case: Case, content: Content) -> None:
    """Raise an error if there are several seeds but the recipe fixes every random stream: the runs would be equal."""
    seed = content.get("seed", {})
    if experiment.seeds > 1 and case.data.seed != "run" and seed.keys() >= Seeds.model_fields.keys():
        expected = f"a stream left to the experiment's {experiment.seeds} seeds, whose runs would all be the same"
        raise InputError("seed", expected=expected, got=shown(seed), remedy="seeds=1, or leave it out")


def _check_targets(experiment: Experiment, key: str, case: Case, recipes: Mapping[str, Recipe]) -> None:
    """Check a case's targets, and the paper's numbers beside them."""
    column, kind = experiment.measure.column, experiment.measure.kind
    goals = [target for target in case.targets if isinstance(target, Goal)]
    if kind == "rounds" and not case.targets:
        raise InputError(f"{key}.targets", expected="at least one, for kind: rounds", got="none")
    for goal in goals:
        if goal.of not in recipes:
            remedy = nearest(goal.of, recipes)
            raise InputError(f"{key}.targets: of", expected="a method of the case", got=repr(goal.of), remedy=remedy)
        if goal.round > recipes[goal.of].rounds:
            expected = f"at most the {recipes[goal.of].rounds} rounds of {goal.of!r}"
            raise InputError(f"{key}.targets: round", expected=expected, got=str(goal.round))
        every = _period(column, recipes[goal.of])
        if every and goal.round % every and goal.round != recipes[goal.of].rounds:
            expected = f"a round that is evaluated, one in {every}"
            raise InputError(f"{key}.targets: round", expected=expected, got=str(goal.round))
    values = [target for target in case.targets if not isinstance(target, Goal)]
    metric = column.partition("_")[2]
    shares = any(column in _measured(one) and is_share(metric, one.evaluate.metrics) for one in recipes.values())
    for value in (value for value in values if shares and not 0 < value <= 1):
        remedy = f"did you mean {value / 100:g}?" if 1 < value <= 100 else ""
        expected = f"{column}, a share between 0 and 1"
        raise InputError(f"{key}.targets", expected=expected, got=f"{value:g}", remedy=remedy)
    count = {"rounds": len(values or goals), "final": 1, "best": 1, "published": 2}.get(kind)
    for method, numbers in case.paper.items():
        whole = kind != "published" or all(isinstance(number, int | float) for number in numbers)
        if count is not None and not (whole and len(numbers) == count):
            words = {"rounds": "a number per target", "published": "mean and deviation"}.get(kind)
            words = f"{words or 'the final value'}, {count} in all"
            raise InputError(f"{key}.paper.{method}", expected=words, got=shown(numbers))
        if kind == "sites" and (bad := [text for text in numbers if text is not None and not _is_mean(str(text))]):
            raise InputError(f"{key}.paper.{method}", expected="texts such as '0.731 ± 0.019'", got=shown(bad[0]))


def _is_mean(text: str) -> bool:
    mean, sign, deviation = text.partition("±")
    try:
        return all(float(number) >= 0 for number in ([mean, deviation] if sign else [mean]))
    except ValueError:
        return False


def _period(column: str, recipe: Recipe) -> int:
    """Return the number of rounds between values of a column; 0 for a column that is not measured."""
    evaluate = recipe.evaluate
    return {"test": evaluate.every, "train": evaluate.train.every}.get(column.partition("_")[0], 1)


def _measured(recipe: Recipe) -> set[str]:
    """Return the columns that a run's evaluations on test and training sets record."""
    evaluate = recipe.evaluate
    names = ["loss", "accuracy", *(name for name, metric in evaluate.metrics.items() if not is_matrix(metric))]
    splits = {"test": evaluate.every, "train": evaluate.train.every}
    return {f"{split}_{name}" for split, every in splits.items() if every for name in names}


def _check_columns(experiment: Experiment, recipes: Sequence[Recipe]) -> None:
    """Raise an error if no run records a column of the measure, or if a ranked column has no known better direction."""
    measure = experiment.measure
    used = [(key, column) for key, column in (("column", measure.column), ("cells", measure.cells)) if column]
    used += [("figures", column) for entry in measure.figures for column in entry.split(AGAINST)]
    known = {*ALWAYS, *(column for recipe in recipes for column in _measured(recipe))}
    if measure.kind == "sites":  # measured on the sites' test sets after training
        known |= {f"test_{name}" for name in ("accuracy", *BUILT_IN) if not is_matrix(name)}
    for key, column in used:
        if column not in known and not column.startswith(OF_A_METHOD):
            remedy = UNMEASURED.get(column) or nearest(column, known)
            expected = "a column that a run records"
            raise InputError(f"measure.{key}", expected=expected, got=repr(column), remedy=remedy)
    if measure.kind in RANKED and any(
        direction_of_column(measure.column, recipe.evaluate.metrics) is None for recipe in recipes
    ):
        add = f"add better: {' or '.join(DIRECTIONS)} to it in evaluate.metrics"
        names = {measure.column.partition("_")[2], *measure.column.split(".")[-2:-1]}
        is_own = not measure.column.endswith(".variance") and any(
            names & one.evaluate.metrics.keys() for one in recipes
        )
        remedy = add if is_own else "name a loss, an accuracy or a metric, or one's mean over clients"
        raise InputError(f"measure.column: {measure.column!r} has no direction", remedy=remedy)
