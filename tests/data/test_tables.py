"""The user's own tables: files of a consortium's sites, each in a different style."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import csv as arrow_csv
from pyarrow import parquet

import hpcfed
from data_prep import progress
from data_prep.dataset import Dataset
from data_prep.sources import own
from data_prep.split import split
from data_prep.tables import cells, read
from data_prep.tables.columns import is_identifier
from data_prep.tables.missing import fill
from data_prep.tables.standardize import standardize
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.errors import InputError
from tests.launch import Completed

HEADER = ("age", "bp", "sex", "outcome")
SITES = {
    "amsterdam": [("50", "120", "f", "1"), ("60", "140", "m", "2"), ("70", "130", "f", "2.0")],
    "berlin": [("40,5", "110", "m", "1"), ("41,5", "112", "f", "2")],  # semicolons
    "cork": [("30", "100", "f", "1"), ("34", "104", "m", "2"), ("32", "", "m", "1")],  # tabs, other order, a gap
    "davos": [("80", "150", "NA", "1"), ("82", "152", "f", " ")],  # neither sex nor outcome known
    "espoo": [],
    "fano": [("20", "160", "m", "2")],
}
KNOWN = np.array([50, 60, 70, 40.5, 41.5, 30, 34, 32, 80, 20])
"""The ages of all rows that have an outcome."""


def write(path: Path, rows: Sequence[Sequence[str]], header: Sequence[str] = HEADER, separator: str = ",") -> None:
    order = [HEADER.index(name) for name in header]
    path.parent.mkdir(exist_ok=True)
    lines = [separator.join(header), *(separator.join(row[k] for k in order) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """The six sites' files in a folder."""
    folder = tmp_path / "sites"
    folder.mkdir()
    for name, rows in SITES.items():
        write(folder / f"{name}.csv", rows)
    write(folder / "berlin.csv", SITES["berlin"], separator=";")
    write(folder / "cork.csv", SITES["cork"], ("outcome", "sex", "bp", "age"), "\t")
    return folder


@pytest.fixture
def prepare(command: Callable[..., Completed], tmp_path: Path) -> Callable[..., str]:
    """`hpcfed prepare own --raw …`; returns what it printed, one line if it failed."""

    def run(options: str, code: int = 0) -> str:
        done = command(["prepare", "own", "-o", "f.h5", "--overwrite", "--raw", *options.split()], tmp_path)
        assert done.returncode == code, done.stderr
        assert code == 0 or done.stderr.count("\n") == 1
        return done.stderr if code else done.stdout

    return run


def test_six_sites_each_with_a_table_in_its_own_way(
    sites: Path, prepare: Callable[..., str], command: Callable[..., Completed], tmp_path: Path
) -> None:
    refused = prepare("sites", 2)
    for part in (
        "cork.csv: row 4: no value in column 'bp'",
        "bp 1, sex 1, outcome 1",
        "--missing drop, mean or median",
    ):
        assert part in refused

    said = prepare("sites --missing mean")
    for part in (
        "target 'outcome': 2 classes: 1, 2",
        "one-hot 'sex': f, m",
        "separated by tabs, as in ",
        "separated by semicolons, as in ",
        "a comma is the decimal point, as in berlin.csv",
        "missing values: bp 1, sex 1, outcome 1 in 11 rows; numbers are filled by the mean",
        "filled by the most frequent level of the training rows: sex=m\n",
        "dropped 1 row without a label or a client: davos 1",
        "not scaled: age (45.8 ± 18.1), bp (125 ± 18.9); scale by --standardize",
        "without a sample to train on: espoo;",
        "no test set: runs measure no test loss or accuracy; name one 'test', or hold samples",
    ):
        assert part in said
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.client_names() == sorted(SITES)
        assert federation.sizes.tolist() == [3, 2, 3, 1, 0, 1]
        x, y = federation.train()
        assert y.tolist() == [0, 1, 1, 0, 1, 0, 1, 0, 0, 1]
        assert np.array_equal(x[:, 0], KNOWN.astype(np.float32))
        assert x[:3, 2:].tolist() == [[1, 0], [0, 1], [1, 0]]
        assert x[7, 1] == pytest.approx(np.mean([120, 140, 130, 110, 112, 100, 104, 150, 160]))
        assert x[8, 2:].tolist() == [0, 1]
        source = federation.source
    assert (source["target"], source["classes"], source["categories"]) == ("outcome", ["1", "2"], {"sex": ["f", "m"]})
    with h5py.File(tmp_path / "f.h5", locking=False) as file:
        assert json.loads(file.attrs["features"]) == ["age", "bp", "sex=f", "sex=m"]
        assert file["train/row"][3:].tolist() == [[1, 0], [1, 1], [2, 0], [2, 1], [2, 2], [3, 0], [5, 0]]

    said = prepare("sites --missing drop --standardize client --min-samples 1")
    assert "dropped 3 rows: cork 1, davos 2" in said
    assert "scaled as all clients are, for want of training rows: fano" in said
    with Federation.open(tmp_path / "f.h5") as federation, h5py.File(tmp_path / "f.h5", locking=False) as file:
        assert federation.client_names() == ["amsterdam", "berlin", "cork", "fano"]
        for k in range(3):
            ages = federation.client(k)[0][:, :2]
            assert ages.mean(axis=0) == pytest.approx(np.zeros(2), abs=1e-6)
            assert ages.std(axis=0) == pytest.approx(np.ones(2), abs=1e-6)
        assert file["train/mean"][0, 0] == pytest.approx(60)
        assert file["train/std"][:, 3].tolist() == [1] * 4

    again = ["prepare", "federation", "--raw", "f.h5", "--standardize", "client", "-o", "g.h5"]
    assert "sites is standardized already; prepare it from its raw files" in command(again, tmp_path).stderr
    pooled = ["prepare", "federation", "--raw", "f.h5", "--partition", "iid", "--clients", "1", "-o", "g.h5"]
    assert "x stays scaled by the statistics of each client" in command(pooled, tmp_path).stdout

    said = prepare("sites --missing median --standardize pooled --test-fraction 0.4")
    assert "not scaled" not in said
    with Federation.open(tmp_path / "f.h5") as federation:
        x, scale = federation.train()[0], federation.normalization
        assert federation.num_test == 2
        assert scale is not None
        assert scale.mean[:2] == pytest.approx(x[:, :2].mean(axis=0), rel=1e-6)
        assert scale.std[:2] == pytest.approx(x[:, :2].std(axis=0), rel=1e-6)
        assert (scale.mean[2:], scale.std[2:]) == ((0, 0), (1, 1))

    rows = [(name, *row) for name, rows in SITES.items() for row in rows]
    lines = [",".join(("site", *HEADER)), *(",".join(cell.replace(",", ".") for cell in row) for row in rows)]
    (tmp_path / "all.csv").write_text("\n".join(lines))
    assert "name the column of its clients by --client, or deal its rows to clients by --partition" in prepare(
        "all.csv", 2
    )
    said = prepare("all.csv --client site --missing drop --min-samples 1")
    assert "dropped 3 rows: cork 1, davos 2" in said
    refused = prepare("all.csv --partition natural --missing drop --exclude site", 2)
    assert "all does not come split; choose another --partition" in refused
    said = prepare("all.csv --partition iid --clients 2 --exclude site --missing median --standardize none")
    assert "clients  2 with 5 to 5 samples" in said


