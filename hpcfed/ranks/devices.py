"""Assignment of devices to ranks: a pure function of one table gathered from all ranks.

No launcher's numbering fits all launchers, and a rank may see all GPUs of its node, one, or a slice of one (MIG), under
any number. So every rank names its node and the devices it sees, with their distance from its cores, and all derive the
same answer. Several ranks may share a device.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.io.node import node
from hpcfed.ranks.accelerators import ACCELERATORS, DEFAULT_ACCELERATOR, VISIBLE, answer, is_fault, is_full
from hpcfed.ranks.affinity import distance
from hpcfed.ranks.cpu import cores
from hpcfed.ranks.world import World

if TYPE_CHECKING:
    import torch

log = logging.getLogger("hpcfed")


@dataclass(frozen=True)
class RankDevices:
    """A rank's row of the table.

    Attributes:
        node: of the rank.
        devices: names of the devices it sees, in its own numbering.
        kind: of these devices.
        distances: of its cores to each (`hpcfed.ranks.affinity`); () if all are equal.
    """

    node: str
    devices: tuple[str, ...] = ()
    kind: str = DEFAULT_ACCELERATOR
    distances: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceSlot:
    """A rank's device, and the ranks it shares it with.

    Attributes:
        index: of its device among those it sees; None for the CPU.
        sharing: ranks on that device, itself included; for the CPU, ranks on the node.
        neighbours: ranks on the node, itself included.
        kind: of its device, if that is not the CPU.
    """

    index: int | None
    sharing: int
    neighbours: int
    kind: str = DEFAULT_ACCELERATOR

    @property
    def device(self) -> torch.device:
        """The device, as torch names it on this rank."""
        import torch

        return torch.device("cpu") if self.index is None else torch.device(self.kind, self.index)


def assign(table: Sequence[RankDevices]) -> list[DeviceSlot]:
    """Return every rank's device slot from the table of all ranks, (P,).

    On each node the ranks' loads are as even as what they see allows; then the sum of distances is as small as it can
    be; then lower ranks take the devices that they see first. P ranks that all see the same G devices, at equal
    distances, take 0, 1, …, G−1, 0, 1, …
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, seen in enumerate(table):
        ranks_of.setdefault(seen.node, []).append(rank)
    chosen: list[int | None] = [None] * len(table)
    for ranks in ranks_of.values():
        own = [rank for rank in ranks if table[rank].devices]
        dealt = _deal(tuple((table[rank].devices, table[rank].distances) for rank in own))
        for rank, index in zip(own, dealt, strict=True):
            chosen[rank] = index
    taken = Counter(
        (seen.node, seen.devices[index]) for seen, index in zip(table, chosen, strict=True) if index is not None
    )
    return [
        DeviceSlot(
            index=index,
            sharing=(len(ranks_of[seen.node]) if index is None else taken[seen.node, seen.devices[index]]),
            neighbours=len(ranks_of[seen.node]),
            kind=seen.kind,
        )
        for seen, index in zip(table, chosen, strict=True)
    ]


