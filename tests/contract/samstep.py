"""SAM as a local step in one file outside the package: gradients are taken uphill, at y + ρ ∇f/‖∇f‖.

    local: {step: "samstep:step", step_args: {rho: 0.05}, steps: 20, lr: 0.1}
    algorithm: fedavg

Reference: Foret et al., "Sharpness-aware minimization for efficiently improving generalization", ICLR 2021,
Algorithm 1.
"""

from __future__ import annotations


def step(parameters, batch, context, rho):
    ascent, loss = context.gradient(parameters, batch)
    uphill = parameters + rho / (ascent.norm() + 1e-12) * ascent
    g, _ = context.gradient(uphill, batch)
    return parameters - context.lr * (g + context.tilt(parameters)), loss
