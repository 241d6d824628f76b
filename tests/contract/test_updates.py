"""What happens to an update on its way: parts by hand, packed to the bit, and what a method keeps behind them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcfed
from hpcfed import updates
from hpcfed.algorithms import build as build_method
from hpcfed.assembly import assemble, resolve
from hpcfed.config import registry
from hpcfed.config.load import load_recipe
from hpcfed.config.recipe import Algorithm
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World
from hpcfed.simulation import Simulation
from hpcfed.types import ClientInfo, LocalResult, RoundContext
from hpcfed.updates import Chain, PartContext, Sent, UpdatePart
from hpcfed.updates._chain import sending
from hpcfed.updates._coding import Coding, plain
from hpcfed.updates._layout import Layout, layout_of
from hpcfed.updates._mechanism import Mechanism, Privacy
from hpcfed.updates._tile import send_tile
from hpcfed.updates.attack import Attack
from hpcfed.updates.cast import Cast
from hpcfed.updates.centred_clip import CentredClip
from hpcfed.updates.clip import Clip
from hpcfed.updates.quantize import Quantize
from hpcfed.updates.randk import RandomK
from hpcfed.updates.sign import Sign
from hpcfed.updates.topk import TopK
from tests.contract.packing import pack, spread, unpack
from tests.contract.terngrad import Damped, Ternary
from tests.launch import ROOT
from tests.mpi.recipes import METHODS, small, write_small

pytestmark = [pytest.mark.serial, pytest.mark.one_mpi]
SIZES = (200, 17, 1000)
N = sum(SIZES)
MECHANISM = Mechanism(1.0, {}, 1.0, 1e-5, 10, 1000, 100.0, "size", is_secret=True, at_clients=True)
IDENTITY: Sequence[Mapping[str, Any]] = (
    {"attack": {}},
    {"clip": {"norm": 1e15}},
    {"topk": {"fraction": 1.0}},
    {"randk": {"fraction": 1.0}},
    {"cast": {"to": "float32"}},
    {"centred-clip": {"norm": 1e15}},
)
LOSSY: Sequence[Mapping[str, Any]] = (
    {"attack": {"clients": [1]}},
    {"topk": {"fraction": 0.2}},
    {"quantize": {"bits": 4}},
)
SAME_NUMBERS = (
    "test_loss",
    "test_accuracy",
    "delta_sq",
    "mean_delta_sq",
    "bytes_up",
    "server_lr",
    "local_loss",
    "unit",
)


def draw(seed: int = 0, dtype: torch.dtype = torch.float32, entries: int = N) -> torch.Tensor:
    return torch.randn(entries, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def context(coding: Coding | None = None, round: int = 1, client: int = 3, **places: torch.Tensor) -> PartContext:
    about = round, 0.1, 7, 0, ClientInfo(client, 20, 16.0), coding or plain(SIZES, 32), places
    return PartContext(*about, privacy=Privacy(MECHANISM, Layout(SIZES, sum(SIZES), torch.empty(0, dtype=torch.int64))))


def through(parts: Sequence[UpdatePart], vector: torch.Tensor, **about: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """What is decoded of a client's first Δ, and the places that are sent."""
    coding, places = plain(SIZES, 8 * vector.element_size()), {}
    for part in parts:
        zeros = {"delta": torch.zeros_like(vector)}
        sent = part.send(
            {"delta": vector}, part.begin(zeros), part.begin_shared(zeros), context(coding, **about, **places)
        )
        (vector,), places, coding = sent.vectors.values(), {**places, **sent.places}, part.coded(coding)
    return vector, {"coding": coding, "places": places.get("delta")}


@pytest.fixture
def place(world, shared_tmp) -> Path:
    """A folder with data, one for each rank, which runs alone."""
    folder = shared_tmp / f"rank-{world.rank}"
    folder.mkdir()
    write_small(folder)
    return folder


def run(folder: Path, output: str, **changes: Any) -> hpcfed.Result:
    paths = {"data": str(folder / "small.h5"), "python_path": [str(Path(__file__).parent)]}
    return hpcfed.run(small(folder / output, **{**paths, **changes}), world=World(), quiet=True)


def numbers(result: hpcfed.Result) -> list[dict[str, Any]]:
    return [{name: row[name] for name in SAME_NUMBERS} for row in result.metrics]


ALL = [(key, name) for key in updates.LISTS for name in updates.named(key)]


def test_parts_are_found_by_their_files():
    assert {name for _, name in ALL} == {*registry.names("hpcfed.updates")}


@pytest.mark.parametrize(("key", "name"), ALL)
def test_a_file_says_its_title_an_example_and_each_parameter(key, name):
    module, kind = registry.entry("hpcfed.updates", name), updates.named(key)[name]
    assert module.TITLE
    kind(**updates.examples(key)[name])
    text = inspect.getdoc(module) or ""
    assert "State:" in text
    assert [field for field in kind.model_fields if f"``{field}" not in text] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", updates.named("updates"))
