"""Tuning: each arm's grid of values is compared on an inner split of each split's training part.

The inner split is a holdout of the training samples by site and label, or by group. Every arm is trained at every point
of its grid on the inner training part, with the study's first seed. The split takes the point with the best mean over
sites of the main metric on the inner test part; ties go to the smaller loss, then to the first point. The loss alone
decides if the metric's direction is unknown, or if the metric is undefined at all sites. A site that trains alone is
measured on its own samples. No sample of the split's test part is in the inner files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcfed.config.hints import section_of
from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError, nearest
from hpcfed.lab.study.measures import StudyMetric
from hpcfed.lab.study.methods import OF_ALL, MethodChoice
from hpcfed.lab.study.results import GLOBAL, OWN, mean_of
from hpcfed.lab.sweep.grid import Grid, Point, parse_grid, points
from hpcfed.lab.sweep.select import tied

if TYPE_CHECKING:
    from hpcfed.lab.study.arms import Arm
    from hpcfed.lab.study.results import RunResult

OPTION = "--tune"
COMMON = ("local.", "loss.", "model.")
"""Prefixes of the recipe keys that all arms have, including baselines."""


@dataclass(frozen=True)
class Tuning:
    """The grids of ``--tune``: those `common` to all arms, and each method's `own`: method's key → grids."""

    common: tuple[Grid, ...]
    own: Mapping[str, tuple[Grid, ...]]
    examples: Mapping[str, tuple[str, ...]]
    """Method's key → its recipe keys that the user did not set, which have example values."""

    def points_of(self, arm: Arm) -> list[Point]:
        """Return the points of an arm's grid; a key that ``--methods`` sets for this arm is not varied."""
        grids = {grid.key: grid for grid in (*self.common, *self.own.get(arm.key, ()))}
        fixed = {text.partition("=")[0] for text in arm.overrides} - {*self.examples.get(arm.key, ())}
        return points([grid for key, grid in grids.items() if key not in fixed])


@dataclass(frozen=True)
class TuningCandidate:
    """One point of an arm's grid in one split, with its `value` of the main metric and its `loss`.

    Both are means over the sites with a value on the inner test part, or are the site's if it trains alone; nan if no
    site has a value, or if nothing was compared, since the grid has a single point.
    """

    arm: str
    split: int
    point: Point
    value: float
    loss: float


@dataclass(frozen=True)
class TuningResult:
    """All candidates that were compared, and `chosen`: (arm's key, split) → the chosen candidate."""

    candidates: tuple[TuningCandidate, ...]
    chosen: Mapping[tuple[str, int], TuningCandidate]

    def overrides(self, arm: str, split: int) -> tuple[str, ...]:
        """Return the recipe overrides chosen for an arm in a split; empty if nothing was tuned for it."""
        found = self.chosen.get((arm, split))
        return () if found is None else tuple(found.point.overrides)

    def by_loss(self, metric: StudyMetric) -> str:
        """Return a remark on choices made by the loss because `metric`, the main one, is undefined; "" without any."""
        compared = [one for one in self.chosen.values() if math.isfinite(one.loss)]
        unknown = sum(math.isnan(one.value) for one in compared)
        if not unknown or metric.without_direction:
            return ""
        where = f"at no site of the inner holdout in {unknown} of {len(compared)} choices of values"
        return f"{metric.title} is defined {where}: these are by loss"


def parse_tuning(texts: Sequence[str], methods: Sequence[MethodChoice]) -> Tuning | None:
    """Parse grids of ``--tune``: ``KEY=VALUES`` for all arms, ``METHOD:KEY=VALUES`` for one; None without texts.

    Raises:
        InputError: a text is not a grid; a key has two grids, cannot be tuned, or is not a key of all arms; or a method
            is not in the study.
    """
    common: list[Grid] = []
    own: dict[str, list[Grid]] = {}
    for text in texts:
        name, colon, rest = text.partition(":") if ":" in text.partition("=")[0] else ("", "", text)
        key = rest.partition("=")[0]
        if colon and "." not in key:
            rest = f"algorithm.{rest}"
        grid = parse_grid(rest, OPTION)
        if grid.key.startswith(OF_ALL):
            raise InputError(f"{grid.key!r} cannot be tuned", where=f"{OPTION} {text}", remedy="set it for all arms")
        if not colon and not grid.key.startswith(COMMON):
            meant = [f"{section}{key}" for section in COMMON if key in _keys_of(section.rstrip("."))]
            remedy = f"did you mean {meant[0]!r}?" if meant else f"name its method: {OPTION} feddyn:alpha=0.1,1"
            raise InputError(f"not every arm has {grid.key!r}", where=f"{OPTION} {text}", remedy=remedy)
        known = [method.key for method in methods if method.name == name]
        if colon and not known:
            names = [method.name for method in methods]
            raise InputError(f"no method {name!r} in the study", where=f"{OPTION} {text}", remedy=nearest(name, names))
        for lists in (own.setdefault(method, []) for method in known) if colon else (common,):
            if grid.key in [other.key for other in lists]:
                raise InputError(f"two grids of {grid.key!r}", where=OPTION, remedy="put all its values into one")
            lists.append(grid)
    if not texts:
        return None
    examples = {method.key: method.examples for method in methods}
    return Tuning(tuple(common), {name: tuple(grids) for name, grids in own.items()}, examples)


