"""Secure aggregation: masks cancel, sums are those of the same units without them, and what no server could do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import rdp

import hpcfed
from hpcfed.ranks.world import World
from hpcfed.reduce.masks import KEY, LARGEST_LOSS, SHARE, TAG, Masks, RoundMasks, dropouts, wrong_with
from hpcfed.rng import LARGEST_NORMAL, Purpose
from tests.contract.test_privacy import TELLS
from tests.mpi.recipes import METHODS, small, write_small

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]
CLIP = {"clip": {"norm": 0.3, "scales": {}}}
PARAMETERS = 12 * 8 + 8 + 8 * 4 + 4
COLUMNS = ("hash", "test_loss", "local_loss", "mean_delta_sq", "delta_sq", "skipped", "unit", "gradients")


def masks(clients: int, dropout: float = 0.0) -> tuple[Masks, RoundMasks]:
    run = Masks(lambda name: 0.3, dropout, 2, seed=7)
    return run, run.of_round(3, range(10, 10 + clients), np.ones(clients), np.ones(clients))


@pytest.mark.parametrize("clients", [2, 5, 100])
@pytest.mark.parametrize("ranks", [1, 3])
def test_masks_cancel_but_for_own_ones_and_those_with_clients_that_dropped_out(clients, ranks):
    run, of_round = masks(clients, 0.3)
    dropped = run.dropped(3, clients)
    sent = np.flatnonzero(~dropped).tolist()
    with np.errstate(over="ignore"):
        total = sum(of_round.of(sent[rank::ranks], 11) for rank in range(ranks))
        assert np.array_equal(total, of_round.of(sent, 11))
        own, lost = opened(of_round, sent, 11), np.zeros(11, np.uint64)
        for words in own.values():
            lost = lost + words
        assert np.array_equal(total, lost)
    assert of_round.of(sent[::ranks], 11).any()


def opened(of_round: RoundMasks, sent: list[int], size: int) -> dict[int, np.ndarray]:
    """Return what shares open of each client: b_i of one that sent; minus its masks with those who did, of one not."""
    found = {}
    for place, client in enumerate(of_round.clients):
        if place in sent:
            found[place] = of_round.drawn(Purpose.SELF_MASKS, client, size)
            continue
        found[place] = np.zeros(size, np.uint64)
        for other in sent:
            pair = sorted((client, of_round.clients[other]))
            words = of_round.drawn(Purpose.MASKS, pair[0] << 32 | pair[1], size)
            found[place] = found[place] - words if place < other else found[place] + words
    return found


def test_words_that_come_late_do_not_tell_what_their_client_has():
    """The masks of a dropped client's pairs are open; without a mask of its own, its words would then be bare."""
    _, of_round = masks(5)
    own, late, sent = np.arange(100, dtype=np.uint64), 2, [0, 1, 3, 4]
    shares = opened(of_round, sent, 100)
    seen = own + of_round.of([late], 100) + shares[late]  # its message, but for the masks that were opened
    assert not {*seen.tolist()} & {*own.tolist()}
    assert np.array_equal(seen - of_round.drawn(Purpose.SELF_MASKS, of_round.clients[late], 100), own)
    for place in sent:  # of whom b_i is open, and no mask with another who sent
        seen = own + of_round.of([place], 100) - shares[place]
        assert not {*seen.tolist()} & {*own.tolist()}


def test_masks_of_clients_and_rounds_differ():
    run, first = masks(3)
    second = run.of_round(4, range(10, 13), np.ones(3), np.ones(3))
    found = [of_round.of([place], 50) for of_round in (first, second) for place in range(3)]
    found += [of_round.singles(frozenset([place]), 50) for of_round in (first, second) for place in range(3)]
    assert len({word for words in found for word in words.tolist()}) == 600
    assert len({tuple(dropouts(seed, 0.5, round, 40)) for seed in (7, 8) for round in (3, 4)}) == 4


@pytest.mark.parametrize("clients", [2, 100])
def test_words_have_room_for_all_clients_at_the_bound(clients):
    run, of_round = masks(clients)
    counts = np.linspace(0.5, 1.5, clients)
    (unit,) = run.units({"delta": counts})["delta"]
    assert float((counts * 0.3).sum()) / unit < 2.0**62
    assert 0.3 / unit > 2.0**40  # and are finer than float32 by far
    whole = sum(of_round.numbers(1.0, 0.09, 2.5, 4) for _ in range(clients))
    square, loss, steps = of_round.read(whole)
    assert (square, loss, steps) == (pytest.approx(0.09 * clients, rel=1e-12), 2.5 * clients, 4 * clients)


