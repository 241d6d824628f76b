"""ResNet-18 for small images, with group normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from hpcfed.models import Spec
from hpcfed.models.images import image_shape

if TYPE_CHECKING:
    from torch import nn

NARROWEST = 64


class Resnet18(Spec):
    """ResNet-18 with a 3×3 stem of stride 1, no max-pool, and GroupNorm of `groups` groups for BatchNorm.

    11,173,962 parameters for CIFAR-10, 11,220,132 for CIFAR-100. Images are (C, H, W), or (H, W) with one channel.

    References: He et al., "Deep residual learning for image recognition", CVPR 2016, table 1; two groups as in FedExP
    (util_models.py:41-87), after Hsieh et al., "The non-IID data quagmire of decentralized machine learning", 2020.
    """

    groups: int = Field(2, ge=1, le=NARROWEST)

    @field_validator("groups")
    @classmethod
    def _divides(cls, groups: int) -> int:
        if NARROWEST % groups:
            raise ValueError(f"a divisor of {NARROWEST}, the channels of the first block")
        return groups

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the network."""
        from hpcfed.models.modules import resnet18

        return resnet18(image_shape(features, "model.name 'resnet18-gn'"), self.groups, outputs)


MODELS = {"resnet18-gn": Resnet18}
