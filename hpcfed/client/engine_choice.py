"""The engine that assembly has chosen, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcfed.config.recipe import Local
from hpcfed.errors import InputError, counted


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a run, and why it is this one.

    Attributes:
        engine, matmul, tile, memory_format: as the recorded recipe has them under ``local``.
        read: what the model is read as, in words; "" where it is not read.
        why: why clients are trained one after another; "" where that was not a choice.
        slot_work: multiplications of a slot's step, forwards, as the rule of tiles has them.
    """

    engine: Literal["sequential", "batched"]
    matmul: str
    tile: int | Literal["auto"]
    memory_format: str = "auto"
    read: str = ""
    why: str = ""
    slot_work: float = 0.0

    @property
    def recorded(self) -> dict[str, Any]:
        """The keys of ``local`` that were chosen."""
        return {key: getattr(self, key) for key in ("engine", "matmul", "tile", "memory_format")}

    @property
    def account(self) -> str:
        """The choice in words, in a line."""
        if self.engine == "sequential":
            return f"one after another: {self.why}" if self.why else "one after another"
        how = f"{counted(int(self.tile), 'client')} a tile"
        return f"{how}, {self.read}" if self.read else how


def refuse_tile(section: Local, why: str) -> None:
    """Refuse tiles of several clients where clients are trained one by one.

    Raises:
        InputError: the recipe asks for them.
    """
    if section.tile != "auto" and section.tile > 1:
        raise InputError(f"local.tile: {section.tile} with {why}", remedy="leave local.tile out")
