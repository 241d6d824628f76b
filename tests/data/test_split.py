"""Splitting into clients: natural clients, clients' own test sets, and a federation partitioned anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep.dataset import Dataset
from data_prep.sources import federation
from data_prep.split import NOBODY, split
from data_prep.write import write
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from tests.data.raw import write_idx_folder

OWNER = np.repeat([0, 1, 2], [8, 2, 30])
NATURAL = Dataset(
    name="three",
    task="classification",
    x=np.arange(40, dtype=np.float32)[:, None],
    y=np.arange(40) % 4,
    num_classes=4,
    test_x=np.arange(100, 106, dtype=np.float32)[:, None],
    test_y=np.arange(6) % 4,
    owner=OWNER,
    test_owner=np.array([2, 0, 1, 2, 0, 2]),
    clients=("ann", "bob", "cy"),
)


def written(folder: Path, dataset: Dataset = NATURAL, scheme: str | None = None, **options: object) -> Federation:
    """Split, write and open a data set."""
    num_clients = options.pop("clients", None)
    done = split(dataset, scheme, num_clients, 3, options)
    write(folder / "f.h5", dataset, **vars(done), overwrite=True)
    return Federation.open(folder / "f.h5")


def test_natural_clients_keep_names_and_test_sets(tmp_path: Path) -> None:
    with written(tmp_path) as opened:
        assert opened.client_names() == ["ann", "bob", "cy"]
        assert opened.sizes.tolist() == [8, 2, 30]
        assert opened.test_offsets.tolist() == [0, 2, 3, 6]
        assert opened.test(0, 6)[0][:, 0].tolist() == [101, 104, 102, 100, 103, 105]


def test_natural_clients_of_too_few_samples_are_left_out(tmp_path: Path) -> None:
    with written(tmp_path, min_samples=5) as opened:
        assert opened.client_names() == ["ann", "cy"]
        assert opened.sizes.tolist() == [8, 30]
        assert np.array_equal(opened.client(1)[0], NATURAL.x[10:])
        assert opened.test(0, 9)[0][:, 0].tolist() == [101, 104, 100, 103, 105]
        assert opened.partition == {"scheme": "natural", "clients": 2, "min_samples": 5}
    with pytest.raises(InputError, match="no client has that many samples: expected at least 31, got at most 30"):
        split(NATURAL, None, None, 0, {"min_samples": 31})


@pytest.mark.parametrize("deal", [None, 2, 1])
def test_some_natural_clients_with_samples_in_a_row(tmp_path: Path, deal: int | None) -> None:
    """FedDyn's Shakespeare: so many roles, of each so many samples in a row to train and to test on."""
    data = replace(NATURAL, test_owner=np.array([0, 0, 1, 2, 2, 2]))
    asked = {"clients": 2, "crop": 6, "test_crop": 2, **({"deal": deal} if deal else {})}
    with written(tmp_path, data, **asked) as opened:
        assert opened.sizes.tolist() == ([12] if deal == 1 else [6, 6])
        assert np.diff(opened.test_offsets).tolist() == ([4] if deal == 1 else [2, 2])
        x = np.sort(opened.train()[0][:, 0])
        runs = [x[x < 8], x[x >= 10]]
        assert [np.diff(run).tolist() for run in runs] == [[1] * 5, [1] * 5]
        assert opened.partition == {"scheme": "natural", **asked, "seed": 3}
        assert opened.client_names() == (["client-0", "client-1"][:deal] if deal else ["ann", "cy"])
        assert (set(opened.client(0)[0][:, 0]) == set(runs[0])) == (deal is None)
    some = [split(NATURAL, None, 2, seed, {}).clients for seed in range(5)]
    assert len({tuple(names) for names in some}) > 1
    assert all(len(names) == 2 for names in some)


def test_a_crop_begins_anywhere() -> None:
    starts = {int(np.flatnonzero(split(NATURAL, None, None, seed, {"crop": 6}).owner == 0)[0]) for seed in range(40)}
    assert starts == {0, 1, 2}  # of 8 samples
    assert split(NATURAL, None, None, 0, {"test_crop": 2}).clients == ["ann", "cy"]


@pytest.mark.parametrize(
    "asked", [{"crop": 2}, {"test_crop": 1}, {"deal": 2}, {"shuffle": True}, {"test_fraction": 0.5}]
)
def test_a_seed_is_recorded_where_something_is_drawn(asked: dict) -> None:
    assert split(NATURAL, None, None, 3, asked).partition == {"scheme": "natural", "clients": 3, **asked, "seed": 3}


def test_natural_clients_may_exchange_their_samples(tmp_path: Path) -> None:
    """FedDyn's Shakespeare, IID: LEAF divides the sentences of all roles among as many clients."""
    asked = {"clients": 2, "crop": 6, "test_crop": 1, "shuffle": True}
    with written(tmp_path, **asked) as opened:
        assert opened.sizes.tolist() == [6, 6]
        assert np.diff(opened.test_offsets).tolist() == [1, 1]
        assert opened.client_names() == ["client-0", "client-1"]
        assert opened.partition == {"scheme": "natural", **asked, "seed": 3}
        of_whom = OWNER[opened.client(0)[0][:, 0].astype(int)]
    assert len(set(of_whom.tolist())) > 1
    with written(tmp_path, shuffle=True) as opened:
        assert opened.sizes.tolist() == [8, 2, 30]
        assert np.array_equal(np.sort(opened.train()[0][:, 0]), NATURAL.x[:, 0])