def test_a_part_is_pure_and_keeps_dtype_and_shape(name, dtype):
    part = updates.named("updates")[name](**updates.examples("updates")[name])
    vectors = {"delta": draw(1, dtype), "psi": draw(2, dtype)}
    zeros = {each: torch.zeros_like(vector) for each, vector in vectors.items()}
    state, shared, before = part.begin(zeros), part.begin_shared(zeros), {k: v.clone() for k, v in vectors.items()}
    assert bool(state) == part.stateful
    for client in range(6):
        about = context(plain(SIZES, 8 * vectors["delta"].element_size()), client=client)
        sent, again = (part.send(vectors, state, shared, about) for _ in range(2))
        assert all(torch.equal(vectors[each], before[each]) for each in vectors)
        assert [*sent.vectors] == [*vectors]
        assert sent.state.keys() == state.keys()
        for each, vector in sent.vectors.items():
            assert (vector.shape, vector.dtype) == ((N,), dtype)
            assert torch.equal(vector, again.vectors[each])
        state = {**sent.state}
        shared = part.share(shared, {each: vector.double() for each, vector in sent.vectors.items()})
        shared = {each: tensor.to(dtype) for each, tensor in shared.items()}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", updates.named("updates"))
def test_what_is_not_finite_stays_so(name, bad):
    """An update that has diverged is not hidden by a part that drops, replaces or bounds entries."""
    part = updates.named("updates")[name](**{**updates.examples("updates")[name], **ATTACKING.get(name, {})})
    vector = draw()
    vector[5] = bad
    layout = Layout(SIZES, sum(SIZES), torch.empty(0, dtype=torch.int64))
    method = sending(build_method(Algorithm(name="fedavg")), Chain((part,), privacy=Privacy(MECHANISM, layout)), layout)
    w, local = torch.zeros(N), LocalResult(vector, steps=4, loss_sum=1.0, lr=0.1)
    state, shared = method.local.begin(w), method.local.begin_shared(w)
    about = RoundContext(1, 0.1, ClientInfo(3, 20, 16.0), seed=7)
    assert not method.local.report(local, w, shared, state, about).named["delta"].isfinite().all()


def test_random_streams_are_of_the_list_the_place_the_round_and_the_client():
    one = context()
    changes = [{"place": 1}, {"round": 2}, {"seed": 8}, {"client": ClientInfo(4, 20, 16.0)}, {"client": None}]
    others = [replace(one, **change) for change in (*changes, {"client": None, "is_down": True})]
    assert len({int(each.stream().integers(1 << 62)) for each in (one, *others)}) == 7
    assert len({int(each.stream(each_round=False).integers(1 << 62)) for each in (one, others[1])}) == 1


ATTACKING = {"attack": {"clients": [3], "what": "mean"}}


@pytest.mark.parametrize("bits", range(1, 9))
def test_quantisation_is_unbiased(bits):
    """Over 10^5 draws, within 4 standard errors; and no entry moves by a level."""
    vector = torch.full((100_002,), 0.3)
    vector[:2] = torch.tensor([-1.0, 1.5])
    part, step = Quantize(bits=bits), 2.5 / (2**bits - 1)
    sent = part.send({"delta": vector}, {}, {}, context(plain((len(vector),), 32))).vectors["delta"]
    drawn = sent[2:].double()
    assert (drawn - 0.3).abs().max() < step * (1 + 1e-6)
    assert abs(float(drawn.mean()) - 0.3) < 4 * float(drawn.std()) / 1e5**0.5 + 1e-7
    assert len(drawn.unique()) == 2


@pytest.mark.soak
def test_random_entries_without_feedback_are_unbiased():
    vector, part, draws = torch.tensor([1.0, -2.0, 0.5, 4.0]), RandomK(fraction=0.5, feedback=False), 4_000
    total = torch.zeros(4, dtype=torch.float64)
    for round in range(1, draws + 1):
        total += part.send({"delta": vector}, {}, {}, context(round=round)).vectors["delta"]
    assert bool(((total / draws - vector).abs() < 4 * vector.abs() / draws**0.5).all())


def test_error_feedback_by_hand():
    """What is not sent comes later, to the last bit; of equal magnitudes the first is sent."""
    part, state = TopK(fraction=0.25), {"delta": torch.zeros(4)}
    sent = []
    for vector in ([3.0, -1.0, 2.0, 0.5], [0.0, -1.0, 0.0, 0.5], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]):
        answer = part.send({"delta": torch.tensor(vector)}, state, {}, context())
        sent.append(answer.vectors["delta"].tolist())
        state = answer.state
    assert sent == [[3.0, 0, 0, 0], [0, -2.0, 0, 0], [0, 0, 2.0, 0], [0, 0, 0, 2.0]]
    assert state["delta"].tolist() == [0, 0, 0, 0]
    answer = Sign().send({"delta": torch.tensor([1.0, -3.0, 0.0, 4.0])}, {"delta": torch.zeros(4)}, {}, context())
    assert answer.vectors["delta"].tolist() == [2.0, -2.0, 2.0, 2.0]
    assert answer.state["delta"].tolist() == [-1.0, -1.0, -2.0, 2.0]
    first, second = Sign(), {"delta": torch.tensor([1.0])}
    assert first.send(second, {"delta": torch.zeros(1), "psi": torch.ones(1)}, {}, context()).state["psi"].item() == 1.0


