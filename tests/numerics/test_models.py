"""The models' parameter counts and shapes, the losses' closed forms, and augmentation pixel by pixel."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpcfed import models
from hpcfed.assembly.model import check_memory
from hpcfed.client.augment import augmented, cropped, crops
from hpcfed.config.recipe import Augment, LossSection, Model
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.errors import InputError
from hpcfed.evaluation.metrics import whole_metrics
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import classes_right, cross_entropy, labels_right, loss_for
from hpcfed.rng import Purpose, stream
from tests.federations import write_federation

CPU = torch.device("cpu")
COUNTS = [
    ("logistic", {}, (60,), 5, 305),
    ("mlp", {"hidden": [200, 200]}, (28, 28), 10, 199_210),
    ("emnist-cnn", {}, (28, 28), 62, 1_206_590),
    ("cifar-cnn", {}, (3, 32, 32), 10, 744_330),
    ("feddyn-cnn", {}, (3, 32, 32), 10, 797_962),
    ("feddyn-cnn", {"hidden": 394}, (3, 32, 32), 10, 815_892),  # + 10 · (1600 + 1 + 192)
    ("femnist-cnn", {}, (28, 28), 62, 608_702),
    ("niid-cnn", {}, (28, 28), 10, 44_426),
    ("resnet18-gn", {}, (3, 32, 32), 10, 11_173_962),
    ("resnet18-gn", {"pool": 3}, (3, 32, 32), 100, 11_220_132),
    ("resnet18-gn", {"stem": "7x7"}, (3, 32, 32), 10, 11_181_642),
    ("lstm", {}, (80,), 80, 133_520),
    ("lstm", {"hidden": 256}, (80,), 80, 819_920),
]
SMALL = {
    "emnist-cnn": (6, 6),
    "cifar-cnn": (3, 16, 16),
    "feddyn-cnn": (3, 16, 16),
    "femnist-cnn": (1, 16, 16),
    "niid-cnn": (1, 16, 16),
    "resnet18-gn": (3, 4, 4),
    "lstm": (7,),
}
"""The smallest samples of each model that is not linear."""


def built(name: str, features: tuple[int, ...], outputs: int = 5, **keys: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    spec = models.spec(Model(name=name, **keys))
    assert spec is not None
    return spec.build(features, outputs)


@pytest.mark.serial
@pytest.mark.parametrize(("name", "keys", "features", "outputs", "count"), COUNTS)
def test_has_the_papers_number_of_parameters(name, keys, features, outputs, count):
    assert FlatModel(built(name, features, outputs, **keys), torch.float32, CPU).num_parameters == count


@pytest.mark.serial
def test_a_model_is_sized_without_its_initial_values(monkeypatch):
    """Those of an embedding on ``meta`` need torch._dynamo, which takes seconds to import."""
    spec = models.spec(Model(name="lstm"))
    assert spec is not None
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=133_520 * 16 - 1))
    monkeypatch.setattr(torch.nn.init, "_no_grad_normal_", None)
    with pytest.raises(InputError, match="133,520 parameters"):
        check_memory(spec, (80,), 80, torch.float32)


@pytest.mark.every(3)
@pytest.mark.serial
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_parameter_and_no_gap(name, dtype):
    model = FlatModel(built(name, SMALL[name]), dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    shape = (6, *SMALL[name])
    tokens = torch.randint(5, shape, generator=generator)
    output = model.module(tokens if name == "lstm" else torch.randn(shape, generator=generator, dtype=dtype))
    assert (output.shape, output.dtype) == ((6, 5), dtype)
    torch.nn.functional.cross_entropy(output, torch.arange(6) % 5).backward()
    assert all(view.any() for view in model.views(model.grad).values())
    assert all(parameter.data_ptr() % 64 == model.vector.data_ptr() % 64 for parameter in model.module.parameters())
    used = sum(int(view.count_nonzero()) for view in model.views(model.grad).values())
    assert int(model.grad.count_nonzero()) == used


@pytest.mark.serial
@pytest.mark.parametrize("name", ["emnist-cnn", "femnist-cnn", "resnet18-gn"])
def test_grey_images_need_no_axis_of_channels(name):
    x = torch.randn(2, 16, 16)
    outputs = [built(name, shape).eval()(x.reshape(2, *shape)) for shape in ((16, 16), (1, 16, 16))]
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize(
    ("name", "features", "says"),
    [
        ("emnist-cnn", (784,), ("emnist-cnn", "(H, W) or (C, H, W)", "(784,)")),
        ("resnet18-gn", (2, 3, 4, 5), ("resnet18-gn", "(2, 3, 4, 5)")),
        ("cifar-cnn", (32, 32, 3), ("leave nothing", "(32, 32, 3)")),
        ("emnist-cnn", (5, 28), ("leave nothing", "(1, 5, 28)")),
        ("lstm", (80, 2), ("lstm", "(T,)", "(80, 2)")),
    ],
)
def test_refuses_samples_of_another_shape(name, features, says):
    with pytest.raises(InputError) as error:
        built(name, features)
    assert all(fragment in str(error.value) for fragment in says)


def test_groups_divide_the_channels():
    with pytest.raises(InputError, match=r"groups.*divisor of 64"):
        models.spec(Model(name="resnet18-gn", groups=3))


def test_losses_have_their_closed_forms():
    generator = torch.Generator().manual_seed(1)
    output = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    labels, classes = (torch.rand(7, 3, generator=generator) < 0.4).double(), torch.arange(7) % 3
    p = output.sigmoid()
    expected = {
        ("multi-label", labels): -(labels * p.log() + (1 - labels) * (1 - p).log()).sum(1),
        ("classification", classes): -output.softmax(1).log()[torch.arange(7), classes],
        ("next-token", classes): -output.softmax(1).log()[torch.arange(7), classes],
        ("regression", labels): 0.5 * ((output - labels) ** 2).sum(1),
    }
    for (task, target), each in expected.items():
        for reduction, value in (("mean", each.mean()), ("sum", each.sum())):
            loss = loss_for(LossSection(reduction=reduction), task, [])
            torch.testing.assert_close(loss.batch(output, target), value, rtol=1e-13, atol=0)
            assert loss.summed(output, target) == (pytest.approx(float(each.sum()), rel=1e-13), 7)
    alone = loss_for(LossSection(), "regression", []).batch(output[:, :1], labels[:, 0])  # one number, without an axis
    torch.testing.assert_close(alone, 0.5 * ((output - labels)[:, 0] ** 2).mean(), rtol=1e-13, atol=0)
    assert labels_right(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])) == (1, 2)


def test_an_output_that_is_no_number_is_never_right():
    """Of a fine-tuned model that has diverged; nan is the largest for argmax, and not positive."""
    nan = torch.nan
    output = torch.tensor([[nan, nan], [nan, 1.0], [1.0, nan], [2.0, 1.0], [1.0, 2.0]])
    assert classes_right(output, torch.tensor([0, 0, 1, 0, 0])) == (1, 5)
    assert classes_right(output[..., None].expand(5, 2, 3), torch.zeros(5, 3).long()) == (3, 5)
    assert labels_right(output, torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [1, 1]])) == (2, 5)
    (matrix,) = whole_metrics({"matrix": "confusion-matrix"}, "classification", 2, []).values()
    assert not matrix.cells(output, torch.zeros(5)).any()
    assert matrix.cells(output[3:], torch.zeros(2)).tolist() == [[1, 1], [1, 1], [0, 1], [0, 1]]


def test_bytes_are_scaled_and_centred_and_tokens_are_not(world, shared_tmp):
    x = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4) * 10
    path = shared_tmp / "f.h5"

    def write() -> None:
        write_federation(path, [(x, np.zeros(2, int))], num_classes=231)
        with h5py.File(path, "r+") as file:
            file.attrs["normalization"] = '{"mean": [0.1, 0.2, 0.3], "std": [1, 2, 4]}'

    def as_tokens() -> None:
        with h5py.File(path, "r+") as file:
            file.attrs["task"] = "next-token"
        write_federation(shared_tmp / "few.h5", [(x, np.zeros(2, int))], num_classes=230)
        with h5py.File(shared_tmp / "few.h5", "r+") as file:
            file.attrs["task"] = "next-token"

    world.on_root(write)
    with Federation.open(path) as federation:
        images, _ = Shards(federation, torch.float64, CPU, 0).client(0)
    mean, std = np.array([[0.1], [0.2], [0.3]]), np.array([[1], [2], [4]])
    np.testing.assert_allclose(images.numpy(), (x / 255 - mean) / std, rtol=1e-15)
    world.gather(None)  # all have read it
    world.on_root(as_tokens)
    with Federation.open(path) as federation:
        tokens, _ = Shards(federation, torch.float64, CPU, 0).client(0)
    assert tokens.dtype == torch.int64
    assert np.array_equal(tokens.numpy(), x)
    with Federation.open(shared_tmp / "few.h5") as federation, pytest.raises(InputError, match=r"0 … 229, got 0 … 230"):
        Shards(federation, torch.float64, CPU, 0).client(0)


def images(count: int, *shape: int) -> torch.Tensor:
    """Images of which no two pixels are alike, and none is 0."""
    return torch.arange(1.0, count * int(np.prod(shape)) + 1).reshape(count, *shape)


def changed(image: np.ndarray, pad: int) -> dict[tuple[int, int, bool], np.ndarray]:
    """Every window of a padded image (C, H, W), straight and mirrored, by its place."""
    height, width = image.shape[-2:]
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
    return {
        (top, left, flip): padded[:, top : top + height, left : left + width][..., :: -1 if flip else 1]
        for top in range(2 * pad + 1)
        for left in range(2 * pad + 1)
        for flip in (False, True)
    }


def places(x: torch.Tensor, section: Augment, seed: int = 0) -> list[tuple[int, int, bool]]:
    """Where each augmented image comes from, by search."""
    found = augmented(x, section, stream(seed, Purpose.AUGMENT))
    assert found.shape == x.shape
    rows = zip(x.numpy(), found.numpy(), strict=True)
    return [
        next(
            place
            for place, window in changed(old.reshape(-1, *old.shape[-2:]), section.crop).items()
            if np.array_equal(window.reshape(old.shape), new)
        )
        for old, new in rows
    ]


def test_augments_each_sample_as_asked():
    draws = places(images(800, 2, 3, 4), Augment(crop=1, crop_probability=0.5, flip=0.25))
    tops, lefts, flips = (np.array(column) for column in zip(*draws, strict=True))
    assert np.mean(flips) == pytest.approx(0.25, abs=0.05)
    shifted = np.mean((tops != 1) | (lefts != 1))
    assert shifted == pytest.approx(0.5 * 8 / 9, abs=0.06)
    for side in (tops, lefts):
        assert np.bincount(side) / len(side) == pytest.approx([1 / 6, 4 / 6, 1 / 6], abs=0.05)
    assert abs(np.corrcoef(tops, lefts)[0, 1]) < 0.1


def test_augments_a_batch_alike():
    per_batch = Augment(crop=2, flip=0.5, per="batch")
    of_seeds = [places(images(3, 5, 4), per_batch, seed) for seed in range(40)]
    assert all(len(set(draws)) == 1 for draws in of_seeds)
    assert len({draws[0] for draws in of_seeds}) > 20
    assert {draws[0][2] for draws in of_seeds} == {False, True}


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_draws_that_are_on_a_device_cut_the_same_windows(per):
    x, section = images(9, 2, 3, 4), Augment(crop=2, crop_probability=0.7, flip=0.5, per=per)
    top, left, flips = map(torch.from_numpy, crops(len(x), section, stream(3, Purpose.AUGMENT)))
    assert torch.equal(cropped(x, section, top, left, flips), augmented(x, section, stream(3, Purpose.AUGMENT)))


def test_a_certain_flip_mirrors_and_nothing_else():
    x = images(4, 3, 3)
    assert torch.equal(augmented(x, Augment(flip=1.0), stream(0, Purpose.AUGMENT)), x.flip(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_of_few_classes_has_the_bits_of_torchs(dtype):
    draws = torch.Generator().manual_seed(3)
    for classes, samples in product(range(2, 20), (1, 7, 37, 256)):
        z = torch.randn(samples, classes, generator=draws, dtype=dtype) * 3
        z[0, 0], z[-1, 1], z[samples // 2, 0] = torch.nan, torch.inf, 1e30
        y = torch.randint(classes, (samples,), generator=draws)
        with torch.no_grad():
            found = cross_entropy(z, y)
        expected = torch.nn.functional.cross_entropy(z, y, reduction="none")
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
