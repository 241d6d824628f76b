"""An attack in one file outside the package: some clients send noise, or train on samples that are noise."""

from __future__ import annotations

import torch

from hpcfed import UpdatePart
from hpcfed.updates import Sent


class Noise(UpdatePart):
    clients: list[int]
    scale: float = 1.0
    of_samples: bool = False

    def samples(self, x, y, context):
        if self.of_samples and context.client.client in self.clients:
            return x + self.drawn(x, context), y
        return x, y

    def send(self, vectors, state, shared, context):
        if self.of_samples or context.client.client not in self.clients:
            return Sent(vectors)
        return Sent({name: self.drawn(vector, context) for name, vector in vectors.items()})

    def drawn(self, like, context):
        numbers = self.scale * context.stream().standard_normal(tuple(like.shape))
        return torch.from_numpy(numbers).to(like)
