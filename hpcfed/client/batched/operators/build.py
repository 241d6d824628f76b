"""Calls to operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpcfed.client.batched.operators.base import Operator, Pass
from hpcfed.client.batched.operators.general import Fixed, General
from hpcfed.client.batched.operators.layers import Convolution, Embedding, GroupNorm, LayerNorm, Linear
from hpcfed.client.batched.operators.plain import (
    ACTIVATIONS,
    Activation,
    Dropout,
    Layout,
    MaxPool,
    Permute,
    Relu,
    Reshape,
    Sum,
)
from hpcfed.models.reading.program import Call, Named, Program, Samples, Unreadable, Value, mapped

CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
"""Functions, and the axes that they convolve over."""
RESHAPES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "unflatten"})


@dataclass(frozen=True)
class Mask:
    """Of a dropout: the shape of a sample's numbers, and the share that is dropped."""

    shape: tuple[int, ...]
    p: float


@dataclass(frozen=True)
class Operators:
    """A program's operators.

    Attributes:
        each: in their order.
        count: of values.
        output: number of the module's output.
        shared: parameters that several operators take.
        masks: of the dropouts, in their order.
        by_slot: whether the values of several slots can lie one after another.
        work: multiplications of a sample in products and convolutions, forwards.
        output_axes: of the module's output, with that of the samples.
        numbers: of a sample's values and of its convolutions' columns, all together.
    """

    each: tuple[Operator, ...]
    count: int
    output: int
    shared: frozenset[int]
    masks: tuple[Mask, ...]
    by_slot: bool
    work: int
    output_axes: int
    numbers: int


def simplified(program: Program) -> Program:
    """Return a program with ReLU behind the max-pool before which it stands: the same bits, gradients included, of
    fewer numbers.

    The largest number of a window is the same before and after ReLU, and where it is not above 0 no gradient passes.
    """
    users, calls, shapes = _users(program), list(program.calls), list(program.shapes)
    for relu in program.calls:
        if relu.name != "relu" or relu.outputs[0] == program.output:
            continue
        following = users[_output(relu)]
        if len(following) != 1 or following[0].name != "max_pool2d" or following[0].values != [_output(relu)]:
            continue
        pool = following[0]
        if pool.is_sequence or pool.with_gradient != relu.with_gradient:
            continue
        between, source = _output(relu), relu.values[0]
        first = replace(pool, args=_renamed(pool.args, between, source), outputs=(between,))
        written = None if relu.written is None else between
        second = replace(relu, args=_renamed(relu.args, source, between), outputs=pool.outputs, written=written)
        if "input" in {*pool.kwargs, *relu.kwargs}:
            continue
        calls[calls.index(pool) : calls.index(pool) + 1] = [first, second]
        calls.remove(relu)
        shapes[between] = shapes[_output(pool)]
    return replace(program, calls=tuple(calls), shapes=tuple(shapes))


def operators_of(
    program: Program,
    parameters: Mapping[str, torch.Size],
    constants: Mapping[str, Tensor],
    *,
    memory_format: torch.memory_format | None = None,
) -> Operators:
    """Return the operators of a program.

    Args:
        program: a simplified one.
        parameters: shape of each trainable parameter by its name, in their order.
        constants: all other parameters and buffers by name.
        memory_format: of images, into which they are brought before the first convolution; None: as they are.
    """
    return _Builder(program, parameters, constants, memory_format=memory_format).built()


def best_format(program: Program) -> torch.memory_format | None:
    """Return the memory format of images that is fastest on a CPU: channels last for convolutions, by a fifth and more,
    but not where group norms stand between them, which lose more. None without images.
    """
    names = {call.name for call in program.calls}
    if "conv2d" not in names:
        return None
    return torch.contiguous_format if "group_norm" in names else torch.channels_last


