"""A user with six hospitals' tables, each with an oddity of its own, on the way to a predicted row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hpcfed.config.load import dump_yaml
from tests.launch import Completed

pytestmark = pytest.mark.one_mpi
HEAD = ("age", "sex", "stage", "marker", "outcome")


def write_tables(raw: Path) -> None:
    """Write tables with a mark of Excel's, semicolons and decimal commas, lines of Windows, another order and gaps,
    capitals in the header, and another encoding.
    """
    draw = np.random.default_rng(1)
    raw.mkdir()
    for k, site in enumerate(("Aachen", "Łódź", "St. Mary's", "rural", "north", "süd")):
        marker = draw.normal(size=40 + 10 * k).round(3)
        ages, dead = draw.normal(60 + 3 * k, 10, len(marker)).astype(int), np.where(marker > 0, "dead", "alive")
        rows = [
            (str(ages[i]), "fm"[i % 2], "I" * (1 + i % 3), str(marker[i]), str(dead[i])) for i in range(len(marker))
        ]
        table = [HEAD, *rows]
        if site == "rural":
            gaps = [(*row[:3], row[3] if i % 5 else "NA", row[4]) for i, row in enumerate(rows)]
            table = [(sex, age, marker_, stage, outcome) for age, sex, stage, marker_, outcome in (HEAD, *gaps)]
        if site == "north":
            table[0] = ("Age", "SEX", *HEAD[2:])
        text = "".join(",".join(row) + "\n" for row in table)
        text = {
            "Aachen": "\ufeff" + text,
            "Łódź": text.replace(",", ";").replace(".", ","),
            "St. Mary's": text.replace("\n", "\r\n") + "\r\n\r\n",
        }.get(site, text)
        (raw / f"{site}.csv").write_bytes(text.encode("latin-1" if site == "süd" else "utf-8"))


def test_from_tables_to_a_predicted_row(tmp_path: Path, command: Callable[..., Completed]) -> None:
    write_tables(tmp_path / "raw")
    prepare = ["prepare", "own", "--raw", "raw", "--target", "outcome", "--test-fraction", "0.25", "-o", "six.h5"]
    refused = command(prepare, tmp_path)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "north.csv: columns differ" in refused.stderr
    assert "only it has 'Age', 'SEX'" in refused.stderr
    north = tmp_path / "raw" / "north.csv"
    north.write_text(north.read_text().replace("Age,SEX", "age,sex"))
    refused = command(prepare, tmp_path)
    assert (refused.returncode, "choose what to do by --missing" in refused.stderr) == (2, True)
    done = command([*prepare, "--missing", "mean", "--standardize", "pooled"], tmp_path)
    assert done.returncode == 0, done.stderr
    for oddity in (
        "semicolons, as in Łódź.csv",
        "decimal point, as in Łódź.csv",
        "missing values: marker 14 in 390 rows",
    ):
        assert oddity in done.stdout
    recipe = {"data": "six.h5", "model": {"name": "logistic"}, "rounds": 5, "algorithm": {"name": "fedavg"}}
    recipe |= {"local": {"epochs": 4, "batch_size": 10, "lr": 0.5}, "evaluate": {"metrics": ["auroc"]}}
    (tmp_path / "six.yaml").write_text(dump_yaml(recipe))
    done = command(["run", "six.yaml", "--quiet"], tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "new.csv").write_text("sex,age,stage,marker\nf,71,III,2.5\nm,45,I,-2.5\nm,45,I,NA\n")
    done = command(["predict", "runs/six", "new.csv", "-o", "out.csv"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = pd.read_csv(tmp_path / "out.csv")
    assert found["prediction"].tolist()[:2] == ["dead", "alive"]
    assert found["p(dead)"].between(0, 1).all()
