"""The round's numbers as TensorBoard events, in the run folder's ``logs/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcfed.config.load import dump_yaml
from hpcfed.run_folder.observers import Started
from hpcfed.run_folder.observers._scalars import scalars


class TensorBoard:
    """Writes each number of a row as a scalar by round, and the recipe as text.

    Args:
        args: passed on to ``torch.utils.tensorboard.SummaryWriter``, ``log_dir`` among them.
    """

    def __init__(self, args: Mapping[str, Any]):
        self._args = dict(args)

    def start(self, run: Started) -> None:
        """Open the event file; TensorBoard drops earlier events of rounds that run again."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "logs" / "tensorboard"
        self._writer = SummaryWriter(**{"log_dir": str(folder), "purge_step": run.done + 1} | self._args)
        self._writer.add_text("recipe", f"```yaml\n{dump_yaml(run.recipe)}```", run.done)

    def round(self, row: Mapping[str, Any]) -> None:
        """Write a round's numbers."""
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["round"])

    def end(self, status: str) -> None:
        """Flush and close the event file."""
        self._writer.close()


observer = TensorBoard
