"""The models, one file each, and the user's own by ``factory``.

A file declares a `Spec`: its recipe keys, and how to build the module for a federation's shapes. Specs import torch
only when they build, so that a recipe is checked before torch is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from hpcfed.config.load import validated
from hpcfed.config.recipe import Model
from hpcfed.errors import InputError, nearest

if TYPE_CHECKING:
    from torch import nn

BUILT_IN = {
    "linear": "linear",
    "logistic": "linear",
    "quadratic": "linear",
    "mlp": "mlp",
    "emnist-cnn": "cnn",
    "cifar-cnn": "cnn",
    "feddyn-cnn": "cnn",
    "femnist-cnn": "cnn",
    "resnet18-gn": "resnet",
    "lstm": "lstm",
}
"""Recipe name → module; each module's ``SPECS`` holds its classes by recipe name."""


Width = Annotated[int, Field(ge=1, le=1 << 24)]
"""Units of a layer."""


class Spec(BaseModel, ABC):
    """A model's recipe keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    draws: ClassVar[bool] = False
    """Whether the module draws random numbers while it trains, as dropout does."""
    tokens: ClassVar[bool] = False
    """Whether the module takes tokens, int64, in place of numbers in the run's dtype."""
    stacks: ClassVar[bool] = False
    """Whether training clients together, with stacked parameters, is fastest."""

    @abstractmethod
    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the module, its parameters drawn from torch's default generator.

        Args:
            features: shape of one sample's features, without the batch axis.
            outputs: classes, or numbers in a regression target.
        """


def spec(section: Model, where: str = "recipe") -> Spec | None:
    """Return the checked spec of the recipe's ``model`` section; None for a factory, which checks its own arguments.

    Raises:
        InputError: unknown model or key, value out of range.
    """
    if section.factory is not None:
        if section.parameters:
            key = next(iter(section.parameters))
            raise InputError(f"unknown key 'model.{key}'", where=where, remedy="a factory's arguments go under 'args'")
        return None
    if section.name not in BUILT_IN:
        raise InputError(
            f"unknown model.name {section.name!r}", where=where, remedy=nearest(str(section.name), BUILT_IN)
        )
    kind = import_module(f"{__name__}.{BUILT_IN[section.name]}").SPECS[section.name]
    return validated(kind, section.parameters, f"{where}: model")
