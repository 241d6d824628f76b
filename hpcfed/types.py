"""The types that methods, clients and the reduction share: contexts, updates, means, and the protocols of rules.

Shapes, everywhere in the package: d parameters (a flat vector, padded so that every parameter tensor starts on 64
bytes), N clients, S cohort members, K local steps, B samples of a minibatch, P ranks. The gaps between tensors are 0;
the tilts, reports and models that a rule of yours returns have them set to 0 again.

Sign, everywhere: Δ_i = w − y_i, the server's model minus the client's last iterate. It points uphill like a gradient,
and the server subtracts it.

Treat all instances as immutable. Those made for each client in each round are not frozen, since frozen ones take two
to four times as long to make: with 20 small clients, 3 % of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from hpcfed.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.rng import Purpose

State = Mapping[str, "Tensor"]
"""State of a method: named vectors (d,) and scalars (), or other dense tensors of types that NumPy has, too.

Never changed in place; a step returns new ones.
"""

DELTA = "delta"
"""Name of Δ_i among the vectors of a round."""
PERSONAL = "personal"
"""Name of the client's own model in the state of methods that train one (`hpcfed.ClientRule.personal`)."""
RESERVED = LAST, MOVED, AVERAGE, STEP_AVERAGE, STEPS, BUFFERS = (
    "last-model",
    "moved",
    "client-average",
    "step-average",
    "step-sum",
    "buffers",
)
"""Reserved names of the tensors that averages of models and of buffers add to a method's own."""


class Request(IntFlag):
    """Requests of a rank to all ranks, sent with a round's reduction."""

    NOTHING = 0
    STOP = 1
    """A signal came: stop after this round."""
    TIME_IS_UP = 2
    """By rank 0's clock the next round and a checkpoint would not fit."""
    CHECKPOINT = 4
    """By rank 0's clock one is due."""
    HELP = 8
    """This rank's part of a checkpoint could not be written."""


@dataclass
class ClientInfo:
    """A client's number and size."""

    client: int
    num_samples: int
    mean_samples: float
    """Samples of the federation over N, so that num_samples / mean_samples is 1 where clients are equal."""


@dataclass(slots=True)
class RoundContext:
    """Arguments common to every call of a rule.

    Attributes:
        round: t, counted from 1.
        lr: η_l of the round.
        client: the client; None at the server.
        alike: True if all members of the cohort share one known ‖a_i‖₁ and no factor rescales a Δ_i; False also where
            no part of the method uses it.
        loss: the client's f_i(w) over all its samples, for rules with ``loss_at_w``; else None.
        seed, purpose: of `stream`.
        num_parameters: of the model that clients share; a vector (d,) is longer, by the gaps between tensors.
    """

    round: int
    lr: float
    client: ClientInfo | None = None
    alike: bool = False
    loss: float | None = None
    seed: int = 0
    purpose: Purpose | None = None
    num_parameters: int = 0

    def stream(self) -> np.random.Generator:
        """Return the random stream of (seed, purpose, round, client): equal on any rank, and at each call.

        `tilt`, `report`, `next_state` and the server's `step` have a purpose each, so their draws are independent.
        """
        from hpcfed.rng import Purpose, stream

        client = 0 if self.client is None else self.client.client
        return stream(self.seed, Purpose.SERVER_STEP if self.purpose is None else self.purpose, self.round, client)


@dataclass
class Tilt:
    """A method's term in a client's gradient: ``shift + mu·(y − anchor)``, constant during one round.

    ``shift`` and ``anchor`` are vectors (d,); None stands for 0 and for the server's model w. Training starts at w, or
    where ``from_anchor`` is set at the anchor.

    ``after_momentum``, (d,), is added to the direction of each step instead, which neither clip nor momentum change:
    y ← y − η (direction + ``after_momentum``). Guessed steps go on without it.

    The gradient is taken at y + ``offset``, (d,), and with an ascent ``radius`` ρ (SAM) at ρ g/‖g‖ from there, g the
    minibatch's gradient there. Rules that set either say ``evaluates_elsewhere``. A step with a radius computes two
    gradients and counts as one: τ_i, the effective steps and the record's ``gradients`` count steps. The module's
    running statistics are of the pass that gives this gradient, not of the first one with a radius.
    """

    shift: Tensor | None = None
    mu: float = 0.0
    anchor: Tensor | None = None
    from_anchor: bool = False
    offset: Tensor | None = None
    radius: float = 0.0
    after_momentum: Tensor | None = None


