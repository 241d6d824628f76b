"""Set-up before torch is loaded: what the recipe leaves open, and every check that needs the federation alone."""

from __future__ import annotations

from hpcfed import algorithms, models, updates
from hpcfed.algorithms._compatibility import check_combination, check_parts
from hpcfed.assembly.private import committed, private, private_samples
from hpcfed.assembly.secure import check_secure
from hpcfed.client.engine_choice import refuse_tile
from hpcfed.cohort import Cohorts
from hpcfed.config.factory import own_step
from hpcfed.config.metrics import check_metrics, check_stop
from hpcfed.config.portable import check_portable
from hpcfed.config.recipe import Algorithm, Local, Recipe
from hpcfed.config.user_code.blame import own_code_named
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, placed
from hpcfed.models.images import image_shape
from hpcfed.ranks.platform import onednn
from hpcfed.run_folder.observers import check_observers
from hpcfed.types import Method
from hpcfed.updates._privacy import private_defaults


def resolve(recipe: Recipe) -> Recipe:
    """Fill in what the recipe leaves open, and check everything that needs the federation but not torch.

    Raises:
        InputError: the recipe, or a file that it names, cannot be run.
    """
    with own_code_named(), placed(recipe.where):
        return _resolve(recipe)


def _resolve(recipe: Recipe) -> Recipe:
    method = algorithms.build(recipe.algorithm, recipe.python_path)
    check_parts(method)
    spec = models.spec(recipe.model)
    recipe = private_defaults(recipe)
    asked, local = recipe, _local_work(recipe, method, couples=recipe.loss.name == "cox")
    recipe = recipe.model_copy(update={"local": local, "budget": None if method.local.full_gradient else recipe.budget})
    check_combination(recipe, method)
    chain = updates.build(recipe)
    check_observers(recipe.observers, recipe.python_path)
    own_step(recipe.local, recipe.python_path)
    with Federation.open(recipe.data) as federation:
        recipe = _with_numbers(recipe, federation)
        num_classes = None if federation.target_shape else federation.num_classes
        updates.check(recipe, chain, method, federation.num_clients, num_classes)
        recipe = private(recipe, chain, method, federation)
        chain = updates.build(recipe)
        if recipe.bits == "portable":
            check_portable(asked, federation.task)
            recipe = recipe.model_copy(update={"device": "cpu"})  # auto would take a GPU where there is one
        _check_samples(recipe, federation, spec)
        _check_test_set(recipe, federation)
        if federation.task == "survival" and recipe.loss.factory is None:
            recipe = recipe.model_copy(update={"local": _local_work(asked, method, couples=True)})
        check_metrics(recipe.evaluate.metrics, federation.task, federation.num_classes)
        check_stop(recipe.stop, recipe.evaluate.metrics, federation.task)
        if recipe.data_content not in (None, federation.content):
            raise InputError(
                "data_content", where=str(recipe.data), expected=recipe.data_content, got=federation.content or "none"
            )
        recipe = recipe.model_copy(update={"weights": recipe.weights or method.local.weights})
        cohorts = Cohorts(recipe, federation.sizes)  # which refuses those that cannot be drawn
        updates.check_size(recipe, chain, cohorts.fewest_members)
        check_secure(recipe, chain, method, cohorts.most_members)
        recipe = private_samples(recipe, method, federation, cohorts)
        content = federation.content or None
    model = {**recipe.model.model_dump(), **(spec.recorded() if spec else {})}
    recipe = recipe.model_copy(
        update={
            **updates.resolved(recipe, chain),
            "algorithm": _recorded_algorithm(recipe.algorithm, method),
            "model": type(recipe.model).model_validate(model),
            "evaluate": recipe.evaluate.with_final_model(method.final_model),
            "data_content": content,
        }
    )
    return committed(recipe)


def _with_numbers(recipe: Recipe, federation: Federation) -> Recipe:
    """Return the recipe with the clients of ``cohort.without`` by number, each once.

    Raises:
        InputError: there is no such client.
    """
    without = recipe.cohort.without
    if without is None:
        return recipe
    numbers: list[int | str] = [*sorted({federation.client_number(client) for client in without.clients})]
    cohort = recipe.cohort.model_copy(update={"without": without.model_copy(update={"clients": numbers})})
    return recipe.model_copy(update={"cohort": cohort})


def _recorded_algorithm(section: Algorithm, method: Method) -> Algorithm:
    """Return the recipe's ``algorithm`` with all parts and parameters of the method; a factory's keys are its own."""
    keys = {key: getattr(section, key) for key in type(section).model_fields}
    parts = algorithms.combined(section) if section.is_combination else {}
    added = section.parameters if section.factory is not None else {**parts, **method.parameters()}
    return type(section).model_validate({**keys, **added})


