"""Refusal of combinations of local method, normalisation, guess, optimizer and evaluated model without a meaning."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args

from hpcfed.algorithms._base import ClientRule
from hpcfed.config.recipe import Evaluate, Recipe
from hpcfed.config.user_code.blame import defined_at
from hpcfed.config.user_code.interface import check_arguments, check_names
from hpcfed.errors import InputError, shown
from hpcfed.types import DELTA, RESERVED, LocalMethod, Method, Normalization, ServerMethod

WEIGHTS = ("samples", "uniform")
FINAL_MODELS = tuple(name for name in get_args(Evaluate.model_fields["model"].annotation) if name != "auto")


def check_parts(method: Method) -> None:
    """Check that a method's parts implement their protocols.

    Raises:
        InputError: naming the part and what it lacks.
    """
    parts: list[tuple[str, object, type]] = [
        ("local", method.local, LocalMethod),
        ("server", method.server, ServerMethod),
        *([("normalize", method.normalize, Normalization)] if method.normalize is not None else []),
    ]
    for role, part, protocol in parts:
        for name in (name for name in vars(protocol) if not name.startswith("_")):
            if not hasattr(part, name):
                raise InputError(
                    f"{method.name}: its {role} part, {type(part).__name__}, has no {name!r}",
                    where=defined_at(part),
                    remedy=f"hpcfed.types.{protocol.__name__} says what it has; hpcfed.ClientRule and "
                    f"hpcfed.ServerRule may be inherited from",
                )
            what = f"{method.name}: {name} of its {role} part, {type(part).__name__}"
            check_arguments(what, part, name, getattr(protocol, name))
        called = {name for name, found in vars(protocol).items() if inspect.isfunction(found)} - {"vectors"}
        check_names(f"{method.name}: its {role} part, {type(part).__name__}", part, called)
    _check_state(method)
    _check_declared(method)
    if DELTA in (names := method.local.vectors(alike=False)) or not method.reported(alike=False):
        raise InputError(
            f"{method.name}: its vectors",
            where=defined_at(method.local, "vectors"),
            expected=f"names beside {DELTA!r}, which reports_delta says; at least one of the two",
            got=", ".join(map(repr, names)) or "none",
        )


def _check_state(method: Method) -> None:
    """Refuse a client rule with a state that it does not declare, which would be dropped.

    Raises:
        InputError: naming what it has.
    """
    local = method.local
    if not isinstance(local, ClientRule):
        return
    own = [name for name in ("begin", "next_state") if getattr(type(local), name) is not getattr(ClientRule, name)]
    name = f"{method.name}: its local part, {type(local).__name__}"
    if own and not local.stateful:
        what, remedy = f"{name}, has {' and '.join(own)} without stateful = True", "add stateful: ClassVar[bool] = True"
        raise InputError(what, where=defined_at(local, own[0]), remedy=remedy)


def _check_declared(method: Method) -> None:
    """Refuse what the local part declares in a wrong form.

    Names have an order, which those of a set have not: it is the layout of the reduction, the same on every rank.

    Raises:
        InputError: naming what the local part declares.
    """
    local = method.local
    declared: list[tuple[str, Any]] = [("scalars", local.scalars)]
    declared += [("vectors", local.vectors(alike)) for alike in (False, True)]
    for name, names in declared:
        is_names = isinstance(names, tuple | list) and all(isinstance(one, str) for one in names)
        if not (is_names and len({*names}) == len(names)):
            raise _wrongly_declared(method, "local", name, "a tuple of distinct names", shown(names))
        if taken := sorted({*names} & {*RESERVED}):
            expected = f"names other than {', '.join(RESERVED)}, which averages of models and buffers have"
            raise _wrongly_declared(method, "local", name, expected, repr(taken[0]))
    if local.weights not in WEIGHTS:
        expected = " or ".join(map(repr, WEIGHTS))
        raise _wrongly_declared(method, "local", "weights", expected, shown(local.weights))
    if method.final_model not in FINAL_MODELS:
        expected = f"a value of evaluate.model: {', '.join(FINAL_MODELS)}"
        raise _wrongly_declared(method, "server", "final_model", expected, shown(method.final_model))
    for name in ("sent", "received"):
        if not isinstance(number := getattr(local, name), int) or number < 0:
            raise _wrongly_declared(method, "local", name, "a number of vectors", shown(number))


def _wrongly_declared(
    method: Method, role: Literal["local", "server"], name: str, expected: str, got: str
) -> InputError:
    """Return the error for an attribute of a method's local or server part."""
    part = getattr(method, role)
    where = defined_at(part, name) or defined_at(part)
    return InputError(f"{method.name}: {name} of its {role} part", where=where, expected=expected, got=got)