def test_tested_samples_are_reported(sites: Path, prepare: Callable[..., str]) -> None:
    write(sites / "test.csv", SITES["amsterdam"])
    assert "test     3 samples for all clients" in (said := prepare("sites --missing median"))
    assert "missing values: bp 1, sex 1, outcome 1 in 11 training rows; none in 3 test rows; numbers" in said
    said = prepare("sites --missing drop", 2)
    assert (
        "hpcfed: client 'davos': every row lacks a value: got no row to train on; leave it out by --min-samples 1"
        in said
    )
    write(sites / "davos.csv", [])
    said = prepare("sites --missing drop --test-fraction 0.5")
    for part in (
        "3 in its test set\n",
        "its test set (3 samples) is not used: --test-fraction",
        "test     3 samples, 0 to 1 a client",
        "without a sample to train on: davos, espoo; --min-samples 1 leaves",
        "without a sample to test on: fano\n",
    ):
        assert part in said
    assert "left out" not in said
    said = prepare("sites --missing drop --min-samples 1")
    assert "clients  4 with 1 to 3" in said
    assert "left out: davos (0 samples), espoo (0)\n" in said


def test_clients_with_few_samples_are_named(
    sites: Path, prepare: Callable[..., str], command: Callable[..., Completed], tmp_path: Path
) -> None:
    said = prepare("sites --missing mean --min-samples 2")
    assert "left out: davos (1 sample), espoo (0), fano (1)\n" in said
    assert re.search(
        r"source left out +davos \(1 sample\), espoo \(0\), fano", command(["inspect", "f.h5"], tmp_path).stdout
    )
    again = ["prepare", "federation", "--raw", "f.h5", "--min-samples", "3", "-o", "g.h5"]
    assert "left out: berlin (2 samples)\n" in command(again, tmp_path).stdout
    with Federation.open(tmp_path / "g.h5") as federation:
        assert federation.source["left out"] == "davos (1 sample), espoo (0), fano (1); berlin (2 samples)"
    one = ["prepare", "federation", "--raw", "f.h5", "--clients", "1", "-o", "h.h5"]
    assert "left out" not in command(one, tmp_path).stdout, "clients that are not drawn are none that lack samples"
    for k in range(20):
        write(sites / f"x{k:02}.csv", [])
    assert "fano (1), x00 (0), x01 (0), x02 (0), x03 (0), x04 (0), x05 (0), x06 (0) and 13 more\n" in prepare(
        "sites --missing mean --min-samples 2"
    )


def test_one_of_a_kind_is_in_the_singular(prepare: Callable[..., str], tmp_path: Path) -> None:
    write(tmp_path / "sites" / "a.csv", [("1", "2", "f", "1"), ("3", "2", "m", "2")])
    write(tmp_path / "sites" / "b.csv", [("5", "2", "f", "1"), ("5", "2", "f", "")])
    write(tmp_path / "sites" / "test.csv", [("", "2", "f", "1")])
    said = prepare("sites --group bp --missing mean")
    for part in (
        "in 4 training rows; age 1 in 1 test row;",
        "dropped 1 row without",
        "1 group, the largest of 3 rows\n",
        "1 group is of several clients; where",
        "1 group is in training and in test rows\n",
        "test     1 sample for all clients\n",
    ):
        assert part in said
    assert "its test set (1 sample) is not used" in prepare("sites --missing mean --test-fraction 0.5")


def test_equal_samples_are_reported(prepare: Callable[..., str], tmp_path: Path) -> None:
    def patients(first: int, last: int) -> list[tuple[str, ...]]:
        return [(f"{40 + k / 8}", f"{100 + (7 * k) % 31}", "fm"[k % 2], f"{1 + k % 2}") for k in range(first, last)]

    write(tmp_path / "sites" / "a.csv", patients(0, 20))
    write(tmp_path / "sites" / "b.csv", patients(17, 40))
    write(tmp_path / "sites" / "test.csv", patients(38, 50))
    said = prepare("sites")
    assert "2 of 12 test samples are training samples, too, with the same x and y\n" in said
    assert "3 training samples again at another client, with the same x and y: a, b\n" in said
    shutil.copy(tmp_path / "sites" / "a.csv", tmp_path / "one.csv")
    (tmp_path / "one.csv").write_text((text := (tmp_path / "one.csv").read_text()) + text.partition("\n")[2])
    assert "are training samples, too" in prepare("one.csv --partition iid --clients 2 --test-fraction 0.5")
    few = [("1", "0", "f", "1"), ("0", "1", "m", "2")] * 20  # equal by chance
    for name in ("a", "b", "test"):
        write(tmp_path / "sites" / f"{name}.csv", few)
    assert "same x and y" not in prepare("sites")


def test_a_quote_that_is_not_closed_is_reported(prepare: Callable[..., str], tmp_path: Path) -> None:
    write(tmp_path / "sites" / "a.csv", [("1", "2", '"f', "1"), ("2", "3", "m", "2"), ("3", "2", 'm"', "2")])
    write(tmp_path / "sites" / "b.csv", [("1", "2", "m", "1"), ("2", "5", '"first,\nsecond"', "2")])
    said = prepare("sites --exclude sex")
    assert "a.csv: row 2: column 'sex' holds line breaks and separators, maybe of whole rows" in said
    write(tmp_path / "sites" / "a.csv", [("1", "2", "f", "1"), ("2", "3", "m", "2")])
    assert "maybe of whole rows" not in prepare("sites --exclude sex")


def test_a_name_that_no_file_can_hold_is_refused(prepare: Callable[..., str], tmp_path: Path) -> None:
    write(tmp_path / "sites" / "a.csv", [("1", "2", "f", "yes\0"), ("3", "1", "m", "no")])
    assert "got 'yes\\x00'; mend it where the data come from" in prepare("sites", 2)
    assert not (tmp_path / "f.h5").exists()
    x = np.ones((2, 3), np.float32)
    with pytest.raises(InputError, match=r"got 'half \\ud800'"):
        hpcfed.write_federation(tmp_path / "f.h5", {"a": (x, np.array(["half \ud800", "no"]))})


def test_classes_and_levels_that_lack_training_are_reported(prepare: Callable[..., str], tmp_path: Path) -> None:
    write(tmp_path / "sites" / "a.csv", [("1", "2", "f", "1"), ("3", "1", "m", "2")])
    write(tmp_path / "sites" / "b.csv", [("1", "2", "f", "1")])
    assert "only test" not in (said := prepare("sites"))
    assert "classes of one client alone: 2 (a)\n" in said
    write(tmp_path / "sites" / "test.csv", [("1", "2", "x", "3")])
    said = prepare("sites")
    assert "only test samples have classes: 3\n" in said
    assert "only test samples have sex=x\n" in said
    said = prepare("sites --partition iid --clients 2")
    assert "one client" not in said


CELLS = [("1", "2", "f", "a"), ("3", "4", "m", "b")]