def test_words_have_room_for_factors_of_any_size_and_sign_and_for_any_loss():
    run, counts, factors = masks(3)[0], np.array([-1.0, 0.5, -1.5]), np.array([1024.0, -1024.0, 1.0])
    (unit,) = run.units({"delta": counts * factors})["delta"]
    assert 2.0**40 < float(np.abs(counts * factors).sum() * 0.3) / unit < 2.0**62
    of_round, squares = run.of_round(3, range(3), counts, factors), (0.3 * factors) ** 2
    for loss, kept in ((1e300, LARGEST_LOSS), (-1e300, -LARGEST_LOSS)):
        words = [of_round.numbers(*each, loss, 1) for each in zip(counts.tolist(), squares.tolist(), strict=True)]
        assert of_round.read(sum(words)) == (pytest.approx(counts @ squares, rel=1e-12), 3 * kept, 3)
    rounded, beyond = 0.3 * (1 + 2.0**-12), 0.3 * (1 + 2.0**-8)
    assert [bool(wrong_with("delta", largest, 0.3)) for largest in (rounded, beyond, math.nan)] == [False, True, True]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with data of nine clients."""
    folder = tmp_path_factory.mktemp("secure")
    write_small(folder, num_clients=9)
    return folder


def run(folder: Path, output: str, **changes: Any) -> list[dict[str, Any]]:
    common = {"data": str(folder / "small.h5"), "updates": [CLIP], "rounds": 2}
    return hpcfed.run(small(folder / output, **{**common, **changes}), world=World(), quiet=True).metrics


def unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all masks be 0: what is left is the plain exact sum in the same units."""
    monkeypatch.setattr(RoundMasks, "drawn", lambda self, purpose, address, size: np.zeros(size, np.uint64))


NOT = ("fedadagrad", "fedadam", "fedyogi", "fedavgm", "fedexp-m", "scaffold-exp", "fedprox", "dsgd")
"""Methods whose client side is another one's: in the soak alone."""


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.soak] if n in NOT else []) for n in METHODS])
def test_masked_sums_are_those_without_masks(name, place, monkeypatch):
    about = {"algorithm": {"name": name, **METHODS[name]}, "secure_aggregation": {"dropout": 0.3}}
    masked = run(place, f"{name}-masked", **about)
    unmasked(monkeypatch)
    plain = run(place, f"{name}-plain", **about)
    assert [[row[column] for column in COLUMNS] for row in masked] == [[row[c] for c in COLUMNS] for row in plain]
    assert any(row["skipped"] for row in masked)


@pytest.mark.parametrize("clients", [2, 100])
def test_masked_sums_of_few_and_of_many_clients(clients, tmp_path, monkeypatch):
    write_small(tmp_path, num_clients=clients)
    about = {"secure_aggregation": {"dropout": 0.3 if clients > 2 else 0.0}, "rounds": 1}
    masked = run(tmp_path, "masked", **about)
    unmasked(monkeypatch)
    plain = run(tmp_path, "plain", **about)
    assert [[row[column] for column in COLUMNS] for row in masked] == [[row[c] for c in COLUMNS] for row in plain]
    assert len(masked[0]["skipped"]) == (0 if clients == 2 else pytest.approx(30, abs=20))


def test_without_dropouts_a_run_is_the_plain_one_but_for_its_units(place):
    masked, plain = run(place, "masked", secure_aggregation={}), run(place, "unmasked")
    for column in ("test_loss", "local_loss", "mean_delta_sq", "delta_sq"):
        assert [row[column] for row in masked] == pytest.approx([row[column] for row in plain], rel=1e-6)
    assert [row["gradients"] for row in masked] == [row["gradients"] for row in plain]


NOISE: Mapping[str, Mapping[str, Any]] = {
    "the server": {"means": [{"noise": {"multiplier": 0.5}}]},
    "clients": {"updates": [CLIP, {"noise": {"multiplier": 0.5}}]},
}


