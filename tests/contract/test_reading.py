"""Modules as people write them are read, and then train as their own sequential engine does; or refused, with why."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcfed.client.batched.draws import Draws
from hpcfed.client.batched.matmul import Blas
from hpcfed.client.batched.networks import network_of
from hpcfed.client.batched.operators import check
from hpcfed.client.batched.operators.build import Mask
from hpcfed.client.batched.operators.check import _Compared
from hpcfed.client.batched.operators.dropping import Dropping, drawn_keys
from hpcfed.client.batched.operators.layers import GroupNorm
from hpcfed.client.engine import ClientWork, trained_by
from hpcfed.client.engine_choice import EngineChoice
from hpcfed.client.solver import Engine, Task
from hpcfed.config.recipe import Local, LossSection
from hpcfed.lab.bench.people import Transformer
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import Loss, loss_for
from hpcfed.models.reading.program import Unreadable
from hpcfed.rng import Purpose, stream
from hpcfed.types import Tilt
from tests.contract.public_modules import MODULES, TOKENS, Public, Writes, doubled

CPU = torch.device("cpu")
LOCALS: list[dict[str, Any]] = [{"weight_decay": 1e-2}, {"momentum": 0.9, "clip_norm": 0.5}]
SIZES, STEPS = (9, 5, 10), (4, 3, 2)


def built(
    public: Public, engine: str, loss: Loss | None = None, **local: Any
) -> tuple[Engine, EngineChoice, FlatModel]:
    torch.manual_seed(3)
    module = public.build()
    model = FlatModel(module, torch.float64, CPU)
    model.watch()
    like = torch.zeros(1, *public.shape, dtype=torch.int64 if public.tokens else torch.float64)
    section = Local(steps=1, batch_size=5, lr=0.05, engine=engine, **local)
    work = ClientWork(3, np.array(SIZES), np.array(STEPS))
    loss = loss or loss_for(LossSection(), "classification", [])
    y = torch.zeros(1, dtype=torch.int64)
    engine_, training = trained_by(section, model, loss, 0, (like, y), work, draws=True)
    return engine_, training, model


def tasks(public: Public, columns: int = 0) -> list[Task]:
    draws = torch.Generator().manual_seed(1)
    found = []
    for client, (size, steps) in enumerate(zip(SIZES, STEPS, strict=True)):
        if public.tokens:
            x = torch.randint(TOKENS, (size, *public.shape), generator=draws)
        else:
            x = torch.randn(size, *public.shape, generator=draws, dtype=torch.float64)
        y = torch.randint(4, (size,), generator=draws)
        if columns:
            y = torch.randint(2, (size, columns), generator=draws).double()
        found.append(Task(client, (x, y), Tilt(mu=0.1), steps, 0.0, place=client))
    return found


def solved(engine: Engine, model: FlatModel, public: Public, columns: int = 0) -> list[tuple[torch.Tensor, float]]:
    found = engine.solve(model.vector.clone(), tasks(public, columns), 2)
    return [(one.delta.clone(), float(one.loss_sum)) for one in found]


def assert_alike(found: list[tuple[torch.Tensor, float]], reference: list[tuple[torch.Tensor, float]]) -> None:
    for (delta, loss), (own, own_loss) in zip(found, reference, strict=True):
        torch.testing.assert_close(delta, own, rtol=1e-8, atol=1e-10 * float(own.abs().max()))
        assert loss == pytest.approx(own_loss, rel=1e-9)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [name for name, public in MODULES.items() if public.refused is None])
def test_what_is_read_trains_as_one_client_after_another(name):
    public = MODULES[name]
    for local in LOCALS:
        engine, training, model = built(public, "auto", **local)
        if training.why.startswith("too many"):  # a gain only where asked for
            engine, training, model = built(public, "batched", **local)
        assert training.read.startswith("read as"), training.account
        initial, found = model.vector.clone(), solved(engine, model, public)
        if any(isinstance(part, nn.Dropout) for part in model.module.modules()):
            continue  # whose masks are others
        reference, _, other = built(public, "sequential", **local)
        assert torch.equal(initial, other.vector)
        assert_alike(found, solved(reference, other, public))


@pytest.mark.parametrize("name", [name for name, public in MODULES.items() if public.refused is not None])
def test_what_is_not_read_says_why(name):
    public = MODULES[name]
    engine, training, _ = built(public, "auto")
    assert training.engine == "sequential"
    assert engine.tile == 1
    assert re.search(str(public.refused), training.why), training.why


def test_a_module_in_the_dtype_that_it_names():
    torch.manual_seed(3)
    module = nn.Sequential(Writes(doubled, fc=nn.Linear(12, 4)))
    like = torch.zeros(1, 12), torch.zeros(1, dtype=torch.int64)
    loss, work = loss_for(LossSection(), "classification", []), ClientWork(3, np.array(SIZES), np.array(STEPS))
    model = FlatModel(module, torch.float32, CPU)
    assert trained_by(Local(steps=1), model, loss, 0, like, work, draws=True)[1].engine == "batched"


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tokens_that_are_numbers_are_drawn_as_tokens(kind):
    """All samples of a federation of classes are numbers; a module makes tokens of them."""
    torch.manual_seed(3)
    module = Writes(lambda s, x: s.fc(s.embed(x.long()).flatten(1)), embed=kind(TOKENS, 2), fc=nn.LazyLinear(4))
    module(torch.zeros(2, 6))
    model, loss = FlatModel(module, torch.float32, CPU), loss_for(LossSection(), "classification", [])
    network = network_of(model, loss, torch.zeros(1, 6), 10, Blas())
    x = torch.randint(TOKENS, (5, 6)).float()
    found = network.outputs([view.unsqueeze(0) for view in model.views(model.vector).values()], x.unsqueeze(0))[1]
    torch.testing.assert_close(found, module(x).detach())


CALLED: list[int] = []


def noted(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    CALLED.append(len(x))
    return self.fc(x)


def test_what_a_forward_pass_does_besides_happens_while_it_is_read_and_no_more():
    public = Public(lambda: Writes(noted, fc=nn.Linear(12, 4)), (12,))
    for engine, more in (("batched", 0), ("sequential", sum(STEPS))):
        CALLED.clear()
        solver, _, model = built(public, engine)
        before = len(CALLED)
        solved(solver, model, public)
        assert len(CALLED) == before + more


def test_a_transformer_alone_is_trained_by_its_own_kernels():
    model, x = FlatModel(Transformer(), torch.float32, CPU), torch.zeros(1, 80, dtype=torch.int64)
    loss, work = loss_for(LossSection(), "next-token", []), ClientWork(4, np.full(20, 50), np.full(20, 5))
    training = trained_by(Local(steps=1), model, loss, 0, (x, x[:, 0]), work, draws=False)[1]
    assert training.account == "one after another: too many of its operations are called as the module calls them"


def test_masks_are_dropouts():
    dropping = Dropping([Mask((40,), 0.25), Mask((3, 5), 0.5)])
    keys = torch.from_numpy(drawn_keys(dropping.keys, 400, stream(0, Purpose.DROPOUT, 1, 2)))
    for mask, p in zip(dropping.masks(keys, 50, torch.float64), (0.25, 0.5), strict=True):
        kept = (mask > 0).double().view(400, -1)
        assert set(mask.unique().tolist()) == {0.0, 1 / (1 - p)}
        assert abs(float(kept.mean()) - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
        apart = kept - kept.mean()
        for near in (apart[:, 1:] * apart[:, :-1], apart[1:] * apart[:-1]):
            assert abs(float(near.mean())) < 5 * p * (1 - p) / near.numel() ** 0.5


def test_keys_of_masks_have_a_stream_of_each_round_and_client():
    """Not that of the minibatches, by which a mask would follow from the order of the samples."""
    draws = Draws(Local(steps=3), 7, tile=2, width=5, num_keys=4)
    for address in ((1, 2), (2, 2), (1, 3)):
        assert np.array_equal(draws.keys(*address, 3), drawn_keys(4, 3, stream(7, Purpose.DROPOUT, *address)))


def test_a_mask_depends_neither_on_slot_nor_on_the_minibatch():
    dropping = Dropping([Mask((7,), 0.4)])
    keys = torch.from_numpy(drawn_keys(dropping.keys, 3, stream(0, Purpose.DROPOUT, 1, 2)))
    (many,) = dropping.masks(keys, 5, torch.float32)
    (alone,) = dropping.masks(keys[1:2], 2, torch.float32)
    assert torch.equal(many.view(3, 5, 7)[1, :2], alone.view(2, 7))


class Pooled(nn.Module):
    """Convolutions of much work before an average over the image, which takes images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 128, 3, 2)
        self.third, self.norm, self.head = nn.Conv2d(128, 512, 3, 2), nn.GroupNorm(4, 128), nn.Linear(512, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.second(self.first(x).relu_()))
        return self.head(self.third(x).relu().mean((2, 3)))


