"""Facts of ``environment.json`` on which a run's last bits depend: compared, and kept where a run goes on elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

PROCESSOR = ("device", "instruction set", "library settings", "processor", "threads per rank")
"""Names of facts in ``environment.json`` that do not change the bits of a run with ``bits: portable``."""
KINDS = (("device", "device"), ("instruction set", "instructions"), ("library settings", "library_settings"))
"""Facts recorded for each rank: (name in messages, key in ``environment.json``)."""
PACKAGES = ("torch", "numpy")
"""Packages whose version decides the last bits."""
BEFORE = "before"
"""Key of ``environment.json``: the machines from which a run went on elsewhere, each with its last round, ``until``."""
MOST_NAMED = 3
"""Moves in one line; a job that is queued again and again may have many."""


def of_environments(
    recorded: Mapping[str, Any], here: Mapping[str, Any], places: tuple[str, str] = ("there", "here")
) -> Iterator[str]:
    """Yield a line for each difference between two runs' ``environment.json`` that may change the last bits of a run.

    If both runs have ``bits: portable``, the facts named in `PROCESSOR` are left out. `places`: what the lines call the
    place of each run.
    """
    portable = {recorded.get("bits"), here.get("bits")} == {"portable"}
    for name, then, now in _facts(recorded, here):
        if then is not None and then != now and not (portable and name in PROCESSOR):
            yield f"{name}: {then} {places[0]}, {now} {places[1]}"


def earlier(environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the well-formed entries of `BEFORE` in ``environment.json``, in the order of rounds."""
    found = environment.get(BEFORE)
    return [one for one in found if _is_entry(one)] if isinstance(found, list) else []


def environment_of(environment: Mapping[str, Any], round: int) -> Mapping[str, Any]:
    """Return the facts of the machine that computed a round: an entry of `BEFORE`, or ``environment.json`` itself."""
    return next((one for one in earlier(environment) if round <= one["until"]), environment)


def went_on(recorded: Mapping[str, Any], here: Mapping[str, Any], done: int) -> list[Mapping[str, Any]]:
    """Return `BEFORE` of a run that goes on here after `done` rounds.

    hpcfed's own version is left out: ``arithmetic`` says whether its bits are others.
    """
    kept = [one for one in earlier(recorded) if one["until"] < done]
    last = environment_of(recorded, done)
    if not (recorded and done):
        return kept
    keys = [*(key for _, key in KINDS), "cpu"]
    kinds = [{key: rank[key] for key in keys if key in rank} for rank in last.get("per_rank") or ()]
    packages = last.get("packages") or {}
    entry = {
        "until": done,
        "packages": {name: packages[name] for name in PACKAGES if name in packages},
        "per_rank": [one for place, one in enumerate(kinds) if one not in kinds[:place]],
        **{key: last[key] for key in ("cpu", "threads_per_rank", "bits") if key in last},
    }
    return [*kept, entry] if any(of_environments(entry, here)) else kept


def moves(environment: Mapping[str, Any], rounds: int) -> Iterator[str]:
    """Yield a line for each of a run's `rounds` after which it went on elsewhere, with what differs.

    After the last one a run is measured at most.
    """
    for one, following in itertools.pairwise([*earlier(environment), environment]):
        if one["until"] < rounds:
            differs = "; ".join(of_environments(one, following, ("before", "since")))
            yield f"after round {one['until']} it went on elsewhere, where last bits may differ: {differs}"


def moves_in_a_line(environment: Mapping[str, Any], rounds: int) -> str:
    """Return the first `MOST_NAMED` lines of `moves` as one, "" if there are none."""
    found = [*moves(environment, rounds)]
    more = len(found) - MOST_NAMED
    return "; ".join([*found[:MOST_NAMED], *([f"and {more} times more"] if more > 0 else [])])


def _is_entry(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and type(one.get("until")) is int
        and isinstance(one.get("packages"), dict)
        and isinstance(one.get("per_rank"), list)
        and all(isinstance(rank, dict) for rank in one["per_rank"])
    )


def _facts(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield "hpcfed", recorded.get("hpcfed"), here.get("hpcfed")
    for package in PACKAGES:
        then, now = ((one.get("packages") or {}).get(package) for one in (recorded, here))
        yield package, then, now
    for name, key in KINDS:
        yield name, _all_ranks(recorded, key), _all_ranks(here, key)
    then, now = (_all_ranks(one, "cpu") for one in (recorded, here))
    if then is None or now is None:  # earlier versions recorded rank 0's alone
        then, now = recorded.get("cpu"), here.get("cpu")
    yield "processor", then, now
    yield "threads per rank", recorded.get("threads_per_rank"), here.get("threads_per_rank")
    if recorded.get("bitwise") is False and recorded.get("ranks") != here.get("ranks"):
        yield f"ranks ({recorded.get('bitwise_why_not')})", recorded.get("ranks"), here.get("ranks")


def _all_ranks(environment: Mapping[str, Any], key: str) -> str | None:
    found = sorted({str(entry[key] or "none") for entry in environment.get("per_rank") or () if key in entry})
    return ", ".join(found) or None
