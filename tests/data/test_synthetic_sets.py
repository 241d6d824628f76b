"""Synthetic sets: what their parameters mean, shown by the statistics of the samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.optimize import linprog

import hpcfed
from data_prep.dataset import Dataset
from data_prep.split import split
from data_prep.synthetic import fcube, feddyn, fedprox, leaf, linear_regression
from hpcfed.cli import prepare
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError

VARIANCE = np.arange(1, 61) ** -1.2


def clients_of(dataset: Dataset) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return x and y of each client, whose rows are adjacent."""
    assert np.all(np.diff(dataset.owner) >= 0)
    bounds = np.cumsum(np.bincount(dataset.owner))[:-1]
    return list(zip(np.split(dataset.x, bounds), np.split(dataset.y, bounds), strict=True))


def separable(x: np.ndarray, y: np.ndarray, classes: int) -> bool:
    """Tell whether some linear classifier with bias gets every sample right: a linear program knows for certain."""
    inputs = np.column_stack([x, np.ones(len(x))])
    lead = []  # of the right class over each other one, to be at least 1
    for other in range(classes):
        rows = np.zeros((len(x), classes, inputs.shape[1]))
        rows[np.arange(len(x)), y] = inputs
        rows[:, other] -= inputs
        lead.append(rows[y != other].reshape(-1, classes * inputs.shape[1]))
    constraints = np.concatenate(lead)
    found = linprog(np.zeros(constraints.shape[1]), -constraints, -np.ones(len(constraints)), bounds=(None, None))
    assert found.status in (0, 2), found.message  # solved, or infeasible
    return found.status == 0


def prepared(path: Path, *arguments: object) -> Path:
    """Run ``hpcfed prepare`` in this process and return the file it wrote."""
    done = CliRunner().invoke(prepare.command, [*map(str, arguments), "-o", str(path)])
    if done.exception is not None:
        raise done.exception
    return path


def test_the_homogeneous_set_has_the_papers_size_and_law() -> None:
    dataset = feddyn.generate(0)
    assert (dataset.x.shape, dataset.x.dtype, dataset.y.dtype) == ((4000, 30), np.float64, np.int64)
    assert [len(y) for _, y in clients_of(dataset)] == [200] * 20
    assert (dataset.num_classes, set(dataset.y.tolist())) == (5, {0, 1, 2, 3, 4})
    assert (dataset.test_x, dataset.source["gamma"]) == (None, None)
    # A variance over 4000 samples has a relative deviation of √(2/4000) = 0.022; a mean, one of 1/√4000 = 0.016.
    np.testing.assert_allclose(dataset.x.var(axis=0), VARIANCE[:30], rtol=0.1)
    assert np.all(np.abs(dataset.x.mean(axis=0)) < 0.08 * np.sqrt(VARIANCE[:30]))


def test_one_linear_classifier_fits_all_types_but_that_of_models() -> None:
    small = {"clients": 6, "dimension": 4, "classes": 3}
    same = [feddyn.generate(1, **small), *(feddyn.generate(1, type=type, gamma=0.3, **small) for type in (2, 3))]
    assert separable(np.concatenate([d.x for d in same]), np.concatenate([d.y for d in same]), classes=3)
    own = feddyn.generate(1, type=1, **small)
    assert all(separable(x, y, classes=3) for x, y in clients_of(own))
    assert not separable(own.x, own.y, classes=3)


def test_the_type_of_models_leaves_the_features_and_its_gamma_the_labels() -> None:
    plain, none, some = feddyn.generate(2), feddyn.generate(2, type=1, gamma=0), feddyn.generate(2, type=1, gamma=3)
    np.testing.assert_array_equal(none.x, plain.x)
    assert np.mean(none.y != plain.y) > 0.5
    np.testing.assert_array_equal(some.y, none.y)


def test_the_type_of_features_moves_each_client_as_far_as_gamma_says() -> None:
    gamma, clients, dimension = 3.0, 400, 30
    moved = feddyn.generate(3, type=2, gamma=gamma, clients=clients)
    step = (moved.x - feddyn.generate(3, clients=clients).x).reshape(clients, 200, dimension)
    np.testing.assert_allclose(step, np.broadcast_to(step[:, :1], step.shape), atol=1e-12)
    # ν_i ~ N(β_i, 1) has variance 1 within a client; its mean has γ² + 1/d over the clients, ± √(2/400) = 0.07 of it.
    np.testing.assert_allclose(step[:, 0].var(axis=1, ddof=1).mean(), 1, rtol=0.1)
    np.testing.assert_allclose(step[:, 0].mean(axis=1).var(), gamma**2 + 1 / dimension, rtol=0.25)