def _keys_of(name: str) -> list[str]:
    """Return the keys of the recipe's section `name`."""
    section = section_of(Recipe.model_fields[name].annotation)
    return [] if section is None else list(section.model_fields)


@contextmanager
def naming_tune() -> Iterator[None]:
    """Add ``--tune`` as the place of the error to every InputError raised in the block."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error), where=OPTION) from None


def variants(arms: Sequence[Arm], tuning: Tuning) -> list[Arm]:
    """Return each arm at each point of its grid, as an arm that is not fine-tuned; arms with one point are left out."""
    return [
        replace(arm, key=variant(arm.key, number), overrides=(*arm.overrides, *point.overrides), tunes=False)
        for arm in arms
        for found in [tuning.points_of(arm)]
        if len(found) > 1
        for number, point in enumerate(found)
    ]


def variant(arm: str, number: int) -> str:
    """Return the key of an arm at the point `number` of its grid."""
    return f"{arm}.point-{number}"


def choose(
    arms: Sequence[Arm],
    tuning: Tuning,
    runs: Mapping[str, Sequence[RunResult]],
    trainers: Sequence[Sequence[int]],
    metric: str,
    larger_is_better: bool | None,
) -> TuningResult:
    """Choose the best point of each arm in each split.

    Args:
        arms, tuning: the arms of the study, and their grids.
        runs: key of an arm at a point (see `variant`) → its finished runs.
        trainers: for each split, the sites that train.
        metric, larger_is_better: name and direction of the main metric; without a direction, the loss decides.

    Raises:
        InputError: no point of an arm has a finite loss in a split.
    """
    candidates, chosen = [], {}
    for arm in arms:
        found = tuning.points_of(arm)
        for split, sites in enumerate(trainers):
            if arm.site is not None and arm.site not in sites:
                continue
            if len(found) == 1:
                if found[0].keys:
                    chosen[arm.key, split] = TuningCandidate(arm.key, split, found[0], math.nan, math.nan)
                continue
            here = [
                _candidate(arm, split, sites, metric, point, runs[variant(arm.key, number)])
                for number, point in enumerate(found)
            ]
            trained = [one for one in here if math.isfinite(one.loss)]
            if not trained:
                what = f"no value of {', '.join(found[0].keys)} trains in split {split}"
                raise InputError(what, where=arm.title, remedy="try smaller ones")
            chosen[arm.key, split] = _best(trained, larger_is_better)
            candidates += here
    return TuningResult(tuple(candidates), chosen)


def _candidate(
    arm: Arm, split: int, sites: Sequence[int], metric: str, point: Point, runs: Sequence[RunResult]
) -> TuningCandidate:
    """Return one point's candidate from its finished `runs`; both values are nan if that of the split is not there."""
    run = next((one for one in runs if one.split == split), None)
    measured, model = sites if arm.site is None else [arm.site], OWN if arm.personal else GLOBAL
    value, loss = (
        math.nan if run is None else mean_of(run.at(model, site, name) for site in measured)
        for name in (metric, "loss")
    )
    return TuningCandidate(arm.key, split, point, value, loss)


def _best(trained: Sequence[TuningCandidate], larger_is_better: bool | None) -> TuningCandidate:
    """Return the first of the best candidates: of those tied in the metric, if it decides, by the loss."""
    known = [] if larger_is_better is None else [one for one in trained if not math.isnan(one.value)]
    if known:
        best = (max if larger_is_better else min)(one.value for one in known)
        trained = [one for one in known if tied(one.value, best)]
    return min(trained, key=lambda one: one.loss)
