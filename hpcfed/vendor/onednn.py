"""oneDNN's matrix product, where it is faster than torch's BLAS.

MKL, the BLAS in torch's builds, takes its AVX2 path on processors that are not Intel's, so that on those with AVX-512
oneDNN, which is in the same builds, computes a large product in half the time. The operator is not part of torch's
public interface, so it is tried before the first round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcfed.ranks.cpu import cpu_facts

if TYPE_CHECKING:
    from torch import Tensor


def is_faster() -> bool:
    """Whether oneDNN computes large float32 products faster than MKL here: AVX-512, and not Intel's."""
    vendor, flags = cpu_facts().get("vendor_id", "GenuineIntel"), cpu_facts().get("flags", "").split()
    return vendor != "GenuineIntel" and "avx512f" in flags


def hindrance(like: Tensor) -> str:
    """Return why products of tensors like that one cannot be computed, "" if they can."""
    try:
        product(like.new_ones(1, 2), like.new_ones(1, 2), like.new_ones(1))
    except (RuntimeError, AttributeError) as error:  # a build without it, an unsupported type, another signature
        return str(error).splitlines()[0]
    return ""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, (m, n), of x (m, k), W (n, k) and b (n,)."""
    import torch

    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
