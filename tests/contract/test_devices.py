"""Which device each rank takes, from tables of what ranks see; and sums that MPI reduces in the device's memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import distributed

from hpcfed.errors import InputError
from hpcfed.ranks.devices import DeviceSlot, RankDevices, assign, names, take_device_slot, takes_gpu_memory
from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.reduce.device import INTERFACE, DistributedSum, address_of, device_sum
from hpcfed.reduce.weighted_update import WeightedUpdate

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"
SLICES = ("MIG-1", "MIG-2", "MIG-3")

TABLES: dict[str, tuple[list[tuple[str, tuple[str, ...]]], list[int | None], list[int]]] = {
    # node and devices of each rank → index of each rank's device, ranks on it
    "one rank, one GPU": ([("n1", (A,))], [0], [1]),
    "all see all": ([("n1", (A, B, C, D))] * 4, [0, 1, 2, 3], [1] * 4),
    "fewer ranks than GPUs": ([("n1", (A, B, C, D))] * 2, [0, 1], [1, 1]),
    "more ranks than GPUs": ([("n1", (A, B))] * 5, [0, 1, 0, 1, 0], [3, 2, 3, 2, 3]),
    "one GPU visible to each": ([("n1", (A,)), ("n1", (B,)), ("n1", (C,))], [0, 0, 0], [1, 1, 1]),
    "one GPU visible to each, two ranks on each": (
        [("n1", (A,)), ("n1", (B,)), ("n1", (A,)), ("n1", (B,))],
        [0, 0, 0, 0],
        [2, 2, 2, 2],
    ),
    "two nodes, ranks in blocks": ([("n1", (A, B))] * 2 + [("n2", (C, D))] * 2, [0, 1, 0, 1], [1] * 4),
    "two nodes, ranks dealt round": ([("n1", (A, B)), ("n2", (C, D))] * 2, [0, 0, 1, 1], [1] * 4),
    "two nodes whose devices have the same names": ([("n1", ("0",)), ("n2", ("0",))], [0, 0], [1, 1]),
    "nodes of different sizes": ([("n1", (A, B))] * 2 + [("n2", (C,))] * 2, [0, 1, 0, 0], [1, 1, 2, 2]),
    "halves of a node, each seen by two ranks": (
        [("n1", (A, B)), ("n1", (A, B)), ("n1", (C, D)), ("n1", (C, D))],
        [0, 1, 0, 1],
        [1] * 4,
    ),
    "each in an order of its own": ([("n1", (A, B)), ("n1", (B, A))], [0, 0], [1, 1]),
    "a rank that sees one GPU chooses before one that sees two": ([("n1", (A, B)), ("n1", (A,))], [1, 0], [1, 1]),
    "a slice of a GPU for each": ([("n1", (slice_,)) for slice_ in SLICES], [0, 0, 0], [1, 1, 1]),
    "a node without GPUs": ([("n1", (A,)), ("n2", ()), ("n2", ())], [0, None, None], [1, 2, 2]),
    "no GPU anywhere": ([("n1", ())] * 3, [None] * 3, [3] * 3),
}


@pytest.mark.parametrize("table", TABLES)
def test_each_rank_takes_its_device(table: str) -> None:
    seen, indices, sharing = TABLES[table]
    slots = assign([RankDevices(*row) for row in seen])
    assert [device_slot.index for device_slot in slots] == indices
    assert [device_slot.sharing for device_slot in slots] == sharing
    nodes = Counter(node for node, _ in seen)
    assert [device_slot.neighbours for device_slot in slots] == [nodes[node] for node, _ in seen]


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 13])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_the_load_is_even(num_ranks: int, num_devices: int) -> None:
    slots = assign([RankDevices("n1", tuple(f"GPU-{index}" for index in range(num_devices)))] * num_ranks)
    load = Counter(device_slot.index for device_slot in slots)
    assert max(load.values()) - min(load[index] for index in range(num_devices)) <= 1


@pytest.mark.parametrize(
    ("visible", "uuids", "expected"),
    [
        (None, ["u1", "u2"], ("u1", "u2")),
        ("1,0", ["u2", "u1"], ("u2", "u1")),
        ("0", ["u7"], ("u7",)),  # SLURM numbers each task's own GPU 0
        ("GPU-u1", ["u1"], ("u1",)),
        ("GPU-8932f937,GPU-1", ["8932f937-d72c", "1c35"], ("8932f937-d72c", "1c35")),  # names may be cut short
        ("MIG-s2", ["u1"], ("MIG-s2",)),
        ("MIG-GPU-u1/5/0,MIG-GPU-u1/6/0", ["u1"], ("MIG-GPU-u1/5/0",)),  # CUDA shows a process one slice
        (" MIG-s1 ", ["u1"], ("MIG-s1",)),
        ("", [], ()),
        ("0,1,2", [], ()),
    ],
)
def test_a_device_has_one_name_on_all_ranks(visible: str | None, uuids: list[str], expected: tuple[str, ...]) -> None:
    assert names(visible, uuids) == expected


def test_ranks_of_this_machine_share_its_cpu(world):
    assert take_device_slot("cpu", world) == DeviceSlot(None, world.size, world.size)
    assert take_device_slot("cpu", world).device == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_missed_on_every_rank(world):
    if torch.cuda.is_available():
        assert take_device_slot("cuda", world).index is not None
    else:
        with pytest.raises(InputError, match=r"rank 0 on .*: device: cuda: expected a GPU, got none"):
            take_device_slot("cuda", world)


class _World(World):
    """A world whose MPI is, or is not, CUDA-aware."""

    def __init__(self, says: bool | None):
        self.reads_gpu_memory = says


@pytest.mark.parametrize(
    ("wanted", "device", "says", "expected"),
    [
        ("auto", "cuda", True, True),
        ("auto", "cuda", False, False),
        ("auto", "cuda", None, False),
        ("host", "cuda", True, False),
        ("mpi", "cuda", True, True),
        ("mpi", "cuda", None, True),
        ("mpi", "cpu", False, False),
        ("auto", "cpu", True, False),
    ],
)
def test_how_sums_leave_a_gpu(wanted: str, device: str, says: bool | None, expected: bool) -> None:
    assert takes_gpu_memory(wanted, torch.device(device), _World(says)) is expected


def test_an_mpi_that_says_no_cannot_be_forced() -> None:
    with pytest.raises(InputError, match="gpu_reduce: mpi: expected an MPI built for CUDA"):
        takes_gpu_memory("mpi", torch.device("cuda"), _World(False))


def test_this_mpi_says_what_it_does_with_gpu_memory(comm, world):
    assert world.reads_gpu_memory in (True, False, None)
    assert world.describe()["mpi_reads_gpu_memory"] is world.reads_gpu_memory


def test_nccl_needs_a_gpu_for_each_rank_and_a_torch_that_has_it() -> None:
    with pytest.raises(InputError, match="gpu_reduce: nccl: expected a GPU for each rank, got 2 ranks on one"):
        device_sum("nccl", DeviceSlot(0, 2, 2), World())
    if distributed.is_nccl_available():
        assert isinstance(device_sum("nccl", DeviceSlot(0, 1, 1), World()), DistributedSum)
    else:
        with pytest.raises(InputError, match="gpu_reduce: nccl: expected a torch with NCCL, got none"):
            device_sum("nccl", DeviceSlot(0, 1, 1), World())


@pytest.mark.parametrize(
    ("named", "address"),
    [("", "h1"), ("lo", "127.0.0.1"), ("=lo", "127.0.0.1"), ("=l", "h1"), ("^lo", "h1"), ("nothing,lo", "127.0.0.1")],
)
def test_ranks_meet_on_the_interface_that_nccl_uses(named: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, named)
    assert address_of("h1") == address


def test_a_cpu_has_no_need_of_nccl() -> None:
    assert device_sum("nccl", DeviceSlot(None, 1, 1), World()) is None


@pytest.mark.parametrize("through", ["MPI", "torch.distributed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_the_devices_memory_are_those_on_the_host(dtype, through, world):
    """On the CPU, where that memory is merely another one: the slots' way to it and back, in rounds of any size."""
    cpu = torch.device("cpu")
    sums = world.sum_in_place if through == "MPI" else DistributedSum(world, cpu)
    apart = RoundBuffer(16, dtype, cpu, world, sum_on_device=sums)
    together = RoundBuffer(16, dtype, cpu, world)
    for round, cohort_size in enumerate((3, 5, 2), 1):
        told = []
        for buffer in (apart, together):
            buffer.open({"delta": (1.0, 2.0**-40)[: 1 + round % 2], "other": (0.5,)}, cohort_size)
            for place in range(world.rank, cohort_size, world.size):
                vector = torch.full((16,), 0.1 * (place + round), dtype=dtype)
                buffer.add(
                    WeightedUpdate(place, 0.3, {"delta": vector, "other": -vector}, loss_sum=0.7 * place, steps=place)
                )
            told.append(buffer.reduce(7 + world.rank, 0.5, requests=world.rank, written=round))
        for name, vector in told[0].vectors.items():
            assert torch.equal(vector, told[1].vectors[name])
        assert all(own.tolist() == told[1].bounds[name].tolist() for name, own in told[0].bounds.items())
        for field in ("status", "delta_sq", "loss_sum", "steps", "hashes", "requests", "written"):
            assert getattr(told[0], field).tolist() == getattr(told[1], field).tolist()


def test_sums_are_of_the_ranks_at_hand_whichever_group_the_process_has_joined(world):
    """Each alone, all ranks, in two groups, and all again: sweeps in groups among runs on all ranks."""
    groups = world.split(min(2, world.size))
    for ranks in (world.split(world.size), world, groups, world):
        ones = torch.ones(3, dtype=torch.int64)
        DistributedSum(ranks, torch.device("cpu"))(ones)
        assert ones.tolist() == [ranks.size] * 3
