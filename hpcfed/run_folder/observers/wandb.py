"""The round's numbers for Weights & Biases: offline, in the run folder's ``logs``, until ``wandb sync`` sends them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from hpcfed.run_folder.observers import Started
from hpcfed.run_folder.observers._scalars import scalars


class WeightsAndBiases:
    """Logs each number of a row by round, and the recipe as the configuration.

    Args:
        args: passed on to ``wandb.init``: ``project``, ``entity``, ``group``; ``mode: online`` with a network.
    """

    def __init__(self, args: Mapping[str, Any]):
        self._args = dict(args)

    def start(self, run: Started) -> None:
        """Begin a W&B run, or resume the one of this folder."""
        import wandb

        folder = run.folder / "logs"
        folder.mkdir(exist_ok=True)
        ours = {
            "project": "hpcfed",
            "name": run.name,
            "id": hashlib.sha256(str(run.folder).encode()).hexdigest()[:16],
            "resume": "allow",
            "mode": "offline",
            "dir": str(folder),
            "config": run.recipe | {"environment": run.environment},
            "settings": wandb.Settings(console="off", silent=True),
        }
        self._run = wandb.init(**ours | self._args)

    def round(self, row: Mapping[str, Any]) -> None:
        """Log a round's numbers."""
        self._run.log(dict(scalars(row)), step=row["round"])

    def end(self, status: str) -> None:
        """Record the status, and finish the W&B run."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)


observer = WeightsAndBiases
