"""Checks of everything that a part of the user's returns; see `hpcfed.config.user_code.method`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor, float64, int64

from hpcfed.config.user_code.generators import seed_generators
from hpcfed.config.user_code.method import Checked, Signature
from hpcfed.errors import counted
from hpcfed.models.flat import FlatModel
from hpcfed.rng import Purpose
from hpcfed.types import Means, Part, State
from hpcfed.updates._base import MeansPart, PartContext, Sent, UpdatePart, Vectors
from hpcfed.updates._chain import Chain
from hpcfed.updates._robust import ClientVectors


def checked_parts(chain: Chain, model: FlatModel, seed: int) -> Chain:
    """Return the chain with checks around the user's parts."""
    gaps = model.gaps.new_empty(0)
    sends = (_CheckedUpdates(part, gaps, seed) if _is_own(part) else part for part in chain.updates)
    after = (_checked_means(part, model.gaps.cpu(), seed) if _is_own(part) else part for part in chain.means)
    down = (_CheckedUpdates(part, gaps, seed) if _is_own(part) else part for part in chain.down)
    updates, packs = (cast("tuple[UpdatePart, ...]", tuple(parts)) for parts in (sends, down))
    return replace(chain, updates=updates, means=cast("tuple[MeansPart, ...]", tuple(after)), down=packs)


def _checked_means(part: MeansPart, gaps: Tensor, seed: int) -> Checked:
    return (_CheckedRobust if part.replaces_mean else _CheckedMeans)(part, gaps, seed)


def _is_own(part: Part) -> bool:
    return type(part).__module__.partition(".")[0] != "hpcfed"


class _CheckedUpdates(Checked):
    _state: Signature | None = None
    _shared: Signature | None = None

    def begin(self, vectors: Vectors) -> State:
        state = self._answer("begin", self._draw, vectors, vectors=vectors)
        self._state = self._signature("begin", state)
        if vectors and bool(self._state) != self._part.stateful:
            self._refuse(
                "begin", "its answer", f"a state where stateful says so ({self._part.stateful})", str([*state])
            )
        return cast("State", state)

    def begin_shared(self, vectors: Vectors) -> State:
        state = self._answer("begin_shared", self._draw, vectors, vectors=vectors)
        self._shared = self._signature("begin_shared", state)
        return cast("State", state)

    def trains_on(self, x: Tensor, y: Tensor, context: PartContext) -> tuple[Tensor, Tensor]:
        if type(self._part).trains_on is UpdatePart.trains_on:
            return x, y
        found = self._answer("trains_on", self._drawn_by(context), x, y, context, x=x, y=y)
        self._check_kind("trains_on", found, tuple)
        for what, own, like in zip("xy", found, (x, y), strict=False):
            self._check_vector("trains_on", f"its {what}", own, like, like.dtype)
        return cast("tuple[Tensor, Tensor]", found)

    def _drawn_by(self, context: PartContext) -> Callable[[], None]:
        """Return what sets the global generators for a call."""
        client = 0 if context.client is None else context.client.client
        address = Purpose.UPDATES, context.round, client, context.place
        return partial(seed_generators, self._gaps.device, context.seed, *address)

    def send(self, vectors: Vectors, state: State, shared: State, context: PartContext) -> Sent:
        lent: dict[str, Tensor | State] = {"vectors": vectors, "state": state, "shared": shared}
        sent = self._answer("send", self._drawn_by(context), vectors, state, shared, context, **lent)
        self._check_kind("send", sent, Sent)
        self._check_names(sent.vectors, vectors)
        for name, vector in vectors.items():
            self._check_vector("send", f"its {name!r}", sent.vectors[name], vector, vector.dtype)
        if self._state is not None:
            self._check_state("send", sent.state, self._state)
        for name, places in sent.places.items():
            if not isinstance(places, Tensor) or places.dtype != int64 or places.dim() != 1:
                self._refuse("send", f"its places of {name!r}", "a tensor (k,) in int64", type(places).__name__)
            packed = self._part.coded(context.coding).values
            if len(places) != packed:
                expected = f"{counted(packed, 'place')}, the numbers that the coding of `coded` sends"
                self._refuse("send", f"its places of {name!r}", expected, str(len(places)))
        return cast("Sent", sent)

    def _check_names(self, found: Any, vectors: Vectors) -> None:
        self._check_kind("send", found, Mapping)
        if found.keys() != vectors.keys():
            self._refuse("send", "the names of its vectors", ", ".join(vectors), ", ".join(map(str, found)) or "none")

    def share(self, shared: State, means: Vectors) -> State:
        draw = partial(seed_generators, self._gaps.device, self._seed, Purpose.SHARE)
        after = self._answer("share", draw, shared, means, shared=shared, means=means)
        if self._shared is not None:
            self._check_state("share", after, self._shared)
        return cast("State", after)


class _CheckedMeans(Checked):
    def after(self, means: Means, context: PartContext) -> Means:
        draw = partial(seed_generators, self._gaps.device, context.seed, Purpose.MEANS, context.round, 0, context.place)
        after = self._answer("after", draw, means, context, means=means.vectors)
        self._check_kind("after", after, Means)
        if after.vectors.keys() != means.vectors.keys():
            expected, got = ", ".join(means.vectors), ", ".join(map(str, after.vectors)) or "none"
            self._refuse("after", "the names of its vectors", expected, got)
        for name, vector in means.vectors.items():
            self._check_vector("after", f"its {name!r}", after.vectors[name], vector, float64)
        return replace(after, vectors={name: self._closed(vector) for name, vector in after.vectors.items()})


class _CheckedRobust(Checked):
    def of(self, vectors: ClientVectors, context: PartContext) -> Tensor:
        def draw() -> None:
            cast("Any", vectors).restart()  # the call is repeated
            seed_generators(self._gaps.device, context.seed, Purpose.MEANS, context.round, 0, context.place)

        found = self._answer("of", draw, vectors, context, mean=vectors.mean)
        self._check_vector("of", "its answer", found, vectors.mean, float64)
        return self._closed(found)
