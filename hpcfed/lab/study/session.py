"""One call of ``hpcfed study``: write the splits, run the unfinished runs, write the results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hpcfed.errors import InputError
from hpcfed.io.output import Output
from hpcfed.io.pace import nobody
from hpcfed.lab.report.read import mixed_code
from hpcfed.lab.report.tables import Table
from hpcfed.lab.study.arms import ALONE, ENSEMBLE
from hpcfed.lab.study.folder import prepare, prepare_inner
from hpcfed.lab.study.measured import read_results
from hpcfed.lab.study.plan import SWEEP, Study
from hpcfed.lab.study.results import StudyResults
from hpcfed.lab.study.rows import rows_of
from hpcfed.lab.study.tables import differences_table, results_table
from hpcfed.lab.study.tuning import TuningResult, choose
from hpcfed.lab.study.view import View
from hpcfed.lab.study.written import replace_results
from hpcfed.lab.sweep.claims import Claims
from hpcfed.lab.sweep.failures import endings, raise_if_failed
from hpcfed.lab.sweep.plan import Plan
from hpcfed.lab.sweep.run import Redo, finished, is_decided, run_states, run_sweep, states_until_stable
from hpcfed.lab.sweep.run import prepare as prepare_sweep
from hpcfed.lab.sweep.table import code_of
from hpcfed.ranks.world import World

if TYPE_CHECKING:
    from hpcfed.lab.study.bootstrap import ResampleProgress


def run_study(
    study: Study, world: World, groups: int | None, redo: Redo, *, quiet: bool = False
) -> tuple[bool, list[str], Study]:
    """Prepare the splits, tune, and run the unfinished runs, on all ranks of the job; `groups` is as in `run_sweep`.

    Returns:
        Whether the call was stopped; remarks on filling and scaling; the study, with the values tuned, if any.

    Raises:
        InputError: the folder holds files not of the study, a recipe cannot be run, or a tuning run was refused.
        EnvironmentFailure: the disk is full or failed, or a tuning run failed.
    """
    say = nobody if quiet else partial(print, file=Output(sys.stdout), flush=True)
    remarks = world.on_root(lambda: prepare(study, fresh=redo.fresh, say=say))
    if study.tuning is not None:
        inner = world.on_root(study.inner)
        if inner.arms:
            world.on_root(lambda: prepare_inner(inner, fresh=redo.fresh, say=say))
            tried = world.on_root(inner.plan)
            if run_sweep(tried, world, groups, quiet=quiet, redo=redo, waits=True):
                return True, remarks, study
            world.on_root(lambda: raise_if_failed(tried, endings(tried)))
        study = world.on_root(lambda: replace(study, tuned=_tuned(study, inner)))
    plan = world.on_root(study.plan)
    return run_sweep(plan, world, groups, quiet=quiet, redo=redo), remarks, study


def next_runs(study: Study, redo: Redo) -> Plan:
    """Write the splits' files and return the plan of the runs that can start now, on rank 0 only.

    The plan has the tuning runs until all of them have ended, then the study's runs.

    Raises:
        InputError, EnvironmentFailure: as in `run_study`.
    """
    prepare(study, fresh=redo.fresh)
    if study.tuning is not None:
        inner = study.inner()
        if inner.arms:
            prepare_inner(inner, fresh=redo.fresh)
            tried = inner.plan()
            claims = Claims(tried.folder, "submit")
            prepare_sweep(tried, claims, redo)
            if not is_decided(tried, claims):
                if (redo.fresh or redo.accept_code) and (study.folder / SWEEP).exists():
                    option = "--fresh" if redo.fresh else "--accept-code"
                    expected = "none with --array while values are still tuned, since other runs have begun there"
                    remedy = "call it without --array, or choose another --output"
                    raise InputError(option, where=str(study.folder), expected=expected, remedy=remedy)
                return tried
            raise_if_failed(tried, endings(tried))
        study = replace(study, tuned=_tuned(study, inner))
    return study.plan()


def _tuned(study: Study, inner: Study) -> TuningResult:
    """Return the values chosen by the tuning runs."""
    assert study.tuning is not None
    metric = study.metrics[0]
    trainers = [study.trainers(split) for split in range(len(study.splits.each))]
    plan = inner.plan()
    runs = read_results(inner, finished(run_states(plan, Claims(plan.folder, "report")))).runs
    return choose(study.arms, study.tuning, runs, trainers, metric.name, metric.larger_is_better)


def write_study(study: Study, plan: Plan, words: Sequence[str], remarks: Sequence[str]) -> tuple[View | None, bool]:
    """Write the page and the tables of the results so far, without resampling patients, on rank 0 only.

    Returns:
        The values shown, or None if no run has finished and nothing was written; and whether all runs have ended.

    Raises:
        InputError: a run's files are damaged.
        EnvironmentFailure: the disk is full or failed.
    """
    from hpcfed.lab.study.bootstrap import single_intervals

    view, complete = None, False
    for states in states_until_stable(plan, Claims(plan.folder, "report")):
        complete = all(one.decided for one in states.values())
        results = _with_ensemble(study, read_results(study, finished(states)))
        if any(results.runs.values()):
            view = View(study, results, rows_of(study, results))
            view = replace(view, single=single_intervals(view))
            _write(view, words, remarks)
    return view, complete


def write_intervals(view: View, words: Sequence[str], remarks: Sequence[str], progress: ResampleProgress) -> View:
    """Resample patients, and write the page and the tables again, now with intervals over patients, on rank 0 only.

    Returns:
        The values shown, with the intervals.

    Raises:
        InputError: a model of the runs cannot be read.
        EnvironmentFailure: the disk is full or failed.
        Stopped: resampling has been asked to stop; the page of `write_study` remains.
    """
    from hpcfed.lab.study.bootstrap import resample

    found = resample(view, view.study.metrics, view.study.options.bootstrap, progress)
    view = replace(view, resampled=found)
    _write(view, words, remarks)
    return view


def remarks_on_code(plan: Plan) -> list[str]:
    """Return a list of one remark if the user's code differs between runs; else an empty list.

    Raises:
        InputError: a run's record of code is damaged.
    """
    mixed = mixed_code(code_of(unit.recipe) for unit in plan.units)
    return [f"runs had different code, {mixed}: numbers of one are not comparable with another's"] if mixed else []


def main_tables(view: View) -> list[Table]:
    """Return the tables of the main metric for the terminal: results, and differences if there are several rows."""
    main = view.study.metrics[0]
    apart = differences_table(view, main)
    return [results_table(view, main), *([] if apart is None else [apart])]


def _write(view: View, words: Sequence[str], remarks: Sequence[str]) -> None:
    from hpcfed.lab.study.page import write_results

    replace_results(view.study.folder, write_results(view, words, remarks))


def _with_ensemble(study: Study, results: StudyResults) -> StudyResults:
    """Return the results with an ensemble for each split and seed in which every site has a finished model."""
    from hpcfed.lab.study.ensemble import ensemble_result

    if ENSEMBLE not in study.baselines:
        return results
    alone = [arm for arm in study.arms if arm.kind == ALONE]
    found = []
    for split in range(len(study.splits.each)):
        for seed in study.seeds:
            there = sum((run.split, run.seed) == (split, seed.model) for arm in alone for run in results.runs[arm.key])
            if there == len(study.trainers(split)):
                found.append(ensemble_result(study, split, seed))
    return replace(results, runs={**results.runs, ENSEMBLE: found}) if found else results
