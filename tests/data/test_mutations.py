"""Federation files whose metadata contradict their contents; random damage is tested by `tests.fuzz`."""

from __future__ import annotations

import resource
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from tests.fuzz.federations import LAYOUTS, whole


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS)))
def test_undamaged_files_are_read(tmp_path: Path, layout: str) -> None:
    whole(tmp_path / "f.h5", layout)
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.client(2)[0].shape == (11, 3, 4)


@pytest.mark.parametrize("name", ["train/x", "train/y", "train/offsets", "test/x"])
@pytest.mark.parametrize("chunks", [True, None])
def test_claimed_sizes_are_not_allocated(tmp_path: Path, name: str, chunks: bool | None) -> None:
    whole(tmp_path / "f.h5", "flat")
    with h5py.File(tmp_path / "f.h5", "r+") as file:
        shape, dtype = file[name].shape, file[name].dtype
        del file[name]
        file.create_dataset(name, (1 << 56, *shape[1:]), dtype, chunks=chunks)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=rf"/{name}.* is not written to its end"):
        Federation.open(tmp_path / "f.h5")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_targets_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    whole(tmp_path / "f.h5", "flat")
    with h5py.File(tmp_path / "f.h5", "r+") as file:
        file.attrs["task"] = "regression"
        del file["train/y"]
        file["train/y"] = np.where(np.arange(40) == 17, np.nan, 1.0)
    with pytest.raises(InputError, match=r"targets in /train/y: expected finite numbers"):
        Federation.open(tmp_path / "f.h5")


def test_the_text_of_names_may_be_damaged(tmp_path: Path) -> None:
    whole(tmp_path / "f.h5", "flat")
    with h5py.File(tmp_path / "f.h5", "r+") as file:
        del file["train/client"]
        file["train/client"] = np.array([b"\xff\xfe", b"b"], h5py.string_dtype("utf-8", 4))
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.client_name(0) == "\ufffd\ufffd"
        assert federation.client_name(4) == "4"
