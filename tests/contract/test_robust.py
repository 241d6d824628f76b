"""What takes the mean's place: rules by hand and against attackers, what they need; attacks on labels and samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpcfed
from hpcfed.ranks.world import World
from hpcfed.reduce.kept import KeptVectors
from hpcfed.types import DELTA
from hpcfed.updates import PartContext, RobustMean, _robust
from hpcfed.updates.geometric_median import GeometricMedian
from hpcfed.updates.krum import Krum
from hpcfed.updates.median import Median
from hpcfed.updates.trimmed_mean import TrimmedMean
from tests.contract.meamed import MeanAroundMedian
from tests.launch import ROOT
from tests.mpi.recipes import small, write_small

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]
ATTACK = {"attack": {"clients": [1, 4], "factor": -50.0}}
RULES: Mapping[str, Any] = {
    "median": "median",
    "trimmed-mean": {"trimmed-mean": {"fraction": 0.3}},
    "krum": {"krum": {"attackers": 2}},
    "multi-krum": {"krum": {"attackers": 2, "selected": 4}},
    "geometric-median": "geometric-median",
    "own": {"factory": "meamed:MeanAroundMedian", "args": {"attackers": 2}},
}


def of(rule: RobustMean, rows: np.ndarray, weights: np.ndarray | None = None, dtype=torch.float32) -> np.ndarray:
    """What a rule makes of clients' vectors, (m, d)."""
    vectors = torch.from_numpy(rows).to(dtype)
    shares = np.full(len(rows), 1 / len(rows)) if weights is None else weights / weights.sum()
    kept = KeptVectors(World())
    kept.begin([DELTA])
    for place, vector in enumerate(vectors):
        kept.keep(place, DELTA, vector, 1.0)
    mean = torch.from_numpy(shares @ vectors.double().numpy())
    bounds = vectors.abs().amax(1).double().numpy()
    return rule.of(kept.of(DELTA, mean, range(len(rows)), shares, bounds, dtype), PartContext(1, 0.1, 7, 0)).numpy()


def draw(clients: int = 9, entries: int = 37, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(clients, entries)).astype(np.float32)


@pytest.mark.parametrize("clients", [1, 8, 9])
def test_rules_of_entries_by_hand(clients, monkeypatch):
    """In blocks of 5 of the 37 entries."""
    monkeypatch.setattr(_robust, "BLOCK", 5 * clients)
    rows = draw(clients)
    np.testing.assert_array_equal(of(Median(), rows), np.median(rows.astype(float), axis=0))
    cut, ordered = int(0.3 * clients), np.sort(rows.astype(float), axis=0)
    expected = ordered[cut : clients - cut].mean(0)
    np.testing.assert_allclose(of(TrimmedMean(fraction=0.3), rows), expected, rtol=1e-13, atol=1e-15)
    assert (TrimmedMean(fraction=0.29).cut(100), TrimmedMean(fraction=0.49999999999).cut(2)) == (29, 0)
    np.testing.assert_allclose(of(TrimmedMean(fraction=0.0), rows), rows.astype(float).mean(0), rtol=1e-12, atol=1e-15)
    if clients > 2:
        median = np.median(rows.astype(float), axis=0)
        near = np.argsort(np.abs(rows - median), axis=0, kind="stable")[: clients - 2]
        expected = np.take_along_axis(rows.astype(float), near, 0).mean(0)
        np.testing.assert_allclose(of(MeanAroundMedian(attackers=2), rows), expected, rtol=1e-12, atol=1e-15)


def test_krum_by_hand():
    rows = draw()
    squares = ((rows[:, None].astype(float) - rows[None]) ** 2).sum(2)
    scores = np.sort(squares, axis=1)[:, 1 : len(rows) - 2 - 2 + 1].sum(1)
    np.testing.assert_array_equal(of(Krum(attackers=2), rows), rows[scores.argmin()])
    chosen = np.argsort(scores)[:3]
    expected = rows[chosen].astype(float).mean(0)
    np.testing.assert_allclose(of(Krum(attackers=2, selected=3), rows), expected, rtol=1e-13, atol=1e-15)
    same = np.repeat(draw(1), 5, axis=0)
    np.testing.assert_array_equal(of(Krum(attackers=1), same), same[0])