def test_the_type_of_sizes_spreads_them_lognormally_around_200() -> None:
    gamma, clients = 0.5, 2000
    sizes = np.bincount(feddyn.generate(4, type=3, gamma=gamma, clients=clients, dimension=1).owner)
    assert len(sizes) == clients
    logarithms = np.log(sizes / 200)
    np.testing.assert_allclose(np.median(logarithms), 0, atol=0.06)
    np.testing.assert_allclose(logarithms.std(), gamma, rtol=0.08)
    assert np.bincount(feddyn.generate(4, type=3, gamma=3, clients=200, dimension=1).owner).min() == 1


@pytest.mark.parametrize(
    ("type", "gamma", "message"),
    [
        (4, None, "0 (homogeneous), 1 (models), 2 (features), 3 (sizes), got 4"),
        (-1, None, "got -1"),
        (0, 1.0, "gamma has no effect with type 0"),
        (1, -1.0, "gamma: expected a number from 0 to 1e+06, got -1.0"),
        (2, float("nan"), "got nan"),
        (2, float("inf"), "got inf"),
        (3, 1000.0, "samples; ask for a smaller gamma"),
    ],
)
def test_a_wrong_heterogeneity_is_refused(type: int, gamma: float | None, message: str) -> None:
    with pytest.raises(InputError) as refused:
        feddyn.generate(0, type=type, gamma=gamma)
    assert message in str(refused.value)


def test_leafs_set_is_the_one_gel_was_measured_on() -> None:
    dataset = leaf.generate()
    sizes = np.bincount(dataset.owner)
    assert (len(dataset.x), len(dataset.test_x), len(sizes)) == (96_374, 11_179, 1000)  # GeL, table 4
    assert int(np.median(sizes)) == 22
    assert (dataset.x.shape[1:], dataset.x.dtype, dataset.num_classes) == ((60,), np.float64, 5)
    # What LEAF's own main.py makes of `-num-tasks 1000 -num-classes 5 -num-dim 60`, before its split:
    x, y = np.empty((107_553, 60)), np.empty(107_553, np.int64)
    test = np.setdiff1d(np.arange(len(x)), dataset.rows)
    x[dataset.rows], x[test] = dataset.x, dataset.test_x
    y[dataset.rows], y[test] = dataset.y, dataset.test_y
    assert sizes[:5].tolist() == [int(0.9 * size) for size in (86, 33, 52, 6, 11)]
    assert np.bincount(y).tolist() == [16_607, 15_477, 23_124, 35_783, 16_562]
    np.testing.assert_allclose(x[0, :3], [-1.68079789, 2.34699859, -1.35341588], atol=1e-8)
    np.testing.assert_allclose(x[-1, :3], [0.51199211, 0.15062051, 0.65280371], atol=1e-8)
    within = np.concatenate([own - own.mean(axis=0) for own, _ in clients_of(dataset)])
    np.testing.assert_allclose((within**2).sum(axis=0) / (len(within) - 1000), VARIANCE, rtol=0.03)


def test_leafs_halves_are_drawn_from_every_client() -> None:
    dataset = leaf.generate(7, clients=50, dimension=3, classes=2)
    assert len(np.unique(dataset.rows)) == len(dataset.rows)
    early = [np.diff(dataset.rows[dataset.owner == k]).max(initial=1) == 1 for k in range(50)]
    assert not all(early)  # some test sample lies between two of training
    per_client = np.bincount(dataset.owner)
    total = len(dataset.x) + len(dataset.test_x)
    assert per_client.min() >= 4
    assert total * 0.9 - 50 < len(dataset.x) <= total * 0.9


def test_leafs_seed_is_bounded() -> None:
    leaf.generate(leaf.LARGEST_SEED, clients=2, dimension=2)
    with pytest.raises(InputError, match="at most 4294967295, got 4294967296"):
        leaf.generate(leaf.LARGEST_SEED + 1, clients=2)


