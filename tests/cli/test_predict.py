"""`hpcfed predict`: new rows are prepared as the run's own were, and predicted by its evaluated model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import hpcfed
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.predict import _named

ROWS = pd.DataFrame(
    {
        "age": [30.5, 40, 50, None, 35, 45, 61, 20],
        "ward": ["icu", "er", None, "icu", "er", "er", "icu", "er"],
        "stage": [1, 2, 2, 1, 3, 3, 1, 2],
        "ill": ["no", "yes", "no", "yes", "yes", "no", "yes", "no"],
    }
)
RECIPE = {
    "data": "f.h5",
    "rounds": 2,
    "local": {"steps": 3, "batch_size": 4, "lr": 0.1},
    "algorithm": "fedavg",
    "quiet": True,
}


@pytest.fixture(params=["pooled", "client"])
def run(request, tmp_path, command, monkeypatch) -> Path:
    """A run on two hospitals with missing cells and words, scaled over all rows or at each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    ROWS.to_csv(tmp_path / "raw" / "north.csv", index=False)
    ROWS.assign(age=ROWS["age"] + 10).to_csv(tmp_path / "raw" / "south.csv", index=False)
    words = ["--missing", "median", "--categorical", "stage", "--standardize", request.param, "--target", "ill"]
    done = command(["prepare", "own", "--raw", "raw", *words, "-o", "f.h5"], tmp_path)
    assert done.returncode == 0, done.stderr
    return hpcfed.run(**RECIPE, model={"name": "mlp", "hidden": [4]}, output=request.param).folder


def test_rows_are_prepared_as_the_runs_own(run, command, tmp_path):
    """The training rows themselves, as a frame and as a file, in another order of columns."""
    found = hpcfed.predict(run, ROWS, site="north")
    module = hpcfed.load(run).evaluated
    with Federation.open("f.h5") as federation:
        x, _ = federation.client(0)
        place = np.argsort(federation.rows[: len(ROWS)]) if hasattr(federation, "rows") else None
        normalization = federation.normalization
        x = np.asarray(x, float)
        if normalization is not None:
            x = (x - np.array(normalization.mean)) / np.array(normalization.std)
    with torch.no_grad():
        own = module(torch.tensor(x, dtype=torch.float32)).double().softmax(1)[:, 1].numpy()
    assert place is None or len(place) == len(ROWS)
    np.testing.assert_allclose(np.sort(found["p(yes)"]), np.sort(own), rtol=1e-5)
    assert [*found] == ["prediction", "p(no)", "p(yes)"]
    assert (found["prediction"] == np.where(found["p(yes)"] > 0.5, "yes", "no")).all()
    ROWS.drop(columns="ill")[["stage", "ward", "age"]].astype({"stage": float}).to_csv("new.csv", index=False)
    done = command(["predict", str(run), "new.csv", "--site", "north", "-o", "out.csv"], tmp_path)
    assert done.returncode == 0, done.stderr
    pd.testing.assert_frame_equal(pd.read_csv("out.csv"), found)
    Path("out.csv").write_text("mine", encoding="utf-8")
    again = ["predict", str(run), "new.csv", "--site", "north", "-o", "out.csv"]
    done = command(again, tmp_path)
    assert done.returncode == 2
    assert "out.csv: exists; choose another --output, or add --overwrite" in done.stderr
    assert Path("out.csv").read_text(encoding="utf-8") == "mine"
    assert command([*again, "--overwrite"], tmp_path).returncode == 0
    pd.testing.assert_frame_equal(pd.read_csv("out.csv"), found)
    os.mkfifo("pipe.csv")
    done = command(["predict", str(run), "new.csv", "--site", "north", "-o", "pipe.csv", "--overwrite"], tmp_path)
    assert (done.returncode, done.stderr) == (4, "hpcfed: pipe.csv: cannot be written: got Not a regular file\n")
    assert Path("pipe.csv").is_fifo()
    with pytest.raises(InputError, match="a pipe: expected a file; save it to a file first"):
        hpcfed.predict(run, "pipe.csv", site="north")
    rows = Path("new.csv").read_bytes()
    done = command(["predict", str(run), "new.csv", "--site", "north", "-o", str(tmp_path / "new.csv")], tmp_path)
    assert done.returncode == 2
    assert "got the table of the rows; name another file" in done.stderr
    assert Path("new.csv").read_bytes() == rows
    ROWS.drop(columns="ill").to_csv("comma.csv", index=False, sep=";", decimal=",", float_format="%.2f")
    pd.testing.assert_frame_equal(hpcfed.predict(run, "comma.csv", site="north"), found)
    Path("comma.csv").write_text("age;ward;stage\n41,5;er;1\n4,x;er;1\n", encoding="utf-8")
    with pytest.raises(InputError, match="row 3, column 'age': expected a number, got '4,x'"):
        hpcfed.predict(run, "comma.csv", site="north")


