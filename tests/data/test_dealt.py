"""`hpcfed.partition`: the schemes of `prepare` on labels, NIID-Bench's rules, the picture and the measure of skew."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hpcfed
from hpcfed.data.skew import skew_of
from hpcfed.errors import InputError

Y = np.random.default_rng(3).integers(0, 6, 1200)
X = np.arange(2400.0).reshape(1200, 2)


def test_it_deals_as_prepare_does(tmp_path, command):
    pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y}).to_csv(tmp_path / "raw.csv", index=False)
    words = ["--partition", "dirichlet-client", "--alpha", "0.3", "--clients", "10", "--seed", "4"]
    done = command(["prepare", "own", "--raw", "raw.csv", *words, "-o", "f.h5"], tmp_path)
    assert done.returncode == 0, done.stderr
    dealt = hpcfed.partition(Y, "dirichlet-client", alpha=0.3, clients=10, seed=4)
    hpcfed.write_federation(tmp_path / "own.h5", dealt.clients(X, Y))
    with h5py.File(tmp_path / "f.h5") as there, h5py.File(tmp_path / "own.h5") as here:
        assert (there["train/offsets"][:] == here["train/offsets"][:]).all()
        for k in range(10):
            rows = slice(*there["train/offsets"][k : k + 2])
            assert {*there["train/x"][rows, 0]} == {*here["train/x"][rows, 0]} == {*X[dealt.indices(k), 0]}
        assert json.loads(there.attrs["partition"]) == dealt.scheme
    done = command(["inspect", "f.h5"], tmp_path)
    assert f"labels {dealt.skew.labels:.2f} (mean total variation" in " ".join(done.stdout.split())


def test_a_dataset_is_dealt_as_arrays_are(tmp_path):
    dealt, dataset = hpcfed.partition(Y, "iid", clients=7), TensorDataset(torch.tensor(X), torch.tensor(Y))
    hpcfed.write_federation(tmp_path / "arrays.h5", dealt.clients(X, Y))
    hpcfed.write_federation(tmp_path / "dataset.h5", dealt.clients(dataset))
    with h5py.File(tmp_path / "arrays.h5") as one, h5py.File(tmp_path / "dataset.h5") as other:
        assert all((one[f"train/{name}"][:] == other[f"train/{name}"][:]).all() for name in ("x", "y", "offsets"))
    for wrong, says in ((X, "got ndarray alone"), (DataLoader(dataset), "got DataLoader alone"), (dataset, "noise")):
        with pytest.raises(InputError, match=says):
            hpcfed.partition(Y, "iid", clients=7, noise=0.1).clients(wrong)
    with pytest.raises(InputError, match="expected 1,199 samples, got 1,200"):
        hpcfed.partition(Y[1:], "iid", clients=7).clients(dataset)
    with pytest.raises(InputError, match="give the Dataset alone"):
        dealt.clients(dataset, Y)


@pytest.mark.parametrize("per_client", [1, 2, 3])
def test_a_number_of_classes_per_client(per_client):
    """NIID-Bench: client i has class i and random ones, a class in equal parts."""
    dealt = hpcfed.partition(Y, "classes", per_client=per_client, clients=10)
    held = dealt.counts > 0
    assert (held.sum(axis=1) == per_client).all()
    assert all(held[k, k % 6] for k in range(10))
    for c in range(6):
        parts = dealt.counts[held[:, c], c]
        assert parts.max() - parts.min() <= 1
    few = hpcfed.partition(Y, "classes", per_client=2, clients=3)
    assert few.counts.sum() == 1200


def test_shares_of_sizes_and_a_cap():
    sizes = hpcfed.partition(Y, "quantity", clients=10, min_samples=10).sizes
    assert (sizes.sum(), sizes.min() >= 10, sizes.max() > 2 * sizes.min()) == (1200, True, True)
    capped = hpcfed.partition(Y, "dirichlet-class", alpha=0.5, clients=10, capped=True, min_samples=10)
    shares = np.cumsum(capped.counts, axis=1)
    full = shares[:, :-1] >= 120
    assert full.any()
    assert (capped.counts[:, 1:][full] == 0).all()  # who has n/N gets no more


def test_a_column_words_and_noise(tmp_path):
    frame = pd.DataFrame({"site": [*"bbaac"] * 4, "kind": ["x", "y"] * 10})
    by_site = hpcfed.partition(frame, "column", column="site")
    assert (by_site.names, by_site.sizes.tolist()) == (["a", "b", "c"], [8, 8, 4])
    dealt = hpcfed.partition(frame, "classes", column="kind", per_client=1, clients=2, noise=0.5)
    assert (dealt.classes, len(dealt)) == (["x", "y"], 2)
    x = np.full((20, 50), 255, np.uint8)
    first, last = (part[0] for part in dealt.clients(x, frame["kind"]).values())
    assert (first == 1).all()
    assert last.std() == pytest.approx(0.5, rel=0.1)
    assert "classes, clients 2, per_client 1" in str(dealt)
    assert "  client  x y" in str(dealt).splitlines()
    figure = dealt.plot(tmp_path / "dealt.png")
    assert figure._repr_png_().startswith(b"\x89PNG")  # which a notebook shows without pyplot
    assert (tmp_path / "dealt.png").stat().st_size > 10_000


def test_skew_is_0_for_equals_and_grows():
    assert skew_of(np.array([4, 4]), np.array([[2, 2], [2, 2]])).labels == 0
    assert skew_of(np.array([4, 4]), np.array([[4, 0], [0, 4]])) == skew_of(
        np.array([9, 9]), np.array([[9, 0], [0, 9]])
    )
    apart = skew_of(np.array([4, 4]), np.array([[4, 0], [0, 4]]))
    assert (apart.labels, apart.sizes) == (0.5, 0.0)
    alphas = [hpcfed.partition(Y, "dirichlet-client", alpha=a, clients=10).skew.labels for a in (100.0, 1.0, 0.1)]
    assert alphas == sorted(alphas)
    assert skew_of(np.array([1, 3])).labels is None


def test_numbers_of_numpy_are_numbers():
    own = {"alpha": 0.25, "sizes": "lognormal", "sigma": 0.5, "min_samples": 2, "clients": 10, "seed": 3, "noise": 0.5}
    types = {float: np.float32, int: np.int64, str: np.str_}
    dealt = hpcfed.partition(Y, "dirichlet-client", **{key: types[type(value)](value) for key, value in own.items()})
    assert (dealt.owner == hpcfed.partition(Y, "dirichlet-client", **own).owner).all()
    assert json.loads(json.dumps(dealt.scheme)) == {"scheme": "dirichlet-client", **own}


@pytest.mark.parametrize("sigma", [500.0, 1.5e308])
def test_however_uneven_sizes_are_no_sample_is_lost(sigma):
    sizes = hpcfed.partition(Y, "iid", clients=10, sizes="lognormal", sigma=sigma).sizes
    assert (sizes.sum(), sizes.min(), sizes.max() > 1100) == (1200, 1, True)


@pytest.mark.parametrize(
    ("labels", "scheme", "options", "says"),
    [
        (Y, "dirichlet", {}, "did you mean 'dirichlet-class' or 'dirichlet-client'?"),
        (Y, "iid", {"alpha": 0.3}, "--alpha has no effect with --partition iid"),
        (Y, "classes", {"per_client": 7}, "expected 1 to 6 classes"),
        (Y, "classes", {"per_client": 1, "clients": 5}, "classes without a client"),
        (Y, "iid", {"clients": 0}, "clients: expected a whole number from 1"),
        (Y, "iid", {"clients": 2000}, "more clients than samples"),
        (Y, "natural", {}, "use 'column'"),
        (Y, "iid", {"column": "site"}, "expected a data frame"),
        (Y / 7, "shards", {}, "use 'iid' or 'quantity'"),
        (X, "iid", {}, "one number or word a sample"),
        (pd.DataFrame({"site": [1, 2]}), "iid", {"column": "sit"}, "did you mean 'site'?"),
        (Y, "iid", {"noise": -1}, "noise: expected a number from 0"),
        (Y, "iid", {"seed": -1}, "seed: expected a whole number from 0, got -1"),
        (Y, "iid", {"seed": 1.5}, "seed: expected a whole number from 0, got 1.5"),
        (Y, None, {}, "scheme: expected a name"),
        (Y, "quantity", {"alpha": "0.5"}, "--alpha: expected a number, got '0.5'"),
        (Y, "shards", {"shards": 2.5}, "--shards: expected a whole number from 1, got 2.5"),
        (Y, "classes", {"per_client": "2"}, "--per-client: expected a whole number from 1"),
        (Y, "iid", {"min_samples": -1}, "--min-samples: expected a whole number from 0, got -1"),
        (Y, "shards", {"min_samples": 2.5}, "--min-samples: expected a whole number from 0"),
        (Y, "dirichlet-class", {"capped": "no"}, "--capped: expected True or False, got 'no'"),
        (Y, "iid", {"sizes": 3}, "--sizes: expected equal or lognormal, got 3"),
    ],
    ids=range(22),
)
def test_mistakes_end_in_one_line(labels, scheme, options, says):
    with pytest.raises(InputError) as raised:
        hpcfed.partition(labels, scheme, **options)
    assert says in str(raised.value)