class _Builder:
    def __init__(
        self,
        program: Program,
        sizes: Mapping[str, torch.Size],
        constants: Mapping[str, Tensor],
        *,
        memory_format: torch.memory_format | None,
    ):
        parameters = {name: place for place, name in enumerate(sizes)}
        self._program, self._sizes, self._parameters, self._constants = program, sizes, parameters, constants
        self._memory_format = memory_format
        self._count, self._masks = len(program.shapes), list[Mask]()
        self._work = self._columns = 0
        self._users = _users(program)
        self._fresh: set[int] = set()  # in memory that no operator's gradient looks at
        self._wanted: set[int] = set()
        self._fixed: set[int] = set()
        self._of_data = {0}
        for call in program.calls:
            outputs = {number for number in call.outputs if number is not None}
            trains = any(name in parameters for name in call.names)
            if trains or self._wanted & {*call.values}:
                self._wanted |= {n for n in outputs if program.floats[n]} if call.with_gradient else set()
            if self._of_data & {*call.values}:
                self._of_data |= outputs
            elif not trains and {*call.values} <= self._fixed:
                self._fixed |= outputs
        self._kinds = {number: self._kind(number) for number in range(len(program.shapes))}

    def built(self) -> Operators:
        each: list[Operator] = []
        fixed = [call for call in self._program.calls if self._fixed.issuperset(_outputs(call))]
        if fixed:
            each.append(Fixed(fixed, self._constants))
        for call in self._program.calls:
            if not self._fixed.issuperset(_outputs(call)):
                each += self._operators(call)
        uses = [place for operator in each for place in operator.parameters]
        return Operators(
            tuple(each),
            self._count,
            self._program.output,
            frozenset(place for place in uses if uses.count(place) > 1),
            tuple(self._masks),
            "other" not in self._kinds.values() and self._kinds[self._program.output] == "samples",
            self._work,
            len(self._program.shapes[self._program.output]),
            self._columns
            + sum(_numbers(self._program.shapes[number]) for number, kind in self._kinds.items() if kind == "samples"),
        )

    def _kind(self, number: int) -> str:
        if number in self._fixed:
            counts = any(isinstance(length, Samples) for length in self._program.shapes[number])
            return "samples" if counts and self._leads(number) else "other" if counts else "fixed"
        if number not in self._of_data:
            return "slot"
        return "samples" if self._leads(number) else "other"

    def _leads(self, number: int) -> bool:
        """Whether a value's first axis, and no other, counts samples."""
        counts = [isinstance(length, Samples) for length in self._program.shapes[number]]
        return bool(counts) and counts[0] and sum(counts) == 1

    def _operators(self, call: Call) -> Iterator[Operator]:
        special = self._special(call)
        if special is None:
            if call.name == "dropout":
                raise Unreadable("dropout of what is alike for all samples", call.place)
            yield General(call, self._kinds, self._wanted, self._parameters, self._constants)
        else:
            last = special[-1]
            affine = isinstance(last, (LayerNorm, GroupNorm)) and last.weight is not None
            if affine or isinstance(last, (Linear, Convolution, MaxPool, Sum)):
                self._fresh.add(_output(call))
            yield from special

    def _special(self, call: Call) -> list[Operator] | None:
        """Return the written-out operators of a call; None if there are none."""
        if call.is_sequence or not call.with_gradient or not call.values:
            return None
        if any(self._kinds[number] != "samples" for number in (*call.values, *_outputs(call))):
            return None
        if call.name in CONVOLUTIONS:
            return self._convolution(call)
        if call.name in ("add", "__add__", "__radd__", "__iadd__"):
            return self._sum(call)
        maker: Callable[[Call], Operator | None] | None = {
            "linear": self._linear,
            "embedding": self._embedding,
            "layer_norm": self._layer_norm,
            "group_norm": self._group_norm,
            "max_pool2d": self._max_pool,
            "dropout": self._dropout,
            "relu": self._relu,
            "transpose": self._permute,
            "permute": self._permute,
            **dict.fromkeys(RESHAPES, self._reshape),
            **dict.fromkeys((name.partition(" ")[0] for name in ACTIVATIONS), self._activation),
        }.get(call.name)
        found = None if maker is None else maker(call)
        return None if found is None else [found]

    def _parameter(self, argument: Any) -> int | None:
        """Return the place of a trainable parameter; None for anything else."""
        return self._parameters.get(argument.name) if isinstance(argument, Named) else None

    def _passes(self, number: int) -> bool:
        return number in self._wanted

    def _linear(self, call: Call) -> Operator | None:
        given = _bound(call, "input weight bias", {"bias": None})
        if given is None or not isinstance(given["input"], Value):
            return None
        source, weight, bias = given["input"].number, self._parameter(given["weight"]), self._parameter(given["bias"])
        shape = self._program.shapes[source]
        if weight is None or (bias is None and given["bias"] is not None) or len(shape) < 2:
            return None
        self._work += _numbers(self._program.shapes[_output(call)]) * _numbers(shape[-1:])
        return Linear(source, _output(call), weight, bias, self._passes(source))

    def _convolution(self, call: Call) -> list[Operator] | None:
        axes = CONVOLUTIONS[call.name]
        usual = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        given = _bound(call, "input weight bias stride padding dilation groups", usual)
        if given is None or not isinstance(given["input"], Value) or isinstance(given["padding"], str):
            return None
        source, weight, bias = given["input"].number, self._parameter(given["weight"]), self._parameter(given["bias"])
        shape, out = self._program.shapes[source], self._program.shapes[_output(call)]
        if weight is None or (bias is None and given["bias"] is not None) or len(shape) != axes + 2:
            return None
        stride, padding, dilation = (_several(given[key], axes) for key in ("stride", "padding", "dilation"))
        found: list[Operator] = []
        if self._memory_format is not None and axes == 2 and source not in self._wanted:
            found.append(Layout(source, self._count, False, self._memory_format))
            source, self._count = self._count, self._count + 1
        size = self._sizes[given["weight"].name]
        self._work += _numbers(out) * size[1:].numel()
        self._columns += _numbers(out) // size[0] * size[1:].numel()
        passes = self._passes(given["input"].number)
        found.append(
            Convolution(source, _output(call), weight, bias, passes, stride, padding, dilation, int(given["groups"]))
        )
        return found

    def _embedding(self, call: Call) -> Operator | None:
        usual = {"padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
        given = _bound(call, "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse", usual)
        if given is None or not isinstance(given["input"], Value):
            return None
        weight = self._parameter(given["weight"])
        if weight is None or any(given[key] != value for key, value in usual.items() if key != "norm_type"):
            return None
        return Embedding(given["input"].number, _output(call), weight, False)

    def _layer_norm(self, call: Call) -> Operator | None:
        given = _bound(call, "input normalized_shape weight bias eps", {"weight": None, "bias": None, "eps": 1e-5})
        if given is None or (about := self._normalisation(call, given)) is None:
            return None
        return LayerNorm(*about, list(given["normalized_shape"]), float(given["eps"]))

    def _group_norm(self, call: Call) -> Operator | None:
        given = _bound(call, "input num_groups weight bias eps", {"weight": None, "bias": None, "eps": 1e-5})
        if given is None or (about := self._normalisation(call, given)) is None:
            return None
        return GroupNorm(*about, int(given["num_groups"]), float(given["eps"]))

    def _normalisation(
        self, call: Call, given: Mapping[str, Any]
    ) -> tuple[int, int, int | None, int | None, bool] | None:
        """Return what all normalisations have; None where one takes no value, or other γ and β than parameters."""
        if not self._affine(given):
            return None
        source, weight, bias = given["input"].number, self._parameter(given["weight"]), self._parameter(given["bias"])
        return source, _output(call), weight, bias, self._passes(source)

    def _affine(self, given: Mapping[str, Any]) -> bool:
        """Whether a normalisation takes a value, and trainable parameters or none."""
        own = [given[key] for key in ("weight", "bias")]
        return isinstance(given["input"], Value) and all(one is None or self._parameter(one) is not None for one in own)

    def _max_pool(self, call: Call) -> Operator | None:
        usual = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
        given = _bound(call, "input kernel_size stride padding dilation ceil_mode return_indices", usual)
        if given is None or given["return_indices"] or not isinstance(given["input"], Value):
            return None
        source = given["input"].number
        if len(self._program.shapes[source]) != 4:
            return None
        window, padding, dilation = (_several(given[key], 2) for key in ("kernel_size", "padding", "dilation"))
        stride = window if given["stride"] in (None, []) else _several(given["stride"], 2)
        arguments = window, stride, padding, dilation, bool(given["ceil_mode"])
        return MaxPool(source, _output(call), self._passes(source), arguments)

    def _dropout(self, call: Call) -> Operator | None:
        source, p = call.args[0].number, float(call.args[1])
        shape = self._program.shapes[source]
        first, *rest = shape
        lengths = tuple(length for length in rest if isinstance(length, int))
        times = first.times if isinstance(first, Samples) else 1
        self._masks.append(Mask((times * lengths[0], *lengths[1:]) if lengths else (times,), p))
        return Dropout(source, _output(call), self._passes(source), len(self._masks) - 1, p)

    def _relu(self, call: Call) -> Operator:
        source = call.values[0]
        alone = len(self._users[source]) == 1 and source != self._program.output
        return Relu(source, _output(call), self._passes(source), alone and source in self._fresh)

    def _activation(self, call: Call) -> Operator | None:
        key = call.name
        if key == "gelu":
            key = f"gelu {call.kwargs.get('approximate', 'none')}"
        if key not in ACTIVATIONS:
            return None
        source = call.values[0]
        return Activation(source, _output(call), self._passes(source), *ACTIVATIONS[key])

    def _reshape(self, call: Call) -> Operator | None:
        if len(call.values) != 1 or call.names:
            return None
        source = call.values[0]
        if call.name == "view" and any(isinstance(one, torch.dtype) for one in call.args):
            return None
        lengths = self._program.shapes[_output(call)]

        def shaped(x: Tensor, run: Pass) -> Tensor:
            return x.reshape([one.times * run.samples if isinstance(one, Samples) else one for one in lengths])

        return Reshape(source, _output(call), self._passes(source), shaped)

    def _permute(self, call: Call) -> Operator | None:
        source = call.values[0]
        axes = list(range(len(self._program.shapes[source])))
        if call.name == "transpose":
            given = _bound(call, "input dim0 dim1", {})
            if given is None:
                return None
            one, other = given["dim0"], given["dim1"]
            axes[one], axes[other] = axes[other], axes[one]
        else:
            dims = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], (tuple, list)) else call.args[1:]
            if call.kwargs or len(dims) != len(axes):
                return None
            axes = [axis % len(axes) for axis in dims]
        return Permute(source, _output(call), self._passes(source), axes)

    def _sum(self, call: Call) -> list[Operator] | None:
        if len(call.args) != 2 or call.kwargs or not all(isinstance(one, Value) for one in call.args):
            return None
        terms = call.args[0].number, call.args[1].number
        shapes = {self._program.shapes[number] for number in (*terms, _output(call))}
        if len(shapes) > 1 or not all(self._program.floats[number] for number in terms):
            return None
        return [Sum(terms, _output(call), (self._passes(terms[0]), self._passes(terms[1])))]


