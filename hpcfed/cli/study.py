"""``hpcfed study``: methods and baselines at a few sites, over splits and seeds, and one page."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcfed.cli.array import ArrayJobFacts, array_options, is_asked_for, submit_array
from hpcfed.cli.documents import JSON, Printer, printer
from hpcfed.cli.options import OVERRIDES

if TYPE_CHECKING:
    from hpcfed.lab.study.plan import Study
    from hpcfed.lab.study.view import View
    from hpcfed.lab.sweep.plan import Plan
    from hpcfed.ranks.signals import Signals


@click.command("study")
@click.argument("recipe", type=click.Path())
@OVERRIDES
@click.option("--methods", default="fedavg", show_default=True, metavar="LIST",
              help="Methods, each with keys of its own: fedavg,fedexp,feddyn:alpha=0.1.")  # fmt: skip
@click.option("--splits", type=int, metavar="N", help="Holdouts, or folds. Default: 5.")
@click.option("--kind", default="holdout", show_default=True, metavar="[holdout|k-fold|leave-one-site-out]",
              help="How samples are split into training and test samples, by site and label.")  # fmt: skip
@click.option("--test-fraction", "fraction", type=float, metavar="SHARE",
              help="Share of each site's samples that a holdout tests on, of --tune too. Default: 0.2.")  # fmt: skip
@click.option("--split-seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the splits.")
@click.option("--seeds", metavar="N|LIST", help="5 (the seeds 0 to 4), or a list: 0,7. Default: the recipe's.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of a run. Default: the recipe's.")
@click.option("--baselines", default="all", show_default=True, metavar="LIST",
              help="Of pooled, alone, travelling, personalised, ensemble; all, or none.")  # fmt: skip
@click.option("--standardize", metavar="[client|pooled|none]",
              help="Scale by the training samples of each site, or of all. Default: as the file is.")  # fmt: skip
@click.option("--tune", multiple=True, metavar="[METHOD:]KEY=VALUES",
              help="Choose KEY for each split on an inner split of its training part: local.lr=0.1,0.01 for all "
              "arms, feddyn:alpha=0.01,0.1 for a method; repeatable.")  # fmt: skip
@click.option("--bootstrap", type=int, default=0, metavar="B",
              help="Resample the tested patients B times, 100 or more, for intervals over patients.")  # fmt: skip
@click.option("--groups", type=click.IntRange(1), help="Groups of ranks, a run each at a time. Default: one a rank.")
@click.option("--output", type=click.Path(path_type=Path), help="The study's folder. Default: <output>-study.")
@click.option("--retry", is_flag=True, help="Try again what was refused or failed.")
@click.option(
    "--fresh", is_flag=True, help="Start other splits, and runs of other recipes, anew; the old ones are kept aside."
)
@click.option("--accept-code", is_flag=True, help="Go on although your own code has changed; both are recorded.")
@click.option("--quiet", "-q", is_flag=True, help="Say nothing while it runs.")
@JSON
@array_options
def command(
    recipe: str,
    overrides: tuple[str, ...],
    seeds: str | None,
    groups: int | None,
    retry: bool,
    fresh: bool,
    accept_code: bool,
    quiet: bool,
    as_json: bool,
    array: int | None,
    **others: Any,
) -> None:
    """Compare methods and baselines at a few sites, on splits of their samples, and write one page.

    \b
    mpirun -n 4 hpcfed study r.yaml --methods fedavg,fedexp,feddyn:alpha=0.1 --splits 5

    RECIPE names a federation whose clients are the sites. All their samples, training and test samples together, are
    split anew, and filled and scaled by the training samples of each split. Groups of ranks take runs until none is
    left. After a stop or a kill the same command goes on; when all is done, it only writes the page. With --array the
    splits are written here, and N SLURM jobs share the runs, each of the size that the options listed after it set.
    """
    from hpcfed.errors import Stopped
    from hpcfed.lab.study.options import StudyOptions
    from hpcfed.lab.study.plan import read_study
    from hpcfed.lab.study.session import next_runs, run_study
    from hpcfed.lab.sweep.failures import endings, raise_if_failed
    from hpcfed.lab.sweep.grid import parse_seeds
    from hpcfed.lab.sweep.run import Redo
    from hpcfed.ranks.signals import catch_signals
    from hpcfed.ranks.world import connect

    asked = {one.name: others[one.name] for one in fields(StudyOptions) if one.name in others}
    job = {name: value for name, value in others.items() if name not in asked}

    def read() -> Study:
        options = StudyOptions(**asked, seeds=parse_seeds(seeds) if seeds else [])
        return read_study(recipe, overrides, options)

    world, emit = connect(), printer("study", asked=as_json)
    study = world.on_root(read)
    redo = Redo(retry, fresh, accept_code)
    if is_asked_for(array, job):
        words = _words(click.get_current_context().params, study.folder)
        runs = partial(next_runs, study, redo)
        facts = ArrayJobFacts(study.folder.name, study.recipe.threads, study.recipe.device)
        world.on_root(lambda: submit_array(facts, study.folder, runs, words, array, redo, job))
        return
    with catch_signals(world) as caught:  # of all its runs, and of what is between them
        stopped, remarks, study = run_study(study, world, groups, redo, quiet=quiet)
        plan = world.on_root(study.plan)
        report = _Report(study, [*study.remarks, *remarks], emit, stopped)
        if not stopped or study.tuning is None or study.tuned is not None:  # else of other values than those chosen
            world.on_root(lambda: report.write(plan, caught, quiet=quiet))
        else:
            world.on_root(report.show)
    if stopped:
        raise Stopped(f"{study.folder.name} stopped, runs are left", remedy="the same command goes on from there")
    world.on_root(lambda: raise_if_failed(plan, endings(plan)))


def _words(asked: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the command of every job of an array, as ``hpcfed`` takes it, from this command's parameters."""
    words = ["study", str(Path(asked["recipe"]).resolve())]
    words += [text for text in asked["overrides"] if not text.startswith("output=")]
    same = ("methods", "splits", "kind", "seeds", "rounds", "baselines", "standardize", "bootstrap", "groups")
    options = {name: name for name in same} | {"test-fraction": "fraction", "split-seed": "split_seed"}
    words += [f"--{option}={asked[name]}" for option, name in options.items() if asked[name] is not None]
    return [*words, *(f"--tune={text}" for text in asked["tune"]), f"--output={folder}"]