def test_sites_send_tables_in_several_formats(sites: Path, tmp_path: Path) -> None:
    """The federation is that of one format: names, order, features and labels."""
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    one = own.load(sites, missing="mean")
    convert = arrow_csv.ConvertOptions(null_values=["", "NA", "?"], strings_can_be_null=True)
    for number, path in enumerate(sorted(sites.glob("*.csv"))):
        table = arrow_csv.read_csv(
            path, parse_options=arrow_csv.ParseOptions(delimiter=read.separator(path)), convert_options=convert
        )
        if number % 3 == 0 and path.stem != "berlin":
            parquet.write_table(table, mixed / f"{path.stem}.parquet")
        elif read.separator(path) == "\t":
            shutil.copy(path, mixed / f"{path.stem}.tsv")
        else:
            shutil.copy(path, mixed)
    assert {path.suffix for path in mixed.iterdir()} == {".csv", ".tsv", ".parquet"}
    other = own.load(mixed, missing="mean")
    for array in ("x", "y", "owner"):
        assert np.array_equal(getattr(one, array), getattr(other, array), equal_nan=array == "x")
    assert (one.clients, one.source.get("categories")) == (other.clients, other.source.get("categories"))


def test_no_table_without_rows_is_blamed(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [])
    write(tmp_path / "b.csv", [(str(k), "2", f"word {k}", str(k % 2)) for k in range(101)])
    with pytest.raises(InputError, match=r"b\.csv: column 'sex' has more than 100 different words"):
        own.load(tmp_path)


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({"a": CELLS, "b": CELLS, "c": (("age", "bp", "sax", "outcome"), CELLS)}, {},
         r"c.csv: columns differ from those of a.csv and 1 more: it lacks 'sex'; only it has 'sax'.*by --exclude"),
        ({"a": CELLS, "b": (("age", "fax", "sex", "outcome"), CELLS)}, {"exclude": "fax"}, "it lacks 'bp'; give"),
        ({"a": CELLS, "b": (("age", "fax", "sex", "outcome"), CELLS)}, {"exclude": "fux,bp"}, "no column 'fux'; col"),
        ({"a": (("p", "q", "r", "s"), CELLS)}, {}, "which column is the target.*--target; columns: p, q, r, s"),
        ({"a": (("y", "q", "r", "label"), CELLS)}, {}, "which column is the target.: got y and label"),
        ({"a": CELLS}, {"target": "outcom"}, "--target: no column 'outcom'; did you mean 'outcome'"),
        ({"a": CELLS}, {"exclude": "outcome", "target": "outcome"}, "'outcome' is named by --target and --exclude"),
        ({"a": CELLS}, {"target": "age,bp"}, "expected one column of labels.*--task multi-label"),
        ({"a": [*CELLS, ("5", "x", "f", "a")]}, {}, "row 4: column 'bp': expected numbers, got 'x'.*--categorical"),
        ({"a": [*CELLS, ("5", "1e39", "f", "a")]}, {}, "a.csv: row 4: column 'bp': expected a finite float32 number"),
        ({"a": [("1", "", "f", "a")]}, {"missing": "drop"}, "column 'bp' has no value in any row; leave it out"),
        ({"a": [("1", "2", f"p{k}", "a") for k in range(101)]}, {}, "'sex' has more than 100 different words; "
         "leave it out by --exclude 'sex', or by --group 'sex' if it names a row's patient, so that no test split "
         "divides one; or let it be one-hot all the same by --categorical 'sex'"),
        ({"a": [(f"{k}", "2", f"p{k}", "a") for k in range(101)]}, {"group": "age"},
         "leave it out by --exclude 'sex'; or let it be one-hot"),
        ({"a": [("1", "2", f"p{k}", "a") for k in range(10_001)]}, {"categorical": "sex"},
         "a.csv: more than 10,000 different values in column 'sex'; leave it out by --exclude 'sex'"),
        ({"a": [("1", "2", "f", f"{k}.5") for k in range(30)]}, {}, "30 different fractions; use --task regression"),
        ({"a": CELLS}, {"task": "regression"}, "a.csv: row 2: target 'outcome': expected finite numbers, got a"),
        ({"a": [("1", "2", "f", " ")]}, {"missing": "mean"}, "target 'outcome' has no value in any row"),
        ({"a": []}, {}, "no table has a row"),
        ({"a": [("1", "2024-01-01", "f", "a"), ("2", "2024-1-2 10:30", "m", "b")]}, {},
         "a.csv: row 2: column 'bp': expected numbers, got dates such as '2024-01-01'; leave it out by --exclude 'bp'"),
        ({"a": [("1", "31.12.99", "f", "a")]}, {}, "expected numbers, got dates such as '31.12.99'"),
        ({"a": [("1", "01JAN2024", "f", "a")]}, {}, "expected numbers, got dates such as '01JAN2024'"),
        ({"a": CELLS}, {"missing": "avg"}, "--missing 'avg': expected refuse, drop, mean or median$"),
        ({"a": CELLS}, {"missing": "men"}, "expected refuse, drop, mean or median; did you mean 'mean'"),
        ({"a": [*CELLS, ("5", "TRUE", "f", "a")]}, {}, "row 4: column 'bp': expected numbers, as in .* got 'TRUE'"),
        ({"a": [("1", "true", "f", "a")], "b": CELLS}, {}, "a.csv: row 2: column 'bp': expected .* got 'true'"),
        ({"a": [*CELLS, ("5", "nan(1)", "f", "a")]}, {}, r"row 4: column 'bp': expected numbers, got 'nan\(1\)'"),
        ({"a": [*CELLS, ("5", "-Nan", "f", "a")]}, {}, "row 4: no value in column 'bp'; .* bp 1 in 3 rows"),
        ({"a": [("1", "2", "f", "1"), ("1", "2", "f", "inf")]}, {"task": "regression"}, "got a number beyond float32"),
        ({"a": [("1", "2", "f", "0.5"), ("1", "2", "f", "True")]}, {"task": "regression"},
         "row 3: target 'outcome': expected finite numbers, got True"),
        ({"a": [*CELLS, ("5", '"2,500"', "f", "a")]}, {}, "got '2,500'; write 2500, or a point for the comma if"),
        ({"a": [*CELLS, ("5", '"2,5"', "f", "a")]}, {}, "got '2,5'; write a point for the decimal comma, or .* semico"),
        ({"a": CELLS, "b": [("1", ".", "f", "a")]}, {}, "'bp': expected numbers, got '.'; .* by --missing-codes '.'"),
        ({"a": CELLS}, {"task": "survival", "target": "sex,age"},
         "a.csv: row 2: target 'sex': expected 1 for an event or 0 for a censored time, got f"),
        ({"a": CELLS}, {"task": "multi-label", "target": "sex,age"}, "target 'sex': expected 0 or 1, got f"),
        ({"a": (("age", "bp", "", "outcome"), CELLS)}, {}, r"column 3 has no name; .*index=False"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit(tmp_path: Path, files: Mapping, options: dict, message: str) -> None:
    for name, content in files.items():
        header, rows = content if isinstance(content, tuple) else (HEADER, content)
        lines = [",".join(header), *(",".join(row) for row in rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    with pytest.raises(InputError, match=message):
        own.load(tmp_path, **options)


def test_numbers_written_in_other_ways(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [('"1,200"', '"1,5"', "f", "1"), ('"3,100"', "<5", "m", "2")])
    said = " ".join(own.load(tmp_path).remarks)
    assert "'age' has words that look like numbers, such as '1,200'" in said
    assert "'bp' has words" in said
    assert "'sex' has words" not in said
    write(tmp_path / "a.csv", [("1.234", "2", "f", "1"), ("3.5", "4", "m", "2")], separator=";")
    found = own.load(tmp_path)
    assert found.x[0, 0] == np.float32(1.234)
    assert "three digits" not in " ".join(found.remarks)
    doubt = "read as fractions of three digits: 'age' {}; write thousands without a point or comma"
    for thousand in ("1.234", "1,234"):
        write(tmp_path / "a.csv", [(thousand, "4", "f", "1"), ("900", "4", "m", "2")], separator=";")
        assert doubt.format(thousand) in own.load(tmp_path).remarks
    write(tmp_path / "a.csv", [("1", "2,5", "f", "1"), ("1.234", "4", "m", "2")], separator=";")
    with pytest.raises(InputError, match=r"a.csv: row 3: column 'age': 1.234: thousands or a fraction\?"):
        own.load(tmp_path)


@pytest.mark.parametrize("text", ["€ 1.50", "1,50 €", "$1,200", "-$5", "\u22123", "0x1F", "13:45", "5 %"])
def test_words_that_look_like_numbers(tmp_path: Path, text: str) -> None:
    write(tmp_path / "a.csv", [("1", f'"{text}"', "f", "1"), ("3", f'"{text}"', "m", "2")])
    said = [line for line in own.load(tmp_path).remarks if "look like numbers" in line]
    assert said == [f"'bp' has words that look like numbers, such as {text!r}: if they are, write them as 1200 or 1.5"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--task regresion", "task 'regresion'; did you mean 'regression'?"),
        ("--missing men", "--missing 'men': expected refuse, drop, mean or median; did you mean 'mean'?"),
        ("--standardize pool", "--standardize 'pool': expected client, pooled or none; did you mean 'pooled'?"),
        ("--partition dirichlet", "unknown partition 'dirichlet'; did you mean 'dirichlet-class' or 'dirichlet-client"),
    ],
)
def test_options_are_checked_before_tables_are_read(prepare: Callable[..., str], options: str, says: str) -> None:
    assert says in prepare(f"nowhere {options}", 2)


def test_labels_and_categories_have_decimal_commas(tmp_path: Path) -> None:
    """In a file whose features may have them; quoted, among commas, 1,5 is a word."""
    numbers = ["1,5", "1,0", "2,0", "1"]
    write(tmp_path / "a.csv", [("1", text, "f", text) for text in numbers], separator=";")
    write(tmp_path / "b.csv", [("1", text, "m", text) for text in ("2.0", "1.5", "1", "01.50")])
    dataset = own.load(tmp_path, categorical="bp")
    assert dataset.source["classes"] == ["1", "1.5", "2"]
    assert dataset.features[1:4] == ["bp=1", "bp=1.5", "bp=2"]
    assert dataset.y.tolist() == dataset.x[:, 1:4].argmax(axis=1).tolist() == [1, 0, 2, 0, 2, 1, 0, 1]
    assert "a comma is the decimal point, as in a.csv" in dataset.remarks
    assert not any("look like one" in line for line in dataset.remarks)
    assert own.load(tmp_path, exclude="bp").source["classes"] == ["1", "1.5", "2"]
    write(tmp_path / "c.csv", [("1", '"1,5"', "m", '"1,5"')])
    dataset = own.load(tmp_path, categorical="bp")
    assert dataset.source["classes"] == ["01.50", "1", "1,0", "1,5", "1.5", "2,0", "2.0"]
    assert "classes '1' and '1,0' look like one, written in two ways (1 of 4 pairs)" in dataset.remarks
    assert not any("decimal point" in line for line in dataset.remarks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"client_column": "bp"}, "clients 'Berlin' and 'berlin' look like one"),
        ({"client_column": "age"}, "clients '1' and '1.0' look like one"),
        ({"partition": "iid"}, "levels 'ICU' and 'icu' of 'sex' look like one"),
        ({"partition": "iid"}, "classes 'Ill' and 'ill' look like one"),
        ({"partition": "iid", "group": "bp"}, "groups 'Berlin' and 'berlin' look like one, written in two ways: write"),
        ({"partition": "iid", "group": "age"}, "groups '1' and '1.0' look like one"),
    ],
)
def test_names_written_in_two_ways(tmp_path: Path, options: dict, said: str) -> None:
    write(tmp_path / "a.csv", [("1", "Berlin", "ICU", "Ill"), ("1.0", "berlin", "icu", "ill")])
    assert said in " ".join(own.load(tmp_path / "a.csv", **options).remarks)
    for name in ("Site 1", "site 1"):
        write(tmp_path / f"{name}.csv", CELLS)
    (tmp_path / "a.csv").unlink()
    assert "clients 'Site 1' and 'site 1' look like one" in " ".join(own.load(tmp_path).remarks)
    assert (cells.twice("levels", ["v 01", "v 1"]), cells.twice("levels", ["v 1.05", "v 1.5"])) == (
        "levels 'v 01' and 'v 1' look like one, written in two ways",
        "",
    )


