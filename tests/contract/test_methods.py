"""What every method must keep to; methods are discovered, so a new one is held to it from its first day."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import hpcfed
from hpcfed.algorithms import _blocks, build, names
from hpcfed.algorithms._blocks import BLOCK, elementwise, server_step
from hpcfed.algorithms._evaluated import evaluated_model, with_step_average
from hpcfed.config.recipe import Algorithm
from hpcfed.lab.cite import references
from hpcfed.ranks.world import World
from hpcfed.reduce.buffer import RoundBuffer
from hpcfed.types import ClientInfo, LocalResult, Means, Method, RoundContext, ServerUpdate, State
from tests.mpi.recipes import METHODS, small, write_small

D = 37
ENTRIES = 96 + 16 + 32 + 16
"""d of the small model: its four parameter tensors, each padded to 64 bytes."""
OF_CLIENT = RoundContext(2, 0.1, ClientInfo(client=3, num_samples=20, mean_samples=16.0))
OF_SERVER = RoundContext(2, 0.1)


def method(name: str) -> Method:
    return build(Algorithm(name=name, **METHODS[name]))


def module_of(name: str):
    return import_module(f"hpcfed.algorithms.{name.replace('-', '_')}")


def draw(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def means(vectors: tuple[str, ...], round: int, effective_steps: float | None = None) -> Means:
    drawn = {name: draw(round * 10 + place, torch.float64) for place, name in enumerate(vectors)}
    known = {"lr": 0.1, "effective_steps": effective_steps}
    return Means(drawn, mean_delta_sq=3.5 * D, delta_sq=D, fraction=0.4, cohort_size=2, round=round, **known)


def copied(state: State) -> State:
    return {key: tensor.clone() for key, tensor in state.items()}


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def is_plain(state: State, dtype: torch.dtype) -> bool:
    """Whether all are tensors, vectors (d,) or scalars (), of a type."""
    return all(
        type(tensor) is torch.Tensor and tensor.dtype == dtype and tensor.shape in ((D,), ())
        for tensor in state.values()
    )


@pytest.mark.parametrize("name", names())
def test_a_file_says_its_title_its_papers_and_an_example(name):
    module = module_of(name)
    assert module.TITLE
    assert set(module.REFERENCES) <= set(references())
    assert method(name).parameters().items() >= METHODS[name].items()


@pytest.mark.parametrize("name", names())
def test_the_server_step_is_pure_and_keeps_dtype_and_shape(name):
    chosen = method(name)
    w = draw(1, torch.float64)
    state = chosen.server.begin(w)
    assert is_plain(state, torch.float64)
    for round in (1, 2, 3):
        told = means(chosen.reported(alike=False), round)
        before = w.clone(), copied(state), copied(told.vectors)
        stepped, again = (chosen.server.step(w, state, told, OF_SERVER) for _ in range(2))
        assert isinstance(stepped, ServerUpdate)
        assert torch.equal(w, before[0])
        assert same(state, before[1])
        assert same(told.vectors, before[2])
        assert torch.equal(stepped.w, again.w)
        assert same(stepped.state, again.state)
        assert stepped.server_lr == again.server_lr
        assert is_plain({"w": stepped.w, **stepped.state}, torch.float64)
        assert stepped.state.keys() == state.keys()
        assert stepped.server_lr is None or math.isfinite(stepped.server_lr)
        assert not torch.equal(stepped.w, w)
        w, state = stepped.w, stepped.state


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", names())
def test_what_the_server_keeps_for_clients_follows_purely(name, alike):
    chosen = method(name)
    local = chosen.local
    w = draw(1, torch.float64)
    shared = local.begin_shared(w)
    assert is_plain(shared, torch.float64)
    for round in (1, 2, 3):
        told = means(chosen.reported(alike), round, effective_steps=4.0 if alike else None)
        before = copied(shared), copied(told.vectors)
        after, again = local.share(shared, told), local.share(shared, told)
        assert same(shared, before[0])
        assert same(told.vectors, before[1])
        assert same(after, again)
        assert is_plain(after, torch.float64)
        assert after.keys() == shared.keys()
        shared = after


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", names())
def test_the_client_changes_nothing_it_was_given(name, dtype):
    chosen = method(name)
    personal = draw(3, dtype) if chosen.local.trains_personal else None
    local = LocalResult(draw(2, dtype), steps=4, loss_sum=1.0, lr=0.1, effective_steps=4.0, personal=personal)
    w = draw(1, dtype)
    server, client = chosen.local.begin_shared(w), chosen.local.begin(w)
    assert bool(client) == chosen.local.stateful
    for _ in range(2):
        given = {"w": w, "delta": local.delta, **{f"server {key}": value for key, value in server.items()}, **client}
        before = copied(given)
        tilt = chosen.local.tilt(w, server, client, OF_CLIENT)
        update = chosen.local.report(local, w, server, client, OF_CLIENT)
        client = chosen.local.next_state(update, local, w, server, client, OF_CLIENT) or {}
        assert same(given, before)
        assert is_plain({key: v for key, v in vars(tilt).items() if isinstance(v, torch.Tensor)}, dtype)
        assert tilt.mu >= 0
        assert tuple(update.named) == chosen.reported(alike=False)
        assert tuple(update.scalars) == chosen.local.scalars
        assert is_plain(update.named, dtype)
        assert is_plain(client, dtype)
        # The solver writes its next Δ over this one.
        assert all(tensor.data_ptr() != local.delta.data_ptr() for tensor in client.values())


class Counting(World):
    """A world of one that notes the size of what is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[int] = []

    def sum_in_place(self, buffer: np.ndarray) -> None:
        self.words.append(buffer.size)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", names())
