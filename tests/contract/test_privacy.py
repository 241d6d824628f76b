"""Noise that hides clients: the accountant, the mechanism by hand, and what a private run's folder has and lacks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dp_accounting as dp
import h5py
import numpy as np
import pytest
import torch
from dp_accounting import rdp
from scipy import stats

import hpcfed
from hpcfed.assembly import assemble, resolve
from hpcfed.assembly.private import private_remarks
from hpcfed.cli.main import main
from hpcfed.cohort import Cohorts
from hpcfed.config.load import load_recipe
from hpcfed.data.federation import Federation
from hpcfed.lab.report.group import group_runs
from hpcfed.lab.report.page import warnings
from hpcfed.lab.report.read import read_run
from hpcfed.provenance.compare import parting
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World
from hpcfed.rng import LEAST_SECRET, Purpose, normals, stream
from hpcfed.run_folder.checkpoint.layout import RecordLayout
from hpcfed.simulation import Simulation
from hpcfed.types import ClientInfo, Means
from hpcfed.updates._accounting import accountant, multiplier_for
from hpcfed.updates._base import PartContext
from hpcfed.updates._layout import Layout
from hpcfed.updates._mechanism import Mechanism, Privacy
from hpcfed.updates.noise import LocalNoise, Noise
from tests.federations import blobs, write_federation
from tests.mpi.recipes import METHODS, small, write_small

CLIP: Mapping[str, Any] = {"clip": {"norm": 1.0, "scales": {}}}
PRIVATE: Mapping[str, Any] = {"updates": [CLIP], "means": [{"noise": {"multiplier": 1.0}}]}
TELLS = """
from hpcfed import ClientRule
from hpcfed.algorithms.fedavg import ServerStep
from hpcfed.types import Method


class Numbers(ClientRule):
    scalars = ("loss",)


class Losses(ClientRule):
    loss_at_w = True


class Gradients(ClientRule):
    evaluates_elsewhere = True


def numbers():
    return Method("numbers", Numbers(), ServerStep())


def losses():
    return Method("losses", Losses(), ServerStep())


def gradients():
    return Method("gradients", Gradients(), ServerStep())
