"""oneDNN's matrix product, where it is faster than torch's BLAS.

MKL, the BLAS in torch's builds, takes its AVX2 path on processors that are not Intel's. On AMD's Zen 5, which computes
512 bits in a cycle, oneDNN, which is in the same builds, needs half the time for a large product; on Zen 4, which takes
two cycles, it needs the same time, and more for a weight gradient, which it cannot add where the weights lie. The
operator is not part of torch's public interface, so it is tried before the first round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcfed.ranks.cpu import cpu_facts

if TYPE_CHECKING:
    from torch import Tensor


ZEN_5 = 26
"""AMD's family of processors whose servers are the first to compute 512 bits in a cycle."""


def is_faster(facts: Mapping[str, str] | None = None) -> bool:
    """Whether oneDNN computes large float32 products faster than MKL: with AVX-512 on AMD's Zen 5 and later.

    Args:
        facts: the fields of a core in ``/proc/cpuinfo``; None: of this host's.
    """
    found = cpu_facts() if facts is None else facts
    is_wide = found.get("vendor_id") == "AuthenticAMD" and int(found.get("cpu family", "0")) >= ZEN_5
    return is_wide and "avx512f" in found.get("flags", "").split()


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
