"""A run's lists, and the method that sends by them.

A method's client side is wrapped: what its `report` returns goes through the parts of ``updates``, each client's apart
and before it is weighted; the parts' states are kept beside the method's own, so that they spill, move and are saved
with it. Not in the list are averaged buffers and what ``evaluate.model: client-average`` adds up, which no server step
sees; a normalisation's factor, which the server knows beforehand, multiplies what is decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import TYPE_CHECKING, Any, cast

from hpcfed.config.user_code.blame import defined_at
from hpcfed.errors import InputError, shown
from hpcfed.types import (
    DELTA,
    MOVED,
    LocalMethod,
    LocalResult,
    Means,
    Method,
    RoundContext,
    State,
    Tilt,
    Trained,
    Update,
)
from hpcfed.updates._base import MOVED_NORM, SUM, MeansPart, PartContext, UpdatePart, Vectors
from hpcfed.updates._coding import Coding, plain
from hpcfed.updates._layout import Layout
from hpcfed.updates._robust import RobustMean
from hpcfed.updates._tile import send_tile

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.updates._mechanism import Privacy

Samples = tuple["Tensor", "Tensor"]
"""x and y, (n, …) each."""
MODEL = "w"
"""Name of the model among the vectors of the parts that pack it."""
PREFIX = "updates."
"""Beginning of the names of parts' tensors in a client's state and in the shared one: ``updates.<place>.<name>``."""


@dataclass(frozen=True)
class Chain:
    """The parts of the lists; `privacy` is None where nothing is noised."""

    updates: tuple[UpdatePart, ...] = ()
    means: tuple[MeansPart, ...] = ()
    down: tuple[UpdatePart, ...] = ()
    privacy: Privacy | None = None

    @property
    def stateful(self) -> bool:
        """Whether clients keep a state for a part."""
        return any(part.stateful for part in self.updates)

    @property
    def keeps_sums(self) -> bool:
        """Whether the means are those of what clients sent."""
        return all(SUM in part.keeps for part in self.means)

    @property
    def robust(self) -> RobustMean | None:
        """The rule in the place of the weighted mean; None without."""
        first = self.means[0] if self.means and self.means[0].replaces_mean else None
        return cast("RobustMean | None", first)

    @property
    def tells_others(self) -> bool:
        """Whether the server may derive from Δ̄, behind both lists, what clients then need not send."""
        return self.keeps_sums and all(part.treats_alike for part in self.updates)

    def codings(self, sizes: tuple[int, ...], number_bits: int) -> list[Coding]:
        """Return how a client's vector is packed before each part, and behind the last.

        Raises:
            InputError: the parts' order has no packed form.
        """
        return _codings(self.updates, sizes, number_bits)

    def codings_down(self, sizes: tuple[int, ...], number_bits: int) -> list[Coding]:
        """Return how the model is packed, likewise."""
        return _codings(self.down, sizes, number_bits)

    def received(self, w: Tensor, layout: Layout, round: int, lr: float, seed: int) -> Tensor:
        """Return the model (d,) as all clients of a round unpack it, from the server's."""
        if not self.down:
            return w
        vectors: Vectors = {MODEL: layout.closed(w)}
        codings = self.codings_down(layout.sizes, 8 * w.element_size())
        for place, part in enumerate(self.down):
            about = PartContext(round, lr, seed, place, coding=codings[place], is_down=True)
            vectors = part.send(vectors, {}, {}, about).vectors
        return layout.opened(vectors[MODEL], w)

    def samples(self, own: Samples, context: RoundContext, num_classes: int | None) -> Samples:
        """Return what a client trains on in a round, from its own samples."""
        for place, part in enumerate(self.updates):
            about = PartContext(context.round, context.lr, context.seed, place, context.client, num_classes=num_classes)
            own = part.trains_on(*own, about)
        return own

    @property
    def moves_clip(self) -> bool:
        """Whether the norm of a clip follows a quantile."""
        return any(getattr(part, "quantile", None) is not None for part in self.updates)

    def clip_of(self, shared: State) -> float | None:
        """Return C of the next round, from the shared state; None where no quantile moves it."""
        found = (shared.get(f"{PREFIX}{place}.{MOVED_NORM}") for place in range(len(self.updates)))
        return next((float(norm) for norm in found if norm is not None), None)

    def after(self, means: Means, seed: int, clip: float | None = None) -> Means:
        """Return the means behind the parts of ``means``, which see what the server's step sees; `clip` is C."""
        for place, part in enumerate(self.means):
            seen = replace(means, vectors={name: vector for name, vector in means.vectors.items() if name != MOVED})
            about = PartContext(means.round, means.lr, seed, place, privacy=self.privacy, clip=clip)
            after = part.after(seen, about)
            means = replace(after, vectors={**means.vectors, **after.vectors})
        return means


