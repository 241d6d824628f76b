"""`prepare --list`: its text, and its check of files against the published checksums."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from data_prep import spool
from data_prep.catalogue import SOURCES
from data_prep.sources.files import Origin, Published, examine, locate
from data_prep.spool import Spool, UnitImages, alike, spooled
from hpcfed.cli import prepare
from hpcfed.data import content
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from tests.data import raw_formats as raw

PUBLISHED = {name: source for name, source in SOURCES.items() if source.origin.url}


def test_the_list_names_every_source_and_checksum() -> None:
    done = CliRunner().invoke(prepare.command, ["--list"])
    assert done.exit_code == 0
    for name, source in SOURCES.items():
        assert re.search(rf"^{name} +{re.escape(source.origin.title)}$", done.output, re.MULTILINE), name
        assert source.origin.title
        for file in source.origin.files:
            size = "" if file.size is None else f"{file.size:,} bytes"
            lines = [line for line in done.output.splitlines() if line.strip().startswith(f"{file.name}: ")]
            assert any(all(fact in line for fact in (size, file.md5, file.sha256)) for line in lines), file
    for checksum in ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6ee4d0c996905fe93221de577967a372", "170,052,171 bytes"):
        assert checksum in done.output


@pytest.mark.parametrize("name", PUBLISHED)
def test_checksums_are_well_formed_and_an_empty_folder_says_what_is_missing(name: str, tmp_path: Path) -> None:
    origin = PUBLISHED[name].origin
    assert origin.url.startswith("https://")
    assert origin.layout
    for file in origin.files:
        assert re.fullmatch(r"([0-9a-f]{32})?", file.md5)
        assert re.fullmatch(r"([0-9a-f]{64})?", file.sha256)
    with pytest.raises(InputError, match=r"missing|no json files|not one text file") as caught:
        PUBLISHED[name].load(raw=tmp_path)
    assert "--list" in str(caught.value) or "--raw" in str(caught.value)


def test_files_are_compared_with_what_is_published(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"defg")
    md5, sha256 = hashlib.md5(b"abc").hexdigest(), hashlib.sha256(b"defg").hexdigest()
    right = Published("a", 3, md5), Published("b", sha256=sha256)
    paths = [tmp_path / "a", tmp_path / "b"]
    entries, verdict = examine(Origin("t", files=right), paths, title="T")
    assert entries == [
        {"name": "a", "sha256": hashlib.sha256(b"abc").hexdigest()},
        {"name": "b", "sha256": sha256},
    ]
    assert verdict == "md5: all 2 files are the published T"
    for wrong, message in (
        (Published("a", 3, "0" * 32), "md5: not the published files of T: a"),
        (Published("a", 4), "md5: not the published files of T: a"),
        (Published("a", sha256="0" * 64), "md5: not the published files of T: a"),
        (Published("a", 3), "md5: none is published for a; sha256 goes into the federation file"),
    ):
        assert examine(Origin("t", files=(wrong, right[1])), paths, title="T")[1] == message


def test_names_are_looked_for_in_the_unpacked_folder_first(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "a", tmp_path / "in/a", tmp_path / "b.gz"):
        path.touch()
    wanted = {"a": ("a",), "b": ("b", "b.gz")}
    assert locate(tmp_path, wanted, inside="in") == {"a": tmp_path / "in/a", "b": tmp_path / "b.gz"}
    with pytest.raises(InputError, match=r"missing c\[.gz\], d; put them into that folder"):
        locate(tmp_path, {**wanted, "c": ("c", "c.gz"), "d": ("d",)})


def test_a_spool_gives_back_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "BLOCK_BYTES", 20)
    rows = np.arange(60, dtype=np.int16).reshape(10, 3, 2)
    kept = Spool((3, 2), "i2")
    for part in (rows[:4], rows[4:4], rows[4:].transpose(0, 2, 1).transpose(0, 2, 1)):
        kept.append(part)
    mapped = kept.finish()
    np.testing.assert_array_equal(mapped, rows)
    assert not mapped.flags.writeable
    assert not mapped.flags.owndata
    np.testing.assert_array_equal(spooled(mapped, np.int16, np.array([9, 0, 9])).finish(), rows[[9, 0, 9]])
    assert Spool((3, 2), "i2").finish().shape == (0, 3, 2)


def test_images_become_wider_when_they_must() -> None:
    whole, mixed = UnitImages((2,)), UnitImages((2,))
    for images in (whole, mixed):
        images.append(np.array([[0.0, 1.0], [7 / 255, 128 / 255]]))
    mixed.append(np.array([[0.5, 0.25]]))
    mixed.append(np.array([[1 / 255, 0.0]]))
    first, second = whole.finish(), mixed.finish()
    assert first.tolist() == [[0, 255], [7, 128]]
    third = np.float32([[0, 1], [7 / 255, 128 / 255], [0.5, 0.25], [1 / 255, 0]])
    np.testing.assert_array_equal(second, third)
    one, other = alike(first, second)
    assert one.dtype == other.dtype == np.float32
    np.testing.assert_array_equal(one, third[:2])
    assert spool.alike(first, first)[0].dtype == np.uint8


def test_natural_clients_keep_names_tests_and_vocabulary(tmp_path: Path) -> None:
    raw.write_leaf(tmp_path / "train/a.json", raw.leaf_images(1))
    raw.write_leaf(tmp_path / "test/a.json", raw.leaf_images(2, raw.WRITERS[::-1]))
    path = tmp_path / "f.h5"
    done = CliRunner().invoke(prepare.command, ["femnist", "--raw", str(tmp_path), "-o", str(path)])
    assert done.exit_code == 0, done.output
    with Federation.open(path) as federation:
        assert [federation.client_name(k) for k in range(3)] == list(raw.WRITERS)
        assert federation.sizes.tolist() == [2, 3, 4]
        assert np.diff(federation.test_offsets).tolist() == [4, 3, 2]
        labels = raw.leaf_images(2, raw.WRITERS[::-1])[raw.WRITERS[1]][1]
        assert federation.test(*federation.test_offsets[1:3])[1].tolist() == labels