@dataclass
class LocalResult:
    """Result of a client's local solve.

    Attributes:
        delta: Δ_i = w − y_i, (d,), in the run's dtype. The solver's buffer: valid until its next solve.
        steps: τ_i, minibatch steps; one gradient each, but two with a tilt's radius, and any number by an own step.
        loss_sum: sum over those steps of the minibatch loss, before the tilt; on a device a scalar tensor of its own.
        lr: η_l of the round.
        effective_steps: ‖a_i‖₁, so that Δ_i = η_l ‖a_i‖₁ times an average of its gradients; None for methods without
            ``uses_effective_steps``, and for client optimizers that have none (Adam, Yogi).
        own: the client's private parameters and buffers after training, new tensors; empty without.
        buffers: the averaged buffers after training, likewise. Methods use neither.
        personal: last iterate of the second solve, (d,), of rules that say `trains_personal`; else None.
    """

    delta: Tensor
    steps: int
    loss_sum: float | Tensor
    lr: float
    effective_steps: float | None = None
    own: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    personal: Tensor | None = None


@dataclass
class Update:
    """A client's contribution to the round: Δ_i, further named vectors and scalars, each averaged over the cohort.

    Attributes:
        delta: Δ_i, (d,) in the run's dtype; None for rules that report none (``reports_delta``).
        vectors: (d,) each, likewise, by the names that the rule's `vectors` returns.
        scalars: numbers by the names in the rule's ``scalars``.
    """

    delta: Tensor | None
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def named(self) -> Mapping[str, Tensor]:
        """All vectors by name, Δ_i as "delta" and first."""
        return self.vectors if self.delta is None else {DELTA: self.delta, **self.vectors}


@dataclass(frozen=True)
class Means:
    """The round's averages, the same to the last bit on every rank.

    ``mean`` is Σ_{i∈S} p_i(·) with p_i = q_i / q(S), where q_i (1/N or n_i/n) are weights over all N clients. A
    normalisation (FedNova's) replaces Δ_i by a multiple of it, in its mean and in both norms.

    Attributes:
        vectors: mean of each reported vector, (d,), float64; of Δ_i as "delta".
        mean_delta_sq: mean ‖Δ_i‖²; NaN where no Δ_i is reported.
        delta_sq: ‖Δ̄‖², likewise.
        fraction: q(S); |S|/N with uniform weights.
        cohort_size: |S|.
        round: t, counted from 1.
        lr: η_l of the round.
        effective_steps: ‖a_i‖₁ where it is the same for all of the cohort and known, else None.
        scalars: mean of each reported scalar.
        client_scalars: each client's, (S,) by place in the cohort, for server rules with ``client_scalars``; NaN for a
            client that was skipped. Empty for others.
    """

    vectors: Mapping[str, Tensor]
    mean_delta_sq: float
    delta_sq: float
    fraction: float
    cohort_size: int
    round: int
    lr: float = 0.0
    effective_steps: float | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)
    client_scalars: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def delta(self) -> Tensor:
        """Δ̄, (d,), float64.

        Raises:
            InputError: the method's clients report no Δ_i.
        """
        if DELTA not in self.vectors:
            got, remedy = f"clients that report {', '.join(self.vectors)}", "use means.vectors, or report a delta"
            raise InputError("means.delta: no mean of Δ_i in this method", got=got, remedy=remedy)
        return self.vectors[DELTA]


