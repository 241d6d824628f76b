"""ResNet-18 for small images, with group normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from hpcfed.models import Spec
from hpcfed.models.images import image_shape

if TYPE_CHECKING:
    from torch import nn

NARROWEST = 64


class Resnet18(Spec):
    """ResNet-18 with GroupNorm of `groups` groups in the place of BatchNorm, for images (C, H, W), or (H, W) for C = 1.

    `stem`: ``3x3`` has stride 1 and no max-pool; ``7x7`` has stride 2 and a 3×3 max-pool of stride 2, as for ImageNet.
    `pool`: average over the last map, or over its first `pool` rows and columns alone, as torch's ``avg_pool2d(pool)``.

    CIFAR-10: 11,173,962 parameters, 11,181,642 with ``stem: 7x7``; CIFAR-100: 11,220,132. FedExP's network has ``pool:
    3``: of the 4×4 map of a CIFAR image the corner of 3×3 counts (util_models.py:41-97). FedDyn's has ``stem: 7x7``:
    torchvision's (utils_models.py:40-72).

    References: He et al., "Deep residual learning for image recognition", CVPR 2016, table 1; Hsieh et al., "The
    non-IID data quagmire of decentralized machine learning", 2020.
    """

    later: ClassVar[frozenset[str]] = frozenset({"stem", "pool"})

    groups: int = Field(2, ge=1, le=NARROWEST)
    stem: Literal["3x3", "7x7"] = "3x3"
    pool: int | None = Field(None, ge=1, le=1 << 10)

    @field_validator("groups")
    @classmethod
    def _divides(cls, groups: int) -> int:
        if NARROWEST % groups:
            raise ValueError(f"a divisor of {NARROWEST}, the channels of the first block")
        return groups

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the network."""
        from hpcfed.models.modules import resnet18

        shape = image_shape(features, "model.name 'resnet18-gn'")
        return resnet18(shape, self.groups, outputs, wide_stem=self.stem == "7x7", pool=self.pool)


MODELS = {"resnet18-gn": Resnet18}
