"""TFF's HDF5 files: written as TFF writes them, read back sample for sample; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep.sources import tff
from hpcfed.errors import InputError
from tests.data import raw_formats as raw

Clients = dict[str, dict[str, np.ndarray]]


def emnist(seed: int, clients: tuple[str, ...] = raw.WRITERS) -> Clients:
    rng = np.random.default_rng(seed)
    return {
        name: {
            "label": rng.integers(0, 62, i + 2).astype(np.int32),
            "pixels": (rng.integers(0, 256, (i + 2, 28, 28)) / 255).astype(np.float32),
        }
        for i, name in enumerate(clients)
    }


def cifar(seed: int, clients: tuple[str, ...], column: bool) -> Clients:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 100, (len(clients), 3, 1))
    return {
        name: {
            "coarse_label": labels[i] // 5,
            "image": rng.integers(0, 256, (3, 32, 32, 3), np.uint8),
            "label": labels[i] if column else labels[i][:, 0],
        }
        for i, name in enumerate(clients)
    }


def test_emnist_round_trip(tmp_path: Path) -> None:
    train, test = emnist(1), emnist(2)
    raw.write_tff(tmp_path / "fed_emnist_train.h5", train)
    raw.write_tff(tmp_path / "fed_emnist_test.h5", test)
    dataset = tff.load_emnist(tmp_path)
    assert dataset.clients == raw.WRITERS
    assert (dataset.x.dtype, dataset.num_classes, dataset.normalization) == (np.uint8, 62, None)
    for half, x, y, owner in (
        (train, dataset.x, dataset.y, dataset.owner),
        (test, dataset.test_x, dataset.test_y, dataset.test_owner),
    ):
        for k, fields in enumerate(half.values()):
            own = x[owner == k, 0].astype(np.float32) / np.float32(255)
            np.testing.assert_array_equal(own, fields["pixels"])
            np.testing.assert_array_equal(y[owner == k], fields["label"])


@pytest.mark.parametrize("column", [False, True])
def test_cifar100_round_trip(tmp_path: Path, column: bool) -> None:
    train, test = cifar(1, ("0", "1", "10"), column), cifar(2, ("t0", "t1"), column)
    raw.write_tff(tmp_path / "fed_cifar100_train.h5", train)
    raw.write_tff(tmp_path / "fed_cifar100_test.h5", test)
    dataset = tff.load_cifar100(tmp_path)
    assert (dataset.clients, dataset.test_owner) == (("0", "1", "10"), None)  # tested on other clients
    for half, x, y in ((train, dataset.x, dataset.y), (test, dataset.test_x, dataset.test_y)):
        images = np.concatenate([fields["image"] for fields in half.values()])
        np.testing.assert_array_equal(x, images.transpose(0, 3, 1, 2))
        assert y.tolist() == np.concatenate([fields["label"] for fields in half.values()]).reshape(-1).tolist()
    assert dataset.normalization.mean == (0.5071, 0.4867, 0.4408)


def test_shakespeare_round_trip(tmp_path: Path) -> None:
    said = [b"Yet I am doubtful for I am mainly ignorant", b"What place this is; and all the skill I have"]
    train = {raw.ROLES[0]: {"snippets": said}, raw.ROLES[1]: {"snippets": [b"Too short."]}}
    raw.write_tff(tmp_path / "shakespeare_train.h5", train)
    raw.write_tff(tmp_path / "shakespeare_test.h5", {raw.ROLES[0]: {"snippets": [said[1], said[0], b"Pray"]}})
    dataset = tff.load_shakespeare(tmp_path)
    assert (dataset.num_classes, dataset.vocabulary, dataset.clients) == (86, tff.LETTERS, tuple(sorted(raw.ROLES)))
    text = b"\n".join(said).decode()
    decoded = ["".join(tff.LETTERS[code] for code in (*x, y)) for x, y in zip(dataset.x, dataset.y, strict=True)]
    assert decoded == [text[i : i + 81] for i in range(len(text) - 80)]
    assert set(dataset.owner.tolist()) == {dataset.clients.index(raw.ROLES[0])}
    assert dataset.test_owner.tolist() == [dataset.clients.index(raw.ROLES[0])] * len(dataset.test_y)


def change(name: str, value: object) -> Callable[[h5py.File], None]:
    def changed(file: h5py.File) -> None:
        del file[name]
        if value is not None:
            file[name] = value

    return changed


def claimed(file: h5py.File) -> None:
    """Claim 2^60 images, of which none is stored."""
    del file["examples/f0001_41/pixels"]
    file.create_dataset("examples/f0001_41/pixels", (2**60, 28, 28), "f4", chunks=(1, 28, 28))


def packed(file: h5py.File) -> None:
    del file["examples/f0001_41/pixels"]
    file.create_dataset("examples/f0001_41/pixels", (2**50, 28, 28), "f4", chunks=(1, 28, 28), compression="gzip")


def nameless(file: h5py.File) -> None:
    file.copy("examples/f0001_41", file["examples"], name=b"\xff\xfe")


CLIENT = "examples/f0001_41"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("examples", None), "no group 'examples'"),
        (change("examples", [1]), "no group 'examples'"),
        (change(f"{CLIENT}/label", None), "not fed_emnist_train.h5 of TFF, or damaged"),
        (change(f"{CLIENT}/label", [1, 2, 3]), "differ in length"),
        (change(f"{CLIENT}/label", [1, 62]), "beyond 0 … 61"),
        (change(f"{CLIENT}/label", [1, -1]), "beyond 0 … 61"),
        (change(f"{CLIENT}/label", [1.0, 2.0]), "not an array of kind iu"),
        (change(f"{CLIENT}/label", 5), "not an array of kind iu"),
        (change(f"{CLIENT}/pixels", np.zeros((2, 28, 27), np.float32)), "rows of shape (28, 27), not (28, 28)"),
        (change(f"{CLIENT}/pixels", np.full((2, 28, 28), np.nan, np.float32)), "pixels beyond 0 … 1"),
        (change(f"{CLIENT}/pixels", np.full((2, 28, 28), 255, np.float32)), "pixels beyond 0 … 1"),
        (change(CLIENT, [1]), "not fed_emnist_train.h5 of TFF, or damaged"),
        (nameless, "a client's name is no text"),
        (claimed, "claims the shape"),
        (packed, "claims the shape"),
    ],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[h5py.File], None], message: str) -> None:
    for half in ("train", "test"):
        raw.write_tff(tmp_path / f"fed_emnist_{half}.h5", emnist(1))
    with h5py.File(tmp_path / "fed_emnist_train.h5", "r+") as file:
        damage(file)
    with pytest.raises(InputError) as caught:
        tff.load_emnist(tmp_path)
    assert message in str(caught.value)
    assert "fed_emnist_train.h5: " in str(caught.value)


def test_not_hdf5_and_missing(tmp_path: Path) -> None:
    raw.write_tff(tmp_path / "fed_emnist_train.h5", emnist(1))
    with pytest.raises(InputError, match=r"missing fed_emnist_test.h5; put it into that folder"):
        tff.load_emnist(tmp_path)
    (tmp_path / "fed_emnist_test.h5").write_text("<html>not found</html>")
    with pytest.raises(InputError, match=r"fed_emnist_test.h5: not fed_emnist_test.h5 of TFF, or damaged"):
        tff.load_emnist(tmp_path)
