"""SCAFFOLD-ExP: SCAFFOLD's clients, FedExP's server step.

    client i:   as SCAFFOLD
    server:     η_g = max{1, mean ‖Δ_i‖² / (2 (‖Δ̄‖² + ε))},    w ← w − η_g Δ̄;      c as SCAFFOLD

    ε     ``eps``; ``exact_projection``, ``eps_scale`` and ``eps_decay`` as in FedExP

Reduced: d (Δ), or 2d (Δ, Ψ) in a round whose ‖a_i‖₁ differ, or with ``c_scale`` or ``correction: after-momentum``;
‖Δ_i‖² comes with every Δ_i (`Means.mean_delta_sq`). State: SCAFFOLD's.

Reference: Jhunjhunwala, Wang, Joshi, "FedExP", ICLR 2023, Section 6 and Algorithm 2; see `scaffold` and `fedexp`.
"""

from __future__ import annotations

from hpcfed.algorithms.fedexp import Extrapolation
from hpcfed.algorithms.scaffold import ControlVariates

LOCAL, SERVER = ControlVariates, Extrapolation
TITLE, REFERENCES = "SCAFFOLD-ExP", ("jhunjhunwala2023fedexp", "karimireddy2020scaffold")
EXAMPLE = {"eps": 0.0001}
