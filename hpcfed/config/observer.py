"""The recipe's section on who is told of a run's rounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hpcfed.config.limits import Section

Reference = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
"""The user's own function or class, ``package.module:name``."""


class Observer(Section):
    """One that is told of each round: ours by `name`, or what the user's `factory` returns when called with `args`.

    Those of a name are passed on to its library: ``tensorboard`` to ``SummaryWriter``, ``wandb`` to ``wandb.init``.
    """

    name: Literal["tensorboard", "wandb"] | None = None
    factory: Reference | None = None
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _name_or_factory(self) -> Observer:
        if (self.name is None) == (self.factory is None):
            raise ValueError("exactly one of 'name' and 'factory'")
        return self


def named(value: Any) -> Any:
    """Make ``tensorboard`` and ``[tensorboard, …]`` lists of sections."""
    entries = value if isinstance(value, list) else [value]
    return [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
