"""The rounds of `jobs/bench/bare.py` by blazefl (2.0.3, torch on one CPU thread or one GPU).

In the interface of ``hpcfed bench --own``.

Usage: blazefl_rounds.py WORKLOAD FOLDER [ROUNDS] [WARM-UP ROUNDS] [cpu | cuda]

WORKLOAD is one of `hpcfed bench rounds`; of pfl-cifar10 times are means with its evaluations. Clients are trained one
after another by blazefl's base trainer, with torch's data loaders, as its examples have them. Version 2.0.3 needs
Python 3.12, and 3.0.0, whose threads run at once, 3.14.

Checked in every round: samples are as many as the bare loop's. Checked once: with one minibatch a client, the model
after five rounds is that of the bare loop, to 1e-6. It runs in an environment of its own, and uses nothing of hpcfed
but `jobs/bench/bare.py`.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import fmean, median

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TQDM_DISABLE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bare import DECAYS, EVALUATE_EVERY, LR, MODELS, WEIGHT_DECAY, Data, evaluate
from blazefl.contrib import FedAvgBaseClientTrainer, FedAvgBaseServerHandler, FedAvgPartitionType
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Models:
    """The models by name, as blazefl asks for them."""

    def select_model(self, model_name: str) -> torch.nn.Module:
        """Return a new model."""
        return MODELS[model_name][0]()


class Clients:
    """The data sets of all clients, as blazefl asks for them."""

    def __init__(self, files: Data):
        self._sets = [TensorDataset(*samples) for samples in files.clients]

    def get_dataloader(
        self, type_: FedAvgPartitionType, cid: int, batch_size: int, generator: torch.Generator
    ) -> DataLoader:
        """Return a client's minibatches."""
        return DataLoader(self._sets[cid], batch_size=batch_size, shuffle=True, generator=generator)


def simulate(name: str, folder: str, rounds: int, device: str) -> tuple[torch.nn.Module, list[tuple[float, float]]]:
    """Run the rounds and return the model and their seconds, by the clock and of CPU."""
    batch_size = MODELS[name][1]
    files = Data(folder, torch.device(device))
    cohort, samples = len(files.cohorts[0]), len(files.clients[0][1])
    clients, count = Clients(files), len(files.clients)
    trainer = FedAvgBaseClientTrainer(Models(), name, clients, device, count, 1, batch_size, LR, seed=0)
    decay = DECAYS.get(name, WEIGHT_DECAY)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), LR, weight_decay=decay)
    torch.manual_seed(0)
    handler = FedAvgBaseServerHandler(
        Models(), name, clients, rounds, count, cohort / count, device, batch_size, seed=0
    )
    handler.model.to(device)
    handler.num_clients_per_round = cohort
    seconds = []
    for number in range(rounds):
        begun = time.perf_counter(), time.process_time()
        trainer.local_process(handler.downlink_package(), files.cohorts[number])
        packages = trainer.uplink_package()
        for package in packages:
            handler.load(package)
        if files.tests and (number + 1) % EVALUATE_EVERY == 0:
            evaluate(handler.model, files.tests)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
        done = sum(package.data_size for package in packages)
        if [done, handler.round] != [cohort * samples, number + 1]:
            raise RuntimeError(
                f"samples and rounds: expected {cohort * samples}, {number + 1}; got {done}, {handler.round}"
            )
    return handler.model, seconds


def main(workload: str, folder: str, rounds: str = "25", warm_up: str = "5", device: str = "cpu") -> None:
    """Run the rounds and print their times, medians or means."""
    counted, left_out = int(rounds), int(warm_up)
    _, seconds = simulate(workload.partition("-")[0], folder, counted + left_out, device)
    key, middle = ("ms_mean", fmean) if workload == "pfl-cifar10" else ("ms_med", median)
    wall, of_cpu = (1e3 * middle(times) for times in zip(*seconds[left_out:], strict=True))
    print(json.dumps({key: wall, f"cpu_{key}": of_cpu, "rounds": counted, "torch": torch.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:6])
