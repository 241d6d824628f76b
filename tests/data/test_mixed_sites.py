"""Folders of sites in which one file is of another kind: all that is not read is named, whatever the layout."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from data_prep.dataset import Dataset
from data_prep.sources import cinic, leaf_json, own, text
from hpcfed.errors import InputError

TABLE = "age,bp,y\n1,2,0\n2,1,1\n3,2,0\n4,1,1\n"
Write = Callable[[Path], None]


def text_of(path: Path) -> None:
    path.write_text(TABLE)


def packed(pack: Callable[[bytes], bytes]) -> Write:
    return lambda path: path.write_bytes(pack(TABLE.encode())) and None


def columns(path: Path) -> None:
    parquet.write_table(pyarrow.table({"age": [1, 2, 3, 4], "bp": [2, 1, 2, 1], "y": [0, 1, 0, 1]}), path)


def arrays(path: Path) -> None:
    np.savez(path, x=np.arange(8.0).reshape(4, 2), y=np.array([0, 1, 0, 1]))


def pair(path: Path) -> None:
    np.save(path, np.arange(8.0).reshape(4, 2))
    np.save(path.with_name(path.name.replace(".x.", ".y.")), np.array([0, 1, 0, 1]))


def junk(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 no table")


def images(folder: Path) -> None:
    for number, kind in enumerate(("ill", "well")):
        (folder / kind).mkdir(parents=True)
        for k in range(2):
            Image.fromarray(np.full((4, 4), 50 * number + k, np.uint8)).save(folder / kind / f"{k}.png")


LAYOUTS: dict[str, tuple[str, Write]] = {
    "text": (".csv", text_of),
    "parquet": (".parquet", columns),
    "arrays": (".npz", arrays),
    "pairs": (".x.npy", pair),
    "images": ("", images),
}
READ = {
    ".csv": text_of,
    ".CSV": text_of,
    ".csv.gz": packed(gzip.compress),
    ".csv.bz2": packed(bz2.compress),
    ".csv.xz": packed(lzma.compress),
    ".parquet": columns,
}
"""Endings of a third site's table, which is read."""
NOT_READ = [
    ".xlsx",
    ".xls",
    ".sav",
    ".sas7bdat",
    ".dta",
    ".txt",
    ".json",
    ".rds",
    ".csv.zip",
    ".feather",
    ".y.npy",
    ".dcm",
]
"""Endings of a third site that is none for hpcfed."""
CLUTTER = [
    "._south.csv",
    ".south.csv",
    "~$south.xlsx",
    "Thumbs.db",
    "desktop.ini",
    ".DS_Store",
    "._0.png",
    ".gitignore",
]


def folder_of(tmp_path: Path, layout: str) -> Path:
    ending, write = LAYOUTS[layout]
    for site in ("north", "west"):
        write(tmp_path / f"{site}{ending}")
    return tmp_path


def load(raw: Path) -> Dataset:
    return own.load(raw)


def left_out(dataset: Dataset) -> list[str]:
    return [remark for remark in dataset.remarks if remark.startswith("left out:")]


@pytest.mark.parametrize("ending", READ)
@pytest.mark.parametrize("layout", ["text", "parquet"])
def test_tables_are_read_packed_and_mixed(layout: str, ending: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, layout)
    READ[ending](folder / f"south{ending}")
    dataset = load(folder)
    assert list(dataset.clients or ()) == ["north", "south", "west"]
    assert not left_out(dataset)
    assert np.array_equal(dataset.x[dataset.owner == 0], dataset.x[dataset.owner == 1])