class Wide(Pooled):
    """Is another one for smaller images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if x.shape[-1] > 32 else 3.0)


@pytest.mark.parametrize("kind", [Pooled, Wide])
def test_a_large_module_is_read_by_smaller_images_or_whole(kind):
    torch.manual_seed(3)
    model = FlatModel(kind(), torch.float32, CPU)
    model.watch()
    loss = loss_for(LossSection(), "classification", [])
    before = model.vector.clone()
    network = network_of(model, loss, torch.zeros(1, 3, 64, 64), 10, Blas())
    assert torch.equal(model.vector, before)
    x = torch.randn(2, 3, 64, 64)
    found = network.outputs([view.unsqueeze(0) for view in model.views(model.vector).values()], x.unsqueeze(0))[1]
    torch.testing.assert_close(found, model.module(x).detach(), rtol=1e-4, atol=1e-4)


def test_a_wrong_operator_is_seen_in_smaller_images(monkeypatch):
    monkeypatch.setattr(GroupNorm, "eps", property(lambda self: 1e-3, lambda self, value: None), raising=False)
    model = FlatModel(Pooled(), torch.float32, CPU)
    with pytest.raises(Unreadable, match="outputs would differ"):
        network_of(model, loss_for(LossSection(), "classification", []), torch.zeros(1, 3, 64, 64), 10, Blas())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("place", [0, -1])
def test_one_wrong_number_of_a_gradient_is_seen_in_any_layout(memory_format, place, monkeypatch):
    added = _Compared.add

    def add(self: _Compared, parameter: int, gradient: torch.Tensor) -> None:
        if gradient.shape == (1, 120, 80, 3, 3):  # more than one piece
            gradient = gradient[0].clone(memory_format=memory_format).unsqueeze(0)
            gradient[0, place, place, place, place] += 1e-6
        added(self, parameter, gradient)

    module = nn.Sequential(nn.Conv2d(3, 80, 3), nn.ReLU(), nn.Conv2d(80, 120, 3), nn.Flatten(), nn.Linear(480, 4))
    model, loss = FlatModel(module, torch.float32, CPU), loss_for(LossSection(), "classification", [])
    network_of(model, loss, torch.zeros(1, 3, 6, 6), 10, Blas())
    monkeypatch.setattr(_Compared, "add", add)
    with pytest.raises(Unreadable, match=r"gradient of 2\.weight would differ"):
        network_of(model, loss, torch.zeros(1, 3, 6, 6), 10, Blas())
    assert not model.trained_grad.any()


@pytest.mark.parametrize("row", [0, 36])
def test_the_gradient_of_a_large_weight_is_compared_in_blocks_of_rows(row, monkeypatch):
    """It takes as much memory as the weight: in float64, beside the module's own, twice a model more than a round."""
    sizes, product, compared = list[int](), _Compared.product, check._compare

    def compare(what: str, expected: torch.Tensor, found: torch.Tensor, scale: float) -> None:
        if what == "gradient of 0.weight":
            sizes.append(found.numel())
        compared(what, expected, found, scale)

    def scaled(self: _Compared, weight: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        outgoing = outgoing.clone()
        if outgoing.shape[2] == 37:
            outgoing[..., row] *= 1 + 1e-6
        product(self, weight, outgoing, incoming)

    monkeypatch.setattr(check, "BLOCK", 100)
    monkeypatch.setattr(check, "_compare", compare)
    model = FlatModel(nn.Sequential(nn.Linear(30, 37), nn.Linear(37, 2)), torch.float32, CPU)
    loss = loss_for(LossSection(), "classification", [])
    network_of(model, loss, torch.zeros(1, 30), 10, Blas())
    assert max(sizes) == 90
    monkeypatch.setattr(_Compared, "product", scaled)
    with pytest.raises(Unreadable, match=r"gradient of 0\.weight would differ"):
        network_of(model, loss, torch.zeros(1, 30), 10, Blas())


def own_loss(function: nn.Module, reduction: str) -> Loss:
    """The same loss as a function that nothing is known of."""

    def each(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = function(output, target.view_as(output) if target.is_floating_point() else target)
        return found.reshape(len(output), -1).mean(1) if function.mean else found.reshape(len(output), -1).sum(1)

    return Loss(each, reduction)


LOSSES_OF_TORCH = [
    ("classification", "CrossEntropyLoss", nn.CrossEntropyLoss, 0),
    ("regression", "MSELoss", nn.MSELoss, 4),
    ("multi-label", "BCEWithLogitsLoss", nn.BCEWithLogitsLoss, 4),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("task", "name", "kind", "columns"), LOSSES_OF_TORCH)
@pytest.mark.parametrize("module", ["sequential", "residual, shared, in place", "in a hurry"])
def test_a_loss_of_torch_by_factory_has_its_slope_by_hand(module, task, name, kind, columns, reduction):
    section = LossSection(factory=f"torch.nn:{name}", args={"reduction": reduction}, reduction=reduction)
    loss = loss_for(section, task, [], columns=columns or 1)
    assert loss.inverse_link is not None
    public = MODULES[module]
    engine, training, model = built(public, "auto", loss)
    assert training.engine == "batched"
    assert engine.tile == 3
    function = kind(reduction="none")
    function.mean = reduction == "mean"
    reference, _, other = built(public, "sequential", own_loss(function, reduction))
    assert_alike(solved(engine, model, public, columns), solved(reference, other, public, columns))


@pytest.mark.parametrize("args", [{"label_smoothing": 0.1}, {"ignore_index": 2}])
def test_other_losses_of_torch_stay_functions(args):
    section = LossSection(factory="torch.nn:CrossEntropyLoss", args={"reduction": "none", **args})
    assert loss_for(section, "classification", []).is_own


@pytest.mark.parametrize("module", ["sequential", "residual, shared, in place"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_of_classes_are_trained_in_tiles(module, reduction):
    weights, public = torch.tensor([0.5, 1.0, 3.0, 2.0], dtype=torch.float64), MODULES[module]
    loss = loss_for(LossSection(reduction=reduction), "classification", [], weights)
    for local in LOCALS:
        engine, training, model = built(public, "auto", loss, **local)
        assert (training.engine, engine.tile) == ("batched", 3)
        reference, _, other = built(public, "sequential", loss, **local)
        assert_alike(solved(engine, model, public), solved(reference, other, public))


@pytest.mark.parametrize("per", ["sample", "batch"])
@pytest.mark.parametrize("tile", [1, 3])
@pytest.mark.parametrize("module", ["LeNet", "perceptron of images"])
def test_augmented_images_are_trained_in_tiles(module, tile, per):
    perceptron = Public(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4)), (1, 8, 8))
    public = MODULES.get(module, perceptron)
    augment = {"crop": 2, "flip": 0.5, "per": per}
    engine, training, model = built(public, "batched", augment=augment, tile=tile)
    assert (training.engine, engine.tile) == ("batched", tile)
    reference, _, other = built(public, "sequential", augment=augment)
    found = solved(engine, model, public)
    assert_alike(found, solved(reference, other, public))
    plain, _, model = built(public, "batched", tile=tile)
    assert not torch.equal(solved(plain, model, public)[0][0], found[0][0])
