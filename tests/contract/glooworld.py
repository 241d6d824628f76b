"""A world without MPI in one file outside the package: processes that torch.distributed's Gloo connects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import hpcfed
from hpcfed.ranks.world import World


class GlooWorld(World):
    def __init__(self, rank: int, size: int, meeting: Path):
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        self.rank, self.size = rank, size
        self.hosts = tuple(self.gather(World.hosts[0]))

    def sum_in_place(self, buffer: Any) -> None:
        distributed.all_reduce(torch.as_tensor(buffer))

    def broadcast(self, value: Any, root: int = 0) -> Any:
        values = [value]
        distributed.broadcast_object_list(values, src=root)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def exchange(
        self, outgoing: Sequence[tuple[torch.Tensor, int]], incoming: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]:
        works = [distributed.isend(tensor, rank) for tensor, rank in outgoing]
        works += [distributed.irecv(tensor, rank) for tensor, rank in incoming]
        return lambda: [work.wait() for work in works] and None


def run(rank: int, size: int, meeting: Path, recipe: dict[str, Any]) -> None:
    """Run a round of a recipe, and go on to its second, as one of `size` processes."""
    world = GlooWorld(rank, size, meeting)
    for rounds in (1, 2):
        hpcfed.run({**recipe, "rounds": rounds}, world=world, quiet=True)
    distributed.destroy_process_group()
