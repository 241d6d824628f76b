"""``hpcfed submit``: a recipe as a job of the cluster's scheduler."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from hpcfed.cli.options import OVERRIDES

if TYPE_CHECKING:
    from hpcfed.cluster.submit.scheduler import Scheduler
    from hpcfed.cluster.submit.script import Job
    from hpcfed.cluster.submit.site import Site

F = TypeVar("F", bound=Callable[..., Any])
TIME = "Limit of each job, as sbatch takes it: 4:00:00, or 2-12 for days-hours."

JOB_OPTIONS = (
    click.option("--nodes", type=click.IntRange(1), default=1, show_default=True),
    click.option("--ranks-per-node", type=click.IntRange(1), help="Default: one for each GPU, or one."),
    click.option("--gpus-per-node", type=click.IntRange(1)),
    click.option("--account", metavar="NAME"),
    click.option("--partition", metavar="NAME"),
    click.option("--mem", metavar="SIZE", help="Memory of each node, 64G; default: the site's, or all of one's own."),
    click.option(
        "--option", "-o", "more", multiple=True, metavar="KEY=VALUE", help="Of sbatch: -o qos=long -o exclusive."
    ),
    click.option(
        "--notice", type=click.IntRange(1, 65535), help="Seconds to stop in; default: 120, or less below 5 min."
    ),
    click.option("--site", type=click.Path(), help="Site file; default: ~/.config/hpcfed/site.yaml, if there is one."),
    click.option("--dry-run", is_flag=True, help="Show the script and leave it at that."),
)
"""Options of every command that submits a job, besides ``--time``."""


class JobFacts(Protocol):
    """What a job script needs to know of its runs: their name, threads of a rank, and device."""

    @property
    def name(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def device(self) -> str: ...


def job_options(function: F, *, nodes: bool = True) -> F:
    """Give a command all of `JOB_OPTIONS`, or all but ``--nodes``, where the command computes the number."""
    for option in reversed(JOB_OPTIONS if nodes else JOB_OPTIONS[1:]):
        function = option(function)
    return function


@click.command("submit")
@click.argument("recipe", type=click.Path())
@OVERRIDES
@click.option("--time", required=True, help=TIME)
@job_options
@click.option("--fresh", is_flag=True, help="Start anew; the run that is there is kept under previous-1, then -2, ….")
@click.option("--accept-code", is_flag=True, help="Go on although your own code has changed; both are recorded.")
@click.option("--chain", type=click.IntRange(1), help="Submit N jobs, one after another, where requeue is refused.")
def command(
    recipe: str, overrides: tuple[str, ...], fresh: bool, accept_code: bool, chain: int | None, **job: Any
) -> None:
    """Submit RECIPE to SLURM, or the site file's scheduler, by a script that is written beside the output.

    The job stops itself before its time limit, goes back into the queue, and goes on where it stopped until the run is
    done. Repeated while a job waits or runs, the command names that job and submits no other.
    """
    from hpcfed.assembly import resolve
    from hpcfed.config.load import load_recipes
    from hpcfed.run_folder.folder import RunFolder, refuse_both

    runs = [resolve(run) for run in load_recipes(recipe, overrides)]
    first = runs[0]
    output = first.output if len(runs) == 1 else first.output.parent
    own = [text for text in overrides if not text.startswith("output=")]
    words = ["run", str(Path(recipe).resolve()), *own, f"output={json.dumps(str(output))}"]

    refuse_both(fresh, accept_code)
    folders = [RunFolder(run.output, fresh=fresh) for run in runs]

    def is_done() -> bool:
        for folder, run in zip(folders, runs, strict=True):
            if accept_code:
                folder.accept_code(run)
        return all(folder.is_finished(run) for folder, run in zip(folders, runs, strict=True))

    def make_room() -> bool:  # once, now: a requeued job goes on
        for folder in folders:
            folder.set_aside()
        return True

    submit_job(first, output, words, is_done, make_room if fresh else None, chain=chain, **job)


def submit_job(
    facts: JobFacts,
    output: Path,
    words: Sequence[str],
    is_done: Callable[[], bool],
    make_room: Callable[[], bool] | None = None,
    *,
    time: str,
    nodes: int,
    ranks_per_node: int | None,
    gpus_per_node: int | None,
    account: str | None,
    partition: str | None,
    mem: str | None,
    more: Sequence[str],
    notice: int | None,
    site: str | None,
    dry_run: bool,
    chain: int | None = None,
    array: int | None = None,
) -> None:
    """Submit a command as a job, unless it waits or runs already or there is nothing to do, or print its script alone.

    Args:
        facts: of the runs; a resolved recipe has them all.
        output: the folder that the command fills.
        words: the command, as ``hpcfed`` takes it; the second is the recipe's absolute path, or an experiment's name.
        is_done: whether there is nothing to do.
        make_room: see `hpcfed.cluster.submit.scheduler.Scheduler.submit`.
        chain, array: number of jobs, one after another or all at once.
        Others: the options of the command line.
    """
    from hpcfed.cluster.submit.gpus import asks_for_gpus, ranks_of_gpus
    from hpcfed.cluster.submit.scheduler import scheduler_of
    from hpcfed.cluster.submit.script import Job
    from hpcfed.cluster.submit.site import read_site
    from hpcfed.errors import InputError

    cluster = read_site(Path(site) if site else None)
    scheduler = scheduler_of(cluster)
    named = {"account": account, "partition": partition, "gpus-per-node": gpus_per_node, "mem": mem}
    options = _options(named, more)
    asked = {**cluster.options, **options}
    if facts.device not in ("auto", "cpu") and not asks_for_gpus(asked):
        what, remedy = f"device: {facts.device}", "add --gpus-per-node"
        raise InputError(what, where=words[1], expected="GPUs", got="none", remedy=remedy)
    if output.is_symlink() and not output.exists():
        raise InputError("output", where=str(output), expected="a folder", got="a link to a file that does not exist")
    job = Job(
        name=facts.name,
        output=output,
        words=words,
        recipe=Path(words[1]) if Path(words[1]).is_absolute() else None,  # the name of an experiment
        nodes=nodes,
        ranks_per_node=ranks_per_node or ranks_of_gpus(asked, nodes) or 1,
        threads=facts.threads,
        time=time,
        notice=notice,
        options=options,
        requeue=_requeues(cluster, options, chain),
        chained=chain is not None,
        array=array,
    )
    text, doubt = scheduler.render(job, cluster), scheduler.doubt_of(cluster)
    if dry_run:
        _warn_once(doubt)
        click.echo(text, nl=False)
        return
    _submit(scheduler, job, text, doubt, is_done, make_room, chain or 1)


def _submit(
    scheduler: Scheduler,
    job: Job,
    text: str,
    doubt: str,
    is_done: Callable[[], bool],
    make_room: Callable[[], bool] | None,
    chain: int,
) -> None:
    """Submit a job with its script's `text`, unless it waits or runs already, or there is nothing to do."""
    script, queued = job.script(scheduler.SUFFIX), scheduler.jobs_named(job.label) if job.array is not None else []
    finished = f"{job.name}: finished already, see {job.output}"
    if not queued and is_done():  # of an array it may write to folders, which jobs must not be using
        click.echo(finished)
        return
    if queued := queued or scheduler.jobs_named(job.label):
        waiting = ", ".join(f"job {entry.id} ({entry.state.lower()})" for entry in queued)
        changed = script.is_file() and script.read_text(encoding="utf-8") != text
        remedy = f"; to submit it with another recipe or other options, {scheduler.CANCEL} it first" if changed else ""
        click.echo(f"{job.name}: in the queue already, {waiting}; nothing submitted{remedy}")
        return
    _warn_once(doubt)
    _write(script, text)
    numbers = scheduler.submit(script, chain, make_room)
    if not numbers:
        click.echo(finished)
        return
    click.echo(f"{job.name}: submitted as job {', then '.join(numbers)}, from {shlex.quote(str(script))}")
    _warn_once(scheduler.doubt_of_start(script))


