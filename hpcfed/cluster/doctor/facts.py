"""The facts of a job: plain data, gathered once and judged by `hpcfed.cluster.doctor.findings`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hpcfed.cluster.doctor.folders import Folder, examine_folder, examine_temporary_folder
from hpcfed.cluster.doctor.launch import LauncherJob, Mpi, find_job, find_launcher, find_mpi
from hpcfed.errors import EnvironmentFailure
from hpcfed.ranks.accelerators import VISIBLE, accelerator, build
from hpcfed.ranks.affinity import distance, node_of_device, nodes_of_cores
from hpcfed.ranks.cpu import cores
from hpcfed.ranks.devices import DeviceSlot, take_device_slot, visible_devices
from hpcfed.ranks.host_memory import free_memory

if TYPE_CHECKING:
    from hpcfed.cluster.doctor.probe import Rates
    from hpcfed.ranks.world import World

DRIVER = Path("/proc/driver/nvidia/version")
MPS_PIPES = "/tmp/nvidia-mps"
"""Pipe directory of NVIDIA's Multi-Process Service (MPS) if CUDA_MPS_PIPE_DIRECTORY is not set."""


@dataclass(frozen=True)
class Gpu:
    """The GPU that a run assigns to a rank.

    Attributes:
        visible: number of GPUs that torch sees on this rank.
        numa: NUMA node of the GPU; None if the machine does not report it.
        nearer: number of visible GPUs that are nearer to the rank's cores than this one.
    """

    name: str
    uuid: str
    memory_bytes: int
    visible: int
    numa: int | None = None
    nearer: int = 0


@dataclass(frozen=True)
class Rank:
    """Facts of one rank.

    Attributes:
        versions: name → version, of hpcfed, Python, packages, HDF5 and the MPI library; None if missing or not loaded.
        torch_build: what the build of torch is for, such as ``CUDA 12.8`` or ``CPU``.
        cpu, instructions: name of the processor; largest instruction set that torch uses on it, such as ``AVX512``.
        cores: numbers of the logical cores that the rank may use.
        host_cores: number of logical cores of the host.
        threads: size of each thread pool, by library.
        shm_bytes, shm_free_bytes: size and free space of /dev/shm; None if the host has none.
        gpu: the GPU of the rank; None if it computes on the CPU.
        gpu_driver: whether the host has an NVIDIA driver.
        mps: whether the pipe directory of NVIDIA's Multi-Process Service exists on the host.
        code: digest of the rank's copy of hpcfed; "" if there is only one rank.
        numa: NUMA nodes of `cores`; () if the machine does not report them.
    """

    rank: int
    host: str
    versions: Mapping[str, str | None]
    torch_build: str
    cpu: str
    instructions: str
    cores: tuple[int, ...]
    host_cores: int
    threads: Mapping[str, int]
    memory_bytes: int
    memory_free_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    gpu: Gpu | None = None
    gpu_driver: bool = False
    mps: bool = False
    cuda_visible_devices: str | None = None
    code: str = ""
    numa: tuple[int, ...] = ()


@dataclass(frozen=True)
class Host:
    """A host and its ranks."""

    name: str
    ranks: tuple[Rank, ...]

    @property
    def cores(self) -> frozenset[int]:
        """Numbers of the cores that at least one of the host's ranks may use."""
        return frozenset[int]().union(*(rank.cores for rank in self.ranks))


