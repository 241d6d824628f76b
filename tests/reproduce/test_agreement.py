"""``jobs.bench.agreement``: intervals, paired differences and mean curves of records by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jobs.bench.agreement import main, printed
from tests.launch import ROOT

CURVES = {  # rounds to 85 %: 3 and 5 without GeL, 2 and 5 with it; the mean curves reach it in rounds 4 and 3
    "fedavgcm": {5: [0.5, 0.7, 0.85, 0.87, 0.9], 8: [0.5, 0.6, 0.8, 0.84, 0.86]},
    "fedavgcm-gel": {5: [0.5, 0.86, 0.9, 0.9, 0.92], 8: [0.6, 0.7, 0.81, 0.84, 0.86]},
    "fedprox": {5: [0.5, 0.6, 0.7, 0.85, 0.9], 8: [0.5, 0.6, 0.7, 0.7, 0.7]},
}


def written(root: Path) -> None:
    for method, of_seed in CURVES.items():
        for seed, curve in of_seed.items():
            record(root / f"gel-synthetic/sweep/runs/tuned.{method}.{seed}", curve)


def record(folder: Path, curve: list[float], status: str = "finished") -> None:
    folder.mkdir(parents=True)
    rows = [{"round": number, "test_accuracy": value} for number, value in enumerate(curve, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "result.json").write_text(json.dumps({"status": status, "rounds": len(curve)}))


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


def test_a_published_mean_in_percent_is_beside_the_best_value(tmp_path, capsys):
    """NIID-Bench: the best of the rounds, 98.89 % for FedAvg in the first case."""
    for seed, curve in enumerate(([0.5, 0.988, 0.97], [0.5, 0.97, 0.99])):
        record(tmp_path / f"niid-mnist/sweep/runs/dir05.fedavg.{seed}", curve)
    main(tmp_path, [])
    (row,) = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "FedAvg" in line]
    assert row[2:] == ["best", "2", "0.989 ± 0.013", "", "", "", "0.9889", "yes |"]


def test_a_run_that_did_not_finish_has_no_value_and_equal_ones_no_interval(tmp_path, capsys):
    """Its last value before it diverged, or was stopped, is not the end that the paper's number is of."""
    runs = tmp_path / "niid-mnist/sweep/runs"
    for method, status in (("fedavg", "diverged"), ("fedprox", "stopped"), ("scaffold", "finished")):
        record(runs / f"dir05.{method}.0", [0.5, 0.9])
        record(runs / f"dir05.{method}.1", [0.5, 0.9], status)
    main(tmp_path, [])
    rows = [line.split(" | ")[1:] for line in capsys.readouterr().out.splitlines() if " | best | " in line]
    assert {row[0]: row[1:4] for row in rows} == {
        "FedAvg": ["best", "2", "–"],
        "FedProx": ["best", "2", "–"],
        "SCAFFOLD": ["best", "2", "0.9"],
    }
    assert {row[-1] for row in rows} == {"– |"}


@pytest.mark.parametrize("names", [[], ["gel-synthetic"]])
def test_a_folder_without_records_is_refused(names, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(tmp_path, names, column="test_loss")
    assert "nothing has been run" in capsys.readouterr().err


def test_tables_by_seed_have_their_means_and_ratios():
    """Means and ratios that docs/reproduction-feddyn.md prints; SCAFFOLD sends two models a round."""
    page = ROOT / "docs/reproduction-feddyn.md"
    rows = list(printed(page))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.read_text("utf-8").splitlines()]
    lines = [cells for cells in lines if len(cells) > 7 and re.fullmatch(r"((not in )?\d+(, |$)){3}", cells[3])]
    assert len(rows) == len(lines) > 40
    reference = 0.0
    for row, (_, _, method, seeds, models, ratio, *_) in zip(rows, lines, strict=True):
        assert row[1] == method
        if "not in" in seeds:
            assert (row[4], models, ratio) == ("–", "–", ""), seeds
            continue
        mean = np.mean([int(count) for count in seeds.split(", ")]) * (2 if method == "SCAFFOLD" else 1)
        reference = mean if method == "FedDyn" else reference
        assert models == f"{mean:.1f}".removesuffix(".0")
        assert float(row[4].partition(" ")[0]) == float(f"{mean:.4g}")
        assert ratio == ("" if method == "FedDyn" else f"{mean / reference:.2f}"), (row, ratio)
    for part in (rows[:24], rows[24:]):  # 10 % and 1 % of the clients
        inside = [row[-1] for row in part]
        words = f"{inside.count('yes')} of {len(inside) - inside.count('–')}"
        assert f"in {words} rows" in page.read_text("utf-8"), words
        assert f"{words} " in (ROOT / "docs/papers.md").read_text("utf-8"), words


def test_models_by_seed_of_a_page_have_intervals(tmp_path, capsys):
    page = tmp_path / "page.md"
    head = "| Case | Target | Method | Rounds, by seed | Paper: models |\n|---|---|---|---|---|"
    cells = "| IID | 98 % | FedDyn | 5, 9 | 10 |\n| | | SCAFFOLD | 4, 2 | 5 |"
    page.write_text(f"# `hpcfed reproduce feddyn-mnist`\n{head}\n{cells}\n")
    main(page, [])
    rows = [line.split(" | ")[1:6] for line in capsys.readouterr().out.splitlines()[-2:]]
    half = {value: f"{12.7062 * value:.2g}" for value in (2, 4)}
    assert rows == [
        ["FedDyn", "models to 98 %", "2", f"7 ± {half[2]}", ""],
        ["SCAFFOLD", "models to 98 %", "2", f"6 ± {half[2]}", f"-1 ± {half[4]}"],
    ]
