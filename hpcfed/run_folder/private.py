"""The privacy guarantee of a run with differential privacy: its mechanism, its ε, and both in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcfed.updates._accounting import Epsilon, accountant
from hpcfed.updates._mechanism import Mechanism
from hpcfed.updates._samples import SampleMechanism, sample_accountant

if TYPE_CHECKING:
    from hpcfed.parts import Parts

NOT_COVERED = "Choosing among runs, as a sweep does, is not in ε; nor is what the preparation took from the data."


def in_words(facts: Mapping[str, Any], epsilon: float) -> str:
    """Return the guarantee in words, from ``privacy`` in ``environment.json`` and the last round's ε."""
    scales = ", ".join(f"{name} {scale:g}" for name, scale in (facts.get("scales") or {}).items())
    return (
        f"differential privacy of each {facts['level']} ({facts['neighbours']}): "
        f"ε {epsilon:.4g} at δ {facts['delta']:.3g}, noise multiplier {facts['noise_multiplier']:g}, "
        f"clip {facts['clip']:g}{f' (scales: {scales})' if scales else ''}; {facts['cohorts']}; "
        f"accountant: {facts['accountant']}; noise: {facts['noise']}"
    )


def promised(parts: Parts) -> tuple[Mechanism | SampleMechanism | None, Epsilon | None]:
    """Return a run's mechanism, and its ε as a function of the round; (None, None) without differential privacy."""
    if parts.chain.privacy is not None:
        mechanism = parts.chain.privacy.mechanism
        return mechanism, accountant(mechanism, parts.cohorts.clients)
    if parts.sample_noise is not None:
        return parts.sample_noise, sample_accountant(parts.sample_noise, parts.cohorts.work)
    return None, None
