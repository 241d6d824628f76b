"""``jobs.bench.agreement``: intervals, paired differences and mean curves of records by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jobs.bench.agreement import main

CURVES = {  # rounds to 85 %: 3 and 5 without GeL, 2 and 5 with it; the mean curves reach it in rounds 4 and 3
    "fedavgcm": {5: [0.5, 0.7, 0.85, 0.87, 0.9], 8: [0.5, 0.6, 0.8, 0.84, 0.86]},
    "fedavgcm-gel": {5: [0.5, 0.86, 0.9, 0.9, 0.92], 8: [0.6, 0.7, 0.81, 0.84, 0.86]},
    "fedprox": {5: [0.5, 0.6, 0.7, 0.85, 0.9], 8: [0.5, 0.6, 0.7, 0.7, 0.7]},
}


def written(root: Path) -> None:
    for method, of_seed in CURVES.items():
        for seed, curve in of_seed.items():
            folder = root / f"gel-synthetic/sweep/runs/tuned.{method}.{seed}"
            folder.mkdir(parents=True)
            rows = [{"round": number, "test_accuracy": value} for number, value in enumerate(curve, start=1)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "result.json").write_text("{}")


@pytest.mark.serial
def test_rounds_to_a_target_and_what_gel_saves(tmp_path, capsys):
    written(tmp_path)
    main(tmp_path, ["gel-synthetic"], 0.84)
    lines = [cells for line in capsys.readouterr().out.splitlines() if len(cells := line.split(" | ")) > 5]
    rows = {cells[1]: cells for cells in lines if cells[2] == "to 0.85"}
    assert {cells[1]: cells[4].partition(" ")[0] for cells in lines if cells[2] == "to 0.84"}["FedAvgCM"] == "3.5"
    half, saved = (12.7062 * np.std(pair, ddof=1) / np.sqrt(2) for pair in ([3, 5], [1, 0]))
    words = ["to 0.85", "2", f"4 ± {half:.2g}", f"0.5 ± {saved:.2g}", "4", "–", "148", "no |"]
    assert rows["FedAvgCM"][2:] == words
    assert rows["FedAvgCM + GeL"][4:] == [f"3.5 ± {12.7062 * 1.5:.2g}", "", "3", "–", "112", "no |"]
    assert rows["FedProx"][3:6] == ["2", "–", ""]  # one seed does not arrive; its reference has no runs


def test_nothing_is_printed_of_experiments_without_records(tmp_path, capsys):
    main(tmp_path, [])
    main(tmp_path, ["gel-synthetic"], column="test_loss")
    assert capsys.readouterr().out == ""
