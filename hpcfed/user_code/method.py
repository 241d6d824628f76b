"""Checks of a user's method: types, names, shapes and dtypes of everything it returns. Before each call the global
random generators are set to a stream of its own.

The gaps between parameters (`hpcfed.models.flat`) of the vectors that it returns are set to 0: they are in every norm
and sum, so that random numbers of a method in them would be in its step size and in no parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor, float64, strided

from hpcfed.errors import InputError, shown
from hpcfed.rng import Purpose
from hpcfed.types import (
    LocalMethod,
    LocalResult,
    Means,
    Method,
    RoundContext,
    ServerUpdate,
    State,
    Tilt,
    Update,
)
from hpcfed.user_code.blame import defined_at
from hpcfed.user_code.generators import seed_generators
from hpcfed.user_code.lent import Lent

DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
"""Types of a state's tensors: those that hashes, checkpoints and moves between ranks can hold."""
LARGEST = 2**63
"""Magnitude from which a whole number of the record becomes a float."""
Signature = dict[str, tuple[tuple[int, ...], Any]]
"""Name → shape and type of the tensors of a state."""


def checked(method: Method, gaps: Tensor, seed: int) -> Method:
    """Return the method with parts whose results are checked.

    Args:
        gaps: entries of a vector (d,) that no parameter has, int64, on the clients' device.
        seed: of what its ``begin`` draws from global generators.
    """
    return replace(
        method,
        local=cast("LocalMethod", _CheckedLocal(method.local, gaps, seed)),
        server=_CheckedServer(method.server, gaps.cpu(), seed),
        normalize=None if method.normalize is None else _CheckedNormalization(method.normalize, gaps, seed),
    )


class _Checked:
    def __init__(self, part: Any, gaps: Tensor, seed: int):
        self._part, self._gaps, self._seed = part, gaps, seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def _draw(self, context: RoundContext | None = None) -> None:
        """Set the global generators for a call: to its own stream, or to that of the first states."""
        if context is None:
            seed_generators(self._gaps.device, self._seed, Purpose.BEGIN)
            return
        client = 0 if context.client is None else context.client.client
        purpose = Purpose.SERVER_STEP if context.purpose is None else context.purpose
        seed_generators(self._gaps.device, context.seed, purpose, context.round, client)

    def _refuse(self, name: str, what: str, expected: str, got: str) -> None:
        where = ": ".join(filter(None, (defined_at(self._part, name), f"{type(self._part).__name__}.{name}")))
        raise InputError(what, where=where, expected=expected, got=got, remedy="correct it there")

    def _check_kind(self, name: str, answer: Any, kind: type) -> None:
        if not isinstance(answer, kind):
            expected = f"a {kind.__name__}" if kind is not Mapping else "a mapping of names to tensors"
            self._refuse(name, "its answer", expected, f"a {type(answer).__name__}")

    def _signature(self, name: str, state: State) -> Signature:
        self._check_kind(name, state, Mapping)
        tensors: Mapping[Any, Any] = state
        for key, value in tensors.items():
            if not isinstance(key, str):
                self._refuse(name, "a name of its answer", "text", shown(key))
            if not isinstance(value, Tensor):
                self._refuse(name, f"its {key!r}", "a tensor", f"a {type(value).__name__}")
            kind = str(value.dtype).removeprefix("torch.")
            if kind not in DTYPES or value.layout is not strided or value.is_meta:
                got = f"{kind}, {value.layout}, on {value.device.type}"
                self._refuse(name, f"its {key!r}", f"a dense tensor of {', '.join(DTYPES)}", got)
        return {key: (tuple(value.shape), value.dtype) for key, value in state.items()}

    def _check_state(self, name: str, state: State, like: Signature) -> None:
        """Refuse a next state whose names, shapes or types differ from the first one's."""
        found = self._signature(name, state)
        for key in sorted(found.keys() | like.keys()):
            if found.get(key) != like.get(key):
                self._refuse(name, f"its state {key!r}", _named(like.get(key)), _named(found.get(key)))

    @contextmanager
    def _unchanged(self, name: str, **arguments: Tensor | State) -> Iterator[None]:
        """Refuse a call that writes to its arguments."""
        lent = Lent(**arguments)
        yield
        if what := lent.written():
            self._refuse(name, f"its argument {what}", "left as it is", "written to in place")

    def _closed(self, vector: Tensor) -> Tensor:
        """Return a vector (d,) with its gaps set to 0, in place where its memory allows it."""
        if vector.requires_grad or not vector.is_contiguous():
            return vector.detach().index_fill(0, self._gaps, 0)
        return vector.index_fill_(0, self._gaps, 0)

    def _check_number(self, name: str, what: str, number: object, expected: str = "a number") -> None:
        got = f"a {type(number).__name__}"
        if isinstance(number, int | float):
            with suppress(OverflowError):
                float(number)
                return
            got = "a whole number beyond 1e308"
        self._refuse(name, what, expected, got)

    def _check_vector(self, name: str, what: str, vector: object, like: Tensor, dtype: Any) -> None:
        expected = (tuple(like.shape), dtype)
        if not isinstance(vector, Tensor):
            self._refuse(name, what, _named(expected), f"a {type(vector).__name__}")
        elif (tuple(vector.shape), vector.dtype) != expected:
            self._refuse(name, what, _named(expected), _named((tuple(vector.shape), vector.dtype)))


