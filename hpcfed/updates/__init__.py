"""Parts of a recipe's lists ``updates``, ``means`` and ``down``, one file each.

    updates: [{topk: {fraction: 0.01}}, {quantize: {bits: 8}}]      a client's vectors, in order, before the sum
    means: [median, {clip: {norm: 1.0}}]                            the means, once, before the server's step
    down: [{quantize: {bits: 8}}]                                   the model, once, before clients start from it
    updates: [{factory: "mine:Part", args: {gain: 2}}]              the user's own

A file has one or more of ``UPDATE``, ``MEANS`` and ``DOWN``, ``TITLE``, ``REFERENCES`` and ``EXAMPLE``; a new part is a
new file here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Set
from functools import cache
from typing import Any

from hpcfed.config import registry
from hpcfed.config.factory import made
from hpcfed.config.load import validated
from hpcfed.config.recipe import Recipe
from hpcfed.config.updates import ChainPart
from hpcfed.config.user_code.blame import defined_at
from hpcfed.config.user_code.interface import check_arguments, check_names
from hpcfed.errors import InputError, nearest, shown
from hpcfed.types import Method, Part
from hpcfed.updates._base import CARRIED, DELTA_ITSELF, NORMS, SUM, TWICE, MeansPart, PartContext, Sent, UpdatePart
from hpcfed.updates._chain import Chain
from hpcfed.updates._robust import ClientVectors, RobustMean
from hpcfed.updates.attack import Attack
from hpcfed.updates.clip import Clip
from hpcfed.updates.krum import Krum
from hpcfed.updates.trimmed_mean import TrimmedMean
from hpcfed.updates.weight import Weight

__all__ = [
    "Chain",
    "ClientVectors",
    "MeansPart",
    "PartContext",
    "RobustMean",
    "Sent",
    "UpdatePart",
    "build",
    "check",
    "check_size",
    "examples",
    "named",
    "references",
    "remarks",
    "resolved",
]

LISTS: Mapping[str, tuple[str, type[Part]]] = {
    "updates": ("UPDATE", UpdatePart),
    "means": ("MEANS", MeansPart),
    "down": ("DOWN", UpdatePart),
}
"""The recipe's key → its parts' name in their files, and their base."""
WORK: Mapping[type[Part], str] = {UpdatePart: "send", RobustMean: "of", MeansPart: "after"}
"""The function that a part must have, by its base."""
OF_CLIENTS = "begin_shared", "share", "trains_on"
"""What a part of ``down`` is not asked for."""
KEPT = {"updates": {NORMS, DELTA_ITSELF, CARRIED, TWICE}, "means": {NORMS, SUM, DELTA_ITSELF}, "down": {DELTA_ITSELF}}
"""What parts of each list may leave untrue."""
WHY = {
    NORMS: "its step size compares mean ‖Δ_i‖² with ‖Δ̄‖², of which that part changes one and not the other; "
    "noise of each client, say, would make it up to |S|/2 times too large",
    SUM: "its state adds up what clients sent, which the means then are not",
    CARRIED: "what is lost on the way comes again from its clients' state, which grows without bound where that is "
    "more than was there",
    TWICE: "what is lost on the way comes again from its clients' state, twice as large",
}
"""What a method reads → why a part that does not keep it has no place in front of it."""


@cache
def named(key: str) -> Mapping[str, type[Part]]:
    """The built-in parts of a list by name."""
    kinds = {name: getattr(registry.entry(__name__, name), LISTS[key][0], None) for name in registry.names(__name__)}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def examples(key: str) -> Mapping[str, Mapping[str, Any]]:
    """Parameters of each part of a list away from those that change nothing: each file's ``EXAMPLE``."""
    return {name: registry.entry(__name__, name).EXAMPLE for name in named(key)}


def references() -> Mapping[str, tuple[str, ...]]:
    """Keys of parts' papers in ``hpcfed/lab/cite/references.bib``: each file's ``REFERENCES``."""
    return {name: registry.entry(__name__, name).REFERENCES for key in LISTS for name in named(key)}


