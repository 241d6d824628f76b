"""FLamby's ISIC 2019 and Camelyon16, from generated files of the published layout and shapes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.dataset import Dataset
from data_prep.sources import flamby_camelyon, flamby_isic
from data_prep.split import split
from data_prep.write import write
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError

HEIGHTS = (224, 301, 225, 200)
SLIDES = {
    "normal_001": 0,
    "Normal_101": 1,
    "normal_086": 0,
    "tumor_001": 0,
    "tumor_071": 1,
    "test_001": 0,
    "test_002": 1,
}
TUMOURS = ("tumor_001", "tumor_071", "test_002")
WIDTH = 2048


def write_rows(path: Path, *rows: Sequence[object]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def prepared(dataset: Dataset, path: Path) -> Federation:
    write(path, dataset, **vars(split(dataset, None, None, 0, {})))
    return Federation.open(path)


@pytest.fixture
def isic(tmp_path: Path) -> Path:
    """A dozen images, 224 pixels wide and of several heights, of six centres; every fourth is for testing."""
    folder = tmp_path / "raw" / flamby_isic.INSIDE
    (folder / flamby_isic.FOLDER).mkdir(parents=True)
    rng, rows = np.random.default_rng(0), []
    for k in range(24):
        image = rng.integers(256, size=(HEIGHTS[k % 4], 224, 3), dtype=np.uint8)
        Image.fromarray(image).save(folder / flamby_isic.FOLDER / f"ISIC_{k:07}.jpg")
        part = "test" if k % 4 == 3 else "train"
        one_hot = [float(k % 8 == label) for label in range(9)]
        rows.append([f"ISIC_{k:07}", *one_hot, k % 8, k // 4, part, f"{part}_{k // 4}"])
    write_rows(
        folder / "train_test_split", ["image", *flamby_isic.CLASSES, "UNK", "target", "center", "fold", "fold2"], *rows
    )
    return tmp_path / "raw"


def test_lesions_are_cropped_at_their_centre(isic: Path, tmp_path: Path) -> None:
    with prepared(flamby_isic.load(isic), tmp_path / "isic.h5") as federation:
        assert federation.client_names() == list(flamby_isic.CENTRES)
        assert (federation.sizes.tolist(), federation.num_test) == ([3] * 6, 6)
        assert federation.feature_shape == (3, 200, 200)
        assert federation.normalization == flamby_isic.NORMALIZATION
        x, y = federation.client(2)
        assert y.tolist() == [0, 1, 2]
        path = isic / flamby_isic.INSIDE / flamby_isic.FOLDER / "ISIC_0000009.jpg"
        assert np.array_equal(x[1], np.asarray(Image.open(path))[50:250, 12:212].transpose(2, 0, 1))
        assert federation.test(5, 6)[1] == [7]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("ISIC_0000003", "ISIC_0000099", "1 of 24 missing, ISIC_0000099.jpg first"),
        ("ISIC_0000003", "../x", "1 of 24 missing"),
        ("train_5", "train_6", "centre 6, of 6"),
        ("train_5", "valid_5", "'valid_5' is neither train_K nor test_K"),
        (",7,1,test,", ",8,1,test,", "row 8: target '8' is none of 0 … 7"),
    ],
)
def test_damaged_splits_are_refused(old: str, new: str, says: str, isic: Path) -> None:
    path = isic / flamby_isic.INSIDE / "train_test_split"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=says.replace("(", r"\(")):
        flamby_isic.load(isic)


def test_images_that_do_not_fit_are_refused(isic: Path) -> None:
    path = isic / flamby_isic.INSIDE / flamby_isic.FOLDER / "ISIC_0000003.jpg"
    Image.new("RGB", (224, 199)).save(path)
    with pytest.raises(InputError, match=r"ISIC_0000003\.jpg.*200 × 200 or larger.*3 × 199 × 224"):
        flamby_isic.load(isic)
    path.write_bytes(b"no image")
    with pytest.raises(InputError, match=r"ISIC_0000003\.jpg: no image, or damaged"):
        flamby_isic.load(isic)


def features(name: str) -> np.ndarray:
    rng = np.random.default_rng(len(name) + sum(map(ord, name)))
    return rng.random((int(rng.integers(20, 60)), WIDTH), np.float32)


@pytest.fixture
def camelyon(tmp_path: Path) -> Path:
    """Seven slides, of which one was withdrawn, in FLamby's layout."""
    folder = tmp_path / "raw"
    (folder / "metadata").mkdir(parents=True)
    for name in SLIDES:
        np.save(folder / f"{name}.tif.npy", features(name))
    write_rows(
        folder / "labels.csv",
        ["filenames", "tumor"],
        *([f"{name.lower()}.tif.npy", name in TUMOURS] for name in SLIDES),
    )
    rows = [[int(name in TUMOURS), float(site), f"{name.lower()}.tif"] for name, site in SLIDES.items()]
    write_rows(folder / "metadata" / "metadata.csv", ["label", "hospital_corrected", "slide_name"], *rows)
    return folder


