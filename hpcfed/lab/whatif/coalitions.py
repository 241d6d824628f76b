"""Runs of a recorded run's recipe on subsets of its clients, as a sweep over ``cohort.without``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, counted
from hpcfed.lab.sweep.claims import Claims
from hpcfed.lab.sweep.grid import Grid, Value
from hpcfed.lab.sweep.plan import Plan, Unit, make_plan
from hpcfed.lab.sweep.run import Redo, prepare, run_states, run_sweep
from hpcfed.lab.sweep.select import Rule, parse_rule
from hpcfed.lab.whatif.common import base_of
from hpcfed.lab.whatif.shapley import Orders, Subset, all_subsets, as_numbers, random_orders, subsets_of, without_one
from hpcfed.lab.whatif.without import begin, branch_point_of
from hpcfed.provenance.recorded import RecordedRun
from hpcfed.ranks.world import World
from hpcfed.run_folder.contents import refuse_link

MOST_EXACT = 6
"""Maximum number of clients for which all subsets are run."""
MOST_MEMBERS = 20_000_000
"""Maximum number of members of all subsets together, a gigabyte: 4,471 clients can be left out one by one."""
KEY = "cohort.without"


@dataclass(frozen=True)
class Contributions:
    """A request for the contributions of a recorded run's clients.

    Attributes:
        run: folder of the recorded run.
        metric: rule for the score v(S) of a model trained on subset S, as a sweep's ``--select``; None: test
            accuracy in the last round, or test loss if the recorded run has no test accuracy.
        seeds: seeds of the runs to train; empty: the recorded run's.
        permutations: number of random orders of clients to sample; 0: leave-one-out alone; None: all subsets.
        cohorts: ``cohort.without.cohorts`` of the runs, ``empty`` or ``redrawn``.
        output: the sweep's folder; None: ``<run>-contributions`` beside the run's folder.
        data, code: present paths of the federation file and of the user's code; None if they have not moved.
    """

    run: Path
    metric: str | None = None
    seeds: Sequence[int] = ()
    permutations: int | None = None
    cohorts: str = "empty"
    output: Path | None = None
    data: Path | None = None
    code: Path | None = None


@dataclass(frozen=True)
class Coalitions:
    """The subsets of a run's clients to be trained, and the plan of their runs; the same on every rank.

    Attributes:
        base: the recorded run.
        plan: the sweep, one configuration per non-empty subset, × seeds.
        subsets: the clients that train in each of the plan's configurations, in the order of the configurations.
        orders: sampled orders of the clients; None if all subsets are run, empty for leave-one-out alone.
        rule: the rule that computes the score v(S) from a run's record.
        names, sizes: the clients' names and numbers of training samples, (N,) each.
        own_tests: whether each client has its own test set.
    """

    base: RecordedRun
    plan: Plan
    subsets: tuple[Subset, ...]
    orders: Orders | None
    rule: Rule
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    own_tests: bool

    @cached_property
    def unit_of(self) -> Mapping[tuple[Subset, str], Unit]:
        """The runs by subset and seed, the seed as text."""
        return {(self.subsets[unit.point], unit.seed): unit for unit in self.plan.units}

    @property
    def seeds(self) -> list[str]:
        """The seeds of the runs as text, each once."""
        return list(dict.fromkeys(unit.seed for unit in self.plan.units))


def plan_coalitions(request: Contributions) -> Coalitions:
    """Choose the subsets, validate the recipe of each, and return the plan of their runs.

    Raises:
        InputError: too many clients for all subsets, no test set, or a recipe that cannot be run.
    """
    base = base_of(request.run, request.data, request.code)
    if base.recipe.cohort.without is not None:
        remedy = "use the run with all clients"
        raise InputError("a run without some clients", where=str(request.run), expected="one of all", remedy=remedy)
    with Federation.open(base.recipe.data) as federation:
        names, sizes = tuple(federation.client_names()), tuple(federation.sizes.tolist())
        num_test, own_tests = federation.num_test, federation.test_offsets is not None
    if not num_test:
        remedy = "prepare the federation with a test set"
        raise InputError("no test set to measure models on", where=str(base.recipe.data), remedy=remedy)
    subsets, orders = _chosen(len(names), request.permutations)
    overrides = list(_overrides(base, own_tests))
    grid = Grid(KEY, tuple(_value(len(names), subset, request.cohorts) for subset in subsets))
    folder = request.output or base.folder.with_name(f"{base.folder.name}-contributions")
    if request.output is None:  # a link that lies beside a stranger's run
        refuse_link(folder)
    plan = make_plan(base.folder / "recipe.yaml", overrides, [grid], request.seeds, folder)
    rule = _rule(request.metric, base, plan)
    return Coalitions(base, plan, tuple(subsets), orders, rule, names, sizes, own_tests)


def _chosen(num_clients: int, permutations: int | None) -> tuple[list[Subset], Orders | None]:
    """Return the nonempty subsets to run, and the sampled orders; None instead of orders if all subsets are run."""
    if num_clients < 2:
        raise InputError("contributions", expected="two clients or more", got="one")
    runs = 1 + num_clients
    if num_clients * (runs + num_clients * (permutations or 0)) > MOST_MEMBERS:
        raise InputError(
            f"contributions of {num_clients:,} clients",
            expected=f"at most {MOST_MEMBERS:,} members of all subsets together",
            got=f"{counted(runs + num_clients * (permutations or 0), 'subset')} of up to {num_clients:,}",
            remedy="sample fewer --permutations, or leave out the clients in question by `hpcfed without`",
        )
    if permutations is None and num_clients > MOST_EXACT:
        raise InputError(
            f"{num_clients} clients have 2^{num_clients} subsets",
            expected=f"at most {MOST_EXACT} clients for all of them",
            remedy=f"--permutations 10 samples orders, up to {10 * num_clients} runs a seed; --permutations 0 "
            f"leaves out one at a time, {runs} runs a seed",
        )
    if permutations is None:
        return all_subsets(num_clients)[1:], None
    orders = random_orders(num_clients, permutations)
    found = dict.fromkeys([*without_one(num_clients), *subsets_of(orders)])
    return [subset for subset in found if subset], orders


def _value(num_clients: int, subset: Subset, cohorts: str) -> Value:
    """Return the grid's value for a subset: a ``cohort.without`` that names all clients outside the subset."""
    others = frozenset(range(num_clients)) - subset
    if not others:
        return Value("null", "none")
    section = {"clients": sorted(others), "cohorts": cohorts, "evaluate": "all"}
    return Value(json.dumps(section), as_numbers(others))


