"""The device on which tests train: ``HPCFED_TEST_DEVICE``, by default the CPU.

``cuda`` is a GPU, ``stub`` the strict device of `tests.device.strict` in its place (in the tests' own processes alone:
jobs that they start know no such device, and train on the CPU).
"""

from __future__ import annotations

import os

import torch

from hpcfed.ranks.accelerators import ACCELERATORS, accelerator

KIND = os.environ.get("HPCFED_TEST_DEVICE", "cpu")
WANTED = "auto" if KIND == "stub" else KIND
"""The recipes' ``device``."""

if KIND == "stub":
    from hpcfed.assembly import auto_device
    from tests.device.strict import register

    auto_device.LEAST_ON_GPU = 0  # else small recipes would take the CPU

    ACCELERATORS.clear()
    ACCELERATORS[KIND] = register()

DEVICE = torch.device(KIND) if KIND == "cpu" else torch.device(KIND, 0)


def prepare(device: torch.device) -> None:
    """Set a device up as a run does; nothing for the CPU."""
    if device.type != "cpu":
        accelerator(device).take(device.index or 0)
