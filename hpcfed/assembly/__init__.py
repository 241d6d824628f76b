"""Set-up of a simulation from a recipe: every check before the first round, cheapest first, and the parts.

`resolve` fills in what the recipe leaves open and needs no torch; `assemble` builds the parts on every rank.
"""

from __future__ import annotations

from hpcfed.assembly.all_ranks import assemble
from hpcfed.assembly.loss import build_loss
from hpcfed.assembly.model import build_model
from hpcfed.assembly.resolution import resolve

__all__ = ["assemble", "build_loss", "build_model", "resolve"]
