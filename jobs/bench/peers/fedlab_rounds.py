"""The rounds of `jobs/bench/bare.py` by FedLab (1.3.0, torch on one CPU thread or one GPU).

In the interface of ``hpcfed bench --own``.

Usage: fedlab_rounds.py WORKLOAD FOLDER [ROUNDS] [WARM-UP ROUNDS] [cpu | cuda]

WORKLOAD is one of `hpcfed bench rounds`; of those with a test set, times are without it. Clients are trained one after
another by FedLab's serial trainer, with torch's data loaders, as its examples have them. It runs in an environment of
its own, and uses nothing of hpcfed but `jobs/bench/bare.py`.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bare import DECAYS, LR, MODELS, WEIGHT_DECAY, Data
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Clients:
    """The data set of all clients, as FedLab asks for it."""

    def __init__(self, files: Data):
        self._sets = [TensorDataset(*samples) for samples in files.clients]

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        """Return a client's minibatches."""
        return DataLoader(self._sets[client], batch_size=batch_size, shuffle=True)


def main(workload: str, folder: str, rounds: str = "25", warm_up: str = "5", device: str = "cpu") -> None:
    """Run the rounds and print the medians of their times."""
    counted, left_out, cuda = int(rounds), int(warm_up), device == "cuda"
    name = workload.partition("-")[0]
    build, batch_size = MODELS[name]
    files = Data(folder, torch.device(device))
    torch.manual_seed(0)
    model = build()
    trainer = SGDSerialClientTrainer(model, len(files.clients), cuda)
    trainer.setup_dataset(Clients(files))
    trainer.setup_optim(1, batch_size, LR)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), LR, weight_decay=DECAYS.get(name, WEIGHT_DECAY))
    handler = SyncServerHandler(model, counted + left_out, len(files.cohorts[0]) / len(files.clients), cuda)
    handler.num_clients = len(files.clients)
    seconds, of_cpu = [], []
    for cohort in files.cohorts[: counted + left_out]:
        begun = time.perf_counter(), time.process_time()
        trainer.local_process(handler.downlink_package, cohort)
        for package in trainer.uplink_package:
            handler.load(package)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun[0])
        of_cpu.append(time.process_time() - begun[1])
    times = {"ms_med": 1e3 * median(seconds[left_out:]), "cpu_ms_med": 1e3 * median(of_cpu[left_out:])}
    print(json.dumps({**times, "rounds": counted, "torch": torch.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:6])
