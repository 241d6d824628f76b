"""hpcfed: federated learning on HPC clusters, the same result on any number of ranks.

``hpcfed.run("recipe.yaml", ["rounds=50"])`` trains, and returns the record (``.metrics``) and the model (``.module``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcfed.errors import Diverged, EnvironmentFailure, InputError
from hpcfed.version import __version__

if TYPE_CHECKING:
    from hpcfed.api import Result, run, run_seeds

__all__ = ["Diverged", "EnvironmentFailure", "InputError", "Result", "__version__", "run", "run_seeds"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name in ("run", "run_seeds", "Result"):
        from hpcfed import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
