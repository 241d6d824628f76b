"""Scikit-learn's handwritten digits: 1797 real 8×8 images included in the package, so nothing is downloaded.

Reference: Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI, 1998 (the test half).
"""

from __future__ import annotations

import numpy as np

from data_prep.dataset import Dataset, sha256
from data_prep.sources.files import DataSource, Origin
from data_prep.streams import stream
from hpcfed.data.federation import Standardization
from hpcfed.errors import InputError

TEST_FRACTION = 0.2
DARKEST = 16  # pixels count the dark cells of a 4×4 block


def load(seed: int) -> Dataset:
    """Return the digits as x (1438, 1, 8, 8) uint8 of 0 … 255, with a random test set of 359 drawn from `seed`.

    Raises:
        InputError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise InputError("digits needs scikit-learn", remedy="pip install scikit-learn") from error
    raw = load_digits()
    images = np.rint(raw.images * (255 / DARKEST)).astype(np.uint8)[:, None]
    labels = raw.target.astype(np.uint8)
    order = stream(seed, "digits: test set").permutation(len(images))
    num_test = int(TEST_FRACTION * len(images))
    test, train = np.sort(order[:num_test]), np.sort(order[num_test:])
    scaled = images[train] / 255
    return Dataset(
        name="digits",
        task="classification",
        x=images[train],
        y=labels[train],
        num_classes=10,
        test_x=images[test],
        test_y=labels[test],
        normalization=Standardization((round(float(scaled.mean()), 4),), (round(float(scaled.std()), 4),)),
        source={"files": [{"name": "sklearn.datasets.load_digits", "sha256": sha256(images, labels)}], "seed": seed},
        rows=train,
    )


SOURCES = {"digits": DataSource(load, Origin("Handwritten digits, 8 × 8, that come with scikit-learn"))}
