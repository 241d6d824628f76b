"""The LSTM of the papers' Shakespeare experiments, a predictor of the next character."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hpcfed.errors import InputError
from hpcfed.models import Spec, Width

if TYPE_CHECKING:
    from torch import nn


class Lstm(Spec):
    """Tokens (T,) → embedding → stacked LSTM layers → linear map of the last output to the next token's scores.

    The federation's ``num_classes`` is the vocabulary of both ends. With 80 characters the defaults are FedDyn's
    133,520 parameters (utils_models.py:12-85), and ``hidden: 256`` the 819,920 that fit GeL's 8.2e5.
    """

    tokens: ClassVar[bool] = True
    embedding: Width = 8
    hidden: Width = 100
    layers: int = Field(2, ge=1, le=64)

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the network."""
        from hpcfed.models.modules import NextToken

        if len(features) != 1:
            raise InputError("model.name 'lstm'", expected="samples of T tokens, (T,)", got=f"shape {features}")
        return NextToken(outputs, self.embedding, self.hidden, self.layers)


MODELS = {"lstm": Lstm}