@pytest.mark.parametrize(
    ("steps", "output", "columns"),
    [
        (
            {"task": "classification", "classes": ["no", "yes"]},
            [[0.0], [-2.0]],
            {"prediction": ["no", "no"], "p(no)": [0.5, 0.880797], "p(yes)": [0.5, 0.119203]},
        ),
        ({"task": "classification"}, [[1.0]], {"prediction": ["1"], "p(0)": [0.268941], "p(1)": [0.731059]}),
        ({"task": "multi-label", "classes": ["a", "b"]}, [[0.0, 2.0]], {"p(a)": [0.5], "p(b)": [0.880797]}),
        ({"task": "regression", "target": "x, y"}, [[0.5, -3.0]], {"x": [0.5], "y": [-3.0]}),
        ({"task": "regression", "target": "x"}, [[0.5, -3.0]], {"target 0": [0.5], "target 1": [-3.0]}),
        ({"task": "survival"}, [[1.5], [-0.5]], {"log hazard": [1.5, -0.5]}),
    ],
)
def test_predictions_are_named_by_task(steps, output, columns):
    """A single logit is the second class's; of more targets than names, each has its number."""
    found = dict(_named(torch.tensor(output, dtype=torch.float64), steps, len(output[0])))
    assert [*found] == [*columns]
    for name, values in columns.items():
        assert found[name].tolist() == (values if name == "prediction" else pytest.approx(values, abs=1e-6))


def test_what_cannot_be_prepared_is_refused_in_one_line(run):
    wrong = {
        "the table lacks 1 column: age": ROWS.drop(columns="age"),
        "row 1, column 'age': expected a number, got 'old'": ROWS.assign(age="old"),
        "row 2, column 'ward': expected er, icu, got 'day'": ROWS.assign(ward=["er", "day", *["er"] * 6]),
        "row 1, column 'stage': a missing cell": ROWS.assign(stage=None),
        "rows: expected a data frame": 5,
        "row 2, column 'age': expected a finite number, got inf": ROWS.assign(age=[1, np.inf, *[2] * 6]),
        "row 1, column 'age': expected a finite number, got 1e+39": ROWS.assign(age=1e39),
        "the table has no row to predict": ROWS.iloc[:0],
    }
    for says, rows in wrong.items():
        with pytest.raises(InputError) as raised:
            hpcfed.predict(run, rows, site="north")
        assert says in str(raised.value)
    with pytest.raises(InputError, match=r"did you mean 'north'\?"):
        hpcfed.predict(run, ROWS, site="nort")
    if run.name == "client":
        with pytest.raises(InputError, match="name the rows' site: north, south"):
            hpcfed.predict(run, ROWS)


@pytest.mark.parametrize(
    "personal", [{"parameters": {"private": ["2.*"]}}, {"algorithm": {"name": "ditto", "mu": 0.1}}]
)
def test_no_row_is_predicted_by_untrained_parts(run, personal, command, tmp_path):
    """Of no client, or of one that no cohort included, or that has no samples."""
    about = RECIPE | {"cohort": {"schedule": [[0]]}, "evaluate": {"every": 0}} | personal
    folder = hpcfed.run(**about, model={"name": "mlp", "hidden": [4]}, output="personal").folder
    assert len(hpcfed.predict(folder, ROWS, site="north")) == len(ROWS)
    with pytest.raises(InputError, match=r"--site south: it was never drawn, so that its p.* untrained"):
        hpcfed.predict(folder, ROWS, site="south")
    if "parameters" in personal:
        with pytest.raises(InputError, match="2 tensors of the model are each client's own; name the rows' client"):
            hpcfed.predict(folder, ROWS)
    if run.name == "pooled":
        ROWS.iloc[:0].to_csv(tmp_path / "raw" / "west.csv", index=False)
        words = ["--missing", "median", "--categorical", "stage", "--standardize", "pooled", "--target", "ill"]
        assert command(["prepare", "own", "--raw", "raw", *words, "-o", "three.h5"], tmp_path).returncode == 0
        about |= {"data": "three.h5", "cohort": {}}
        folder = hpcfed.run(**about, model={"name": "mlp", "hidden": [4]}, output="three").folder
        assert len(hpcfed.predict(folder, ROWS, site="south")) == len(ROWS)
        with pytest.raises(InputError, match=r"--site west: it has no training samples, so that its p.* untrained"):
            hpcfed.predict(folder, ROWS, site="west")


