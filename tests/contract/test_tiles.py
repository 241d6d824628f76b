"""A client's update and loss have the same bits whoever it is trained with: drawn clients, models, losses and tilts.

Each drawn case is trained in several arrangements: alone in a new engine; with other clients, in other orders and
tiles, in an engine whose memory holds what earlier tiles left there; beside clients whose samples are huge or NaN.

    HPCFED_EXAMPLES=5000 python -m pytest tests/contract/test_tiles.py      # so many cases of each kind
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hpcfed.arithmetic.operations import LIBRARIES, PORTABLE
from hpcfed.client.batched import matmul, solver, steps
from hpcfed.client.engine import ClientWork, trained_by
from hpcfed.client.solver import Engine, Task
from hpcfed.config.recipe import Local, LossSection, Model
from hpcfed.errors import InputError
from hpcfed.models import spec
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import LOSSES, Loss, loss_for
from hpcfed.models.portable import portable_loss
from hpcfed.types import Tilt
from tests.devices import DEVICE, prepare

EXAMPLES = int(os.environ.get("HPCFED_EXAMPLES", "0"))
"""Cases of each kind; 0 for those of the suite, `USUAL`, and of the soak, `MANY`."""
USUAL: Mapping[str, int] = {
    "perceptron": 14,
    "linear": 8,
    "portable": 8,
    "tanh": 8,
    "convolution": 8,
    "network": 10,
    "alone": 8,
}
MANY: Mapping[str, int] = {kind: 240 * count for kind, count in USUAL.items()}
"""By the kind of model; ``network`` has norms, dropout, sums and attention, ``alone`` is the sequential engine."""
TILTED = "shift", "anchor", "from_anchor", "offset", "radius"
HUGE = {torch.float32: 1e18, torch.float64: 1e150}
"""Factor of samples whose squares still have a finite sum, or not."""


@dataclass(frozen=True)
class Member:
    """A client of a case.

    Attributes:
        size, steps, guessed: samples, steps, guessed steps.
        tilt: which parts of a tilt it has, of `TILTED`.
        mu: of the tilt.
    """

    size: int
    steps: int
    guessed: float = 0.0
    tilt: frozenset[str] = frozenset()
    mu: float = 0.0


@dataclass(frozen=True)
class Case:
    """What is trained, and in which arrangements.

    Attributes:
        kind: of `USUAL`.
        widths: inputs, hidden units, outputs; of the convolution channels, hidden channels and outputs.
        local: the recipe's ``local``.
        arrangements: of clients, by their places, each with what is done to its samples: "", "huge" or "nan".
        small_memory: whether minibatches are gathered, and parameters stepped, in small pieces.
        may_draw: whether the module counts as one that draws random numbers, and so is trained in tiles of one.
    """

    kind: str
    widths: tuple[int, ...]
    bias: bool
    loss: str
    reduction: str
    dtype: torch.dtype
    local: Mapping[str, Any]
    members: tuple[Member, ...]
    arrangements: tuple[tuple[tuple[int, str], ...], ...]
    seed: int = 0
    small_memory: bool = False
    may_draw: bool = False

    @property
    def elsewhere(self) -> bool:
        return any({"offset", "radius"} & member.tilt for member in self.members)


def sizes_of(batch: int) -> st.SearchStrategy[int]:
    """Samples of a client, by their remainder: none, one, fewer than a minibatch, whole minibatches and a few more."""
    return st.one_of(
        st.sampled_from([0, 1]),
        st.integers(1, batch),
        st.builds(lambda whole, rest: whole * batch + rest, st.integers(1, 3), st.sampled_from([0, 1, 2, 3])),
        st.integers(1, 3 * batch),
    )


@st.composite
def members_of(draw: st.DrawFn, batch: int, guesses: bool, tilts: Sequence[str], sizes: st.SearchStrategy) -> Member:
    size = draw(sizes)
    passes = -(-size // batch)
    count = draw(st.one_of(st.sampled_from([passes, 2 * passes]), st.integers(0, 7))) if size else 0
    guessed = draw(st.sampled_from([0.0, 0.0, 1.0, 3.0, math.inf])) if guesses and count else 0.0
    tilt = draw(st.frozensets(st.sampled_from(tilts))) if tilts else frozenset()
    return Member(size, count, guessed, tilt, draw(st.sampled_from([0.0, 0.3])) if tilts else 0.0)


@st.composite
def locals_of(draw: st.DrawFn, kind: str, batch: int, full: bool) -> dict[str, Any]:
    optimizer = draw(st.sampled_from(["sgd", "sgd", "sgd"] + ([] if kind == "portable" else ["adam", "yogi"])))
    section: dict[str, Any] = {"optimizer": optimizer, "batch_size": "full" if full else batch, "steps": 1, "lr": 0.05}
    if draw(st.booleans()):
        section |= {"weight_decay": draw(st.sampled_from([1e-3, 0.5]))}
    if optimizer == "sgd" and draw(st.booleans()):
        section["momentum"] = draw(st.sampled_from([0.5, 0.9]))
    if draw(st.integers(0, 2)) == 0:
        section |= {"clip_norm": draw(st.sampled_from([0.1, 2.0])), "clip": draw(st.sampled_from(["all", "linear"]))}
    if kind == "alone":
        return section | {"engine": "sequential"}
    if DEVICE.type == "cpu" and kind in ("linear", "perceptron") and draw(st.integers(0, 3)) == 0:
        section["matmul"] = "onednn"
    tile = draw(st.one_of(st.just("auto"), st.integers(1, 6)))
    return section | {"engine": "batched", "tile": "auto" if full else tile}


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    width = st.one_of(st.integers(1, 70), st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64]))
    hidden = {"perceptron": (1, 3), "tanh": (1, 2), "network": (1, 1), "alone": (0, 2)}.get(kind, (0, 0))
    most = 12 if kind == "convolution" else 70
    widths = [min(most, width) for width in draw(st.lists(width, min_size=2 + hidden[0], max_size=2 + hidden[1]))]
    if kind == "convolution":
        widths = [draw(st.integers(1, 4)), draw(st.integers(1, 6)), widths[-1]]
    loss = draw(st.sampled_from(["cross-entropy", "cross-entropy", "squared", "binary-cross-entropy"]))
    if loss == "cross-entropy":
        widths[-1] = max(2, widths[-1])
    elif draw(st.booleans()):
        widths[-1] = 1
    batch = draw(st.one_of(st.sampled_from([1, 2, 5, 7, 8, 10, 16, 20, 50]), st.integers(1, 33)))
    batch = min(batch, 8) if kind == "convolution" else batch
    full = draw(st.integers(0, 9)) == 0
    section = draw(locals_of(kind, batch, full))
    one_type = section.get("matmul") == "onednn"
    dtype = torch.float32 if one_type else draw(st.sampled_from([torch.float32, torch.float64]))
    tilts = draw(st.sampled_from([(), ("shift",), TILTED[:3], TILTED]))
    if kind == "portable":
        tilts = tilts[:3]
    guesses = bool(section.get("momentum") or section["optimizer"] != "sgd")
    number = draw(st.integers(1, 7))
    sizes = st.just(draw(st.integers(1, 3 * batch))) if full and draw(st.booleans()) else sizes_of(batch)
    one_mu = draw(st.booleans())
    members = [draw(members_of(batch, guesses, tilts, sizes)) for _ in range(number)]
    if one_mu:
        members = [replace(member, mu=members[0].mu) for member in members]
    arrangement = st.lists(
        st.tuples(st.integers(0, number - 1), st.sampled_from(["", "", "", "huge", "nan"])),
        min_size=1,
        max_size=number,
        unique_by=lambda one: one[0],
    ).map(tuple)
    whole = tuple((place, "") for place in range(number))
    arrangements = whole, *draw(st.lists(arrangement, min_size=2, max_size=4))
    may_draw = kind == "tanh" and section.get("tile") == "auto" and draw(st.booleans())
    return Case(
        kind=kind,
        widths=tuple(widths),
        bias=draw(st.booleans()),
        loss=loss,
        reduction=draw(st.sampled_from(["mean", "mean", "sum"])),
        dtype=dtype,
        local=section,
        members=tuple(members),
        arrangements=arrangements,
        seed=draw(st.integers(0, 99)),
        small_memory=draw(st.booleans()),
        may_draw=may_draw,
    )


class Network(nn.Module):
    """A residual network with a norm, dropout, or attention over features, as people write them."""

    def __init__(self, inputs: int, hidden: int, outputs: int, *, bias: bool, kind: int):
        super().__init__()
        self.kind, self.first, self.inner = kind, nn.Linear(inputs, hidden, bias=bias), nn.Linear(hidden, hidden)
        self.norm = nn.GroupNorm(1, hidden) if kind == 1 else nn.LayerNorm(hidden)
        self.scale, self.last = nn.Parameter(torch.ones(hidden)), nn.Linear(hidden, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.first(x))
        y = self.norm(x)
        if self.kind in (2, 3):
            y = nn.functional.dropout(y, 0.25 * self.kind, self.training)
        if self.kind == 4:
            y = (y.unsqueeze(2) @ torch.softmax(x, -1).unsqueeze(1)).mean(2)
        x = x + self.scale * nn.functional.gelu(self.inner(y))
        return self.last(x.tanh())


def module_of(case: Case) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the case's module and the shape of a sample."""
    inputs, *hidden, outputs = case.widths
    if case.kind == "convolution":
        layers = [nn.Conv2d(inputs, hidden[0], 3, padding=1, bias=case.bias), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(hidden[0] * 9, outputs)), (inputs, 6, 6)
    if case.kind == "network":
        return Network(inputs, hidden[0], outputs, bias=case.bias, kind=case.seed % 5), (inputs,)
    if case.kind in ("linear", "portable"):
        found = spec(Model(name="linear", bias=case.bias))
        assert found is not None
        return found.build((inputs,), outputs), (inputs,)
    between = nn.Tanh if case.kind == "tanh" or (case.kind == "alone" and case.seed % 2) else nn.ReLU
    layers = [nn.Linear(*pair, bias=case.bias) for pair in zip(case.widths, case.widths[1:], strict=False)]
    return nn.Sequential(*[part for layer in layers for part in (layer, between())][:-1]), (inputs,)


