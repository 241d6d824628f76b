"""FedSAM in one file outside the package: clients' gradients are taken uphill, at y + ρ ∇f/‖∇f‖.

Reference: Qu et al., "Generalized federated learning via sharpness aware minimization", ICML 2022, Algorithm 1.
"""

from __future__ import annotations

from pydantic import Field

from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method, Tilt


class Sharpness(ClientRule):
    evaluates_elsewhere = True

    rho: float = Field(ge=0)

    def tilt(self, w, shared, client, context):
        return Tilt(radius=self.rho)


def method(rho: float) -> Method:
    return Method("FedSAM", Sharpness(rho=rho), ServerStep())
