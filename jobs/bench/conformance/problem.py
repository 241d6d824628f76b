"""The vectors' problem for adapters: cases, minibatches as tensors and the model in torch.

It runs in the environments of other packages, and needs the standard library and torch alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Batch = tuple[Tensor, Tensor]
NUM_CLIENTS = 4


class Case:
    """A case of ``vectors.json``.

    Attributes:
        keys: the method's parameters.
        rounds: round, lr, cohort and batches of each.
        sizes: samples of each client.
    """

    def __init__(self, content: dict[str, Any], name: str):
        own = content["cases"][name]
        protocol = content["protocols"][own["protocol"]]
        self.name, self.keys, self.local = name, own["algorithm"], own.get("local", {})
        self.rounds, self._initial = protocol["rounds"], protocol["initial"]
        self._x = [torch.tensor(client["x"], dtype=torch.float64) for client in content["problem"]["clients"]]
        self._y = [torch.tensor(client["y"]) for client in content["problem"]["clients"]]
        self.sizes = [len(y) for y in self._y]
        self.lr = self.rounds[0]["lr"]

    def module(self) -> torch.nn.Linear:
        """Return softmax regression with the initial model, float64."""
        module = torch.nn.Linear(3, 3, dtype=torch.float64)
        module.load_state_dict(
            {name: torch.tensor(values, dtype=torch.float64) for name, values in self._initial.items()}
        )
        return module

    def batches(self, row: dict[str, Any], client: int) -> list[Batch]:
        """Return the minibatches of a client in a round."""
        return [(self._x[client][batch], self._y[client][batch]) for batch in row["batches"][str(client)]]

    def samples(self, client: int) -> Batch:
        """Return all samples of a client."""
        return self._x[client], self._y[client]


def state(module: torch.nn.Module) -> dict[str, Any]:
    """Return a model as the file has it."""
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


def train(module: torch.nn.Module, batches: list[Batch], lr: float, momentum: float = 0.0) -> None:
    """Take a step of SGD along each minibatch: clients of packages that leave training to their users."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()


def run(package: str, rows: dict[str, Callable[[Case], list[dict[str, Any]]]]) -> None:
    """Print the trajectories of a package as JSON.

    Usage: ADAPTER vectors.json. Rows are by case, or ``case: variant`` where a case has several.
    """
    from importlib.metadata import version

    torch.set_num_threads(1)
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for name, follow in rows.items():
        try:
            found[name] = follow(Case(content, name.partition(":")[0]))
        except Exception as error:  # a package's own, of any kind: a row that says so
            found[name] = f"{type(error).__name__}: {error}"
    print("\n" + json.dumps({"package": package, "version": version(package), "rows": found}))