def build(recipe: Recipe) -> Chain:
    """Build the parts of a recipe's lists.

    Raises:
        InputError: unknown part or parameter, value out of range, a factory that fails, an order without a packed form.
    """
    lists: Any = [tuple(_built(key, getattr(recipe, key), recipe)) for key in LISTS]
    chain = Chain(*lists)
    for place, part in enumerate(chain.means):
        if part.replaces_mean and place:
            what = f"means.{place}: {recipe.means[place].name or recipe.means[place].factory} takes the mean's place"
            raise InputError(what, remedy="put it first, once")
    chain.codings((1000,), 32)
    chain.codings_down((1000,), 32)
    for place, packs in enumerate(chain.down):
        if packs.stateful:
            what = f"down.{place}: {type(packs).__name__} keeps a state, and the model is packed without one"
            raise InputError(what, remedy="let it say stateful = False")
        kind = type(packs)
        unused = [name for name in OF_CLIENTS if getattr(kind, name, None) is not getattr(UpdatePart, name)]
        if unused := [*(["scalars"] if packs.scalars else []), *unused]:
            what = f"down.{place}: {kind.__name__} has {unused[0]}, which is of clients' updates"
            raise InputError(what, remedy="give down a part that has send alone")
    return chain


def _built(key: str, sections: list[ChainPart], recipe: Recipe) -> Iterator[Part]:
    for place, section in enumerate(sections):
        at, base = f"{key}.{place}", LISTS[key][1]
        if section.factory is not None:
            part = made(section.factory, section.args, recipe.python_path, f"{at}.factory", f"check the args of {at}")
            if not isinstance(part, base):
                expected = f"a hpcfed.{base.__name__}"
                raise InputError(f"{at}.factory {section.factory!r}", expected=expected, got=type(part).__name__)
            base, work = next((base, work) for base, work in WORK.items() if isinstance(part, base))
            if getattr(type(part), work) is getattr(base, work):
                what = f"{at}.factory: {type(part).__name__} has no {work!r}"
                raise InputError(what, where=defined_at(part), remedy=f"hpcfed.{base.__name__} says what it takes")
            _check_functions(f"{at}.factory", part, base)
            yield part
            continue
        name, known = str(section.name), named(key)
        if name not in known:
            elsewhere = next((other for other in LISTS if other != key and name in named(other)), None)
            remedy = f"it is a part of {elsewhere!r}" if elsewhere else nearest(name, known)
            raise InputError(f"unknown part {name!r} in {key}", remedy=remedy)
        yield validated(known[name], section.args, "", f"{at}.{name}")


def _check_functions(at: str, part: Part, base: type[Part]) -> None:
    """Refuse functions of a user-defined part with other names or arguments than those of its base."""
    called = {name for name, found in vars(base).items() if inspect.isfunction(found)}
    check_names(f"{at}: its part, {type(part).__name__}", part, called)
    for name in sorted(called):
        check_arguments(f"{at}: {name} of {type(part).__name__}", part, name, getattr(base, name))


def resolved(recipe: Recipe, chain: Chain) -> dict[str, list[ChainPart]]:
    """Return a recipe's lists with all parameters of built-in parts."""

    def whole(section: ChainPart, part: Part) -> ChainPart:
        fields = type(part).model_fields
        unset = {key for key in part.later if getattr(part, key) == fields[key].default}
        args = {} if section.factory else part.model_dump(mode="json", exclude=unset)
        return section if section.factory else section.model_copy(update={"args": args})

    lists = ((key, getattr(recipe, key), getattr(chain, key)) for key in LISTS)
    return {key: [whole(*pair) for pair in zip(sections, parts, strict=True)] for key, sections, parts in lists}


def check_size(recipe: Recipe, chain: Chain, fewest: int) -> None:
    """Refuse cohorts that may be too small for a rule: it would be found in the middle of a run.

    `fewest` clients of non-zero weight are in every cohort.

    Raises:
        InputError: with the reason.
    """
    if (rule := chain.robust) is None:
        return
    what = f"means: {recipe.means[0].name or recipe.means[0].factory}"
    if not isinstance(rule.least, int):
        raise InputError(f"{what}: its least", expected="a number of clients", got=shown(rule.least))
    if rule.least <= 1:
        return
    if recipe.cohort.sampling == "bernoulli" and not fewest:
        what += " with cohort.sampling: bernoulli, whose cohorts may be too small"
        raise InputError(what, remedy="leave sampling out, or use another mean")
    rule.check_size(fewest, what)


