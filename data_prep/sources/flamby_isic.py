"""FLamby's ISIC 2019: skin lesions of six centres, from the images that its scripts have resized.

Each image, at least 200 pixels wide and high, is cropped at its centre, as FLamby's test images are. FLamby also crops,
turns and colours its training images at random; a recipe's ``local.augment`` can crop and flip.

References: Ogier du Terrail et al., "FLamby", 2022; Tschandl, Rosendahl, Kittler, "The HAM10000 dataset", Scientific
Data 2018; Codella et al., "Skin lesion analysis toward melanoma detection", ISBI 2018; Combalia et al., "BCN20000",
arXiv 1908.02288.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import AGAIN, DataSource, Origin, Published, damaged, examine, locate
from data_prep.sources.flamby import URL, fold, table
from data_prep.sources.own_images import pixels
from data_prep.spool import Spool
from hpcfed.data.federation import Standardization
from hpcfed.errors import InputError

FOLDER, SPLIT, INSIDE = "ISIC_2019_Training_Input_preprocessed", "train_test_split", "fed_isic2019"
ORIGIN = Origin(
    "ISIC 2019 at six centres, as FLamby splits it: 23,247 skin lesions of 8 classes, 200 × 200 (2.8 GB)",
    URL,
    (Published(SPLIT),),
    f"{SPLIT} of FLamby's repository, and the folder {FOLDER} that its resize_images.py writes",
)
CENTRES = ("BCN", "HAM vidir molemax", "HAM vidir modern", "HAM rosendahl", "MSK", "HAM vienna dias")
CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
NORMALIZATION = Standardization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""ImageNet's, which FLamby takes."""
SIDE = 200


def load(raw: str | Path) -> Dataset:
    """Return the images of FLamby's split: x (n, 3, 200, 200) uint8, y (n,), by centre, with its test images.

    Raises:
        InputError: the split or an image is missing or damaged, or an image is smaller than the crop.
    """
    path = locate(Path(raw), {SPLIT: [SPLIT]}, inside=INSIDE)[SPLIT]
    rows = table(path, "image", "target", "fold2")
    split = [fold(path, row["fold2"]) for row in rows]
    tests, owner = np.array([test for test, _ in split]), np.array([centre for _, centre in split])
    y = np.array([_class(path, k, row["target"]) for k, row in enumerate(rows)], np.uint8)
    if owner.max() >= len(CENTRES):
        raise damaged(path, f"centre {owner.max()}, of {len(CENTRES)}")
    images = _found(path.parent / FOLDER, [row["image"] for row in rows])
    entries, verdict = examine(ORIGIN, [path], title="ISIC 2019's split")
    numbers = np.arange(len(rows))
    return Dataset(
        name="flamby-isic2019",
        task="classification",
        x=_cropped(images, numbers[~tests]),
        y=y[~tests],
        num_classes=len(CLASSES),
        test_x=_cropped(images, numbers[tests]),
        test_y=y[tests],
        normalization=NORMALIZATION,
        source={"files": entries, "classes": list(CLASSES), "crop": f"{SIDE} × {SIDE} at the centre"},
        owner=owner[~tests],
        test_owner=owner[tests],
        clients=CENTRES[: int(owner.max()) + 1],
        rows=numbers[~tests],
        remarks=(verdict, "cropped at the centre; FLamby also augments its training images"),
    )


def _class(path: Path, row: int, text: str) -> int:
    if text not in map(str, range(len(CLASSES))):
        raise damaged(path, f"row {row + 1}: target {text[:20]!r} is none of 0 … {len(CLASSES) - 1}")
    return int(text)


def _found(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the images' paths.

    Raises:
        InputError: naming the first of those that are missing.
    """
    if not folder.is_dir():
        raise InputError(f"missing the folder {FOLDER}", where=str(folder.parent), remedy=f"{ORIGIN.layout}")
    paths = [folder / f"{name}.jpg" for name in names]
    missing = [path.name for path in paths if path.parent != folder or not path.is_file()]
    if missing:
        got = f"{len(missing):,} of {len(paths):,} missing, {missing[0]} first"
        raise InputError("images of the split", where=str(folder), got=got, remedy=AGAIN)
    return paths


def _cropped(paths: Sequence[Path], numbers: np.ndarray) -> np.ndarray:
    """Return some of the images, cropped at their centre, (m, 3, 200, 200) uint8, mapped from a temporary file."""
    images = Spool((3, SIDE, SIDE), np.uint8)
    for number in numbers.tolist():
        where = str(paths[number])
        image = pixels(paths[number], where, deep=False)
        top, left = ((size - SIDE) // 2 for size in image.shape[1:])
        if len(image) != 3 or min(top, left) < 0:
            expected, got = f"in colour, {SIDE} × {SIDE} or larger", " × ".join(map(str, image.shape))
            raise InputError("an image", where=where, expected=expected, got=got, remedy="resize it as FLamby does")
        images.append(image[None, :, top : top + SIDE, left : left + SIDE])
    return images.finish()


SOURCES = {"flamby-isic2019": DataSource(load, ORIGIN)}
