"""One call of ``hpcfed reproduce``: prepare the available data, run the missing runs, write the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcfed.errors import InputError
from hpcfed.io.atomic import write_files
from hpcfed.lab.frame import as_csv
from hpcfed.lab.report.tables import Table
from hpcfed.lab.reproduce.bounds import BOUNDS
from hpcfed.lab.reproduce.classes import compare_classes
from hpcfed.lab.reproduce.coefficients import compare_coefficients
from hpcfed.lab.reproduce.dynamics import DYNAMICS
from hpcfed.lab.reproduce.experiment import Experiment
from hpcfed.lab.reproduce.figures import draw
from hpcfed.lab.reproduce.inputs import Places, is_prepared, lacking, prepare
from hpcfed.lab.reproduce.measure import left_out, read_settings
from hpcfed.lab.reproduce.plan import ExperimentLayout, folder_of, lay_out
from hpcfed.lab.reproduce.projections import compare_projections
from hpcfed.lab.reproduce.sites import check_sites, compare_sites
from hpcfed.lab.reproduce.surrogate import SURROGATE
from hpcfed.lab.reproduce.table import make_table, markdown, setting_records
from hpcfed.lab.sweep.claims import Claims
from hpcfed.lab.sweep.failures import endings, raise_if_failed
from hpcfed.lab.sweep.plan import Plan
from hpcfed.lab.sweep.run import Redo, run_sweep, states_until_stable
from hpcfed.ranks.world import World

UNRECORDED = {
    "coefficients": compare_coefficients,
    "bounds": BOUNDS.compare,
    "dynamics": DYNAMICS.compare,
    "surrogate": SURROGATE.compare,
}
"""Kind of measure that needs no recorded runs → function that makes its table and figures."""


@dataclass(frozen=True)
class ExperimentResult:
    """An experiment's results: its table, and the paths of all files written: table, settings and figures."""

    table: Table
    files: Sequence[Path]