def test_fedproxs_set_has_its_sizes_laws_and_halves() -> None:
    dataset = fedprox.generate(0)
    sizes = np.bincount(dataset.owner) + np.bincount(dataset.test_owner)
    assert (dataset.x.shape[1:], dataset.x.dtype, dataset.num_classes, len(sizes)) == ((60,), np.float64, 10, 30)
    assert np.bincount(dataset.owner).tolist() == [int(0.9 * size) for size in sizes]
    assert np.array_equal(np.sort(dataset.rows), dataset.rows)
    assert len(np.unique(dataset.rows)) == len(dataset.rows)
    within = np.concatenate([own - own.mean(axis=0) for own, _ in clients_of(dataset)])
    np.testing.assert_allclose((within**2).sum(axis=0) / (len(within) - 30), VARIANCE, rtol=0.06)
    many = np.bincount(fedprox.generate(1, clients=4000, dimension=1, classes=2).owner) / 0.9
    np.testing.assert_allclose(np.median(np.log(many - 50 + 1)), 4, atol=0.15)  # ± 1.25 · 2 / √4000 = 0.04
    assert many.min() >= 50


def test_fedproxs_beta_spreads_features_and_its_alpha_no_label() -> None:
    clients, dimension = 400, 30
    for beta in (0.0, 0.5, 3.0):
        dataset = fedprox.generate(2, beta=beta, clients=clients, dimension=dimension, classes=2)
        centres = np.array([own.mean(axis=0) for own, _ in clients_of(dataset)])
        # B_k has variance β², v_k 1 more, and a mean over d = 30 of them 1/30 more; ± √(2/400) = 0.07 of it.
        np.testing.assert_allclose(centres.mean(axis=1).var(), beta**2 + 1 / dimension, rtol=0.3)
        np.testing.assert_allclose(centres.var(axis=1, ddof=1).mean(), 1, rtol=0.1)
    none, some = (fedprox.generate(3, alpha=alpha, clients=20) for alpha in (0.0, 1.0))
    np.testing.assert_array_equal(none.x, some.x)
    np.testing.assert_array_equal(none.y, some.y)


def test_fedproxs_clients_have_models_of_their_own_unless_iid() -> None:
    small = {"clients": 4, "dimension": 3, "classes": 3}
    own, common = fedprox.generate(1, **small), fedprox.generate(1, iid=True, **small)
    assert all(separable(x[:60], y[:60], classes=3) for x, y in clients_of(own))
    assert not separable(own.x[:400], own.y[:400], classes=3)
    assert separable(common.x[:400], common.y[:400], classes=3)
    assert np.abs(common.x.mean(axis=0)).max() < 0.2
    assert (common.source["alpha"], common.source["iid"]) == (None, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "alpha of fedprox-synthetic: expected a number from 0 to 1e+06, got -1.0"),
        ({"beta": float("nan")}, "beta of fedprox-synthetic"),
        ({"iid": True, "beta": 1.0}, "alpha and beta have no effect with iid"),
    ],
)
def test_wrong_spreads_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError) as refused:
        fedprox.generate(0, **options)
    assert message in str(refused.value)


def test_fcubes_clients_have_two_opposite_corners_each() -> None:
    dataset = fcube.generate(3)
    corners = [{tuple(row) for row in np.sign(x).astype(int).tolist()} for x, _ in clients_of(dataset)]
    assert corners == [{(1, b, c), (-1, -b, -c)} for b, c in ((1, 1), (1, -1), (-1, 1), (-1, -1))], (
        "the second feature is negated for the last two, the third for odd ones"
    )
    assert np.bincount(dataset.owner).tolist() == [1000] * 4
    for x, y in ((dataset.x, dataset.y), (dataset.test_x, dataset.test_y)):
        assert np.array_equal(y, x[:, 0] <= 0)
        assert 0.45 < y.mean() < 0.55
        assert 0.95 < np.abs(x).max() <= 1


def test_a_seed_makes_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for source in (feddyn.NAME, fedprox.NAME, leaf.NAME):
        small = (source, "--clients", 8, "--dimension", 4, "--classes", 3)
        first, again, other = (
            prepared(tmp_path / f"{source}-{i}.h5", *small, "--seed", seed).read_bytes()
            for i, seed in enumerate((3, 3, 4))
        )
        assert first == again != other