@pytest.mark.parametrize("who", NOISE)
def test_noise_is_under_the_masks_or_behind_their_sum(who, place, monkeypatch):
    """Bits without masks, the plain private run's numbers, and ε without amplification; norms and losses stay at home.

    Noise of those that are left adds up: by clients ε is that of √m z, with m of `survivors`.
    """
    about = {**NOISE[who], "cohort": {"size": 6}}  # one client at least is in both rounds
    masked = run(place, f"{who}-masked", **about, secure_aggregation={"dropout": 0.3, "survivors": 4})
    whole, plain = run(place, f"{who}-whole", **about, secure_aggregation={}), run(place, f"{who}-plain", **about)
    unmasked(monkeypatch)
    bare = run(place, f"{who}-bare", **about, secure_aggregation={"dropout": 0.3, "survivors": 4})
    same = ("hash", "test_loss", "delta_sq", "unit", "epsilon", "bytes_up")
    assert [[row[column] for column in same] for row in masked] == [[row[column] for column in same] for row in bare]
    assert [row["test_loss"] for row in whole] == pytest.approx([row["test_loss"] for row in plain], rel=1e-5)
    assert whole[0]["hash"] != masked[0]["hash"]  # some dropped out
    library = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    library.compose(dp.GaussianDpEvent(0.25 * (2.0 if who == "clients" else 1.0)), 2)
    assert masked[-1]["epsilon"] == pytest.approx(library.get_epsilon(9**-1.1), rel=1e-6)
    assert [(row["skipped"], row["local_loss"], row["mean_delta_sq"]) for row in masked] == [([], None, None)] * 2
    of_expected = 4 * (8 * PARAMETERS + 6 * SHARE) + 6 * (2 * KEY + 5 * (2 * SHARE + TAG))  # 70 % of 6, rounded
    assert [row["bytes_up"] for row in masked] == [of_expected, 2 * of_expected]


def test_noise_behind_the_sum_is_of_the_cohort_that_is_expected(place, monkeypatch):
    """Whoever drops out: by a mean over those left one client would move the model by more than the noise is for."""
    monkeypatch.setattr("hpcfed.updates.noise.normals", lambda *about: np.zeros(about[-1]))
    about = {"secure_aggregation": {"dropout": 0.4}, "weights": "uniform", "rounds": 1}
    noised, bare = run(place, "expected", **NOISE["the server"], **about)[0], run(place, "of-those-left", **about)[0]
    left = 9 - int(dropouts(0, 0.4, 1, 9).sum())
    assert 0 < left < 9
    assert noised["delta_sq"] == pytest.approx(bare["delta_sq"] * (left / 9) ** 2, rel=1e-5)


def test_words_have_room_for_the_tails_of_noise(place, monkeypatch):
    """Each number as large as noise can be, of all clients alike: nothing wraps around."""
    monkeypatch.setattr("hpcfed.updates.noise.normals", lambda *about: np.full(about[-1], LARGEST_NORMAL))
    found = run(place, "tails", **NOISE["clients"], secure_aggregation={}, rounds=1)
    monkeypatch.setattr("hpcfed.updates.noise.normals", lambda *about: np.zeros(about[-1]))
    none = run(place, "no-tails", **NOISE["clients"], secure_aggregation={}, rounds=1)
    moved = 0.5 * 0.3 * LARGEST_NORMAL
    assert found[0]["delta_sq"] ** 0.5 == pytest.approx(moved * PARAMETERS**0.5, abs=none[0]["delta_sq"] ** 0.5 + 1e-3)


def test_bytes_are_those_of_words_keys_and_shares(place):
    row = run(place, "bytes", secure_aggregation={}, rounds=1)[0]
    assert row["bytes_up"] == 9 * (8 * (PARAMETERS + 3) + 2 * KEY + 8 * (2 * SHARE + TAG) + 9 * SHARE)
    assert row["bytes_down"] == 9 * (4 * PARAMETERS + 8 * (2 * KEY + 2 * SHARE + TAG))


