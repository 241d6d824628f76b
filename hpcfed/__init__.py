"""hpcfed: federated learning on HPC clusters, the same result on any number of ranks.

``hpcfed.run("recipe.yaml", ["rounds=50"])`` trains, and returns the record (``.metrics``) and the model (``.module``).
``hpcfed.load("runs/own")`` reads a run that is there: its record as a table, its model as a module.
``hpcfed.write_federation("own.h5", {"north": (x, y), …})`` makes a federation file of your own samples.
``hpcfed.ClientRule`` and ``hpcfed.ServerRule`` are the bases of your own methods' parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcfed.errors import Diverged, EnvironmentFailure, InputError
from hpcfed.version import __version__

if TYPE_CHECKING:
    from data_prep.own import write_federation
    from hpcfed.algorithms._base import ClientRule, ServerRule
    from hpcfed.api import Result, run, run_seeds
    from hpcfed.loaded import LoadedRun, load
    from hpcfed.rewind.replay import Replay, replay

__all__ = [
    "ClientRule",
    "Diverged",
    "EnvironmentFailure",
    "InputError",
    "LoadedRun",
    "Replay",
    "Result",
    "ServerRule",
    "__version__",
    "load",
    "replay",
    "run",
    "run_seeds",
    "write_federation",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch, or writes data, when it is first asked for."""
    if name == "write_federation":
        from data_prep.own import write_federation

        return write_federation
    if name in ("ClientRule", "ServerRule"):
        from hpcfed.algorithms import _base

        return getattr(_base, name)
    if name in ("run", "run_seeds", "Result"):
        from hpcfed import api

        return getattr(api, name)
    if name in ("replay", "Replay"):
        from hpcfed.rewind import replay

        return getattr(replay, name)
    if name in ("load", "LoadedRun"):
        from hpcfed import loaded

        return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
