"""Checks of everything that a user's method returns: types, names, shapes, dtypes, purity.

Before each call the global random generators are set to a stream of that call.

Rules are pure functions. The first call of each function is made twice, and both answers must be bitwise equal: that
finds most memory outside the states, not all of it.

The gaps between parameters (`hpcfed.models.flat`) of the vectors that it returns are set to 0: they are in every norm
and sum, so that random numbers of a method in them would be in its step size and in no parameter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
from torch import Tensor, equal, float64, strided

from hpcfed.config.user_code.blame import defined_at
from hpcfed.config.user_code.generators import seed_generators
from hpcfed.config.user_code.lent import WriteDetector
from hpcfed.config.user_code.repeated import hashes_of, lost_assignment, with_own_containers
from hpcfed.errors import RAISED, HpcfedError, InputError, shown
from hpcfed.rng import Purpose
from hpcfed.types import (
    RESERVED,
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

log = logging.getLogger("hpcfed")
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
"""Types of a state's tensors: those that hashes, checkpoints and moves between ranks can hold."""
MAX_INTEGER = 2**63
"""Magnitude from which a whole number of the record becomes a float."""
Lendable = dict[str, Tensor | State]
"""Arguments of a call, which must be left as they are, by name."""
Signature = dict[str, tuple[tuple[int, ...], Any]]
"""Name → shape and type of the tensors of a state."""


def checked(method: Method, gaps: Tensor, seed: int, *, by_steps: bool, averages: bool) -> Method:
    """Return the method with parts whose results are checked.

    Args:
        gaps: entries of a vector (d,) that no parameter has, int64, on the clients' device.
        seed: of what its ``begin`` draws from global generators.
        by_steps: whether its normalisation is hpcfed's own, which divides by the effective steps.
        averages: whether the evaluated model is w − Δ̄, so that each delta must be Δ_i itself.
    """
    return replace(
        method,
        local=cast("LocalMethod", _CheckedLocal(method.local, gaps, seed, by_steps, averages)),
        server=_CheckedServer(method.server, gaps.cpu(), seed),
        normalize=None if method.normalize is None else _CheckedNormalization(method.normalize, gaps, seed),
    )


class Checked:
    """A part of the user's whose answers are checked."""

    def __init__(self, part: Any, gaps: Tensor, seed: int):
        self._part, self._gaps, self._seed = part, gaps, seed
        self._repeated: set[str] = set()

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

    def _answer(self, name: str, draw: Callable[[], None], *arguments: Any, **lent: Tensor | State) -> Any:
        """Call a function of the part, twice the first time, and return its answer.

        Args:
            draw: sets the global generators before each call.
            lent: the tensors among the arguments, which must be left as they are.
        """

        def call() -> Any:
            draw()
            watched, given = WriteDetector(**lent), [with_own_containers(argument) for argument in arguments]
            answer = getattr(self._part, name)(*given)
            if what := watched.written():
                self._refuse(name, f"its argument {what}", "left as it is", "written to in place")
            for argument, copy in zip(arguments, given, strict=True):
                if isinstance(argument, Mapping) and (key := lost_assignment(argument, copy, answer)) is not None:
                    what = next(word for word, one in lent.items() if one is argument)
                    self._refuse(name, f"its argument {what} {key!r}", "left as it is, or returned", "replaced")
            return answer

        answer = call()
        if name not in self._repeated:
            before = hashes_of(answer, self._gaps)
            del answer  # as large as a model
            try:
                answer = call()
            except HpcfedError:
                raise
            except RAISED as error:
                if isinstance(error, MemoryError | OSError | RuntimeError):  # of the machine, perhaps
                    raise
                self._refuse_impure(name, f"{type(error).__name__}: {error}")
            self._check_repeated(name, before, hashes_of(answer, self._gaps), lent)
            self._repeated.add(name)  # not before: a group of clients that failed is trained again, one after another
        return answer

    def _check_repeated(
        self, name: str, before: Mapping[str, int], after: Mapping[str, int], lent: Mapping[str, Tensor | State]
    ) -> None:
        """Refuse two different answers; on an accelerator, whose kernels may cause them, say so."""
        different = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        if not different:
            return
        w = lent.get("w")
        if isinstance(w, Tensor) and w.device.type != "cpu":
            log.warning(
                "%s: a second call with the same arguments gave a different %s: either a kernel of the device is not "
                "deterministic, or it remembers outside its state, and the run depends on the number of ranks",
                self._place(name),
                min(different),
            )
            return
        self._refuse_impure(name, f"a different {min(different)}")

    def _refuse_impure(self, name: str, got: str) -> NoReturn:
        expected = "the same from a second call with the same arguments"
        remedy = "keep what it remembers in its state, and draw by context.stream() or the global generators"
        if name == "factors":
            remedy = "it has no memory, and may draw by the global generators, the same numbers in each round"
        self._refuse(name, "its answer", expected, got, remedy)

    def _place(self, name: str) -> str:
        return ": ".join(filter(None, (defined_at(self._part, name), f"{type(self._part).__name__}.{name}")))

    def _refuse(self, name: str, what: str, expected: str, got: str, remedy: str = "correct it there") -> NoReturn:
        raise InputError(what, where=self._place(name), expected=expected, got=got, remedy=remedy)

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
            if key in RESERVED:
                self._refuse(name, "a name of its answer", f"another than {', '.join(RESERVED)}", repr(key))
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