def engine_of(case: Case) -> tuple[Engine, FlatModel, tuple[int, ...]]:
    torch.manual_seed(case.seed)
    module, shape = module_of(case)
    model = FlatModel(module, case.dtype, DEVICE)
    loss: Loss = LOSSES[case.loss](case.reduction)
    if case.kind == "portable":
        loss = portable_loss(case.loss, loss)
    elif case.loss == "cross-entropy" and case.seed % 3 == 0:
        weights = (0.5 + torch.rand(case.widths[-1], dtype=case.dtype)).to(DEVICE)
        loss = loss_for(LossSection(reduction=case.reduction), "classification", [], weights)
    x, y = samples_of(case, 1, shape, torch.Generator())
    columns = [np.array([getattr(member, name) for member in case.members]) for name in ("size", "steps")]
    arithmetic = PORTABLE if case.kind == "portable" else LIBRARIES
    about = {"draws": case.may_draw, "elsewhere": case.elsewhere, "arithmetic": arithmetic}
    work = ClientWork(len(case.members), *columns)
    crops = case.kind == "convolution" and case.seed % 2 and DEVICE.type == "cpu"
    augment = {"augment": {"crop": 1, "flip": 0.5, "per": "sample" if case.bias else "batch"}} if crops else {}
    engine, _ = trained_by(Local(**case.local, **augment), model, loss, case.seed, (x, y), work, **about)
    return engine, model, shape