def test_every_stream_has_the_seed_and_a_purpose_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other streams alone would make other files of another seed."""
    made, entropy = list[tuple[int, int]](), np.random.SeedSequence
    small = fedprox.generate(0, clients=4, dimension=2, classes=2)
    shared = {"crop": 40, "test_crop": 3, "deal": 2, "shuffle": True, "test_fraction": 0.2}
    grouped = replace(small, group=np.arange(len(small.x)) // 3)
    x, y = np.zeros((90, 2)), np.arange(90) % 3
    monkeypatch.setattr(np.random, "SeedSequence", lambda words: made.append(tuple(words)) or entropy(words))
    for deed in (
        *(lambda kind=kind: feddyn.generate(9, type=kind, clients=3) for kind in range(4)),
        lambda: fedprox.generate(9, clients=3),
        lambda: fcube.generate(9),
        lambda: linear_regression.generate(9, dimension=2),
        lambda: split(small, None, 3, 9, shared),
        lambda: split(grouped, "iid", 3, 9, {"test_fraction": 0.2}),
        lambda: hpcfed.partition(y, "shards", clients=3, seed=9, noise=0.5).clients(x, y),
    ):
        made.clear()
        deed()
        assert {seed for seed, _ in made} == {9}
        assert len({*made}) == len(made)


def test_prepare_passes_the_options_of_a_generator_on(tmp_path: Path) -> None:
    arguments = (feddyn.NAME, "--type", 1, "--gamma", 2, "--clients", 7, "--dimension", 6, "--classes", 3, "--seed", 9)
    with Federation.open(prepared(tmp_path / "feddyn.h5", *arguments)) as federation:
        expected = {"type": 1, "gamma": 2.0, "clients": 7, "dimension": 6, "classes": 3, "seed": 9}
        assert expected.items() <= federation.source.items()
        assert federation.sizes.tolist() == [200] * 7
        assert (federation.feature_shape, federation.num_classes, federation.num_test) == ((6,), 3, 0)
        assert federation.partition == {"scheme": "natural", "clients": 7}
    arguments = (fedprox.NAME, "--alpha", 0.5, "--beta", 2, "--clients", 5)
    with Federation.open(prepared(tmp_path / "fedprox.h5", *arguments)) as federation:
        assert {"alpha": 0.5, "beta": 2.0, "iid": False, "clients": 5}.items() <= federation.source.items()
        assert federation.test_offsets[-1] == federation.num_test
    with Federation.open(prepared(tmp_path / "iid.h5", fedprox.NAME, "--iid", "--clients", 3)) as federation:
        assert federation.source["iid"]
    with Federation.open(prepared(tmp_path / "leaf.h5", leaf.NAME, "--clients", 30)) as federation:
        assert federation.source["seed"] == leaf.SEED == 931_231
        assert federation.num_samples + federation.num_test == 2947  # of LEAF's own first 30 clients
    arguments = (feddyn.NAME, "--clients", 4, "--partition", "dirichlet-class", "--min-samples", 0)
    with Federation.open(prepared(tmp_path / "split.h5", *arguments)) as federation:
        assert (federation.partition["scheme"], federation.num_clients) == ("dirichlet-class", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("digits --gamma 1", "--gamma has no effect with digits"),
        ("leaf-synthetic --type 1 --gamma 1", "--gamma, --type has no effect with leaf-synthetic"),
        ("feddyn-synthetic --alpha 0.3", "--alpha has no effect with feddyn-synthetic, which comes split"),
        ("feddyn-synthetic --raw .", "feddyn-synthetic is not read from files"),
        ("feddyn-synthetic --type 5", "got 5"),
        ("fedprox-synthetic --gamma 1", "--gamma has no effect with fedprox-synthetic"),
        ("digits --incomplete --iid", "--iid, --incomplete has no effect with digits"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path: Path, arguments: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        prepared(tmp_path / "f.h5", *arguments.split())
    assert message in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_every_option_of_a_source_can_be_typed() -> None:
    typed = {parameter.name for parameter in prepare.command.params}
    for source in prepare.SOURCES.values():
        assert {*source.options} <= {*typed, "partition"}  # an option of some sources alone
