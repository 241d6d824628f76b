"""Partitions: every sample once, sizes as asked for, mixtures as the papers' authors have them."""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

import numpy as np
import pytest

from data_prep.partition import SCHEMES, options
from data_prep.partition._sizes import draw
from data_prep.sources import idx
from data_prep.streams import stream
from hpcfed.data.picture import classes_for_share
from hpcfed.errors import InputError
from tests.shared_files import shared_folder

STATISTICS = {
    "classes_for_80pct_mean": 0.2,
    "classes_for_80pct_median": 0.5,
    "mean_TV_to_uniform": 0.02,
    "mean_nonzero_classes": 0.3,
}
"""Names in the authors' statistics, and how far a mean of five draws may be from their one."""
LABELS = np.random.default_rng(5).integers(0, 7, 900)


DEALT: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("iid", {"sizes": "lognormal", "sigma": 0.5}, 1046846960),
    ("iid-per-class", {}, 1149242400),
    ("dirichlet-client", {"sizes": "lognormal", "sigma": 1.0, "min_samples": 40}, 1914767053),
    ("dirichlet-client", {"alpha": 1e-4}, 3186902946),
    ("dirichlet-class", {"min_samples": 5}, 1007134791),
    ("dirichlet-class", {"alpha": 0.5, "capped": True}, 1251312204),
    ("shards", {}, 2937286337),
    ("classes", {"per_client": 3}, 3309551694),
    ("quantity", {"min_samples": 10}, 3144484035),
)


def counts_of(owner: np.ndarray, labels: np.ndarray, num_clients: int) -> np.ndarray:
    """Return the samples of each class that each client holds, (N, K)."""
    num_classes = labels.max() + 1
    flat = np.bincount(owner * num_classes + labels, minlength=num_clients * num_classes)
    return flat.reshape(num_clients, num_classes)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pure_function_of_its_seed(scheme: str) -> None:
    first, again, other = (SCHEMES[scheme](LABELS, 12, stream(seed, "t")) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.shape == LABELS.shape
    assert set(first) == set(range(12))


@pytest.mark.parametrize(("scheme", "given", "digest"), DEALT)
def test_a_seed_deals_as_it_always_has(scheme: str, given: dict, digest: int) -> None:
    """Whom each sample goes to is part of every result, also which samples of a class a client gets."""
    owner = SCHEMES[scheme](LABELS, 12, stream(3, "t"), **given)
    assert zlib.crc32(owner.astype("<i4").tobytes()) == digest


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "sizes" in options(SCHEMES[name])])
def test_sizes_are_those_asked_for(scheme: str) -> None:
    equal = np.bincount(SCHEMES[scheme](LABELS, 13, stream(0, "t")))
    assert (equal.min(), equal.max(), equal.sum()) == (69, 70, 900)
    unequal = np.bincount(SCHEMES[scheme](LABELS, 13, stream(0, "t"), sizes="lognormal", sigma=1.0))
    assert unequal.sum() == 900
    assert unequal.max() > 3 * unequal.min()


def test_lognormal_sizes_have_the_spread_asked_for() -> None:
    sizes = draw("lognormal", 0.5, 10_000_000, 2_000, stream(0, "t"))
    assert sizes.sum() == 10_000_000
    assert np.log(sizes).std() == pytest.approx(0.5, rel=0.05)
    assert draw("lognormal", 3.0, 60, 50, stream(0, "t")).min() >= 1


def test_small_alpha_concentrates_and_large_alpha_does_not() -> None:
    for scheme in ("dirichlet-client", "dirichlet-class"):
        spread = []
        for alpha in (0.05, 1.0, 1000.0):
            owner = SCHEMES[scheme](LABELS, 12, stream(0, "t"), alpha=alpha)
            spread.append(classes_for_share(counts_of(owner, LABELS, 12)).mean())
        assert spread[0] < spread[1] - 0.5 < spread[2] - 1, scheme


def test_used_up_classes_end() -> None:
    """A client whose prior has underflowed to one class must not wait for ever for a sample of it."""
    owner = SCHEMES["dirichlet-client"](LABELS, 30, stream(0, "t"), alpha=1e-4)
    assert np.array_equal(np.bincount(owner), np.full(30, 30))


def test_one_client_and_one_sample_each() -> None:
    for name, scheme in SCHEMES.items():
        of_all = {"per_client": 7} if name == "classes" else {}  # one client with two classes would lose the others
        assert not scheme(LABELS, 1, stream(0, "t"), **of_all).any(), name
    for name in ("iid", "dirichlet-client"):
        assert np.array_equal(np.sort(SCHEMES[name](LABELS, 900, stream(0, "t"))), np.arange(900)), name


def test_dirichlet_class_divides_each_class_by_its_own_shares() -> None:
    """At large α every client gets an equal part of every class; the rounding of all parts stays below one sample."""
    counts = counts_of(SCHEMES["dirichlet-class"](LABELS, 10, stream(0, "t"), alpha=1e8), LABELS, 10)
    assert np.abs(counts - np.bincount(LABELS) / 10).max() <= 1


def test_dirichlet_class_keeps_min_samples() -> None:
    free = SCHEMES["dirichlet-class"](LABELS, 20, stream(1, "t"), alpha=0.1, min_samples=0)
    kept = SCHEMES["dirichlet-class"](LABELS, 20, stream(1, "t"), alpha=0.1, min_samples=4)
    assert np.bincount(free, minlength=20).min() < 4 <= np.bincount(kept, minlength=20).min()