def samples_of(case: Case, count: int, shape: tuple[int, ...], draws: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = _drawn_samples(case, count, shape, draws)
    return x.to(DEVICE), y.to(DEVICE)


def _drawn_samples(case: Case, count: int, shape: tuple[int, ...], draws: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, *shape, generator=draws, dtype=case.dtype)
    outputs = case.widths[-1]
    if case.loss == "cross-entropy":
        return x, torch.randint(outputs, (count,), generator=draws)
    y = torch.randn(count, *([outputs] if outputs > 1 or case.seed % 2 else []), generator=draws, dtype=case.dtype)
    return x, y if case.loss == "squared" else (y > 0).to(case.dtype).reshape(count, outputs)


def tasks_of(case: Case, model: FlatModel, shape: tuple[int, ...]) -> list[Task]:
    found, draws = [], torch.Generator().manual_seed(case.seed)
    for place, member in enumerate(case.members):
        samples = samples_of(case, member.size, shape, draws)
        vectors = {}
        for name in ("shift", "anchor", "offset"):
            vector = torch.zeros_like(model.vector)
            for view in model.views(vector).values():
                view.copy_(0.02 * torch.randn(view.shape, generator=draws, dtype=case.dtype))
            vectors[name] = (model.vector + vector if name == "anchor" else vector) if name in member.tilt else None
        radius = 0.3 if "radius" in member.tilt else 0.0
        tilt = Tilt(mu=member.mu, from_anchor="from_anchor" in member.tilt, radius=radius, **vectors)
        found.append(Task(7 + 3 * place, samples, tilt, member.steps, member.guessed, place=place))
    return found


def damaged(task: Task, what: str, dtype: torch.dtype) -> Task:
    """Return a client with the same number of samples, whose values are huge or NaN."""
    x, y = task.samples
    factor = HUGE[dtype] if what == "huge" else math.nan
    return replace(task, samples=(x * factor, y * factor if y.is_floating_point() else y))


def hashes(engine: Engine, w: Tensor, tasks: Sequence[Task]) -> list[str]:
    """Return a hash of each client's Δ and loss; NaN is NaN, whatever its sign."""
    found = []
    for local in engine.solve(w, tasks, 3):
        delta = torch.where(local.delta.isnan(), math.nan, local.delta).cpu().numpy().tobytes()
        loss = np.float64(float(local.loss_sum))
        found.append(xxhash.xxh3_64(delta + (b"nan" if np.isnan(loss) else loss.tobytes())).hexdigest())
    return found


def check(case: Case) -> None:
    """Train a case in all of its arrangements; a norm over one feature may leave rounding alone, and no tile."""
    try:
        engine, model, shape = engine_of(case)
    except InputError as error:
        if case.kind == "network" and "not computed each by itself" in str(error):
            return
        raise
    w, tasks = model.vector.clone(), tasks_of(case, model, shape)
    alone = [hashes(engine_of(case)[0], w, [task])[0] for task in tasks]
    for arrangement in case.arrangements:
        arranged = [damaged(tasks[place], what, case.dtype) if what else tasks[place] for place, what in arrangement]
        for (place, what), found in zip(arrangement, hashes(engine, w, arranged), strict=True):
            if not what:
                assert found == alone[place], f"client {place} in {arrangement}"


@pytest.fixture(autouse=True, scope="module")
def _as_in_a_run() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    prepare(DEVICE)
    yield
    torch.set_num_threads(before)


def check_many(kind: str, count: int) -> None:
    if kind == "portable" and DEVICE.type != "cpu":
        pytest.skip("bits: portable is of processors")
    usual = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=count, derandomize=not EXAMPLES, **usual)
    @given(cases(kind))
    def holds(case: Case) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if case.small_memory:
                patch.setattr(solver, "GATHERED_BYTES", 4096)
                patch.setattr(steps, "CACHED_BYTES", 1024)
            if case.local.get("matmul") == "onednn":
                patch.setattr(matmul, "LARGE", 64)
            check(case)

    holds()


@pytest.mark.serial
@pytest.mark.deadline(7200 if EXAMPLES else 120)
@pytest.mark.parametrize("kind", USUAL)
def test_a_client_does_not_depend_on_its_neighbours(kind):
    check_many(kind, EXAMPLES or USUAL[kind])


@pytest.mark.serial
@pytest.mark.soak
@pytest.mark.deadline(7200)
@pytest.mark.parametrize("kind", USUAL)
def test_no_client_of_thousands_depends_on_its_neighbours(kind):
    check_many(kind, EXAMPLES or MANY[kind])
