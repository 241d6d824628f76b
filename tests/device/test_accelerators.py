"""What is asked of devices stands in one module, and what that asks of CUDA is what torch documents."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hpcfed
from hpcfed.ranks.accelerators import ACCELERATORS, Cuda, answer, check_refusals, is_full, upload

PACKAGE = Path(hpcfed.__file__).parent
WORDS_OF_USERS = {"config/recipe.py", "config/elsewhere.py", "cli/bench.py"}
"""Where ``cuda`` is what a user writes."""

DOCUMENTED: dict[str, Any] = {
    # torch.cuda, https://pytorch.org/docs/2.4 to 2.13: parameters by name, with their defaults
    "is_available": lambda: True,
    "device_count": lambda: 2,
    "is_initialized": lambda: True,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: "NVIDIA H100",
    "get_device_properties": lambda device=None: SimpleNamespace(
        uuid=f"u-{device}",
        total_memory=80,
        name="NVIDIA",
        **({"pci_domain_id": 0, "pci_bus_id": 65, "pci_device_id": 0} if device else {}),
    ),
    "mem_get_info": lambda device=None: (50, 80),
    "max_memory_allocated": lambda device=None: 7,
    "synchronize": lambda device=None: None,
    "current_stream": lambda device=None: f"the stream of {device}",
    "set_stream": lambda stream: None,
    "memory_stats_as_nested_dict": lambda device=None: {"num_ooms": 3},
    "graph_pool_handle": lambda: object(),
}


class FakeEvent:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self.asked: list[object] = []

    def record(self, stream: object = None) -> None:
        self.asked.append(stream)

    def synchronize(self) -> None:
        assert self.asked, "waited for before it was recorded"
        self.asked.append("waited")


class FakeGraph:
    """``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        raise AssertionError("nothing was recorded")


class FakeCuda:
    """``torch.cuda`` as documented: any other name, or any other argument, is an error; `calls` has what was asked."""

    CUDAGraph = FakeGraph

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.captures: list[tuple[object, object]] = []
        self.events: list[FakeEvent] = []
        self.default_generators = (torch.Generator(), torch.Generator())
        self.OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __getattr__(self, name: str) -> Any:
        function = DOCUMENTED[name]

        def called(*args: object, **kwargs: object) -> object:
            self.calls.append((name, *args))
            return function(*args, **kwargs)

        return called

    def Event(self, **options: bool) -> FakeEvent:
        self.events.append(FakeEvent(**options))
        return self.events[-1]

    def Stream(self, device: torch.device) -> object:
        return object()

    @contextmanager
    def graph(
        self, cuda_graph: FakeGraph, pool: object = None, stream: object = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        self.captures.append((pool, stream))
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda mode, *, warn_only=False: fake.calls.append((mode,))
    )
    return fake


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_fake_is_as_this_torch_has_it(name: str) -> None:
    own, theirs = (
        list(inspect.signature(each).parameters.values()) for each in (DOCUMENTED[name], getattr(torch.cuda, name))
    )
    assert [(one.name, one.default) for one in own] == [(one.name, one.default) for one in theirs][: len(own)]
    assert all(more.default is not inspect.Parameter.empty for more in theirs[len(own) :])


def test_names_memory_and_generators_of_cuda(cuda: FakeCuda) -> None:
    kind, second = Cuda(), torch.device("cuda", 1)
    assert kind.uuids() == ["u-0", "u-1"]
    assert kind.addresses() == ["", "0000:41:00.0"]  # of the first, torch before 2.8 says none
    assert (kind.name(second), kind.total_bytes(second), kind.free_bytes(second)) == ("NVIDIA H100", 80, 50)
    assert kind.peak_bytes(second) == 7
    assert kind.generator(second) is cuda.default_generators[1]
    kind.synchronize(second)
    assert cuda.calls[-1] == ("synchronize", second)


