"""Reading of the newest whole checkpoint, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from hpcfed.algorithms._evaluated import LAST_ROUND
from hpcfed.errors import InputError
from hpcfed.io.text import Malformed, open_file
from hpcfed.ranks.placement import Placement
from hpcfed.ranks.world import World
from hpcfed.run_folder.checkpoint.layout import Damaged, Manifest, RecordLayout, stem, unreadable
from hpcfed.run_folder.checkpoint.writer import manifests
from hpcfed.run_folder.code import FRESH
from hpcfed.types import State

log = logging.getLogger("hpcfed")

OF_THE_LAST_ROUND = {name for names in LAST_ROUND.values() for name in names}
"""Tensors that a checkpoint has where the evaluated model is made of them; until the next round they are not known."""


@dataclass(frozen=True)
class RestoredState:
    """A checkpoint, with the client states of this rank.

    Attributes:
        round: the round after which the checkpoint was taken.
        replicated: vectors and scalars that are the same on all ranks.
        clients: client number → state, on the host, of the clients placed on this rank.
        progress: the round loop's state, except for tensors, as plain JSON.
    """

    round: int
    replicated: Mapping[str, Tensor]
    clients: Mapping[int, State]
    progress: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointReader:
    """Reads the checkpoints of a run folder on all ranks.

    Attributes:
        folder: ``checkpoints/`` of the run folder.
        layout: of the clients' records.
        placement: the rank of each client in this world.
        world: the ranks.
    """

    folder: Path
    layout: RecordLayout
    placement: Placement
    world: World

    def newest(
        self, digests: Collection[str], names: Collection[str], say: Callable[[str], None]
    ) -> RestoredState | None:
        """Return the newest whole checkpoint, or None; damaged ones are reported and skipped.

        Args:
            digests: of the recipe, of which its manifest must have one.
            names: of the replicated tensors that it must hold.
            say: prints a line on rank 0.

        Raises:
            InputError: the newest is of another recipe, or holds other states.
            EnvironmentFailure: a file of it cannot be read, though it may be whole.
        """
        paths = self.world.on_root(lambda: _manifests(self.folder))
        for path, before in zip_longest(paths, paths[1:]):
            try:
                manifest, replicated = self._read_on_root(path)
                if manifest.recipe not in digests:
                    raise InputError("the checkpoint is of another recipe", where=str(path), remedy=FRESH)
                if not holds(replicated, names):
                    what, remedy = (
                        "the checkpoint holds other states than this recipe's",
                        f"leave evaluate.model as it was; or {FRESH}",
                    )
                    raise InputError(what, where=str(path), remedy=remedy)
                clients = self.world.together(partial(self._read_clients, manifest, replicated))
            except Damaged as damage:
                follows = "no other is left, the run starts again" if before is None else f"trying {before.name}"
                remark = f"{path} is damaged ({damage}); {follows}"
                log.warning(remark)
                say(remark)
                continue
            return RestoredState(manifest.round, replicated, clients, manifest.progress.model_dump())
        return None

    def of_round(self, round: int, wanted: Mapping[str, Tensor]) -> RestoredState:
        """Return the checkpoint of a round, of any recipe; `wanted`: replicated tensors of the shapes that are needed.

        Raises:
            InputError: it is damaged, or has another shape or type of a tensor.
            EnvironmentFailure: a file of it cannot be read.
        """
        path = self.folder / f"{stem(round)}.json"

        def read() -> RestoredState:
            try:
                manifest, replicated = _read_server(path)
                clients = self._read_clients(manifest, replicated)
                _check_shapes(replicated, wanted)
            except Damaged as damage:
                raise InputError("the checkpoint is damaged", where=str(path), got=str(damage)) from None
            return RestoredState(manifest.round, replicated, clients, manifest.progress.model_dump())

        return self.world.together(read)

    def _read_on_root(self, path: Path) -> tuple[Manifest, Mapping[str, Tensor]]:
        """Return a checkpoint's manifest and replicated tensors, read by rank 0, on every rank."""
        tensors: dict[str, Tensor] = {}

        def read() -> Manifest:
            manifest, found = _read_server(path)
            tensors.update(found)
            return manifest

        return self.world.on_root(read), self.world.broadcast_tensors(tensors)

    def _read_clients(self, manifest: Manifest, replicated: Mapping[str, Tensor]) -> Mapping[int, State]:
        """Read the records of the clients placed on this rank."""
        touched = replicated["touched"].numpy()
        if len(touched) != manifest.num_clients or not self.placement.has(touched):
            raise Damaged(f"{stem(manifest.round)}.json does not belong to its other files")
        places = np.flatnonzero(self.placement.home_of(touched) == self.world.rank)
        if not len(places):
            return {}
        offsets = self.layout.offsets(manifest.sections)[places]
        path, payloads = self.folder / f"{stem(manifest.round)}.clients", dict[int, bytes]()
        try:
            with open_file(path) as file:
                for client, offset in zip(touched[places].tolist(), offsets.tolist(), strict=True):
                    file.seek(offset)
                    payloads[client] = self.layout.read(file, client, manifest.round)
        except OSError as error:
            raise unreadable(path, error) from None
        except Malformed as error:
            raise Damaged(f"{path.name} is {error}") from None
        return _Records(payloads, self.layout)


