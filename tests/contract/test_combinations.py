"""Every meaningful combination of local method, normalisation, server step and guess runs; the others say why not.

A pairwise choice of them runs always (any two choices of any two parts meet in one), all in the soak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import hpcfed
from hpcfed.algorithms import build, choices, examples, names, parts_of
from hpcfed.assembly import resolve
from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Algorithm
from hpcfed.errors import InputError
from tests.mpi.recipes import small, write_small
from tests.mpi.test_same_result import check_same_as_alone, folder  # noqa: F401  (a fixture)

AXES: Mapping[str, Sequence[str]] = {
    "server": sorted(choices("SERVER")),
    "local": sorted(choices("LOCAL")),
    "guess": ("none", "remaining", "3", "limit"),
    "normalize": ("none", *sorted(choices("NORMALIZE"))),
}
PARAMETERS = {
    kind.choice: {key: value for key, value in examples()[name].items() if key in kind.model_fields}
    for name in names()
    for kind in parts_of(name)
    if kind is not None and kind.choice is not None and kind.__module__.endswith(f".{name.replace('-', '_')}")
}
Combination = tuple[str, ...]


def pairs(chosen: Combination) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """The pairs of (part, choice) that a combination covers."""
    return set(combinations(zip(AXES, chosen, strict=True), 2))


def pairwise(candidates: Sequence[Combination]) -> set[Combination]:
    """Choose combinations greedily until every pair of choices is in one."""
    missing = set().union(*map(pairs, candidates))
    picked: set[Combination] = set()
    while missing:
        best = max(candidates, key=lambda candidate: len(pairs(candidate) & missing))
        picked.add(best)
        missing -= pairs(best)
    return picked


COMBINATIONS = list(product(*AXES.values()))
PAIRWISE = pairwise(COMBINATIONS)


def algorithm_of(chosen: Combination) -> dict[str, Any]:
    server, local, _, normalize = chosen
    return (
        {"local": local, "normalize": normalize, "server": server}
        | PARAMETERS.get(server, {})
        | PARAMETERS.get(local, {})
    )


def test_the_table_is_the_papers():
    """Or longer: a method of one more file may bring a part of its own."""
    assert set(AXES["local"]) >= {"plain", "prox", "scaffold"}
    assert set(AXES["server"]) >= {"step", "momentum", "adagrad", "adam", "yogi", "fedexp", "fedexp-m"}
    assert set(AXES["normalize"]) >= {"none", "steps"}
    assert len(PAIRWISE) < len(COMBINATIONS) / 3


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(chosen, id="-".join(chosen), marks=[] if chosen in PAIRWISE else pytest.mark.soak)
        for chosen in COMBINATIONS
    ],
)
def test_a_combination_runs_and_is_the_same_as_alone(chosen, world, folder):  # noqa: F811
    recipe = small(
        "run",
        algorithm=algorithm_of(chosen),
        guess=int(chosen[2]) if chosen[2].isdecimal() else chosen[2],
        rounds=2,
        budget={"low": 1, "high": 5},
        local={"steps": 6, "batch_size": 10, "lr": 0.05, "momentum": 0.5},
        cohort={"size": 3},
    )
    check_same_as_alone(world, folder, recipe)


def test_control_variates_are_those_of_the_updates_themselves(tmp_path, monkeypatch):
    """A factor that all share, τ/‖a‖ here, is a step size of the server, and no part of SCAFFOLD's c."""
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path)
    common = {
        "dtype": "float64",
        "rounds": 5,
        "weights": "uniform",
        "local": {"steps": 4, "batch_size": 10, "lr": 0.1, "momentum": 0.9},
    }
    moved = sum(1 - 0.9 ** (4 - step) for step in range(4)) / 0.1
    combined = {"local": "scaffold", "normalize": "steps", "tau_eff": "steps"}
    scaled = {"name": "scaffold", "server_lr": 4 / moved}
    found, expected = (
        load_file(hpcfed.run(small(name, algorithm=section, **common), quiet=True).folder / "model.safetensors")
        for name, section in (("combined", combined), ("scaled", scaled))
    )
    for name, parameter in expected.items():  # rounding of 20 steps
        np.testing.assert_allclose(found[name], parameter, rtol=1e-10, atol=1e-12)