"""
"""Methods whose clients tell more than vectors, or look at their samples in other ways."""
OWN_TESTS = "own-tests.h5"
"""The same data, whose test samples belong to clients."""
SECRET = "8f1c6a0be35d97421b6e0c9d4a7f5328"
CHANCE = {"fraction": 0.5, "sampling": "bernoulli"}
LEVELS: Mapping[str, Mapping[str, Any]] = {
    "client": {},
    "sample": {"updates": None, "means": None, "local": {"steps": 2, "noise": {"clip": 1.0, "multiplier": 1.0}}},
}


@pytest.fixture
def place(world, shared_tmp) -> Path:
    """A folder with data and a secret seed, one for each rank, which runs alone."""
    folder = shared_tmp / f"rank-{world.rank}"
    folder.mkdir()
    return filled(folder)


def filled(folder: Path) -> Path:
    shutil.copy(write_small(folder), folder / OWN_TESTS)
    with h5py.File(folder / OWN_TESTS, "r+") as file:
        file["test/offsets"] = [0, 30, 60, 90, 120, 150]
    (folder / "tells.py").write_text(TELLS)
    (folder / "secret.txt").write_text(SECRET)
    (folder / "secret.txt").chmod(0o600)
    return folder


def recipe(folder: Path, output: str, **changes: Any) -> dict[str, Any]:
    data = folder / changes.pop("data", "small.h5")
    return small(folder / output, data=str(data), **{**PRIVATE, **changes})


def run(folder: Path, output: str, world: World | None = None, **changes: Any) -> hpcfed.Result:
    return hpcfed.run(recipe(folder, output, **changes), world=world or World(), quiet=True)


def secret(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"secret_seed": str(folder / "secret.txt"), **changes}


def mechanism(sampling: str, *, is_secret: bool, multiplier: float = 1.0, expected: float = 100.0) -> Mechanism:
    return Mechanism(1.0, {}, multiplier, 1000**-1.1, 100, 1000, expected, sampling, is_secret)


def cohorts_of(chance: float) -> Any:
    return lambda round: np.flatnonzero(stream(0, Purpose.COHORT, round).random(1000) < chance)


def twenty(round: int) -> np.ndarray:
    """Client 0 in every fifth round, and others once."""
    return np.array([round] if round % 5 else [0, round])


@pytest.mark.soak
@pytest.mark.serial
def test_the_figures_of_a_thousand_clients():
    """q = 0.1, 100 rounds, z = 1: what the sampling, its secrecy and the relation are worth."""
    found = {
        "Poisson": accountant(mechanism("bernoulli", is_secret=True), twenty)(100),
        "public": accountant(mechanism("bernoulli", is_secret=False), twenty)(100),
        "replaced": accountant(mechanism("size", is_secret=True), twenty)(100),
        "as if C": accountant(mechanism("size", is_secret=True, multiplier=2.0), twenty)(100),
    }
    assert {name: round(epsilon, 1) for name, epsilon in found.items()} == {
        "Poisson": 6.0,
        "public": 26.0,
        "replaced": 80.0,
        "as if C": 11.5,
    }


@pytest.mark.every(2)
@pytest.mark.serial
@pytest.mark.parametrize("rounds", [37, 1])
def test_the_accountant_is_its_library(rounds):
    gaussian, relation = dp.GaussianDpEvent, dp.NeighboringRelation.REPLACE_ONE
    cases = {
        ("bernoulli", True, 100.0): (rdp.RdpAccountant(), dp.PoissonSampledDpEvent(0.1, gaussian(1.3)), rounds),
        ("size", True, 100.0): (
            rdp.RdpAccountant(neighboring_relation=relation),
            dp.SampledWithoutReplacementDpEvent(1000, 100, gaussian(0.65)),
            rounds,
        ),
        ("size", False, 100.0): (
            rdp.RdpAccountant(neighboring_relation=relation),
            gaussian(0.65),
            max(1, rounds // 5),
        ),
        ("size", False, 1000.0): (rdp.RdpAccountant(), gaussian(1.3), rounds),
    }
    for (sampling, is_secret, expected), (library, event, count) in cases.items():
        library.compose(event, count)
        own = accountant(mechanism(sampling, is_secret=is_secret, multiplier=1.3, expected=expected), twenty)
        assert own(rounds) == pytest.approx(library.get_epsilon(1000**-1.1), rel=1e-6)


@pytest.mark.every(2)
@pytest.mark.serial
@pytest.mark.parametrize("is_secret", [False, True])
def test_noise_is_solved_for(is_secret):
    asked = mechanism("bernoulli", is_secret=is_secret)
    found = multiplier_for(asked, 8.0, twenty)
    spent, more = (accountant(asked.with_multiplier(z), twenty)(100) for z in (found, found - 1e-4))
    assert spent <= 8.0 < more


@pytest.mark.serial
@pytest.mark.parametrize("seed", [7, LEAST_SECRET + 7])
def test_noise_is_normal_and_addressed(seed):
    about = seed, Purpose.MEANS, 3, 1, 0
    draws = normals(*about, 200_000)
    assert stats.kstest(draws, "norm").pvalue > 1e-3
    assert np.array_equal(normals(*about, 70_000), draws[:70_000])
    others = [normals(*other, 1000) for other in ((seed + 1, *about[1:]), (*about[:3], 2, 0), (*about[:2], 4, 1, 0))]
    assert all(abs(np.corrcoef(draws[:1000], other)[0, 1]) < 0.15 for other in others)


@pytest.mark.serial
def test_secret_seeds_of_any_part_give_other_streams():
    """All 256 bits count: each of the streams that Philox draws has a key of its own."""
    seeds = [LEAST_SECRET | 1, LEAST_SECRET | 2, LEAST_SECRET | 1 << 200]
    assert len({int(stream(seed, purpose).integers(2**62)) for seed in seeds for purpose in (Purpose.COHORT, 3)}) == 6


@pytest.mark.every(3)
@pytest.mark.serial
@pytest.mark.one_mpi
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn", "fedexp", "fednova", "fedyogi"])
def test_no_noise_and_no_bound_leave_the_plain_run(name, place):
    algorithm = {"name": name, **METHODS[name]}
    lists = {"updates": [{"clip": {"norm": 1e15}}], "means": [{"noise": {"multiplier": 0.0}}]}
    plain, found = (
        run(place, output, algorithm=algorithm, rounds=2, **chain).metrics
        for output, chain in (("plain", {"updates": None, "means": None}), ("noise", lists))
    )
    same = ("test_loss", "hash", "delta_sq", "mean_delta_sq", "cohort", "local_loss", "unit", "bytes_up")
    assert [[row[key] for key in same] for row in found] == [[row[key] for key in same] for row in plain]
    assert "epsilon" not in found[0]


@pytest.mark.serial
@pytest.mark.one_mpi
@pytest.mark.parametrize("cohort", [CHANCE, {"size": 2}], ids=["bernoulli", "size"])
def test_a_round_by_hand(cohort, place):
    """w¹ = w⁰ − (Σ w_i clip(Δ_i) + noise) / (q N), with the cohort's expected size and weights of at most 1."""
    updates = [CLIP, {"weight": {"cap": 40}}]
    asked = resolve(load_recipe(recipe(place, "run", cohort=cohort, updates=updates, dtype="float64", **secret(place))))
    parts, _ = assemble(asked, World())
    with parts.federation:
        private, sizes = Simulation(parts), parts.federation.sizes
        clients = parts.cohorts.clients(1)
        w = private.w.clone()
        private.round(1)
        moved = torch.zeros_like(w)
        for client in clients.tolist():
            delta = _delta_of(parts, client)
            moved += min(1.0, sizes[client] / 40) * delta * min(1.0, 1.0 / float(delta.norm()))
        expected, about = 5 * 0.5 if cohort is CHANCE else 2, (parts.seed, Purpose.MEANS, 1, 0, 0)
        layout = parts.chain.privacy.layout
        noise = layout.opened(torch.from_numpy(normals(*about, layout.size)), w)
        assert torch.allclose(private.w, w - (moved + noise) / expected, rtol=0, atol=1e-5)
        assert not layout.opened(torch.zeros(layout.size, dtype=w.dtype), w).any()


