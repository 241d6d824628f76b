"""Run folders that name another machine than the one which computed them."""

from __future__ import annotations

import json
from pathlib import Path

PROCESSOR = "Another CPU @ 3 GHz"


def claim_other_processor(run: Path) -> None:
    """Let ``environment.json`` name `PROCESSOR`, for rank 0 and for each rank."""
    facts = json.loads((run / "environment.json").read_text())
    ranks = [rank | {"cpu": PROCESSOR} for rank in facts["per_rank"]]
    (run / "environment.json").write_text(json.dumps(facts | {"cpu": PROCESSOR, "per_rank": ranks}))