@pytest.mark.parametrize(
    ("scheme", "num_clients", "given", "message"),
    [
        ("iid", 901, {}, "more clients than samples"),
        ("dirichlet-client", 901, {}, "more clients than samples"),
        ("dirichlet-class", 901, {}, "more clients than samples"),
        ("dirichlet-client", 9, {"alpha": 0.0}, "--alpha: expected a positive number, got 0.0"),
        ("dirichlet-class", 9, {"alpha": float("nan")}, "--alpha: expected a positive number"),
        ("dirichlet-client", 9, {"sizes": "lognormal", "sigma": -1.0}, "--sigma: expected a positive number"),
        ("iid", 9, {"sizes": "lognormla"}, "did you mean 'lognormal'"),
        ("shards", 9, {"shards": 0}, "--shards: expected at least 1 a client, got 0"),
        ("shards", 500, {"shards": 2}, "more clients than samples: got 500 clients of at least 2 for 900 samples"),
        ("iid", 100, {"min_samples": 10}, "100 clients of at least 10 for 900 samples"),
        ("dirichlet-class", 50, {"alpha": 0.01, "min_samples": 15}, "none of 1000 draws"),
    ],
)
def test_wrong_parameters(scheme: str, num_clients: int, given: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SCHEMES[scheme](LABELS, num_clients, stream(0, "t"), **given)


@pytest.mark.parametrize("alpha", [0.3, 0.6])
def test_mixtures_on_mnist_are_the_authors(alpha: float) -> None:
    """100 clients; over draws, the mean number of classes varies by 0.09 (standard deviation), the distance by 0.01."""
    raw, reference = shared_folder("data/MNIST"), shared_folder("reference")
    if raw is None or reference is None:
        pytest.skip("needs MNIST and the reference in $HPCFED_SHARED (default: beside the repository)")
    cases = json.loads((reference / "partition_stats.json").read_text())
    (authors,) = (case for case in cases if case["name"] == f"mnist_a{alpha}")
    labels = idx.read(raw / "train-labels-idx1-ubyte.gz", 1).astype(np.int64)
    draws = []
    for seed in range(5):
        owner = SCHEMES["dirichlet-client"](labels, 100, stream(seed, "t"), alpha=alpha)
        counts = counts_of(owner, labels, 100)
        assert counts.sum(axis=1).tolist() == [authors["sizes"][0]] * 100
        assert np.array_equal(counts.sum(axis=0), np.bincount(labels))
        shares = counts / counts.sum(axis=1, keepdims=True)
        held = classes_for_share(counts)
        distance = np.abs(shares - 0.1).sum(axis=1) / 2
        draws.append((held.mean(), np.median(held), distance.mean(), (counts > 0).sum(axis=1).mean()))
    found = dict(zip(STATISTICS, np.mean(draws, axis=0), strict=True))
    assert found == {name: pytest.approx(authors[name], abs=within) for name, within in STATISTICS.items()}


@pytest.mark.parametrize("num_clients", [100, 1000])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sixty_thousand_samples_take_seconds(scheme: str, num_clients: int) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    started = time.process_time()
    some = {"min_samples": 0} if scheme == "quantity" else {}  # Dir(½) leaves some of 1,000 clients without a sample
    SCHEMES[scheme](labels, num_clients, stream(0, "t"), **some)
    assert time.process_time() - started < 5


def test_lognormal_sizes_are_proportional_but_for_the_floor() -> None:
    free = draw("lognormal", 1.0, 10_000, 50, stream(0, "t"))
    kept = draw("lognormal", 1.0, 10_000, 50, stream(0, "t"), min_samples=60)
    assert free.min() < 60 == kept.min()
    assert free.sum() == kept.sum() == 10_000
    above = kept > 60
    assert (kept[above] / free[above]).std() < 0.01
    assert draw("lognormal", 1.0, 3_000, 50, stream(0, "t"), min_samples=60).tolist() == [60] * 50


def test_iid_per_class_deals_every_class_equally() -> None:
    """CIFAR-100's numbers: 500 images a class over 100 clients are 5 of each class for everyone."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(20), 500))
    counts = counts_of(SCHEMES["iid-per-class"](labels, 100, stream(0, "t")), labels, 100)
    assert (counts == 5).all()
    uneven = counts_of(SCHEMES["iid-per-class"](LABELS, 13, stream(0, "t")), LABELS, 13)
    assert np.ptp(uneven, axis=0).max() <= 1
    assert np.ptp(uneven.sum(axis=1)) == 1


def test_shards_are_few_classes_and_equal_sizes() -> None:
    labels = np.repeat(np.arange(10), 600)
    for shards, most in ((1, 1), (2, 2), (5, 5)):
        owner = SCHEMES["shards"](labels, 60, stream(0, "t"), shards=shards)
        counts = counts_of(owner, labels, 60)
        assert (counts.sum(axis=1) == 100).all()
        assert (counts > 0).sum(axis=1).max() <= most
        assert set(counts[counts > 0]) <= {n * 100 // shards for n in range(1, shards + 1)}
    odd = np.bincount(SCHEMES["shards"](LABELS, 13, stream(0, "t"), shards=3))
    assert (odd.sum(), np.ptp(odd) <= 3) == (900, True)
