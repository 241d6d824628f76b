"""Fixtures of the sweep tests: a folder with a small federation, and readers of a sweep's folder."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.mpi.recipes import write_recipe, write_small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``small.h5`` and ``recipe.yaml``; a sweep of it goes to ``run-sweep/``."""
    write_small(tmp_path)
    write_recipe(tmp_path, rounds=2, evaluate={"train": {"every": 1}})
    return tmp_path


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_claims(sweep: Path) -> dict[str, list[dict]]:
    """Each run's claims, the first one first."""
    claims: dict[str, dict[int, dict]] = {}
    for path in (sweep / "claims").glob("[!.]*"):
        run, _, number = path.name.rpartition(".")
        text = path.read_text()  # none yet, where its holder has just made it
        claims.setdefault(run, {})[int(number)] = json.loads(text) if text else {"ending": None, "session": ""}
    return {run: [one for _, one in sorted(numbered.items())] for run, numbered in claims.items()}


def endings(sweep: Path) -> Counter[str]:
    """How often each ending stands in the claims."""
    return Counter(str(claim["ending"]) for claims in read_claims(sweep).values() for claim in claims)
