"""``hpcfed job-step``: the lines of shell that start a SLURM job's ranks, and send it back into the queue."""

from __future__ import annotations

import click

from hpcfed.cluster.submit.script import job_step


@click.command("job-step")
@click.option("--array", is_flag=True, help="The jobs of the script are an array's.")
@click.option("--mps", is_flag=True, help="Ranks share GPUs: start NVIDIA's Multi-Process Service on each node.")
def command(array: bool, mps: bool) -> None:
    """Print how a SLURM job runs and goes on, for scripts of your own to end with:

    \b
        output=runs/mine
        run=(srun --mpi=pmix --wait=30 hpcfed run recipe.yaml "output=$output")
        eval "$(hpcfed job-step || echo exit 4)"

    It runs `run`, passes SLURM's early signal on, and ends with the run's exit code. A run that stopped, or lost a
    rank to a signal, and has saved something new in `output` is requeued, unless the script says requeue=no.
    """
    click.echo(job_step(array=array, mps=mps), nl=False)