CODED: Mapping[str, tuple[Sequence[UpdatePart], str]] = {
    "plain": ((), "float"),
    "topk": ((TopK(fraction=0.03),), "float"),
    "randk": ((RandomK(fraction=0.1),), "float"),
    "sign": ((Sign(),), "sign"),
    "topk-sign": ((TopK(fraction=0.1), Sign()), "sign"),
    "float16": ((Cast(to="float16"),), "float16"),
    "bfloat16": ((RandomK(fraction=0.5), Cast(to="bfloat16")), "bfloat16"),
    **{f"quantize-{bits}": ((Quantize(bits=bits),), "levels") for bits in (1, 3, 8)},
    "blocks": ((Quantize(bits=4, block=100),), "levels"),
    "topk-quantize": ((TopK(fraction=0.05), Quantize(bits=2)), "levels"),
    "clipped": ((RandomK(fraction=0.2), Quantize(bits=5, block=64), Clip(norm=1e9)), "levels"),
}


@pytest.mark.parametrize("case", CODED)
def test_bytes_are_those_of_the_packed_form(case):
    """Packed to as many bytes as are counted, and unpacked to the decoded vector, bit for bit."""
    parts, kind = CODED[case]
    vector = draw(3)
    decoded, about = through(parts, vector)
    coding, where = about["coding"], about["places"]
    assert len(parts) == 0 or coding.num_bytes < 4 * N
    values = decoded if where is None else decoded[where]
    places = None if where is None else where.numpy()
    before = (through(parts[:1], vector)[0] if where is not None else vector)[... if where is None else where]
    codes, scales = encoded(kind, values, before, [part for part in parts if isinstance(part, Quantize)], coding)
    packed = pack(coding, codes, places, scales)
    assert len(packed) == coding.num_bytes
    codes, found, scales = unpack(coding, packed, np.dtype(np.float32))
    assert coding.place_bits == 0 or np.array_equal(found, places)
    assert torch.equal(spread(decoded_from(kind, codes, scales, parts, coding), places, N), decoded)


def lengths_of(parts: Sequence[Any], coding: Coding) -> np.ndarray:
    (part,) = (part for part in parts if isinstance(part, Quantize))
    return np.array(part._blocks(coding))


