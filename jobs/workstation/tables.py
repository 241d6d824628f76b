"""The tables of the synthetic experiments, next to those of their papers, from what the runs and sweeps left alone.

    python tables.py feddyn runs/feddyn-synthetic
    python tables.py fedexp runs/fedexp-tuning
    python tables.py gel runs/gel-synthetic

Each prints its table in Markdown and leaves it in the folder as ``table.md``. A mean over runs of which one did not
get there has no value.

References: Acar et al., FedDyn, ICLR 2021, Table 6 (it counts models transmitted, of which SCAFFOLD sends two a round:
its rounds are half of them); Boukhari et al., GeL, arXiv 2110.11486 v3, Tables 1 and 2; Jhunjhunwala et al., FedExP,
ICLR 2023, Table 3, of which the text lost its minus signs: the authors' notebook has them.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpcfed.files import write_whole

UNKNOWN = "–"
FEDDYN_METHODS = {"fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD", "feddyn": "FedDyn"}
FEDDYN_ROUNDS = {  # set, types 0 to 3: rounds of the four methods in the paper
    "homogeneous": (136, 49, 35, 32),
    "models": (20, 18, 44, 17),
    "features": (274, 275, 82, 150),
    "sizes": (79, 106, 130, 34),
}
GEL_METHODS = {"fedavgcm": "FedAvgCM", "fedprox": "FedProx", "fednova": "FedNova"}
GEL_STEP_SIZES = ("0.01", "0.005")
GEL_ROUNDS = {  # method, step size: rounds without and with GeL in the paper
    ("fedavgcm", "0.01"): (148, 112),
    ("fedavgcm", "0.005"): (176, 135),
    ("fedprox", "0.01"): (157, 112),
    ("fednova", "0.01"): (118, 103),
}
GEL_TARGET = 0.85
FEDEXP_SYNTHETIC = {  # method: base-10 logarithms of η_g (FedExP finds its own) and η_l in the paper
    "fedexp": ("FedExP", None, -1.0),
    "fedavg": ("FedAvg", 1.0, -1.0),
    "scaffold": ("SCAFFOLD", 1.0, -1.0),
    "fedadagrad": ("FedAdagrad", -1.0, -1.0),
}
FEDDYN_NOTE = """\
Rounds to the loss that FedAvg has at the paper's FedAvg round (136, 20, 274, 79), a target for each draw of the data;
loss on the pooled training data of the average of all clients' last models; speed: FedAvg's rounds over the method's.
All methods have a step size of 0.1 and 10 epochs (SCAFFOLD: as many steps). The paper tunes both for each method, up to
50 epochs, so that its speeds are not all for equal work.
"""
GEL_NOTE = """\
Rounds to 85 % test accuracy at the first evaluation that has it, mean ± standard deviation over seeds. Faster by:
rounds without over rounds with GeL, less 1; GeL guesses τ' = τ − τ_i steps, or to the limit.
"""
FEDEXP_NOTE = """\
The best of the grid after 50 rounds by the mean training loss over the last 10, and the paper's choice (Table 3,
synthetic): base-10 logarithms of η_g and η_l; the loss of each, and which place the paper's has in our grid.
"""

Rounds = list[int | None]
Row = Sequence[str]


def feddyn(folder: Path) -> list[Row]:
    """Rounds to FedAvg's own loss at the paper's FedAvg round, on the pooled training data; a target for each draw."""
    rows: list[Row] = [("Set", "Method", "Rounds", "of each draw", "Speed", "Paper's rounds", "Paper's speed")]
    for kind, (name, of_paper) in enumerate(FEDDYN_ROUNDS.items()):
        draws = sorted(run.name.rpartition("-")[2] for run in (folder / name).glob("fedavg-*"))
        losses = {
            method: [column(folder / name / f"{method}-{draw}", "test_loss") for draw in draws]
            for method in FEDDYN_METHODS
        }
        targets = [loss[of_paper[0] - 1] for loss in losses["fedavg"]]
        reached: dict[str, Rounds] = {}
        for method, runs in losses.items():
            reached[method] = [first(value <= goal for value in run) for run, goal in zip(runs, targets, strict=True)]
        for (method, title), paper in zip(FEDDYN_METHODS.items(), of_paper, strict=True):
            each = ", ".join(str(number or "not reached") for number in reached[method])
            ours = ratio(mean(reached["fedavg"]), mean(reached[method]))
            theirs = ratio(of_paper[0], paper)
            ours_and_theirs = number(mean(reached[method])), each, speed(ours), str(paper), speed(theirs)
            rows.append((f"type {kind}, {name}", title, *ours_and_theirs))
    return rows


def gel(folder: Path) -> list[Row]:
    """Rounds to 85 % test accuracy without and with guessed steps, mean ± standard deviation over the seeds."""
    head = "Method", "Step size", "No guess", "GeL", "Faster by", "GeL, τ' = ∞", "Paper: no guess", "GeL", "Faster by"
    rows: list[Row] = [head]
    for lr in GEL_STEP_SIZES:
        for method, title in GEL_METHODS.items():
            none, remaining, limit = (
                gel_rounds(folder / f"{method}-{lr}-{guess}") for guess in ("none", "remaining", "limit")
            )
            ours = gain(ratio(mean(none), mean(remaining)))
            before, after = GEL_ROUNDS.get((method, lr), (None, None))
            theirs = number(before), number(after), gain(ratio(before, after))
            rows.append((title, lr, spread(none), spread(remaining), ours, spread(limit), *theirs))
    return rows


def gel_rounds(folder: Path) -> Rounds:
    """Return the rounds that each seed of one setting took to the target."""
    runs = sorted(folder.glob("seed-*"))
    return [first(accuracy >= GEL_TARGET for accuracy in column(run, "test_accuracy")) for run in runs]


def fedexp(folder: Path) -> list[Row]:
    """What each method's sweep chose on each draw of the data, and how the paper's choice did there."""
    head = "Draw", "Method", "η_g", "η_l", "Loss", "Paper's η_g", "η_l", "Loss", "Place"
    rows: list[Row] = [head]
    for draw in sorted(sweep.name.rpartition("-")[2] for sweep in folder.glob("fedexp-*")):
        for method, (title, server, local) in FEDEXP_SYNTHETIC.items():
            summary = folder / f"{method}-{draw}" / "summary.csv"
            if summary.exists():
                with summary.open(encoding="utf-8", newline="") as file:
                    configurations = list(csv.DictReader(file))
                best = configurations[0]
                (paper,) = (row for row in configurations if exponents(row) == (server, local))
                ours = *(power(value) for value in exponents(best)), loss(best)
                theirs = (
                    power(server),
                    power(local),
                    loss(paper),
                    f"{paper['rank'] or UNKNOWN} of {len(configurations)}",
                )
                rows.append((draw, title, *ours, *theirs))
    return rows


def exponents(row: dict[str, str]) -> tuple[float | None, float]:
    """Return the base-10 logarithms of η_g, if it was swept, and η_l."""
    server = row.get("algorithm.server_lr")
    return round(math.log10(float(server)), 3) if server else None, round(math.log10(float(row["local.lr"])), 3)


def power(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:g}"


def loss(row: dict[str, str]) -> str:
    return f"{float(row['score_mean']):.2e}" if row["score_mean"] else row["status"]


def column(run: Path, name: str) -> list[float]:
    """Return one number of every round of a run."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line)[name] for line in file]


