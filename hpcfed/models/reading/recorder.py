"""The recording of a forward pass."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name

from hpcfed.errors import RAISED, in_a_line
from hpcfed.models.reading.module import Attributes, refuse_hooks
from hpcfed.models.reading.program import (
    Call,
    Named,
    Precision,
    Program,
    Samples,
    Unreadable,
    Value,
    leaves,
    mapped,
)

OURS, OF_TORCH = str(Path(__file__).parents[3] / "hpcfed"), str(Path(torch.__file__).parent)
"""Folders of code."""
SIZES = 2, 3
"""Samples of the two minibatches."""
FACTS = frozenset(
    {
        *("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "type"),
        *("element_size", "storage_offset", "get_device", "is_same_size", "dim_order", "has_names", "is_signed"),
        *("__len__", "__hash__", "__repr__", "__format__", "__str__", "data_ptr", "is_inference", "is_pinned"),
        *("is_tensor", "result_type", "is_storage"),
    }
)
"""Functions of a tensor's layout, not of its numbers."""
FACT_PROPERTIES = frozenset(
    {
        *("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
        *("is_cuda", "is_cpu", "is_mps", "is_meta", "is_sparse", "is_nested", "is_quantized", "is_mkldnn", "names"),
        *("_version", "__class__", "is_sparse_csr", "is_xla", "is_xpu", "is_vulkan", "is_ipu", "is_ort", "is_maia"),
    }
)
RAGGED = "makes tensors whose shapes depend on data"
SIZES_OF_DATA = frozenset({"bincount", "repeat_interleave", "unique_consecutive", "arange", "range"})
"""Functions whose result has as many entries as an argument's numbers say."""
LENGTHS = frozenset({"size", "numel", "nelement", "stride", "__len__", "is_same_size", "shape", "nbytes", "__iter__"})
"""Facts of a tensor that follow from its shape."""
REFUSED = {
    **dict.fromkeys(("item", "__bool__", "__int__", "__float__", "__index__", "__complex__"), "branches on data"),
    **dict.fromkeys(
        ("tolist", "numpy", "__array__", "equal", "allclose", "is_nonzero"), "takes numbers out of tensors"
    ),
    **dict.fromkeys(("nonzero", "masked_select", "unique", "argwhere"), RAGGED),
    **dict.fromkeys(("backward", "grad", "register_hook", "retain_grad", "requires_grad_"), "computes gradients"),
    **dict.fromkeys(("set_", "share_memory_", "resize_", "untyped_storage", "storage"), "changes a tensor's memory"),
}
"""Functions that no program has, and what a module does with them."""

OF_DTYPE = {Tensor.float: torch.float32, Tensor.double: torch.float64}
CONVOLUTIONS = frozenset({torch.conv1d, torch.conv2d, torch.conv3d})
MUCH = 1e7
"""Multiplications from which a convolution is not computed: zeros in its output's shape stand for it."""


def record(module: nn.Module, like: Tensor) -> Program:
    """Return a module's forward pass in training.

    Args:
        module: in training mode. A pass may leave traces in it, which the caller undoes.
        like: one sample, (1, …), of zeros.

    Raises:
        Unreadable: its calls are not all that it does, or not the same for other minibatches.
    """
    refuse_hooks(module)
    attributes, before, threads = Attributes(module), _random_state(), torch.get_num_threads()
    programs = [_recorded(module, _like(like, size)) for size in SIZES]
    attributes.refuse_changes()
    if _random_state() != before:
        raise Unreadable("draws random numbers outside of torch")
    if torch.get_num_threads() != threads:
        raise Unreadable("sets torch's threads")
    return _merged(*programs)


def _like(like: Tensor, size: int) -> Tensor:
    return like.expand(size, *like.shape[1:]).clone()


def _random_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (the user's draws)
    return random.getstate(), kind, bytes(keys), tuple(rest)  # type: ignore[arg-type]


def _recorded(module: nn.Module, x: Tensor) -> _Recorder:
    recorder = _Recorder(module, x)
    try:
        with torch.enable_grad(), recorder:
            output = module(x)
    except RAISED as error:
        if recorder.refused is not None:  # whatever the module has made of it
            raise recorder.refused from error
        raise Unreadable(f"it raises {in_a_line(error)}") from error
    if recorder.refused is not None:
        raise recorder.refused
    recorder.end(output)
    return recorder


class _Recorder(TorchFunctionMode):
    """Records the calls of one forward pass.

    Attributes:
        calls: in their order.
        output: number of the value that the pass returns.
        values: of each number.
        refused: why it is no program; None so far.
    """

    def __init__(self, module: nn.Module, x: Tensor):
        super().__init__()
        self.calls: list[Call] = []
        self.values: list[Tensor] = [x]
        self.output = 0
        self.refused: Unreadable | None = None
        self._numbers = {id(x): 0}
        self._stale: set[int] = set()
        self._ragged: set[int] = set()  # values whose shape depends on data, and what follows from them
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self._named = {id(tensor): name for name, tensor in tensors}
        self._dtype = next((one.dtype for _, one in tensors if one.is_floating_point()), torch.float32)
        self._owned = {memory for _, tensor in tensors if (memory := _memory(tensor)) is not None}
        self._kept: list[Any] = []  # so that no identity is used twice

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return self._call(func, args, kwargs)
        except Unreadable as refused:
            self.refused = self.refused or refused
            raise

    def end(self, output: Any) -> None:
        """Take the output of the pass.

        Raises:
            Unreadable: it comes from none of the calls.
        """
        if not isinstance(output, Tensor):
            raise Unreadable(f"it returns a {type(output).__name__}")
        self.output = self._value(output, "").number

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, place = getattr(function, "__name__", ""), _place()
        if name == "where" and len(args) + len(kwargs) == 1:
            raise Unreadable(RAGGED, place)
        if name in LENGTHS:
            self._refuse_ragged(args, kwargs, place)
        if name in ("__get__", "__set__"):
            return self._property(function, args, kwargs, place)
        if name in FACTS or (not _tensors(args, kwargs) and resolve_name(function) is None):
            return function(*args, **kwargs)
        if name in REFUSED:
            raise Unreadable(REFUSED[name], place)
        if name == "__iter__":
            return iter(self._recorded(torch.unbind, args, kwargs, place))
        if function is functional.dropout:
            return self._dropout(args, kwargs, place)
        if function in OF_DTYPE and OF_DTYPE[function] is self._dtype and len(args) == 1 and not kwargs:
            return self._recorded(Tensor.to, (*args, self._dtype), kwargs, place)
        return self._recorded(function, args, kwargs, place)

    def _property(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> Any:
        of = getattr(function, "__self__", None)  # resolve_name takes the time of a minibatch
        name = str(getattr(getattr(of, "fget", of), "__name__", ""))
        if function.__name__ == "__set__":
            raise Unreadable(f"sets .{name} of a tensor", place)
        if name in LENGTHS:
            self._refuse_ragged(args, kwargs, place)
        if name in FACT_PROPERTIES:
            return function(*args, **kwargs)
        if name in ("T", "mT", "H", "mH"):
            return self._recorded(function, args, kwargs, place)
        if name == "data":
            return self._recorded(Tensor.detach, args, kwargs, place)
        raise Unreadable(f"reads .{name} of a tensor", place)

    def _refuse_ragged(self, args: Any, kwargs: Any, place: str) -> None:
        """Refuse a look at a length that other data would change.

        Raises:
            Unreadable: it is one.
        """
        if self._ragged and any(self._numbers.get(id(one)) in self._ragged for one in _tensors(args, kwargs)):
            raise Unreadable(RAGGED, place)

    def _is_ragged(self, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether the shape of a call's result may depend on data."""
        name, counted = getattr(function, "__name__", ""), [one for one in _tensors(args, kwargs) if self._counts(one)]
        if any(self._numbers.get(id(one)) in self._ragged for one in counted):
            return True
        if name == "__getitem__":
            return any(one.dtype in (torch.bool, torch.uint8) for one in _tensors(args[1:]) if self._counts(one))
        return name in SIZES_OF_DATA and bool(counted[name == "repeat_interleave" :])

    def _dropout(self, args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> Tensor:
        """Record a dropout, whose draws are none here."""
        names = ("input", "p", "training", "inplace")
        given = {"p": 0.5, "training": True, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
        x, p = given["input"], float(given["p"])
        if not given["training"] or not p:
            return x
        if p >= 1:
            raise Unreadable("dropout of everything", place)
        argument, result = self._argument(x, place), x.clone()
        self._note(functional.dropout, (argument, p), {}, [result], place, is_sequence=False)
        if given["inplace"]:
            self._is_written(x, place)
            self._numbers[id(x)] = self._numbers[id(result)]
            return x
        return result

    def _recorded(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> Any:
        if kwargs.get("out") is not None:
            raise Unreadable("writes to out=", place)
        tensors = _tensors(args, kwargs)
        given, named = mapped((args, kwargs), lambda leaf: self._argument(leaf, place))
        versions, random_state = [tensor._version for tensor in tensors], torch.get_rng_state()
        is_ragged = self._is_ragged(function, args, kwargs)
        outline = _outline(function, *args, **kwargs) if function in CONVOLUTIONS else None
        result = function(*args, **kwargs) if outline is None else outline
        if not torch.equal(random_state, torch.get_rng_state()):
            raise Unreadable("draws random numbers", place)
        written = [one for one, version in zip(tensors, versions, strict=True) if one._version != version]
        if written:
            return self._write(function, given, named, written, result, place)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not any(isinstance(one, Tensor) for one in results):
            if any(self._counts(tensor) for tensor in tensors):
                raise Unreadable(f"takes numbers out of tensors ({getattr(function, '__name__', function)})", place)
            return result
        if len(results) == 1 and any(results[0] is tensor for tensor in tensors):  # nothing is done
            return result
        self._note(
            function, given, named, results, place, is_sequence=results is not result and result is not results[0]
        )
        if is_ragged:
            self._ragged |= {self._numbers[id(one)] for one in results if isinstance(one, Tensor)}
        return result

    def _write(self, function: Any, args: Any, kwargs: Any, written: Sequence[Tensor], result: Any, place: str) -> Any:
        """Record a call that writes to an argument, whose number is another one from here on."""
        target = written[0]
        if any(one is not target for one in written) or (isinstance(result, Tensor) and result is not target):
            raise Unreadable("writes to several tensors", place)
        number = self._numbers.get(id(target))
        if number is None:
            raise Unreadable("writes to a parameter, a buffer or an attribute", place)
        self._is_written(target, place)
        self._note(function, args, kwargs, [target], place, is_sequence=False, written=number)
        return result

    def _is_written(self, target: Tensor, place: str) -> None:
        """Take the values that share a tensor's memory for lost.

        Raises:
            Unreadable: it is the minibatch's, a parameter's or a buffer's.
        """
        memory = _memory(target)
        if memory is None or memory in self._owned:
            raise Unreadable("writes to a parameter or a buffer", place)
        for number, value in enumerate(self.values):
            if _memory(value) == memory:
                self._stale.add(number)

    def _note(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        results: Sequence[Any],
        place: str,
        *,
        is_sequence: bool,
        written: int | None = None,
    ) -> None:
        outputs: list[int | None] = []
        for result in results:
            if not isinstance(result, Tensor):
                outputs.append(None)
                continue
            number = len(self.values)
            self._numbers[id(result)] = number
            self.values.append(result)
            outputs.append(number)
        with_gradient = torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled():  # a GPU's
            raise Unreadable("autocast", place)
        self.calls.append(Call(function, args, kwargs, tuple(outputs), is_sequence, written, with_gradient, place))

    def _counts(self, tensor: Tensor) -> bool:
        """Whether a tensor's numbers may be others in the next call."""
        return id(tensor) in self._numbers or id(tensor) in self._named

    def _argument(self, leaf: Any, place: str) -> Any:
        if not isinstance(leaf, Tensor):
            return Precision() if leaf is self._dtype else leaf
        if id(leaf) in self._named:
            return Named(self._named[id(leaf)])
        return self._value(leaf, place)

    def _value(self, tensor: Tensor, place: str) -> Value:
        """Return a tensor's number; one that no call has made, such as an attribute, becomes a constant."""
        number = self._numbers.get(id(tensor))
        if number is None:
            if tensor.requires_grad or _memory(tensor) in self._owned:
                raise Unreadable("uses a tensor whose origin is not seen", place)
            self._note(_Constant(tensor), (), {}, [tensor], place, is_sequence=False)
            number = self._numbers[id(tensor)]
        if number in self._stale:
            raise Unreadable("uses a tensor after a write to its memory", place)
        return Value(number)


def _outline(
    convolution: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Return zeros in the place of a large convolution's output, (B, C, …); None where it is to be computed."""
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * groups:
        return None
    with torch.no_grad():
        of_one = convolution(x[:1, :1], weight[:1, :1], None, stride, padding, dilation)
    shape = len(x), len(weight), *of_one.shape[2:]
    if prod(shape) * weight[0].numel() < MUCH:
        return None
    is_last = any(_is_channels_last(one) for one in (x, weight))
    memory_format = torch.channels_last if is_last else torch.contiguous_format
    output = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format).zero_()
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)):
        output.add_(torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=True))
    return output


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _memory(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory; None of a sparse one, which has several."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None


def _tensors(*arguments: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(arguments) if isinstance(leaf, Tensor)]


class _Constant:
    """A function that returns an attribute of the module."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.__name__ = tensor, "constant"

    def __call__(self) -> Tensor:
        return self.tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and (self.tensor is other.tensor or torch.equal(self.tensor, other.tensor))

    __hash__ = None  # type: ignore[assignment]


def _place() -> str:
    """Return the file and line of the innermost frame outside of torch and this package, else the torch layer."""
    frame: FrameType | None = sys._getframe(2)
    layer = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OF_TORCH):
            own = frame.f_locals.get("self")
            if not layer and isinstance(own, nn.Module) and not isinstance(own, nn.Sequential):
                layer = f"nn.{type(own).__name__}"
        elif not name.startswith(OURS) or "/tests/" in name:
            return f"{Path(name).name}, line {frame.f_lineno}"
        elif name == __file__ and frame.f_code.co_name == "_recorded" and layer:
            return layer
        frame = frame.f_back
    return layer


def _merged(first: _Recorder, second: _Recorder) -> Program:
    """Return the program of two recordings, in which numbers that differ count samples.

    Raises:
        Unreadable: the recordings are of different calls.
    """
    for one, other in zip(first.calls, second.calls, strict=False):
        if one.function != other.function or one.outputs != other.outputs:
            raise Unreadable("calls other functions for another number of samples", one.place)
    if len(first.calls) != len(second.calls) or first.output != second.output:
        raise Unreadable("calls other functions for another number of samples")
    calls = [
        Call(
            one.function,
            _common(one.args, other.args, one.place),
            _common(one.kwargs, other.kwargs, one.place),
            one.outputs,
            one.is_sequence,
            one.written,
            one.with_gradient,
            one.place,
        )
        for one, other in zip(first.calls, second.calls, strict=True)
    ]
    shapes = tuple(
        tuple(_common(tuple(a.shape), tuple(b.shape), "")) for a, b in zip(first.values, second.values, strict=True)
    )
    return Program(tuple(calls), first.output, shapes, tuple(value.is_floating_point() for value in first.values))


def _common(one: Any, other: Any, place: str) -> Any:
    """Return what two arguments have in common."""
    if isinstance(one, (Value, Named, Precision)) or one is other:
        if one != other:
            raise Unreadable("calls functions on other tensors for another number of samples", place)
        return one
    if isinstance(one, torch.Size):
        one, other = tuple(one), tuple(other)
    if type(one) is not type(other):
        raise Unreadable("its arguments depend on the number of samples", place)
    if isinstance(one, (tuple, list)) and len(one) == len(other):
        common = [_common(a, b, place) for a, b in zip(one, other, strict=True)]
        return tuple(common) if isinstance(one, tuple) else common
    if isinstance(one, dict) and one.keys() == other.keys():
        return {key: _common(one[key], other[key], place) for key in one}
    if isinstance(one, slice):
        parts = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
        return slice(*(_common(a, b, place) for a, b in parts))
    if one == other:
        return one
    if type(one) is int and one * SIZES[1] == other * SIZES[0] and one % SIZES[0] == 0:
        return Samples(one // SIZES[0])
    raise Unreadable("its arguments depend on the number of samples", place)
