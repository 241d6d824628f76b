"""Whether the work of an engine can be recorded as graphs: tried before the first round, with a client of no data."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hpcfed.client.solver import Engine, Task
from hpcfed.data.cache import Samples
from hpcfed.errors import RAISED, in_a_line
from hpcfed.models.flat import FlatModel
from hpcfed.ranks.accelerators import generator, is_full
from hpcfed.ranks.graphs import Graphs
from hpcfed.types import Tilt

STEPS = 3


def hindrance(engine: Engine, graphs: Graphs, model: FlatModel, like: Samples, width: int) -> str:
    """Return why an engine's work cannot be recorded; empty if it can.

    A recorded step launches the kernels of the step that was recorded, on the same memory, with other data; what its
    module and loss do in Python is not done again. So they are refused where their calls change attributes, draw from
    generators of the host, or give parameters or buffers other memory, and so are steps that wait for the device.
    Recorded steps must leave the bits of others.
    """
    some, others = (_samples(like, width, seed) for seed in (1, 2))
    w = model.vector.clone()
    graphs.records = False
    try:
        expected, changes = _trained(engine, model, w, others), _changes_of_host(engine, model, w, some)
    finally:
        graphs.records = True
    if changes:
        return changes
    try:
        with graphs.trial():
            for samples in (some, some):  # step by step, then recorded
                _trained(engine, model, w, samples)
            found = _trained(engine, model, w, others)
    except RAISED as error:  # a user's model may raise anything
        if is_full(error):
            raise
        return in_a_line(error)
    return "" if torch.equal(expected.nan_to_num(), found.nan_to_num()) else "recorded steps have other bits"


def _samples(like: Samples, count: int, seed: int) -> Samples:
    """Return samples of normal numbers, (n, …), with the one target that is known to be valid."""
    x, y = (part.expand(count, *part.shape[1:]).clone() for part in like)
    if x.is_floating_point():
        draws = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(x.shape, generator=draws, dtype=x.dtype))
    return x, y


def _trained(engine: Engine, model: FlatModel, w: Tensor, samples: Samples, steps: int = STEPS) -> Tensor:
    task = Task(0, samples, Tilt(), steps, 0.0, own=model.own)
    (result,) = engine.solve(w, [task], 1)
    return result.delta.clone()


def _changes_of_host(engine: Engine, model: FlatModel, w: Tensor, samples: Samples) -> str:
    """Return what a user's module or loss changes in Python while it is trained."""
    states = []
    for steps in (0, 1):
        _trained(engine, model, w, samples, steps)
        states.append(_state_of_host())
    if states[0] != states[1]:
        return "the model or the loss draws from a generator of the host"
    if model.attributes is None or model.bindings is None:
        return ""
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in model.module.modules()):
        return "the model has hooks"
    if model.attributes.has_changed():
        return "the model's calls change its attributes"
    if model.bindings.rebound:
        return f"the model gives the parameter {model.bindings.rebound!r} other memory"
    memory = Memory(model.module)
    for _ in range(2):
        with model.evaluation():
            model.forget()
        _trained(engine, model, w, samples, 1)
    moved = memory.moved()
    return f"the model gives {moved!r} other memory" if moved else ""


class Memory:
    """Where the parameters and buffers of a module lie.

    They are held meanwhile, or a tensor made later may lie where a freed one did.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._held = [tensor.detach() for _, tensor in self._named()]
        self._places = self._by_name()

    def moved(self) -> str:
        """Return the name of a tensor that lies elsewhere by now; empty if none does."""
        return next((name for name, place in self._by_name().items() if self._places.get(name) != place), "")

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._module.named_parameters()
        yield from self._module.named_buffers()

    def _by_name(self) -> dict[str, object]:
        return {
            name: (id(tensor), tensor.data_ptr() if tensor.layout == torch.strided else None)
            for name, tensor in self._named()
        }


def _state_of_host() -> Sequence[object]:
    return (
        generator(torch.device("cpu")).get_state().numpy().tobytes(),
        repr(np.random.get_state()),  # noqa: NPY002
        random.getstate(),
    )