def test_a_round_reduces_what_the_docstring_says_once(name, alike, tmp_path):
    """``Reduced: d (Δ), or 2d (Δ, Ψ) …``: the first holds where ‖a_i‖₁ are the same, the last where they are not."""
    section = (inspect.getdoc(module_of(name)) or "").split("Reduced: ")[1].split("State:")[0]
    told = [int(number or 1) for number in re.findall(r"(\d*)d \(", section)]
    data = write_small(tmp_path)
    algorithm = {"name": name, **METHODS[name]}
    budget = None if alike else {"low": 1, "high": 9}
    counting = Counting()
    recipe = small(tmp_path / "run", data=str(data), algorithm=algorithm, budget=budget, evaluate={"every": 0})
    result = hpcfed.run(recipe, world=counting, quiet=True)
    vectors = told[0] if alike else told[-1]
    fused = RoundBuffer(ENTRIES, torch.float32, torch.device("cpu"), World(), watched=True)
    words = [sum(fused.sizes([each] * vectors, 5)) for each in (2, 1)]
    assert counting.words == [
        words[0],
        words[1],
        words[1],
    ]  # nobody knows yet how large a vector will be
    assert len(result.metrics) == 3


@pytest.mark.parametrize("name", names())
def test_the_docstring_reads_like_the_paper(name):
    text = inspect.getdoc(module_of(name)) or ""
    for heading in ("client i:", "server:", "Reduced:", "State:", "Reference:"):
        assert heading in text
    assert "w ← w" in text or "fedexp" in name
    undocumented = [key for key in method(name).parameters() if f"``{key}" not in text and key != "server_lr"]
    assert not undocumented


@pytest.mark.parametrize("name", names())
def test_the_file_is_a_small_table(name):
    """No loop over clients, no collective, no torch at run time (the latter: see test_layers)."""
    tree = ast.parse(inspect.getsource(module_of(name)))
    loops = (ast.For, ast.While, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, loops)] == []


