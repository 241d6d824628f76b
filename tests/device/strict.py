"""A device that is none, and stricter than a GPU: tensors ``stub:0``, ``stub:1``, … whose memory is the host's.

Operations run on the CPU's kernels, so results have the CPU's bits. What a GPU forbids, or lets pass at times, is
refused here at once:

- tensors of two devices never meet, but for host scalars; ``.numpy()`` and buffers of the host's are refused;
- a copy to page-locked memory that nobody waited for is not there yet: the memory holds `POISON` until then;
- page-locked memory that is being copied from must not change before the copy is waited for;
- MPI may read a device's memory only after a synchronisation, and only if it is said to know such memory;
- while a thread's work is recorded as a graph nothing of it is done: it cannot wait, read or copy; what a replay leaves
  in memory that was allocated meanwhile holds `POISON` once another graph is replayed; memory from before must live on;
- kernels that CUDA has only with additions in any order are refused where a run is to be deterministic;
- nothing runs on a device that was not taken (`Accelerator.take`); what would not fit its memory raises as CUDA does,
  but for a convolution's workspace, without which another kernel with other last bits is taken in silence.

A replay repeats the recorded operators on the memory that they had, with the host's numbers of then.

Each device counts operators that would launch kernels, a replay as one, synchronisations, and the bytes of each copy
from and to the host. An operator of torch is a kernel or more on a GPU: the counts are lower bounds there, alike for
all programs. Autograd works on ``stub:0`` alone, since torch takes a device written in Python for one of its kind.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hpcfed.ranks.accelerators import Accelerator

KIND = "stub"
POISON = 0xA5
"""Every byte of page-locked memory that a copy has not reached."""
UNLIMITED = 1 << 40
aten = torch.ops.aten
PRODUCTS = {aten.div.Tensor: aten.mul.Tensor, aten.div_.Tensor: aten.mul_.Tensor}
"""What CUDA's kernels compute with the inverse of a divisor that is the host's."""
ALLOCATES = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
"""Operators whose result the host waits for."""
SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}
"""Operators whose result's shape the host waits for."""
ANY_ORDER = {
    aten.nll_loss2d_forward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    aten.max_unpool2d.default,
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten.grid_sampler_2d_backward.default,
    aten._ctc_loss_backward.default,
    aten.histc.default,
    aten.median.dim,
    aten.put_.default,
    aten.cumsum.default,
}
"""Operators without a deterministic kernel on CUDA, by the documentation of `torch.use_deterministic_algorithms`; of
losses reduced ones, of sums along an axis those of numbers with fractions."""
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
"""Operators that ask for memory to work in, and take other kernels without a word where there is none."""


@dataclass
class Counts:
    """What a device was asked for since the counts began.

    Attributes:
        kernels: operators that launch kernels.
        waits: synchronisations of the host with the device.
        up, down: bytes of each copy from the host, and to it.
    """

    kernels: int = 0
    waits: int = 0
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)


class Memory:
    """A piece of a device's memory; gives its bytes back when the last tensor in it is gone."""

    def __init__(self, device: StubDevice, storage: torch.UntypedStorage):
        self.device, self.storage, self.nbytes = device, storage, storage.nbytes()
        device.allocated += self.nbytes
        device.peak = max(device.peak, device.allocated)

    def __del__(self) -> None:
        self.device.allocated -= self.nbytes


class Recording:
    """Operators of a device, on the memory that they touch.

    Attributes:
        pool: memory that was allocated while they were recorded.
        torn: whether something could not be recorded.
    """

    def __init__(self, own: StubDevice):
        self._own = own
        self.pool: list[Memory] = []
        self.torn = False
        self._work: list[Callable[[], None]] = []
        self._before: dict[int, tuple[ref[Memory], Tensor]] = {}

    def touch(self, tensors: Iterable[StubTensor]) -> None:
        """Keep what memory from before holds, which is to hold it again once all is recorded."""
        for tensor in tensors:
            piece = tensor._piece
            if id(piece) not in self._before and not any(piece is own for own in self.pool):
                self._before[id(piece)] = ref(piece), _bytes(piece).clone()

    def add(self, work: Callable[[], Any], result: Any, others: Iterable[StubTensor] = ()) -> None:
        """Record an operator that was done, whose result has no memory in common with `others`."""
        known = {tensor._inner.untyped_storage()._cdata for tensor in others}
        new = [(place, one) for place, one in _tensors_of(result) if one.untyped_storage()._cdata not in known]

        def again() -> None:
            found = dict(_tensors_of(work()))
            for place, one in new:
                one.copy_(found[place])

        self._work.append(again)

    def end(self) -> None:
        """Undo all that was done while it was recorded."""
        for piece, before in self._before.values():
            if (alive := piece()) is not None:
                _bytes(alive).copy_(before)
        self._before = {number: (piece, before[:0]) for number, (piece, before) in self._before.items()}
        self.poison()

    def poison(self) -> None:
        for piece in self.pool:
            _bytes(piece).fill_(POISON)

    def replay(self) -> None:
        """Do again what was recorded."""
        self._own.check()
        self._own.refuse_recording("a replay")
        if any(piece() is None for piece, _ in self._before.values()):
            raise AssertionError("a graph works on memory that was given up")
        for other in STUB.recordings:
            if other is not self:
                other.poison()
        self._own.launch()
        with no_dispatch():
            for work in self._work:
                work()


