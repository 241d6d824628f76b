"""``hpcfed certify``: the certificate of a finished run, checked, and signed with an SSH key."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--key",
    type=click.Path(path_type=Path),
    help="Private SSH key to sign with, such as ~/.ssh/id_ed25519; or its public half, if an agent holds it.",
)
def command(run: Path, key: Path | None) -> None:
    """Check the certificate of RUN, the folder of a finished run, against its files; with --key sign it.

    The signature, certificate.json.sig, is made by ssh-keygen, without a network. A run of an earlier version gets its
    certificate here.
    """
    from hpcfed.provenance.certify import certify

    for line in certify(run, key):
        click.echo(line)
