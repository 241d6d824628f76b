"""Optional real data and reference trajectories, in a folder beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_folder(name: str) -> Path | None:
    """Return a folder of ``$HPCFED_SHARED`` (default: ``../shared`` beside the repository), or None."""
    folder = Path(os.environ.get("HPCFED_SHARED", REPOSITORY.parent / "shared")) / name
    return folder if folder.is_dir() else None
