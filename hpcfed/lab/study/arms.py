"""The arms of a study: methods and baselines, each a recipe that is trained on every split and seed.

With K local steps, R rounds and |S| sites a round, a federated run computes R · K · |S| gradients; a site that is in
every round takes R · K steps. The baselines are plain SGD, run as FedAvg with one client a round:

    pooled        one client with all training samples; one arm takes K steps a round, a second K · |S|, for R rounds
    alone         each site by itself; one arm for each site takes K steps a round, for R rounds
    travelling    one model passed from site to site, K steps at each; one arm makes R visits, a second R · |S|

If |S| is 1, there are no second arms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfed import updates
from hpcfed.assembly import build_model, resolve
from hpcfed.config.load import load_recipe, to_plain
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.study.methods import MethodChoice

POOLED, ALONE, TRAVELLING, PERSONALISED, ENSEMBLE = BASELINES = (
    "pooled",
    "alone",
    "travelling",
    "personalised",
    "ensemble",
)
FEDERATED = "federated"
OF_THE_WAY = (*updates.LISTS, "secure_aggregation", "secret_seed", "secret_commitment")
"""Recipe keys that transform or protect updates, their means or the model sent; baselines have none of them."""
POINTS = 20
"""Least number of evaluations of a run with at least so many rounds."""
Content = dict[str, Any]


@dataclass(frozen=True)
class TrainingAmount:
    """The amount of training in a federated run: K local steps in each of R rounds, at |S| sites a round.

    Attributes:
        steps: K in each of J splits, (J,); with ``local.epochs`` it depends on the sizes of the split's training sets.
        rounds: R, the number of rounds.
        sites: |S|, the number of sites in a round.
    """

    steps: tuple[int, ...]
    rounds: int
    sites: int

    @property
    def every(self) -> int:
        """Rounds between two evaluations of a federated run."""
        return max(1, self.rounds // POINTS)

    def in_text(self, factor: int = 1) -> str:
        """Return `factor` · K as text: ``1,000``, or ``900 to 1,000`` if K differs between splits."""
        low, high = (f"{steps * factor:,}" for steps in (min(self.steps), max(self.steps)))
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Arm:
    """One arm of a study: a recipe that is trained on each split and seed.

    Attributes:
        key: the arm's name in file names.
        title: the arm's name in tables.
        kind: ``federated``, ``pooled``, ``alone`` or ``travelling``.
        steps: gradient steps of one run, as text.
        rounds: rounds of one run.
        overrides: the method's overrides of the study's recipe, ``key=value``, then those that set tuned values.
        site: index of the site that trains alone; None for other kinds.
        factor: |S| for a baseline that takes as many steps as all |S| sites of a round together; else 1.
        tunes: whether the model is fine-tuned at each site as well, for the baseline ``personalised``.
        personal: whether each site trains a personal model beside the common one.
    """

    key: str
    title: str
    kind: str
    steps: str
    rounds: int
    overrides: tuple[str, ...] = ()
    site: int | None = None
    factor: int = 1
    tunes: bool = False
    personal: bool = False

    @property
    def pools(self) -> bool:
        """Whether the arm trains on the pooled file, in which one client has all training samples."""
        return self.kind == POOLED


def training_amount(recipe: Recipe, sizes: Sequence[np.ndarray]) -> TrainingAmount:
    """Return the amount of training that a recipe sets.

    `sizes` has one array per split: the number of training samples of each site that trains. With ``local.epochs``, the
    local steps are those of a site of mean size.

    Raises:
        InputError: the recipe has a schedule of cohorts, leaves clients out, or stops early by scores or time.
    """
    if recipe.cohort.without is not None:
        remedy = (
            "leave it out; --kind leave-one-site-out, or a federation file without the site, does that for every arm"
        )
        raise InputError("cohort.without in a study", expected="none: all sites train every arm", remedy=remedy)
    if recipe.cohort.schedule is not None:
        raise InputError(
            "cohort.schedule in a study", expected="a size or fraction of the sites", remedy="leave it out"
        )
    if recipe.stop.by_scores or recipe.stop.max_hours is not None:
        what = "stop in a study: runs of other lengths are no fair comparison"
        raise InputError(what, remedy="leave it out, or override it: stop={}")
    steps = tuple(_steps(recipe, float(of_split.mean())) for of_split in sizes)
    return TrainingAmount(steps, recipe.rounds, recipe.cohort.size_in(len(sizes[0])) or len(sizes[0]))


def _steps(recipe: Recipe, size: float) -> int:
    """Return the local steps of a site with `size` training samples; the largest number if drawn, 1 if scheduled."""
    local = recipe.local
    batch = size if local.batch_size == "full" else float(local.batch_size)
    if steps := local.steps or (local.epochs or 0) * math.ceil(size / batch):
        return steps
    return recipe.budget.high if recipe.budget is not None and recipe.budget.high else 1


def make_arms(
    methods: Sequence[MethodChoice],
    reference: str,
    baselines: Sequence[str],
    sites: Sequence[str],
    amount: TrainingAmount,
) -> list[Arm]:
    """Return the arms to train: the `methods`, then pooled, travelling and each of the `sites` alone, if chosen.

    `baselines` names the chosen baselines. Two of them have no arms: ``personalised`` fine-tunes the models of the
    method with key `reference`, and ``ensemble`` uses the models of the sites alone, which are then trained.
    """
    one, whole, rounds = amount.in_text(amount.rounds), amount.in_text(amount.rounds * amount.sites), amount.rounds
    federated, tuned = f"{one} at each of {amount.sites} sites", PERSONALISED in baselines
    arms = [
        Arm(each.key, each.title, FEDERATED, federated, rounds, each.overrides,
            tunes=tuned and each.key == reference, personal=each.personal)
        for each in methods
    ]  # fmt: skip
    factors = (1, amount.sites) if amount.sites > 1 else (1,)
    for kind in (kind for kind in (POOLED, TRAVELLING) if kind in baselines):
        for factor, count in zip(factors, (one, whole), strict=False):
            key, title = kind if factor == 1 else f"{kind}-long", f"{kind.capitalize()}, {counted_text(count, 'step')}"
            visits = rounds if kind == POOLED else rounds * factor
            arms.append(Arm(key, title, kind, count, visits, factor=factor))
    if ALONE in baselines or ENSEMBLE in baselines:
        for k, name in enumerate(sites):
            arms.append(Arm(f"{ALONE}-{k}", f"{name} alone", ALONE, one, rounds, site=k))
    return arms


def counted_text(number: str, what: str) -> str:
    """Return ``1 step``, ``1,000 steps`` or ``9 to 12 steps``, from a number as text and a noun in the singular."""
    return f"{number} {what}{'' if number == '1' else 's'}"


def recipe_of(
    arm: Arm,
    recipe: Recipe,
    amount: TrainingAmount,
    split: int,
    shared: Content,
    clients: Sequence[int],
    run: Mapping[str, Any],
) -> Recipe:
    """Return the recipe of an arm's run on one split.

    Args:
        arm, split: the arm, and the index of the split.
        recipe, amount: the study's recipe, and the amount of a federated run's training.
        shared: the baselines' ``parameters`` section (see `shared_parameters`).
        clients: indices of the sites that train, in the order of the clients in the split's file of sites.
        run: values of the recipe's ``name``, ``seed``, ``data`` and ``output``.

    Raises:
        InputError: a key is unknown or out of range.
    """
    content = to_plain(load_recipe(to_plain(recipe), arm.overrides)) if arm.overrides else to_plain(recipe)
    of_all = arm.kind == FEDERATED
    own = _federated(content, len(clients)) if of_all else _plain(content, arm, amount.steps[split], shared, clients)
    content = {**own, **run}
    content["rounds"] = arm.rounds
    content["evaluate"] = _evaluate(content, arm, amount.every, amount.steps[split])
    return load_recipe(content)


def _federated(content: Content, count: int) -> Content:
    """Return a method's recipe; its cohort size is cut to `count`, the number of sites that train."""
    size = content["cohort"]["size"]
    return content | {"cohort": {**content["cohort"], "size": None if size is None else min(size, count)}}


