"""MOON in one file outside the package: features stay near those of the server's model, away from the client's last.

    step:      y ← y − η ∇(f(y; batch) + μ ℓ),   ℓ = −log(s(z_w) / (s(z_w) + s(z_last))),   s(·) = exp(cos(z, ·)/T)
    z          inputs of the last layer at y; z_w at the server's model w, z_last at the client's last model
    server:    as FedAvg

Client state: the last model, the initial one at the first participation.

Reference: Li, He, Song, "Model-contrastive federated learning", CVPR 2021, Algorithm 1 and eq. (3).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method


def step(parameters, batch, context, mu, temperature):
    x, y = batch
    features, last_layer = context.module[:-1], context.module[-1]
    at = parameters.clone().requires_grad_()
    z = context.output(at, x, features)
    with torch.no_grad():
        others = [context.output(model, x, features) for model in (context.w, context.state["last"])]
    similarities = torch.stack([functional.cosine_similarity(z, other) for other in others], 1)
    contrast = functional.cross_entropy(similarities / temperature, torch.zeros_like(y))
    loss = context.loss(context.output(at, z, last_layer), y) + mu * contrast
    (g,) = torch.autograd.grad(loss, at)
    return parameters - context.lr * g, loss


class KeepsLastModel(ClientRule):
    stateful = True

    def begin(self, w):
        return {"last": w}

    def next_state(self, sent, local, w, shared, client, context):
        return {"last": w - local.delta}


def method() -> Method:
    return Method("MOON", KeepsLastModel(), ServerStep())
