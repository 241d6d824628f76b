"""The contract of the parts of both lists, ``updates`` (a client's) and ``means`` (the server's).

Users import the bases as `hpcfed.UpdatePart` and `hpcfed.MeansPart`. All parts are frozen parameters; all memory is
passed in. A client's vectors are those of the method, by name, of n parameters each: a model's gaps are closed before
the list, and opened behind it, so that nothing gets into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hpcfed.rng import Purpose, stream
from hpcfed.types import ClientInfo, Means, Part, State
from hpcfed.updates._coding import Coding

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.updates._mechanism import Privacy

Vectors = Mapping[str, "Tensor"]
"""Named vectors (n,)."""
NORMS, SUM, DELTA_ITSELF, CARRIED, TWICE = "mean_delta_sq", "sum", "delta", "carried", "carried_twice"
"""What a method may read, and a part leave true: that mean ‖Δ_i‖² and ‖Δ̄‖² can be compared; that means are those of
what the clients sent; that each Δ_i is w − y_i; that less is lost of a vector than there is in it (than half of it), so
that a client's state which carries it on stays bounded."""
MOVED_NORM = "norm"
"""Name of C in the shared state of a clip that follows a quantile."""
LESSENS = frozenset({CARRIED, TWICE})


def zeros(vectors: Vectors) -> State:
    """Return 0 for each vector, (n,)."""
    return {name: vector.new_zeros(vector.shape) for name, vector in vectors.items()}


@dataclass(frozen=True, slots=True)
class PartContext:
    """Arguments common to every call of a part.

    Attributes:
        round: t, counted from 1.
        lr: η_l of the round.
        seed: the recipe's ``seed.batches``.
        place: of the part in its list.
        client: the client; None after the sum.
        coding: how a vector is packed that reaches this part.
        places: entries of each vector that are sent, (k,) int64, where a part before has chosen some; by name.
        carried: vectors of which the client's own state carries on what is lost.
        num_classes: of labels; None in `send` and after the sum.
        privacy: what `noise` takes its size from; None where nothing is noised.
        clip: C of the round, which a quantile moves; None where nothing is clipped.
        is_down: whether the part packs the model, for all clients alike; `client` is None then.
    """

    round: int
    lr: float
    seed: int
    place: int
    client: ClientInfo | None = None
    coding: Coding | None = None
    places: Vectors = field(default_factory=dict)
    carried: frozenset[str] = frozenset()
    num_classes: int | None = None
    privacy: Privacy | None = None
    clip: float | None = None
    is_down: bool = False

    def stream(self, *, each_round: bool = True) -> np.random.Generator:
        """Return the random stream of (seed, list, place in it, round, client): equal on any rank, and at each call.

        Without `each_round`, that of round 0: the same in all rounds.
        """
        if self.client is not None:
            purpose, client = Purpose.UPDATES, self.client.client
        else:
            purpose, client = Purpose.DOWN if self.is_down else Purpose.MEANS, 0
        return stream(self.seed, purpose, self.round if each_round else 0, client, self.place)


@dataclass(frozen=True)
class Sent:
    """Answer of a part.

    Attributes:
        vectors: as the server will decode them, in the run's dtype.
        state: the client's next state of this part.
        places: entries of each vector that are sent, (k,) int64, if the part has chosen some.
        scalars: numbers by the names in the part's ``scalars``.
    """

    vectors: Vectors
    state: State = field(default_factory=dict)
    places: Vectors = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)


class UpdatePart(Part):
    """A part of ``updates``: from a client's vectors to those that the server decodes; pure functions.

    A part with a client state says `stateful`, and returns it from `begin`; it lives with the method's own. The
    method's next state, norms and sums are taken of what the last part returns.
    """

    keeps: ClassVar[frozenset[str]] = frozenset()
    """What stays true behind it, of `NORMS`, `DELTA_ITSELF`, `CARRIED` and `TWICE`."""

    stateful: ClassVar[bool] = False
    """Whether clients keep a state between rounds."""
    scalars: ClassVar[tuple[str, ...]] = ()
    """Names of the numbers that a client sends for the part, 8 bytes each; `share` gets their means."""

    @property
    def treats_alike(self) -> bool:
        """Whether carried vectors are sent as all others: else none may be derived from another behind the part."""
        return not self.stateful

    def begin(self, vectors: Vectors) -> State:
        """Return a client's state before its first participation.

        `vectors` are zeros: those that it may report, without the carried ones (``context.carried``).
        """
        return {}

    def begin_shared(self, vectors: Vectors) -> State:
        """Return what the server keeps for the part before round 1; float64, as are the zeros `vectors`."""
        return {}

    def trains_on(self, x: Tensor, y: Tensor, context: PartContext) -> tuple[Tensor, Tensor]:
        """Return the samples that a client trains on in this round, from its own, (n, …) each, which stay as they are.

        It is measured on its own ones.
        """
        return x, y

    def send(self, vectors: Vectors, state: State, shared: State, context: PartContext) -> Sent:
        """Return what the server decodes of these vectors, and the client's next state; `shared` in the run's dtype.

        In a round where the method reports fewer vectors, the others' part of the state stays: return it, too.
        """
        raise NotImplementedError

    def share(self, shared: State, means: Vectors) -> State:
        """Return what the server keeps after a round, from the means, float64; the same on every rank.

        Among them are those of the part's ``scalars``, ().
        """
        return shared

    def coded(self, coding: Coding) -> Coding:
        """Return how a vector is packed behind this part, from how it is before; by default likewise."""
        return coding


class MeansPart(Part):
    """A part of ``means``: from the round's means to those that the method's server step, state and record see."""

    keeps: ClassVar[frozenset[str]] = frozenset()
    """What stays true behind it, of `NORMS`, `SUM` and `DELTA_ITSELF`."""
    replaces_mean: ClassVar[bool] = False
    """Whether it takes the place of the weighted mean (`hpcfed.RobustMean`)."""

    def after(self, means: Means, context: PartContext) -> Means:
        """Return the means with other ``vectors``, (d,), float64; pure, the same on every rank.

        ``delta_sq`` is NaN here, and taken of the last part's answer.
        """
        raise NotImplementedError