@pytest.mark.parametrize("ending", NOT_READ)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_read_is_named_in_a_line(layout: str, ending: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, layout)
    junk(folder / f"south{ending}")
    dataset = load(folder)
    assert list(dataset.clients or ()) == ["north", "west"]
    (line,) = left_out(dataset)
    name = Path(ending).suffix if layout == "images" else f"south{ending}"
    assert line.startswith(f"left out: 1 file: {name}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_systems_leave_is_no_site_and_no_class(layout: str, tmp_path: Path) -> None:
    """Nor is it worth a line: hidden files, and what macOS and Windows put into every folder and archive."""
    folder = folder_of(tmp_path, layout)
    places = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for place in places:
        for name in CLUTTER:
            junk(place / name)
        (place / "__MACOSX" / "north").mkdir(parents=True)
        junk(place / "__MACOSX" / "north" / "._0.png")
    dataset = load(folder)
    assert list(dataset.clients or ()) == ["north", "west"]
    assert not left_out(dataset)
    assert dataset.num_classes == 2


def test_tests_of_clients_are_looked_through_too(tmp_path: Path) -> None:
    folder_of(tmp_path, "text")
    (tmp_path / "test").mkdir()
    text_of(tmp_path / "test" / "north.csv")
    junk(tmp_path / "test" / "west.xlsx")
    junk(tmp_path / "test" / "Thumbs.db")
    assert left_out(load(tmp_path))[0].startswith("left out: 1 file: test/west.xlsx; sites are read from .npz")


def test_a_table_in_pieces_is_whole(tmp_path: Path) -> None:
    for number in (0, 2):
        columns(tmp_path / f"north-{number:05}-of-00003.parquet")
    with pytest.raises(InputError, match="north: 1 piece of 3 not there: expected north-00001-of-00003"):
        load(tmp_path)


def test_where_nothing_is_read_the_files_are_named(tmp_path: Path) -> None:
    junk(tmp_path / "north.xlsx")
    with pytest.raises(InputError, match=r"no client's file is here: .*, got north\.xlsx"):
        load(tmp_path)


def test_damaged_packed_tables_are_named(tmp_path: Path) -> None:
    for name, content in (("cut.csv.gz", gzip.compress(TABLE.encode() * 999)[:-20]), ("no.csv.gz", b"age,y\n1,0\n")):
        folder = folder_of(tmp_path / name, "text") if (tmp_path / name).mkdir() is None else tmp_path
        (folder / f"south-{name}").write_bytes(content)
        with pytest.raises(InputError, match=f"south-{name}"):
            load(folder)


def test_other_sources_skip_clutter(tmp_path: Path) -> None:
    junk(tmp_path / "._all_data.json")
    (tmp_path / "all_data.json").write_text("{}")
    assert leaf_json.files(tmp_path)[0] == [tmp_path / "all_data.json"]
    (tmp_path / "play.txt").write_text("x")
    junk(tmp_path / "._play.txt")
    assert text._text_file(tmp_path) == tmp_path / "play.txt"
    for kind in cinic.CLASSES:
        images(tmp_path / "cinic" / kind)
        shutil.move(tmp_path / "cinic" / kind / "ill" / "0.png", tmp_path / "cinic" / kind / "0.png")
        junk(tmp_path / "cinic" / kind / "._0.png")
    assert {path.name for _, path in cinic._of_folder(tmp_path / "cinic")} == {"0.png"}


def test_a_feature_in_another_unit_is_asked_about(tmp_path: Path, command) -> None:
    """Height in metres at one site of three, creatinine in µmol/l at another; age differs, and is no other unit."""
    rng, folder = np.random.default_rng(3), tmp_path / "sites"
    folder.mkdir()
    for site, height, creatinine, age in (("a", 1, 1, 60), ("b", 0.01, 1, 55), ("c", 1, 88.4, 40)):
        rows = [
            f"{height * rng.normal(170, 9):.4f},{creatinine * rng.normal(1, 0.2):.4f},{rng.normal(age, 12):.0f},7,{k}"
            for k in (0, 1) * 20
        ]
        (folder / f"{site}.csv").write_text("\n".join(["height,creatinine,age,constant,y", *rows]) + "\n")
    done = command(["prepare", "own", "--raw", folder, "-o", "sites.h5"], tmp_path)
    asked = [line.strip() for line in done.stdout.splitlines() if "another unit" in line]
    assert [line.partition(":")[0] for line in asked] == ["'height'", "'creatinine'"], done.stdout
    assert "b (1.7" in asked[0]
    assert "c (8" in asked[1]
