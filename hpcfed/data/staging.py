"""Opening of a run's federation file: in place, or staged as a copy on each host's local scratch."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from rich.filesize import decimal

from hpcfed.data.federation import Federation
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.io.node import temporary_folder
from hpcfed.ranks.world import World

STAGE = "stage"


def open_federation(path: Path, access: str, world: World) -> Federation:
    """Open the file on this rank; a collective call. Rank 0 checks the labels, of copies the first rank of each host.

    ``stage`` copies the file to ``$TMPDIR`` (which sites point to local scratch), once per host by its first rank, and
    maps the copy. The copy is unlinked as soon as the host's ranks have opened it, so its space is freed when they end,
    however they end.

    Raises:
        InputError: the file is missing or not a usable federation file.
        EnvironmentFailure: there is no room for the copy, or a disk failed.
    """
    if access != STAGE:
        return world.together(lambda: Federation.open(path, access, labels_checked=not world.is_root))
    first = world.hosts.index(world.hosts[world.rank])
    copies: list[Path] = []  # of this rank, if it is the first on its host
    try:
        world.together(lambda: copies.append(_copy(path)) if first == world.rank else None)
        (copy,) = world.gather(copies)[first]
        staged = world.together(lambda: Federation.open(copy, labels_checked=first != world.rank))
        staged.path = path  # which messages name: the copy is gone
        return staged
    finally:
        for own in copies:
            own.unlink()


def _copy(path: Path) -> Path:
    """Return a copy of a file in ``$TMPDIR``."""
    folder = temporary_folder()
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError("can't be read", where=str(path), got=error.strerror or str(error)) from error
    remedy = "point $TMPDIR to a larger disk, or set data_access: mmap"
    try:
        free = shutil.disk_usage(folder).free
        if free < size:
            expected, got = f"{decimal(size)} free for the staged data", decimal(free)
            raise EnvironmentFailure("not enough space", where=str(folder), expected=expected, got=got, remedy=remedy)
        descriptor, name = tempfile.mkstemp(prefix="hpcfed-", suffix=".h5", dir=folder)
    except OSError as error:
        got = error.strerror or str(error)
        raise EnvironmentFailure("cannot hold the staged data", where=str(folder), got=got, remedy=remedy) from error
    os.close(descriptor)
    try:
        shutil.copyfile(path, name)
    except OSError as error:
        Path(name).unlink()
        what = f"staging {path} failed: {error.strerror or error}"
        raise EnvironmentFailure(what, where=str(folder), remedy=remedy) from error
    return Path(name)