def test_codes_of_missing_cells_are_those_of_the_run(tmp_path, command, monkeypatch):
    """-999 in a new row is a missing cell, in a frame and in a file, as in the tables of the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    rows = ROWS.assign(age=ROWS["age"].fillna(-999.0), ward=ROWS["ward"].fillna("unknown"))
    rows.to_csv(tmp_path / "raw" / "north.csv", index=False)
    words = ["--missing", "median", "--missing-codes=-999,unknown", "--categorical", "stage", "--target", "ill"]
    done = command(["prepare", "own", "--raw", "raw", *words, "-o", "f.h5"], tmp_path)
    assert done.returncode == 0, done.stderr
    run = hpcfed.run(**RECIPE, model={"name": "linear"}, output="run").folder
    expected = hpcfed.predict(run, ROWS)
    pd.testing.assert_frame_equal(hpcfed.predict(run, rows), expected)
    rows.to_csv("new.csv", index=False, sep=";", decimal=",")
    pd.testing.assert_frame_equal(hpcfed.predict(run, "new.csv"), expected)
    Path("empty.csv").write_text("age,ward,stage\n", encoding="utf-8")
    with pytest.raises(InputError, match="the table has no row to predict"):
        hpcfed.predict(run, "empty.csv")


def test_cells_behind_semicolons_are_those_of_the_run(tmp_path, command, monkeypatch):
    """Missing cells and words with decimal commas among categories; 1.234 beside 1,5, as in the run's own tables."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    rows = ROWS.assign(
        stage=["1", None, "2", "1", "2", "2", None, "2"], grade=["1,5", "x", "2", None, *["01", "1"] * 2]
    )
    rows.to_csv(tmp_path / "raw" / "north.csv", index=False, sep=";", decimal=",", float_format="%.2f")
    words = ["--missing", "median", "--categorical", "stage,grade", "--target", "ill"]
    done = command(["prepare", "own", "--raw", "raw", *words, "-o", "f.h5"], tmp_path)
    assert done.returncode == 0, done.stderr
    run = hpcfed.run(**RECIPE, model={"name": "linear"}, output="run").folder
    expected = hpcfed.predict(run, rows)
    assert len(expected.drop_duplicates()) > 4
    pd.testing.assert_frame_equal(hpcfed.predict(run, "raw/north.csv"), expected)
    for k in range(len(rows)):  # 01 alone in its column is another level than 1
        rows[k : k + 1].to_csv("one.csv", index=False, sep=";", decimal=",", float_format="%.2f")
        pd.testing.assert_frame_equal(hpcfed.predict(run, "one.csv"), expected[k : k + 1].reset_index(drop=True))
    Path("new.csv").write_text("age;ward;stage;grade\n41,5;er;1;x\n1.234;er;1;x\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"row 3, column 'age': 1.234: thousands or a fraction\?"):
        hpcfed.predict(run, "new.csv")


def test_a_run_on_no_table_says_so_whatever_the_rows_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clients = {"north": (np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1]))}
    folder = hpcfed.run(**RECIPE | {"data": clients}, model={"name": "linear"}, output="run").folder
    Path("rows.csv").write_text("ROMEO:\nto be, or not\n", encoding="utf-8")
    for rows in ("rows.csv", "absent.csv", ROWS):
        with pytest.raises(InputError, match="the run was not trained on tables"):
            hpcfed.predict(folder, rows)


@pytest.mark.every(2)
def test_a_model_given_from_python_predicts_by_its_recorded_code(run):
    model = hpcfed.run(**RECIPE, model=lambda: torch.nn.Linear(6, 2), output="given").folder
    here = hpcfed.predict(model, ROWS, site="north")

    sys.modules.pop("from_python")
    with pytest.raises(InputError, match="the model was an object of Python; --run-code"):
        hpcfed.predict(model, ROWS, site="north")
    pd.testing.assert_frame_equal(hpcfed.predict(model, ROWS, site="north", run_code=True), here)
    for weights in model.glob("model*.safetensors"):
        weights.unlink()
    with pytest.raises(InputError, match="no trained model yet"):
        hpcfed.predict(model, ROWS, site="north", run_code=True)