def _local_work(recipe: Recipe, method: Method, *, couples: bool) -> Local:
    """Return the recipe's ``local``, engine and matmul chosen where this needs no model; one full-batch step for
    methods of the full gradient.

    `couples` tells that the loss of a sample depends on others of its minibatch.

    Raises:
        InputError: the recipe has no ``local.steps``, ``local.epochs`` or ``budget``, or its engine cannot do the work.
    """
    engine, parameters = recipe.local.engine, recipe.parameters
    if recipe.local.step is not None and (parameters.keeps_private or parameters.buffers == "averaged"):
        what = f"local.step beside parameters: {parameters.given}"
        remedy = "use parameters.frozen and buffers: fixed with it, or leave local.step out"
        raise InputError(f"{what}: a step of your own trains the shared parameters alone", remedy=remedy)
    hindrances = {
        f"precision: {recipe.precision}": recipe.precision == "bf16-mixed",
        "compile: true": recipe.local.compile,
        "loss.name: cox": couples,
        "loss.weights: balanced-by-site": recipe.loss.weights == "balanced-by-site",
        f"local.step: {recipe.local.step}": recipe.local.step is not None,
        "local.noise": recipe.local.noise is not None,
    }
    why = next((why for why, is_so in hindrances.items() if is_so), "")
    if engine == "batched" and why:
        raise InputError(f"local.engine: batched with {why}", remedy="use local.engine: sequential")
    if engine == "auto" and why:
        engine = "sequential"
        refuse_tile(recipe.local, why)
    elif engine == "auto" and (recipe.bits == "portable" or recipe.local.matmul == "onednn"):
        engine = "batched"  # else assembly decides, which reads the model
    chosen = {"engine": engine, "matmul": _matmul(recipe, engine, why)}
    recipe = recipe.model_copy(update={"local": recipe.local.model_copy(update=chosen)})
    if method.local.full_gradient:
        return recipe.local.model_copy(update={"steps": 1, "epochs": None, "batch_size": "full"})
    if recipe.local.steps is None and recipe.local.epochs is None and recipe.budget is None:
        raise InputError("local", expected="'local.steps', 'local.epochs' or 'budget'", got="none of them")
    return recipe.local


def _matmul(recipe: Recipe, engine: str, why: str) -> str:
    """Return the library for the matrix products of batched clients on a CPU, ``onednn`` or ``blas``; `why` says by
    what the recipe has its clients trained one by one, "" if by ``local.engine`` itself.

    Raises:
        InputError: the recipe names ``onednn``, which cannot compute them.
    """
    hindrances = {
        why or f"local.engine: {engine}": engine == "sequential",
        f"dtype: {recipe.dtype}": recipe.dtype != "float32",
    }
    if recipe.local.matmul == "onednn" and any(hindrances.values()):
        why = next(why for why, is_so in hindrances.items() if is_so)
        raise InputError(f"local.matmul: onednn with {why}", remedy="use local.matmul: blas")
    if recipe.local.matmul != "auto":
        return recipe.local.matmul
    can = recipe.loss.factory is None and recipe.bits == "native" and not any(hindrances.values())
    return "onednn" if can and recipe.device in ("auto", "cpu") and onednn.is_faster() else "blas"


def _check_samples(recipe: Recipe, federation: Federation, spec: models.Spec | None) -> None:
    """Refuse samples that the task, the named model or the augmentation cannot take.

    Raises:
        InputError: naming which of them.
    """
    where, tokens = str(recipe.data), federation.task == "next-token"
    if tokens and federation.target_shape:
        got = f"shape {federation.target_shape} each"
        remedy = "make each position a sample, the tokens before it as x"
        raise InputError(
            "a next-token federation", where=where, expected="one target per sample", got=got, remedy=remedy
        )
    if spec is not None and spec.tokens != tokens:
        takes, remedy = ("tokens", "") if spec.tokens else ("numbers", "use model.name lstm, or a factory")
        what = f"model.name {recipe.model.name!r} takes {takes}"
        raise InputError(what, where=where, got=f"a {federation.task} federation", remedy=remedy)
    if recipe.local.augment is not None:
        image_shape(() if tokens else federation.feature_shape, "local.augment")


def _check_test_set(recipe: Recipe, federation: Federation) -> None:
    """Refuse to evaluate private parameters on a test set that belongs to no client.

    Raises:
        InputError: `evaluate.every` asks for it.
    """
    central = federation.num_test > 0 and federation.test_offsets is None
    if recipe.parameters.keeps_private and recipe.evaluate.every and central:
        raise InputError(
            "evaluate.every: a common test set has no private part",
            where=str(recipe.data),
            expected="test sets of clients, beside private parameters or buffers",
            got="one for all",
            remedy="set evaluate.every: 0 and evaluate.clients.every: 1, or prepare a test set for each client",
        )
