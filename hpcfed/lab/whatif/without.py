"""``hpcfed without``: a recorded run as it would have been if some clients had never taken part."""

from __future__ import annotations

import glob
import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hpcfed import algorithms
from hpcfed.api import Result, RunCall
from hpcfed.assembly import resolve
from hpcfed.cohort import Cohort, Cohorts, measured_in
from hpcfed.config.clients import Without
from hpcfed.config.load import dump_yaml, to_plain, validated
from hpcfed.config.recipe import LETTERS, Recipe
from hpcfed.data.federation import MAX_LISTED, Federation
from hpcfed.errors import EnvironmentFailure, first_of
from hpcfed.io.atomic import write_whole
from hpcfed.io.node import process_space, working_folder
from hpcfed.lab.whatif.common import base_of, on_common_samples
from hpcfed.provenance.beginning import begin_after
from hpcfed.provenance.recorded import RecordedRun
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World
from hpcfed.run_folder.files import RECIPE

COMPARED_FIELDS = ("clients", "shares", "counts", "steps", "guessed", "work")
"""Fields of a cohort that must equal the recorded run's; q(S) may differ, since only some methods read it."""
_HERE = blake2b(process_space().encode(), digest_size=6).hexdigest()
"""Hash of this node and process namespace, for the names of its processes' temporary folders."""
WORD, LONGEST = " without ", 80
"""Separates a run's name from its left-out clients' names; maximum length of these names, in characters."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class WithoutRequest:
    """A request to repeat a recorded run without some of its clients.

    Attributes:
        run: folder of the recorded run.
        clients: numbers or names of the clients to leave out.
        cohorts, evaluate: keys of the new recipe's ``cohort.without``; None: the recorded run's, else the default.
        output: the new run's folder; None: ``<run>-without-<clients>`` beside the recorded run's.
        data, code: present paths of the federation file and of the user's code; None if they have not moved.
    """

    run: Path
    clients: Sequence[str]
    cohorts: str | None = None
    evaluate: str | None = None
    output: Path | None = None
    data: Path | None = None
    code: Path | None = None


@dataclass(frozen=True)
class BranchPoint:
    """The round at which a run without some clients departs from the recorded run.

    Attributes:
        joined: first round whose cohort differs from the recorded one; one after the last recorded round if none does.
        first: first round that must be computed.
        why: the reason if rounds before `joined` must be computed, too; else "".
        start: last checkpointed round before `first`, from which training continues; 0: the initial model.
    """

    joined: int
    first: int
    why: str
    start: int


def run_without(request: WithoutRequest, world: World, say: Say, *, quiet: bool = False) -> Result:
    """Run a recorded recipe without some clients, on all ranks, from the first round that their absence changes.

    The output is an ordinary run folder; the same command resumes a killed run. `say` prints a line on rank 0.

    Raises:
        InputError, Diverged, EnvironmentFailure: the same on every rank.
    """
    watchdog = Watchdog(world)
    with watchdog.watching(), world.united():
        base = world.on_root(lambda: base_of(request.run, request.data, request.code))
        recipe = world.on_root(lambda: recipe_without(base, request))
        branch = world.on_root(lambda: begin(base, recipe))
        if branch is not None and world.is_root:
            for line in described(branch, base, recipe):
                say(line)
        result = RunCall(world, watchdog, quiet).run(recipe)
        for line in world.on_root(lambda: list(on_common_samples(base.recipe, base.folder, recipe))):
            if world.is_root:
                say(line)
        return result


def recipe_without(base: RecordedRun, request: WithoutRequest) -> Recipe:
    """Return the resolved recipe without the requested clients and those that the recorded run already left out.

    Raises:
        InputError: a client does not exist, no client is left, or fewer clients are left than a cohort has.
    """
    before = base.recipe.cohort.without
    asked: dict[str, Any] = {"clients": [*(before.clients if before else ()), *request.clients]}
    asked["cohorts"] = request.cohorts or (before.cohorts if before else "empty")
    asked["evaluate"] = request.evaluate or (before.evaluate if before else "others")
    cohort = {**base.recipe.cohort.model_dump(), "without": validated(Without, asked, "--client").model_dump()}
    section = validated(type(base.recipe.cohort), cohort, "--cohorts")
    recipe = resolve(base.recipe.model_copy(update={"cohort": section}))
    own, _, _ = base.recipe.name.partition(WORD)
    folder, _, _ = base.folder.name.partition("-without-")
    names = unicodedata.normalize("NFC", "-".join(_names(recipe)))
    in_path, who = (re.sub(f"[^{kept}._-]+", "-", names)[:LONGEST] for kept in ("A-Za-z0-9", f"{LETTERS} "))
    output = request.output or base.folder.with_name(f"{folder}-without-{in_path}")
    return recipe.model_copy(update={"name": f"{own}{WORD}{who}", "output": working_folder() / output})


def _names(recipe: Recipe) -> list[str]:
    assert recipe.cohort.without is not None
    with Federation.open(recipe.data) as federation:
        return [federation.client_name(k) for k in recipe.cohort.without.numbers]


def begin(base: RecordedRun, recipe: Recipe) -> BranchPoint | None:
    """Copy the recorded rounds up to `BranchPoint.start` into the new run's folder; return the branch point.

    Return None and copy nothing if the folder is not empty.

    Raises:
        EnvironmentFailure: the disk refuses.
    """
    folder = recipe.output
    _remove_remains(folder)
    if _is_filled(folder):
        return None
    branch = branch_point_of(base, recipe)
    if not branch.start:
        return branch
    new = folder.with_name(f".{folder.name}.{_HERE}.{os.getpid()}.new")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        begin_after(new, base.folder, branch.start, recipe)
        write_whole(new / RECIPE, dump_yaml(to_plain(recipe)))
        new.rename(folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        if _is_filled(folder):  # by another job meanwhile
            return None
        what = error.strerror or str(error)
        raise EnvironmentFailure("cannot be written", where=str(folder), got=what, remedy="choose --output") from None
    return branch


def _is_filled(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _remove_remains(folder: Path) -> None:
    """Remove temporary folders beside `folder`, left by processes of this node that were killed while making it."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.{_HERE}.*.new"):
        number = path.name.split(".")[-2]
        if number.isdecimal() and (int(number) == os.getpid() or not psutil.pid_exists(int(number))):
            shutil.rmtree(path, ignore_errors=True)