@pytest.mark.parametrize("name", ["fedexp", "fedadagrad"])
def test_the_average_of_iterates_by_their_steps(name):
    """FedExP's Theorem 1, from the models that the steps began with."""
    server, w = method(name).server, draw(0, torch.float64)
    following = with_step_average(method(name)).server
    state, own, begun = following.begin(w), server.begin(w), []
    for number in range(1, 6):
        stepped, alone = (
            following.step(w, state, means(("delta",), number), OF_SERVER),
            server.step(w, own, means(("delta",), number), OF_SERVER),
        )
        assert torch.equal(stepped.w, alone.w)
        begun.append((w, stepped.server_lr))
        w, state, own = stepped.w, stepped.state, alone.state
    wanted = sum(lr * model for model, lr in begun) / sum(lr for _, lr in begun)
    found = evaluated_model("step-average", w, {}, {}, state)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_the_average_of_iterates_begins_with_the_first_step_that_moves():
    """FedExP-M's η_g is 0 in a round whose clients did not move."""
    following, w = with_step_average(method("fedexp-m")).server, draw(0, torch.float64)
    moved = means(("delta",), 1)
    nothing = replace(moved, vectors={"delta": torch.zeros_like(w)}, mean_delta_sq=0.0, delta_sq=0.0)
    still = following.step(w, following.begin(w), nothing, OF_SERVER)
    assert float(still.server_lr) == 0
    stepped = following.step(still.w, still.state, moved, OF_SERVER)
    assert torch.equal(evaluated_model("step-average", stepped.w, {}, {}, stepped.state), still.w)


@pytest.mark.parametrize("name", ["fedexp", "fedexp-m"])
def test_an_extrapolated_step_of_nothing_is_none(name):
    server, w = build(Algorithm(name=name, eps=0.0)).server, draw(0, torch.float64)
    nothing = replace(means((), 1), vectors={"delta": torch.zeros_like(w)}, mean_delta_sq=0.0, delta_sq=0.0)
    stepped = server.step(w, server.begin(w), nothing, OF_SERVER)
    assert torch.equal(stepped.w, w)
    assert stepped.server_lr == 1.0


WITH_SIZES = [
    {"name": "scaffold"},
    *({"name": "scaffold", "c_scale": scale} for scale in ("samples", "uniform")),
    {"name": "scaffold", "correction": "after-momentum"},
    {"name": "feddyn", "alpha": 0.1, "alpha_scale": "samples"},
]


@pytest.mark.parametrize("keys", WITH_SIZES, ids=str)
def test_a_client_without_samples_keeps_its_state_and_moves_nobody_elses(keys):
    local, w = build(Algorithm(**keys)).local, draw(0, torch.float64)
    shared, client = (
        {key: draw(place, torch.float64) for key in state(w)}
        for place, state in enumerate((local.begin_shared, local.begin), 1)
    )
    context = RoundContext(2, 0.1, ClientInfo(client=3, num_samples=0, mean_samples=16.0))
    solved = LocalResult(torch.zeros(D, dtype=torch.float64), 0, 0.0, 0.1, effective_steps=0.0)
    tilt = local.tilt(w, shared, client, context)
    assert all(one.isfinite().all() for one in (tilt.shift, tilt.after_momentum) if one is not None)
    sent = local.report(solved, w, shared, client, context)
    assert not any(vector.any() for vector in sent.named.values())
    assert same(local.next_state(sent, solved, w, shared, client, context), client)