def _plain(content: Content, arm: Arm, steps: int, shared: Content, clients: Sequence[int]) -> Content:
    """Return a baseline's recipe: SGD by the recipe's ``local`` section, one client a round, `steps` steps at a site.

    A pooled arm takes `arm.factor` times `steps`. The sections `OF_THE_WAY` and ``local.noise`` are removed.
    """
    turns = {POOLED: [0], TRAVELLING: list(range(len(clients)))}
    schedule = [[k] for k in turns[arm.kind]] if arm.site is None else [[list(clients).index(arm.site)]]
    cohort: Content = {"schedule": schedule}
    others = [k for k, site in enumerate(clients) if site != arm.site]
    estimates = content["loss"].get("weights") == "balanced" or content["evaluate"].get("statistics") == "training"
    if arm.site is not None and others and estimates:
        cohort["without"] = {"clients": others, "evaluate": "all"}  # estimates of its own samples, tests of all sites
    steps *= arm.factor if arm.kind == POOLED else 1
    local = {**content["local"], "noise": None, "epochs": None, "steps": steps}
    if arm.kind == TRAVELLING and arm.factor > 1:
        local |= _stretched(content["local"], arm.factor)
    return {key: value for key, value in content.items() if key not in OF_THE_WAY} | {
        "algorithm": {"name": "fedavg"},
        "budget": None,
        "guess": "none",
        "weights": None,
        "cohort": cohort,
        "local": local,
        "parameters": dict(shared),
        "evaluate": {**content["evaluate"], "model": "last"},
    }


