"""CINIC-10: folder and archive make the same data, and no member of an archive is trusted."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import cinic
from hpcfed.errors import InputError
from tests.data import raw_formats as raw

IMAGES = 10 * raw.CINIC_PER_CLASS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "unpacked").mkdir()
    return tmp_path / "unpacked"


@pytest.mark.parametrize("valid", [False, True])
def test_folder_and_archive_are_the_same(tmp_path: Path, folder: Path, valid: bool) -> None:
    images = raw.write_cinic(folder)
    archive = tmp_path / cinic.ARCHIVE
    raw.pack_cinic(folder, archive)
    train = [name for part in ("train", "valid")[: 1 + valid] for name in sorted(images) if name.startswith(part)]
    test = sorted(name for name in images if name.startswith("test"))
    for source in (folder, archive, tmp_path):
        dataset = cinic.load(source, valid=valid)
        np.testing.assert_array_equal(dataset.x, [images[name] for name in train])
        np.testing.assert_array_equal(dataset.test_x, [images[name] for name in test])
        assert dataset.y.tolist() == [cinic.CLASSES.index(name.split("/")[1]) for name in train]
        assert len(dataset.x) == IMAGES * (1 + valid)
    assert dataset.remarks == ("md5: not the published files of CINIC-10: CINIC-10.tar.gz",)


def test_grey_images_become_colours(folder: Path) -> None:
    from PIL import Image

    raw.write_cinic(folder)
    grey = np.arange(1024, dtype=np.uint8).reshape(32, 32)
    Image.fromarray(grey).save(folder / "train/airplane/a.png")
    np.testing.assert_array_equal(cinic.load(folder).x[0], [grey] * 3)


def test_missing_parts_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match=r"missing CINIC-10.tar.gz, or the folders train/, test/"):
        cinic.load(folder)
    raw.write_cinic(folder)
    for path in (folder / "test/dog").iterdir():
        path.unlink()
    (folder / "test/dog").rmdir()
    with pytest.raises(InputError, match="missing the folder dog/"):
        cinic.load(folder)


def test_images_of_others(folder: Path) -> None:
    raw.write_cinic(folder)
    path = folder / "train/frog/a.png"
    good = raw.png(np.zeros((3, 32, 32), np.uint8))
    jpeg = io.BytesIO()
    from PIL import Image

    Image.new("RGB", (32, 32)).save(jpeg, "JPEG")
    for content, message in (
        (raw.png(np.zeros((3, 32, 31), np.uint8)), "expected 32 × 32, got 31 × 32"),
        (good[:60], "a damaged PNG"),
        (b"", "a damaged PNG"),
        (jpeg.getvalue(), "a damaged PNG"),
        (good + bytes(1 << 16), "an image too large"),
        (good[:16] + b"\x7f\xff\xff\xff" * 2 + good[24:], "PNG|another size"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            cinic.load(folder)


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (member("/etc/train/dog/a.png"), "a name that leads out of it"),
        (member("train/../../dog/a.png"), "a name that leads out of it"),
        (member("train/dog/a.png", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "a link or a device"),
        (member("train/dog/a.png", type=tarfile.LNKTYPE, linkname="train/dog/b.png"), "a link or a device"),
        (member("train/dog/a.png", type=tarfile.CHRTYPE), "a link or a device"),
        (member("train/dog/a.png", size=2**33), "damaged"),
        (member("README", size=2**60), "truncated or damaged archive|no images|can't be read"),
        (member("notes/dog/a.png"), "no images of the part train"),
    ],
)
def test_members_are_not_trusted(tmp_path: Path, info: tarfile.TarInfo, message: str) -> None:
    archive = tmp_path / cinic.ARCHIVE
    with tarfile.open(archive, "w:gz", format=tarfile.GNU_FORMAT) as tar:
        # The header alone, with no data after it, of any claimed size.
        tar.fileobj.write(info.tobuf(tarfile.GNU_FORMAT, tar.encoding, tar.errors))
    with pytest.raises(InputError, match=message):
        cinic.load(archive)
    assert sorted(path.name for path in tmp_path.iterdir()) == [cinic.ARCHIVE]


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, 0.99])
def test_cut_archives(tmp_path: Path, folder: Path, keep: float) -> None:
    raw.write_cinic(folder)
    archive = tmp_path / cinic.ARCHIVE
    raw.pack_cinic(folder, archive)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(keep * len(content)) if keep < 1 else int(keep)])
    with pytest.raises(InputError, match=r"truncated or damaged archive|can't be read"):
        cinic.load(archive)