def test_the_geometric_median_is_where_the_distances_are_least():
    rows, weights = draw(), np.arange(1.0, 10.0)
    found = of(GeometricMedian(steps=200), rows, weights, torch.float64)
    directions = found - rows
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    assert np.linalg.norm((weights / weights.sum()) @ directions) < 1e-6  # of whose norm the slope is
    on_one = np.concatenate([np.repeat(rows[:1], 6, axis=0), rows[1:4]])
    np.testing.assert_allclose(of(GeometricMedian(steps=60), on_one), rows[0], atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_sums_of_any_size_are_as_precise(scale):
    rows = draw().astype(np.float64) * scale
    rows[0] *= 1e4
    found, expected = of(GeometricMedian(steps=3), rows, dtype=torch.float64), rows.mean(0)
    for _ in range(3):
        beta = 1 / np.maximum(1e-6, np.linalg.norm(rows - expected, axis=1))
        expected = (beta / beta.sum()) @ rows
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * scale)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with data of nine clients."""
    folder = tmp_path_factory.mktemp("robust")
    write_small(folder, num_clients=9)
    return folder


def run(folder: Path, output: str, **changes: Any) -> hpcfed.Result:
    paths = {"data": str(folder / "small.h5"), "python_path": [str(Path(__file__).parent)]}
    return hpcfed.run(small(folder / output, **{**paths, **changes}), world=World(), quiet=True)


@pytest.fixture(scope="module")
def losses(place) -> tuple[float, float]:
    """Test losses of the mean without attackers, and with two of nine."""
    return tuple(
        run(place, name, updates=parts).metrics[-1]["test_loss"] for name, parts in (("free", []), ("open", [ATTACK]))
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("rule", RULES)
def test_a_robust_mean_holds_against_attackers(rule, place, losses):
    free, attacked = losses
    held = run(place, rule, updates=[ATTACK], means=[RULES[rule]]).metrics[-1]
    assert attacked > 5 * free
    assert held["test_loss"] < 1.3 * free
    exchanges = {"geometric-median": 16, "krum": 2, "multi-krum": 2}
    assert held["method"] == {"robust_allreduces": exchanges.get(rule, 1)}


def test_vectors_of_a_method_and_clients_that_do_not_count(place):
    """SCAFFOLD's Ψ has a median, too; a client that is skipped is not among the m."""
    found = run(place, "scaffold", algorithm={"name": "scaffold"}, means=["median"])
    assert found.metrics[-1]["method"] == {"robust_allreduces": 2}
    averaged = run(place, "average", means=["median", {"clip": {"norm": 0.01}}], evaluate={"model": "client-average"})
    assert averaged.metrics[-1]["delta_sq"] == pytest.approx(1e-4, rel=1e-6)
    infinite = {"factory": "noisy:Noise", "args": {"clients": [1, 4], "scale": 1e300}}
    skipping = run(place, "skips", updates=[infinite], means=["median"], on_bad_client="skip", rounds=1)
    without = run(place, "without", means=["median"], cohort={"without": [1, 4]}, rounds=1)
    assert skipping.metrics[0]["skipped"] == [1, 4]
    assert skipping.metrics[0]["test_loss"] == without.metrics[0]["test_loss"]


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "second": ({"means": [{"clip": {"norm": 1.0}}, "median"]}, r"means\.1: median takes the mean's place; put it"),
    "twice": ({"means": ["median", "geometric-median"]}, r"means\.1: geometric-median takes the mean's place"),
    "few": ({"means": [{"krum": {"attackers": 4}}]}, "expected 11 clients or more in a round, got 9"),
    "drawn": (
        {"means": [{"krum": {"attackers": 1}}], "cohort": {"fraction": 0.9, "sampling": "bernoulli"}},
        "krum with cohort.sampling: bernoulli, whose cohorts may be too small",
    ),
    "left out": (
        {"means": [{"krum": {"attackers": 3}}], "cohort": {"without": [2]}},
        "^recipe: means: krum.*expected 9 clients or more in a round, got 8",
    ),
    "scheduled": (
        {"means": [{"krum": {"attackers": 1}}], "cohort": {"schedule": "$ROBUST/cohorts.json"}},
        "^recipe: means: krum.*expected 5 clients or more in a round, got 4",
    ),
    "sums": ({"algorithm": {"name": "feddyn", "alpha": 0.1}, "means": ["median"]}, "median with feddyn has no meaning"),
    "norms": ({"algorithm": "fedexp", "means": ["geometric-median"]}, "geometric-median with fedexp has no meaning"),
    "empty": ({"means": [{"factory": "empty:Empty"}]}, "Empty has no 'of'"),
    "few for one's own": ({"means": [{"factory": "empty:Many"}]}, "empty:Many: expected 10 clients or more.*got 9"),
    "skipped": (
        {
            "updates": [{"factory": "noisy:Noise", "args": {"clients": [1, 4], "scale": 1e300}}],
            "means": [{"factory": "empty:Many", "args": {"fewest": 8, "attackers": [1, 4]}}],
            "on_bad_client": "skip",
        },
        "^round 1: means: expected 8 clients or more in a round, got 7",
    ),
    "no number": ({"means": [{"factory": "empty:Odd"}]}, "empty:Odd: its least: expected a number of clients, got '2'"),
    "hidden": (
        {"means": [{"factory": "empty:hidden"}]},
        "parameter 'least' of Own is hidden by RobustMean.least: write",
    ),
    "shape": ({"means": [{"factory": "empty:Short"}]}, "its answer.*expected"),
    "memory": ({"means": [{"factory": "empty:Counting"}]}, "a different vector"),
}
EMPTY = """
from hpcfed import RobustMean

CALLS = []


class Empty(RobustMean):
    pass


class Short(RobustMean):
    def of(self, vectors, context):
        return vectors.mean[1:]


class Many(RobustMean):
    fewest: int = 10
    attackers: list[int] = []

    @property
    def least(self):
        return self.fewest

    def of(self, vectors, context):
        return vectors.mean


class Odd(Many):
    fewest: str = "2"


def hidden():
    class Own(RobustMean):
        least: int = 3

        def of(self, vectors, context):
            return vectors.mean * self.least

    return Own()


class Counting(RobustMean):
    def of(self, vectors, context):
        CALLS.append(1)
        return vectors.mean * len(CALLS)
"""