@dataclass(frozen=True)
class ServerUpdate:
    """Result of a server step.

    Attributes:
        w: the next model, (d,), float64.
        state: the next state.
        server_lr: the step size η_g, where there is one.
        metrics: numbers by name for the round's line in the record, column ``method``.
    """

    w: Tensor
    state: State = field(default_factory=dict)
    server_lr: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Part(BaseModel):
    """Base of a method's parts: frozen parameters, checked like the rest of the recipe. All memory is passed in."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    choice: ClassVar[str | None] = None
    """Name by which a combination picks the part; None where it has no meaning outside its own method."""
    later: ClassVar[frozenset[str]] = frozenset()
    """Parameters added since a release: recorded recipes omit them at their default, so that earlier runs go on."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Refuse a parameter with the name of a base's property: pydantic warns, and then the property is read.

        Raises:
            TypeError: naming both.
        """
        super().__pydantic_init_subclass__(**options)
        for name in cls.model_fields:
            if isinstance(getattr(cls, name, None), property):
                base = next(kind for kind in cls.__mro__ if name in vars(kind))
                what = f"the parameter {name!r} of {cls.__name__} is hidden by {base.__name__}.{name}"
                raise TypeError(f"{what}: write it as a property, or give the parameter another name")


class LocalMethod(Protocol):
    """Client side of a method, and its shared state: tensors of the server that clients read (SCAFFOLD's c).

    Order of calls: `begin_shared` once, before round 1, and `begin` at a client's first participation. In a round
    `tilt`, the local solve, `report` and, if `stateful`, `next_state` for each member of the cohort, on the rank that
    trains it; then the server's `step` and `share`, once on every rank.

    All are pure functions: each may be called again with the same arguments, and must return the same bits.
    """

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
        """Whether a round is one step along the full gradient, in place of the recipe's local work."""
        ...

    @property
    def uses_effective_steps(self) -> bool:
        """Whether `report` reads ``local.effective_steps``."""
        ...

    @property
    def prox_mu(self) -> float:
        """μ of the quadratic term, where clients share one. Effective steps are counted with it as ``tilt.mu``."""
        ...

    @property
    def reports_delta(self) -> bool:
        """Whether a client's `Update` has a ``delta``."""
        ...

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the reported scalars."""
        ...

    @property
    def evaluates_elsewhere(self) -> bool:
        """Whether a tilt may have an offset or a radius."""
        ...

    @property
    def loss_at_w(self) -> bool:
        """Whether ``context.loss`` is needed: one more pass over each client's samples a round."""
        ...

    @property
    def carried(self) -> frozenset[str] | None:
        """Reported vectors that the client's next state takes in as they were sent; None for all, if `stateful`.

        What was lost of one on its way comes again by itself, so that error feedback would send it twice.
        """
        ...

    def vectors(self, alike: bool) -> tuple[str, ...]:
        """Return the names of the vectors reported in a round beside Δ_i.

        If `alike`, all members share one known ‖a_i‖₁ and no factor rescales a Δ_i: what follows from Δ̄ need not be
        sent.
        """
        ...

    def begin(self, w: Tensor) -> State:
        """Return a client's state before its first participation; `w` is the *initial* model, (d,) in the run's dtype.

        Pure: it may be called any number of times.
        """
        ...

    def begin_shared(self, w: Tensor) -> State:
        """Return the shared state before round 1; float64, as is the initial model `w` (d,)."""
        ...

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        """Return what is added to the client's gradient this round; `w` (d,) and `shared` in the run's dtype."""
        ...

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        """Return the client's contribution; `client` is its state, never None.

        A rule that compresses returns the decoded vectors; ``bytes_up`` counts them as dense ones. What compresses
        any method's is a part of ``updates``.
        """
        ...

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State | None:
        """Return the client's next state; None leaves the state as it is.

        `sent` is what `report` returned: a rule that compresses keeps Δ_i + e_i − ``sent.delta`` as its next error
        e_i. ``sent`` and ``local.delta`` are valid until the next client is trained: return new tensors. `w` and the
        tensors of `client` may be returned, for they are copied.
        """
        ...

    def share(self, shared: State, means: Means) -> State:
        """Return the shared state after the round: pure, float64, the same on every rank."""
        ...


Trained = tuple[LocalResult, State, RoundContext]
"""What `LocalMethod.report` reads of one client: its training, its state, and its context."""


class TileMethod(Protocol):
    """A local method whose clients send by parts of ``updates``, those of a tile together."""

    def report_tile(self, trained: Sequence[Trained], w: Tensor, shared: State) -> list[Update]:
        """Return `LocalMethod.report`'s answers for the clients of a tile, each with the bits that it has alone."""
        ...


class ServerMethod(Protocol):
    """Server side of a method: a pure function of the averages, run identically on every rank."""

    def begin(self, w: Tensor) -> State:
        """Return the state before round 1; vectors are float64, `w` is the initial model (d,), float64."""
        ...

    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        """Return the next model and state; `w` is float64, so is the result, which is rounded to the run's dtype.

        A rule whose class says ``client_scalars = True`` finds each client's scalars in ``means.client_scalars``. One
        whose iterates are not its result names the model that is, a value of ``evaluate.model``, as ``final_model``.
        Of the package's own rules, one that reads ``means.delta_sq`` says ``reads_delta_sq = True``: for others a GPU
        computes it beside the step, and it is NaN in here. A rule says in ``reads`` that it compares
        ``means.mean_delta_sq`` with ‖Δ̄‖² ("mean_delta_sq"), or that a state of it or of its clients adds up what was
        sent ("sum"): behind parts of ``updates`` and ``means`` that spoil this it is refused.
        """
        ...


class Normalization(Protocol):
    """Factor of each client's Δ_i in the averages (FedNova)."""

    def factors(self, effective_steps: np.ndarray, steps: np.ndarray, shares: np.ndarray, prox_mu: float) -> np.ndarray:
        """Return the factor of each cohort member, (S,), from their ‖a_i‖₁, τ_i and p_i, each (S,), and from μ.

        ‖a_i‖₁ is counted with μ, the local part's ``prox_mu``, whatever its tilts have.

        Every rank calls it; a draw from the global generators has the same numbers in each round.
        """
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

    def reported(self, alike: bool) -> tuple[str, ...]:
        """Return the names of all vectors that clients report, "delta" first where it is among them; see `vectors`."""
        return (*((DELTA,) if self.local.reports_delta else ()), *self.local.vectors(alike))

    @property
    def carried(self) -> frozenset[str]:
        """Reported vectors of which a client's state carries on what was lost on their way."""
        if not self.local.stateful:
            return frozenset()
        named: frozenset[str] | None = getattr(self.local, "carried", None)
        return frozenset((*self.reported(alike=False), *self.reported(alike=True))) if named is None else named

    @property
    def counts_clients(self) -> bool:
        """Whether a state depends on N or n, by q(S) or the mean size: a client left out changes every round."""
        return any(getattr(part, "counts_clients", False) for part in (self.local, self.normalize, self.server))

    @property
    def reads(self) -> frozenset[str]:
        """The ``reads`` of its parts: quantities beside the means, which parts of ``updates`` may not spoil."""
        parts = (part for part in (self.local, self.normalize, self.server) if part is not None)
        return frozenset({"carried"} if self.carried else ()).union(*(getattr(part, "reads", ()) for part in parts))

    @property
    def final_model(self) -> str:
        """The model of ``evaluate.model: auto``: the server rule's ``final_model`` where it has one, else ``last``."""
        return str(getattr(self.server, "final_model", "last"))

    @property
    def client_scalars(self) -> bool:
        """Whether the server rule reads each client's scalars."""
        return bool(getattr(self.server, "client_scalars", False))

    def parameters(self) -> dict[str, Any]:
        """Parameters by name, for the resolved recipe."""
        merged: dict[str, Any] = {}
        parts: tuple[object, ...] = (self.local, self.normalize, self.server)
        for part in parts:
            if isinstance(part, Part):
                fields = type(part).model_fields
                unset = {key for key in part.later if getattr(part, key) == fields[key].default}
                merged |= part.model_dump(mode="json", exclude=unset)
        return merged
