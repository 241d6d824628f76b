"""Many ranks on this machine: the same bits as one, start-up time and memory; for ``docs/network.md``, not a test.

    python -m tests.network.many [RANKS [HOSTS]]          64 ranks on 4 hosts, some minutes and 10 GB on two cores

Memory is proportional (PSS: shared pages divided among the processes that map them) and unique (USS), after a round.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import hpcfed
from tests.mpi.recipes import write_recipe, write_small
from tests.network.conftest import RECIPE, Place, hpcfed_run, succeeded
from tests.network.hosts import Hosts, hosts

CLIENTS, ROUNDS = 200, 12
LIMIT = 900.0
MB = 1e6


def main(ranks: int = 64, count: int = 4) -> None:
    """Run a recipe alone and on `ranks` ranks, compare, and print what it took."""
    with tempfile.TemporaryDirectory() as scratch, hosts(count) as network:
        place = Place(Path(scratch))
        write_small(place.path, CLIENTS)
        recipe = write_recipe(place.path, **RECIPE | {"rounds": ROUNDS})
        alone = hpcfed.run(recipe, [f"output={place.path / 'alone'}"], quiet=True)
        began = time.monotonic()
        job = network.start(hpcfed_run(network, sys.executable, ranks, network.names), place.path)
        while place.rounds() < 1 and job.poll() is None and time.monotonic() < began + LIMIT:
            time.sleep(0.2)
        first = time.monotonic() - began
        print(
            f"{ranks} ranks on {count} hosts: first round recorded after {first:.0f} s; {_memory(network)}", flush=True
        )
        succeeded(network.finish(job, LIMIT))
        same = place.model == (alone.folder / "model.safetensors").read_bytes()
        seconds = sorted(row["seconds"]["total"] for row in _rows(place))
        print(
            f"all {ROUNDS} rounds after {time.monotonic() - began:.0f} s, median {seconds[ROUNDS // 2]:.2f} s a round"
        )
        print(f"same bits as one rank: {same}; {len(place.hosts)} ranks on {sorted(set(place.hosts))}")


def _memory(network: Hosts) -> str:
    full = [process.memory_full_info() for name in network.names for process in network.ranks(name)]
    each = {kind: [getattr(one, kind) / MB for one in full] for kind in ("pss", "uss", "rss")}
    return ", ".join(f"{kind.upper()} {min(found):.0f} to {max(found):.0f} MB" for kind, found in each.items())


def _rows(place: Place) -> list[dict]:
    import json

    return [json.loads(line) for line in (place.path / "run" / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