@pytest.mark.parametrize("keys", WITH_SIZES[:3], ids=str)
def test_what_is_lost_of_psi_stays_with_its_client(keys):
    """c_i ← c_i − Ψ_i as the server has it, in the client's own scale."""
    local, w = build(Algorithm(**keys)).local, draw(0, torch.float64)
    state, shared = {"c": draw(1, torch.float64)}, {"c": draw(2, torch.float64)}
    context = replace(OF_CLIENT, alike=False)
    solved = LocalResult(draw(3, torch.float64), 4, 0.0, 0.1, effective_steps=4.0)
    report = local.report(solved, w, shared, state, context)
    heard = replace(report, vectors={"psi": report.vectors["psi"] / 2})
    found = local.next_state(heard, solved, w, shared, state, context)["c"]
    psi = shared["c"] - solved.delta / 0.4
    torch.testing.assert_close(found, state["c"] - psi / 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_bias_corrected_servers_are_torchs_adam_and_optaxs_yogi(name):
    """On the averaged deltas for gradients, after empty rounds too; Yogi as ``optax.scale_by_yogi``, from v = 0."""
    server = build(Algorithm(name=name, server_lr=0.3, tau=1e-3, v0="zero", debias="adam")).server
    w = draw(0, torch.float64)
    theirs, state, m, v = w.clone().requires_grad_(), server.begin(w), torch.zeros(D), torch.zeros(D)
    adam = torch.optim.Adam([theirs], lr=0.3, betas=(0.9, 0.99), eps=1e-3)
    for number in range(1, 7):
        given = means(("delta",), number if number < 4 else number + 2)
        stepped = server.step(w, state, given, OF_SERVER)
        w, state, g = stepped.w, stepped.state, given.delta
        m, v = 0.9 * m + 0.1 * g, v - 0.01 * (v - g**2).sign() * g**2
        if name == "fedadam":
            theirs.grad = g
            adam.step()
        else:
            corrected = (v / (1 - 0.99**number)).sqrt() + 1e-3
            theirs = theirs.detach() - 0.3 * m / (1 - 0.9**number) / corrected
        torch.testing.assert_close(w, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_adagrads_first_moment_alone_is_corrected_and_entries_that_never_changed_stay(monkeypatch):
    """With τ = 0 their root is 0, too; in blocks, for all of which the state's count of steps is one."""
    monkeypatch.setattr(_blocks, "BLOCK", 10)
    server = build(Algorithm(name="fedadagrad", server_lr=0.3, beta1=0.6, tau=0.0, v0="zero", debias="adam")).server
    w = theirs = draw(0, torch.float64)
    state, m, v = server.begin(w), torch.zeros(D), torch.zeros(D)
    for number in (1, 2, 3):
        given = means(("delta",), number)
        given.delta[5] = 0.0
        stepped = server_step(server, w, state, given, OF_SERVER)
        w, state = stepped.w, stepped.state
        m, v = 0.6 * m + 0.4 * given.delta, v + given.delta**2
        theirs = theirs - 0.3 * (m / (1 - 0.6**number) / v.sqrt()).nan_to_num(0.0)
        torch.testing.assert_close(w, theirs, rtol=1e-12, atol=1e-12)


def test_scaffold_of_feddyns_code_where_clients_differ_in_size():
    """Three rounds of quadratics, all clients in each, against that code's lines (utils_methods.py, 201 to 237)."""
    sizes, lr, steps, optima = np.array([5.0, 15.0, 40.0]), 0.1, 3, [draw(k, torch.float64) for k in range(3)]
    local, weights = build(Algorithm(name="scaffold", c_scale="samples")).local, sizes / sizes.sum() * 3
    w = theirs = torch.zeros(D, dtype=torch.float64)
    shared, states = local.begin_shared(w), [local.begin(w)] * 3
    cloud, own = torch.zeros(D, dtype=torch.float64), [torch.zeros(D, dtype=torch.float64)] * 3
    for number in range(1, 4):
        reports, models, change = [], [], torch.zeros(D, dtype=torch.float64)
        for k, size in enumerate(sizes):
            context = RoundContext(number, lr, ClientInfo(k, int(size), sizes.mean()))
            y, z, shift = w, theirs, local.tilt(w, shared, states[k], context).shift
            for _ in range(steps):
                y = y - lr * (k + 1) * (y - optima[k]) - lr * shift
                z = z - lr * (k + 1) * (z - optima[k]) - lr * (cloud / weights[k] - own[k])
            solved = LocalResult(w - y, steps, 0.0, lr, float(steps))
            reports.append(local.report(solved, w, shared, states[k], context))
            states[k] = local.next_state(reports[-1], solved, w, shared, states[k], context)
            new = own[k] - cloud + (theirs - z) / steps / lr
            change, own[k] = change + (new - own[k]) * weights[k], new
            models.append(z)
        averaged = {name: sum(one.named[name] for one in reports) / 3 for name in ("delta", "psi")}
        shared = local.share(shared, Means(averaged, 0.0, 0.0, fraction=1.0, cohort_size=3, round=number))
        w, theirs, cloud = w - averaged["delta"], sum(models) / 3, cloud + change / 3
        torch.testing.assert_close(w, theirs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(shared["c"], cloud, rtol=1e-12, atol=1e-12)
    assert "c_scale" not in build(Algorithm(name="scaffold")).parameters()  # recipes of earlier runs lack it


DEGENERATE = {
    "fedprox-mu-0-is-fedavg": ({"name": "fedprox", "mu": 0.0}, {"name": "fedavg"}, 3),
    "ditto-is-fedavg": ({"name": "ditto", "mu": 0.3}, {"name": "fedavg"}, 3),
    "fedexp-large-eps-is-fedavg": ({"name": "fedexp", "eps": 1e15}, {"name": "fedavg"}, 3),
    "feddyn-first-trains-as-fedprox": ({"name": "feddyn", "alpha": 0.2}, {"name": "fedprox", "mu": 0.2}, 1),
    "fedavgm-beta-0-is-fedavg": ({"name": "fedavgm", "beta": 0.0}, {"name": "fedavg"}, 3),
    "fednova-equal-work-is-fedavg": ({"name": "fednova"}, {"name": "fedavg"}, 3),
    "fednova-with-mu-is-the-combination": (
        {"name": "fednova", "mu": 0.3},
        {"local": "prox", "normalize": "steps", "server": "momentum", "mu": 0.3, "beta": 0.0},
        3,
    ),
    "scaffold-exp-large-eps-is-scaffold": ({"name": "scaffold-exp", "eps": 1e15}, {"name": "scaffold"}, 3),
    "scaffold-first-trains-as-fedavg": ({"name": "scaffold"}, {"name": "fedavg"}, 1),
    "scaffold-combination": ({"local": "scaffold", "server": "fedexp"}, {"name": "scaffold-exp"}, 3),
    "plain-combination-is-fedavg": ({"local": "plain"}, {"name": "fedavg"}, 3),
    "adam-server-combination": ({"server": "adam", "tau": 0.1}, {"name": "fedadam", "tau": 0.1}, 3),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("case", DEGENERATE)
def test_a_degenerate_case_is_the_other_method_bit_for_bit(case, world, shared_tmp):
    left, right, rounds = DEGENERATE[case]
    compare_bits(world, shared_tmp, {"algorithm": left}, {"algorithm": right}, rounds)


FOUR_OF_SIX = {
    "budget": {"low": 4, "high": 4},
    "local": {"steps": 6, "batch_size": 10, "lr": 0.1, "momentum": 0.9},
}
SAME = {
    "dsgd-is-one-full-step": (
        {"algorithm": {"name": "dsgd"}},
        {"algorithm": {"name": "fedavg"}, "local": {"steps": 1, "batch_size": "full", "lr": 0.1}},
    ),
    "nothing-remains-to-guess": (
        {"guess": "remaining", "local": {"steps": 4, "batch_size": 10, "lr": 0.1, "momentum": 0.9}},
        {"local": {"steps": 4, "batch_size": 10, "lr": 0.1, "momentum": 0.9}},
    ),
    "two-remain-to-guess": (
        {"guess": 2, **FOUR_OF_SIX, "algorithm": {"name": "fednova"}},
        {"guess": "remaining", **FOUR_OF_SIX, "algorithm": {"name": "fednova"}},
    ),
    "two-guesses-of-a-network-by-itself": (
        {"guess": 2, **FOUR_OF_SIX, "local": {**FOUR_OF_SIX["local"], "engine": "sequential"}},
        {"guess": "remaining", **FOUR_OF_SIX, "local": {**FOUR_OF_SIX["local"], "engine": "sequential"}},
    ),
    "a-schedule-of-step-sizes": (
        {"local": {"steps": 2, "lr": 0.2, "lr_schedule": [{"round": 2, "lr": 0.1}, {"round": 3, "lr": 0.05}]}},
        {"local": {"steps": 2, "lr": 0.2, "lr_decay": 0.5}},
    ),
    "no-guesses": ({"guess": 0}, {"guess": "none"}),
    "states-on-disk": (
        {"algorithm": {"name": "scaffold"}, "client_state": "disk", "cohort": {"size": 3}},
        {"algorithm": {"name": "scaffold"}, "cohort": {"size": 3}},
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("case", SAME)
def test_two_ways_to_say_the_same_give_the_same_bits(case, world, shared_tmp):
    compare_bits(world, shared_tmp, *SAME[case], 3)


def compare_bits(world: World, folder: Path, left: Mapping, right: Mapping, rounds: int) -> None:
    """Run two recipes; their clients' work is the same to the last bit, after more than one round the models too."""
    world.on_root(lambda: write_small(folder))
    common = {"data": str(folder / "small.h5"), "rounds": rounds, "weights": "uniform"}
    runs = [
        hpcfed.run(small(folder / place, **common, **changes), world=world, quiet=True)
        for place, changes in (("left", left), ("right", right))
    ]
    for key in ("local_loss", "delta_sq", "mean_delta_sq"):
        assert [row[key] for row in runs[0].metrics] == [row[key] for row in runs[1].metrics]
    if rounds > 1:  # FedDyn's and SCAFFOLD's first round trains as another method, and steps on its own
        models = [(run.folder / "model.safetensors").read_bytes() for run in runs]
        assert models[0] == models[1]


SENT = {"scaffold": (2, 2), "scaffold-exp": (2, 2), "fedavg": (1, 1), "feddyn": (1, 1)}
"""Vectors of d parameters up and down for each client and round, as these papers count."""


@pytest.mark.parametrize("name", names())
def test_parameters_and_gradients_are_counted_as_in_the_papers(name, tmp_path):
    """Guesses cost no gradient, and a second vector that is not reduced is still one that a client would send."""
    data = write_small(tmp_path)
    local = {"steps": 6, "batch_size": 10, "lr": 0.05, "momentum": 0.5}
    guess = {"guess": "none" if name == "dsgd" else "remaining", "budget": {"low": 1, "high": 5}}
    recipe = small(tmp_path / "run", data=str(data), algorithm={"name": name, **METHODS[name]}, local=local, **guess)
    result = hpcfed.run({**recipe, "cohort": {"size": 3}, "weights": "uniform"}, world=World(), quiet=True)
    up, down = method(name).local.sent, method(name).local.received
    assert (up, down) == SENT.get(name, (up, down))
    parameters = 12 * 8 + 8 + 8 * 4 + 4
    for row in result.metrics:
        assert (row["params_up"], row["params_down"]) == (
            3 * row["round"] * parameters * up,
            3 * row["round"] * parameters * down,
        )
    gradients = result.metrics[-1]["gradients"]
    assert gradients == 9 if name == "dsgd" else 9 <= gradients <= 45


def test_a_named_part_belongs_to_one_method():
    for role in ("LOCAL", "NORMALIZE", "SERVER"):
        kinds = [getattr(module_of(name), role, None) for name in names()]
        named = {(kind.choice, kind) for kind in kinds if kind is not None and kind.choice is not None}
        assert len(named) == len({choice for choice, _ in named})


class Halving:
    """A server whose state is neither a scalar nor as long as the model."""

    @elementwise
    def step(self, w, state, means, context):
        return ServerUpdate(w - means.delta * state["eta"], {"eta": state["eta"] / 2}, 1.0)


def test_a_step_entry_by_entry_with_a_short_state_is_taken_whole():
    w = torch.zeros(3 * BLOCK)
    means = Means({"delta": torch.ones(len(w), dtype=torch.float64)}, 1.0, 1.0, 1.0, 1, 1)
    update = server_step(Halving(), w, {"eta": torch.ones(1, dtype=torch.float64)}, means, RoundContext(1, 0.1))
    assert update.state["eta"].tolist() == [0.5]
    assert update.w.tolist() == [-1.0] * len(w)
