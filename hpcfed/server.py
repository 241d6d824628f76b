"""The server of a run, the same on every rank: its model, its state, what it shares with clients, and its step.

All vectors lie in one place, `home`. That is the host; or, of a large model, each rank's GPU, where clients read them
and their sums already are. Then nothing of the model's size goes up in a round, and what hashes, checkpoints and files
need comes down in the background. The bits are those of the host (`hpcfed.algorithms._blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hpcfed.algorithms._blocks import BLOCK, server_step
from hpcfed.algorithms._evaluated import LAST_ROUND, evaluated_model
from hpcfed.arithmetic.sums import norm_from
from hpcfed.errors import Diverged
from hpcfed.ranks.accelerators import download, upload
from hpcfed.reduce.checks import check_step
from hpcfed.reduce.finite import LOWER
from hpcfed.types import DELTA, Means, Method, RoundContext, ServerUpdate, State

HOST = torch.device("cpu")
SUM, SQUARES = "sum of w", "squares of the mean delta"
"""Names of numbers that come down with the model."""
LARGEST_ON_HOST = BLOCK
"""Entries of the largest model whose server stays on the host: a step's launches take longer than its arithmetic."""


class Server:
    """The model and the states of a method's server.

    Args:
        method: of the run.
        initial_w: the model before round 1, (d,) on the rank's device.
        home: where the vectors lie: the host, or the rank's device.
        evaluate_model: the recipe's ``evaluate.model``.
        squares: `sums_of_squares` of a mean update on a device.

    Attributes:
        delta_sq: ‖Δ̄‖² of the last step; NaN where no Δ_i was reported.
    """

    def __init__(
        self,
        method: Method,
        initial_w: Tensor,
        home: torch.device,
        evaluate_model: str,
        squares: Callable[[Tensor], Tensor],
    ):
        self._method, self._initial_w, self._home, self._squares = method, initial_w, home, squares
        self._dtype, self._evaluate_model = initial_w.dtype, evaluate_model
        self.begin()

    def begin(self) -> None:
        """Set all to what it is before the first round."""
        w = self._initial_w.to(HOST)
        start = w.double()
        state, shared = self._method.server.begin(start), self._method.local.begin_shared(start)
        del start  # which is twice as large as a model in float32
        self._keep(w, state, shared)
        self.delta_sq = math.nan
        names = LAST_ROUND.get(self._evaluate_model, ())
        self._last = {name: self._unmoved()[name] for name in names}

    def _unmoved(self) -> State:
        """Return what the evaluated model may need of a round that leaves the model as it is."""
        return {"previous": self._w, "mean_delta": torch.zeros_like(self._w, dtype=torch.float64)}

    def _keep(self, w: Tensor, state: State, shared: State, delta: Tensor | None = None) -> None:
        """Take a model and states; those of a GPU, and ‖Δ̄‖², are on their way to the host when this returns."""
        self._w = w.to(self._home, self._dtype).contiguous()
        self._state, self._shared = self._compact(state), self._compact(shared)
        named = self._named()
        there = {name: tensor for name, tensor in named.items() if tensor.device.type != "cpu"}
        self._host: Mapping[str, Tensor] | None = None if there else named
        if there:
            there |= {SUM: self._w.sum(), **({} if delta is None else {SQUARES: self._squares(delta)})}
        self._arrived = download(there) if there else dict

    def _compact(self, state: State) -> State:
        """Return a state whose vectors lie at home, without gaps and gradients, as hashes and checkpoints take them."""
        plain = {name: tensor.detach().resolve_conj().resolve_neg().contiguous() for name, tensor in state.items()}
        return {name: tensor.to(self._home if tensor.dim() else HOST) for name, tensor in plain.items()}

    def _named(self) -> Mapping[str, Tensor]:
        server = {f"server.{name}": tensor for name, tensor in self._state.items()}
        return {"w": self._w, **server, **{f"shared.{name}": tensor for name, tensor in self._shared.items()}}

    def on_host(self) -> Mapping[str, Tensor]:
        """Return the model, ``w``, and the states, ``server.*`` and ``shared.*``, in the host's memory."""
        if self._host is None:
            copies = self._arrived()
            self._host = {name: copies.get(name, tensor) for name, tensor in self._named().items()}
        return self._host

    def _is_finite(self) -> bool:
        """Whether the model is; on a GPU by a sum that comes with its copy, so that nothing else is waited for."""
        total = self._w.sum() if self._home.type == "cpu" else self._arrived()[SUM]
        return math.isfinite(float(total))

    @property
    def needs_delta_sq(self) -> bool:
        """Whether ‖Δ̄‖² has to be known before the step: the rule reads it, or there is no wait to be saved."""
        return self._home.type == "cpu" or getattr(self._method.server, "reads_delta_sq", True)

    @property
    def w(self) -> Tensor:
        """The model, (d,) in the run's dtype, in the host's memory."""
        return self.on_host()["w"]

    @w.setter
    def w(self, w: Tensor) -> None:
        self._keep(w, self._state, self._shared)

    @property
    def state(self) -> State:
        """The server method's state, in the host's memory."""
        return {name: self.on_host()[f"server.{name}"] for name in self._state}

    @property
    def shared(self) -> State:
        """The method's shared state, in the host's memory."""
        return {name: self.on_host()[f"shared.{name}"] for name in self._shared}

    def for_clients(self, device: torch.device) -> tuple[Tensor, State]:
        """Return the model and the shared state in the run's dtype on the device of the clients."""
        if self._home.type != "cpu":
            return self._w, {name: tensor.to(device, self._dtype) for name, tensor in self._shared.items()}
        shared = {name: upload(tensor.to(self._dtype), device) for name, tensor in self._shared.items()}
        return upload(self._w, device), shared

    def step(self, means: Means, context: RoundContext) -> ServerUpdate:
        """Take the server's step, and return it; without ``means.delta_sq`` where `needs_delta_sq` says so.

        Raises:
            InputError: the next model has another shape.
            Diverged: it is not finite.
        """
        update = server_step(self._method.server, self._w, self._state, means, context)
        check_step(self._method.name, update, self._w)
        shared = self._method.local.share(self._shared, means)
        last = {"previous": self._w, **({"mean_delta": means.delta} if DELTA in means.vectors else {})}
        self._last = {name: last.get(name, kept) for name, kept in self._last.items()}
        self._keep(update.w, update.state, shared, None if self.needs_delta_sq else means.vectors.get(DELTA))
        self.delta_sq = means.delta_sq
        if SQUARES in self._arrived():
            self.delta_sq = norm_from(self._arrived()[SQUARES], len(means.delta))
        if not self._is_finite():
            raise Diverged(f"round {means.round}: the server's model is not finite", remedy=LOWER)
        return update

    def stay(self) -> None:
        """Take note of a round that leaves the model as it is."""
        self._last = {name: self._unmoved()[name] for name in self._last}

    def replicated(self) -> dict[str, Tensor]:
        """Return all of it in the host's memory, as checkpoints have it."""
        return {**self.on_host(), **{name: tensor.to(HOST) for name, tensor in self._last.items()}}

    def restore(self, replicated: Mapping[str, Tensor]) -> None:
        """Go back to where `replicated` was taken."""
        last = {name: replicated.get(name, none) for name, none in self._last.items()}
        self._last = {name: tensor.to(self._home) for name, tensor in last.items()}
        state, shared = (
            {name: replicated[f"{part}.{name}"] for name in own}
            for part, own in (("server", self._state), ("shared", self._shared))
        )
        self._keep(replicated["w"], state, shared)

    def evaluated(self) -> Tensor:
        """Return the model that ``evaluate.model`` names, after the last round, (d,) in the run's dtype, at home."""
        found = evaluated_model(self._evaluate_model, self._w, self._last, self._shared, self._state)
        return found.to(self._dtype)
