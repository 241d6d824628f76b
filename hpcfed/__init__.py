"""hpcfed: federated learning on HPC clusters, the same result on any number of ranks.

``hpcfed.run("recipe.yaml", ["rounds=50"])`` trains, and returns the record (``.metrics``) and the model (``.module``).
``hpcfed.load("runs/own")`` reads a run that is there: its record as a table, its model as a module.
``hpcfed.write_federation("own.h5", {"north": (x, y), …})`` makes a federation file of your own samples.
``hpcfed.ClientRule`` and ``hpcfed.ServerRule`` are the bases of your own methods' parts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcfed.errors import Diverged, EnvironmentFailure, HpcfedError, InputError, Stopped
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
    "HpcfedError",
    "InputError",
    "LoadedRun",
    "Replay",
    "Result",
    "ServerRule",
    "Stopped",
    "__version__",
    "load",
    "replay",
    "run",
    "run_seeds",
    "write_federation",
]

_MODULES = {
    "ClientRule": "hpcfed.algorithms._base",
    "LoadedRun": "hpcfed.loaded",
    "Replay": "hpcfed.rewind.replay",
    "Result": "hpcfed.api",
    "ServerRule": "hpcfed.algorithms._base",
    "load": "hpcfed.loaded",
    "replay": "hpcfed.rewind.replay",
    "run": "hpcfed.api",
    "run_seeds": "hpcfed.api",
    "write_federation": "data_prep.own",
}
"""What needs torch, or writes data, is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__]