def _delta_of(parts: Any, client: int) -> torch.Tensor:
    """A client's Δ of round 1, trained alone from the initial model."""
    from hpcfed.client.solver import Task
    from hpcfed.types import ClientInfo, Tilt

    (samples,) = parts.shards.clients([client])
    info, w = ClientInfo(client, int(parts.federation.sizes[client]), 1.0), parts.initial_w
    steps = int(parts.cohorts.typical_steps[client])
    task = Task(client, samples, Tilt(), steps, 0.0, info, {}, {}, {}, 0)
    return next(iter(parts.engine.solve(w, [task], 1))).delta.clone()


LOCAL: Mapping[str, Any] = {"updates": [CLIP, {"noise": {"multiplier": 2.0}}], "means": None}


@pytest.mark.serial
@pytest.mark.one_mpi
def test_noise_of_clients_by_hand(place):
    """w¹ = w⁰ − mean (clip(Δ_i) + noise_i); ε is of a client's whole content, in each round, without amplification."""
    asked = resolve(load_recipe(recipe(place, "run", dtype="float64", cohort={"size": 2}, **LOCAL, **secret(place))))
    parts, _ = assemble(asked, World())
    with parts.federation:
        private = Simulation(parts)
        w, moved, layout = private.w.clone(), torch.zeros_like(private.w), parts.chain.privacy.layout
        clients = parts.cohorts.clients(1).tolist()
        private.round(1)
        for client in clients:
            delta = _delta_of(parts, client)
            noise = torch.from_numpy(normals(parts.seed, Purpose.UPDATES, 1, client, 1, layout.size))
            moved += delta * min(1.0, 1.0 / float(delta.norm())) + 2.0 * layout.opened(noise, w)
        assert torch.allclose(private.w, w - moved / 2, rtol=0, atol=1e-5)
    found = run(place, "run", cohort={"size": 2}, **LOCAL, **secret(place))
    library = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    library.compose(dp.GaussianDpEvent(1.0), 3)
    assert found.metrics[-1]["epsilon"] == pytest.approx(library.get_epsilon(5**-1.1), rel=1e-6)
    assert found.metrics[-1]["local_loss"] is None
    packed = [CLIP, {"noise": {"multiplier": 2.0}}, {"quantize": {"bits": 4}}]
    sent = [one.metrics[-1]["bytes_up"] for one in (run(place, "packed", updates=packed, means=None), found)]
    assert sent[0] < 2.5 / 4 * sent[1]  # of five clients in the place of two


