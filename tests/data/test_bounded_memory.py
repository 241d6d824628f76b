"""Files larger than the memory a process may have are read and written to a federation."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.dataset import Dataset
from data_prep.sources import emnist, tff
from data_prep.write import write
from hpcfed.data import content
from hpcfed.data.federation import Federation
from tests.data import raw_formats as raw
from tests.launch import launch

IMAGES = 45_000  # 35 MB
SPARE_MEMORY = 22 << 20
"""Beside what the interpreter and its libraries have."""
SMALL_BLOCK = 1 << 20
"""Bytes read or copied at once, in place of 16 MiB, so that little memory is enough."""


def images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return images of few different pixels, which pack well, with labels by their row."""
    rows = np.arange(IMAGES)
    pixels = np.zeros((IMAGES, 28, 28), np.uint8)
    pixels[:, 3, 5] = rows % 251
    return {"train": (pixels, (rows % 10).astype(np.uint8)), "test": (pixels[:10], np.zeros(10, np.uint8))}


def write_idx(folder: Path) -> None:
    raw.write_emnist_idx(folder, "digits", images())


def write_mat(folder: Path) -> None:
    raw.write_emnist_mat(folder, "digits", images())


def write_tff(folder: Path) -> None:
    pixels = np.zeros((20, 75, 28, 28), np.float32)
    pixels[..., 3, 5] = np.arange(20 * 75).reshape(20, 75) % 251 / np.float32(255)
    clients = {f"f{k:04}": {"pixels": pixels[k % 20], "label": np.arange(75) % 10} for k in range(IMAGES // 75)}
    raw.write_tff(folder / "fed_emnist_train.h5", clients)
    raw.write_tff(folder / "fed_emnist_test.h5", {"f0000": {"pixels": pixels[0], "label": np.zeros(75, int)}})


FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Dataset]]] = {
    "idx": (write_idx, lambda folder: emnist.load(folder, "digits")),
    "mat": (write_mat, lambda folder: emnist.load(folder, "digits")),
    "tff": (write_tff, tff.load_emnist),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FORMATS)
def test_more_samples_than_memory(tmp_path: Path, name: str) -> None:
    FORMATS[name][0](tmp_path)
    done = launch(0, [name, tmp_path], program=("-m", "tests.data.test_bounded_memory"), timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.num_samples == IMAGES
        assert federation.num_samples * 784 > SPARE_MEMORY
        for k in (0, 1, 6):
            x, y = federation.client(k)
            assert x[:, 0, 3, 5].tolist() == [row % (251 if name != "tff" else 1500) % 251 for row in _rows(k)]
            assert y.tolist() == [row % 75 % 10 if name == "tff" else row % 10 for row in _rows(k)]


def _rows(k: int) -> range:
    return range(k, IMAGES, 7)


def main() -> None:
    """Read a format from a folder and write it, with little memory beside what is mapped."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    content.BLOCK_BYTES = SMALL_BLOCK
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + SPARE_MEMORY, used + SPARE_MEMORY))
    dataset = FORMATS[name][1](folder)
    write(folder / "f.h5", dataset, np.arange(len(dataset.x)) % 7, 7, partition={"scheme": "by row"})


if __name__ == "__main__":
    main()