class _CheckedLocal(_Checked):
    _state: Signature | None = None
    _shared: Signature | None = None

    def begin(self, w: Tensor) -> State:
        self._draw()
        with self._unchanged("begin", w=w):
            state = self._part.begin(w)
        self._state = self._signature("begin", state)
        return state

    def begin_shared(self, w: Tensor) -> State:
        self._draw()
        with self._unchanged("begin_shared", w=w):
            state = self._part.begin_shared(w)
        self._shared = self._signature("begin_shared", state)
        return state

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        self._draw(context)
        with self._unchanged("tilt", w=w, shared=shared, client=client):
            tilt = self._part.tilt(w, shared, client, context)
        self._check_kind("tilt", tilt, Tilt)
        vectors = {"shift": tilt.shift, "anchor": tilt.anchor, "offset": tilt.offset}
        for what, vector in vectors.items():
            if vector is not None:
                self._check_vector("tilt", f"its {what}", vector, w, w.dtype)
        if (tilt.offset is not None or tilt.radius) and not self._part.evaluates_elsewhere:
            self._refuse("tilt", "its offset or radius", "a rule with evaluates_elsewhere = True", "False")
        for what, number in (("mu", tilt.mu), ("radius", tilt.radius)):
            self._check_number("tilt", f"its {what}", number)
        return replace(tilt, **{what: self._closed(vector) for what, vector in vectors.items() if vector is not None})

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        self._draw(context)
        with self._unchanged("report", w=w, shared=shared, client=client, delta=local.delta):
            update = self._part.report(local, w, shared, client, context)
        self._check_kind("report", update, Update)
        self._check_kind("report", update.scalars, Mapping)
        for key, number in update.scalars.items():
            self._check_number("report", f"its scalar {key!r}", number)
        if update.delta is not None:
            self._check_vector("report", "its delta", update.delta, w, w.dtype)
        self._signature("report", update.vectors)
        delta = None if update.delta is None else self._closed(update.delta)
        fitting = {name: self._closed(vector) for name, vector in update.vectors.items() if vector.shape == w.shape}
        return replace(update, delta=delta, vectors={**update.vectors, **fitting})

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State | None:
        self._draw(context)
        with self._unchanged("next_state", w=w, shared=shared, client=client, delta=local.delta):
            state = self._part.next_state(sent, local, w, shared, client, context)
        if state is None:
            return None
        if self._state is not None:
            self._check_state("next_state", state, self._state)
        passing = {tensor.untyped_storage().data_ptr() for tensor in (local.delta, *sent.named.values())}
        return {  # the solver's memory is used again for the next client
            name: tensor.clone() if tensor.untyped_storage().data_ptr() in passing else tensor
            for name, tensor in state.items()
        }

    def share(self, shared: State, means: Means) -> State:
        seed_generators(self._gaps.device, self._seed, Purpose.SHARE, means.round)
        with self._unchanged("share", shared=shared, means=means.vectors):
            state = self._part.share(shared, means)
        if self._shared is not None:
            self._check_state("share", state, self._shared)
        return state


class _CheckedServer(_Checked):
    _state: Signature | None = None

    def begin(self, w: Tensor) -> State:
        self._draw()
        with self._unchanged("begin", w=w):
            state = self._part.begin(w)
        self._state = self._signature("begin", state)
        return state

    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        self._draw(context)
        with self._unchanged("step", w=w, state=state, means=means.vectors):
            update = self._part.step(w, state, means, context)
        self._check_kind("step", update, ServerUpdate)
        self._check_vector("step", "its w", update.w, w, float64)
        if self._state is not None:
            self._check_state("step", update.state, self._state)
        if update.server_lr is not None:
            self._check_number("step", "its server_lr", update.server_lr, "a number or None")
        self._check_kind("step", update.metrics, Mapping)
        for name, number in update.metrics.items():
            if not isinstance(name, str):
                self._refuse("step", "the name of a metric", "text", shown(name))
            self._check_number("step", f"its metric {name!r}", number)
        large = {name: float(number) for name, number in update.metrics.items() if abs(number) >= LARGEST}
        return replace(update, w=self._closed(update.w), metrics={**update.metrics, **large})


class _CheckedNormalization(_Checked):
    def factors(self, effective_steps: np.ndarray, steps: np.ndarray, shares: np.ndarray, prox_mu: float) -> np.ndarray:
        factors = self._part.factors(effective_steps, steps, shares, prox_mu)
        if np.shape(factors) != steps.shape:
            self._refuse("factors", "its answer", f"shape {steps.shape}", f"shape {np.shape(factors)}")
        try:
            numbers = np.asarray(factors, dtype=float)
        except (TypeError, ValueError):
            numbers = np.full(steps.shape, math.nan)
        if not np.isfinite(numbers).all():
            self._refuse("factors", "its answer", "finite numbers", shown(factors))
        return numbers


def _named(signature: tuple[tuple[int, ...], Any] | None) -> str:
    """Describe a tensor's shape and type in words."""
    return "none" if signature is None else f"a tensor of shape {signature[0]} in {signature[1]}"
