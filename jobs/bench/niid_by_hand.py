"""NIID-Bench's rounds by hand: its rules in plain torch beside hpcfed's, from the same model, in the same orders.

    python -m jobs.bench.niid_by_hand RUN [--rounds 2] [--epochs 1]

RUN is a FedAvg or SCAFFOLD run of `hpcfed reproduce niid-mnist` or `niid-fashion-mnist`, finished or not. Both go
through so many rounds of it in float64, and the largest difference between their parameters is printed after each. By
hand means: the network as a module of its own, torch.optim.SGD made anew for each party, its steps one by one, and
NIID-Bench's SCAFFOLD, which corrects a model after each step of momentum and divides by the number of steps.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import torch
from torch import Tensor, nn

from hpcfed.assembly import assemble, resolve
from hpcfed.config.load import load_recipe
from hpcfed.data.batches import visits
from hpcfed.errors import ends_in_a_line
from hpcfed.ranks.world import World
from hpcfed.rng import Purpose, stream
from hpcfed.simulation import Simulation

Parameters = list[Tensor]


def network() -> nn.Module:
    """Return NIID-Bench's CNN for images of 28 × 28, in float64."""
    convolutions = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    dense = [nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, *dense).double()


class ByHand:
    """The parties' training and the server's mean, written anew.

    Args:
        data: the federation's file.
        seed: of the orders of minibatches.
        epochs, batch_size, lr, momentum, weight_decay: of each party.
        is_scaffold: whether parties correct their drift.
    """

    def __init__(
        self,
        data: Path,
        seed: int,
        *,
        epochs: int,
        batch_size: int,
        lr: float,
        momentum: float,
        weight_decay: float,
        is_scaffold: bool,
    ):
        with h5py.File(data) as file:
            x, y, offsets = (file[f"train/{name}"][()] for name in ("x", "y", "offsets"))
        self._x, self._y = torch.from_numpy(x).double() / 255, torch.from_numpy(y).long().flatten()
        self._bounds = offsets.tolist()
        self._seed, self._epochs, self._batch_size, self._lr = seed, epochs, batch_size, lr
        self._sgd = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self._module, self._is_scaffold = network(), is_scaffold
        zeros = [torch.zeros_like(own) for own in self._module.parameters()]
        parties = len(self._bounds) - 1
        self._c, self._c_of = zeros, [zeros] * parties

    def round(self, number: int, w: Parameters) -> Parameters:
        """Return the server's model after a round from w."""
        w_next = [torch.zeros_like(own) for own in w]
        corrections = []
        for party, (first, last) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            trained, steps = self._trained(number, party, w)
            w_next = [total + (last - first) / len(self._y) * own for total, own in zip(w_next, trained, strict=True)]
            of_party = zip(self._c_of[party], self._c, w, trained, strict=True)
            corrections.append([c_i - c + (before - after) / (steps * self._lr) for c_i, c, before, after in of_party])
        if self._is_scaffold:
            changes = [
                [new - old for new, old in zip(*own, strict=True)] for own in zip(corrections, self._c_of, strict=True)
            ]
            self._c = [c + sum(own) / len(changes) for c, *own in zip(self._c, *changes, strict=True)]
            self._c_of = corrections
        return w_next

    def _trained(self, number: int, party: int, w: Parameters) -> tuple[Parameters, int]:
        """Return a party's model after its epochs, and its steps."""
        first, last = self._bounds[party : party + 2]
        x, y, parameters = self._x[first:last], self._y[first:last], list(self._module.parameters())
        with torch.no_grad():
            for own, server in zip(parameters, w, strict=True):
                own.copy_(server)
        optimizer = torch.optim.SGD(parameters, **self._sgd)
        steps = self._epochs * -(-len(y) // self._batch_size)
        rng = stream(self._seed, Purpose.BATCHES, number, party)
        orders, sizes = visits(len(y), self._batch_size, steps, rng, self._batch_size)
        for order, size in zip(orders, sizes, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self._module(x[order[:size]]), y[order[:size]]).backward()
            optimizer.step()
            if self._is_scaffold:
                with torch.no_grad():
                    for own, c, c_i in zip(parameters, self._c, self._c_of[party], strict=True):
                        own -= self._lr * (c - c_i)
        return [own.detach().clone() for own in parameters], steps


def differences(run: Path, rounds: int, epochs: int) -> Iterator[tuple[float, float]]:
    """Yield, after each round, the largest difference between the two models, and how far hpcfed's has gone."""
    with tempfile.TemporaryDirectory() as scratch:
        changes = ["dtype=float64", f"rounds={rounds}", f"local.epochs={epochs}", f"output={scratch}/run"]
        recipe = load_recipe(run / "recipe.yaml", changes)
        local = recipe.local
        by_hand = ByHand(
            Path(recipe.data),
            recipe.seed.batches,
            epochs=epochs,
            batch_size=int(local.batch_size),
            lr=local.lr,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
            is_scaffold=recipe.algorithm.name == "scaffold",
        )
        parts, _ = assemble(resolve(recipe), World())
        with parts.federation, parts.clients:
            simulation = Simulation(parts)

            def model() -> Parameters:
                return [view.clone() for view in parts.model.views(simulation.w).values()]

            first = w = model()
            for number in range(1, rounds + 1):
                simulation.round(number)
                w, ours = by_hand.round(number, w), model()
                yield _largest(ours, w), _largest(ours, first)


def _largest(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@ends_in_a_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    asked = parser.parse_args()
    for number, (difference, moved) in enumerate(differences(asked.run, asked.rounds, asked.epochs), 1):
        print(f"round {number}: largest difference {difference:.1e}, where parameters moved by up to {moved:.2g}")


if __name__ == "__main__":
    main()