class _CheckedLocal(Checked):
    _state: Signature | None = None
    _shared: Signature | None = None

    def __init__(self, part: LocalMethod, gaps: Tensor, seed: int, by_steps: bool, averages: bool):
        super().__init__(part, gaps, seed)
        self._averages = averages
        self._counts_steps = by_steps or part.uses_effective_steps  # ‖a_i‖₁, which every rank computes with prox_mu

    def begin(self, w: Tensor) -> State:
        state = self._answer("begin", self._draw, w, w=w)
        self._state = self._signature("begin", state)
        return state

    def begin_shared(self, w: Tensor) -> State:
        state = self._answer("begin_shared", self._draw, w, w=w)
        self._shared = self._signature("begin_shared", state)
        return state

    def tilt(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        tilt = self._tilt("tilt", w, shared, client, context)
        if self._counts_steps and not math.isclose(tilt.mu, self._part.prox_mu, rel_tol=1e-6):
            expected = f"{self._part.prox_mu:g}, its prox_mu, by which the effective steps are counted"
            remedy = "give prox_mu and every tilt of the rule one μ, or use another normalisation"
            self._refuse("tilt", "its mu", expected, f"{tilt.mu:g}", remedy)
        return tilt

    def personal(self, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        return self._tilt("personal", w, shared, client, context)

    def _tilt(self, name: str, w: Tensor, shared: State, client: State, context: RoundContext) -> Tilt:
        arguments: Lendable = {"w": w, "shared": shared, "client": client}
        tilt = self._answer(name, partial(self._draw, context), *arguments.values(), context, **arguments)
        self._check_kind(name, tilt, Tilt)
        vectors = {name: getattr(tilt, name) for name in ("shift", "anchor", "offset", "after_momentum")}
        for what, vector in vectors.items():
            if vector is not None:
                self._check_vector(name, f"its {what}", vector, w, w.dtype)
        if (tilt.offset is not None or tilt.radius) and not self._part.evaluates_elsewhere:
            self._refuse(name, "its offset or radius", "a rule with evaluates_elsewhere = True", "False")
        for what, number in (("mu", tilt.mu), ("radius", tilt.radius)):
            self._check_number(name, f"its {what}", number)
        return replace(tilt, **{what: self._closed(vector) for what, vector in vectors.items() if vector is not None})

    def report(self, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext) -> Update:
        arguments: Lendable = {"w": w, "shared": shared, "client": client}
        draw = partial(self._draw, context)
        update = self._answer("report", draw, local, *arguments.values(), context, delta=local.delta, **arguments)
        self._check_kind("report", update, Update)
        self._check_kind("report", update.scalars, Mapping)
        for key, number in update.scalars.items():
            self._check_number("report", f"its scalar {key!r}", number)
        if update.delta is not None:
            self._check_vector("report", "its delta", update.delta, w, w.dtype)
            if self._averages and update.delta is not local.delta and not equal(update.delta, local.delta):
                expected = "Δ_i itself, of which evaluate.model: cohort-average makes the clients' average"
                remedy = "use evaluate.model: client-average, or report the other vector by vectors"
                self._refuse("report", "its delta", expected, "another vector", remedy)
        self._signature("report", update.vectors)
        delta = None if update.delta is None else self._closed(update.delta)
        fitting = {name: self._closed(vector) for name, vector in update.vectors.items() if vector.shape == w.shape}
        return replace(update, delta=delta, vectors={**update.vectors, **fitting})

    def next_state(
        self, sent: Update, local: LocalResult, w: Tensor, shared: State, client: State, context: RoundContext
    ) -> State | None:
        arguments: Lendable = {"w": w, "shared": shared, "client": client}
        draw = partial(self._draw, context)
        given = (sent, local, *arguments.values(), context)
        state = self._answer("next_state", draw, *given, delta=local.delta, **arguments)
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
        draw = partial(seed_generators, self._gaps.device, self._seed, Purpose.SHARE, means.round)
        state = self._answer("share", draw, shared, means, shared=shared, means=means.vectors)
        if self._shared is not None:
            self._check_state("share", state, self._shared)
        return state


class _CheckedServer(Checked):
    _state: Signature | None = None

    def begin(self, w: Tensor) -> State:
        state = self._answer("begin", self._draw, w, w=w)
        self._state = self._signature("begin", state)
        return state

    def step(self, w: Tensor, state: State, means: Means, context: RoundContext) -> ServerUpdate:
        draw = partial(self._draw, context)
        update = self._answer("step", draw, w, state, means, context, w=w, state=state, means=means.vectors)
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
        large = {name: float(number) for name, number in update.metrics.items() if abs(number) >= MAX_INTEGER}
        return replace(update, w=self._closed(update.w), metrics={**update.metrics, **large})


class _CheckedNormalization(Checked):
    def factors(self, effective_steps: np.ndarray, steps: np.ndarray, shares: np.ndarray, prox_mu: float) -> np.ndarray:
        draw = partial(seed_generators, self._gaps.device, self._seed, Purpose.FACTORS)
        factors = self._answer("factors", draw, effective_steps, steps, shares, prox_mu)
        if np.shape(factors) != steps.shape:
            self._refuse("factors", "its answer", f"shape {steps.shape}", f"shape {np.shape(factors)}")
        try:
            numbers = np.ascontiguousarray(factors, dtype=float)
        except (TypeError, ValueError):
            numbers = np.full(steps.shape, math.nan)
        if not np.isfinite(numbers).all():
            self._refuse("factors", "its answer", "finite numbers", shown(factors))
        return numbers


def _named(signature: tuple[tuple[int, ...], Any] | None) -> str:
    """Describe a tensor's shape and type in words."""
    return "none" if signature is None else f"a tensor of shape {signature[0]} in {signature[1]}"