def _bytes(piece: Memory) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(piece.storage)


def _tensors_of(value: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield the tensors in a result, and where they are."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _tensors_of(one, (*place, number))


class StubDevice:
    """One device: its memory's size and use, its counts, copies under way, and after how many kernels it fails.

    Attributes:
        workspace: memory that a convolution asks for, in bytes a byte of its input.
    """

    def __init__(self, index: int):
        self.index, self.limit, self.allocated, self.peak = index, UNLIMITED, 0, 0
        self.counts, self.fails_after = Counts(), UNLIMITED
        self.refusals, self.workspace = 0, 0
        self._smaller = set[tuple[Any, torch.Size]]()
        self.taken = False
        self.late: RuntimeError | None = None
        self.busy = False
        self.generator = torch.Generator()
        self._recording: tuple[Recording, threading.Thread] | None = None
        self.refuses_waits = False
        self.pending: list[Callable[[], None]] = []
        self.pieces: WeakValueDictionary[int, Memory] = WeakValueDictionary()

    @property
    def recording(self) -> Recording | None:
        """What this thread's work is recorded in: that of the thread that began it, and of autograd's own."""
        here = threading.current_thread()
        if self._recording is None or not (here is self._recording[1] or isinstance(here, threading._DummyThread)):
            return None
        return self._recording[0]

    @recording.setter
    def recording(self, recording: Recording | None) -> None:
        self._recording = None if recording is None else (recording, threading.current_thread())

    def piece(self, inner: Tensor) -> Memory:
        """Return the piece of memory that a tensor lies in.

        Raises:
            OutOfMemoryError: it is new and does not fit.
        """
        storage = inner.untyped_storage()
        found = self.pieces.get(storage._cdata)
        if found is None:
            if self.allocated + storage.nbytes() > self.limit:
                asked, free = storage.nbytes(), self.limit - self.allocated
                has = f"{KIND}:{self.index} has a total capacity of {self.limit} bytes of which {free} bytes are free."
                text = f"Tried to allocate {asked} bytes. {has}"
                self.refusals += 1
                self.fail(torch.cuda.OutOfMemoryError(f"{KIND} out of memory. {text}"))
            found = self.pieces[storage._cdata] = Memory(self, storage)
            if self.recording is not None:
                self.recording.pool.append(found)
        return found

    def has_workspace(self, func: Any, x: Any) -> bool:
        """Whether an operator on x finds the memory that it works in; one that has not once goes on without."""
        if func not in CONVOLUTIONS:
            return True
        asked = self.workspace * x.nbytes
        if (func, x.shape) not in self._smaller and self.allocated + asked <= self.limit:
            self.peak = max(self.peak, self.allocated + asked)
            return True
        if (func, x.shape) not in self._smaller:
            self._smaller.add((func, x.shape))
            self.refusals += 1
        return False

    def refuse_recording(self, what: str) -> None:
        """Refuse what cannot be recorded.

        Raises:
            RuntimeError: work is recorded.
        """
        if self.recording is not None:
            self.recording.torn = True
        if self.recording is not None or self.refuses_waits:
            self.fail(RuntimeError(f"{KIND} error: {what}: operation not permitted when stream is capturing"))

    def fail(self, error: RuntimeError) -> None:
        """Raise an error; where autograd's own thread would have to, the next operator raises it: that thread aborts.

        An exception there passes through torch's guard of a Python device, which ends the process.
        """
        if isinstance(threading.current_thread(), threading._DummyThread):
            self.late = error
            return
        try:
            raise error
        finally:
            del error  # else its own traceback would hold it, and the tensors of every frame on the way

    def launch(self) -> None:
        self.counts.kernels += 1
        self.busy = True

    def wait(self, number: int | None = None) -> None:
        """Wait for the first copies under way, or for everything."""
        self.refuse_recording("a wait")
        self.counts.waits += 1
        if number is None:
            self.busy = False
        arriving, self.pending[:number] = self.pending[:number], []
        for arrive in arriving:
            arrive()

    def check(self) -> None:
        if not self.taken:
            raise AssertionError(f"{KIND}:{self.index} is used before it was taken")
        if self.late is not None and not isinstance(threading.current_thread(), threading._DummyThread):
            late, self.late = self.late, None
            raise late
        if self.counts.kernels >= self.fails_after:
            self.fail(torch.AcceleratorError(f"{KIND} error: unspecified launch failure"))


class Stub(Accelerator):
    """The devices of this process, as the package sees them.

    Attributes:
        devices: those in use, `visible` of them.
        mpi_reads_it: whether MPI knows their memory.
        says_free: what every device says is free; None: what is.
        warns_of_order: whether kernels that add in any order are warned of, as by CUDA, and not refused.
        inverts: whether a division by a number of the host's is a product with its inverse, as on CUDA.
    """

    kind, summed_by = KIND, "gloo"
    says_free: int | None

    def __init__(self) -> None:
        self.reset()

    def reset(self, visible: int = 1) -> None:
        """Forget counts, limits and copies under way; show so many devices."""
        self.visible, self.mpi_reads_it, self.stack_bytes = visible, False, 1 << 16
        self.devices = {index: StubDevice(index) for index in range(8)}
        self.locked: dict[int, Tensor] = {}
        self.recordings: WeakSet[Recording] = WeakSet()
        self.says_free, self.inverts, self.is_deterministic, self.answered = None, False, True, 0
        self.first_states, self.warns_of_order = [], False

    def __getitem__(self, device: torch.device | int | None) -> StubDevice:
        return self.devices[device if isinstance(device, int) else (device and device.index) or 0]

    def uuids(self) -> list[str]:
        return [f"STUB-{index}" for index in range(self.visible)]

    def take(self, index: int) -> None:
        if not self.generators():
            self.first_states = [(each.generator, each.generator.get_state()) for each in self.devices.values()]
        self[index].taken = True

    def be_deterministic(self, wanted: bool) -> None:
        self.is_deterministic = wanted

    def name(self, device: torch.device) -> str:
        return "a stub"

    def total_bytes(self, device: torch.device) -> int:
        return self[device].limit

    def free_bytes(self, device: torch.device) -> int:
        return self.says_free or self[device].limit - self[device].allocated

    def peak_bytes(self, device: torch.device) -> int:
        return self[device].peak

    def refusals(self, device: torch.device) -> int:
        return self[device].refusals

    def synchronize(self, device: torch.device) -> None:
        self[device].wait()

    def mark(self, device: torch.device) -> Callable[[], None]:
        own = self[device]
        last = own.pending[-1] if own.pending else None

        def wait() -> None:
            own.wait(own.pending.index(last) + 1 if last in own.pending else 0)

        return wait

    def page_locked(self, entries: int, dtype: torch.dtype) -> Tensor:
        memory = torch.empty(entries, dtype=dtype)
        if entries:
            memory.view(torch.uint8).fill_(POISON)
        self.locked[memory.untyped_storage()._cdata] = memory
        return memory

    def locked_copy(self, tensor: Tensor) -> Tensor:
        memory = self.page_locked(tensor.numel(), tensor.dtype).view(tensor.shape)
        return memory.copy_(tensor)

    def is_locked(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.locked

    def generator(self, device: torch.device) -> torch.Generator:
        return self[device].generator

    def generators(self) -> Sequence[torch.Generator]:
        each = self.devices.values()
        return [one.generator for one in each] if any(one.taken for one in each) else []

    def compiled(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        return module

    def group_device(self, device: torch.device) -> None:
        return None

    def beside(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
        own = self[device]
        own.refuse_recording("another capture")
        recording = own.recording = Recording(own)
        counts, drawn = replace(own.counts, up=[*own.counts.up], down=[*own.counts.down]), own.generator.get_state()
        try:
            work()
        finally:
            own.recording, own.counts = None, counts
            own.generator.set_state(drawn)
            recording.end()
        if recording.torn:
            raise RuntimeError(f"{KIND} error: operation failed due to a previous error during capture")
        self.recordings.add(recording)
        return recording.replay

    @contextmanager
    def without_waits(self, device: torch.device) -> Iterator[None]:
        own = self[device]
        own.refuses_waits = True
        try:
            yield
        finally:
            own.refuses_waits = False

    def in_tf32(self) -> AbstractContextManager[None]:
        return nullcontext()


STUB = Stub()


class StubTensor(torch.Tensor):
    """A tensor in the memory of a stub."""

    _inner: Tensor
    _piece: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> StubTensor:
        piece = STUB[index].piece(inner)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=f"{KIND}:{index}",
        )
        made._inner, made._piece = inner, piece
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: Any) -> str:  # without an operator, for errors
        return f"StubTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @property
    def data(self) -> Tensor:
        return StubTensor(self._inner, self.device.index)  # with a version of its own

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, StubTensor)
        torch.Tensor.data.__set__(self, other)  # what torch itself knows: dtype, shape, strides
        self._inner, self._piece = other._inner, other._piece

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory that views of a tensor share."""
        return self._inner.untyped_storage()

    def data_ptr(self) -> int:
        """An address that no host tensor has."""
        return (self.device.index + 1 << 56) + self._inner.data_ptr()

    def __dlpack__(self, **options: Any) -> Any:
        own = STUB[self.device]
        if not STUB.mpi_reads_it:
            raise BufferError(f"MPI cannot read the memory of {self.device}")
        if own.busy or own.pending:
            raise BufferError(f"{self.device} has not finished what MPI is to read")
        return self._inner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._inner.__dlpack_device__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        special = SPECIAL.get(func)
        if special is not None:
            return special(*args, **(kwargs or {}))
        return run(func, args, kwargs or {})


StubTensor.__name__ = Tensor.__name__  # in messages


def run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose tensors all lie on one device."""
    outer: dict[int, StubTensor] = {}
    strangers: list[Tensor] = []
    bare_args = [_bare(arg, outer, strangers) for arg in args]
    bare_kwargs = {name: _bare(value, outer, strangers) for name, value in kwargs.items()}
    found = {tensor.device.index for tensor in outer.values()}
    if len(found) != 1 or any(tensor.dim() for tensor in strangers):
        others = {str(tensor.device) for tensor in (*outer.values(), *strangers)}
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {sorted(others)}")
    index = found.pop()
    own = STUB[index]
    own.check()
    if (device := bare_kwargs.get("device")) is not None:
        if device.type != KIND or device.index not in (None, index):
            raise RuntimeError(f"{func}: a tensor on {KIND}:{index} asks for one on {device}")
        bare_kwargs["device"] = torch.device("cpu")
    if STUB.inverts and func in PRODUCTS and not isinstance(args[1], StubTensor):
        func, bare_args[1] = PRODUCTS[func], 1 / args[1]
    if func in READS or func in SIZED_BY_VALUES or _picks_by_mask(func, bare_args):
        own.refuse_recording(str(func))

    if func in ANY_ORDER and STUB.is_deterministic and _adds_in_any_order(func, args):
        if not STUB.warns_of_order:
            raise AssertionError(f"{func} adds in any order on CUDA")
        warnings.warn(f"{func} does not have a deterministic implementation, but you set 'warn_only'", stacklevel=1)
    kernel = FUSED.get(func, func) if own.has_workspace(func, bare_args[0]) else partial(_in_float64, func)

    def work() -> Any:
        with _seeded(func, own, bare_kwargs):
            return kernel(*bare_args, **bare_kwargs)

    recording = own.recording
    if recording is not None:
        recording.touch(outer.values())
    result = work()
    if recording is not None and _does_something(func, result, outer):
        recording.add(work, result, outer.values())
    _count(func, own, result, outer, bare_args)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():  # the shape that torch has of the device's tensor
            func(*args, **kwargs)
    return _dressed(result, outer, index)


def _bare(value: Any, outer: dict[int, StubTensor], strangers: list[Tensor]) -> Any:
    """Return an argument with the tensors in it as the host's, which are kept in `outer` by their identity."""
    if isinstance(value, StubTensor):
        outer[id(value._inner)] = value
        return value._inner
    if isinstance(value, Tensor):
        strangers.append(value)
    elif isinstance(value, (list, tuple)):
        return [_bare(entry, outer, strangers) for entry in value]
    return value


def _dressed(value: Any, outer: dict[int, StubTensor], index: int) -> Any:
    """Return a result with the tensors in it as the device's: arguments as they are, others new."""
    if isinstance(value, Tensor):
        same = outer.get(id(value))
        if same is None:
            return StubTensor(value, index)
        assert same.shape == value.shape, "an operator has changed a tensor's shape in place"
        return same
    if isinstance(value, (list, tuple)):
        return type(value)(_dressed(entry, outer, index) for entry in value)
    return value


def _count(func: Any, own: StubDevice, result: Any, outer: dict[int, StubTensor], args: Sequence[Any]) -> None:
    """Count what an operator does on a device."""
    if func in READS or func in SIZED_BY_VALUES or _picks_by_mask(func, args):
        own.launch()
        own.counts.down.append(8)
        own.wait()
        return
    if func in ALLOCATES:
        return
    if _does_something(func, result, outer):
        own.launch()


def _does_something(func: Any, result: Any, outer: dict[int, StubTensor]) -> bool:
    """Whether an operator writes to memory."""
    if func in ALLOCATES:
        return False
    pieces = {tensor._inner.untyped_storage()._cdata for tensor in outer.values()}
    results = result if isinstance(result, (list, tuple)) else [result]
    new = any(isinstance(one, Tensor) and one.untyped_storage()._cdata not in pieces for one in results)
    return new or bool(func._schema.is_mutable)


def _adds_in_any_order(func: Any, args: Sequence[Any]) -> bool:
    if func is aten.nll_loss2d_forward.default:
        return bool(args[3])
    return func is not aten.cumsum.default or args[0].is_floating_point()


def _picks_by_mask(func: Any, args: Sequence[Any]) -> bool:
    if func not in (aten.index.Tensor, aten.index_put_.default):
        return False
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


@contextmanager
def _seeded(func: Any, own: StubDevice, kwargs: dict[str, Any]) -> Iterator[None]:
    """Let an operator that draws do so from the device's generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        yield
        return
    kwargs.pop("generator", None)
    kept = torch.get_rng_state()
    torch.set_rng_state(own.generator.get_state())
    try:
        yield
    finally:
        own.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(kept)


def copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within a device, between two, or from and to the host."""
    target, origin = isinstance(to, StubTensor), isinstance(source, StubTensor)
    for tensor in (to, source):
        if isinstance(tensor, StubTensor):
            STUB[tensor.device].check()
    if target and origin:
        own = STUB[to.device]
        inner, other = to._inner, source._inner
        _recorded(own, lambda: inner.copy_(other), to, source)
        own.launch()
        if to.device != source.device:
            STUB[source.device].launch()
    elif target:
        _up(to, source, non_blocking)
    else:
        _down(to, source, non_blocking)
    return to


def _host_bytes(tensor: Tensor) -> Tensor:
    """A host tensor's bytes, (n,): NaN is equal to itself in them."""
    return tensor.reshape(-1).view(torch.uint8)


def _recorded(own: StubDevice, work: Callable[[], Tensor], *tensors: StubTensor) -> Tensor:
    """Do work whose result, if it is none of these tensors, is new; record it where work is recorded."""
    recording = own.recording
    if recording is not None:
        recording.touch(tensors)
    result = work()
    if recording is not None:
        recording.add(work, result, tensors)
    return result


def _up(to: StubTensor, source: Tensor, non_blocking: bool) -> None:
    own = STUB[to.device]
    own.refuse_recording("a copy from the host")
    to._inner.copy_(source)
    own.counts.up.append(source.nbytes)
    own.busy = True
    if not (non_blocking and STUB.is_locked(source)):
        own.wait()
        return
    before = _host_bytes(source).clone()

    def arrive() -> None:
        if not torch.equal(_host_bytes(source), before):
            raise AssertionError("page-locked memory changed while the device copied from it")

    own.pending.append(arrive)


def _down(to: Tensor, source: StubTensor, non_blocking: bool) -> None:
    own = STUB[source.device]
    own.refuse_recording("a copy to the host")
    own.counts.down.append(source.nbytes)
    if not (non_blocking and STUB.is_locked(to)):
        own.wait()
        to.copy_(source._inner)
        return
    now = source._inner.clone()
    to.view(-1).view(torch.uint8).fill_(POISON) if to.is_contiguous() else None
    own.busy = True
    own.pending.append(lambda: to.copy_(now))


def _to_copy(
    source: StubTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **others: Any,
) -> Tensor:
    """Convert within a device, or copy to the host or another one."""
    own = STUB[source.device]
    own.check()
    if device is None or device == source.device:
        own.launch()
        kwargs = {"dtype": dtype, **{name: value for name, value in others.items() if name == "memory_format"}}
        inner = source._inner
        converted = _recorded(own, lambda: aten._to_copy.default(inner, **kwargs), source)
        return StubTensor(converted, source.device.index)
    own.refuse_recording("a copy to another device")
    if device.type == KIND:
        made = StubTensor(source._inner.to(dtype or source.dtype, copy=True), device.index or 0)
        own.launch()
        STUB[device].launch()
        return made
    own.counts.down.append(source.nbytes)
    own.wait()  # the host's memory is pageable here
    return source._inner.to(dtype or source.dtype, copy=True)


def _lstm_cell(input_gates: Tensor, hidden_gates: Tensor, cell: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
    """Return h', c' and the activated gates of an LSTM's step, which torch fuses on every device but the CPU."""
    gates = input_gates + hidden_gates
    for bias in biases:
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    of_hidden: Tensor | None, of_cell: Tensor | None, cell: Tensor, after: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients by gates (4H), by the cell and by the biases, of those by h' and c'."""
    i, f, g, o = gates.chunk(4, 1)
    tanh = after.tanh()
    by_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
    by_after = by_hidden * o * (1 - tanh * tanh)
    if of_cell is not None:
        by_after = by_after + of_cell
    each = by_after * g * i * (1 - i), by_after * cell * f * (1 - f)
    each += by_after * i * (1 - g * g), by_hidden * tanh * o * (1 - o)
    by_gates = torch.cat(each, 1)
    return by_gates, by_after * f, by_gates.sum(0) if has_bias else None


def _in_float64(func: Any, *args: Any) -> Any:
    """Do an operator in twice the precision, as kernels of other last bits."""
    dtype = args[0].dtype
    result = func(*(arg.double() if isinstance(arg, Tensor) else arg for arg in args))
    if isinstance(result, Tensor):
        return result.to(dtype)
    return tuple(one if one is None else one.to(dtype) for one in result)


FUSED: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
}
"""Kernels that the CPU has not, in its own."""
SPECIAL: dict[Any, Callable[..., Any]] = {aten.copy_.default: copy_, aten._to_copy.default: _to_copy}


def _empty(size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    STUB[device].check()
    return StubTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()), (device and device.index) or 0)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    STUB[device].check()
    made = torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype())
    return StubTensor(made, (device and device.index) or 0)


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    return copy_(to, source, non_blocking)


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    STUB[device].launch()
    made = _recorded(STUB[device], lambda: torch.arange(start, end, step, dtype=dtype))
    return StubTensor(made, (device and device.index) or 0)


def _randperm(n: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    STUB[device].launch()
    made = _recorded(STUB[device], lambda: torch.randperm(n, generator=STUB[device].generator))
    return StubTensor(made, (device and device.index) or 0)


class _Module:
    """``torch.stub``: what torch itself asks a device's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return len(STUB.devices)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        for device in STUB.devices.values():
            device.generator.manual_seed(seed)


_LOCK = threading.Lock()
_LIBRARY: list[torch.library.Library] = []


def register() -> Stub:
    """Make torch know the device, once in a process; return it."""
    with _LOCK:
        if not _LIBRARY:
            _setup_privateuseone_for_python_backend(KIND, backend_module=_Module())
            library = torch.library.Library("aten", "IMPL")
            library.impl("empty.memory_format", _empty, "PrivateUse1")
            library.impl("empty_strided", _empty_strided, "PrivateUse1")
            library.impl("_copy_from", _copy_from, "PrivateUse1")
            library.impl("arange", lambda end, **options: _arange(0, end, **options), "PrivateUse1")
            library.impl("randperm", _randperm, "PrivateUse1")
            library.impl("arange.start", _arange, "PrivateUse1")
            library.impl("arange.start_step", _arange, "PrivateUse1")
            _LIBRARY.append(library)
    return STUB
