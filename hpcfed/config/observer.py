"""The recipe's section ``observers``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hpcfed.config.limits import Section

REFERENCE = r"^[\w.]+:\w+$"
Reference = Annotated[str, Field(pattern=REFERENCE)]
"""The user's own function or class, ``package.module:name``."""


class Observer(Section):
    """An observer of a run: a built-in one by `name`, or the user's by `factory`, called with `args`.

    A built-in observer passes `args` on: ``tensorboard`` to ``SummaryWriter``, ``wandb`` to ``wandb.init``,
    ``mlflow`` to ``MlflowClient.create_run``, but for ``tracking_uri`` and ``experiment_name``.
    """

    name: Literal["tensorboard", "wandb", "mlflow"] | None = None
    """`tensorboard`, `wandb` or `mlflow`."""
    factory: Reference | None = None
    """Yours, `"module:Class"`, with one or more of `start(run)`, `round(row)`, `look(round)`, `end(status)`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments: `{name: wandb, args: {project: mine, mode: online}}`, `{name: mlflow, args: {tracking_uri: …}}`."""

    @model_validator(mode="after")
    def _name_or_factory(self) -> Observer:
        if (self.name is None) == (self.factory is None):
            raise ValueError("exactly one of 'name' and 'factory'")
        return self


def named(value: Any) -> Any:
    """Expand ``tensorboard``, ``mine:Class`` and lists of them to lists of sections."""
    entries = value if isinstance(value, list) else [value]
    return [{"factory" if ":" in entry else "name": entry} if isinstance(entry, str) else entry for entry in entries]