def _stretched(local: Content, factor: int) -> Content:
    """Return ``lr_decay`` and ``lr_schedule`` for `factor` times as many rounds: the same step size after the same
    share of the rounds.
    """
    found: Content = {"lr_decay": local["lr_decay"] ** (1 / factor)}
    if local.get("lr_schedule"):
        found["lr_schedule"] = [{**entry, "round": (entry["round"] - 1) * factor + 1} for entry in local["lr_schedule"]]
    return found


def shared_parameters(recipe: Recipe) -> Content:
    """Return the recipe's ``parameters`` section with all parameters shared; private buffers become averaged ones.

    Raises:
        InputError: the model cannot be built.
    """
    roles = recipe.parameters
    if not roles.keeps_private:
        return roles.model_dump(mode="json")
    averaged = roles.buffers == "private" or (roles.buffers is None and _has_buffers(recipe))
    buffers = "averaged" if averaged else roles.buffers
    return roles.model_copy(update={"private": (), "buffers": buffers}).model_dump(mode="json")


def _has_buffers(recipe: Recipe) -> bool:
    """Return whether the recipe's module has buffers."""
    import torch

    with Federation.open(recipe.data) as federation:
        model = build_model(resolve(recipe), federation, getattr(torch, recipe.dtype), torch.device("cpu"))
    return any(True for _ in model.module.buffers())


def _evaluate(content: Content, arm: Arm, every: int, steps: int) -> Content:
    """Return an arm's ``evaluate`` section: on the sites' test sets, every `every` rounds of a federated run.

    Fine-tuning takes `steps` steps. A travelling arm is evaluated every `arm.factor` times `every` rounds.
    """
    every *= arm.factor if arm.kind == TRAVELLING else 1
    local = content["local"]
    tuning = {"steps": steps, "lr": local["lr"], "batch_size": local["batch_size"]} if arm.tunes else None
    models = ["global", *(["fine-tuned"] if arm.tunes else []), *(["personal"] if arm.personal else [])]
    clients = {"every": every, "models": models, "fine_tune": tuning}
    return {**content["evaluate"], "every": every, "train": {"every": 0}, "clients": clients}