@dataclass
class _Report:
    """The results so far, written and shown on rank 0 only.

    Attributes:
        study: the study.
        remarks: on splits, methods and runs.
        emit: prints the document of the results in place of their tables; None without ``--json``.
        stopped: whether runs, or the resamples, are left.
    """

    study: Study
    remarks: list[str]
    emit: Printer | None
    stopped: bool

    def write(self, plan: Plan, caught: Signals, *, quiet: bool) -> None:
        """Write the results, if there are any, and show the main tables; once all runs are done resample patients.

        Raises:
            Stopped: a signal has stopped the resampling.
        """
        from hpcfed.errors import Stopped
        from hpcfed.lab.study.session import remarks_on_code, write_intervals, write_study

        words = [word for word in sys.argv[2:] if word != "--json"]
        self.remarks += [*plan.unlike(), *remarks_on_code(plan)]
        view, complete = write_study(self.study, plan, words, self.remarks)
        if self.emit is None:
            self._print(view)
        if view is not None and self.study.options.bootstrap and complete:
            from hpcfed.lab.study.bootstrap import ResampleProgress

            progress = ResampleProgress(self.study.folder.name, not quiet, lambda: caught.name is not None)
            try:
                view = write_intervals(view, words, self.remarks, progress)
            except Stopped:
                self.stopped = True
                self.show(view, complete=complete)
                raise
        self.show(view, complete=complete)

    def show(self, view: View | None = None, *, complete: bool = False) -> None:
        """Print the document, if it is asked for."""
        if self.emit is None:
            return
        from hpcfed.cli.documents.study import study_document
        from hpcfed.lab.study.page import without_results

        remarks = self.remarks if view is None else [*self.remarks, *without_results(view)]
        self.emit(study_document(self.study, view, remarks, stopped=self.stopped, complete=complete))

    def _print(self, view: View | None) -> None:
        """Print the main tables, the remarks, and what was written."""
        from hpcfed.cli.report import print_table
        from hpcfed.lab.study.page import without_results
        from hpcfed.lab.study.plan import FIGURES, PAGE, TABLES
        from hpcfed.lab.study.session import main_tables

        for table in [] if view is None else main_tables(view):
            print_table(table)
        for line in self.remarks if view is None else [*self.remarks, *without_results(view)]:
            click.echo(line)
        for name in (PAGE, TABLES, FIGURES) if view is not None else ():
            if (self.study.folder / name).exists():
                click.echo(self.study.folder / name)
