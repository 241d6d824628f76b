"""Transport of a GPU's sums to other ranks: CUDA-aware MPI, NCCL, or host memory.

NCCL, of torch.distributed, is for several GPUs whose MPI takes no GPU memory. Its ranks find each other by a port of
rank 0's host that the system chooses, and that MPI distributes; on the interface that NCCL itself uses, where
``NCCL_SOCKET_IFNAME`` names one. Sums of int64 have no order, so all three give the same bits.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.ranks.accelerators import accelerator, upload
from hpcfed.ranks.devices import DeviceSlot, takes_gpu_memory
from hpcfed.ranks.world import World

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
SumInPlace = Callable[["torch.Tensor"], None]
"""Replaces an int64 tensor in the device's memory by its sum over ranks."""
FOR_EVER = timedelta(days=365)
"""How long a rank waits for one that still trains; the run's own watchdog knows better than a fixed time."""
START = timedelta(minutes=5)
TRIED = 1 << 14
"""Entries of the buffer with which an MPI is tried: more than MPI libraries copy aside before they send."""
INTERFACE = "NCCL_SOCKET_IFNAME"
"""NCCL's variable: beginnings of interfaces' names, ``=`` before whole ones, ``^`` before those that it avoids."""
_members: list[tuple[str, int]] = []
"""Host and number of each process of the group that this process has joined, by rank."""


def device_sum(wanted: str, device_slot: DeviceSlot, world: World, *, mixed: bool = False) -> SumInPlace | None:
    """Return what sums the device's memory over ranks; None where sums pass through the host's memory.

    Args:
        wanted: the recipe's ``gpu_reduce``.
        device_slot: this rank's.
        mixed: whether some ranks have a GPU, and others none: then sums pass through the host's memory on all.

    Raises:
        InputError: what was asked for is not there.
    """
    if mixed:
        if wanted in ("mpi", "nccl"):
            got, remedy = "ranks without one", "set gpu_reduce: auto"
            raise InputError(f"gpu_reduce: {wanted}", expected="a GPU for each rank", got=got, remedy=remedy)
        return None
    if wanted != "nccl" or device_slot.index is None:
        if not takes_gpu_memory(wanted, device_slot.device, world):
            return None
        return world.sum_in_place if _mpi_sums(wanted, device_slot.device, world) else None
    if device_slot.sharing > 1:
        got = f"{device_slot.sharing} ranks on one"
        remedy = "start a rank for each GPU, or set gpu_reduce: auto"
        raise InputError("gpu_reduce: nccl", expected="a GPU for each rank", got=got, remedy=remedy)
    if not accelerator(device_slot.device).has_distributed():
        raise InputError("gpu_reduce: nccl", expected="a torch with NCCL", got="none", remedy="set gpu_reduce: auto")
    return DistributedSum(world, device_slot.device)


def _mpi_sums(wanted: str, device: torch.device, world: World) -> bool:
    """Try an MPI that says it accepts the device's memory, on all ranks; return whether its sum was right.

    Raises:
        InputError: it was not, and ``mpi`` was asked for.
    """
    import torch

    if world.size == 1:
        return True
    own = upload(torch.full((TRIED,), 1 << world.rank % 32, dtype=torch.int64), device)
    accelerator(device).synchronize(device)
    got = "another sum"
    try:
        world.sum_in_place(own)
        is_right = bool((own.cpu() == sum(1 << rank % 32 for rank in range(world.size))).all())
    except Exception as error:  # of the MPI, which says so in its own way
        is_right, got = False, str(error).partition("\n")[0]
    wrong = [said for right, said in world.gather((is_right, got)) if not right]
    if wrong and wanted == "mpi":
        expected, remedy = "an MPI that sums a GPU's memory", "set gpu_reduce: host"
        raise InputError("gpu_reduce: mpi", expected=expected, got=f"{wrong[0]} at a trial", remedy=remedy)
    if wrong and world.is_root:
        log.warning(
            "gpu_reduce: MPI says it takes the GPU's memory, but failed at a trial (%s): sums go by the host", wrong[0]
        )
    return not wrong


def address_of(host: str) -> str:
    """Return this host's address on the first interface that `INTERFACE` names, by default the host's name."""
    wanted = os.environ.get(INTERFACE, "")
    names = [] if wanted.startswith("^") else [name for name in wanted.removeprefix("=").split(",") if name]
    for name in names:
        for interface, addresses in psutil.net_if_addrs().items():
            if interface == name if wanted.startswith("=") else interface.startswith(name):
                for one in addresses:
                    if one.family == socket.AF_INET:
                        return str(one.address)
    return host


class DistributedSum:
    """Sums through torch.distributed: NCCL between GPUs, gloo on the CPU.

    The ranks join their group with the first sum, and leave it with the process: its next run finds it there. A process
    has one group; sums over other ranks, as of a sweep that divides them otherwise, pass through the host's memory.

    Args:
        world: the ranks, each of which calls it the same number of times.
        device: of the tensors to come.
    """

    def __init__(self, world: World, device: torch.device):
        self._world, self._device = world, device
        self._through_host: bool | None = None

    def __call__(self, buffer: torch.Tensor) -> None:
        """Replace an int64 tensor by its sum over ranks.

        Raises:
            EnvironmentFailure: the ranks do not reach each other.
        """
        from torch import distributed

        if self._world.size == 1:  # a group of one would keep this process from joining a larger one
            return
        try:
            if self._through_host is None:
                self._through_host = not self._try_join()
            if self._through_host:
                summed = buffer.cpu()
                self._world.sum_in_place(summed)
                buffer.copy_(summed)
            else:
                distributed.all_reduce(buffer)
        except RuntimeError as error:  # of which all errors of torch.distributed are
            why = str(error).partition("\n")[0]
            raise EnvironmentFailure(
                "torch.distributed cannot sum over the ranks", got=why, remedy="set gpu_reduce: auto"
            ) from error

    def _try_join(self) -> bool:
        """Join the ranks' group unless one of them has joined another; return on all ranks whether all are in it."""
        from torch import distributed

        members = self._world.gather((self._world.hosts[self._world.rank], os.getpid()))
        joined = self._world.gather(list(_members) if distributed.is_initialized() else None)
        if all(group is None for group in joined):
            self._join()
            _members[:] = members
            return True
        if all(group == members for group in joined):
            return True
        if self._world.is_root:
            log.warning("gpu_reduce: torch.distributed has a group of other ranks already: sums pass through the host")
        return False

    def _join(self) -> None:
        from torch import distributed

        world, on_gpu = self._world, self._device.type != "cpu"
        host = address_of(world.hosts[0]) if len(set(world.hosts)) > 1 else "127.0.0.1"
        store = None
        if world.is_root:
            store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=START)
        host, port = world.broadcast((host, store.port if store is not None else 0))
        distributed.init_process_group(
            accelerator(self._device).summed_by if on_gpu else "gloo",
            store=store or distributed.TCPStore(host, port, is_master=False, timeout=START),
            rank=world.rank,
            world_size=world.size,
            timeout=FOR_EVER,
            device_id=accelerator(self._device).group_device(self._device) if on_gpu else None,
        )
        atexit.register(distributed.destroy_process_group)
