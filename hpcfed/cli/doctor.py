"""``hpcfed doctor``: a report on this machine and this MPI, with findings on slowness and faults."""

from __future__ import annotations

from dataclasses import asdict

import click

from hpcfed.cli.documents import text_of

PIPED_WIDTH = 160


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--no-probe", is_flag=True, help="Look, but measure nothing.")
def command(as_json: bool, no_probe: bool) -> None:
    """Show what this machine and this MPI offer, and what looks slow or wrong.

    Start it as you start runs, alone or under mpirun -n P or srun: one report covers all ranks.
    """
    from hpcfed.cluster.doctor.facts import gather
    from hpcfed.cluster.doctor.findings import find
    from hpcfed.io.console import Console
    from hpcfed.ranks.world import connect

    world = connect(mixed=True)  # differing copies are a finding
    facts = gather(world, measure=not no_probe)
    if not world.is_root:
        return
    findings = find(facts)
    if as_json:
        click.echo(text_of({**asdict(facts), "findings": [asdict(finding) for finding in findings]}))
        return

    from hpcfed.cluster.doctor.page import show

    # Open MPI's mpirun hands rank 0 a pseudo-terminal even if its output goes to a file.
    terminal = False if facts.launcher else None
    console = Console(highlight=False, markup=False, emoji=False, force_terminal=terminal)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    show(facts, findings, console)