def check(recipe: Recipe, chain: Chain, method: Method, num_clients: int, num_classes: int | None) -> None:
    """Refuse parts behind which a method would not be right, or that name clients and vectors which do not exist.

    `num_classes` is None in a federation whose samples do not have one label each.

    Raises:
        InputError: with the reason.
    """
    reported = {*method.reported(alike=False), *method.reported(alike=True)}
    for section, part in zip(recipe.updates, chain.updates, strict=True):
        if section.factory is None:
            _check_names(section.name, part, method.name, reported, num_clients, num_classes)
    weighs = any(isinstance(part, Weight) for part in chain.updates)
    if weighs and (recipe.weights or method.local.weights) == "samples":
        what = "updates: weight with weights: samples: they would count twice"
        raise InputError(what, remedy="set weights: uniform")
    for key in LISTS:
        for section, part in zip(getattr(recipe, key), getattr(chain, key), strict=True):
            what, lost = f"{key}: {section.name or section.factory}", KEPT[key] - part.keeps
            if lost & {NORMS, SUM} and (silent := _undeclared(method)) is not None:
                raise InputError(
                    f"{what} with {method.name}: its {type(silent).__name__} does not say what it reads",
                    where=defined_at(silent),
                    remedy=f"give it reads = frozenset(), or of {NORMS!r} and {SUM!r} (docs/updates.md)",
                )
            if section.factory is not None:
                lost -= {CARRIED, TWICE}  # told by `remarks`
            for fact in sorted(lost & method.reads):
                remedy = f"use another method, such as fedavg, or a part that keeps {fact!r}"
                raise InputError(f"{what} with {method.name} has no meaning: {WHY[fact]}", remedy=remedy)
            if DELTA_ITSELF in lost and recipe.evaluate.model == "cohort-average":
                reason = "w − Δ̄ is no average of the clients' models behind it"
                remedy = "use last or client-average"
                raise InputError(f"{what} with evaluate.model: cohort-average has no meaning: {reason}", remedy=remedy)


def _check_names(
    name: str | None, part: UpdatePart, method: str, reported: Set[str], num_clients: int, num_classes: int | None
) -> None:
    """Refuse clients, labels and vectors that a built-in part names and that do not exist."""
    for client in getattr(part, "clients", ()):
        if not 0 <= client < num_clients:
            expected = f"clients from 0 to {num_clients - 1}"
            raise InputError(f"updates: {name}.clients", expected=expected, got=str(client))
    if getattr(part, "what", None) == "labels" and num_classes is None:
        expected, remedy = "a federation with one label for each sample", "use what: own or mean"
        raise InputError("updates: attack on labels", expected=expected, remedy=remedy)
    for vector in getattr(part, "scales", ()):
        if vector not in reported:
            what = f"updates: {name}.scales: {method} reports no {vector!r}"
            raise InputError(what, remedy=nearest(vector, reported))


def remarks(recipe: Recipe, chain: Chain, method: Method, fewest: int, most_members: int) -> Iterator[str]:
    """Yield a line for each setting of a part without effect in cohorts of so many members at least and at most, for
    one by which skipped clients end the run, and for each part of the user's that does not say whether what it loses
    may be carried on."""
    if (rule := chain.robust) is not None and rule.least > 1 and recipe.on_bad_client == "skip":
        spare = fewest - rule.least
        if spare < (max(1, rule.attackers) if isinstance(rule, Krum) else 1):
            name = recipe.means[0].name or recipe.means[0].factory
            what = f"means: {name} needs {rule.least} clients of a cohort's {fewest}"
            yield f"{what}; on_bad_client: skip ends the run where it skips {f'more than {spare}' if spare else 'any'}"
    if isinstance(chain.robust, TrimmedMean) and not chain.robust.cut(most_members):
        what = f"means: trimmed-mean: fraction {chain.robust.fraction:g} of {most_members} clients"
        yield f"{what} is less than one: none is trimmed, and it is the plain mean, which holds off no attacker"
    for section, part in zip(recipe.updates, chain.updates, strict=True):
        yield from _without_effect(part)
        for fact in sorted({CARRIED, TWICE} & method.reads - part.keeps) if section.factory else ():
            what = f"updates: {section.factory} with {method.name}: {WHY[fact]}"
            yield f"{what}; if it is less, say {fact!r} in its keeps"


def _without_effect(part: UpdatePart) -> Iterator[str]:
    if isinstance(part, Attack) and not (part.clients or part.fraction):
        yield "updates: attack: no client attacks, with neither clients nor a fraction of them"
    if isinstance(part, Attack) and part.what == "labels" and part.factor != Attack().factor:
        yield f"updates: attack: factor: {part.factor:g} has no effect with what: labels"
    if isinstance(part, Clip) and part.quantile is None and part.rate != Clip(norm=1.0).rate:
        yield f"updates: clip: rate: {part.rate:g} has no effect without quantile"


def _undeclared(method: Method) -> object | None:
    """Return a server rule of the user's that leaves `reads` at the default."""
    kinds = [kind for kind in type(method.server).__mro__ if "reads" in vars(kind)]
    is_own = type(method.server).__module__.partition(".")[0] != "hpcfed"
    said = bool(kinds) and kinds[0].__module__.partition(".")[0] != "hpcfed"
    inherited = bool(kinds) and bool(method.reads)
    return method.server if is_own and not (said or inherited) else None