@dataclass(frozen=True)
class ReproduceSession:
    """The settings of one call of ``hpcfed reproduce``, and its steps.

    Attributes:
        world: all ranks of the job.
        places: folders of data and runs.
        scale: ``full`` or ``small``.
        rounds, to_targets: see `lay_out`.
        methods: the methods to run, all if empty; the table shows earlier runs of all methods.
        groups: number of groups of ranks, each training one run at a time; None: as many as ranks, or as runs if fewer.
        redo: treatment of existing runs that failed, or differ from those that would run now.
    """

    world: World
    places: Places
    scale: str
    rounds: int | None = None
    to_targets: bool = False
    methods: Sequence[str] = ()
    groups: int | None = None
    redo: Redo = field(default_factory=Redo)

    def available(self, experiments: Sequence[Experiment], *, prepared: bool) -> list[Experiment]:
        """Return the experiments, each limited to cases whose data are available; print which cases lack data.

        With `prepared`, only cases whose federations have been prepared are kept. An experiment is dropped if none of
        its cases is left or, for ``kind: sites``, if one of its cases is missing.

        Raises:
            InputError: no experiment is left.
        """
        found = []
        for experiment in experiments:
            waiting = lacking(experiment, self.places)
            for case, words in waiting.items():
                print(f"{experiment.name}: {experiment.cases[case].title} waits for {words}")
            kept = [case for case in experiment.cases if case not in waiting]
            if prepared:
                kept = [case for case in kept if is_prepared(experiment, case, self.places)]
            if experiment.measure.kind == "sites" and len(kept) < len(experiment.cases):  # its table is of all
                kept = []
            if kept:
                found.append(experiment.limited(kept))
        if not found:
            where = ", ".join(experiment.name for experiment in experiments)
            if prepared:
                raise InputError("nothing has been run", where=where, remedy="leave --table out, or name its --output")
            files = [one.cases[case].data.file for one in experiments for case in lacking(one, self.places)]
            remedy = "correct the 'file' of its data" if all(files) else "name the folder of all raw data by --raw"
            raise InputError("no data", where=where, remedy=remedy)
        return found

    def prepare(self, experiment: Experiment) -> Experiment:
        """Prepare the data of all cases, on rank 0 only; return the experiment limited to the cases that succeeded.

        Raises:
            InputError: no case succeeded; or one failed, and the experiment needs all (``measure.kind: sites``).
        """
        kept, refused = [], []
        of_sites = experiment.measure.kind == "sites"
        for name, case in experiment.cases.items():
            try:
                for seed in experiment.seed_numbers:
                    for line in prepare(case.data, seed, self.places):
                        print(line, flush=True)
                kept.append(name)
            except InputError as error:
                refused.append(error)
                if len(experiment.cases) > 1 and not of_sites:
                    print(f"{experiment.name}: {case.title} is left out: {error}", flush=True)
        if not kept or (of_sites and refused):
            raise refused[0]
        ready = experiment.limited(kept)
        if of_sites:
            check_sites(ready, self.places)
        return ready

    def run(self, experiment: Experiment) -> bool:
        """Finish an experiment's runs on all ranks; return whether a signal or the time limit left some unfinished.

        The experiment's data must be prepared. Nothing is done unless `Experiment.trains`.

        Raises:
            InputError: a recipe cannot be run, or runs were refused.
            EnvironmentFailure: runs failed or were lost.
        """
        if not experiment.trains:
            return False
        layout = self.world.on_root(lambda: self._layout(experiment, self.methods))
        if not layout.plan.units:
            return False
        stopped = run_sweep(layout.plan, self.world, self.groups, redo=self.redo)
        self.world.on_root(lambda: raise_if_failed(layout.plan, endings(layout.plan)))
        return stopped

    def folder(self, experiment: Experiment) -> Path:
        """Return the folder of an experiment's runs, tables and figures."""
        return folder_of(experiment, self.scale, self.places)

    def plan(self, experiment: Experiment) -> Plan:
        """Return an experiment's runs as a sweep's plan; its data must be prepared. Called on rank 0 only.

        Raises:
            InputError: a recipe cannot be run.
        """
        return self._layout(experiment, self.methods).plan

    def show(self, experiment: Experiment) -> ExperimentResult:
        """Write the table and the figures into the experiment's folder, on rank 0 only, and return them.

        Raises:
            InputError: a run's record is damaged.
            EnvironmentFailure: the disk refuses.
        """
        if not experiment.trains:
            return self._write(experiment)
        plan = self._layout(experiment).plan
        for _ in states_until_stable(plan, Claims(plan.folder, "report")):
            shown = self._write(experiment)
        return shown

    def _write(self, experiment: Experiment) -> ExperimentResult:
        folder, kind, remark, records = self.folder(experiment), experiment.measure.kind, "", list[dict[str, Any]]()
        if kind == "classes":
            table, pictures = compare_classes(experiment, self.places, folder / "figures")
        elif kind in UNRECORDED:
            table, pictures = UNRECORDED[kind](experiment, self._layout(experiment), folder / "figures")
        else:
            measured = read_settings(experiment, self._layout(experiment))
            pictures = draw(experiment, measured, folder / "figures")
            if kind == "sites":
                table = compare_sites(experiment, measured, self.places)
            elif kind == "projections":
                table, more = compare_projections(experiment, measured, self.places, folder / "figures")
                pictures += more
            else:
                table = make_table(experiment, measured)
            records = setting_records(experiment, measured)
            remark = left_out(experiment, measured)
            if experiment.measure.figures and any(len(one.runs) > 1 for one in measured):
                remark = f"Figures: mean over seeds, and a band of ± one standard deviation. {remark}"
        table = replace(table, note=f"{table.note} {remark}".strip())
        files = {"table.md": markdown(table)} | ({"settings.csv": as_csv(records)} if records else {})
        write_files(folder, files)
        return ExperimentResult(table, [*(folder / name for name in files), *pictures])

    def _layout(self, experiment: Experiment, methods: Sequence[str] = ()) -> ExperimentLayout:
        return lay_out(experiment, self.scale, self.places, self.rounds, to_targets=self.to_targets, methods=methods)
