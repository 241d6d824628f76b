"""EMNIST, as four IDX files or as one MATLAB file: letters, byclass, bymerge, balanced, digits.

Images are stored column by column in both; here they stand upright. Labels of the letters count from 1 in the files
and from 0 here. FedDyn's "EMNIST-L" is the letters with the first ten classes only.

Reference: Cohen, Afshar, Tapson, van Schaik, "EMNIST: an extension of MNIST to handwritten letters", arXiv 1702.05373.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources import idx, matlab
from data_prep.sources.files import DataSource, Origin, Published, check_folder, examine
from data_prep.spool import spooled
from hpcfed.data.content import rows_per_block
from hpcfed.data.federation import Standardization
from hpcfed.errors import InputError, nearest

URL = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
SIDE = 28
NORMALIZATIONS = ("none", "feddyn")
# Samples to train and to test on, classes, and the first label, as the paper's table II and the files have them.
SPLITS = {
    "letters": (124_800, 20_800, 26, 1),
    "byclass": (697_932, 116_323, 62, 0),
    "bymerge": (697_932, 116_323, 47, 0),
    "balanced": (112_800, 18_800, 47, 0),
    "digits": (240_000, 40_000, 10, 0),
}


def family(split: str) -> idx.Family:
    """Return the member of the MNIST family that a split of EMNIST is."""
    num_train, num_test, num_classes, first_label = SPLITS[split]
    stem = f"emnist-{split}"
    title = f"EMNIST {split}: {num_train:,} and {num_test:,} characters of {num_classes} classes, 28 × 28"
    zipped = Published(
        "gzip.zip",
        561_753_746,
        "58c8d27c78d21e728a6bc7b3cc06412e",
        unpack=f"take out gzip/{stem}-{{train,test}}-{{images-idx3,labels-idx1}}-ubyte.gz",
    )
    matlab_zip = Published("matlab.zip", unpack=f"or take out matlab/{stem}.mat")
    return idx.Family(
        name=stem,
        title=f"EMNIST {split}",
        origin=Origin(title, URL, (zipped, matlab_zip), f"the four IDX files, gzipped or not; or {stem}.mat"),
        stems={part: f"{stem}-{part.replace('t10k', 'test')}" for part in idx.PARTS},
        num_classes=num_classes,
        first_label=first_label,
        transposed=True,
    )


def load(folder: str | Path, split: str) -> Dataset:
    """Read a split: x (n, 1, 28, 28) uint8, y (n,) uint8; from ``emnist-<split>.mat`` if there are no IDX files.

    Raises:
        InputError: a file is missing or damaged, or labels do not fit the split.
    """
    folder, kin = Path(folder), family(split)
    check_folder(folder)
    path = folder / f"{kin.name}.mat"
    has_idx = any((folder / name).is_file() for part in idx.PARTS for name in idx.names(part, kin))
    return _from_matlab(path, kin) if path.is_file() and not has_idx else idx.load(folder, kin)


def load_letters(raw: str | Path, *, classes: int = SPLITS["letters"][2], normalization: str = "none") -> Dataset:
    """Read the letters, and keep the first `classes` of them: 10 makes FedDyn's set of A to J.

    `normalization` ``feddyn``, as its code does: by mean and deviation of all pixels of the training images kept.

    Raises:
        InputError: as `load`, more classes are asked for than there are, or another normalization.
    """
    if normalization not in NORMALIZATIONS:
        remedy = nearest(normalization, NORMALIZATIONS)
        raise InputError("normalization of emnist-letters", got=repr(normalization), remedy=remedy)
    dataset = _first_letters(load(raw, "letters"), classes)
    return dataset if normalization == "none" else replace(dataset, normalization=_of_pixels(dataset.x))


def _first_letters(dataset: Dataset, classes: int) -> Dataset:
    if classes > (dataset.num_classes or 0):
        raise InputError("classes of emnist-letters", expected=f"at most {dataset.num_classes}", got=str(classes))
    if classes == dataset.num_classes or dataset.test_x is None or dataset.test_y is None:
        return dataset
    train, test = np.flatnonzero(dataset.y < classes), np.flatnonzero(dataset.test_y < classes)
    return replace(
        dataset,
        x=spooled(dataset.x, np.uint8, train).finish(),
        y=dataset.y[train],
        num_classes=classes,
        test_x=spooled(dataset.test_x, np.uint8, test).finish(),
        test_y=dataset.test_y[test],
        source={**dataset.source, "classes": classes},
        rows=train,
    )


def _of_pixels(x: np.ndarray) -> Standardization:
    """Return mean and standard deviation of all pixels of uint8 images (n, ...), scaled to [0, 1]."""
    block = rows_per_block(x.shape[1:], x.dtype)
    counts = sum(np.bincount(x[start : start + block].ravel(), minlength=256) for start in range(0, len(x), block))
    values = np.arange(256) / 255
    mean = float(np.average(values, weights=counts))
    return Standardization((mean,), (float(np.sqrt(np.average((values - mean) ** 2, weights=counts))),))


def _from_matlab(path: Path, kin: idx.Family) -> Dataset:
    parts = matlab.read_emnist(path)
    files, verdict = examine(kin.origin, [path], title=kin.title)
    arrays = []
    for part in ("train", "test"):
        images, labels = parts[part]
        low, high = kin.first_label, kin.first_label + kin.num_classes - 1
        if not len(images) or images.shape[1] != SIDE * SIDE or len(labels) != len(images):
            expected, got = f"(n, {SIDE * SIDE}) images and n labels", f"{images.shape} and {labels.shape}"
            raise InputError(f"dataset.{part}", where=str(path), expected=expected, got=got)
        if not (np.isin(labels, np.arange(low, high + 1))).all():
            what = f"dataset.{part}.labels are not those of {kin.title}"
            got = f"{labels.min():g} … {labels.max():g}"
            raise InputError(what, where=str(path), expected=f"{low} … {high}", got=got)
        upright = images.reshape(-1, 1, SIDE, SIDE).transpose(0, 1, 3, 2)
        arrays += [upright, (labels - low).astype(np.uint8)]
    return Dataset(
        name=kin.name,
        task="classification",
        x=arrays[0],
        y=arrays[1],
        num_classes=kin.num_classes,
        test_x=arrays[2],
        test_y=arrays[3],
        source={"files": files},
        remarks=(verdict,),
    )


def _source(split: str) -> DataSource:
    return DataSource(lambda raw: load(raw, split), family(split).origin)


SOURCES = {
    "emnist-letters": DataSource(load_letters, family("letters").origin),
    **{f"emnist-{split}": _source(split) for split in SPLITS if split != "letters"},
}