def _codings(parts: Sequence[UpdatePart], sizes: tuple[int, ...], number_bits: int) -> list[Coding]:
    found = [plain(sizes, number_bits)]
    for part in parts:
        after = part.coded(found[-1])
        if not isinstance(after, Coding) or not 0 <= after.values <= after.entries or after.bits < 1:
            where, what = defined_at(part, "coded"), f"{type(part).__name__}.coded: its answer"
            expected = "a coding of up to n numbers of a bit or more, by coding.chosen and coding.coded"
            raise InputError(what, where=where, expected=expected, got=shown(after))
        found.append(after)
    return found


@dataclass
class SentUpdate(Update):
    """An update as the server decodes it, and the client's next state of the parts that sent it."""

    state: State = field(default_factory=dict)


def sending(method: Method, chain: Chain, layout: Layout) -> Method:
    """Return the method whose clients send by the parts of ``updates``."""
    if not chain.updates and chain.keeps_sums:
        return method
    return replace(method, local=cast("LocalMethod", _Sending(method, chain, layout)))


class _Sending:
    """A local method whose reports go through the parts of a list."""

    def __init__(self, method: Method, chain: Chain, layout: Layout):
        self._inner, self._chain, self._layout = method.local, chain, layout
        self._codings: list[Coding] = []
        self.stateful, self.carried = self._inner.stateful or chain.stateful, method.carried

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def scalars(self) -> tuple[str, ...]:
        parts = enumerate(self._chain.updates)
        return (*self._inner.scalars, *(f"{PREFIX}{place}.{name}" for place, part in parts for name in part.scalars))

    def vectors(self, alike: bool) -> tuple[str, ...]:
        return self._inner.vectors(alike and self._chain.tells_others)

    def _seen(self, context: RoundContext) -> RoundContext:
        """Return the context that the method sees: what follows from Δ̄ is sent where Δ̄ no longer tells it."""
        return context if self._chain.tells_others else replace(context, alike=False)

    def begin(self, w: Tensor) -> State:
        zeros = {name: zero for name, zero in self._zeros(w).items() if name not in self.carried}
        parts = ((place, part.begin(zeros)) for place, part in enumerate(self._chain.updates))
        return {**self._inner.begin(w), **_joined(parts)}

    def begin_shared(self, w: Tensor) -> State:
        zeros = self._zeros(w)
        parts = ((place, part.begin_shared(zeros)) for place, part in enumerate(self._chain.updates))
        return {**self._inner.begin_shared(w), **_joined(parts)}

    def _zeros(self, w: Tensor) -> Vectors:
        """Return zeros (n,) for each vector that the method may report."""
        names = {**dict.fromkeys(self._names(alike=False)), **dict.fromkeys(self._names(alike=True))}
        return {name: w.new_zeros(self._layout.size) for name in names}

    def _names(self, *, alike: bool) -> Sequence[str]:
        return (*((DELTA,) if self._inner.reports_delta else ()), *self.vectors(alike))

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        return self._inner.tilt(w, _without(shared), _without(client), self._seen(context))

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        return self.report_tile([(local, client, context)], w, shared)[0]

    def report_tile(self, trained: Sequence[Trained], w: Tensor, shared: State) -> list[Update]:
        """Return the updates of R clients, which go through the parts together; see `report`."""
        of_method = _without(shared)
        updates = []
        for local, own, context in trained:
            update = self._inner.report(local, w, of_method, _without(own), self._seen(context))
            # A rule may fill one dict for each client.
            updates.append(replace(update, vectors={**update.vectors}, scalars={**update.scalars}))
        named = [update.named for update in updates]
        alike = all(vectors.keys() == named[0].keys() for vectors in named)
        if not alike or any(vector.shape != w.shape for vectors in named for vector in vectors.values()):
            return updates  # one of which is refused
        return self._sent(updates, trained, shared)

    def _sent(self, updates: Sequence[Update], trained: Sequence[Trained], shared: State) -> list[Update]:
        """Return R clients' updates behind the last part, with the parts' next states and scalars."""
        named = [update.named for update in updates]
        first = {name: self._layout.closed(_stacked([own[name] for own in named])) for name in named[0]}
        number_bits = 8 * next(iter(first.values())).element_size()
        self._codings = self._codings or self._chain.codings(self._layout.sizes, number_bits)
        now: Vectors = first
        places: Vectors = {}
        states: list[dict[str, Tensor]] = [{} for _ in updates]
        scalars = [dict[str, float](update.scalars) for update in updates]
        for place, part in enumerate(self._chain.updates):
            in_these = [self._part_context(place, one[2], places, row) for row, one in enumerate(trained)]
            sent = send_tile(part, now, [_of(own, place) for _, own, _ in trained], _of(shared, place), in_these)
            now, places = sent.vectors, {**places, **sent.places}
            for row, state in enumerate(sent.states):
                states[row] |= _joined([(place, state)])
            for row, numbers in enumerate(sent.scalars):
                scalars[row] |= {f"{PREFIX}{place}.{name}": number for name, number in numbers.items()}
        opened = {
            name: [own[name] for own in named]
            if now[name] is first[name]
            else self._layout.opened(_finite_as(first[name], now[name]), named[0][name]).unbind()
            for name in first
        }
        found: list[Update] = []
        for row in range(len(updates)):
            others = {name: each[row] for name, each in opened.items() if name != DELTA}
            found.append(SentUpdate(opened[DELTA][row] if DELTA in opened else None, others, scalars[row], states[row]))
        return found

    def _part_context(self, place: int, context: RoundContext, places: Vectors, row: int) -> PartContext:
        """Return what a part reads of a client's round, of the tile's places those of its row."""
        of_client = {name: each[row] for name, each in places.items()}
        about = context.round, context.lr, context.seed, place, context.client, self._codings[place], of_client
        return PartContext(*about, carried=self.carried, privacy=self._chain.privacy)

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State | None:
        own, after = _without(client), None
        if self._inner.stateful:
            after = self._inner.next_state(sent, local, w, _without(shared), own, self._seen(context))
        if not isinstance(sent, SentUpdate) or not sent.state:
            return after
        return {**(own if after is None else after), **sent.state}

    def share(self, shared: State, means: Means) -> State:
        import torch

        after = dict(self._inner.share(_without(shared), means))
        vectors = {name: self._layout.closed(means.vectors[name]) for name in means.vectors if name in self._reported()}
        for place, part in enumerate(self._chain.updates):
            prefix = f"{PREFIX}{place}."
            own = {name: torch.tensor(means.scalars[prefix + name], dtype=torch.float64) for name in part.scalars}
            after |= _joined([(place, part.share(_of(shared, place), {**vectors, **own}))])
        return after

    def _reported(self) -> set[str]:
        return {*self._names(alike=False), *self._names(alike=True)}


def _finite_as(before: Tensor, after: Tensor) -> Tensor:
    """Return what parts made of vectors (R, n); nothing finite of one that is not."""
    return after.where(before.abs().amax(1, keepdim=True).isfinite(), nan)


def _stacked(vectors: Sequence[Tensor]) -> Tensor:
    """Return vectors as one stack, (R, …)."""
    import torch

    return vectors[0].unsqueeze(0) if len(vectors) == 1 else torch.stack([*vectors])


def _joined(states: Iterable[tuple[int, State]]) -> dict[str, Tensor]:
    """Return parts' states, by place, as one, with names of their own."""
    return {f"{PREFIX}{place}.{name}": tensor for place, state in states for name, tensor in state.items()}


def _of(state: State, place: int) -> State:
    """Return the state of one part."""
    prefix = f"{PREFIX}{place}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _without(state: State) -> State:
    """Return a state without those of the parts."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)}
