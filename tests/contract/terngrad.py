"""TernGrad in one file outside the package: a part of ``updates``, and the same idea for the means.

    v ← s · sign(v) · b,   s = max |v|,   b_j = 1 with probability |v_j| / s, else 0;      unbiased

Reference: Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hpcfed import MeansPart, UpdatePart
from hpcfed.updates import Sent


class Ternary(UpdatePart):
    """Each number becomes −s, 0 or s: two bits, and s once."""

    def send(self, vectors, state, shared, context):
        random = context.stream()
        return Sent({name: ternary(vector, random) for name, vector in vectors.items()})

    def coded(self, coding):
        return coding.coded(bits=2, scales=1)


def ternary(vector, random):
    sizes = vector.abs()
    largest = sizes.max()
    draws = torch.from_numpy(random.random(len(vector))).to(vector)
    return torch.where(draws * largest < sizes, vector.sign() * largest, 0.0)


class Damped(MeansPart):
    """The mean times a number: a part of ``means``."""

    gain: float

    def after(self, means, context):
        return replace(means, vectors={name: self.gain * vector for name, vector in means.vectors.items()})