def _overrides(base: RecordedRun, own_tests: bool) -> list[str]:
    """Return overrides of the run's recipe: present paths of data and code, and a final evaluation if it has none."""
    recipe = base.recipe
    found = [f"data={json.dumps(str(recipe.data))}"]
    found.append(f"python_path={json.dumps([str(path) for path in recipe.python_path])}")
    if not recipe.evaluate.every:
        found.append(f"evaluate.every={recipe.rounds}")
    if own_tests and not recipe.evaluate.clients.every:
        found.append(f"evaluate.clients.every={recipe.rounds}")
    return found


def _rule(text: str | None, base: RecordedRun, plan: Plan) -> Rule:
    """Return the rule for v(S): `text` parsed, or the default rule for None.

    Raises:
        InputError: `text` is not a rule, or its column is not a score on the test set.
    """
    if text is None:
        text = "test_loss" if base.rows[-1].get("test_accuracy") is None else "test_accuracy"
    rule = parse_rule(text, plan, "--metric")
    if not rule.column.startswith("test_"):
        raise InputError("--metric", expected="a score on the test set, such as test_accuracy", got=rule.column)
    return rule if ":last" in text else replace(rule, last=1)


def run_coalitions(coalitions: Coalitions, world: World, groups: int | None, *, quiet: bool, redo: Redo) -> bool:
    """Run the unfinished subsets on all ranks; return whether a signal or the time limit left some unfinished."""
    world.on_root(lambda: _begin_all(coalitions, redo))
    return run_sweep(coalitions.plan, world, groups, quiet=quiet, redo=redo)


def num_left(coalitions: Coalitions) -> tuple[int, int]:
    """Return the number of runs that have not ended for good, and how many of these runs other jobs hold."""
    plan = coalitions.plan
    left = [one for one in run_states(plan, Claims(plan.folder, "report")).values() if not one.decided]
    return len(left), sum(one.held for one in left)


def _begin_all(coalitions: Coalitions, redo: Redo) -> None:
    """Make the sweep's folder; give runs with the recorded run's seed the rounds they share with it. On rank 0 only."""
    plan, base = coalitions.plan, coalitions.base
    prepare(plan, Claims(plan.folder, "contributions"), redo)
    for unit in plan.units:
        if unit.recipe.seed == base.recipe.seed:
            begin(base, unit.recipe)


def rounds_of(coalitions: Coalitions) -> tuple[int, int, int]:
    """Return three sums over all runs: rounds, rounds to be computed, rounds that differ from the recorded run's."""
    base, total, computed, needed = coalitions.base, 0, 0, 0
    for unit in coalitions.plan.units:
        rounds = unit.recipe.rounds
        shares = unit.recipe.seed == base.recipe.seed
        branch = branch_point_of(base, unit.recipe) if shares else None
        total += rounds
        computed += rounds - (branch.start if branch else 0)
        needed += rounds - (branch.joined - 1 if branch else 0)
    return total, computed, needed
