"""The rounds of `jobs/bench/bare.py` by pfl (0.6.0, torch on one CPU thread).

In the interface of ``hpcfed bench --own``.

Usage: pfl_rounds.py (mlp | cnn | logistic) FOLDER [ROUNDS] [WARM-UP ROUNDS]

It runs in an environment of its own, and uses nothing of hpcfed but the modules of `jobs/bench/bare.py`.
"""

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py
import torch
from bare import LR, MODELS, WEIGHT_DECAY
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
NEVER = 10**9


class Module(torch.nn.Module):
    """A module with the two methods that pfl asks for."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy."""
        return cross_entropy(self.module(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict:
        """Return the loss of samples."""
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """The seconds of each round, by the clock and of CPU."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.of_cpu: list[float] = []
        self._last = time.perf_counter(), time.process_time()

    def after_central_iteration(self, *arguments, **named):
        """Take the time of a round; go on."""
        now = time.perf_counter(), time.process_time()
        self.seconds.append(now[0] - self._last[0])
        self.of_cpu.append(now[1] - self._last[1])
        self._last = now
        return False, super().after_central_iteration(*arguments, **named)[1]


def main(name: str, folder: str, rounds: str = "25", warm_up: str = "5") -> None:
    """Run the rounds and print their median times."""
    counted, left_out = int(rounds), int(warm_up)
    build, batch_size = MODELS[name]
    with h5py.File(Path(folder) / "federation.h5") as file:
        x, y = (torch.from_numpy(file[f"train/{part}"][()]) for part in "xy")
        bounds = file["train/offsets"][()].tolist()
    clients = [Dataset([x[a:b], y[a:b].long()], user_id=str(k)) for k, (a, b) in enumerate(pairwise(bounds))]
    cohorts = json.loads((Path(folder) / "cohorts.json").read_text())
    drawn = iter([client for cohort in cohorts[: counted + left_out] for client in cohort])
    data = FederatedDataset(clients.__getitem__, lambda: next(drawn))
    torch.manual_seed(0)
    module = Module(build())
    model = PyTorchModel(
        module,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, weight_decay=WEIGHT_DECAY),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=counted + left_out,
            evaluation_frequency=NEVER,
            train_cohort_size=len(cohorts[0]),
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=batch_size, local_num_epochs=1, local_learning_rate=LR),
        NNEvalHyperParams(local_batch_size=batch_size),
        [clock],
    )
    seconds, of_cpu = clock.seconds[left_out:], clock.of_cpu[left_out:]
    times = {"ms_med": 1e3 * median(seconds), "cpu_ms_med": 1e3 * median(of_cpu)}
    print(json.dumps({**times, "rounds": counted, "torch": torch.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:5])