def test_a_device_of_cuda_is_taken_and_its_kernels_are_deterministic(cuda: FakeCuda, monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    Cuda().take(1)
    assert not torch.utils.deterministic.fill_uninitialized_memory
    counted = "memory_stats_as_nested_dict", torch.device("cuda", 1)
    assert cuda.calls == [(True,), ("set_device", 1), ("mem_get_info",), counted]
    assert not torch.backends.cuda.matmul.allow_tf32
    with Cuda().in_tf32():
        assert torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def by_products(backends: Any) -> None:
    if not hasattr(backends, "fp32_precision"):
        pytest.skip("torch before 2.9")
    backends.fp32_precision = "tf32"


SETTINGS: dict[str, Callable[[Any], None]] = {
    "none": lambda backends: None,
    "bfloat16": lambda backends: torch.set_float32_matmul_precision("medium"),
    "matrices": lambda backends: setattr(backends.cuda.matmul, "allow_tf32", True),
    "convolutions": lambda backends: setattr(backends.cudnn, "allow_tf32", False),
    "by products": by_products,
    "timed": lambda backends: setattr(backends.cudnn, "benchmark", True),
}
"""What a notebook has set before a run."""


def settings_of_torch() -> list[object]:
    backends, found = torch.backends, list[object]()
    reads = (
        torch.get_float32_matmul_precision,
        lambda: backends.cuda.matmul.allow_tf32,
        lambda: backends.cudnn.allow_tf32,
        lambda: backends.cudnn.benchmark,
        lambda: backends.cuda.matmul.fp32_precision,
        lambda: backends.cudnn.conv.fp32_precision,
        lambda: backends.mkldnn.matmul.fp32_precision,
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    )
    for read in reads:
        try:
            found.append(read())
        except (AttributeError, RuntimeError) as error:  # torch before 2.9; settings that contradict each other
            found.append(type(error))
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_products_are_exact_in_a_run_and_torchs_settings_as_they_were_after_it(name, cuda: FakeCuda) -> None:
    first = Cuda().as_now()
    generic = getattr(torch.backends, "fp32_precision", None)
    try:
        SETTINGS[name](torch.backends)
        kind, before = Cuda(), settings_of_torch()
        restore = kind.as_now()
        kind.take(1)
        taken = settings_of_torch()
        assert taken[:4] == ["highest", False, False, False]
        assert "tf32" not in taken
        with kind.in_tf32():
            assert settings_of_torch()[:4] == ["high", True, True, False]
        assert settings_of_torch() == taken
        restore()
        assert settings_of_torch() == before
    finally:
        if generic is not None:
            torch.backends.fp32_precision = generic
        first()


def test_a_mark_waits_for_the_stream_of_its_device(cuda: FakeCuda) -> None:
    wait = Cuda().mark(torch.device("cuda", 1))
    assert cuda.events[0].asked == ["the stream of cuda:1"]
    wait()
    assert cuda.events[0].asked[1:] == ["waited"]


def test_all_graphs_of_a_device_share_a_pool_and_a_stream(cuda: FakeCuda) -> None:
    """Until a capture fails, which may leave both unusable."""
    kind, (first, second) = Cuda(), (torch.device("cuda", number) for number in (0, 1))
    for device in (first, first, second):
        kind.capture(device, lambda: None)
    with pytest.raises(ZeroDivisionError):
        kind.capture(first, lambda: 1 / 0)
    kind.capture(first, lambda: None)
    one, again, other, failed, after = cuda.captures
    assert one == again == failed
    assert all(mine is not others for each in (other, after) for mine, others in zip(one, each, strict=True))


def test_what_is_compiled_makes_no_graphs_of_its_own(monkeypatch) -> None:
    """As torch's modes ``reduce-overhead`` and ``max-autotune`` do: steps are recorded with all that is in them."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.append(options) or module)
    Cuda().compiled(torch.nn.Linear(1, 1))
    assert asked == [{}]


def test_refusals_of_memory_are_watched_but_those_that_were_answered(cuda: FakeCuda, monkeypatch) -> None:
    kind, device, refused = Cuda(), torch.device("cuda", 0), {"num_ooms": 3}
    monkeypatch.setitem(ACCELERATORS, "cuda", kind)
    monkeypatch.setitem(DOCUMENTED, "memory_stats_as_nested_dict", lambda device: refused)
    kind.take(0)
    check_refusals(device)  # what was before is not the package's
    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    refused["num_ooms"] += 1
    for _ in range(2):
        answer(full)
    check_refusals(device)
    refused["num_ooms"] += 1
    for _ in range(2):
        with pytest.raises(torch.cuda.OutOfMemoryError, match="a convolution's workspace") as error:
            check_refusals(device)
        answer(error.value)
    kind.take(0)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="before in this process"):
        check_refusals(device)
    kind.be_deterministic(False)
    check_refusals(device)


def test_only_a_full_device_is_full() -> None:
    assert is_full(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_full(RuntimeError("CUDA error: unspecified launch failure"))


def test_a_cpu_is_its_own_device() -> None:
    tensor = torch.ones(3)
    assert upload(tensor, torch.device("cpu")) is tensor


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_cuda_is_named_in_one_module(path: Path) -> None:
    """``torch.cuda``, ``torch.backends.cuda``, ``is_cuda``, ``pin_memory`` and ``"cuda"`` stand there alone."""
    where = path.relative_to(PACKAGE).as_posix()
    if where == "ranks/accelerators.py" or where in WORDS_OF_USERS:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert getattr(node, "attr", "") not in ("cuda", "is_cuda", "cudnn", "pin_memory"), f"line {node.lineno}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value.partition(":")[0] != "cuda", f"line {node.lineno}"