ADAM = {"steps": 3, "batch_size": 10, "lr": 0.1, "optimizer": "adam"}
AFTER = {"name": "scaffold", "correction": "after-momentum"}
MEANINGLESS = {
    "scaffold-adam": ({"algorithm": {"name": "scaffold"}, "local": ADAM}, ("optimizer: adam", "‖a_i‖₁", "sgd")),
    "steps-adam": ({"algorithm": {"normalize": "steps"}, "local": ADAM}, ("optimizer: adam", "normalisation")),
    "dsgd-adam": ({"algorithm": {"name": "dsgd"}, "local": {**ADAM, "steps": 1}}, ("optimizer: adam with dsgd", "sgd")),
    "guess-without-moment": ({"guess": "limit"}, ("guess: limit without momentum", "local.momentum")),
    "guess-from-one-gradient": ({"guess": "limit", "algorithm": {"name": "dsgd"}}, ("guess: limit with dsgd",)),
    "schedule-and-decay": (
        {"local": {"steps": 3, "lr_decay": 0.9, "lr_schedule": [{"round": 2, "lr": 0.1}]}},
        ("local: expected", "'lr_decay' or 'lr_schedule'"),
    ),
    "schedule-out-of-order": (
        {"local": {"steps": 3, "lr_schedule": [{"round": 3, "lr": 0.1}, {"round": 2, "lr": 0.1}]}},
        ("rounds in 'lr_schedule' in their order",),
    ),
    "schedule-of-another-key": (
        {"local": {"steps": 3, "lr_schedule": [{"round": 2, "lr": 0.1, "lrs": 0.1}]}},
        ("unknown key 'local.lr_schedule.0.lrs'", "did you mean 'lr'"),
    ),
    "half-a-guess": ({"guess": 2.5}, ("guess: expected 'none'", "a number of steps", "2.5")),
    "sizes-twice": (
        {"algorithm": {"name": "scaffold", "c_scale": "samples"}, "weights": "samples"},
        ("c_scale: samples with weights: samples", "weights: uniform"),
    ),
    "sizes-never": (
        {"algorithm": {"name": "scaffold", "c_scale": "uniform"}},
        ("c_scale: uniform with weights: uniform", "leave c_scale out"),
    ),
    "guess-beside-a-correction": (
        {"guess": "limit", "algorithm": AFTER, "local": {"steps": 3, "momentum": 0.5}},
        ("after-momentum of scaffold with guess: limit", "correction: inside"),
    ),
    "norm-of-a-correction": (
        {"algorithm": {"local": "scaffold", "normalize": "steps", "correction": "after-momentum"}},
        ("after-momentum of scaffold-steps-step with a normalisation", "once a step"),
    ),
    "bias-of-no-moment": (
        {"algorithm": {"name": "fedadagrad", "debias": "adam"}},
        ("algorithm: expected 'beta1' above 0",),
    ),
    "average-of-normalised": (
        {"algorithm": {"name": "fednova"}, "evaluate": {"model": "cohort-average"}},
        ("cohort-average with fednova", "client-average"),
    ),
    "average-of-act": (
        {"algorithm": {"name": "fedsplit"}, "evaluate": {"model": "cohort-average"}},
        ("cohort-average with fedsplit",),
    ),
    "feddyn-as-a-part": (
        {"algorithm": {"local": "feddyn"}},
        ("algorithm.local 'feddyn' has no meaning outside feddyn", "known: ditto, plain, prox, scaffold"),
    ),
    "fednova-as-a-server": (
        {"algorithm": {"local": "prox", "server": "fednova", "mu": 0.1}},
        ("algorithm.server 'fednova' has no meaning outside fednova", "normalize: steps is what fednova adds"),
    ),
    "unknown-part": ({"algorithm": {"server": "fedyogy"}}, ("unknown algorithm.server 'fedyogy'", "'yogi'")),
    "two-ways": ({"algorithm": {"name": "fedavg", "server": "adam"}}, ("algorithm", "one of 'name'")),
    "key-of-another-part": ({"algorithm": {"server": "adam", "eps": 1}}, ("'algorithm.eps'", "plain-none-adam")),
    "momentum-of-adam": ({"local": {**ADAM, "momentum": 0.9}}, ("local", "'momentum'", "beta1")),
    "moment-of-sgd": ({"local": {"steps": 3, "beta1": 0.5}}, ("local", "'beta1'", "adam")),
    "moments-of-sgd": (
        {"guess": "limit", "local": {"steps": 3, "momentum": 0.5, "guess_moments": "all"}},
        ("local", "'guess_moments: all' only with optimizer adam or yogi"),
    ),
    "steps-and-epochs": ({"local": {"steps": 3, "epochs": 1}}, ("local", "'steps' or 'epochs', not both")),
    "budget-upside-down": ({"budget": {"low": 3, "high": 2}}, ("budget", "'low' no larger than 'high'")),
    "cohort-twice": ({"cohort": {"size": 2, "fraction": 0.5}}, ("cohort", "one of 'size', 'fraction' and 'schedule'")),
    "sampling-of-a-schedule": (
        {"cohort": {"schedule": [[0]], "sampling": "bernoulli"}},
        ("cohort", "no 'sampling' beside 'schedule'"),
    ),
    "schedule-drawn-anew": (
        {"cohort": {"schedule": [[0]], "without": {"clients": [1], "cohorts": "redrawn"}}},
        ("cohort", "beside 'schedule', which leaves nothing to draw"),
    ),
    "authors-of-sizes": ({"cohort": {"size": 2, "stream": "authors"}}, ("'sampling: bernoulli' beside 'stream",)),
    "seed-beyond-the-authors": (
        {"cohort": {"fraction": 0.5, "sampling": "bernoulli", "stream": "authors"}, "seed": {"cohort": 2**31}},
        ("'seed.cohort' below 2^31",),
    ),
    "precision-of-float64": ({"precision": "bf16-mixed", "dtype": "float64"}, ("'dtype: float32' beside 'precision'",)),
    "weights-of-an-own-loss": (
        {"loss": {"factory": "losses:own", "weights": [1, 1, 1, 3]}},
        ("loss", "'weights' only with built-in losses"),
    ),
    "two-losses": ({"loss": {"name": "cross-entropy", "factory": "losses:own"}}, ("loss", "'name' or 'factory'")),
    "arguments-of-no-loss": ({"loss": {"args": {"scale": 2}}}, ("loss", "'args' only beside 'factory'")),
    "two-targets": (
        {"stop": {"test_accuracy": 0.5, "metric": "accuracy", "target": 0.6}},
        ("stop", "'test_accuracy' or 'target', not both"),
    ),
    "in-a-row-of-nothing": ({"stop": {"patience": 2, "for": 2}}, ("stop", "'for' only beside 'test_accuracy'")),
    "metric-for-nothing": ({"stop": {"metric": "accuracy"}}, ("stop", "'target' or 'patience' beside 'metric'")),
    "no-work": ({"local": {"lr": 0.1}}, ("local.steps", "epochs", "budget")),
    "nothing-asked-for": (
        {"guess": "remaining", "budget": {"low": 1, "high": 2}, "local": {"momentum": 0.5}},
        ("'local.steps'", "guess: remaining"),
    ),
}