def test_a_column_of_one_site_can_be_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", CELLS)
    write(tmp_path / "b.csv", CELLS, ("age", "bp", "outcome", "sex"))
    (tmp_path / "b.csv").write_text((tmp_path / "b.csv").read_text().replace("bp", "fax"))
    assert own.load(tmp_path, exclude="fax, bp").features == ["age", "sex=f", "sex=m"]


def test_letters_in_two_unicode_forms_are_one(tmp_path: Path) -> None:
    """macOS writes é as two characters, other systems as one: file names, headers, cells, options and arrays."""
    nfc, nfd = "Médecine", unicodedata.normalize("NFD", "Médecine")
    rows = [("1", "p", nfc, nfc), ("2", "q", "Chir", "Chir")]
    for form in ("NFC", "NFD"):
        for name, own_form in (("Évora", form), ("Porto", "NFC")):
            (tmp_path / form).mkdir(exist_ok=True)
            lines = [",".join(row) for row in (("âge", "bp", "sex", "outcome"), *rows)]
            path = tmp_path / form / f"{unicodedata.normalize(own_form, name)}.csv"
            path.write_text(unicodedata.normalize(own_form, "\n".join(lines)), encoding="utf-8")
    options = {"group": "bp", "exclude": unicodedata.normalize("NFD", "âge"), "positive": nfd}
    ours, theirs = (own.load(tmp_path / form, **options) for form in ("NFC", "NFD"))
    assert ours.remarks == theirs.remarks
    assert (theirs.clients, theirs.features) == (["Porto", "Évora"], ["sex=Chir", f"sex={nfc}"])
    assert theirs.source["classes"] == ["Chir", nfc]
    for name in ("x", "y", "owner", "group"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    (tmp_path / "one.csv").write_text(f"site,age,y\n{nfc},1,0\n{nfd},2,1\n", encoding="utf-8")
    assert own.load(tmp_path / "one.csv", client_column="site").clients == [nfc]
    raw = tmp_path / "arrays"
    raw.mkdir()
    np.savez(raw / "a.npz", x=np.zeros((3, 2)), y=np.array([nfc, nfd, "Chir"]), g=np.array([nfd, nfc, "Chir"]))
    arrays = own.load(raw, group="g")
    assert (arrays.y.tolist(), arrays.group.tolist()) == ([1, 1, 0], [1, 1, 0])
    for name in (nfc, nfd, "Chir"):
        (tmp_path / "images" / "a" / name).mkdir(parents=True)
        Image.new("L", (2, 2)).save(tmp_path / "images" / "a" / name / "1.png")
    assert sorted(own.load(tmp_path / "images").y.tolist()) == [0, 1, 1]


def test_groups_written_in_two_ways(tmp_path: Path) -> None:
    names = ["P001 ", "p001", "P1", "P10", "007", "7", "12345678901234567", "12345678901234568", "1.05", "1.5"]
    rows = np.zeros((len(names), 2)), np.arange(len(names)) % 2
    write(tmp_path / "a.csv", [(name, "2", "f", f"{label}") for name, label in zip(names, rows[1], strict=True)])
    np.savez(tmp_path / "arrays.npz", x=rows[0], y=rows[1], age=names)
    for place in ("a.csv", "arrays.npz"):
        raw = tmp_path / Path(place).stem
        raw.mkdir()
        (tmp_path / place).rename(raw / place)
        dataset = own.load(raw, group="age")
        said = [line for line in dataset.remarks if "look like one" in line]
        assert said == [
            "groups '007' and '7' look like one, written in two ways (1 of 3 pairs): write each in one way, or its "
            "rows may come to both sides of a test split"
        ]
        assert len(set(dataset.group.tolist())) == len(names)


IDENTIFIERS = (
    "id ID patient Subject MRN case person record pid ptid USUBJID PatientID patientid caseId patient_no study_no "
    "index hospital_id row.uuid Fall_nr id_patient SubjectNo"
)
OTHERS = (
    "age_at_index bmi_index covid lipid uric_acid patient_age case_control person_years smoker_no number pt visits "
    "grid PaidAmount num_patients ca thal"
)


def test_columns_by_names_of_identifiers() -> None:
    ids = {*IDENTIFIERS.split(), "subject number", "Patient No.", "Pat.-Nr.", "Unnamed: 0", "Unnamed: 0.1", "level_0"}
    assert {name for name in (*ids, *OTHERS.split()) if is_identifier(name)} == ids


def test_a_patient_is_no_feature_unnoticed(tmp_path: Path) -> None:
    rows = [("7", "2", "f", "1"), ("7", "1", "m", "2"), ("8", "3", "f", "1")]
    write(tmp_path / "a.csv", rows)
    path = tmp_path / "b.csv"
    path.write_text((tmp_path / "a.csv").read_text().replace("age", "PatientID").replace("sex", "case"))
    (tmp_path / "a.csv").unlink()

    def remark(**options: str) -> str:
        return " ".join(line for line in own.load(tmp_path, **options).remarks if "identifiers" in line)

    both_sides = (
        ", or the patient's by --group, without which rows of one patient may come to both sides of a test split"
    )
    used = "used as features, though their names are of identifiers"
    assert remark() == f"{used}: PatientID, case; leave them out by --exclude{both_sides}"
    assert remark(exclude="PatientID") == f"{used}: case; leave them out by --exclude{both_sides}"
    assert remark(exclude="PatientID", categorical="case") == ""
    assert remark(group="PatientID") == f"{used}: case; leave them out by --exclude"
    assert own.load(tmp_path, group="PatientID").features == ["bp", "case=f", "case=m"]
    path.write_text(path.read_text().replace("\n7,", "\n7.5,"))
    assert remark(exclude="case") == f"{used}: PatientID; leave them out by --exclude, or the patient's by --group"


def test_numbers_that_float32_blurs_are_reported(tmp_path: Path) -> None:
    """Those of times in seconds lie 128 apart in float32; a constant 0.1, and whole years, are as good as before."""
    rows = [(f"{1_700_000_000 + 7 * k}", "0.1", f"{1990 + k}", str(k % 2)) for k in range(8)]
    write(tmp_path / "a.csv", rows)
    said = [line for line in own.load(tmp_path).remarks if "float32" in line]
    remedy = "subtract an offset in the tables, or leave it out by --exclude"
    assert said == [f"'age' is rounded to float32 by up to 49, its numbers differ by 49: {remedy}"]
    for kind, first in ((pyarrow.int64(), -(2**62)), (pyarrow.uint64(), 2**63)):
        columns = {"id": pyarrow.array([first, first + 5], kind), "same": pyarrow.array([first + 5] * 2, kind)}
        parquet.write_table(pyarrow.table({**columns, "y": [0, 1]}), tmp_path / "a.parquet")
        said = [line for line in own.load(tmp_path / "a.parquet", partition="iid").remarks if "float32" in line]
        assert said == [f"'id' is rounded to float32 by up to 5, its numbers differ by 5: {remedy}"]


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["1", "2", "01", "2.0"], ["1", "2"], [0, 1, 0, 1]),
        (["0", "1", "2", "1"], None, [0, 1, 2, 1]),
        (["10", "9", "9", "10"], ["9", "10"], [1, 0, 0, 1]),
        (["-1", "1", "1", "-1"], ["-1", "1"], [0, 1, 1, 0]),
        (["ill ", "well", " ill", "None"], ["None", "ill", "well"], [1, 2, 1, 0]),
        (["1", "ill", "2", "1"], ["1", "2", "ill"], [0, 2, 1, 0]),
        (
            ["900000000000000101", "1", "900000000000000102", "0900000000000000101.0"],
            ["1", "900000000000000101", "900000000000000102"],
            [1, 0, 2, 1],
        ),
        (
            ["9007199254740991", "9007199254740992", "9007199254740993", "1e20"],
            ["9007199254740991", "9007199254740992", "9007199254740993", "1e+20"],
            [0, 1, 2, 3],
        ),
    ],
)
def test_kinds_of_labels(tmp_path: Path, labels: list[str], names: list[str] | None, numbers: list[int]) -> None:
    write(tmp_path / "a.csv", [("1", "2", "3", label) for label in labels])
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().replace("bp", "patient_id"))
    dataset = own.load(tmp_path)
    assert any("of identifiers: patient_id; leave them out by --exclude" in remark for remark in dataset.remarks)
    assert dataset.source.get("classes") == names
    assert dataset.y.tolist() == numbers
    assert dataset.num_classes == len(set(numbers))
    levels = own.load(tmp_path, target="sex", task="regression", categorical="outcome").features[2:]
    assert levels == [f"outcome={name}" for name in names or ("0", "1", "2")]


