"""``hpcfed submit``: a recipe as a SLURM job."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


@click.command("submit")
@click.argument("recipe", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--time", required=True, help="Limit of each job, as sbatch takes it: 4:00:00, or 2-12 for days-hours.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--ranks-per-node", type=click.IntRange(1), help="Default: one for each GPU, one where there is none.")
@click.option("--gpus-per-node", type=click.IntRange(1))
@click.option("--account", metavar="NAME")
@click.option("--partition", metavar="NAME")
@click.option("--option", "-o", "more", multiple=True, metavar="KEY=VALUE", help="Of sbatch: -o qos=long -o exclusive.")
@click.option("--notice", type=click.IntRange(1), default=120, show_default=True, help="Seconds to stop in.")
@click.option("--chain", type=click.IntRange(1), help="Submit N jobs, one after another, where requeue is refused.")
@click.option("--site", type=click.Path(), help="Site file; default: ~/.config/hpcfed/site.yaml, if there is one.")
@click.option("--dry-run", is_flag=True, help="Show the script and leave it at that.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    time: str,
    nodes: int,
    ranks_per_node: int | None,
    gpus_per_node: int | None,
    account: str | None,
    partition: str | None,
    more: tuple[str, ...],
    notice: int,
    chain: int | None,
    site: str | None,
    dry_run: bool,
) -> None:
    """Submit RECIPE to SLURM, with single values overridden, and show the script, written to <output>.sbatch.

    The job stops itself before its time limit, goes back into the queue, and goes on where it stopped until the run is
    done. Repeated, the command tells of the job that waits or runs and submits no other.
    """
    from hpcfed.config.load import load_recipes
    from hpcfed.errors import InputError
    from hpcfed.folder import RunFolder
    from hpcfed.setup import resolve
    from hpcfed.submit.queue import jobs_named, submit
    from hpcfed.submit.script import Job, render
    from hpcfed.submit.site import read_site

    runs = [resolve(run) for run in load_recipes(recipe, overrides)]
    first = runs[0]
    output = first.output if len(runs) == 1 else first.output.parent
    cluster = read_site(Path(site) if site else None)
    named = {"account": account, "partition": partition, "gpus-per-node": gpus_per_node}
    options: dict[str, str | int | None] = {key: value for key, value in named.items() if value is not None}
    options |= {key: value if equals else None for key, equals, value in (text.partition("=") for text in more)}
    if first.device == "cuda" and not any(key.startswith(("gpu", "gres")) for key in {**cluster.options, **options}):
        raise InputError("device: cuda", where=recipe, expected="GPUs", got="none", remedy="add --gpus-per-node")
    job = Job(
        name=first.name,
        output=output,
        arguments=[str(Path(recipe).resolve()), *(text for text in overrides if not text.startswith("output="))],
        nodes=nodes,
        ranks_per_node=ranks_per_node or gpus_per_node or 1,
        threads=first.threads,
        time=time,
        notice=notice,
        options=options,
        requeue=cluster.requeue and chain is None,
        chained=chain is not None,
    )
    text = render(job, cluster)
    if dry_run:
        click.echo(text, nl=False)
        return
    if all(RunFolder(run.output).is_finished(run) for run in runs):
        click.echo(f"{first.name}: finished already, see {output}")
        return
    if queued := jobs_named(job.label):
        told = ", ".join(f"job {entry.id} ({entry.state.lower()})" for entry in queued)
        click.echo(f"{first.name}: in the queue already, {told}; nothing submitted")
        return
    _write(job.script, text)
    numbers = submit(job.script, chain or 1)
    click.echo(text, nl=False)
    click.echo(f"{first.name}: submitted as job {', then '.join(numbers)}, from {shlex.quote(str(job.script))}")


def _write(path: Path, text: str) -> None:
    from hpcfed.errors import InputError
    from hpcfed.files import write_whole

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(
            "cannot be written", where=str(path), got=error.strerror or str(error), remedy="choose another output"
        ) from None
