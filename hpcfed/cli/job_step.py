"""``hpcfed job-step``: a batch job's one command, which starts the ranks and sends the job back into the queue."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command("job-step")
@click.argument("ranks", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), help="The folder in which the run saves itself."
)
@click.option("--no-requeue", is_flag=True, help="Never send the job back into the queue.")
@click.option("--array", is_flag=True, help="The jobs of the script are an array's.")
@click.option(
    "--mps/--no-mps",
    default=None,
    help="Ranks share GPUs by NVIDIA's Multi-Process Service; default: if a node has more of them than GPUs (SLURM).",
)
@click.option("--early", is_flag=True, help="The scheduler's signal has come before this command.")
@click.option("--chain", metavar="NAME", help="Cancel the waiting jobs of this name once the run has ended.")
@click.option(
    "--unchanged",
    nargs=2,
    type=(click.Path(path_type=Path), str),
    metavar="FILE SHA256",
    help="Do not run if the file has changed.",
)
@click.option("--scheduler", default="slurm", show_default=True, help="slurm, pbs or flux.")
@click.option("--signal-after", type=int, metavar="SECONDS", help="Signal the ranks then (PBS, Flux).")
@click.option("--script", type=click.Path(path_type=Path), help="The script to submit again (PBS, Flux).")
def command(
    ranks: tuple[str, ...],
    output: Path,
    no_requeue: bool,
    array: bool,
    mps: bool | None,
    early: bool,
    chain: str | None,
    unchanged: tuple[Path, str] | None,
    scheduler: str,
    signal_after: int | None,
    script: Path | None,
) -> int:
    """Run the ranks of a batch job, as the last line of its script:

    \b
        exec hpcfed job-step --output runs/mine -- \\
            srun --mpi=pmix --wait=30 hpcfed run recipe.yaml output=runs/mine

    It passes the scheduler's early signal on, and ends with the ranks' exit code. A run that stopped, or lost a rank
    to a signal (at most three times in a row), and has saved something new in `output` is sent back into the queue.
    """
    from hpcfed.cluster.step.run import run_step
    from hpcfed.cluster.step.scheduler import SCHEDULERS, Step, scheduler_of
    from hpcfed.config import registry
    from hpcfed.errors import InputError

    if scheduler not in (known := registry.names(SCHEDULERS)):
        raise InputError("--scheduler", expected=" or ".join(known), got=scheduler)
    if script is None and scheduler != "slurm" and not no_requeue:
        raise InputError("--script", expected=f"the job's script, to submit again, or --no-requeue, for {scheduler}")
    if mps and "SLURM_JOB_NUM_NODES" not in os.environ:
        raise InputError("--mps", expected="a SLURM job, on whose nodes srun starts it", got="none")
    step = Step(
        command=ranks,
        output=output,
        requeue=not no_requeue,
        array=array,
        mps=mps,
        early=early,
        signal_after=signal_after,
        chain=chain,
        script=script,
        unchanged=unchanged,
    )
    return run_step(step, scheduler_of(scheduler))
