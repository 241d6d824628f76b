"""The rounds of `jobs/bench/bare.py` by pfl (0.6.0, torch on one CPU thread or one GPU).

In the interface of ``hpcfed bench --own``.

Usage: pfl_rounds.py WORKLOAD FOLDER [ROUNDS] [WARM-UP ROUNDS] [cpu | cuda]

WORKLOAD is one of `hpcfed bench rounds`; of pfl-cifar10, pfl's own benchmark, times are means with its evaluations.
Samples lie on the device from the start. pfl takes one process a GPU. It runs in an environment of its own, and uses
nothing of hpcfed but `jobs/bench/bare.py`.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import fmean, median

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PFL_PYTORCH_DEVICE"] = "cuda" if sys.argv[5:6] == ["cuda"] else "cpu"  # read when pfl is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bare import DECAYS, EVALUATE_EVERY, LR, MODELS, TESTED_AT_ONCE, WEIGHT_DECAY, Data
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
DEVICE = torch.device(os.environ["PFL_PYTORCH_DEVICE"])
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
        """Return the loss and the accuracy of samples."""
        self.module.eval()
        scores = self.module(x)
        self.module.train()
        loss, right = cross_entropy(scores, y, reduction="sum"), (scores.argmax(1) == y).sum()
        return {"loss": Weighted(float(loss), len(y)), "accuracy": Weighted(float(right), len(y))}


class Clock(TrainingProcessCallback):
    """The seconds of each round, by the clock and of CPU."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.of_cpu: list[float] = []
        self._last = time.perf_counter(), time.process_time()

    def after_central_iteration(self, *arguments, **named):
        """Take the time of a round; go on."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter(), time.process_time()
        self.seconds.append(now[0] - self._last[0])
        self.of_cpu.append(now[1] - self._last[1])
        self._last = now
        return False, super().after_central_iteration(*arguments, **named)[1]


def main(workload: str, folder: str, rounds: str = "25", warm_up: str = "5", device: str = "cpu") -> None:
    """Run the rounds and print their times, medians or means."""
    counted, left_out = int(rounds), int(warm_up)
    name = workload.partition("-")[0]
    build, batch_size = MODELS[name]
    files = Data(folder, DEVICE)
    clients = [Dataset([x, y], user_id=str(k)) for k, (x, y) in enumerate(files.clients)]
    drawn = iter([client for cohort in files.cohorts[: counted + left_out] for client in cohort])
    data = FederatedDataset(clients.__getitem__, lambda: next(drawn))
    torch.manual_seed(0)
    module = Module(build()).to(DEVICE)
    decay = DECAYS.get(name, WEIGHT_DECAY)
    model = PyTorchModel(
        module,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, weight_decay=decay),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    clock = Clock()
    callbacks: list[TrainingProcessCallback] = [clock]
    if files.tests:
        tests = Dataset([torch.cat(part) for part in zip(*files.tests, strict=True)])
        at_once = NNEvalHyperParams(local_batch_size=TESTED_AT_ONCE)
        callbacks.insert(0, CentralEvaluationCallback(tests, at_once, frequency=EVALUATE_EVERY))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=counted + left_out,
            evaluation_frequency=NEVER,
            train_cohort_size=len(files.cohorts[0]),
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=batch_size, local_num_epochs=1, local_learning_rate=LR),
        NNEvalHyperParams(local_batch_size=batch_size),
        callbacks,
    )
    seconds, of_cpu = clock.seconds[left_out:], clock.of_cpu[left_out:]
    key, middle = ("ms_mean", fmean) if files.tests else ("ms_med", median)
    times = {key: 1e3 * middle(seconds), f"cpu_{key}": 1e3 * middle(of_cpu)}
    print(json.dumps({**times, "rounds": counted, "torch": torch.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:6])
