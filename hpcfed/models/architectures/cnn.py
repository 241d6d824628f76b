"""The convolutional networks of the papers' image experiments.

Each takes images (C, H, W), or (H, W) with one channel; convolutions have no padding. Parameters are named by their
layer's number in a `torch.nn.Sequential`, ReLU, pooling and dropout included: ``0.weight``, ``0.bias``, ….
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hpcfed.models import Spec, Width
from hpcfed.models.images import image_shape

if TYPE_CHECKING:
    from torch import nn


class EmnistCnn(Spec):
    """Two 3×3 convolutions (32, 64), one max-pool, a layer of 128, and dropout of ¼ and ½.

    1,206,590 parameters for 28×28 images of 62 classes.

    Reference: Reddi et al., "Adaptive federated optimization", ICLR 2021, appendix; FedExP's util_models.py:17-39.
    """

    draws: ClassVar[bool] = True

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the network."""
        from hpcfed.models.modules import dropout_cnn

        return dropout_cnn(image_shape(features, "model.name 'emnist-cnn'"), outputs)


class CifarCnn(Spec):
    """Two 5×5 convolutions (32, 64), each with a max-pool, and layers of 384 and 192.

    744,330 parameters for CIFAR-10. Reference: FedExP, App. D.1 (util_models.py:8-25).
    """

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the network."""
        from hpcfed.models.modules import pooled_cnn

        return pooled_cnn(image_shape(features, "model.name 'cifar-cnn'"), [32, 64], [384, 192], outputs)


class FeddynCnn(Spec):
    """Two 5×5 convolutions (64, 64), each with a max-pool, and layers of `hidden` and 192.

    797,962 parameters for CIFAR-10. The default is FedDyn's code (utils_models.py:12-85); its paper says ``hidden:
    394``.
    """

    hidden: Width = 384

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the network."""
        from hpcfed.models.modules import pooled_cnn

        return pooled_cnn(image_shape(features, "model.name 'feddyn-cnn'"), [64, 64], [self.hidden, 192], outputs)


class FemnistCnn(Spec):
    """Two 5×5 convolutions (32, 64), each with a max-pool, and a layer of `hidden`.

    608,702 parameters for 28×28 images of 62 classes, which fits the 6.1e5 that GeL states for FEMNIST.
    """

    hidden: Width = 512

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the network."""
        from hpcfed.models.modules import pooled_cnn

        return pooled_cnn(image_shape(features, "model.name 'femnist-cnn'"), [32, 64], [self.hidden], outputs)


class NiidCnn(Spec):
    """Two 5×5 convolutions (6, 16), each with a max-pool, and layers of 120 and 84.

    44,426 parameters for 28×28 images of 10 classes. Reference: Li et al., "Federated learning on non-IID data silos",
    ICDE 2022, section V (NIID-Bench's model.py: simple-cnn).
    """

    def build(self, features: tuple[int, ...], outputs: int) -> nn.Module:
        """Return the network."""
        from hpcfed.models.modules import pooled_cnn

        return pooled_cnn(image_shape(features, "model.name 'niid-cnn'"), [6, 16], [120, 84], outputs)


MODELS = {
    "emnist-cnn": EmnistCnn,
    "cifar-cnn": CifarCnn,
    "feddyn-cnn": FeddynCnn,
    "femnist-cnn": FemnistCnn,
    "niid-cnn": NiidCnn,
}