@pytest.mark.parametrize("survivors", [2, 9])
def test_those_left_have_sent_their_words_also_in_a_round_of_too_few_who_open_nothing(place, survivors):
    row = run(place, f"left-{survivors}", secure_aggregation={"dropout": 0.4, "survivors": survivors}, rounds=1)[0]
    left = 9 - int(dropouts(0, 0.4, 1, 9).sum())
    assert (2 <= left < 9, len(row["skipped"])) == (True, 9 if survivors > left else 9 - left)
    words, opened = 8 * (PARAMETERS + 3), 0 if survivors > left else 9 * SHARE
    assert row["bytes_up"] == 9 * (2 * KEY + 8 * (2 * SHARE + TAG)) + left * (words + opened)


def test_no_sum_of_too_few_is_opened(place):
    rows = run(place, "few", secure_aggregation={"dropout": 0.9, "survivors": 9})
    assert [row["skipped"] for row in rows] == [[*range(9)]] * 2
    assert rows[0]["hash"] == rows[1]["hash"]
    assert [row["gradients"] for row in rows] == [0, 0]


@pytest.mark.parametrize(("survivors", "skipped"), [(5, [0]), (9, [*range(9)])])
def test_clients_who_fail_are_no_survivors(place, survivors, skipped):
    (place / "fails.py").write_text(FAILS)
    about = {"updates": [{"factory": "fails:Fails"}, CLIP], "python_path": [str(place)], "on_bad_client": "skip"}
    rows = run(place, f"fails-{survivors}", **about, secure_aggregation={"survivors": survivors})
    assert [row["skipped"] for row in rows] == [skipped] * 2
    assert (rows[0]["hash"] == rows[1]["hash"], rows[1]["gradients"] == 0) == (survivors == 9,) * 2
    assert ([row["delta_sq"] for row in rows] == [None] * 2) == (survivors == 9)


FAILS = """
from hpcfed import UpdatePart
from hpcfed.updates import Sent


class Fails(UpdatePart):
    def send(self, vectors, state, shared, context):
        if context.client.client == 0:
            raise RuntimeError("no link")
        return Sent(vectors)
"""


def test_an_update_that_is_not_finite_ends_the_run(place):
    (place / "infinite.py").write_text(INFINITE)
    updates = [{"factory": "infinite:Infinite"}, CLIP]
    with pytest.raises(hpcfed.Diverged, match=r"round 1, client .*its update is not finite"):
        run(place, "infinite", secure_aggregation={}, updates=updates, python_path=[str(place)])


INFINITE = """
from hpcfed import UpdatePart
from hpcfed.updates import Sent


class Infinite(UpdatePart):
    def send(self, vectors, state, shared, context):
        return Sent({name: vector + float("inf") for name, vector in vectors.items()})
"""
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "clip": ({"updates": [CLIP, {"attack": {}}]}, "with no clip last in updates: its bound says"),
    "median": ({"means": ["median"]}, "secure_aggregation with means: median: it needs each client's vector"),
    "krum": ({"means": [{"krum": {"attackers": 1}}]}, "with means: krum: it needs"),
    "quantile": ({"updates": [{"clip": {"norm": 0.3, "quantile": 0.5}}]}, "with clip.quantile: masked words have"),
    "numbers": (
        {"algorithm": {"factory": "tells:numbers"}},
        "with numbers: its clients report numbers",
    ),
    "buffers": ({"parameters": {"buffers": "averaged"}}, "with parameters.buffers: averaged: they have no bound"),
    "hashes": ({"update_hashes": True}, "with update_hashes: true: a hash tells of one client's update"),
    "sentinel": ({"sentinel": "strict"}, "with sentinel: strict"),
    "fast": ({"reduction": "fast"}, "with reduction: fast: masks cancel in integers alone"),
    "average": ({"evaluate": {"model": "client-average"}}, "client-average: its vectors have no bound"),
    "size": ({"cohort": {"size": 1}}, "expected cohorts of 2 clients or more, got 1"),
    "schedule": ({"cohort": {"schedule": [[0], [1]]}}, "expected cohorts of 2 clients or more, got 1"),
    "survivors": ({"secure_aggregation": {"survivors": 1}}, r"secure_aggregation\.survivors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_such_a_server_cannot_do_is_refused_in_one_line(case, place):
    changes, words = REFUSED[case]
    (place / "tells.py").write_text(TELLS)
    with pytest.raises(hpcfed.InputError, match=words) as refused:
        run(place, "refused", **{"secure_aggregation": {}, "python_path": [str(place)], **changes})
    assert "\n" not in str(refused.value)
