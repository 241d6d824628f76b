"""Portable arithmetic: errors of its functions, its order of sums by hand, and its linear models against torch's."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from hpcfed.arithmetic.elementary import exp, log, log1p, power, sqrt
from hpcfed.arithmetic.operations import LIBRARIES, PORTABLE
from hpcfed.arithmetic.sums import BLOCK, contracted, squared_norm, sum_over_first
from hpcfed.client.batched.portable import PortableNetwork
from hpcfed.models.losses import LOSSES
from hpcfed.models.portable import PortableLinear, portable_linear, portable_loss

DRAWS = np.random.default_rng(0)


def ulps(function, reference, x: np.ndarray) -> float:
    """The largest error in ulp of the result, against 80-bit numbers."""
    right = reference(x.astype(np.longdouble))
    found = function(torch.from_numpy(x)).numpy().astype(np.longdouble)
    return float((np.abs(found - right) / np.spacing(np.abs(right).astype(np.float64))).max())


@pytest.mark.parametrize(
    ("function", "reference", "x", "most"),
    [
        (exp, np.exp, DRAWS.uniform(-700, 700, 100_000), 1.2),
        (exp, np.exp, DRAWS.uniform(-1, 0, 100_000), 1.2),
        (log, np.log, 2.0 ** DRAWS.uniform(-900, 900, 100_000), 3),
        (log, np.log, DRAWS.uniform(0.9, 1.1, 100_000), 3),
        (log1p, np.log1p, 2.0 ** DRAWS.uniform(-1000, 0, 100_000), 3),
    ],
)
def test_functions_are_as_right_as_they_say(function, reference, x, most):
    assert ulps(function, reference, x) <= most


def test_functions_at_the_ends():
    special = torch.tensor([0.0, -1e6, 1e6, math.nan], dtype=torch.float64)
    assert exp(special)[0] == 1
    assert 0 < exp(special)[1] < 1e-300
    assert math.isfinite(exp(special)[2])
    assert exp(special)[3].isnan()
    assert log(torch.ones(1, dtype=torch.float64)) == 0
    assert log1p(torch.zeros(1, dtype=torch.float64)) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_square_roots_are_the_nearest_numbers(dtype):
    for x in DRAWS.uniform(0, 100, 2000).astype(dtype):
        root = sqrt(torch.tensor([x])).numpy()[0]
        half = Fraction(float(np.spacing(root))) / 2
        assert (Fraction(float(root)) - half) ** 2 <= Fraction(float(x)) <= (Fraction(float(root)) + half) ** 2


@pytest.mark.parametrize("base", [0.0, 0.9, 0.99999, 1.0, 1.01])
def test_powers_are_the_nearest_numbers(base):
    for exponent in (0, 1, 2, 7, 300):
        assert power(base, exponent) == float(Fraction(base) ** exponent)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 13])
def test_sums_are_by_halving(count):
    terms = [float(x) for x in DRAWS.normal(size=count)]

    def halved(left: list[float]) -> float:
        if len(left) <= 1:
            return sum(left)
        half = len(left) // 2
        rest = len(left) - half
        return halved([one + (left[rest + k] if k < half else 0.0) for k, one in enumerate(left[:rest])])

    assert float(sum_over_first(torch.tensor(terms, dtype=torch.float64))) == halved(terms)
    assert float(sum_over_first(np.array(terms))) == halved(terms)


@pytest.mark.parametrize("piece_bytes", [1, 500, 1 << 20])
def test_products_do_not_depend_on_the_pieces(piece_bytes, monkeypatch):
    left, right = torch.randn(61, 5, 3), torch.randn(61, 3, 17)
    whole = contracted(left, right)
    monkeypatch.setattr("hpcfed.arithmetic.sums.PIECE_BYTES", piece_bytes)
    assert torch.equal(contracted(left, right), whole)
    assert torch.equal(contracted(left[:, :, 1:2], right[:, 1:2, 4:5]), whole[:, 1:2, 4:5])
    torch.testing.assert_close(whole, (left.unsqueeze(3) * right.unsqueeze(1)).sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["cross-entropy", "binary-cross-entropy", "squared"])
def test_gradients_are_those_of_autograd(name, reduction, bias, dtype):
    rows, batch, features, outputs = 3, 7, 13, 4
    shapes = [(rows, outputs, features), *([(rows, outputs)] if bias else [])]
    stack = [torch.randn(*shape, dtype=dtype) for shape in shapes]
    x = torch.randn(rows, batch, features, dtype=dtype)
    y = torch.rand(rows, batch, outputs).to(dtype)
    if name == "cross-entropy":
        y = y.argmax(2)
    loss = LOSSES[name](reduction)
    out = [torch.full_like(part, torch.nan) for part in stack]
    losses = PortableNetwork(portable_loss(name, loss)).gradients(stack, x, y, out)
    for row in range(rows):
        module = PortableLinear(features, outputs, bias=bias).to(dtype)
        for parameter, own in zip(module.parameters(), stack, strict=True):
            parameter.data = own[row]
        value = portable_loss(name, loss).batch(module(x[row]), y[row])
        wanted = torch.autograd.grad(value, list(module.parameters()))
        torch.testing.assert_close(losses[row], value.detach())
        for found, right in zip(out, wanted, strict=True):
            torch.testing.assert_close(found[row], right)
        with torch.no_grad():
            output = module(x[row])
            torch.testing.assert_close(output, nn.functional.linear(x[row], *module.parameters()))
            total, count = portable_loss(name, loss).summed(output, y[row])
            assert total == pytest.approx(loss.summed(output, y[row])[0], rel=1e-5)
            assert count == batch


def test_initial_values_are_torchs_up_to_the_last_bit():
    torch.manual_seed(5)
    wanted, found = nn.Linear(61, 5), portable_linear(61, 5, bias=True, seed=5)
    for own, right in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(own, right, rtol=0, atol=2**-26)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_module_is_for_minibatches_of_any_size():
    module = portable_linear(61, 5, bias=True, seed=5)
    with torch.no_grad():
        traced = torch.jit.trace(module, torch.randn(2, 61))
        for batch in (1, 50, 5000):
            x = torch.randn(batch, 61)
            assert torch.equal(traced(x), module(x))


def test_both_kinds_of_arithmetic_compute_the_same():
    v, rows = torch.randn(101, dtype=torch.float64), torch.randn(3, 17, dtype=torch.float64)
    for one, other in (
        (PORTABLE.squared_norm(v), LIBRARIES.squared_norm(v)),
        (PORTABLE.norms(rows), LIBRARIES.norms(rows)),
        (torch.from_numpy(PORTABLE.squared_norms(rows)), torch.from_numpy(LIBRARIES.squared_norms(rows))),
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("length", [1, 7, BLOCK, 3 * BLOCK + 5])
def test_a_squared_norm_is_right_to_a_few_units_of_the_last_place(length):
    v = DRAWS.normal(size=length)
    exact = math.fsum(v * v)
    assert abs(squared_norm(torch.from_numpy(v)) - exact) <= 16 * math.ulp(exact)
