"""hpcfed: federated learning on HPC clusters, the same result on any number of ranks.

``hpcfed.run("recipe.yaml", ["rounds=50"])`` trains, and returns the record (``.metrics``) and the model (``.module``).
``for round in hpcfed.rounds("recipe.yaml"):`` trains round by round.
``hpcfed.load("runs/own")`` reads a run that is there: its record as a table, its model as a module.
``hpcfed.runs(["runs/own", "runs/sweep"])`` is one tidy table of many runs' records.
``hpcfed.write_federation("own.h5", {"north": (x, y), …})`` makes a federation file of your own samples.
``hpcfed.partition(labels, "dirichlet-client", alpha=0.3, clients=10)`` deals samples to clients.
``hpcfed.ClientRule`` and ``hpcfed.ServerRule`` are the bases of your own methods' parts, ``hpcfed.UpdatePart`` and
``hpcfed.MeansPart`` of what happens to updates on their way, ``hpcfed.RobustMean`` of what takes the mean's place.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpcfed.errors import Diverged, EnvironmentFailure, HpcfedError, InputError, Stopped
from hpcfed.version import __version__

if TYPE_CHECKING:
    from data_prep.dealt import Partition, partition
    from data_prep.own import write_federation
    from hpcfed.algorithms._base import ClientRule, ServerRule
    from hpcfed.api import Result, rounds, run, run_seeds
    from hpcfed.lab.loaded import LoadedRun, load
    from hpcfed.lab.predict import predict
    from hpcfed.lab.runs import runs
    from hpcfed.provenance.replay.replay import Replay, replay
    from hpcfed.updates._base import MeansPart, UpdatePart
    from hpcfed.updates._robust import RobustMean

__all__ = [
    "ClientRule",
    "Diverged",
    "EnvironmentFailure",
    "HpcfedError",
    "InputError",
    "LoadedRun",
    "MeansPart",
    "Partition",
    "Replay",
    "Result",
    "RobustMean",
    "ServerRule",
    "Stopped",
    "UpdatePart",
    "__version__",
    "load",
    "partition",
    "predict",
    "replay",
    "rounds",
    "run",
    "run_seeds",
    "runs",
    "write_federation",
]

_MODULES = {
    "ClientRule": "hpcfed.algorithms._base",
    "LoadedRun": "hpcfed.lab.loaded",
    "MeansPart": "hpcfed.updates._base",
    "Partition": "data_prep.dealt",
    "Replay": "hpcfed.provenance.replay.replay",
    "Result": "hpcfed.api",
    "RobustMean": "hpcfed.updates._robust",
    "ServerRule": "hpcfed.algorithms._base",
    "UpdatePart": "hpcfed.updates._base",
    "load": "hpcfed.lab.loaded",
    "partition": "data_prep.dealt",
    "predict": "hpcfed.lab.predict",
    "replay": "hpcfed.provenance.replay.replay",
    "rounds": "hpcfed.api",
    "run": "hpcfed.api",
    "run_seeds": "hpcfed.api",
    "runs": "hpcfed.lab.runs",
    "write_federation": "data_prep.own",
}
"""What needs torch, or writes data, is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__]


_FORWARDED = {"hpcfed.loaded": "hpcfed.lab.loaded", "hpcfed.reproduce": "hpcfed.lab.reproduce"}
"""Former → present names of modules that documented scripts import, or recipes in run folders name."""


class _Forwarding(MetaPathFinder, Loader):
    """Finder of modules by their former names, which are deprecated."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith((*_FORWARDED,)) else None

    def exec_module(self, module: ModuleType) -> None:
        import warnings

        former = next(name for name in _FORWARDED if module.__name__.startswith(name))
        new = _FORWARDED[former] + module.__name__.removeprefix(former)
        warnings.warn(f"{module.__name__} has moved: import {new}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)


sys.meta_path.insert(0, _Forwarding())
logging.getLogger(__name__).addHandler(logging.NullHandler())
"""Runs have it in ``logs/`` of their folders; elsewhere it is for programs that ask for it, not for the screen."""
