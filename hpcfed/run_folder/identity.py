"""Identity of a run: the keys of a recipe that decide its result, compared and hashed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

import xxhash

from hpcfed.config.load import to_plain
from hpcfed.config.recipe import Recipe

WITHOUT_EFFECT = (
    *("output", "python_path", "data_access", "verify_data", "gpu_reduce", "client_state", "observers"),
    *("sentinel", "secret_seed"),
)
"""Keys of the recipe without an effect on results: a change of them never invalidates a finished run."""
NESTED_WITHOUT_EFFECT = ("local.graphs",)
"""Keys of sections without an effect on results."""
STATE, HASHED_STATE = "client_state", "device"
"""``client_state`` has no effect, but digests of earlier versions include it: it is always hashed as ``device``."""
PLACEMENT = "placement"
"""It has no effect either, but digests and certificates include what it is."""
COMMITMENT = "secret_commitment"
"""Key of a private run that is another one where any other key is."""
FOLLOWED = ("engine", "matmul", "tile", "memory_format")
"""Keys of ``local`` that a recorded recipe has resolved; a recipe with ``auto`` takes the recorded value."""
NOT_OF_THE_RESULT = (*WITHOUT_EFFECT, "checkpoint", "watchdog")
"""Keys of which the result of a finished run is independent."""
FREE = ("rounds", "evaluate", "stop", *NOT_OF_THE_RESULT)
"""Keys that may change when a run is continued."""


def identity(recipe: Recipe, free: tuple[str, ...] = FREE) -> str:
    """Return a digest of the recipe's keys that decide the result of its rounds: all except those in `free`."""
    decides = deciding(to_plain(recipe), free)
    return xxhash.xxh3_128_hexdigest(json.dumps(decides, sort_keys=True).encode())


def identities(recipe: Recipe) -> frozenset[str]:
    """Return the digests that checkpoints of a recipe's run may have: `identity` with each placement."""
    placements = get_args(Recipe.model_fields[PLACEMENT].annotation)
    return frozenset(identity(recipe.model_copy(update={PLACEMENT: placement})) for placement in placements)


def differences(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    free: tuple[str, ...],
    places: tuple[str, str] = ("there", "here"),
) -> list[str]:
    """Return a text, such as ``local.lr 0.5 there and 1 here``, for each key outside `free` that differs.

    Args:
        before, now: two recipes.
        free: keys that are left out.
        places: what the text calls the place of each.
    """
    there, here = (deciding(recipe, (*free, PLACEMENT)) for recipe in (before, now))
    chooses = here.get("local.engine") == "auto"  # and with it matmul, which is no choice of the recipe's yet
    for key in (f"local.{key}" for key in FOLLOWED):
        if here.get(key, "auto") == "auto" or (chooses and key == "local.matmul"):
            there.pop(key, None)
            here.pop(key, None)
    changed = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    if len(changed) > 1 and COMMITMENT in changed:
        changed.remove(COMMITMENT)  # it follows from the other keys
    return [f"{key} {there.get(key)!r} {places[0]} and {here.get(key)!r} {places[1]}" for key in changed]


def deciding(recipe: Mapping[str, Any], free: tuple[str, ...]) -> dict[str, Any]:
    """Return dotted key → value of the keys that decide the result, of `STATE` and `PLACEMENT`; not ``data`` if its
    hash is there.
    """
    data = ("data",) if recipe.get("data_content") else ()
    decides = dict(_dotted({key: value for key, value in recipe.items() if key not in (*free, *data)}))
    for key in NESTED_WITHOUT_EFFECT:
        decides.pop(key, None)
    return decides | ({STATE: HASHED_STATE} if STATE in recipe else {})


def _dotted(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in section.items():
        rows += _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return rows
