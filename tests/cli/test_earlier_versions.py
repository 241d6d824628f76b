"""Run folders of version 0.1: a key added since, at its default, does not make a folder another recipe's; set, it does.

``recipes-0.1.json`` has recipes as 0.1 recorded them: one of FedAvg, one with many sections, and of the other methods
what differs from FedAvg's. A key that is new here belongs into its section's `later`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hpcfed
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.assembly import resolve
from hpcfed.config.load import dump_yaml, load_recipe, to_plain
from hpcfed.errors import InputError
from hpcfed.run_folder.identity import WITHOUT_EFFECT, differences, identities, identity
from tests.mpi.recipes import write_small

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]
RECORDED = json.loads((Path(__file__).parent / "recipes-0.1.json").read_text(encoding="utf-8"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    write_small(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_of_all_methods_are_the_same_today(place):
    for name, changes in RECORDED.items():
        then = RECORDED["fedavg"] | changes
        assert differences(then, to_plain(resolve(load_recipe(then))), WITHOUT_EFFECT) == [], name


def test_digests_in_checkpoints_and_claims_stay_the_same(place):
    """Wherever clients' states lie; with another placement another, of which each is taken for the run's."""
    for client_state in ("device", "disk"):
        recipe = resolve(load_recipe(RECORDED["fedavg"] | {"client_state": client_state}))
        assert identity(recipe) == "6d418459fced7c6fe18a3eb8a9ca14d9"
        assert identity(recipe, WITHOUT_EFFECT) == "1d192b97a7f71b29e78757c6a1dd8d97"
    static = resolve(load_recipe(RECORDED["fedavg"] | {"placement": "static"}))
    assert identity(static) == "c0d9768f040c4202edcda707698c7060"
    assert {identity(static), identity(recipe)} <= identities(static) == identities(recipe)


def test_a_methods_new_key_is_recorded_where_it_is_set(place, monkeypatch):
    monkeypatch.setattr(ServerStep, "later", frozenset({"server_lr"}))
    for server_lr, recorded in ((1.0, {"name": "fedavg"}), (2.0, {"name": "fedavg", "server_lr": 2.0})):
        recipe = RECORDED["fedavg"] | {"algorithm": {"name": "fedavg", "server_lr": server_lr}}
        assert to_plain(resolve(load_recipe(recipe)))["algorithm"] == recorded


def test_a_finished_run_stays_finished_until_a_new_key_is_set(place):
    then = RECORDED["fedavg"] | {"rounds": 1}
    hpcfed.run(then, quiet=True)
    (place / "run" / "recipe.yaml").write_text(dump_yaml(then), encoding="utf-8")
    kept = (place / "run" / "metrics.jsonl").stat().st_mtime_ns
    assert len(hpcfed.run(then, quiet=True).metrics) == 1
    assert (place / "run" / "metrics.jsonl").stat().st_mtime_ns == kept
    of_today = {key: value for key, value in then.items() if key not in ("checkpoint", "watchdog")}  # other defaults
    hpcfed.run(of_today, quiet=True)
    assert load_recipe(place / "run" / "recipe.yaml").watchdog == then["watchdog"]
    assert (place / "run" / "metrics.jsonl").stat().st_mtime_ns == kept
    for change in ("local.lr_schedule=[{round: 2, lr: 0.5}]", "algorithm.server_lr=2.0"):
        with pytest.raises(
            InputError, match=rf"another recipe's run: got {change.partition('=')[0]} .* there and .* here"
        ):
            hpcfed.run(then, [change], quiet=True)