def test_the_positive_class_is_the_second(prepare: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    rows = [("1", "2", "f", "ill"), ("3", "1", "m", "well"), ("5", "1", "m", "ill")]
    write(folder / "a.csv", rows)
    write(folder / "b.tsv", rows[:2], separator="\t")
    parquet.write_table(arrow_csv.read_csv(folder / "a.csv"), folder / "c.parquet")
    write(folder / "test.csv", rows[:2])
    line = "target 'outcome': 2 classes:"
    assert f"{line} ill, well; positive: well (--positive ill for the other)\n" in prepare("sites --target outcome")
    with Federation.open(tmp_path / "f.h5") as federation:
        plain, content = federation.train()[1], federation.content
    assert f"{line} ill, well; positive: well\n" in prepare("sites --positive well")
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.content == content
    assert f"{line} well, ill; positive: ill\n" in prepare("sites --target outcome --positive ill")
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.source["classes"] == ["well", "ill"]
        assert federation.train()[1].tolist() == (1 - plain).tolist() == [1, 0, 1, 1, 0, 1, 0, 1]
        assert federation.test(0, 2)[1].tolist() == [1, 0]
    for options, says in (
        ("--positive Ill", "--positive Ill: no such class; did you mean 'ill'?"),
        ("--positive 1", "--positive 1: no such class; known: ill, well"),
        ("--target age --positive 3", "--positive 3: expected two classes, got 3 classes: 1, 3, 5; leave it out"),
        (
            "--target age --task regression --positive 3",
            "--positive has no effect with --task regression; leave it out",
        ),
    ):
        assert says in prepare(f"sites {options}", 2)


@pytest.mark.parametrize(
    ("labels", "positive", "names", "numbers"),
    [
        (["1", "2", "01", "2.0"], "01", ["2", "1"], [1, 0, 1, 0]),
        (["0", "1", "1", "0"], "0", ["1", "0"], [1, 0, 0, 1]),
        (["0", "1", "1", "0"], "1", None, [0, 1, 1, 0]),
        (["not ill", "ill", "ill", "ill"], "not ill", ["ill", "not ill"], [1, 0, 0, 0]),
    ],
)
def test_the_positive_class_by_its_label(
    tmp_path: Path, labels: list[str], positive: str, names: list[str] | None, numbers: list[int]
) -> None:
    write(tmp_path / "a.csv", [("1", "2", "3", label) for label in labels])
    dataset = own.load(tmp_path, positive=positive)
    assert (dataset.source.get("classes"), dataset.y.tolist()) == (names, numbers)


def test_numbers_as_categories_and_several_labels(tmp_path: Path) -> None:
    rows = [("1", "2", "0", "1"), ("3", "1", "1", "0"), ("5", "10", "1", "1")]
    write(tmp_path / "a.csv", rows)
    dataset = own.load(tmp_path, task="multi-label", target="sex,outcome", categorical="bp")
    assert not any("identifiers" in remark for remark in dataset.remarks)
    assert dataset.features == ["age", "bp=1", "bp=2", "bp=10"]
    assert (dataset.num_classes, dataset.y.tolist()) == (2, [[0, 1], [1, 0], [1, 1]])
    assert dataset.x[:, 1:].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_a_long_field_takes_no_memory(tmp_path: Path) -> None:
    """180 kB, of which a table of fixed width would make 2 GB a column; the libraries alone take 0.3 GB."""
    write(tmp_path / "a.csv", [*[("1", "2", "f", "a")] * 4_000, ("1", "2", "f" * 130_000, "b")])
    program = (
        "import sys; from pathlib import Path; from data_prep.sources import own\n"
        "assert own.load(Path(sys.argv[1]), partition='iid').x.shape == (4001, 4)\n"
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"  # getrusage's is the parent's
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert int(done.stdout) < 1 << 20, "its peak, kB"


def test_names_of_any_length_are_cut_where_they_are_printed(tmp_path: Path, prepare: Callable[..., str]) -> None:
    write(tmp_path / "a.csv", [("1", "2", "f", "a"), ("1", "2", "f" * 5_000, "b"), ("1", "2", "f", "b")])
    said = prepare("a.csv --partition iid --clients 1")
    assert "one-hot 'sex': f, fff" in said
    write(tmp_path / "b.csv", [("1", "2", '"f\n\x1b[1m"', "a"), ("1", "2", "m", "b")])
    assert "one-hot 'sex': f⏎\\x1b[1m, m\n" in prepare("b.csv --partition iid --clients 1")
    assert max(map(len, said.splitlines())) < 700


def test_images_in_parquet_as_the_datasets_hub_writes_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    features = {"label": {"names": ["cat", "dog", "emu"], "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    for k, part in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        mine = slice(2 * k, 2 * k + 2)
        images = pyarrow.array([{"bytes": png(image), "path": None} for image in pixels[mine]], kind)
        schema = pyarrow.schema([("image", kind), ("label", pyarrow.int64())], metadata=metadata)
        parquet.write_table(pyarrow.table([images, [k, 1]], schema=schema), tmp_path / f"{part}.parquet")
    dataset = own.load(tmp_path)
    assert (dataset.clients, dataset.num_classes) == (["train"], 3)
    assert dataset.source["classes"] == ["cat", "dog", "emu"]
    assert np.array_equal(dataset.x, pixels[:4].transpose(0, 3, 1, 2))
    assert dataset.y.tolist() == [0, 1, 1, 1]
    assert dataset.test_x is not None
    assert np.array_equal(dataset.test_x, pixels[4:].transpose(0, 3, 1, 2))
    broken = pyarrow.table({"image": pyarrow.array([{"bytes": b"no", "path": None}], kind), "label": [1]})
    parquet.write_table(broken, tmp_path / "train-00001-of-00002.parquet")
    with pytest.raises(InputError, match=r"train-00001-of-00002.parquet: row 1: no image, or damaged"):
        own.load(tmp_path)


@pytest.mark.parametrize(
    ("column", "options", "said"),
    [
        ([datetime(2026, 1, 1)] * 2, {}, r"column 'a': expected numbers, got timestamp.* --exclude 'a'"),
        ([[1], [2]], {"client_column": "a"}, r"--client: column 'a': expected names, got list"),
        ([1.0, float("nan")], {}, r"t.parquet: row 2: no value in column 'a'"),
        ([" v", "u "], {}, [[0, 1], [1, 0]]),
        ([True, None], {"missing": "median"}, [[1], [float("nan")]]),
    ],
)
def test_columns_of_parquet(tmp_path: Path, column: list, options: dict, said: str | list) -> None:
    words = pyarrow.array(column).dictionary_encode() if isinstance(column[0], str) else column
    parquet.write_table(pyarrow.table({"a": words, "b": [1, 2], "y": [0, 1]}), tmp_path / "t.parquet")
    if isinstance(said, str):
        with pytest.raises(InputError, match=said):
            own.load(tmp_path / "t.parquet", partition="iid", **options)
    else:
        x = own.load(tmp_path / "t.parquet", partition="iid", **options).x
        assert np.array_equal(x[:, :-1], said, equal_nan=True)


class _Marked(pyarrow.ExtensionType):
    """A type of a program's own, stored as another."""

    def __init__(self, storage: pyarrow.DataType):
        super().__init__(storage, "test.marked")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pyarrow.DataType, _: bytes) -> _Marked:
        return cls(storage)


def test_types_of_programs_are_read_as_they_are_stored(tmp_path: Path) -> None:
    """Their texts have missing cells, too."""
    pyarrow.register_extension_type(_Marked(pyarrow.string()))
    try:
        for cells, said in (([" u", "NA"], r"row 2: no value in column 'a'"), ([b"u", b"v"], r"'a': expected numbers")):
            stored = pyarrow.array(cells)
            marked = pyarrow.ExtensionArray.from_storage(_Marked(stored.type), stored)
            parquet.write_table(pyarrow.table({"a": marked, "b": [1, 2], "y": [0, 1]}), tmp_path / "t.parquet")
            with pytest.raises(InputError, match=said):
                own.load(tmp_path / "t.parquet", partition="iid")
    finally:
        pyarrow.unregister_extension_type("test.marked")


def test_damaged_parquet_is_not_read_in_part(tmp_path: Path) -> None:
    """Of a group with fewer rows than the file claims, and of texts that are not UTF-8."""
    path = tmp_path / "t.parquet"
    rows = 7919  # as a varint behind its type: found nowhere else
    parquet.write_table(pyarrow.table({"x": range(rows), "y": [k % 2 for k in range(rows)]}), path)
    mark, content = b"\x16\xde\x7b", path.read_bytes()
    assert content.count(mark) == 4  # of the file, of two columns and of their group
    head, found, tail = content.rpartition(mark)
    path.write_bytes(head + found[:1] + b"\xc8\x01" + tail)  # 100
    with pytest.raises(InputError, match=r"t.parquet: damaged: expected 7,919 rows, as its last bytes say, got 100"):
        own.load(path, partition="iid")
    parquet.write_table(pyarrow.table({"x": ["caf\u00e9", "tea"], "y": [0, 1]}), path, compression="none")
    path.write_bytes(path.read_bytes().replace("caf\u00e9".encode(), b"caf\xe9\xe9"))
    with pytest.raises(InputError, match=r"t.parquet: texts that are not UTF-8"):
        own.load(path, partition="iid")


def test_row_numbers_of_pandas_are_left_out(tmp_path: Path) -> None:
    """A data frame has them if a filter went over its rows; other sites' need not."""
    for name, more in (("a", {}), ("b", {"__index_level_0__": [3, 7]})):
        parquet.write_table(pyarrow.table({"age": [1, 2], "y": [0, 1], **more}), tmp_path / f"{name}.parquet")
    dataset = own.load(tmp_path)
    assert dataset.features == ["age"]
    assert "left out: __index_level_0__, in which pandas stores the numbers of rows" in dataset.remarks
    assert own.load(tmp_path, exclude="__index_level_0__").remarks == ("target 'y': 2 classes: 0, 1",)
    parquet.write_table(pyarrow.table({"age": [1, 2], "y": [0, 1], **more}), tmp_path / "a.parquet")
    assert own.load(tmp_path, group="__index_level_0__").group.tolist() == [0, 1, 0, 1]


def test_a_column_of_another_type_is_refused_in_its_own_file(tmp_path: Path) -> None:
    for name, cell in (("a", 1.0), ("b", datetime(2026, 1, 1)), ("c", datetime(2026, 1, 1))):
        parquet.write_table(pyarrow.table({"when": [cell], "x": [1], "y": [0]}), tmp_path / f"{name}.parquet")
    for options in ({}, {"target": "when"}, {"target": "when", "task": "regression"}, {"group": "when"}):
        with pytest.raises(InputError, match=r"/b\.parquet: .*'when': expected [^,]*, got timestamp\[us\]") as refused:
            own.load(tmp_path, **options)
        assert str(refused.value).count(".parquet") == 1


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def test_blocks_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks cut a file of several clients, with cells of several lines, into the same samples."""
    rows = [(f"{k}", '"2"', f'"{"fm"[k % 2]}\n{k % 3}"', f"{k % 2}") for k in range(200)]
    write(tmp_path / "a.csv", rows)
    contents = []
    for size in (1 << 20, 100):
        monkeypatch.setattr(read, "MOST_BYTES", size)
        dataset = own.load(tmp_path / "a.csv", client_column="sex")
        assert dataset.rows is not None
        assert np.array_equal(dataset.x[:, 0], dataset.rows)
        order = np.argsort(dataset.rows)
        contents.append((dataset.x[order].tolist(), dataset.owner[order].tolist(), dataset.clients))
    assert contents[0] == contents[1]
    assert len(dataset.clients or ()) == 6


def test_from_python_missing_and_scaled(tmp_path: Path) -> None:
    x = np.array([[1, 10], [np.nan, 30], [3, 20]], np.float64)
    clients = {"a": (x, np.array([0, 1, 1])), "b": (x + 10, np.array([1, 0, 0]))}
    hpcfed.write_federation(tmp_path / "f.h5", clients, missing="mean", standardize="pooled")
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.train()[0][[1, 4], 0].tolist() == [7, 7]
        shards = Shards(federation, torch.float64, torch.device("cpu"), 1 << 20)
        seen = torch.cat([shards.client(k)[0] for k in range(2)])  # as a run sees them
        assert seen.mean(dim=0).tolist() == pytest.approx([0, 0], abs=1e-12)
        assert seen.std(dim=0, correction=0).tolist() == pytest.approx([1, 1])
    hpcfed.write_federation(tmp_path / "f.h5", clients, missing="drop", standardize="client", overwrite=True)
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.sizes.tolist() == [2, 2]
        assert np.array_equal(federation.train()[0], [[-1, -1], [1, 1]] * 2)
    clients["b"] = (np.full((2, 2), np.nan), np.array([0, 1]))
    with pytest.raises(InputError, match="client 'b': every row lacks a value"):
        hpcfed.write_federation(tmp_path / "g.h5", clients, missing="drop")
    with pytest.raises(InputError, match="client 'a': x: sample 1, entry 0: expected finite numbers, got NaN"):
        hpcfed.write_federation(tmp_path / "g.h5", clients)


WARD = Dataset(
    name="ward",
    task="classification",
    x=np.array([[1, 5, 0.1, 0], [3, 5, 0.1, 0], [5, 5, 0.1, 0], [10, 1, 0.2, 0], [20, 9, 0.4, 0]]),
    y=np.array([0, 1, 0, 1, 0]),
    num_classes=2,
    test_x=np.array([[30.0, 13, 0.3, 1], [3, 6, 0.2, 0]]),
    test_y=np.array([0, 1]),
    owner=np.array([0, 0, 0, 1, 1]),
    test_owner=np.array([1, 0]),
    features=["age", "bp", "dose", "sex=f"],
    indicators=(3,),
)


def test_tests_are_scaled_as_their_client_and_what_is_constant_there_as_all_are() -> None:
    """A mean of 0.1 three times is not 0.1: its deviation is of rounding alone."""
    done = split(WARD, None, None, 0, {})
    scaled = standardize(WARD, done, "client")
    pooled = WARD.x.std(axis=0)
    mean = np.array([[3, 5, 0.1, 0], [15, 5, 0.3, 0]])
    std = np.array([[np.sqrt(8 / 3), pooled[1], pooled[2], 1], [5, 4, 0.1, 1]])
    np.testing.assert_allclose(scaled.x, (WARD.x - mean[WARD.owner]) / std[WARD.owner], atol=1e-12)
    np.testing.assert_allclose(scaled.test_x, (WARD.test_x - mean[[1, 0]]) / std[[1, 0]], atol=1e-12)
    x = np.random.default_rng(0).integers(256, size=(5, 2, 3, 3)).astype(np.uint8)
    bytes_ = standardize(replace(WARD, x=x, test_x=None, test_owner=None, indicators=()), done, "pooled").normalization
    assert bytes_.mean == pytest.approx(x.mean(axis=(0, 2, 3)) / 255)
    assert bytes_.std == pytest.approx(x.std(axis=(0, 2, 3)) / 255)


def test_what_is_filled_is_recorded_and_no_level_is_made_up() -> None:
    gap, nothing = WARD.x.copy(), WARD.x.copy()
    gap[1, 0], nothing[:4, 2:] = np.nan, np.nan
    levels = replace(WARD, fill="median", categories=((2, 4),))
    training = np.array([True] * 4 + [False])
    assert fill(replace(levels, x=gap), training).source == {"filled": {"median": {"age": 5.0}}}
    with pytest.raises(InputError, match="column 'dose' has no value in any training row"):
        fill(replace(levels, x=nothing), training)


def test_a_preamble_is_blamed_in_the_table_that_has_it(tmp_path: Path) -> None:
    """Whichever of two tables it is: the other one has the columns."""
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.csv").write_text("Export of the ward, 2024\nage,bp,y\n1,2,0\n".replace(", 2024", ""))
        (tmp_path / f"{other}.csv").write_text("age,bp,y\n1,2,0\n2,1,1\n")
        with pytest.raises(InputError, match=rf"{name}\.csv: the first line is no header: .*before a row of 3 cells"):
            own.load(tmp_path)


def test_excels_line_of_the_separator_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sep=;\nage;bp;y\n1;2;0\n")
    (tmp_path / "b.csv").write_text("age,bp,y\n1,2,0\n2,1,1\n")
    with pytest.raises(InputError, match=r"a\.csv: the first line is Excel's, and no header: .*; remove it"):
        own.load(tmp_path)


def test_all_tables_of_another_encoding_are_named_at_once(tmp_path: Path, prepare: Callable[..., str]) -> None:
    """In their headers or later, packed or not; one alone with its place."""
    sites = tmp_path / "sites"
    sites.mkdir()
    (sites / "a.csv").write_text("alter,ort,y\n1,Köln,0\n2,Bonn,1\n", encoding="utf-8")
    (sites / "b.csv").write_text("alter,ort,y\n1,Köln,0\n2,Bonn,1\n", encoding="latin-1")
    assert "b.csv: not UTF-8: got " in (said := prepare("sites", 2))
    assert "save it as CSV UTF-8" in said
    for name in ("c", "d"):
        (sites / f"{name}.csv.gz").write_bytes(gzip.compress("alter,ort,y,größe\n1,Köln,0,1\n".encode("latin-1")))
    said = prepare("sites", 2)
    assert "sites: 3 tables are not UTF-8: got b.csv, c.csv.gz, d.csv.gz; save each as CSV UTF-8" in said


def test_codes_of_missing_cells_are_named(tmp_path: Path, prepare: Callable[..., str]) -> None:
    """Texts and numbers, in CSV and Parquet; a number that looks like a code is reported."""
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "a.csv").write_text("age,bp,y\n1,.,0\n-999,2,1\n3,missing,0\n4,5,1\n")
    table = pyarrow.table({"age": [5.0, -999.0, 7.0], "bp": [1, 2, -999], "y": [0, 1, 1]})
    parquet.write_table(table, tmp_path / "sites" / "b.parquet")
    assert "expected numbers, got '.'; if it is a missing cell, say so by --missing-codes '.'" in prepare("sites", 2)
    codes = "--missing-codes .,missing,-999"
    assert "a.csv: row 3: no value in column 'age'; missing values: age 2, bp 3 in 7 rows" in prepare(
        f"sites {codes}", 2
    )
    assert "dropped 5 rows" in prepare(f"sites {codes} --missing drop")
    said = prepare("sites --missing-codes .,missing --missing mean")
    assert "-999 among numbers from 0: age 2, bp 1; if these cells are missing, say so by --missing-codes=-999" in said
    (tmp_path / "sites" / "a.csv").write_text("age,bp,y\n1,-999.0,0\n-9.99e2,2,1\n3,-999.5,0\n4,5,1\n")
    (tmp_path / "sites" / "c.csv").write_text("age;bp;y\n1,5;-999,00;0\n2;7;1\n")
    table = pyarrow.table({"age": [5, -999], "bp": [Decimal("1.50"), Decimal("-999.00")], "y": ["0", "0999"]})
    parquet.write_table(table, tmp_path / "sites" / "b.parquet")
    said = prepare("sites --missing-codes=-999,999 --missing median")
    assert "missing values: age 2, bp 3 in 8 rows" in said
    assert "among numbers from 0" not in said
    with h5py.File(tmp_path / "f.h5") as file:
        assert json.loads(str(file.attrs["source"]))["missing_codes"] == ["-999", "999"]
        assert np.median([1.0, 3, 4, 5, 1.5, 2]) in file["train/x"][:, 0]


def test_codes_that_are_words_or_beyond_floats(tmp_path: Path) -> None:
    """``true`` is no 1; of whole numbers that float64 has not, only the one named is missing."""
    table = pyarrow.table({"x": [1, 2**60, 2**60 + 1], "y": [0, 1, 1]})
    parquet.write_table(table, tmp_path / "t.parquet")
    whole = own.load(tmp_path / "t.parquet", partition="iid", missing_codes="true,1e400")
    assert not np.isnan(whole.x).any()
    some = own.load(tmp_path / "t.parquet", partition="iid", missing_codes=str(2**60 + 1), missing="mean")
    assert np.isnan(some.x[:, 0]).tolist() == [False, False, True]


@pytest.mark.soak
def test_tables_of_many_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths are sizes: four times the columns take some four times as long; squared they would take 16."""
    rng = np.random.default_rng(0)
    seconds = {}
    for width in (10, 600, 2_400):  # the first one imports what reads tables
        folder = tmp_path / str(width)
        folder.mkdir()
        header = ",".join([*(f"g{k}" for k in range(width)), "y"])
        for site in "abc":
            rows = rng.normal(size=(12, width)).round(3)
            lines = [",".join([*map(str, row), str(int(row[0] > 0))]) for row in rows.tolist()]
            (folder / f"{site}.csv").write_text("\n".join([header, *lines, ""]))
        started = time.process_time()
        dataset = own.load(folder)
        seconds[width] = time.process_time() - started
        assert dataset.x.shape == (36, width)
    assert seconds[2_400] < 10 * seconds[600]
    said: list[str] = []
    monkeypatch.setattr(progress, "PERIOD", 0.0)
    with progress.shown(said.append):
        own.load(tmp_path / "600")
    assert said[0] == "reading a.csv: row 1, 601 columns"
