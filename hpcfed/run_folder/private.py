"""What a private run promises, in words, from what its folder records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_COVERED = "Choosing among runs, as a sweep does, is not in ε; nor is what the preparation took from the data."


def in_words(facts: Mapping[str, Any], epsilon: float) -> str:
    """Return what is promised, from the entry ``privacy`` of ``environment.json`` and the last round's ε."""
    scales = ", ".join(f"{name} {scale:g}" for name, scale in (facts.get("scales") or {}).items())
    return (
        f"differential privacy of each {facts['level']} ({facts['neighbours']}): "
        f"ε {epsilon:.4g} at δ {facts['delta']:.3g}, noise multiplier {facts['noise_multiplier']:g}, "
        f"clip {facts['clip']:g}{f' (scales: {scales})' if scales else ''}; {facts['cohorts']}; "
        f"accountant: {facts['accountant']}; noise: {facts['noise']}"
    )
