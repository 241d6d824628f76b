"""Why rows deviate, with file and line in the package, and the rule of `transcribed` that has the cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Cause(NamedTuple):
    """A cause.

    Attributes:
        text: in words. where: file and lines of the package.
        rule: a class of `transcribed` that does the same.
        version: of a package that is not run; None of one that is.
    """

    text: str
    where: str
    rule: str
    version: str | None = None


_PFL = Cause("c_i gets (y − w)/(Kη); the paper (w − y)/(Kη)", "pfl/algorithm/scaffold.py:157-158", "ReversedSign")
_NVFLARE = Cause(
    "c moves by the mean change of the cohort, not S/N of it (S of N clients); means are weighted by local steps",
    "app_common/workflows/scaffold.py:139, 159, 170",
    "WholeCohort",
)
_FLUKE_DYNAMIC = Cause(
    "λ_i += α(w − y), of which the gradient takes α λ_i; the authors' code: λ_i += y − w",
    "fluke/algorithms/feddyn.py:158-172, 249",
    "FlukeDynamic",
)
_FLUKE_ADAPTIVE = Cause(
    "η_g enters twice: in the average (its `lr` is the server's) and in the step",
    "fluke/algorithms/fedopt.py:51, 66, 73",
    "FlukeAdaptive",
)
_FEDLAB_DYNAMIC = Cause(
    "both terms are of detached parameters and have no gradient; h takes Σ y_i − w, not Σ (y_i − w)",
    "fedlab/contrib/algorithm/feddyn.py:23, 74-75; utils/serialization.py:56",
    "FedlabDynamic",
)
_DECLEARN = Cause(
    "c is the mean over the clients seen so far, by design, not over all N",
    "declearn/optimizer/modules/_scaffold.py:417",
    "KnownClients",
)
_FEDML = Cause(
    "the averages are replaced by the last client's change; a client's c_i is not stored",
    "ml/aggregator/agg_operator.py:116-117; simulation/sp/scaffold/client.py:44-53",
    "LastClient",
    "0.9.6",
)
_FEDBENCH = Cause(
    "(y − w)/(Kη), of the other sign, is sent for the change of c_i; saved c_i are not read; gradients clipped at 1",
    "algorithms/scaffold/client.py:87-100; model_utils.py:88",
    "Fedbench",
    "0.1.3",
)
_NIID_BENCH = Cause(
    "c and all c_i start at a model, not at 0 (no effect once every client has taken part)",
    "experiments.py:992-997",
    "NiidBench",
    "61b901a",
)

CAUSES: Mapping[tuple[str, str], Cause] = {
    ("pfl", "scaffold/all"): _PFL,
    ("pfl", "scaffold/partial"): _PFL,
    ("fluke-fl", "fedavgm/partial"): Cause(
        "round 1 makes the momentum, 0, and leaves its average out",
        "fluke/algorithms/fedavgm.py:59-60",
        "FlukeMomentum",
    ),
    ("fluke-fl", "fednova/unequal"): Cause(
        "weights p_i τ_eff/a_i, whose sum is not 1, multiply models, not changes",
        "fluke/algorithms/fednova.py:83-84",
        "FlukeNova",
    ),
    ("fluke-fl", "scaffold/decay"): Cause(
        "c_i divides by the step size after the scheduler's step; schedules count a client's own rounds",
        "fluke/algorithms/scaffold.py:117",
        "DecayedBeforeControl",
    ),
    ("fluke-fl", "feddyn/all"): _FLUKE_DYNAMIC,
    ("fluke-fl", "feddyn/partial"): _FLUKE_DYNAMIC,
    ("fluke-fl", "fedadam/zero"): _FLUKE_ADAPTIVE,
    ("fluke-fl", "fedyogi/zero"): _FLUKE_ADAPTIVE,
    ("fluke-fl", "fedadagrad/zero"): _FLUKE_ADAPTIVE,
    ("fedlab", "fednova/uniform: weighted_scale"): Cause(
        "Δ̄ times N/S (S of N clients), with p = 1/S, which sums to 1 already",
        "fedlab/contrib/algorithm/fednova.py:26-37",
        "FedlabNova",
    ),
    ("fedlab", "feddyn/all"): _FEDLAB_DYNAMIC,
    ("fedlab", "feddyn/partial"): _FEDLAB_DYNAMIC,
    ("flwr", "fedadam/adam"): Cause(
        "bias correction of round t + 1 in round t; τ is beside √v before the correction",
        "flwr/server/strategy/fedadam.py:179-189",
        "FlowerAdam",
    ),
    ("nvflare", "scaffold/partial"): _NVFLARE,
    ("nvflare", "scaffold/decay"): _NVFLARE,
    ("nvflare", "scaffold/unequal"): _NVFLARE,
    ("nvflare", "scaffold/momentum"): Cause(
        f"{_NVFLARE.text}; c − c_i after the momentum step, over K",
        f"{_NVFLARE.where}; app_opt/pt/scaffold.py:209",
        "WholeCohort",
    ),
    ("declearn", "scaffold/partial"): _DECLEARN,
    ("declearn", "scaffold/unequal"): _DECLEARN,
    ("openfl", "fedyogi/adam: NumPyYogi"): Cause(
        "v ← β₂v + (1 − β₂) sign(Δ̄² − v) Δ̄²; Yogi has v for β₂v",
        "openfl/utilities/optimizers/numpy/yogi_optimizer.py:80-83",
        "BiasedYogi",
    ),
    ("fedjax", "fedyogi/adam"): Cause(
        "Optax's moments start at 1e-6, and are freed of their bias as if at 0",
        "optax/_src/transform.py:786-801",
        "OptaxYogi",
    ),
    ("FedML", "scaffold/all"): _FEDML,
    ("FedML", "scaffold/partial"): _FEDML,
    ("fedbench", "scaffold/all"): _FEDBENCH,
    ("fedbench", "scaffold/partial"): _FEDBENCH,
    ("NIID-Bench", "scaffold/all"): _NIID_BENCH,
    ("NIID-Bench", "scaffold/after-all"): _NIID_BENCH,
    ("NIID-Bench", "scaffold/partial"): _NIID_BENCH,
}
"""By package and row."""
