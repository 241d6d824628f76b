"""The fuzzed parsers, and the loop that tries one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy, lists

from hpcfed.errors import EnvironmentFailure, InputError, visible
from hpcfed.io import text
from hpcfed.io.text import Malformed
from tests.fuzz import federations, inputs, raw_files, runs, texts

MOST_SECONDS = 20
"""Of the processor, so that a busy machine changes nothing; waiting alone ends at the child's limit."""


@dataclass(frozen=True)
class Parser:
    """What reads inputs.

    Attributes:
        attempt: reads the input, in a folder of this child's, and raises one of `refusals` where it refuses it.
        inputs: what hypothesis draws; None for the number alone, from which the attempt draws damage.
        refusals: what may be raised.
    """

    attempt: Callable[[Path, Any], object]
    inputs: SearchStrategy[Any] | None = None
    refusals: tuple[type[Exception], ...] = (InputError,)


PARSERS = {
    "recipe": Parser(texts.recipe, inputs.recipe_texts),
    "override": Parser(texts.override, lists(inputs.overrides, min_size=1, max_size=3)),
    "run": Parser(texts.run, inputs.sound),
    "schedule": Parser(texts.schedule, inputs.json_texts),
    "site": Parser(texts.site, inputs.site_texts),
    "yaml": Parser(texts.yaml_door, inputs.yaml_texts, (Malformed,)),
    "json": Parser(texts.json_door, inputs.json_texts, (Malformed,)),
    "record": Parser(runs.record),
    "code": Parser(runs.code),
    "claim": Parser(runs.claim),
    "checkpoint": Parser(runs.checkpoint),
    "federation": Parser(federations.attempt, refusals=(InputError, EnvironmentFailure)),
    "raw": Parser(raw_files.attempt),
}


def try_all(name: str, folder: Path, first: int, count: int) -> None:
    """Try inputs in this process: a line before each says which, and one after it how it ended."""
    parser = PARSERS[name]
    if name != "yaml":
        _remember_yaml()

    def try_one(given: Any) -> None:
        print(f"{name} {given!r}"[:400], flush=True)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        ending = "read"
        try:
            parser.attempt(folder, given)
        except parser.refusals as error:
            ending = f"refused: {error}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        assert ending == visible(ending), ending
        assert len(ending) < 2000, ending
        print(f"= {ending}", flush=True)

    if parser.inputs is None:
        for number in range(first, first + count):
            try_one(number)
        return
    checks = settings(
        max_examples=count,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    seed(first)(checks(given(parser.inputs)(try_one)))()


def _remember_yaml() -> None:
    """Let this child build each YAML text's value once: most inputs lie beside the same sound recipe."""
    reader = text._yaml
    value_of = lru_cache(maxsize=32)(lambda content: reader().load(content))

    def remembering() -> Any:
        yaml = reader()
        yaml.load = lambda content: deepcopy(value_of(content))
        return yaml

    text._yaml = remembering