@dataclass(frozen=True)
class Facts:
    """All facts of a job, the same on every rank.

    Attributes:
        launcher: name of the program that started the ranks; None if unknown.
        job: the SLURM job; None outside of one.
        working: the folder in which the command was started.
        temporary: the folder for temporary files.
        hdf5_locking, btl: HDF5_USE_FILE_LOCKING and OMPI_MCA_btl on rank 0; None if not set.
        measured: measured rates and times; None if nothing was measured.
    """

    ranks: tuple[Rank, ...]
    mpi: Mpi
    launcher: str | None
    job: LauncherJob | None
    working: Folder
    temporary: Folder
    hdf5_locking: str | None = None
    btl: str | None = None
    measured: Rates | None = None

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts, in the order of their lowest ranks."""
        names = dict.fromkeys(rank.host for rank in self.ranks)
        return tuple(Host(name, tuple(rank for rank in self.ranks if rank.host == name)) for name in names)


def gather(world: World, *, measure: bool) -> Facts:
    """Gather the facts of all ranks, with measurements if `measure`; called on every rank, same result on all.

    Raises:
        EnvironmentFailure: a rank cannot load torch or h5py, or cannot use its GPU.
    """
    world.together(_load_libraries)
    from hpcfed.cluster.doctor.probe import measure_all

    ranks = tuple(world.gather(_this_rank(world, take_device_slot("auto", world))))
    described = world.describe()
    surroundings = world.on_root(lambda: _surroundings(described))
    measured = measure_all(world, surroundings["working"]) if measure else None
    return Facts(ranks=ranks, measured=measured, **surroundings)


def _surroundings(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Facts` that rank 0 finds for all: MPI, launcher, job, folders and environment variables."""
    return {
        "mpi": find_mpi(described),
        "launcher": find_launcher(os.environ),
        "job": find_job(os.environ),
        "working": examine_folder(Path()),
        "temporary": examine_temporary_folder(),
        "hdf5_locking": os.environ.get("HDF5_USE_FILE_LOCKING"),
        "btl": os.environ.get("OMPI_MCA_btl"),  # noqa: SIM112 (Open MPI writes it so)
    }


def _load_libraries() -> None:
    try:
        import h5py  # noqa: F401
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: one of their shared libraries is missing
        raise EnvironmentFailure(
            f"{sys.executable} cannot load what a run needs",
            where=os.uname().nodename,
            got=f"{type(error).__name__}: {error}",
            remedy="install hpcfed and its dependencies into the environment that every host uses",
        ) from None


def _this_rank(world: World, device_slot: DeviceSlot) -> Rank:
    """Return this rank's facts; called on every rank."""

    from hpcfed.run_folder.environment import environment

    recorded = environment(world, device_slot.device, "exact")
    shm = Path("/dev/shm")
    shm_size = shutil.disk_usage(shm) if shm.is_dir() else None
    return Rank(
        rank=world.rank,
        host=world.hosts[world.rank],
        versions=_versions(recorded, world.describe()["mpi"]),
        torch_build=build(),
        cpu=recorded["cpu"],
        instructions=recorded["per_rank"][world.rank]["instructions"],
        cores=cores(),
        host_cores=os.cpu_count() or 1,
        threads=_threads(),
        memory_bytes=psutil.virtual_memory().total,
        memory_free_bytes=free_memory(),
        shm_bytes=shm_size.total if shm_size else None,
        shm_free_bytes=shm_size.free if shm_size else None,
        gpu=_gpu(device_slot),
        gpu_driver=DRIVER.exists(),
        mps=Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPES)).exists(),
        cuda_visible_devices=os.environ.get(VISIBLE),
        code=world.code[world.rank],
        numa=nodes_of_cores(cores()),
    )


def _versions(recorded: Mapping[str, Any], mpi_library: str | None) -> dict[str, str | None]:
    import h5py

    own = {name: recorded[name] for name in ("hpcfed", "python")}
    mpi = mpi_library and " ".join(mpi_library.split())
    return {**own, **recorded["packages"], "hdf5": h5py.version.hdf5_version, "mpi": mpi}


def _gpu(device_slot: DeviceSlot) -> Gpu | None:
    if device_slot.index is None:
        return None
    device, visible = device_slot.device, visible_devices(device_slot.kind)
    kind = accelerator(device)
    addresses, index = kind.addresses(), device_slot.index
    distances = [distance(cores(), address) for address in addresses]
    return Gpu(
        kind.name(device),
        visible[index],
        kind.total_bytes(device),
        len(visible),
        numa=node_of_device(addresses[index]),
        nearer=sum(other < distances[index] for other in distances),
    )


def _threads() -> dict[str, int]:
    """Return the size of each thread pool, by library; torch's pool includes the MKL that is built into torch."""
    import torch
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    threads = {"torch": torch.get_num_threads()}
    for pool in threadpool_info():
        name = pool["internal_api"]
        threads[name] = max(threads.get(name, 0), pool["num_threads"])
    return threads