@pytest.mark.serial
@pytest.mark.one_mpi
@pytest.mark.parametrize("multiplier", [0.0, 0.02])
def test_a_clip_follows_a_quantile(multiplier, place):
    """C ← C exp(−η (b̄ − γ)), from bits that are noised; vectors have a little more noise, and ε is that of z."""
    clip = {"clip": {"norm": 0.5, "quantile": 0.5, "rate": 0.3}}
    noise = [{"noise": {"multiplier": multiplier, "delta": 1e-5}}]
    about = {"updates": [clip], "means": noise, "rounds": 2, "weights": "uniform"}
    found = run(place, "run", **about, **(secret(place) if multiplier else {})).metrics
    asked = resolve(load_recipe(recipe(place, "again", **about, **(secret(place) if multiplier else {}))))
    parts, _ = assemble(asked, World())
    with parts.federation:
        below = sum(0.5 if float(_delta_of(parts, client).norm()) <= 0.5 else -0.5 for client in range(5))
        drawn = 5 / 20 * float(normals(parts.seed, Purpose.MEANS, 1, 1, 0, 1)[0]) if multiplier else 0.0
        clips = [row["method"]["clip"] for row in found]
        assert clips == pytest.approx([0.5, 0.5 * np.exp(-0.3 * (below + drawn) / 5)], rel=1e-12)
        if multiplier:
            both = parts.chain.privacy.mechanism
            assert both.vector_multiplier**-2 + (2 * 0.25) ** -2 == pytest.approx(multiplier**-2)
            assert found[0]["epsilon"] == accountant(both, twenty)(1)
            assert found[1]["unit"]["delta"] <= found[0]["unit"]["delta"] * 2


@pytest.mark.serial
@pytest.mark.one_mpi
def test_noise_follows_the_moved_norm(place, monkeypatch):
    """As units do, in rounds with clients and without, which nothing tells apart; normals drown all else of a round."""
    monkeypatch.setattr(
        "hpcfed.updates.noise.normals", lambda *about: np.full(about[-1], 1e5 if about[-1] > 1 else 1.0)
    )
    clip = {"clip": {"norm": 0.5, "quantile": 0.5, "rate": 8.0}}
    about = {"cohort": {"fraction": 0.1, "sampling": "bernoulli"}, "means": [{"noise": {"multiplier": 0.02}}]}
    rows = run(place, "run", updates=[clip], rounds=5, **about, **secret(place)).metrics
    clips = [row["method"]["clip"] for row in rows]
    moved = np.log(np.divide(clips[1:], clips[:-1])) / 8.0
    assert moved == pytest.approx([-0.05, -0.05, 1 - 0.05, -0.05])  # by the noise, and by one client above C in round 3
    assert len({(*row, *row["method"]) for row in rows}) == 1
    of_clip = [row["delta_sq"] ** 0.5 / clip for row, clip in zip(rows, clips, strict=True)]
    assert of_clip == pytest.approx([of_clip[0]] * 5, rel=1e-3)
    assert len({row["unit"]["delta"] / 2.0 ** np.frexp(clip)[1] for row, clip in zip(rows, clips, strict=True)}) == 1


@pytest.mark.serial
def test_each_vector_has_noise_of_its_own_and_of_its_scale():
    """z C s_v from each client, over q N from the server; two vectors with one noise would tell their difference."""
    scales, size = {"psi": 10.0}, 20_000
    layout = Layout((size,), size, torch.empty(0, dtype=torch.int64))
    privacy = Privacy(Mechanism(0.5, scales, 2.0, 1e-5, 10, 1000, 50.0, "size", is_secret=True), layout)
    zeros = {name: torch.zeros(size, dtype=torch.float64) for name in ("delta", "psi")}
    about = PartContext(1, 0.1, 7, 0, ClientInfo(3, 20, 16.0), privacy=privacy)
    of_client = LocalNoise(multiplier=2.0).send(zeros, {}, {}, about).vectors
    of_server = (
        Noise(multiplier=2.0).after(Means(zeros, 0.0, 0.0, fraction=0.05, cohort_size=50, round=1), about).vectors
    )
    for found, expected in ((of_client, 1), (of_server, 50)):
        assert float(found["delta"].std()) == pytest.approx(2.0 * 0.5 / expected, rel=0.03)
        assert float(found["psi"].std()) == pytest.approx(2.0 * 0.5 * 10.0 / expected, rel=0.03)
        assert abs(np.corrcoef(found["delta"], found["psi"])[0, 1]) < 0.04


