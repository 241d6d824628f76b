"""Distributed SGD: one step a round along the averaged full gradient; the baseline for local work.

    client i:   Δ_i = w − y = η ∇f_i(w),      y one step from w with all samples of the client
    server:     w ← w − η_g Δ̄ = w − η_g η ∇f(w)

    η     ``local.lr``             η_g   ``server_lr``

``local.steps``, ``local.epochs``, ``local.batch_size`` and ``budget`` have no part in it: the resolved recipe says one
step of the full batch.

Reduced: d (Δ). State: none.

Reference: Chen et al., "Revisiting distributed synchronous SGD", 2016; FedDyn's introduction.
"""

from __future__ import annotations

from typing import ClassVar

from hpcfed.algorithms._base import ClientRule
from hpcfed.algorithms.fedavg import ServerStep


class FullGradient(ClientRule):
    """One step along the gradient of all samples."""

    choice: ClassVar[str | None] = None
    full_gradient: ClassVar[bool] = True


LOCAL, SERVER = FullGradient, ServerStep
TITLE, REFERENCES = "distributed SGD", ("chen2016revisiting",)
EXAMPLE = {"server_lr": 3.0}
