"""Models: the built-in ones of `hpcfed.models.architectures`, the user's own by ``factory``, flat vectors, losses.

A `Spec` has a model's recipe keys, and builds its module for a federation's shapes. Specs import torch only when they
build, so that a recipe is checked before torch is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from hpcfed.config import registry
from hpcfed.config.hints import LIKELY, for_slip
from hpcfed.config.load import validated
from hpcfed.config.recipe import Model
from hpcfed.errors import InputError, did_you_mean, nearest

if TYPE_CHECKING:
    from torch import nn

Width = Annotated[int, Field(ge=1, le=1 << 24)]
"""Units of a layer."""


class Spec(BaseModel, ABC):
    """A model's recipe keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    draws: ClassVar[bool] = False
    """Whether the module draws random numbers while it trains, as dropout does."""
    tokens: ClassVar[bool] = False
    """Whether the module takes tokens, int64, in place of numbers in the run's dtype."""
    later: ClassVar[frozenset[str]] = frozenset()
    """Keys that the model has gained since 0.1: at their defaults they are not recorded, and older runs go on."""

    def recorded(self) -> dict[str, Any]:
        """Return the keys that a resolved recipe has."""
        fields = type(self).model_fields
        return {key: found for key, found in self if key not in self.later or found != fields[key].default}

    @abstractmethod
    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the module, its parameters drawn from torch's default generator.

        Args:
            features: shape of one sample's features, without the batch axis.
            outputs: classes, or numbers in a regression target.
        """


def spec(section: Model) -> Spec | None:
    """Return the checked spec of the recipe's ``model`` section; None for a factory, which checks its own arguments.

    Raises:
        InputError: unknown model or key, value out of range.
    """
    if section.factory is not None:
        if section.parameters:
            key = next(iter(section.parameters))
            remedy = did_you_mean(key, Model.model_fields, LIKELY) or "a factory's arguments go under 'args'"
            raise InputError(f"unknown key 'model.{key}'", remedy=remedy)
        return None
    name, known = str(section.name), named()
    if name not in known:
        raise InputError(f"unknown model.name {name!r}", remedy=nearest(name, known))
    for key in section.parameters.keys() - known[name].model_fields.keys():
        if slip := for_slip(key):
            raise InputError(f"unknown key 'model.{key}'", remedy=slip)
    return validated(known[name], section.parameters, "", above="model")


@cache
def named() -> Mapping[str, type[Spec]]:
    """Return the built-in models' specs by recipe name."""
    return registry.tables(f"{__name__}.architectures", "MODELS")
