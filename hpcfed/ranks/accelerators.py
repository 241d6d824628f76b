"""`Accelerator`: all operations on devices beside the CPU; the one module that calls `torch.cuda`.

The rest of the package asks an `Accelerator` for memory, streams, names and deterministic kernels, and never which kind
of device it is. CUDA is the one kind that runs know; builds of torch for ROCm answer to the same calls. The tests add a
strict kind that lives in the host's memory (tests/device), so a line that works there relies on nothing but this page.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from hpcfed.ranks.affinity import nvidia_addresses, pci_address

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable that numbers a process's GPUs."""
MPI_KIND, MPI_QUERY = "cuda", "MPIX_Query_cuda_support"
"""How an MPI says that it accepts a GPU's memory: in its info key ``mpi_memory_alloc_kinds``, and by a function."""
MPI_SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA")
"""Variables that make Cray MPICH and MVAPICH2 accept a GPU's memory."""
PRODUCTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""Kinds of products in torch.backends that a run computes exactly."""


class Accelerator(ABC):
    """A kind of device beside the CPU.

    Attributes:
        kind: torch's name of it; also the recipe's ``device``.
        summed_by: the backend of torch.distributed that sums its memory over ranks.
        stack_bytes: parameters of the clients that are best trained together on it.
        has_tf32: whether it multiplies in TensorFloat-32.
        is_deterministic: whether kernels were chosen that add in one order.
        answered: refusals of memory that the package knows of, as errors, or from before it took the device.
        first_states: states that `generators` had when this process first took a device, each beside its own.
    """

    kind: str
    summed_by: str
    stack_bytes: int = 1 << 30
    has_tf32: bool = False
    is_deterministic: bool = True
    answered: int = 0
    first_states: Sequence[tuple[torch.Generator, Tensor]] = ()

    @abstractmethod
    def uuids(self) -> list[str]:
        """Return a name for each device that this process sees, the same in every process that sees it."""

    def addresses(self) -> list[str]:
        """Return the PCI address of each device that this process sees, "" where it is not known."""
        return [""] * len(self.uuids())

    @abstractmethod
    def take(self, index: int) -> None:
        """Make a device the current one and its kernels deterministic; the first call that needs the device itself.

        Raises:
            RuntimeError: it cannot be used.
        """

    @abstractmethod
    def be_deterministic(self, wanted: bool) -> None:
        """Choose deterministic kernels, or any."""

    def be_exact(self) -> None:  # noqa: B027 (a kind may have nothing to set)
        """Multiply in full precision, by kernels that no measured time chooses; code of a user's may have set others.

        The settings of torch for it, as those of `take`, are the process's.
        """

    def as_now(self) -> Callable[[], None]:
        """Return a function that sets all that `take` and `be_exact` set to what it is now."""
        return lambda: None

    @abstractmethod
    def name(self, device: torch.device) -> str:
        """Return the name of its model."""

    @abstractmethod
    def total_bytes(self, device: torch.device) -> int:
        """Return the size of its memory."""

    @abstractmethod
    def free_bytes(self, device: torch.device) -> int:
        """Return what of its memory no process uses."""

    @abstractmethod
    def peak_bytes(self, device: torch.device) -> int:
        """Return the most that this process's tensors have taken of it at a time."""

    @abstractmethod
    def refusals(self, device: torch.device) -> int:
        """Return how often it had too little memory for this process, also where a library then did with less."""

    @abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all that it was asked for."""

    @abstractmethod
    def mark(self, device: torch.device) -> Callable[[], None]:
        """Record an event, and return a function that waits for it."""

    @abstractmethod
    def page_locked(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Return host memory (entries,) that the device copies from and to by itself."""

    @abstractmethod
    def locked_copy(self, tensor: Tensor) -> Tensor:
        """Return a host tensor's copy in page-locked memory, used again once the device has read it."""

    @abstractmethod
    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator that modules on the device draw from."""

    def generators(self) -> Sequence[torch.Generator]:
        """Return those of all its devices; none before this process has used one."""
        return ()

    @abstractmethod
    def compiled(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return a forward pass, compiled into few kernels."""

    @abstractmethod
    def beside(self, device: torch.device) -> AbstractContextManager[None]:
        """Let the device work as it does for a capture, after all it was asked for, and before all that follows."""

    @abstractmethod
    def capture(self, device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` asks of the device, none of which is done, and return a function that asks for it all in
        one launch, on the same memory.

        What `work` allocates comes from one pool of the device, whose content no other graph's replay leaves as it was.
        All that it touches besides must stay where it is: the workspaces of libraries do, since the work was done once
        before on the same stream (`beside`). After any exception the next capture begins anew.

        Raises:
            RuntimeError: `work` waits for the device, or copies to it from pageable memory.
        """

    @abstractmethod
    def without_waits(self, device: torch.device) -> AbstractContextManager[None]:
        """Raise a RuntimeError, meanwhile, where the host would wait for the device."""

    @abstractmethod
    def in_tf32(self) -> AbstractContextManager[None]:
        """Multiply in TensorFloat-32 meanwhile; for those that have it."""

    def group_device(self, device: torch.device) -> torch.device | None:
        """Return the device to which torch.distributed binds its group of ranks; None if `summed_by` takes any."""
        return device

    def has_distributed(self) -> bool:
        """Whether this build of torch has `summed_by`."""
        from torch import distributed

        return bool(distributed.is_backend_available(self.summed_by))


class Cuda(Accelerator):
    """NVIDIA's GPUs, and AMD's in a build of torch for ROCm."""

    kind = "cuda"
    summed_by = "nccl"
    has_tf32 = True

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._pools: dict[torch.device, Any] = {}
        self._is_taken = False

    def uuids(self) -> list[str]:
        """Return UUIDs as torch reports them; those of a GPU's slices (MIG) may be the GPU's."""
        import torch

        if not torch.cuda.is_available():
            return []
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]

    def addresses(self) -> list[str]:
        """Return addresses as torch reports them, from 2.8 on, else as the driver does; a slice has its GPU's."""
        import torch

        if not torch.cuda.is_available():
            return []
        by_uuid = nvidia_addresses()
        found = []
        for index in range(torch.cuda.device_count()):
            properties: Any = torch.cuda.get_device_properties(index)  # as newer releases have them
            if hasattr(properties, "pci_bus_id"):
                numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
                found.append(pci_address(*numbers))
            else:
                found.append(by_uuid.get(str(properties.uuid).removeprefix("GPU-"), ""))
        return found

    def take(self, index: int) -> None:
        import torch

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
        self.be_deterministic(True)
        # else every new tensor, the host's too, is filled with NaN
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.be_exact()
        torch.cuda.set_device(index)
        torch.cuda.mem_get_info()
        if not self._is_taken:
            self._is_taken, self.answered = True, self.refusals(torch.device(self.kind, index))
            self.first_states = [(own, own.get_state()) for own in self.generators()]

    def be_exact(self) -> None:
        import torch

        torch.set_float32_matmul_precision("highest")
        self._allow_tf32(False)
        torch.backends.cudnn.benchmark = False

    def as_now(self) -> Callable[[], None]:
        import torch

        cudnn, deterministic = torch.backends.cudnn, torch.utils.deterministic
        filled, timed = deterministic.fill_uninitialized_memory, cudnn.benchmark  # type: ignore[attr-defined]
        matmul, convolutions = _legacy(torch.get_float32_matmul_precision), _legacy(lambda: cudnn.allow_tf32)
        kinds = kinds_of_products(*PRODUCTS)
        precisions = [kind.fp32_precision for kind in kinds]
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def restore() -> None:  # what has changed alone: torch.backends.disable_global_flags forbids to set any
            deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
            if cudnn.benchmark != timed:
                cudnn.benchmark = timed
            if matmul is not None and _legacy(torch.get_float32_matmul_precision) != matmul:
                torch.set_float32_matmul_precision(matmul)
            if convolutions is not None and _legacy(lambda: cudnn.allow_tf32) != convolutions:
                cudnn.allow_tf32 = convolutions
            for kind, precision in zip(kinds, precisions, strict=True):
                if kind.fp32_precision != precision:
                    kind.fp32_precision = precision
            if index is not None and torch.cuda.current_device() != index:
                torch.cuda.set_device(index)

        return restore

    def be_deterministic(self, wanted: bool) -> None:
        import torch

        self.is_deterministic = wanted
        torch.use_deterministic_algorithms(wanted, warn_only=True)

    def name(self, device: torch.device) -> str:
        import torch

        return torch.cuda.get_device_name(device)

    def total_bytes(self, device: torch.device) -> int:
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)

    def free_bytes(self, device: torch.device) -> int:
        import torch

        return int(torch.cuda.mem_get_info(device)[0])

    def peak_bytes(self, device: torch.device) -> int:
        import torch

        return torch.cuda.max_memory_allocated(device)

    def refusals(self, device: torch.device) -> int:
        import torch

        return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_ooms", 0))

    def synchronize(self, device: torch.device) -> None:
        import torch

        torch.cuda.synchronize(device)

    def mark(self, device: torch.device) -> Callable[[], None]:
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.synchronize

    def page_locked(self, entries: int, dtype: torch.dtype) -> Tensor:
        import torch

        return torch.empty(entries, dtype=dtype, pin_memory=True)

    def locked_copy(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def generator(self, device: torch.device) -> torch.Generator:
        import torch

        return torch.cuda.default_generators[device.index or 0]

    def generators(self) -> Sequence[torch.Generator]:
        import torch

        return torch.cuda.default_generators

    def compiled(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        import torch

        return torch.compile(module)  # no mode with graphs of its own: steps are recorded whole

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        import torch

        stream, current = self._stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)

    def capture(self, device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
        import torch

        if device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        about = {"pool": self._pools[device], "stream": self._stream(device)}
        try:  # other threads may read files meanwhile
            with torch.cuda.graph(graph, **about, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self._break_off(device)
            raise
        finally:
            torch.cuda.set_stream(current)  # which a capture that fails leaves behind
        return graph.replay

    def _break_off(self, device: torch.device) -> None:
        """Let the next capture begin anew: a pool whose capture failed may still be recording, and so may the stream.

        Graphs that have been captured keep the pool that they have.
        """
        import torch

        self._streams.pop(device, None)
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if (pool := self._pools.pop(device, None)) is not None and end is not None:
            with suppress(RuntimeError):  # it has ended
                end(device.index or 0, pool)

    @contextmanager
    def without_waits(self, device: torch.device) -> Iterator[None]:
        import torch

        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def _stream(self, device: torch.device) -> Any:
        """Return the stream on which work is captured, and done before it is."""
        import torch

        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @contextmanager
    def in_tf32(self) -> Iterator[None]:
        self._allow_tf32(True)
        try:
            yield
        finally:
            self._allow_tf32(False)

    @staticmethod
    def _allow_tf32(allowed: bool) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        for kind in kinds_of_products("cudnn.conv", "cudnn.rnn"):  # which else follow torch.backends.fp32_precision
            kind.fp32_precision = "tf32" if allowed else "ieee"


def kinds_of_products(*names: str) -> list[Any]:
    """Return kinds of products in torch.backends that have a precision of their own: from torch 2.9 on."""
    import torch

    parts = (name.split(".") for name in names)
    kinds = (getattr(getattr(torch.backends, library), kind, None) for library, kind in parts)
    return [kind for kind in kinds if hasattr(kind, "fp32_precision")]


def _legacy(setting: Callable[[], Any]) -> Any:
    """Return a setting, or None where torch refuses to read it, since those of `PRODUCTS` contradict it."""
    try:
        return setting()
    except RuntimeError:
        return None


ACCELERATORS: dict[str, Accelerator] = {kind.kind: kind for kind in (Cuda(),)}
"""By their kinds, the one that ``device: auto`` takes first."""
DEFAULT_ACCELERATOR = next(iter(ACCELERATORS))
LESS_MEMORY = (
    "too little for a convolution's workspace, now or before in this process; its other kernels have other bits"
)
FAULTS = ("CUDA error", "cuDNN error", "HIP error", "NCCL error")
"""Words in errors of devices, which torch before 2.8 raises as a RuntimeError."""


def accelerator(device: torch.device) -> Accelerator:
    """Return what a device that is not the CPU can do."""
    return ACCELERATORS[device.type]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on a device, which copies it while the host goes on; on a CPU the tensor itself."""
    if device.type == "cpu":
        return tensor
    return accelerator(device).locked_copy(tensor).to(device, non_blocking=True)


def download(tensors: Mapping[str, Tensor]) -> Callable[[], Mapping[str, Tensor]]:
    """Begin to copy tensors of a device to the host; return a function that waits for the copies and returns them."""
    device = next(iter(tensors.values())).device
    copies = {}
    for name, tensor in tensors.items():
        copies[name] = accelerator(device).page_locked(tensor.numel(), tensor.dtype).view(tensor.shape)
        copies[name].copy_(tensor, non_blocking=True)
    arrive = accelerator(device).mark(device)

    @cache
    def arrived() -> Mapping[str, Tensor]:
        arrive()
        return copies

    return arrived


def check_refusals(device: torch.device) -> None:
    """Raise if a library has had less memory than it asked for in this process; nothing where kernels add in any order.

    cuDNN's convolutions take the first of their kernels whose workspace is to be had, say nothing, and keep to it: the
    last bits would follow from what was free.

    Raises:
        OutOfMemoryError: one has.
    """
    import torch

    if device.type == "cpu":
        return
    own = accelerator(device)
    if own.is_deterministic and own.refusals(device) > own.answered:
        raise torch.cuda.OutOfMemoryError(LESS_MEMORY)


def answer(error: BaseException) -> None:
    """Note that an error is dealt with: if it says that memory is full, no library has kept that to itself."""
    if is_full(error) and str(error) != LESS_MEMORY and not getattr(error, "is_answered", False):
        error.is_answered = True  # type: ignore[attr-defined]
        for own in ACCELERATORS.values():
            own.answered += 1


def generator(device: torch.device) -> torch.Generator:
    """Return the generator that modules on a device, the CPU too, draw from."""
    import torch

    return torch.default_generator if device.type == "cpu" else accelerator(device).generator(device)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a device's memory is full."""
    import torch

    return isinstance(error, torch.cuda.OutOfMemoryError)


def is_fault(error: BaseException) -> bool:
    """Whether the device failed (out of memory included), rather than the computation."""
    import torch

    if is_full(error) or isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FAULTS)


def build() -> str:
    """Return what this build of torch is for: ``CUDA 12.8``, ``ROCm 6.4`` or ``CPU``."""
    import torch

    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
