"""Grids on the command line: their values, and refusals."""

from __future__ import annotations

import pytest

from hpcfed.errors import InputError
from hpcfed.lab.sweep.grid import parse_grid, parse_grids, parse_seeds, points


def texts(grid: str) -> list[str]:
    return [value.text for value in parse_grid(grid).values]


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        ("algorithm.eps=1e-3,1e-2", ["1e-3", "1e-2"]),
        ("local.lr=10**-2:10**0:5", ["0.01", "0.03162277660168379", "0.1", "0.31622776601683794", "1"]),
        ("local.lr=10**-1.5,0.1", ["0.03162277660168379", "0.1"]),
        ("local.batch_size=2**3:2**6:4", ["8", "16", "32", "64"]),
        ("local.steps=5:20:4", ["5", "10", "15", "20"]),
        ("local.momentum=0:0.9:4", ["0.0", "0.3", "0.6", "0.9"]),
        ("algorithm.mu=1:0:3", ["1.0", "0.5", "0.0"]),
        ("model.hidden=[8],[8, 4]", ["[8]", "[8, 4]"]),
        ("algorithm={name: fedavg},{name: fedprox, mu: 0.1}", ["{name: fedavg}", "{name: fedprox, mu: 0.1}"]),
        ("data=a.h5,'b,c.h5'", ["a.h5", "'b,c.h5'"]),
    ],
)
def test_what_a_grid_means(grid, expected):
    assert texts(grid) == expected


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("local.lr", "expected section.key=values"),
        ("=1,2", "expected section.key=values"),
        ("local.lr=", "values with commas between them"),
        ("local.lr=1,,2", "values with commas between them"),
        ("model.hidden=[8,[4]", "values with commas between them"),
        ("local.lr=0:1", "low:high:count"),
        ("local.lr=0:1:1", "low:high:count"),
        ("local.lr=0:1:2:3", "low:high:count"),
        ("local.lr=0:1:2.5", "low:high:count"),
        ("local.lr=10**-2:1:5", "two powers, or two numbers"),
        ("local.lr=10**-2:2**0:5", "powers of one base"),
        ("local.lr=10**999", "a power: expected one that is a number"),
        ("local.lr=1:1:3", "the value 1 stands twice"),
        ("local.lr=0.1,0.2,0.1", "the value 0.1 stands twice"),
        ("local.lr=0.1,0.100001", "the value, as it is shown, 0.1 stands twice"),
        ("seed=0,1", "'seed' cannot be swept; use --seeds"),
        ("output=a,b", "'output' cannot be swept; use --output"),
    ],
)
def test_a_malformed_grid_is_refused(grid, message):
    with pytest.raises(InputError) as refused:
        parse_grid(grid)
    assert message in str(refused.value)
    assert f"--grid {grid}"[:20] in str(refused.value)


def test_nothing_typed_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert texts("local.lr=__import__('os').mkdir('x')") == ["__import__('os').mkdir('x')"]
    assert not list(tmp_path.iterdir())


def test_points_are_the_product_the_last_grid_fastest():
    grids = parse_grids(["local.lr=0.1,1", "algorithm.mu=0,2"])
    assert [point.overrides for point in points(grids)] == [
        ["local.lr=0.1", "algorithm.mu=0"],
        ["local.lr=0.1", "algorithm.mu=2"],
        ["local.lr=1", "algorithm.mu=0"],
        ["local.lr=1", "algorithm.mu=2"],
    ]
    assert [point.overrides for point in points(parse_grids(["means.0.noise.multiplier=1,2"]))] == [
        ["means.0.noise.multiplier=1"],
        ["means.0.noise.multiplier=2"],
    ]
    with pytest.raises(InputError, match=r"two grids of 'local\.lr'"):
        parse_grids(["local.lr=0.1,1", "local.lr=2,3"])


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("0,7,11", [0, 7, 11]), ("7,", [7])])
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text", ["0", "-1", "1,1", "a", "", ",", "1.5", "99999", "٣", "9" * 12, "1" + "0" * 21, "1" * 5000]
)
def test_seeds_that_are_refused(text):
    with pytest.raises(InputError, match="--seeds"):
        parse_seeds(text)