def first(reached: Iterable[bool]) -> int | None:
    """Return the first round, counted from 1, that reached the target."""
    return next((round for round, there in enumerate(reached, 1) if there), None)


def mean(rounds: Rounds) -> float | None:
    arrived = [round for round in rounds if round is not None]
    return statistics.mean(arrived) if arrived and len(arrived) == len(rounds) else None


def ratio(slow: float | None, fast: float | None) -> float | None:
    return None if slow is None or fast is None else slow / fast


def spread(rounds: Rounds) -> str:
    """``148 ± 7``; or how many did not get there."""
    arrived = [round for round in rounds if round is not None]
    if len(arrived) < len(rounds):
        return f"not reached by {len(rounds) - len(arrived)} of {len(rounds)}"
    return number(mean(rounds)) + (f" ± {statistics.stdev(arrived):.0f}" if len(arrived) > 1 else "")


def number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"


def speed(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}×"


def gain(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * (value - 1):.0f} %"


def markdown(rows: Sequence[Row]) -> str:
    """Return a table in Markdown; the first row is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body]) + "\n"


def main(table: str, folder: Path) -> None:
    """Print the table of the runs in a folder, and leave it there."""
    rows, note = {"feddyn": (feddyn, FEDDYN_NOTE), "fedexp": (fedexp, FEDEXP_NOTE), "gel": (gel, GEL_NOTE)}[table]
    text = f"{note}\n{markdown(rows(folder))}"
    write_whole(folder / "table.md", text)
    print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