def branch_point_of(base: RecordedRun, recipe: Recipe) -> BranchPoint:
    """Return the round at which a run of `recipe`, without some clients, departs from the recorded run."""
    with Federation.open(base.recipe.data) as federation:
        there, here = (Cohorts(one, federation.sizes) for one in (base.recipe, recipe))
        rounds = range(1, min(len(base.rows), recipe.rounds) + 1)
        joined = next((t for t in rounds if not same(there.round(t), here.round(t))), rounds.stop)
        others = [
            *_other_evaluations(base.recipe, recipe),
            *_other_rounds(recipe, federation),
            *_other_scores(base, recipe, federation),
        ]
        first, why = min([(joined, ""), *others])
    start = max((kept for kept in base.checkpoints if kept < first), default=0)
    return BranchPoint(joined, first, why, start)


def same(there: Cohort, here: Cohort) -> bool:
    """Return whether the cohorts of two runs, `there` and `here`, are equal in all of `COMPARED_FIELDS`."""
    return all(np.array_equal(getattr(there, name), getattr(here, name)) for name in COMPARED_FIELDS)


def _other_evaluations(there: Recipe, here: Recipe) -> Iterator[tuple[int, str]]:
    """Yield (first round whose record differs, reason) for each key of ``evaluate`` that differs."""
    why, periods = "other evaluations are asked for", ("every", "train", "clients")
    for name in type(here.evaluate).model_fields:
        before, now = getattr(there.evaluate, name), getattr(here.evaluate, name)
        if before == now:
            continue
        every = [getattr(one, "every", one) for one in (before, now)] if name in periods else [1]
        yield min(here.rounds, *(period for period in every if period)), why


def _other_rounds(recipe: Recipe, federation: Federation) -> Iterator[tuple[int, str]]:
    """Yield (first round that differs, reason) for each part of a recipe that depends on clients outside the cohort."""
    method = algorithms.build(recipe.algorithm, recipe.python_path)
    if recipe.own_rules or recipe.local.step is not None:
        yield 1, "code of yours may use the number of clients"
    elif method.counts_clients:
        yield 1, f"N enters the state of {method.name} from round 1 on"
    if recipe.evaluate.model == "client-average":
        yield 1, "N enters the average of all clients' models"
    if recipe.loss.weights == "balanced":
        yield 1, "the class weights are those of the others' samples"
    if recipe.evaluate.statistics == "training":
        yield 1, "the running statistics are those of the others' samples"


def _other_scores(base: RecordedRun, here: Recipe, federation: Federation) -> Iterator[tuple[int, str]]:
    """Yield (first round that has it, reason) for each score that the two runs evaluate on different clients."""
    before, now = (measured_in(one, federation.num_clients) for one in (base.recipe, here))
    if np.array_equal(before, now):
        return
    how = "; --evaluate all measures them as the run did" if before.all() else " without some clients"
    section = here.evaluate
    scores = [
        ("the training sets are", "train_loss", section.train.every),
        ("each client is", "clients", section.clients.every),
    ]
    if federation.test_offsets is not None:
        scores.append(("the clients' test sets are", "test_loss", section.every))
    for what, column, every in scores:
        if every:
            recorded = (t for t, row in enumerate(base.rows, start=1) if row.get(column) is not None)
            yield min(every, here.rounds, *islice(recorded, 1)), f"{what} evaluated there{how}"


def described(branch: BranchPoint, base: RecordedRun, recipe: Recipe) -> Iterator[str]:
    """Yield lines to print: the first round that differs, and the rounds to be computed."""
    total, who = recipe.rounds, first_of(_names(recipe), MAX_LISTED)
    if branch.joined <= len(base.rows):
        yield f"the first round that is another without {who}: {branch.joined}"
    else:
        yield f"no recorded round is another without {who}"
    if branch.first < branch.joined:
        yield f"computed from round {branch.first} on: {branch.why}"
    from_where = f"from the state of round {branch.start}" if branch.start else "from w⁰"
    needed = max(total - branch.joined + 1, 0)
    at_most = "up to " if recipe.stop.by_scores else ""
    yield f"rounds computed: {at_most}{total - branch.start} of {total}, {from_where}; needed: {at_most}{needed}"