def check_combination(recipe: Recipe, method: Method) -> None:
    """Refuse combinations that have no mathematical meaning.

    Raises:
        InputError: with the reason, and what to do instead.
    """
    for what, reason, remedy in _without_meaning(recipe, method):
        raise InputError(f"{what} has no meaning: {reason}", remedy=remedy)


def _without_meaning(recipe: Recipe, method: Method) -> Iterator[tuple[str, str, str]]:
    optimizer, guess = recipe.local.optimizer, recipe.guess
    by_optimizer = f"local.optimizer: {optimizer} with {method.name}"
    if recipe.parameters.private_first and (method.uses_effective_steps or guess != "none"):
        what = f"guess: {guess}" if guess != "none" else method.name
        reason = "it counts the steps of the shared parameters, which take only those after the first"
        yield f"parameters.private_first with {what}", reason, "leave private_first out, or use fedavg without a guess"
    if "personal" in recipe.evaluate.clients.models and not getattr(method.local, "trains_personal", False):
        what = f"evaluate.clients.models: personal with {method.name}"
        yield what, "its clients keep no model of their own", "use ditto, or last with evaluate.model: client-average"
    if method.uses_effective_steps and optimizer != "sgd":
        reason = f"{_divides(method)}, and steps of {optimizer} are no fixed combination of gradients"
        yield by_optimizer, reason, "use optimizer: sgd, with momentum if you like"
    if method.local.full_gradient and optimizer != "sgd":
        reason = "a round is one step along the full gradient, whose size that optimizer takes away"
        yield by_optimizer, reason, "use optimizer: sgd"
    if recipe.local.step is not None:
        yield from _without_meaning_by_an_own_step(recipe, method)
    if guess != "none" and method.local.full_gradient:
        reason = "one gradient a round leaves no moment to guess from"
        yield f"guess: {guess} with {method.name}", reason, "use guess: none"
    if guess != "none" and optimizer == "sgd" and recipe.local.momentum == 0:
        reason = "a guess goes on along the first moment"
        yield f"guess: {guess} without momentum", reason, "set local.momentum, say to 0.9"
    if getattr(method.local, "correction", "inside") == "after-momentum":
        yield from _without_meaning_after_momentum(recipe, method)
    weights = recipe.weights or method.local.weights
    if weights == "uniform" and getattr(method.local, "c_scale", "none") == "uniform":
        reason = "c weighs clients alike there by itself"
        yield f"c_scale: uniform with weights: uniform in {method.name}", reason, "leave c_scale out"
    if recipe.weights == "samples" and getattr(method.local, "c_scale", "none") == "samples":
        reason = "both weigh a client's part of c by its samples"
        yield f"c_scale: samples with weights: samples in {method.name}", reason, "use weights: uniform, as its authors"
    averages = recipe.evaluate.model == "cohort-average"
    if averages and (method.normalize is not None or not method.local.reports_delta):
        reason = "the clients' plain average is not reduced there"
        yield f"evaluate.model: cohort-average with {method.name}", reason, "use last or client-average"


def _divides(method: Method) -> str:
    """Return which part of a method with effective steps divides by them, in words."""
    needs = "a normalisation by steps" if method.normalize is not None else f"the local method of {method.name}"
    return f"{needs} divides by ‖a_i‖₁"


def _without_meaning_after_momentum(recipe: Recipe, method: Method) -> Iterator[tuple[str, str, str]]:
    what, remedy = f"correction: after-momentum of {method.name}", "use correction: inside"
    if recipe.guess != "none":
        yield f"{what} with guess: {recipe.guess}", "guessed steps go on along the momentum alone", remedy
    if method.normalize is not None:
        yield f"{what} with a normalisation", "it divides by ‖a_i‖₁, and the correction counts once a step", remedy


def _without_meaning_by_an_own_step(recipe: Recipe, method: Method) -> Iterator[tuple[str, str, str]]:
    step = f"local.step: {recipe.local.step}"
    if method.uses_effective_steps:
        reason = f"{_divides(method)}, and a step of your own has none"
        yield f"{step} with {method.name}", reason, "use another method, or the built-in steps"
    if method.local.full_gradient:
        reason = "its round is one step along the full gradient"
        yield f"{step} with {method.name}", reason, "use fedavg, with local.steps: 1 and local.batch_size: full"
    if method.local.evaluates_elsewhere:
        reason = "its tilt and the step would both choose where gradients are taken"
        yield f"{step} with {method.name}", reason, "let the step do it, with another method"
    if recipe.guess != "none":
        reason = "a step of your own leaves no moment to guess from"
        yield f"guess: {recipe.guess} with {step}", reason, "use guess: none"
