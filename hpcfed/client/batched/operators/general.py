"""Any other function: its gradient by autograd of it alone; and values that no sample decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from hpcfed.client.batched.operators.base import Operator, Pass, Sink
from hpcfed.models.reading.program import Call, Named, Precision, Samples, Value, mapped

MOST_SIZES = 64
"""Numbers of samples whose fixed values are kept."""


class Fixed(Operator):
    """Values that follow from the number of samples alone, such as positions or a mask: computed once.

    Args:
        calls: those that make them, in their order.
        constants: parameters and buffers that they take, by name.
    """

    def __init__(self, calls: Sequence[Call], constants: Mapping[str, Tensor]):
        self._calls, self._constants = calls, constants
        self.inputs = ()
        self.outputs = tuple(number for call in calls for number in call.outputs if number is not None)
        self.parameters = ()
        self._known: dict[int, dict[int, Tensor]] = {}

    def forward(self, run: Pass) -> None:
        """Set the values."""
        if run.samples not in self._known:
            if len(self._known) >= MOST_SIZES:
                self._known.clear()
            self._known[run.samples] = self._computed(run.samples, run.parameters.dtype)
        for number, value in self._known[run.samples].items():
            run.values[number] = value

    def backward(self, run: Pass, sink: Sink) -> None:
        """Do nothing."""

    def _computed(self, samples: int, dtype: torch.dtype) -> dict[int, Tensor]:
        values: dict[int, Tensor] = {}
        with torch.no_grad():
            for call in self._calls:
                outputs = applied(call, values, {}, self._constants, samples, dtype)
                numbers = [number for number in call.outputs if number is not None]
                values.update(zip(numbers, outputs, strict=True))
        return values


class General(Operator):
    """A call as the module makes it; mapped over slots by `torch.func.vmap` where it takes what each slot has its own.

    Args:
        call: the call.
        kinds: of each of its values: whether its first axis counts ``samples``, or it is ``fixed``, alike for all
            slots, or of each ``slot``, (R, …).
        wanted: which of its values want gradients.
        parameters: place of each trainable parameter by its name.
        constants: all other parameters and buffers that it takes, by name.
    """

    def __init__(
        self,
        call: Call,
        kinds: Mapping[int, str],
        wanted: Set[int],
        parameters: Mapping[str, int],
        constants: Mapping[str, Tensor],
    ):
        self._call, self._constants, self._kinds = call, constants, kinds
        self.inputs = tuple(call.values)
        self.outputs = tuple(number for number in call.outputs if number is not None)
        self._own = {name: parameters[name] for name in call.names if name in parameters}
        self._names = list(self._own) if call.with_gradient else []
        self.parameters = tuple(self._own[name] for name in self._names)
        self._wanted = [number for number in self.inputs if number in wanted] if call.with_gradient else []

    @property
    def takes_gradients(self) -> bool:
        """Whether a gradient passes it."""
        return bool(self._wanted or self._names)

    def forward(self, run: Pass) -> None:
        """Set the outputs."""
        slots = run.parameters.slots
        values = {number: run.value(number).detach() for number in self.inputs}
        for number in self._wanted:
            values[number].requires_grad_()
        own = {
            name: (run.parameters.own[place][0] if slots == 1 else run.parameters.stacks[place]).data
            for name, place in self._own.items()
        }  # whose versions do not count the steps of other parameters in the same memory
        for name in self._names:
            own[name].requires_grad_()
        with torch.set_grad_enabled(bool(self._wanted or self._names)):
            by_slot = slots > 1 and (own or any(self._kinds[number] == "slot" for number in self.inputs))
            if by_slot:
                outputs = self._mapped(values, own, slots, run.samples, run.parameters.dtype)
            else:
                outputs = applied(self._call, values, own, self._constants, run.samples, run.parameters.dtype)
        run.saved[self.outputs[0]] = values, own, outputs
        for number, output in zip(self.outputs, outputs, strict=True):
            run.values[number] = output.detach()

    def backward(self, run: Pass, sink: Sink) -> None:
        """Give gradients."""
        saved: Any = run.saved[self.outputs[0]]
        values, own, outputs = saved
        given = [
            (output, gradient)
            for number, output in zip(self.outputs, outputs, strict=True)
            if output.requires_grad and (gradient := run.grads[number]) is not None
        ]
        sources = [values[number] for number in self._wanted] + [own[name] for name in self._names]
        if not given or not sources:
            return
        found = gradients_of([output for output, _ in given], [gradient for _, gradient in given], sources)
        for number, gradient in zip(self._wanted, found, strict=False):
            if gradient is not None:
                run.give(number, gradient)
        for place, gradient in zip(self.parameters, found[len(self._wanted) :], strict=True):
            if gradient is not None:
                sink.add(place, gradient.unsqueeze(0) if run.parameters.slots == 1 else gradient)

    def _mapped(
        self, values: Mapping[int, Tensor], own: Mapping[str, Tensor], slots: int, samples: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """Apply the function to each slot's own."""
        numbers, names = list(values), list(own)

        def of_one(*arguments: Tensor) -> tuple[Tensor, ...]:
            of_values = dict(zip(numbers, arguments, strict=False))
            of_names = dict(zip(names, arguments[len(numbers) :], strict=True))
            return tuple(applied(self._call, of_values, of_names, self._constants, samples // slots, dtype))

        by_kind = [
            value.unflatten(0, (slots, -1)) if self._kinds[number] == "samples" else value
            for number, value in values.items()
        ]
        axes = [None if self._kinds[number] == "fixed" else 0 for number in numbers] + [0] * len(names)
        function: Callable[..., tuple[Tensor, ...]] = vmap(of_one, in_dims=tuple(axes))
        found = function(*by_kind, *own.values())
        return [
            output.flatten(0, 1) if self._kinds[number] == "samples" else output
            for number, output in zip(self.outputs, found, strict=True)
        ]


class _Sloped(torch.autograd.Function):
    """A number whose gradients by tensors are given."""

    @staticmethod
    def forward(ctx: Any, slopes: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.slopes = slopes
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.slopes


def gradients_of(
    outputs: Sequence[Tensor], slopes: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients by `sources` of a number whose gradients by `outputs` are `slopes`.

    ``torch.autograd.grad`` with ``grad_outputs`` imports sympy, which takes seconds.
    """
    with torch.enable_grad():
        total = _Sloped.apply(slopes, *outputs)
    found = torch.autograd.grad(total, sources, allow_unused=True)
    return tuple(one.to_dense() if one is not None and one.is_sparse else one for one in found)


def applied(
    call: Call,
    values: Mapping[int, Tensor],
    own: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    samples: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the tensors that a call makes of values, and of parameters and buffers by name."""
    given = dict(values)
    if call.written is not None:
        given[call.written] = values[call.written].clone()

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return given[leaf.number]
        if isinstance(leaf, Named):
            return own[leaf.name] if leaf.name in own else constants[leaf.name]
        if isinstance(leaf, Precision):
            return dtype
        return leaf.times * samples if isinstance(leaf, Samples) else leaf

    result = call.function(*mapped(call.args, change), **mapped(call.kwargs, change))
    if call.written is not None:
        return [given[call.written]]
    results = list(result) if call.is_sequence else [result]
    return [one for one, number in zip(results, call.outputs, strict=True) if number is not None]