@pytest.mark.serial
@pytest.mark.one_mpi
def test_the_server_step_does_not_see_who_was_drawn(place):
    """Whatever q(S), |S|, norms and scalars of clients are: with noise it has the expected ones, or none."""
    asked = resolve(load_recipe(recipe(place, "run", cohort=CHANCE, **secret(place))))
    parts, _ = assemble(asked, World())
    with parts.federation:
        delta = torch.zeros(len(parts.initial_w), dtype=torch.float64)
        known = {"effective_steps": 2.0, "client_scalars": {"loss": np.ones(1)}}
        means = Means({"delta": delta}, 1.0, 0.0, fraction=0.2, cohort_size=1, round=1, **known)
        found = Noise(multiplier=1.0).after(means, PartContext(1, 0.1, parts.seed, 0, privacy=parts.chain.privacy))
    assert (found.fraction, found.cohort_size) == (0.5, 2)  # of five clients, each with probability 0.5
    assert np.isnan(found.mean_delta_sq)
    assert (found.effective_steps, found.client_scalars) == (None, {})


@pytest.mark.serial
@pytest.mark.one_mpi
def test_rounds_without_clients_are_rounds_of_noise(place):
    """At q = 0.02 most cohorts of five clients are empty, and no row says which."""
    cohort, noise = {"fraction": 0.02, "sampling": "bernoulli"}, [{"noise": {"multiplier": 1.0, "delta": 1e-5}}]
    found = run(place, "run", cohort=cohort, means=noise, rounds=6, **secret(place)).metrics
    assert len({row["hash"] for row in found}) == 6
    assert [row["cohort"] for row in found] == [[]] * 6
    assert all(row["unit"] == found[0]["unit"] and row["attempts"] == 1 for row in found)
    assert found[0]["epsilon"] < found[5]["epsilon"]
    drawn = Cohorts(load_recipe(recipe(place, "run", cohort=cohort)), np.ones(5, int))
    rows = [[2] * len(drawn.clients(round)) for round in range(1, 7)]
    assert [] in rows
    (place / "budgets.json").write_text(json.dumps(rows))
    run(place, "budgets", cohort=cohort, means=noise, rounds=6, budget={"schedule": str(place / "budgets.json")})


@pytest.mark.serial
@pytest.mark.one_mpi
def test_nothing_that_is_not_noised_is_in_the_folder(place, capsys):
    """Neither in the record, nor on the screen, nor in checkpoints, certificate and recipe."""
    about = {"algorithm": {"name": "scaffold"}, "cohort": CHANCE, "checkpoint": {"every": 1}, **secret(place)}
    hpcfed.run(recipe(place, "run", **about), world=World())
    folder = place / "run"
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        known = {name for name, value in row.items() if value not in (None, [])}
        assert known == {
            *("round", "test_loss", "test_accuracy", "attempts", "unit", "server_lr", "delta_sq", "hash", "epsilon"),
            *("params_up", "params_down", "bytes_up", "bytes_down", "seconds"),
        }
        assert [*row["seconds"]] == ["total"]
        assert row["bytes_up"] == row["round"] * 3 * 2 * 4 * 140  # 2.5 expected clients, rounded, with two vectors
    screen = capsys.readouterr().out
    assert "samples weigh" not in screen
    assert "local loss" not in screen
    assert "ε" in screen
    manifest = json.loads(next((folder / "checkpoints").glob("*.json")).read_text())
    assert manifest["progress"]["magnitudes"] == {"spans": {}, "repeats": 0}
    assert manifest["progress"]["totals"]["gradients"] == 0
    assert manifest["num_clients"] == 5
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    promised = json.loads((folder / "certificate.json").read_text())["privacy"]
    assert promised["epsilon"] == row["epsilon"]
    assert promised["delta"] == 5**-1.1
    assert promised["neighbours"] == "add or remove one client"
    assert "secret_seed" not in json.loads((folder / "certificate.json").read_text())["named_files"]