def test_slides_are_bags_of_tiles_in_flambys_order(camelyon: Path, tmp_path: Path) -> None:
    with prepared(flamby_camelyon.load(camelyon, tiles=40), tmp_path / "camelyon.h5") as federation:
        assert federation.client_names() == ["RUMC", "UMCU"]
        assert (federation.sizes.tolist(), federation.num_test) == ([2, 2], 2)
        assert federation.feature_shape == (40, WIDTH)
        x, y = federation.client(1)
        assert y.tolist() == [[0], [1]]
        for found, name in zip(x, ("Normal_101", "tumor_071"), strict=True):
            whole = features(name)
            chosen = np.random.default_rng(42).permutation(len(whole))[:40]
            assert np.array_equal(found[: len(chosen)], whole[chosen])
            assert not found[len(chosen) :].any()
        assert federation.test(0, 2)[1].tolist() == [[0], [1]]


def test_missing_slides_are_refused_or_left_out(camelyon: Path) -> None:
    (camelyon / "tumor_001.tif.npy").unlink()
    with pytest.raises(InputError, match=r"1 of 6 missing, tumor_001\.tif\.npy first; add them, or --incomplete"):
        flamby_camelyon.load(camelyon, tiles=4)
    dataset = flamby_camelyon.load(camelyon, tiles=4, incomplete=True)
    assert (len(dataset.x), "5 of 6 slides" in dataset.remarks) == (3, True)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("labels.csv", "filenames,tumor\nnormal_001.tif.npy,no\n", "tumor 'no' is neither True nor False"),
        ("metadata/metadata.csv", "slide_name,hospital_corrected\nnormal_001.tif,2\n", "'2' is neither 0 nor 1"),
        ("metadata/metadata.csv", "slide_name,hospital_corrected\nnormal_001.tif,0\n", "no hospital of normal_101"),
        ("test_001.tif.npy", "no array", r"test_001\.tif\.npy: no \.npy file of numbers"),
        ("test_001.tif.npy", np.zeros((3, 7), np.float32), r"expected 2048 features, as normal_001.*got 7"),
        ("test_001.tif.npy", np.full((3, WIDTH), np.nan, np.float32), "a feature is not finite"),
        ("test_001.tif.npy", np.zeros(7), r"numbers \(tiles, features\), got float64 \(7,\)"),
        ("test_001.tif.npy", np.array([{}]), r"no \.npy file of numbers"),
    ],
)
def test_damaged_slides_are_refused(file: str, content: str | np.ndarray, says: str, camelyon: Path) -> None:
    path = camelyon / file
    if isinstance(content, str):
        path.write_text(content)
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(InputError, match=says):
        flamby_camelyon.load(camelyon, tiles=4)