def _warn_once(text: str) -> None:
    """Print a warning to stderr, once for all jobs of a command."""
    said = click.get_current_context().meta.setdefault(__name__, set())
    if text and text not in said:
        said.add(text)
        click.echo(f"hpcfed: {text}", err=True)


def options_of(site: str | None, gpus_per_node: int | None, more: Sequence[str]) -> dict[str, str | int | None]:
    """Return a job's options for sbatch: the site file's, overridden by the command's.

    Args:
        site: the site file; None for the default place.
        gpus_per_node: of the command.
        more: further options, ``key=value`` or ``flag``.

    Raises:
        InputError: the site file cannot be read.
    """
    from hpcfed.cluster.submit.site import read_site

    return {**read_site(Path(site) if site else None).options, **_options({"gpus-per-node": gpus_per_node}, more)}


def _options(named: Mapping[str, str | int | None], more: Sequence[str]) -> dict[str, str | int | None]:
    """Return sbatch's options: those of `named` that are set, overridden by `more`, ``key=value`` or ``flag`` texts."""
    options = {key: value for key, value in named.items() if value is not None}
    parts = (text.removeprefix("--").partition("=") for text in more)
    return options | {key: value if equals else None for key, equals, value in parts}


def _requeues(cluster: Site, options: Mapping[str, str | int | None], chain: int | None) -> bool:
    """Return whether a job requeues itself: what is typed counts before the site file.

    Raises:
        InputError: it is to do so, and to be one of a chain.
    """
    from hpcfed.errors import InputError

    if chain is not None and "requeue" in options:
        raise InputError("-o requeue", expected="none with --chain, whose jobs follow one another", got="both")
    typed = [key for key in options if key in ("requeue", "no-requeue")]
    for key in typed:
        if options[key] is not None:
            got, remedy = f"{key}={options[key]}", "-o no-requeue keeps a job from going back into the queue"
            raise InputError(f"-o {key}", expected="no value", got=got, remedy=remedy)
    if chain is not None or typed:
        return typed[-1:] == ["requeue"]
    return cluster.requeue and "no-requeue" not in cluster.options


def _write(path: Path, text: str) -> None:
    from hpcfed.errors import InputError
    from hpcfed.io.atomic import write_whole

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(
            "cannot be written", where=str(path), got=error.strerror or str(error), remedy="choose another output"
        ) from None
