"""The device on which tests train: ``HPCFED_TEST_DEVICE``, by default the CPU; ``cuda`` is a GPU."""

from __future__ import annotations

import os

import torch

from hpcfed.ranks.accelerators import accelerator

KIND = os.environ.get("HPCFED_TEST_DEVICE", "cpu")
"""The recipes' ``device``."""
DEVICE = torch.device(KIND) if KIND == "cpu" else torch.device(KIND, 0)


def prepare(device: torch.device) -> None:
    """Set a device up as a run does; nothing for the CPU."""
    if device.type != "cpu":
        accelerator(device).take(device.index or 0)
