"""Test whether, on this machine, a client's update depends on its slot in its tile, or on the tile's other clients.

A tile is a group of clients that are trained together. An update should depend on neither; if it does, by a library's
rounding, an honest run has other bits on another number of ranks. So before a difference is blamed on the sum, the
server or the record, the round's clients are trained in several arrangements: in the tiles of the recorded number of
ranks, in the tiles of one rank, in other slots, with other neighbours, and alone in a tile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hpcfed.errors import HpcfedError
from hpcfed.local_round import RoundPlan, tiles_of
from hpcfed.provenance.recorded import RecordedRun
from hpcfed.provenance.replay.capture import hashes_in_tiles
from hpcfed.provenance.replay.enter import RewoundRun, entered
from hpcfed.ranks.placement import homes

Tiles = Sequence[Sequence[int]]
"""The clients of each tile, as indices into the cohort."""


@dataclass(frozen=True)
class Dependence:
    """A client whose update depends on its tile, the group of clients that it is trained with.

    Attributes:
        round: the round, from 1.
        client, name: the client's number and name.
        on_slot: whether the update depends on the slot, so that copies of the client in one tile differ; if not, it
            depends on the other clients of the tile.
        hashes: arrangement, such as "alone in a tile" → hash of the update; of equal hashes only the first is listed.
    """

    round: int
    client: int
    name: str
    on_slot: bool
    hashes: Mapping[str, int]

    def __str__(self) -> str:
        of = "the slot of its tile" if self.on_slot else "its neighbours"
        how = ", ".join(f"{value:016x} {name}" for name, value in self.hashes.items())
        return f"round {self.round}: the update of client {self.client} ({self.name}) depends on {of} here: {how}"


def dependences_of(run: RecordedRun, round: int) -> list[Dependence]:
    """Return the result of `dependences` for a round to which the run is rewound first; [] if an error occurs."""
    try:
        return dependences(run, entered(run, round), round)
    except HpcfedError:
        return []


def dependences(
    run: RecordedRun, begun: RewoundRun, round: int, clients: Collection[int] | None = None
) -> list[Dependence]:
    """Return the clients of a round whose updates, on this machine, depend on their slot or their neighbours in a tile.

    Args:
        run: the recorded run, whose number of ranks gives one of the arrangements.
        begun: the run at the beginning of the round.
        round: the round, from 1.
        clients: numbers of the clients to report; None: all of the cohort. The whole cohort is trained in either case.
    """
    parts, plan = begun.parts, begun.simulation.plan(round)
    if parts.engine.tile == 1:
        return []
    ranks = len(run.environment.get("per_rank") or [0])
    found: dict[int, dict[str, int]] = {}
    for how, tiles in _arrangements(begun, plan, ranks):
        for place, value in _trained(begun, plan, tiles):
            found.setdefault(place, {})[how] = value
    members = plan.cohort.clients.tolist()
    dependent = [
        place
        for place, values in sorted(found.items())
        if len({*values.values()}) > 1 and (clients is None or members[place] in clients)
    ]
    return [_described(begun, plan, place, found[place]) for place in dependent]


def _arrangements(begun: RewoundRun, plan: RoundPlan, ranks: int) -> Iterator[tuple[str, Tiles]]:
    """Yield arrangements of a round's clients in tiles, each as (name for messages, tiles)."""
    order = np.argsort(-plan.cohort.steps, kind="stable")  # as `Training` trains them
    in_tiles = partial(tiles_of, begun.parts.engine, plan)
    as_on_one = in_tiles(order.tolist())
    if ranks > 1:
        sizes = np.where(begun.parts.cohorts.present, begun.parts.federation.sizes, 0)
        home = homes(sizes, ranks)[plan.cohort.clients][order]
        yield f"as on {ranks} ranks", [tile for rank in range(ranks) for tile in in_tiles(order[home == rank].tolist())]
    yield "as on one rank", as_on_one
    yield "in other slots", [tile[::-1] for tile in as_on_one]
    parts = max(2, len(as_on_one))
    yield "with other neighbours", [tile for k in range(parts) for tile in in_tiles(order[k::parts].tolist())]
    yield "alone in a tile", [[place] for place in order.tolist()]


def _trained(begun: RewoundRun, plan: RoundPlan, tiles: Tiles) -> Iterator[tuple[int, int]]:
    """Train tiles; yield (index in the cohort, hash of the update) for each client, except in tiles that fail."""
    for tile, values in zip(tiles, hashes_in_tiles(begun.parts, plan, tiles), strict=True):
        yield from zip(tile, values, strict=False)


def _described(begun: RewoundRun, plan: RoundPlan, place: int, values: Mapping[str, int]) -> Dependence:
    copies = [place] * (1 if begun.parts.engine.fixed_slots else begun.parts.engine.tile)
    on_slot = len({*hashes_in_tiles(begun.parts, plan, [copies])[0]}) > 1
    client, federation = int(plan.cohort.clients[place]), begun.parts.federation
    hashes: dict[str, int] = {}
    for how, value in values.items():
        if value not in hashes.values():
            hashes[how] = value
    return Dependence(plan.round, client, federation.client_name(client), on_slot, hashes)