def holds(found: Collection[str], names: Collection[str]) -> bool:
    """Whether a checkpoint has exactly the tensors `names`; those of `LAST_ROUND` may be missing or extra."""
    return {*found} ^ {*names} <= OF_THE_LAST_ROUND


def _check_shapes(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other shapes or types than `wanted` has; those of `OF_THE_LAST_ROUND` may be empty there.

    Raises:
        Damaged: there is such a tensor.
    """
    for name in sorted(found.keys() & wanted.keys() - {"touched"}):
        own = [tuple(found[name].shape), found[name].dtype]
        shapes = {tuple(wanted[name].shape), *([tuple(wanted["w"].shape), (0,)] if name in OF_THE_LAST_ROUND else [])}
        if own[0] not in shapes or own[1] != wanted[name].dtype:
            expected = f"{tuple(wanted[name].shape)} of {wanted[name].dtype}"
            raise Damaged(f"{name} is {own[0]} of {own[1]}, by the recipe {expected}")


def damage_of(manifest: Path) -> str:
    """Return what is damaged in a checkpoint, the records of clients aside, which are checked when read; "" if nothing.

    Raises:
        EnvironmentFailure: a file of it cannot be read, though it may be whole.
    """
    try:
        _read_server(manifest)
    except Damaged as damage:
        return str(damage)
    return ""


def _manifests(folder: Path) -> list[Path]:
    try:
        return manifests(folder)
    except OSError as error:
        raise unreadable(folder, error) from None


def _read_server(path: Path) -> tuple[Manifest, dict[str, Tensor]]:
    manifest = Manifest.read(path)
    server = path.with_suffix(".server")
    try:
        with open_file(server) as file:
            data = file.read()
    except OSError as error:
        raise unreadable(server, error) from None
    except Malformed as error:
        raise Damaged(f"{server.name} is {error}") from None
    if xxhash.xxh3_128_hexdigest(data) != manifest.server_hash:
        raise Damaged(f"{server.name} does not match its checksum")
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise Damaged(f"{server.name}: {error}") from None
    touched = tensors.get("touched")
    if touched is None or touched.dtype != torch.int64 or touched.dim() != 1:
        raise Damaged(f"{server.name} does not list the clients that have a state")
    return manifest, tensors


class _Records(Mapping[int, State]):
    """Clients' states, as tensors when they are asked for: a million of them at once would take ten times the bytes."""

    def __init__(self, payloads: Mapping[int, bytes], layout: RecordLayout):
        self._payloads, self._layout = payloads, layout

    def __len__(self) -> int:
        return len(self._payloads)

    def __iter__(self) -> Iterator[int]:
        return iter(self._payloads)

    def __getitem__(self, client: int) -> State:
        return self._layout.state_of(self._payloads[client])