def test_a_scheme_takes_clients_apart(tmp_path: Path) -> None:
    """Then the test sets of the old clients are a common one."""
    with written(tmp_path, scheme="iid", clients=4) as opened:
        assert opened.sizes.tolist() == [10] * 4
        assert opened.client_names()[0] == "client-0"
        assert (opened.test_offsets, opened.num_test) == (None, 6)


def test_clients_keep_a_share_for_their_own_test_sets(tmp_path: Path) -> None:
    for scheme, clients in ((None, 3), ("dirichlet-class", 3)):
        done = split(NATURAL, scheme, clients, 3, {"test_fraction": 0.25})
        sizes = np.bincount(done.owner)
        held = np.bincount(done.owner[done.held], minlength=3)
        assert held.tolist() == (sizes // 4).tolist()
        with written(tmp_path, scheme=scheme, clients=clients, test_fraction=0.25) as opened:
            assert np.diff(opened.test_offsets).tolist() == held.tolist()
            assert opened.sizes.tolist() == (sizes - held).tolist()
            both = np.concatenate([opened.train()[0], opened.test(0, 40)[0]])
            assert np.array_equal(np.sort(both, axis=0), NATURAL.x)
            assert opened.partition["test_fraction"] == 0.25
    again, other = (split(NATURAL, None, None, seed, {"test_fraction": 0.25}).held for seed in (3, 4))
    assert np.array_equal(again, split(NATURAL, None, None, 3, {"test_fraction": 0.25}).held)
    assert not np.array_equal(again, other)


def test_left_out_samples_are_held_by_nobody() -> None:
    done = split(NATURAL, None, None, 0, {"min_samples": 5, "test_fraction": 0.5})
    assert not done.held[done.owner == NOBODY].any()


def test_the_order_of_samples_decides_nothing(tmp_path: Path) -> None:
    """Their rows in the source do: the same samples in another order make the same file."""
    order = np.random.default_rng(0).permutation(40)
    moved = Dataset(
        **{**vars(NATURAL), "x": NATURAL.x[order], "y": NATURAL.y[order], "owner": OWNER[order], "rows": order}
    )
    for options in (
        {},
        {"shuffle": True},
        {"scheme": "dirichlet-client", "clients": 5},
        {"scheme": "shards", "clients": 5},
    ):
        written(tmp_path, NATURAL, **options).close()
        first = (tmp_path / "f.h5").read_bytes()
        written(tmp_path, moved, **options).close()
        assert (tmp_path / "f.h5").read_bytes() == first


@pytest.mark.parametrize(
    ("scheme", "clients", "given", "message"),
    [
        ("natural", 4, {}, "--clients: expected at most the 3 clients of three, got 4"),
        ("natural", 3, {"crop": 5}, "at most the 2 clients of three that have so many samples, got 3"),
        (None, None, {"alpha": 0.3}, "--alpha has no effect with three, which comes split"),
        ("iid", 30, {"min_samples": 2}, "30 clients of at least 2 for 40 samples"),
        ("shards", 10, {"min_samples": 5}, "--min-samples: expected at least 5 samples a client, got 4"),
        ("iid", 4, {"test_fraction": 1.0}, "--test-fraction: expected a number between 0 and 1, got 1.0"),
        ("shads", 4, {}, "unknown partition 'shads'; did you mean 'shards'"),
    ],
)
def test_wrong_wishes(scheme: str | None, clients: int | None, given: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split(NATURAL, scheme, clients, 0, given)


def test_what_does_not_come_split_has_no_natural_clients() -> None:
    with pytest.raises(InputError, match="does not come split"):
        split(replace(NATURAL, owner=None), "natural", None, 0, {})


def test_another_partition_without_the_raw_data_is_the_same_file(tmp_path: Path, command) -> None:
    write_idx_folder(tmp_path / "raw")
    wanted = ("--partition", "dirichlet-client", "--clients", 5, "--seed", 7)
    for words in (
        ("mnist", "--raw", tmp_path / "raw", *wanted, "-o", tmp_path / "direct.h5"),
        ("mnist", "--raw", tmp_path / "raw", "--clients", 4, "-o", tmp_path / "first.h5"),
        ("federation", "--raw", tmp_path / "first.h5", *wanted, "-o", tmp_path / "again.h5"),
    ):
        done = command(("prepare", *words), tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.h5").read_bytes() == (tmp_path / "direct.h5").read_bytes()
    with h5py.File(tmp_path / "first.h5") as first, h5py.File(tmp_path / "again.h5") as again:
        assert not np.array_equal(first["train/row"][:], again["train/row"][:])


def test_a_federation_given_on_as_it_is(tmp_path: Path) -> None:
    written(tmp_path).close()
    copied = federation.load(tmp_path / "f.h5")
    done = split(copied, None, None, 0, {})
    write(tmp_path / "copy.h5", copied, **vars(done))
    assert (tmp_path / "copy.h5").read_bytes() == (tmp_path / "f.h5").read_bytes()