@pytest.mark.filterwarnings("ignore:Field name:UserWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused_in_one_line(case, place, monkeypatch):
    changes, words = REFUSED[case]
    (place / "empty.py").write_text(EMPTY)
    monkeypatch.setenv("ROBUST", str(place))
    (place / "cohorts.json").write_text("[[0, 1, 2, 3, 4], [0, 1, 2, 3], [4, 5, 6, 7, 8]]")
    with pytest.raises(hpcfed.InputError, match=words) as refused:
        run(place, "refused", python_path=[str(place), str(ROOT / "tests" / "contract")], **changes)
    assert "\n" not in str(refused.value)


def test_updates_that_do_not_fit_are_refused_with_the_memory_they_need(place, monkeypatch):
    monkeypatch.setattr("hpcfed.assembly.parts.free_memory", lambda: 1 << 13)
    with pytest.raises(hpcfed.InputError, match=r"median keeps the updates of 9 clients.*GiB of memory for each rank"):
        run(place, "large", means=["median"])


def test_flipped_labels_are_trained_on_and_not_measured(place):
    """Both engines see the same; other clients, and the measures of all, see the labels of the file."""
    flip = {"attack": {"clients": [1, 4, 5], "what": "labels"}}
    local = {"steps": 4, "batch_size": 10, "lr": 0.1}
    each = [
        run(place, engine, updates=[flip], dtype="float64", local={**local, "engine": engine}).metrics
        for engine in ("sequential", "batched")
    ]
    for column in ("test_loss", "local_loss", "delta_sq"):
        assert [row[column] for row in each[0]] == pytest.approx([row[column] for row in each[1]], rel=1e-9)
    plain = run(place, "plain", dtype="float64", local={**local, "engine": "sequential"}).metrics
    assert each[0][-1]["test_loss"] > plain[-1]["test_loss"]
    honest, none = (
        run(place, name, updates=parts, cohort={"schedule": [[0]]}).metrics[-1]["hash"]
        for name, parts in (("honest", [flip]), ("none", []))
    )
    assert honest == none


def test_an_attack_of_the_users_on_updates_or_samples(place, losses):
    for of_samples in (False, True):
        attack = {"factory": "noisy:Noise", "args": {"clients": [1, 4], "scale": 9.0, "of_samples": of_samples}}
        found = run(place, f"noise-{of_samples}", updates=[attack])
        assert found.metrics[-1]["test_loss"] > losses[0]
        again = run(place, f"again-{of_samples}", updates=[attack])
        assert [row["hash"] for row in found.metrics] == [row["hash"] for row in again.metrics]


@pytest.mark.parametrize("file", ["meamed", "noisy"])
def test_the_page_has_the_files(file):
    text = (ROOT / "tests" / "contract" / f"{file}.py").read_text(encoding="utf-8")
    assert text in (ROOT / "docs" / "updates.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
