"""Cases of conformance vectors: methods with other parameters, cohorts and local steps than in their main trajectory.

A protocol fixes the cohorts, step sizes and minibatches of all its cases. In the first three protocols each step takes
all of the client's samples, so that another framework needs no particular order of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_WHOLE = {"steps": 3, "batch_size": "full", "lr": 0.25}

PROTOCOLS: Mapping[str, Mapping[str, Any]] = {
    "all": {"cohort": {"size": 4}, "local": {**_WHOLE, "lr_decay": 1.0}},
    "partial": {"cohort": {"size": 3}, "local": {**_WHOLE, "lr_decay": 1.0}},
    "decay": {"cohort": {"size": 3}, "local": {**_WHOLE, "lr_decay": 0.5}},
    "unequal": {"cohort": {"size": 3}, "local": {"epochs": 1, "batch_size": 2, "lr": 0.25, "lr_decay": 1.0}},
}
"""Protocol → its keys of the recipe: all clients; three of four; three of four, the step size halved each round;
three of four, one epoch in minibatches of two samples, which is 2 or 3 steps.
"""


class Case(NamedTuple):
    """A method with its parameters, trained under a protocol.

    Attributes:
        protocol: a name in `PROTOCOLS`.
        algorithm: the recipe's ``algorithm``: the method's name and parameters.
        changes: other top-level keys of the recipe; keys in its ``local`` override those in the protocol's ``local``.
    """

    protocol: str
    algorithm: Mapping[str, Any]
    changes: Mapping[str, Any] = {}


_PROX: Mapping[str, Any] = {"name": "fedprox", "mu": 0.1}
_DYN: Mapping[str, Any] = {"name": "feddyn", "alpha": 0.05}
_EXP: Mapping[str, Any] = {"name": "fedexp", "eps": 1e-3}
_ADAPTIVE: Mapping[str, Any] = {"server_lr": 0.1, "tau": 1e-3, "v0": "zero"}
_AFTER: Mapping[str, Any] = {"name": "scaffold", "correction": "after-momentum"}
_UNIFORM: Mapping[str, Any] = {"weights": "uniform"}


def _method(name: str) -> dict[str, Any]:
    return {"name": name}


def _local(**keys: Any) -> dict[str, Any]:
    return {"local": keys}


CASES: Mapping[str, Case] = {
    "fedavg/all": Case("all", _method("fedavg")),
    "fedavg/partial": Case("partial", _method("fedavg")),
    "fedavg/uniform": Case("partial", _method("fedavg"), _UNIFORM),
    "fedavg/server-lr": Case("partial", {"name": "fedavg", "server_lr": 1.5}),
    "fedavg/momentum": Case("unequal", _method("fedavg"), _local(momentum=0.9)),
    "fedavg/guess": Case("unequal", _method("fedavg"), {**_local(momentum=0.9), "guess": "limit"}),
    "fedavg/clip": Case("partial", _method("fedavg"), _local(clip_norm=0.2)),
    "fedavg/weight-decay": Case("partial", _method("fedavg"), _local(weight_decay=0.1)),
    "fedavg/adam": Case("partial", _method("fedavg"), _local(optimizer="adam", lr=0.05)),
    "fedavg/yogi": Case("partial", _method("fedavg"), _local(optimizer="yogi", lr=0.05)),
    "fedavgm/partial": Case("partial", {"name": "fedavgm", "beta": 0.9}),
    "fedprox/all": Case("all", _PROX),
    "fedprox/partial": Case("partial", _PROX),
    "fedprox/uniform": Case("partial", _PROX, _UNIFORM),
    "fedprox/momentum": Case("unequal", _PROX, _local(momentum=0.9)),
    "fedprox/clip": Case("partial", _PROX, _local(clip_norm=0.2)),
    "fednova/all": Case("all", _method("fednova")),
    "fednova/unequal": Case("unequal", _method("fednova")),
    "fednova/uniform": Case("unequal", _method("fednova"), _UNIFORM),
    "fednova/momentum": Case("unequal", _method("fednova"), _local(momentum=0.9)),
    "fednova/proximal": Case("unequal", {"name": "fednova", "mu": 0.2, "beta": 0.3}),
    "fedexp/all": Case("all", _EXP),
    "fedexp/uniform": Case("partial", {**_EXP, "eps": 1e-4}, _UNIFORM),
    "fedexp/authors": Case("partial", {**_EXP, "eps_scale": "cohort", "eps_decay": 0.9}),
    "scaffold/all": Case("all", _method("scaffold")),
    "scaffold/partial": Case("partial", _method("scaffold")),
    "scaffold/decay": Case("decay", _method("scaffold")),
    "scaffold/unequal": Case("unequal", _method("scaffold")),
    "scaffold/samples": Case("partial", _method("scaffold"), {"weights": "samples"}),
    "scaffold/c-scale": Case("partial", {"name": "scaffold", "c_scale": "samples"}),
    "scaffold/momentum": Case("unequal", _method("scaffold"), _local(momentum=0.9)),
    "scaffold/after-all": Case("all", _AFTER, _local(momentum=0.9)),
    "scaffold/after-momentum": Case("unequal", _AFTER, _local(momentum=0.9)),
    "scaffold/after-clip": Case("partial", _AFTER, _local(clip_norm=0.2, momentum=0.5, weight_decay=0.1)),
    "scaffold/after-decay": Case("decay", _AFTER, _local(momentum=0.9)),
    "scaffold/niid-bench": Case(
        "partial", {**_AFTER, "c_scale": "uniform"}, {"weights": "samples", **_local(momentum=0.9, weight_decay=0.1)}
    ),
    "scaffold/clip": Case("partial", _method("scaffold"), _local(clip_norm=0.2)),
    "feddyn/all": Case("all", _DYN),
    "feddyn/partial": Case("partial", _DYN),
    "feddyn/decay": Case("decay", _DYN),
    "feddyn/alpha-scale": Case("partial", {**_DYN, "alpha_scale": "samples"}),
    "feddyn/clip": Case("partial", _DYN, _local(clip_norm=0.2)),
    "feddyn/clip-linear": Case("partial", _DYN, _local(clip_norm=0.2, clip="linear")),
    "fedsplit/all": Case("partial", {"name": "fedsplit", "s": 0.7, "variant": "all"}),
    "ditto/momentum": Case("unequal", {"name": "ditto", "mu": 0.3}, _local(momentum=0.9)),
    "fedadagrad/zero": Case("partial", {"name": "fedadagrad", **_ADAPTIVE}),
    "fedadagrad/authors": Case("partial", {"name": "fedadagrad", **_ADAPTIVE, "root": "padded"}),
    "fedadam/partial": Case("partial", {"name": "fedadam", **_ADAPTIVE, "v0": "tau2"}),
    "fedadam/zero": Case("partial", {"name": "fedadam", **_ADAPTIVE}),
    "fedadam/adam": Case("partial", {"name": "fedadam", **_ADAPTIVE, "debias": "adam"}),
    "fedadam/authors": Case(
        "partial", {"name": "fedadam", **_ADAPTIVE, "second": "m", "root": "padded", "debias": "constant"}
    ),
    "fedyogi/zero": Case("partial", {"name": "fedyogi", **_ADAPTIVE}),
    "fedyogi/adam": Case("partial", {"name": "fedyogi", **_ADAPTIVE, "debias": "adam"}),
}
"""Cases by name, ``method/case``."""
