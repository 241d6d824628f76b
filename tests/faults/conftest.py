"""A federation whose samples carry their client's number, and a model that misbehaves for some clients."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.federations import write_federation
from tests.launch import Completed, launch
from tests.mpi.recipes import write_recipe

NUM_CLIENTS, NUM_CHUNKS, CHUNK = 3, 3, 10
SAMPLES = 400
"""Per client: enough that each client's samples fill pages of their own."""

MISBEHAVING = '''
import os
import signal
import time
from collections import Counter
from pathlib import Path

import torch


class Linear(torch.nn.Linear):
    """Does `deed` where the first feature is `whose` for the `visit`-th time, and naps there for others."""

    def __init__(self, deed, whose, visit=1, nap=0):
        super().__init__(12, 4)
        self.deed, self.whose, self.visit, self.nap = deed, whose, visit, nap
        self.visits = Counter()

    def forward(self, x):
        who = int(x[0, 0]) if len(x) > 2 else None  # two samples: the check of the output's shape
        self.visits[who] += 1
        if who is not None and self.visits[who] == self.visit:
            if who == self.whose:
                Path("deed").write_text(str(os.getpid()))
                getattr(self, self.deed)()
            elif self.nap:
                time.sleep(self.nap)
        return super().forward(x)

    def fail(self):
        raise RuntimeError("broken sensor")

    def hang(self):
        time.sleep(600)

    def hang_unheard(self):
        """As where the file server hangs: to open a pipe waits for who reads it."""
        Path("run/logs").mkdir(exist_ok=True)
        os.mkfifo("run/logs/rank-1.log")
        time.sleep(600)

    def wait(self):
        while not Path("go").exists():
            time.sleep(0.01)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def truncate(self):
        os.truncate("marked.h5", os.path.getsize("marked.h5") // 8)
'''


class Place:
    """A folder with the marked federation, in which a run with a misbehaving model can be started."""

    def __init__(self, path: Path):
        self.path = path
        self.run = path / "run"

    def start(
        self, ranks: int = 3, *, args: dict | None = None, env: dict | None = None, **changes: object
    ) -> Completed:
        """Run 4 rounds; a full batch each, so that the model sees each client once a round."""
        if args is not None:
            changes["model"] = {"factory": "misbehaving:Linear", "args": args}
        recipe = write_recipe(
            self.path,
            **{
                "data": "marked.h5",
                "rounds": 4,
                "local": {"steps": 1, "batch_size": "full", "lr": 0.01},
                "evaluate": {"every": 0, "batch_size": CHUNK},
                "placement": "static",
                "sentinel": "off",  # the model counts how often it sees a client
                **changes,
            },
        )
        return self.resume(ranks, recipe, env)

    def resume(self, ranks: int = 3, recipe: Path | None = None, env: dict | None = None) -> Completed:
        """Start the same recipe again."""
        arguments = ["run", recipe or self.path / "recipe.yaml", "--quiet"]
        return launch(ranks, arguments, cwd=self.path, env=env, program=("-m", "hpcfed"))

    def rows(self) -> list[dict]:
        """The recorded rounds; fails on a line that is not whole."""
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self) -> list[int]:
        """Rounds of the checkpoints that have a manifest."""
        return sorted(int(path.stem[6:]) for path in (self.run / "checkpoints").glob("round-*.json"))

    def ending(self) -> dict:
        """What ``result.json`` says."""
        return json.loads((self.run / "result.json").read_text())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Client k, at home on rank k of 3, has k as every sample's first feature; test chunk k has 100 + k."""
    rng = np.random.default_rng(0)

    def marked(mark: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(count, 12)).astype(np.float32)
        x[:, 0] = mark
        return x, rng.integers(4, size=count).astype(np.uint8)

    chunks = [marked(100 + k, CHUNK) for k in range(NUM_CHUNKS)]
    test = tuple(np.concatenate(parts) for parts in zip(*chunks, strict=True))
    clients = [marked(k, SAMPLES) for k in range(NUM_CLIENTS)]
    write_federation(tmp_path / "marked.h5", clients, num_classes=4, test=test)
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING)
    return Place(tmp_path)
