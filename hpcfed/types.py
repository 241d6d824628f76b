"""The words that methods, clients and the reduction share.

Shapes, everywhere in the package: d parameters (a flat vector, padded so that every parameter tensor starts on 64
bytes), N clients, S cohort members, K local steps, B samples of a minibatch, P ranks.

Sign, everywhere: Δ_i = w − y_i, the server's model minus the client's last iterate. It points uphill like a gradient,
and the server subtracts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

State = Mapping[str, "Tensor"]
"""A method's memory: named vectors (d,) and scalars (). Never changed in place; a step returns new ones."""


class Request(IntFlag):
    """What ranks ask of all ranks, in a round's reduction."""

    NOTHING = 0
    STOP = 1
    """A signal came: stop after this round."""
    TIME_IS_UP = 2
    """By rank 0's clock the next round and a checkpoint would not fit."""
    CHECKPOINT = 4
    """By rank 0's clock one is due."""
    HELP = 8
    """This rank's part of a checkpoint could not be written."""


@dataclass(frozen=True)
class ClientInfo:
    """The client that a method is asked about."""

    client: int
    num_samples: int
    mean_samples: float
    """Samples of the federation over N, so that num_samples / mean_samples is 1 where clients are equal."""


@dataclass(frozen=True)
class Tilt:
    """What a method adds to a client's gradient: ``shift + mu·(y − anchor)``, constant during one round.

    ``shift`` and ``anchor`` are vectors (d,); None stands for 0 and for the server's model w. Training starts at w, or
    where ``from_anchor`` is set at the anchor.
    """

    shift: Tensor | None = None
    mu: float = 0.0
    anchor: Tensor | None = None
    from_anchor: bool = False


@dataclass(frozen=True)
class LocalResult:
    """What a client's local solve came to.

    Attributes:
        delta: Δ_i = w − y_i, (d,), in the run's dtype. The solver's buffer: valid until its next solve.
        steps: minibatch gradients computed, τ_i.
        loss_sum: sum over those steps of the minibatch loss, before the tilt.
        lr: η_l of the round.
        effective_steps: ‖a_i‖₁: Δ_i is η_l ‖a_i‖₁ times an average of the client's gradients. None for methods that do
            not ask for it, and for client optimizers that have none (Adam, Yogi).
    """

    delta: Tensor
    steps: int
    loss_sum: float
    lr: float
    effective_steps: float | None = None


@dataclass(frozen=True)
class Report:
    """What a client contributes to the round: vectors (d,) to be averaged, and its next state if it has one."""

    vectors: Mapping[str, Tensor]
    state: State | None = None


@dataclass(frozen=True)
class Means:
    """The round's averages, the same to the last bit on every rank.

    ``mean`` is Σ_{i∈S} p_i(·) with p_i = q_i / q(S), where q_i (1/N or n_i/n) are weights over all N clients. A
    normalisation (FedNova's) replaces Δ_i by a multiple of it, in its mean and in both norms.

    Attributes:
        vectors: mean of each reported vector, (d,), float64.
        mean_delta_sq: mean ‖Δ_i‖².
        delta_sq: ‖Δ̄‖².
        fraction: q(S); |S|/N with uniform weights.
        cohort_size: |S|.
        round: t, counted from 1.
        lr: η_l of the round.
        effective_steps: ‖a_i‖₁ where it is the same for all of the cohort and known, else None.
    """

    vectors: Mapping[str, Tensor]
    mean_delta_sq: float
    delta_sq: float
    fraction: float
    cohort_size: int
    round: int
    lr: float = 0.0
    effective_steps: float | None = None

    @property
    def delta(self) -> Tensor:
        """Δ̄, (d,), float64: the mean of the first reported vector."""
        return next(iter(self.vectors.values()))


@dataclass(frozen=True)
class ServerUpdate:
    """A server step's outcome: the next model (d,), float64; the next state; the step size η_g where there is one."""

    w: Tensor
    state: State = field(default_factory=dict)
    server_lr: float | None = None


class Part(BaseModel):
    """Base of a method's parts: frozen parameters, checked like the rest of the recipe. All memory is passed in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    choice: ClassVar[str | None] = None
    """Name by which a product picks the part; None where it has no meaning outside its own method."""


class LocalMethod(Protocol):
    """What a method does at its clients, and what the server keeps for them."""

    @property
    def stateful(self) -> bool:
        """Whether clients keep a state between rounds."""
        ...

    @property
    def weights(self) -> Literal["samples", "uniform"]:
        """Default of the recipe's ``weights``."""
        ...

    @property
    def sent(self) -> int:
        """Vectors of d parameters that a client sends up in a round, as the papers count them."""
        ...

    @property
    def received(self) -> int:
        """Vectors of d parameters that a client receives in a round, likewise."""
        ...

    @property
    def full_gradient(self) -> bool:
        """Whether a round is one step along the full gradient, whatever work the recipe asks for."""
        ...

    @property
    def uses_effective_steps(self) -> bool:
        """Whether `report` reads ``local.effective_steps``."""
        ...

    @property
    def prox_mu(self) -> float:
        """μ of the quadratic term, where clients share one."""
        ...

    def vectors(self, alike: bool) -> tuple[str, ...]:
        """Return the names of the vectors reported in a round, Δ first and called "delta" if it is among them.

        `alike` says that ‖a_i‖₁ is the same for all of the cohort: what then follows from Δ̄ need not be sent.
        """
        ...

    def begin(self, w: Tensor) -> State:
        """Return a client's state at its first participation; `w` is the *initial* model (d,)."""
        ...

    def begin_shared(self, w: Tensor) -> State:
        """Return what the server keeps for the clients, before round 1; float64, as is the initial model `w` (d,)."""
        ...

    def tilt(self, w: Tensor, shared: State, client: State, who: ClientInfo) -> Tilt:
        """Return what is added to the client's gradient this round; `w` (d,) and `shared` in the run's dtype."""
        ...

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, who: ClientInfo) -> Report:
        """Return the client's contribution, and its next state."""
        ...

    def share(self, shared: State, means: Means) -> State:
        """Return what the server keeps for the clients after the round: pure, float64, the same on every rank."""
        ...


class ServerMethod(Protocol):
    """What a method does with the averages: a pure function, run identically on every rank."""

    def begin(self, w: Tensor) -> State:
        """Return the state before round 1; vectors are float64, `w` is the initial model (d,), float64."""
        ...

    def step(self, w: Tensor, state: State, means: Means) -> ServerUpdate:
        """Return the next model and state; `w` is float64, so is the result."""
        ...


class Normalization(Protocol):
    """By what multiple a client's Δ_i enters the averages."""

    def factors(self, effective_steps: np.ndarray, steps: np.ndarray, shares: np.ndarray, prox_mu: float) -> np.ndarray:
        """Return the multiple of each cohort member, (S,), from their ‖a_i‖₁, τ_i and p_i, each (S,), and from μ."""
        ...


@dataclass(frozen=True)
class Method:
    """A federated method: what its clients do, how their work is normalised, what its server does; each on its own."""

    name: str
    local: LocalMethod
    server: ServerMethod
    normalize: Normalization | None = None

    @property
    def uses_effective_steps(self) -> bool:
        """Whether ‖a_i‖₁ must be known."""
        return self.local.uses_effective_steps or self.normalize is not None

    def parameters(self) -> dict[str, Any]:
        """All parameters by name, for the resolved recipe."""
        merged: dict[str, Any] = {}
        parts: tuple[object, ...] = (self.local, self.normalize, self.server)
        for part in parts:
            if isinstance(part, BaseModel):
                merged |= part.model_dump(mode="json")
        return merged