def _bound(call: Call, names: str, usual: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments by name, the usual ones filled in; None if there are others."""
    ordered = names.split()
    if len(call.args) > len(ordered) or not call.kwargs.keys() <= {*ordered}:
        return None
    given = {**usual, **dict(zip(ordered, call.args, strict=False)), **call.kwargs}
    return given if given.keys() == {*ordered} else None


def _several(argument: Any, count: int) -> list[int]:
    """Return a number, or a sequence of them, for each of some axes."""
    numbers = [int(one) for one in argument] if isinstance(argument, Sequence) else [int(argument)]
    return numbers * count if len(numbers) == 1 else numbers


def _numbers(shape: Sequence[int | Samples]) -> int:
    """Return how many numbers a value has for a sample."""
    return prod(length.times if isinstance(length, Samples) else length for length in shape)


def _outputs(call: Call) -> list[int]:
    return [number for number in call.outputs if number is not None]


def _output(call: Call) -> int:
    return _outputs(call)[0]


def _users(program: Program) -> dict[int, list[Call]]:
    """Return the calls that take each value."""
    found: dict[int, list[Call]] = {number: [] for number in range(len(program.shapes))}
    for call in program.calls:
        for number in call.values:
            found[number].append(call)
    return found


def _renamed(argument: Any, before: int, after: int) -> Any:
    """Return arguments with one value in the place of another."""
    return mapped(argument, lambda leaf: Value(after) if leaf == Value(before) and isinstance(leaf, Value) else leaf)