@pytest.mark.parametrize("case", MEANINGLESS)
def test_a_meaningless_combination_is_refused_in_one_line(case, tmp_path):
    changes, says = MEANINGLESS[case]
    write_small(tmp_path)
    with pytest.raises(InputError) as refused:
        resolve(load_recipe(small(tmp_path / "run", data=str(tmp_path / "small.h5"), **changes)))
    line = str(refused.value)
    assert "\n" not in line
    for fragment in says:
        assert fragment in line


def test_a_resolved_combination_names_its_parts_and_runs_again(tmp_path):
    write_small(tmp_path)
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"), algorithm={"server": "fedexp-m", "beta": 0.5})
    first = hpcfed.run(recipe, quiet=True)
    resolved = first.folder / "recipe.yaml"
    assert "local: plain" in resolved.read_text()
    again = hpcfed.run(resolved, [f"output={tmp_path / 'again'}"], quiet=True)
    assert (again.folder / "model.safetensors").read_bytes() == (first.folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("named", "parts"),
    [
        ({"local": "fedprox", "server": "fedyogi", "mu": 0.1}, ("prox", "none", "yogi")),
        ({"local": "scaffold-exp", "normalize": "steps", "server": "fedavgm"}, ("scaffold", "steps", "momentum")),
        ({"local": "fedavg", "server": "fedprox"}, ("plain", "none", "step")),
    ],
)
def test_a_method_s_name_stands_for_its_part(named, parts, tmp_path):
    write_small(tmp_path)
    resolved = resolve(load_recipe(small(tmp_path / "run", data=str(tmp_path / "small.h5"), algorithm=named))).algorithm
    assert (resolved.local, resolved.normalize, resolved.server) == parts
    method = build(Algorithm.model_validate(named))
    assert (method.name, method.parameters()) == ("-".join(parts), resolved.parameters)
