"""A picture a method: its iterates on FedExP's toy of two clients in the plane, trained while the site is built."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from safetensors.torch import save_file

import hpcfed
from data_prep.synthetic import toy2d
from hpcfed import algorithms
from hpcfed.io.figure import rendered
from hpcfed.io.figure_style import LIGHT, PAPER, panels

ROUNDS, STEPS, LR = 30, 10, 0.05
CHOSEN: dict[str, dict[str, Any]] = {
    "dsgd": {"server_lr": 3.0},
    "fedadagrad": {"server_lr": 0.5},
    "fedadam": {"server_lr": 0.2},
    "fedavg": {},
    "feddyn": {"alpha": 0.5},
    "fedexp-m": {"eps": 0.001, "beta": 0.5},
    "fedavgm": {"beta": 0.5},
    "fednova": {},
    "fedprox": {"mu": 0.5},
    "fedyogi": {"server_lr": 0.2},
}
"""Parameters that suit the toy, where the method's example for tests does not."""
OPTIMUM = np.array([0.0, TARGET := toy2d.TARGET])


def parameters_of(name: str) -> dict[str, Any]:
    """Return a method's parameters on the toy."""
    return CHOSEN.get(name, dict(algorithms.examples()[name]))


def caption(name: str) -> str:
    """Return what the picture shows, in a paragraph."""
    used = ", ".join(f"`{key}: {value}`" for key, value in parameters_of(name).items()) or "its defaults"
    return (
        f"Two clients, F_1 = ½ (3 w_1 + w_2 − 3)² and F_2 = ½ (w_1 + w_2 − 3)², both in each of {ROUNDS} rounds, with "
        f"{STEPS} full steps of {LR}, from (0, 0); the star is their common minimum. Left: w after each round, over "
        f"the lines of equal F; right: F(w). With {used}; grey: FedAvg. A toy shows how a method moves, not its worth."
    )


def of_methods() -> dict[str, str]:
    """Train every method on the toy; return name → its picture, SVG."""
    with tempfile.TemporaryDirectory() as folder:
        data, init = Path(folder) / "toy.h5", Path(folder) / "start.safetensors"
        rows = {str(k): (np.array([row]), np.array([[TARGET]])) for k, row in enumerate(toy2d.ROWS)}
        hpcfed.write_federation(data, rows, task="regression", name="toy2d")
        save_file({"weight": torch.zeros(1, 2, dtype=torch.float64)}, init)
        paths = {}
        for name in algorithms.names():
            recipe = {
                "data": str(data),
                "model": {"name": "quadratic", "init": str(init)},
                "dtype": "float64",
                "device": "cpu",
                "rounds": ROUNDS,
                "weights": "uniform",
                "local": {"steps": STEPS, "batch_size": "full", "lr": LR},
                "algorithm": {"name": name, **parameters_of(name)},
                "output": f"{folder}/{name}",
            }
            iterates = [each.parameters["weight"].numpy().reshape(2) for each in hpcfed.rounds(recipe, quiet=True)]
            paths[name] = np.array([np.zeros(2), *iterates])
    return {name: _drawn(paths[name], paths["fedavg"], algorithms.titles()[name]) for name in paths}


def _drawn(path: np.ndarray, fedavg: np.ndarray, title: str) -> str:
    figure, ((plane, loss),) = panels(PAPER, 1, 2, 3.0)
    sides = np.concatenate([path, fedavg, OPTIMUM[None]])
    low, high = sides.min(0) - 0.25, sides.max(0) + 0.25
    first, second = np.meshgrid(np.linspace(low[0], high[0], 90), np.linspace(low[1], high[1], 90))
    plane.contour(first, second, np.sqrt(_objective(np.stack([first, second], -1))), 12, colors=LIGHT.helper)
    for points, colour, label in ((fedavg, LIGHT.groups[-1], "FedAvg"), (path, LIGHT.groups[0], title)):
        plane.plot(*points.T, marker=".", markersize=4, linewidth=1, color=colour)
        loss.semilogy(np.maximum(_objective(points), 1e-16), linewidth=1.4, color=colour, label=label)
    plane.plot(*OPTIMUM, marker="*", markersize=9, color=LIGHT.groups[1], linestyle="none")
    plane.set(xlabel="w₁", ylabel="w₂")
    loss.set(xlabel="round", ylabel="F(w)")
    if title != "FedAvg":
        loss.legend(frameon=False)
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": title}):
        return rendered(figure, "svg", metadata={"Date": None}).decode()


def _objective(w: np.ndarray) -> np.ndarray:
    """F(w), the mean of the clients' objectives, for points (..., 2)."""
    errors = w @ np.array(toy2d.ROWS).T - TARGET
    return (errors**2 / 2).mean(-1)