@pytest.mark.serial
def test_states_of_clients_are_encrypted(tmp_path):
    state = {"c": torch.arange(2000, dtype=torch.float32)}
    plain, sealed, other = RecordLayout(state), RecordLayout(state, b"k" * 32), RecordLayout(state, b"o" * 32)
    contents = []
    for number, layout in enumerate((plain, sealed, sealed)):
        with (tmp_path / str(number)).open("w+b") as file:
            layout.write(file, 3, 1 + number // 2, state)
            file.seek(0)
            found = layout.read(file, 3, 1 + number // 2)
            assert torch.equal(layout.state_of(found)["c"], state["c"])
            file.seek(0)
            contents.append(file.read())
            if layout is sealed:
                file.seek(0)
                with pytest.raises(hpcfed.HpcfedError, match="checksum"):
                    other.read(file, 3, 1 + number // 2)
    bits = np.unpackbits(np.frombuffer(contents[1], np.uint8) ^ np.frombuffer(contents[2], np.uint8))[:64_000]
    assert abs(bits.mean() - 0.5) < 0.02
    assert state["c"].numpy().tobytes() in contents[0]
    assert state["c"].numpy()[:9].tobytes()[4:] not in contents[1]


@pytest.mark.every(3)
@pytest.mark.one_mpi
@pytest.mark.parametrize("engine", ["batched", "sequential", "noise of clients"])
def test_the_bits_are_those_of_any_number_of_ranks_and_of_a_run_that_was_resumed(engine, world, shared_tmp):
    """The whole run on one rank; all ranks together, stopped after round 2 and gone on with."""
    if world.rank == 0:
        filled(shared_tmp)
    world.barrier()
    about = {"algorithm": {"name": "scaffold"}, "cohort": CHANCE, "checkpoint": {"every": 1}, **secret(shared_tmp)}
    if engine == "noise of clients":
        about |= LOCAL | {"algorithm": {"name": "fedavg"}}
    else:
        about["local"] = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": engine}
    run(shared_tmp, "together", world, rounds=2, **about)
    found = run(shared_tmp, "together", world, rounds=4, **about).metrics
    whole = run(shared_tmp, f"alone-{world.rank}", rounds=4, **about).metrics
    same = ("hash", "test_loss", "epsilon", "unit", "bytes_up", "delta_sq")
    assert [[row[key] for key in same] for row in found] == [[row[key] for key in same] for row in whole]


LOUDER = [{"noise": {"multiplier": 2.0}}]


@pytest.mark.serial
@pytest.mark.one_mpi
def test_the_holder_of_the_seed_alone_can_verify_and_replay(place):
    found = run(place, "run", algorithm={"name": "scaffold"}, rounds=2, checkpoint={"every": 1}, **secret(place))
    said: list[str] = []
    assert verify(Verification(found.folder, None, 0), World(), said.append) == 0
    assert "bit for bit" in said[-1]
    assert verify(Verification(found.folder, 1, 0), World(), said.append) == 0
    assert said[-1].startswith("spot-checked: round 2 of 2")
    assert len(hpcfed.replay(found.folder, 2, 1).steps) == 4
    louder = run(place, "louder", algorithm={"name": "scaffold"}, rounds=2, means=LOUDER, **secret(place))
    assert parting([found.folder, louder.folder], None, None, said.append).code == 1
    assert "part in round 1" in said
    (place / "secret.txt").rename(place / "elsewhere")
    for call in (
        lambda: verify(Verification(found.folder, None, 0), World(), said.append),
        lambda: hpcfed.replay(found.folder, 2, 1),
    ):
        with pytest.raises(hpcfed.InputError, match="by the holder of its secret seed alone"):
            call()
    (place / "secret.txt").write_text(SECRET[::-1])
    with pytest.raises(hpcfed.InputError, match=r"is not the run's.*holder"):
        verify(Verification(found.folder, None, 0), World(), said.append)
    with pytest.raises(hpcfed.InputError, match="secret_commitment"):
        run(place, "run", algorithm={"name": "scaffold"}, rounds=3, checkpoint={"every": 1}, **secret(place))


@pytest.mark.every(2)
@pytest.mark.serial
@pytest.mark.parametrize(
    "change",
    ["name=b", "seed=1", "local.lr=0.2", "means=[{noise: {multiplier: 2.0}}]", "cohort.size=4", "loss=squared"],
)
def test_runs_of_one_secret_have_noise_of_their_own(change, place):
    """Else it would be gone in the difference of two; what is free to change, and what is chosen here, changes none."""
    base = recipe(place, "run", cohort={"size": 3}, name="a", **secret(place))
    keys = [
        [],
        [change],
        ["secure_aggregation={dropout: 0.1}"],
        ["rounds=9"],
        ["evaluate.every=3"],
        ["local.engine=sequential"],
    ]
    seeds = [resolve(load_recipe(base, changes)).secret for changes in keys]
    assert len({*seeds[:3]}) == 3
    assert {*seeds[3:]} == {seeds[0]}


@pytest.mark.serial
@pytest.mark.one_mpi
@pytest.mark.parametrize("level", LEVELS)
def test_data_without_a_hash_have_no_secret_noise(level, place):
    """Runs on data that differ by a client would have one noise, and tell the client."""
    write_federation(place / "unknown.h5", **blobs(5))
    about = {**LEVELS[level], "data": str(place / "unknown.h5")}
    assert run(place, "public", **about).recipe.data_content is None
    with pytest.raises(hpcfed.InputError, match=r"unknown\.h5: secret_seed: the data have no hash; .* the same noise"):
        run(place, "secret", **about, **secret(place))


def test_who_has_no_seed_can_read_the_run(place, monkeypatch):
    """Reports, cards and predictions say ε and need no secret; the card has no counts of samples."""
    monkeypatch.setenv("HPCFED_TEST_SECRET", SECRET)
    about = {"rounds": 2, "secret_seed": {"env": "HPCFED_TEST_SECRET"}}
    found = [run(place, f"run-{seed}", seed=seed, **about) for seed in (0, 1)]
    monkeypatch.delenv("HPCFED_TEST_SECRET")
    groups = group_runs([read_run(one.folder) for one in found])
    assert [len(group.runs) for group in groups] == [2]
    with pytest.raises(SystemExit) as ended:
        main(["export", str(found[0].folder), "-o", str(place / "model.safetensors")])
    assert ended.value.code == 0
    card = (place / "model.md").read_text()
    for text in (*warnings(groups), card):
        assert "ifferential privacy of each client (add or remove one client): ε" in text
        assert "Choosing among runs" in text
    assert "sizes are withheld" in card
    assert "to train on" not in card


TARGET = [{"noise": {"epsilon": 4.0, "delta": 1e-3}}]


@pytest.mark.serial
@pytest.mark.one_mpi
def test_a_target_is_kept(place):
    found = run(place, "run", means=TARGET)
    recorded = load_recipe(found.folder / "recipe.yaml").means[0].args
    assert found.metrics[-1]["epsilon"] <= 4.0 < 4.01 * found.metrics[-1]["epsilon"]
    assert recorded["epsilon"] == 4.0
    with pytest.raises(hpcfed.InputError, match=r"means\.0\.noise\.multiplier|means .* there and .* here"):
        run(place, "run", means=TARGET, rounds=9)
    kept = {"noise": {"epsilon": 4.0, "delta": 1e-3, "multiplier": recorded["multiplier"]}}
    with pytest.raises(hpcfed.InputError, match=r"after 9 rounds ε is .*expected at most epsilon, 4"):
        run(place, "run", means=[kept], rounds=9)
    seeded = run(place, "secret", **secret(place), means=TARGET)
    with pytest.raises(hpcfed.InputError, match=r"means .* there and .* here") as refused:
        run(place, "secret", **secret(place), means=TARGET, rounds=9)
    assert seeded.recipe.secret_commitment is not None
    assert "secret_commitment" not in str(refused.value)
    (place / "secret.txt").write_text(SECRET[::-1])
    with pytest.raises(hpcfed.InputError, match=r"secret_commitment .* there and .* here"):
        run(place, "secret", **secret(place), means=TARGET)


@pytest.mark.serial
@pytest.mark.one_mpi
@pytest.mark.parametrize("level", LEVELS)
def test_a_delta_that_promises_nothing_is_refused_or_said(level, place):
    """At δ = 1, the default of one client or sample, every ε is 0; one of n, published as it is, keeps any δ ≥ 1/n."""
    whole = blobs(1)
    x, y = whole["clients"][0]
    clients = {"client": [(x, y)], "sample": [(x[:1], y[:1]), (x[1:2], y[1:2])]}[level]
    write_federation(place / "one.h5", **{**whole, "clients": clients}, content=f"one {level}")
    with pytest.raises(hpcfed.InputError, match=rf"noise: delta, by default n\^-1.1 of .*1 {level}: expected below 1"):
        run(place, "run", **LEVELS[level], data=str(place / "one.h5"))
    largest = {"client": 5, "sample": int(Federation.open(place / "small.h5").sizes.max())}[level]
    for delta, is_said in ((1 / largest, True), (0.99 / largest, False)):
        section = {"multiplier": 1.0, "delta": delta}
        noised = (
            {"means": [{"noise": section}]}
            if level == "client"
            else {"local": {"steps": 2, "noise": {"clip": 1.0, **section}}}
        )
        resolved = resolve(load_recipe(recipe(place, "run", **{**LEVELS[level], **noised})))
        said = [line for line in private_remarks(resolved, assemble(resolved, World())[0]) if "publishing" in line]
        assert [f"is not below 1/{largest}: publishing one of {largest} {level}s" in line for line in said] == (
            [True] * is_said
        )


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "unbounded": ({"updates": None}, "of a known norm alone: expected clip as the last of updates"),
    "behind the bound": ({"updates": [CLIP, {"quantize": {"bits": 4}}]}, "expected clip as the last of updates"),
    "not first": ({"means": [{"clip": {"norm": 1.0}}, {"noise": {"multiplier": 1.0}}]}, "noise comes first"),
    "twice": ({"updates": [CLIP, {"noise": {"multiplier": 1.0}}]}, "noise in updates and means: expected once"),
    "no bound before": (
        {"updates": [{"noise": {"multiplier": 1.0}}, CLIP], "means": None},
        "of a known norm alone: expected clip as the last of updates before it",
    ),
    "quantile": ({"updates": [{"clip": {"norm": 1.0, "quantile": 0.5}}]}, "expected cohorts of more than 10 clients"),
    "robust": ({"means": ["median", {"noise": {"multiplier": 1.0}}]}, "noise behind a robust mean"),
    "no amount": ({"means": ["noise"]}, "'multiplier' or 'epsilon'"),
    "samples": ({"weights": "samples"}, "noise with weights: samples"),
    "skip": ({"on_bad_client": "skip"}, "noise with on_bad_client: skip"),
    "hashes": ({"update_hashes": True}, "noise with update_hashes"),
    "training sets": ({"evaluate": {"train": {"every": 1}}}, "noise with evaluate.train"),
    "clients' scores": ({"evaluate": {"clients": {"every": 1}}}, "noise with evaluate.clients"),
    "last models": ({"evaluate": {"model": "client-average"}}, "noise with evaluate.model"),
    "schedule": ({"cohort": {"schedule": [[0, 1]]}}, "noise with cohort.schedule"),
    "statistics": ({"evaluate": {"statistics": "training"}}, "noise with evaluate.statistics"),
    "own test sets": ({"data": OWN_TESTS}, "noise with evaluate.every: 1: the test sets are clients' own"),
    "strict": ({"sentinel": "strict"}, "noise with sentinel: strict"),
    "left out": ({"cohort": {"without": [4]}}, "noise with cohort.without"),
    "authors": ({"cohort": {**CHANCE, "stream": "authors"}}, "noise with cohort.stream: authors"),
    "averaged": ({"parameters": {"buffers": "averaged"}}, "noise with parameters"),
    "labels": ({"loss": {"weights": "balanced"}}, "noise with loss.weights"),
    "private parts": ({"parameters": {"private": ["0.*"]}}, "noise with parameters"),
    "states": ({"algorithm": {"name": "scaffold"}}, "noise with secret_seed: none"),
    "carried on": (
        {"algorithm": {"name": "scaffold"}, "updates": [CLIP, {"noise": {"multiplier": 1.0}}], "means": None},
        "updates: noise with scaffold has no meaning",
    ),
    "fedexp": ({"algorithm": {"name": "fedexp"}}, "noise with fedexp has no meaning: its step size"),
    "feddyn": ({"algorithm": {"name": "feddyn", "alpha": 0.1}}, "noise with feddyn has no meaning"),
    "numbers": (
        {"algorithm": {"factory": "tells:numbers"}},
        "noise with algorithm: numbers: its clients report numbers besides vectors: loss",
    ),
    "quantile of noised bits": (
        {
            "updates": [{"clip": {"norm": 1.0, "quantile": 0.5}}, {"noise": {"multiplier": 0.1}}],
            "means": None,
        },
        "its bits would not be noised",
    ),
    "fednova": ({"algorithm": {"name": "fednova"}}, "normalisation multiplies what was clipped"),
    "no noise": ({"means": None, "secret_seed": "secret.txt"}, "'noise' in 'means', 'updates' or 'local' beside"),
    "no such file": ({"secret_seed": "missing.txt"}, "secret_seed: no such file"),
    "no variable": ({"secret_seed": {"env": "HPCFED_NO_SUCH"}}, "the variable HPCFED_NO_SUCH is not set"),
}


@pytest.mark.serial
@pytest.mark.one_mpi
@pytest.mark.parametrize("case", REFUSED)
def test_what_noise_does_not_go_with_is_refused(case, place):
    changes, words = REFUSED[case]
    with pytest.raises(hpcfed.InputError, match=words):
        run(place, "run", python_path=[str(place)], **changes)


@pytest.mark.serial
@pytest.mark.parametrize("text", ["", "12345", "0" * 64, "not hexadecimal, for all its length"])
def test_a_secret_has_128_random_bits(text, place):
    (place / "secret.txt").write_text(text)
    with pytest.raises(hpcfed.InputError, match="expected 32 random hexadecimal digits or more"):
        run(place, "run", **secret(place))