@lru_cache(maxsize=16)
def _deal(rows: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]) -> tuple[int, ...]:
    """Return the index of each rank's device from (devices, distances) of a node's ranks: an assignment of least cost.

    Columns are devices, each repeated for its first rank, its second, …: what a turn costs outweighs all distances.
    """
    if not rows:
        return ()
    from scipy.optimize import linear_sum_assignment

    seen_by = Counter(device for devices, _ in rows for device in devices)
    column = {device: place for place, device in enumerate(seen_by)}
    together = len({frozenset(devices) for devices, _ in rows}) == 1
    turns = -(-len(rows) // len(column)) if together else max(seen_by.values())
    cost = np.full((len(rows), len(column)), np.inf)
    farthest = max((distance for _, distances in rows for distance in distances), default=0)
    for row, (devices, distances) in enumerate(rows):
        for index, device in enumerate(devices):
            cost[row, column[device]] = (distances or (0,) * len(devices))[index] * len(rows) * len(column) + index
    turn = (farthest + 1) * len(rows) ** 2 * len(column)
    _, columns = linear_sum_assignment(np.concatenate([cost + place * turn for place in range(turns)], axis=1))
    names = list(column)
    dealt: dict[int, int] = {}
    for kind in dict.fromkeys(rows):  # equal ranks take theirs in the order of turns and indices
        alike = [row for row, other in enumerate(rows) if other == kind]
        places = sorted(
            (int(columns[row]) // len(names), kind[0].index(names[columns[row] % len(names)])) for row in alike
        )
        dealt |= {row: index for row, (_, index) in zip(alike, places, strict=True)}
    return tuple(dealt[row] for row in range(len(rows)))


def names(visible: str | None, uuids: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each device that a rank sees, equal on all ranks that see it.

    Args:
        visible: the rank's `VISIBLE`.
        uuids: as torch reports them. A MIG slice may report its GPU's, so its name in `visible` (MIG-…) is preferred.
    """
    entries = [entry.strip() for entry in (visible or "").split(",")]
    return tuple(
        entries[index] if index < len(entries) and entries[index].startswith("MIG-") else uuid
        for index, uuid in enumerate(uuids)
    )


def visible_devices(kind: str = DEFAULT_ACCELERATOR) -> tuple[str, ...]:
    """Return the name of each device of a kind that this rank sees (see `names`)."""
    return names(os.environ.get(VISIBLE), ACCELERATORS[kind].uuids())


def sees_a_device() -> bool:
    """Whether this rank sees a device beside the CPU, though it may not be able to use it."""
    try:
        return any(visible_devices(kind) for kind in ACCELERATORS)
    except RuntimeError:  # which a run that takes it explains
        return True


def take_device_slot(wanted: str, world: World) -> DeviceSlot:
    """Return this rank's device slot, with the device set up for deterministic work; a collective call.

    Args:
        wanted: the recipe's ``device``.

    Raises:
        InputError: a GPU was asked for and some rank sees none.
        EnvironmentFailure: a rank cannot use the GPU it would get.
    """
    device_slot = assign(world.gather(world.together(lambda: _look(wanted, world))))[world.rank]
    world.together(lambda: _prepare(device_slot, world))
    return device_slot


@dataclass(frozen=True)
class WorldDevices:
    """The devices of all ranks, which some choices follow that have to be the same on every rank.

    Attributes:
        models: kind and model of each rank's, (P,); of a CPU the kind alone.
    """

    models: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, world: World, device_slot: DeviceSlot) -> WorldDevices:
        """Gather them; called on every rank."""
        device = device_slot.device
        return cls(world.gather((device.type, "" if device.type == "cpu" else ACCELERATORS[device.type].name(device))))

    @property
    def are_alike(self) -> bool:
        """Whether all are of one model."""
        return len(set(self.models)) == 1

    @property
    def any_gpu(self) -> bool:
        """Whether a rank has another device than the CPU."""
        return any(kind != "cpu" for kind, _ in self.models)

    @property
    def are_mixed(self) -> bool:
        """Whether some ranks have a GPU, and others none."""
        return self.any_gpu and any(kind == "cpu" for kind, _ in self.models)


def takes_gpu_memory(wanted: str, device: torch.device, world: World) -> bool:
    """Tell whether sums go from the GPU directly to MPI; else they pass through host memory.

    Args:
        wanted: the recipe's ``gpu_reduce``.

    Raises:
        InputError: ``mpi`` was asked for, and this MPI reports no support for GPU memory.
    """
    if device.type == "cpu" or wanted == "host":
        return False
    if wanted == "mpi" and world.reads_gpu_memory is False:
        raise InputError(
            "gpu_reduce: mpi",
            expected="an MPI built for CUDA",
            got="one that says it is not",
            remedy="load the site's CUDA-aware MPI, or set gpu_reduce: auto",
        )
    return wanted == "mpi" or world.reads_gpu_memory is True


@contextmanager
def device_faults(world: World) -> Iterator[None]:
    """Turn an error of this rank's device into one line that names the rank.

    Raises:
        EnvironmentFailure: the device's memory is full, or the device failed.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_fault(error):
            raise
        log.error("the device failed", exc_info=error)
        raise fault(error, _place(world)) from error


def fault(error: BaseException, where: str) -> EnvironmentFailure:
    """Return the one-line error for an error of a device."""
    answer(error)
    got = str(error).partition("\n")[0]
    if is_full(error):
        remedy = "take a smaller local.batch_size or evaluate.batch_size, client_state: host, or fewer ranks per GPU"
        return EnvironmentFailure("the device's memory is full", where=where, got=got, remedy=remedy)
    remedy = "look at the host's GPU (nvidia-smi, dmesg); the same command goes on from the last checkpoint"
    return EnvironmentFailure("the device failed", where=where, got=got, remedy=remedy)


def _look(wanted: str, world: World) -> RankDevices:
    if wanted == "cpu":
        return RankDevices(node())
    try:
        for kind in ACCELERATORS if wanted == "auto" else (wanted,):
            if seen := visible_devices(kind):
                own = cores()
                distances = (distance(own, address) for address in ACCELERATORS[kind].addresses())
                return RankDevices(node(), seen, kind, tuple(distances))
    except RuntimeError as error:
        raise _unusable(error, world) from None
    if wanted != "auto":
        raise InputError(
            f"device: {wanted}",
            where=_place(world),
            expected="a GPU",
            got="none that torch sees",
            remedy="set device: cpu, or check the driver and the job's --gpus-per-node",
        )
    return RankDevices(node())


def _prepare(device_slot: DeviceSlot, world: World) -> None:
    if device_slot.index is None:
        return
    try:
        ACCELERATORS[device_slot.kind].take(device_slot.index)
    except RuntimeError as error:
        raise _unusable(error, world) from None


def _unusable(error: RuntimeError, world: World) -> EnvironmentFailure:
    """Return the error for a failure of the device itself: a GPU in exclusive mode, an outdated driver."""
    return EnvironmentFailure(
        "torch cannot use the GPU that a run would give to this rank",
        where=_place(world),
        got=str(error).partition("\n")[0],
        remedy=f"check nvidia-smi there, or hide the GPUs (export {VISIBLE}=)",
    )


def _place(world: World) -> str:
    return f"rank {world.rank} on {world.hosts[world.rank]}"
