"""LEAF's json: clients in the order of `users`, halves of training and testing, and every way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import leaf_json
from data_prep.sources.text import LEAF_LETTERS
from hpcfed.errors import InputError
from tests.data import raw_formats as raw
from tests.shared_files import shared_folder

ORDERS = [("users", "num_samples", "user_data"), ("num_samples", "users", "user_data"), ("user_data", "users")]


@pytest.mark.parametrize("order", ORDERS)
def test_femnist_round_trip(tmp_path: Path, order: tuple[str, ...]) -> None:
    first, second, test = raw.leaf_images(1), raw.leaf_images(2, ("f9999_00",)), raw.leaf_images(3)
    raw.write_leaf(tmp_path / "train/all_data_0_niid_0_keep_0_train_9.json", first, order=order)
    raw.write_leaf(tmp_path / "train/all_data_1_niid_0_keep_0_train_9.json", second, order=order)
    raw.write_leaf(tmp_path / "test/all_data_0_niid_0_keep_0_test_9.json", test, order=order)
    dataset = leaf_json.load_femnist(tmp_path)
    train = {**first, **second}
    assert dataset.clients == (*raw.WRITERS, "f9999_00")
    assert (dataset.x.dtype, dataset.num_classes, dataset.x.shape[1:]) == (np.uint8, 62, (1, 28, 28))
    for half, x, y, owner in (
        (train, dataset.x, dataset.y, dataset.owner),
        (test, dataset.test_x, dataset.test_y, dataset.test_owner),
    ):
        for k, name in enumerate(dataset.clients):
            pixels, labels = half.get(name, ([], []))
            own = x[owner == k].reshape(-1, 784).astype(np.float32) / np.float32(255)
            np.testing.assert_array_equal(own, np.array(pixels, np.float32).reshape(-1, 784))
            assert y[owner == k].tolist() == labels


def test_clients_come_in_the_order_of_users(tmp_path: Path) -> None:
    data = raw.leaf_images()
    content = {
        "users": sorted(data, reverse=True),
        "num_samples": [len(data[user][1]) for user in sorted(data, reverse=True)],
        "user_data": {user: {"y": y, "x": x} for user, (x, y) in data.items()},
    }
    (tmp_path / "d.json").write_text(json.dumps(content))
    dataset = leaf_json.load_femnist(tmp_path)
    assert list(dataset.clients) == sorted(data, reverse=True)
    assert dataset.y[dataset.owner == 0].tolist() == data[dataset.clients[0]][1]


def test_pixels_that_are_no_bytes_stay_as_they_are(tmp_path: Path) -> None:
    train, test = raw.leaf_images(1), raw.leaf_images(2)
    train["f0007_12"][0][1][5] = 0.1234
    raw.write_leaf(tmp_path / "train.json", train)
    raw.write_leaf(tmp_path / "test.json", test)
    dataset = leaf_json.load_femnist(tmp_path)
    assert dataset.x.dtype == dataset.test_x.dtype == np.float32
    expected = np.concatenate([np.array(pixels, np.float32) for pixels, _ in train.values()])
    np.testing.assert_array_equal(dataset.x.reshape(-1, 784), expected)
    expected = np.concatenate([np.array(pixels, np.float32) for pixels, _ in test.values()])
    np.testing.assert_array_equal(dataset.test_x.reshape(-1, 784), expected)


def test_a_test_set_of_other_clients_is_common(tmp_path: Path) -> None:
    raw.write_leaf(tmp_path / "train/a.json", raw.leaf_images())
    raw.write_leaf(tmp_path / "test/a.json", raw.leaf_images(1, ("f5555_55",)))
    dataset = leaf_json.load_femnist(tmp_path)
    assert dataset.test_owner is None
    assert dataset.remarks[-1] == "test: by other clients than those of training, so one set for all"


def test_shakespeare_round_trip(tmp_path: Path) -> None:
    text = "What, art thou mad? Is not the truth, the truth? " * 3
    data = {
        role: ([text[i + k : i + k + 80] for i in range(3)], [text[i + k + 80] for i in range(3)])
        for k, role in enumerate(raw.ROLES)
    }
    raw.write_leaf(tmp_path / "train/all_data_niid_2_keep_0_train_8.json", data)
    dataset = leaf_json.load_shakespeare(tmp_path)
    assert (dataset.task, dataset.num_classes, dataset.vocabulary) == ("next-token", 80, LEAF_LETTERS)
    assert (dataset.test_x, dataset.clients) == (None, raw.ROLES)
    decoded = ["".join(LEAF_LETTERS[code] for code in row) for row in dataset.x]
    assert decoded == [x for xs, _ in data.values() for x in xs]
    assert [LEAF_LETTERS[code] for code in dataset.y] == [y for _, ys in data.values() for y in ys]


def test_vectors_round_trip(tmp_path: Path) -> None:
    data = {"f_00000": ([[0.5, -1e-9], [3, 4.25]], [2.0, 0.0]), "f_00001": ([[7.0, 8.0]], [4])}
    raw.write_leaf(tmp_path / "mytrain.json", data)
    raw.write_leaf(tmp_path / "mytest.json", {"f_00001": ([[1.0, 1.0]], [5.0])})
    dataset = leaf_json.load_vectors(tmp_path)
    assert dataset.x.tolist() == [[0.5, -1e-9], [3, 4.25], [7.0, 8.0]]
    assert (dataset.x.dtype, dataset.num_classes) == (np.float64, 6)
    assert (dataset.y.tolist(), dataset.owner.tolist(), dataset.test_owner.tolist()) == ([2, 0, 4], [0, 0, 1], [1])


USER = '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1.0, 2.0]], "y": [0]}}}'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"num_samples": [1]', '"num_samples": [1152921504606846976]', "1 x, 1 y, num_samples 1152921504606846976"),
        ('"num_samples": [1]', '"num_samples": [1, 2]', "1 users, 2 numbers of samples"),
        ('"y": [0]', '"y": [0, 1]', "1 x, 2 y"),
        ('"y": [0]', '"y": [0.5]', "labels other than"),
        ('"y": [0]', '"y": [-1]', "labels other than"),
        ('"y": [0]', '"y": [1e300]', "labels other than"),
        ('"y": [0]', '"y": [99999999999999999999]', "not json, or damaged|labels other than"),
        ('"y": [0]', '"y": ["b"]', "samples of client 'a'"),
        ('"y": [0]', '"y": [null]', "labels other than"),
        ('"y": [0]', '"y": 0', "has no lists x and y"),
        ("[[1.0, 2.0]]", "[[1.0, 1e999]]", "not finite|not json"),
        ("[[1.0, 2.0]]", "[[1.0, NaN]]", "not json, or damaged"),
        ("[[1.0, 2.0]]", "[[1.0, [2.0]]]", "samples of client 'a'"),
        ("[[1.0, 2.0]]", "[" * 100_000, "nested deeper than 8 times"),
        ('{"x"', '{"z"', "no vectors in it"),
        ('{"a": {', '{"b": {', "client 'b' comes twice, or is none of its users"),
        ('"user_data": {', '"user_data": {"a": {"x": [[0, 0]], "y": [1]}, ', "comes twice"),
        ('["a"]', '["a", "b"]', "2 users, 1 numbers"),
        ("}}}", "}}", "not json, or damaged"),
        ('"user_data"', '"data"', "no vectors in it"),
        (USER, "", "not json, or damaged"),
        (USER, "[]", "it is no object but begins with start_array"),
        ('{"a": {', '[{"a": {', "user_data is no object"),
    ],
)
def test_damaged_files(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in USER
    (tmp_path / "train.json").write_text(USER.replace(old, new))
    with pytest.raises(InputError, match=message) as caught:
        leaf_json.load_vectors(tmp_path)
    assert len(str(caught.value)) < 600


def test_a_client_of_two_files(tmp_path: Path) -> None:
    for name in "ab":
        raw.write_leaf(tmp_path / f"train/{name}.json", raw.leaf_images())
    with pytest.raises(InputError, match=r"b.json: client 'f0001_41' comes twice"):
        leaf_json.load_femnist(tmp_path)


def test_pixels_out_of_range(tmp_path: Path) -> None:
    data = raw.leaf_images()
    data["f0001_41"][0][0][3] = 1.01
    raw.write_leaf(tmp_path / "train.json", data)
    with pytest.raises(InputError, match="pixels beyond 0 … 1"):
        leaf_json.load_femnist(tmp_path)


def test_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no json files to train on: got no \*.json"):
        leaf_json.load_vectors(tmp_path)
    raw.write_leaf(tmp_path / "a_test.json", {"f": ([[1.0]], [0])})
    with pytest.raises(InputError, match=r"got only a_test.json; .* name one file by --raw to train on it"):
        leaf_json.load_vectors(tmp_path)
    assert len(leaf_json.load_vectors(tmp_path / "a_test.json").x) == 1


def test_real_femnist() -> None:
    folder = shared_folder("data/FEMNIST")
    if folder is None:
        pytest.skip("needs LEAF's FEMNIST sample in $HPCFED_SHARED/data/FEMNIST")
    dataset = leaf_json.load_femnist(folder)
    assert np.bincount(dataset.owner).tolist() == [11, 16, 17, 18, 16]
    assert np.bincount(dataset.test_owner).tolist() == [19, 17, 19, 18, 16]
    assert dataset.clients == ("f3797_07", "f3793_06", "f3728_28", "f3687_48", "f3785_26")
    assert dataset.x.dtype == np.uint8
    corners = np.concatenate([dataset.x[:, 0, ::27, ::27], dataset.test_x[:, 0, ::27, ::27]])
    assert (corners == 255).all()  # the background is 1, as LEAF has it
    assert dataset.x.mean() > 200


def test_real_synthetic() -> None:
    folder = shared_folder("data/LEAF")
    if folder is None:
        pytest.skip("needs FedProx's synthetic_1_1_test.json in $HPCFED_SHARED/data/LEAF")
    dataset = leaf_json.load_vectors(folder / "synthetic_1_1_test.json")
    sizes = np.bincount(dataset.owner)
    assert (len(sizes), sizes.sum(), sizes[:5].tolist()) == (30, 1084, [8, 18, 9, 17, 16])
    assert (dataset.x.shape[1], dataset.num_classes) == (60, 10)
    # Σ_jj = j^−1.2 within a client, of which the largest has 662 samples.
    largest = dataset.x[dataset.owner == sizes.argmax()]
    np.testing.assert_allclose(largest.var(axis=0), np.arange(1, 61) ** -1.2, rtol=0.3)