def encoded(
    kind: str, values: torch.Tensor, before: torch.Tensor, quantizers: Sequence[Quantize], coding: Coding
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of the sent values."""
    none = np.empty(0, np.float32)
    if kind == "float":
        return values.numpy().view(np.uint32), none
    if kind in ("float16", "bfloat16"):
        return values.to(getattr(torch, kind)).view(torch.int16).numpy().view(np.uint16), none
    if kind == "sign":
        return (values >= 0).numpy(), values.abs().max().reshape(1).numpy()
    lengths = lengths_of(quantizers, coding)
    blocks = np.split(before.numpy(), np.cumsum(lengths)[:-1])
    low = np.array([block.min() for block in blocks])
    step = (np.array([block.max() for block in blocks]) - low) / np.float32(2 ** quantizers[0].bits - 1)
    codes = np.rint((values.numpy() - low.repeat(lengths)) / step.repeat(lengths))
    return codes, np.concatenate([low, step]).astype(np.float32)


def decoded_from(kind: str, codes: np.ndarray, scales: np.ndarray, parts: Sequence[Any], coding: Coding) -> np.ndarray:
    """The values that codes and scales stand for."""
    if kind == "float":
        return codes.astype(np.uint32).view(np.float32)
    if kind in ("float16", "bfloat16"):
        words = torch.from_numpy(codes.astype(np.uint16).view(np.int16))
        return words.view(getattr(torch, kind)).float().numpy()
    if kind == "sign":
        return np.where(codes > 0, scales[0], -scales[0])
    lengths, half = lengths_of(parts, coding), len(scales) // 2
    return scales[:half].repeat(lengths) + codes.astype(np.float32) * scales[half:].repeat(lengths)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", updates.named("updates"))
def test_a_client_of_a_tile_sends_the_bits_that_it_sends_alone(name, data):
    """Ties, zeros, numbers that are not finite in a neighbour, memories, and entries that a part before has chosen."""
    part = updates.named("updates")[name](**updates.examples("updates")[name])
    rows = data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    numbers = st.one_of(st.integers(-2, 2), st.sampled_from([np.nan, np.inf, 1e-30]))
    draws = np.random.default_rng(data.draw(st.integers(0, 99)))
    size, count = sum(SIZES), 7
    stacks = {name: torch.from_numpy(draws.normal(size=(rows, size))).to(dtype) for name in ("delta", "psi")}
    for row in data.draw(st.sets(st.integers(0, rows - 1))):
        stacks["delta"][row] = data.draw(numbers)
        stacks["psi"][row] = stacks["psi"][row].round()
    zeros = {name: torch.zeros(size, dtype=dtype) for name in stacks}
    shared = part.begin_shared({name: zero.double() for name, zero in zeros.items()})
    shared = {name: tensor.to(dtype) for name, tensor in shared.items()}
    states = [{key: torch.full_like(zero, 0.1 * row) for key, zero in part.begin(zeros).items()} for row in range(rows)]
    chosen = name in ("quantize", "sign") and data.draw(st.booleans())
    coding = plain(SIZES, 8 * torch.finfo(dtype).bits // 8)
    places = [
        {key: torch.from_numpy(np.sort(draws.choice(size, count, replace=False))) for key in stacks} if chosen else {}
        for _ in range(rows)
    ]
    contexts = [
        context(coding.chosen(count, 0) if chosen else coding, client=5 * row, **own) for row, own in enumerate(places)
    ]
    together = send_tile(part, stacks, states, shared, contexts)
    for row in range(rows):
        alone = part.send({key: stack[row] for key, stack in stacks.items()}, states[row], shared, contexts[row])
        for ours, theirs in ((together.vectors, alone.vectors), (together.places, alone.places)):
            assert all(same_bits(ours[key][row], theirs[key]) for key in theirs)
        assert together.states[row].keys() == alone.state.keys()
        assert all(same_bits(together.states[row][key], tensor) for key, tensor in alone.state.items())
        assert (together.scalars or [{}] * rows)[row] == alone.scalars


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit, but for what kind of NaN they have."""
    ours, theirs = (
        tensor.where(~tensor.isnan(), torch.nan) if tensor.is_floating_point() else tensor for tensor in (ours, theirs)
    )
    return ours.numpy().tobytes() == theirs.numpy().tobytes()


def test_a_clip_is_of_all_vectors_together():
    vectors = {"delta": torch.tensor([3.0]), "psi": torch.tensor([40.0])}
    sent = Clip(norm=1.0, scales={"psi": 10.0}).send(vectors, {}, {}, context()).vectors
    assert [sent[name].item() for name in sent] == pytest.approx([0.6, 8.0], rel=1e-6)
    kept = Clip(norm=5.0, scales={"psi": 10.0}).send(vectors, {}, {}, context()).vectors
    assert all(torch.equal(kept[name], vector) for name, vector in vectors.items())
    moved = Clip(norm=5.0, quantile=0.5).send(vectors, {}, {"norm": torch.tensor(1.0)}, context())
    assert (moved.vectors["psi"].item(), moved.scalars) == (pytest.approx(40 / 1609**0.5, rel=1e-6), {"below": -0.5})


def test_centred_clipping_by_hand():
    part, shared = CentredClip(norm=1.0), {"delta": torch.tensor([10.0, 0.0])}
    assert part.send({"delta": torch.tensor([13.0, 4.0])}, {}, shared, context()).vectors["delta"].tolist() == (
        pytest.approx([10.6, 0.8], rel=1e-6)
    )
    assert part.share(shared, {"delta": torch.tensor([5.0, 5.0])})["delta"].tolist() == [5.0, 5.0]


def test_attackers_are_the_same_in_all_rounds():
    part, one = Attack(fraction=0.3), {"delta": torch.ones(1)}

    def attacks(round: int) -> list[int]:
        each = (part.send(one, {}, {}, context(round=round, client=k)).vectors["delta"].item() for k in range(500))
        return [client for client, sign in enumerate(each) if sign < 0]

    assert attacks(1) == attacks(9)
    assert 100 < len(attacks(1)) < 200


OFTEN = ("fedavg", "feddyn", "fedexp", "fednova", "fedsplit", "scaffold")
VARIANTS = [
    *(pytest.param(name, {}, True, marks=[] if name in OFTEN else [pytest.mark.soak]) for name in METHODS),
    ("scaffold", {}, False),
    ("fedsplit", {"variant": "act"}, False),
]


@pytest.mark.every(2)
@pytest.mark.thinned
@pytest.mark.parametrize(("name", "changes", "unequal"), VARIANTS)
def test_parts_that_change_nothing_leave_the_plain_run(name, changes, unequal, place):
    algorithm = {"name": name, **METHODS[name], **changes}
    about = {"algorithm": algorithm, "budget": {"low": 1, "high": 6} if unequal else None, "rounds": 2}
    plain_run = run(place, "plain", **about)
    found = run(place, "parts", **about, updates=list(IDENTITY))
    assert numbers(found) == numbers(plain_run)
    files = [(result.folder / "model.safetensors").read_bytes() for result in (found, plain_run)]
    assert files[0] == files[1]


def simulated(folder: Path, rounds: int, **changes: Any) -> tuple[Simulation, Any]:
    paths = {"data": str(folder / "small.h5"), "python_path": [str(Path(__file__).parent)]}
    recipe = resolve(load_recipe(small(folder / "run", dtype="float64", **{**paths, **changes})))
    parts, _ = assemble(recipe, World())
    simulation = Simulation(parts)
    for round in range(1, rounds + 1):
        simulation.round(round)
    return simulation, parts


CHAINS: Mapping[str, Mapping[str, Any]] = {
    "lossy": {"updates": list(LOSSY)},
    "signs": {"updates": ["sign"], "budget": {"low": 1, "high": 6}},
    "centred": {"updates": [{"clip": {"norm": 0.3}}, {"centred-clip": {"norm": 0.1}}]},
    "mean": {"updates": [{"randk": {"fraction": 0.3}}], "means": [{"clip": {"norm": 0.05}}]},
    "own": {"updates": [{"factory": "terngrad:Ternary"}]},
}


@pytest.mark.parametrize("case", CHAINS)
def test_states_of_clients_and_server_agree_behind_parts(case, place):
    """c = Σ q_i c_i of SCAFFOLD, where Ψ̄ follows from Δ̄ and where it is sent; FedDyn's h = Σ q_i h_i."""
    simulation, parts = simulated(
        place, 4, algorithm={"name": "scaffold"}, cohort={"size": 3}, **CHAINS[case], weights="uniform"
    )
    states = [parts.clients.get(client) or parts.method.local.begin(parts.initial_w) for client in range(5)]
    mean = sum(state["c"] for state in states) / 5
    c = simulation.shared["c"]
    assert float(c.abs().max()) > 0
    torch.testing.assert_close(c, mean, rtol=1e-9, atol=1e-12)
    if "means" not in CHAINS[case]:
        algorithm = {"name": "feddyn", "alpha": 0.05}
        simulation, parts = simulated(place, 4, algorithm=algorithm, cohort={"size": 3}, **CHAINS[case])
        states = [parts.clients.get(client) or parts.method.local.begin(parts.initial_w) for client in range(5)]
        torch.testing.assert_close(
            simulation.server["h"], sum(state["h"] for state in states) / 5, rtol=1e-9, atol=1e-12
        )


REMEMBERING: Mapping[str, Mapping[str, Any]] = {
    "scaffold": {"name": "scaffold"},
    "scaffold-samples": {"name": "scaffold", "c_scale": "samples"},
    "feddyn": {"name": "feddyn", "alpha": 5.0},
    "fedsplit": {"name": "fedsplit", "s": 0.5, "variant": "all"},
}


@pytest.mark.every(4)
@pytest.mark.parametrize("method", REMEMBERING)
def test_what_is_not_sent_comes_once_where_a_clients_state_carries_it_on(method, place):
    """A memory of the part's beside the state's would send it twice, and the model would leave the plain run's."""

    def last(*updates: Mapping[str, Any]) -> torch.Tensor:
        changes = {"algorithm": REMEMBERING[method], "cohort": {"size": 3}, "weights": "uniform"}
        return simulated(place, 60, updates=list(updates), **changes)[0].w

    plain_w = last()
    for feedback in (True, False):
        for part in ("topk", "randk"):
            w = last({part: {"fraction": 0.2, "feedback": feedback}})
            assert float((w - plain_w).norm()) < 0.8 * float(plain_w.norm()), (part, feedback)


def test_error_feedback_is_kept_for_what_no_state_carries(place):
    for method, kept in (({"name": "scaffold"}, {"updates.0.delta"}), ({"name": "feddyn", "alpha": 0.1}, set())):
        _, parts = simulated(place, 1, algorithm=method, updates=[TOP])
        assert {name for name in parts.clients.get(0) if name.startswith("updates.")} == kept


def test_an_own_part_that_does_not_say_what_it_loses_is_told(place):
    lists = {"updates": [{"factory": "terngrad:Ternary"}]}
    for algorithm, told in (("scaffold", True), ("fedavg", False)):
        _, parts = simulated(place, 1, algorithm=algorithm, **lists)
        recipe = resolve(load_recipe(small(place / "told", algorithm=algorithm, data=str(place / "small.h5"), **lists)))
        lines = list(updates.remarks(recipe, parts.chain, parts.method, 5, 5))
        assert [("say 'carried' in its keeps" in line) for line in lines] == [True] * told


def test_fedsplits_clients_keep_what_the_server_heard(place):
    """With all clients and no loss but that of the parts, w is the mean of their z_i."""
    algorithm = {"name": "fedsplit", "s": 0.7, "variant": "act"}
    simulation, parts = simulated(place, 3, algorithm=algorithm, updates=list(LOSSY))
    mean = sum(parts.clients.get(client)["z"] for client in range(5)) / 5
    torch.testing.assert_close(simulation.w, mean, rtol=1e-9, atol=1e-12)


def test_psi_is_sent_where_the_mean_is_not_what_clients_sent(place):
    """SCAFFOLD with equal steps sends Δ alone, twice as much behind a bound on Δ̄."""
    sent = [
        run(place, f"run-{number}", algorithm={"name": "scaffold"}, means=means).metrics[-1]["bytes_up"]
        for number, means in enumerate(([], [{"clip": {"norm": 0.01}}]))
    ]
    assert sent[1] == 2 * sent[0]


def test_the_server_sees_the_means_behind_its_list(place):
    """‖Δ̄‖² of the record, and the step, are those behind a bound; a part of the user's multiplies all vectors."""
    found = run(place, "clipped", means=[{"clip": {"norm": 0.01}}])
    assert [row["delta_sq"] for row in found.metrics] == pytest.approx([1e-4] * 3, rel=1e-6)
    halved = run(place, "halved", means=[{"factory": "terngrad:Damped", "args": {"gain": 0.5}}], rounds=1)
    step = run(place, "step", algorithm={"name": "fedavg", "server_lr": 0.5}, rounds=1)
    assert halved.metrics[0]["test_loss"] == step.metrics[0]["test_loss"]
    averages = [
        run(place, f"average-{number}", means=means, rounds=1, evaluate={"model": "client-average"})
        for number, means in enumerate(([], [{"factory": "terngrad:Damped", "args": {"gain": 0.5}}]))
    ]
    assert averages[0].metrics[0]["test_loss"] == averages[1].metrics[0]["test_loss"]


def test_a_run_that_sends_updates_as_they_are_has_no_index_of_its_parameters(place):
    """Twice the size of the model in float32."""
    recipe = resolve(load_recipe(run(place, "plain", rounds=1).folder / "recipe.yaml"))
    parts, _ = assemble(recipe, World())
    with parts.federation, parts.clients:
        simulation = Simulation(parts)
        simulation.round(1)
        assert len(parts.model.gaps) > 0
        assert "places" not in vars(simulation._layout)
        assert len(simulation._layout.closed(simulation.w)) == simulation._layout.size


def test_clients_start_from_the_model_that_they_unpack(place):
    """w¹ = w⁰ − mean (w̃⁰ − y_i), y_i trained from w̃⁰, which is the same for all; as many bits leave the plain run."""
    plainly, whole = run(place, "plain"), run(place, "whole", down=[{"cast": {"to": "float32"}}])
    assert numbers(plainly) == numbers(whole)
    found = run(place, "packed", down=[{"quantize": {"bits": 6}}], dtype="float64", rounds=1)
    asked = resolve(load_recipe(found.folder / "recipe.yaml"))
    moved = []
    for recipe in (asked, asked.model_copy(update={"down": []})):
        parts, _ = assemble(recipe, World())
        with parts.federation:
            simulation, layout = Simulation(parts), layout_of(parts.model)
            if not moved:
                w, received = simulation.w.clone(), simulation.plan(1).w
                context = PartContext(1, 0.1, parts.seed, 0, coding=plain(layout.sizes, 64), is_down=True)
                sent = Quantize(bits=6).send({"w": layout.closed(w)}, {}, {}, context)
                assert torch.equal(received, layout.opened(sent.vectors["w"], w))
                assert not torch.equal(received, w)
            else:
                simulation.w = received
            start = simulation.w.clone()
            simulation.round(1)
            moved.append(simulation.w - start)
    assert torch.allclose(*moved, rtol=0, atol=1e-14)
    assert found.metrics[0]["bytes_down"] == 5 * ((6 * layout.size + 2 * len(layout.sizes) * 64 + 7) // 8)
    assert found.metrics[0]["bytes_up"] == 5 * 8 * layout.size


def test_a_bounded_mean_holds_against_an_attacker(place):
    """One client of five sends a hundred times its update."""
    attack = {"attack": {"clients": [2], "factor": -100.0}}
    open_to_it = run(place, "open", updates=[attack])
    bounded = run(place, "bounded", updates=[attack, {"clip": {"norm": 0.3}}])
    centred = run(place, "centred", updates=[attack, {"centred-clip": {"norm": 0.3}}])
    assert open_to_it.metrics[-1]["test_loss"] > 3 * bounded.metrics[-1]["test_loss"]
    assert all(row["delta_sq"] <= 0.3**2 * (1 + 1e-6) for row in bounded.metrics)
    assert all(row["delta_sq"] <= (0.3 * t) ** 2 * (1 + 1e-6) for t, row in enumerate(centred.metrics, start=1))
    assert all(abs(row["mean_delta_sq"]) <= 0.3**2 * (1 + 1e-6) for row in bounded.metrics)


QUIET = """
from hpcfed.algorithms.fedavg import Plain, ServerStep
from hpcfed.types import Method, ServerUpdate


class Silent(ServerStep):
    def step(self, w, state, means, context):
        return ServerUpdate(w - means.mean_delta_sq * means.delta)


class Plainly(Silent):
    reads = frozenset()


class Sends:
    pass


def silent():
    return Method("silent", Plain(), Silent())


def plainly():
    return Method("plainly", Plain(), Plainly())
"""
QUANTIZE, TOP, BOUND = {"quantize": {"bits": 4}}, {"topk": {"fraction": 0.1}}, {"clip": {"norm": 1.0}}
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "fedexp": (
        {"algorithm": "fedexp", "updates": [QUANTIZE]},
        r"updates: quantize with fedexp has no meaning: its step",
    ),
    "scaffold-exp": ({"algorithm": "scaffold-exp", "updates": [TOP]}, "topk with scaffold-exp has no meaning"),
    "fedexp-m": (
        {"algorithm": "fedexp-m", "means": [BOUND]},
        "means: clip with fedexp-m has no meaning",
    ),
    "feddyn": (
        {"algorithm": {"name": "feddyn", "alpha": 0.1}, "means": [BOUND]},
        "means: clip with feddyn has no meaning: its state adds up what clients sent",
    ),
    "average": ({"evaluate": {"model": "cohort-average"}, "updates": [TOP]}, "cohort-average has no meaning"),
    "carried": (
        {"algorithm": "scaffold", "updates": [{"quantize": {"bits": 1}}]},
        "quantize with scaffold has no meaning: what is lost on the way comes again",
    ),
    "carried-twice": (
        {"algorithm": "fedsplit", "updates": [{"quantize": {"bits": 3}}]},
        "quantize with fedsplit has no meaning: .* twice as large",
    ),
    "silent": ({"algorithm": "quiet:silent", "updates": [TOP]}, "Silent does not say what it reads"),
    "unknown": ({"updates": [{"topq": {}}]}, "unknown part 'topq' in updates; did you mean 'topk'"),
    "elsewhere": ({"means": [TOP]}, "unknown part 'topk' in means; it is a part of 'updates'"),
    "parameter": ({"updates": [{"topk": {"share": 0.1}}]}, r"unknown key 'updates\.0\.topk\.share'"),
    "missing": ({"updates": [{"topk": {}}]}, r"key 'updates\.0\.topk\.fraction' is missing"),
    "value": ({"updates": [{"quantize": {"bits": 9}}]}, r"updates\.0\.quantize\.bits"),
    "twice": ({"updates": [QUANTIZE, "sign"]}, "numbers are coded twice"),
    "order": ({"updates": [QUANTIZE, TOP]}, "topk and randk behind a part that chooses or codes entries"),
    "no-part": ({"updates": [{"factory": "quiet:Sends"}]}, r"expected a hpcfed\.UpdatePart, got Sends"),
    "no-delta": (
        {"algorithm": {"name": "fedsplit", "variant": "act"}, "means": [BOUND]},
        "this method's clients report no Δ_i",
    ),
    "client": ({"updates": [{"attack": {"clients": [5]}}]}, "expected clients from 0 to 4, got 5"),
    "scales": ({"updates": [{"clip": {"norm": 1.0, "scales": {"psi": 2.0}}}]}, "fedavg reports no 'psi'"),
    "weight": ({"updates": [{"weight": {"cap": 40}}]}, "weight with weights: samples: they would count twice"),
    "down": ({"down": [TOP]}, "unknown part 'topk' in down; it is a part of 'updates'"),
    "down, average": ({"evaluate": {"model": "cohort-average"}, "down": [QUANTIZE]}, "down: quantize with .*-average"),
    "form": ({"updates": [{"topk": {"fraction": 0.1}, "sign": {}}]}, r"updates\.0"),
}


@pytest.mark.alike
@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused_in_one_line(case, place):
    changes, words = REFUSED[case]
    (place / "quiet.py").write_text(QUIET)
    with pytest.raises(hpcfed.InputError, match=words) as refused:
        run(place, "run", python_path=[str(place)], **changes)
    assert "\n" not in str(refused.value)


def test_a_rule_that_says_what_it_reads_is_taken(place):
    (place / "quiet.py").write_text(QUIET)
    assert len(run(place, "run", python_path=[str(place)], algorithm="quiet:plainly", updates=[TOP]).metrics) == 3


SENDS = "return Sent(vectors)\n\n    "
WRONG: Mapping[str, tuple[str, str]] = {
    "shape": ("return Sent({name: v[1:] for name, v in vectors.items()})", "its 'delta'"),
    "names": ("return Sent({})", "the names of its vectors"),
    "kind": ("return vectors", "its answer"),
    "memory": ("CALLS.append(1); return Sent({n: v * len(CALLS) for n, v in vectors.items()})", "a different"),
    "writes": ("[v.mul_(2) for v in vectors.values()]; return Sent(vectors)", "written to in place"),
    "state": ("return Sent(vectors, {'e': vectors['delta']})", "a name of its answer|its state 'e'"),
    "places": (
        "return Sent(vectors, places={n: v[:3].long() for n, v in vectors.items()})",
        "places, the numbers that",
    ),
    "coding": (f"{SENDS}def coded(self, coding):\n        return None", "coded: its answer: expected a coding"),
    "no coding": (f"{SENDS}def coded(self, coding):\n        return coding.chosen(-3, 0)", "coded: its answer"),
    "arguments": (
        f"{SENDS}def share(self, shared):\n        return shared",
        "the arguments shared, means, got",
    ),
    "misspelt": (f"{SENDS}def shares(self, shared, means):\n        return shared", "did you mean 'share'?"),
}


@pytest.mark.thinned
@pytest.mark.parametrize("case", WRONG)
def test_a_part_of_the_users_is_checked(case, place):
    body, words = WRONG[case]
    program = "from hpcfed import UpdatePart\nfrom hpcfed.updates import Sent\nCALLS = []\n\n\nclass Own(UpdatePart):\n"
    program += f"    def send(self, vectors, state, shared, context):\n        {body}\n"
    name = f"own_{case.replace(' ', '_')}"
    (place / f"{name}.py").write_text(program)
    with pytest.raises(hpcfed.InputError, match=words) as refused:
        run(place, "run", python_path=[str(place)], updates=[{"factory": f"{name}:Own"}])
    assert re.search(rf"\b{name}\.py, line \d", str(refused.value))


class Doubled(UpdatePart):
    """Every other vector of a client is sent twice as large: it says that it has a state as client rules say it."""

    stateful = True

    def begin(self, vectors):
        return {"times": torch.zeros(())}

    def send(self, vectors, state, shared, context):
        scale = 1 + float(state["times"]) % 2
        return Sent({name: scale * v for name, v in vectors.items()}, {"times": state["times"] + 1})


def test_a_part_says_that_it_has_a_state_as_a_rule_does(place):
    local = {"steps": 1, "batch_size": "full", "lr": 1e-6}
    found = run(place, "run", updates=[Doubled()], cohort={"schedule": [[0]]}, rounds=2, local=local)
    plain, doubled = (row["delta_sq"] for row in found.metrics)
    assert doubled == pytest.approx(4 * plain, rel=1e-3)


def test_a_part_of_the_users_in_one_file(place):
    """`terngrad.py` is unbiased, sends two bits a parameter, and has at most 80 lines."""
    assert len((Path(__file__).parent / "terngrad.py").read_text().splitlines()) <= 80
    found = run(place, "run", updates=[{"factory": "terngrad:Ternary"}], rounds=2)
    parameters = sum(parameter.numel() for parameter in found.module.parameters())
    assert found.metrics[-1]["bytes_up"] == 2 * 5 * ((2 * parameters + 32 + 7) // 8)
    recorded = load_recipe(found.folder / "recipe.yaml")
    assert recorded.updates[0].factory == "terngrad:Ternary"


def test_parts_are_given_from_python_as_objects_and_as_classes(place):
    named = run(
        place, "named", updates=["terngrad:Ternary"], means=[{"factory": "terngrad:Damped", "args": {"gain": 0.5}}]
    )
    objects = run(place, "objects", updates=Ternary(), means=[Damped(gain=0.5)])
    classes = run(place, "classes", updates=[Ternary], means=({"factory": Damped, "args": {"gain": 0.5}},))
    assert numbers(objects) == numbers(classes) == numbers(named)
    assert verify(Verification(objects.folder, None, 0), World(), [].append) == 0


def test_the_page_has_every_part_with_its_keys_and_the_file():
    page = (ROOT / "docs" / "updates.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if line.startswith("| `")}
    assert {*rows} == {name for _, name in ALL}
    for key, name in ALL:
        assert [field for field in updates.named(key)[name].model_fields if f"`{field}" not in rows[name]] == []
    assert (ROOT / "tests" / "contract" / "terngrad.py").read_text(encoding="utf-8") in page


def test_the_recorded_recipe_has_all_parameters_and_goes_on(place):
    found = run(place, "run", updates=[TOP, "sign"], rounds=2)
    recorded = load_recipe(found.folder / "recipe.yaml")
    assert [part.args for part in recorded.updates] == [{"fraction": 0.1, "feedback": True}, {"feedback": True}]
    assert len(run(place, "run", updates=[TOP, {"sign": None}], rounds=3).metrics) == 3
