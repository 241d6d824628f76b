"""The rounds of `jobs/bench/bare.py` by Flower (1.42.0: its simulation engine on Ray, torch on one CPU thread).

In the interface of ``hpcfed bench --own``.

Usage: flower_rounds.py WORKLOAD FOLDER [ROUNDS] [WARM-UP ROUNDS] [cpu]

WORKLOAD is one of `hpcfed bench rounds`; of pfl-cifar10 times are means with its evaluations. Flower samples cohorts
itself, of the same size, and one Ray actor trains them by the bare loop's `train_client`, since Flower has no trainer;
it loads the data once, in the warm-up. Times of CPU and memory are those of all of Ray's processes besides this one.
Memory is the sum of their proportional set sizes between rounds, the largest.

Checked in every round: all of the cohort replied, and samples and steps are as many as the bare loop's. Checked once:
with one minibatch a client and all clients in the cohort, the model after five rounds is that of the bare loop, to
1e-6. It runs in an environment of its own, and uses nothing of hpcfed but `jobs/bench/bare.py`.
"""

import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from statistics import fmean, median

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# At Ray's own niceness, 15, other work on the machine would starve the actor.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from bare import DECAYS, EVALUATE_EVERY, MODELS, WEIGHT_DECAY, Data, evaluate, train_client
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

torch.set_num_threads(1)
client_app = ClientApp()


@cache
def loaded(workload: str, folder: str) -> tuple[torch.nn.Module, Data]:
    """Return the model and the samples of an actor, which keeps them."""
    return MODELS[workload][0](), Data(folder, torch.device("cpu"))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client."""
    workload = message.content["config"]["workload"]
    model, files = loaded(workload, message.content["config"]["folder"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = files.clients[context.node_config["partition-id"]]
    batch_size = MODELS[workload][1]
    train_client(model, x, y, batch_size, DECAYS.get(workload, WEIGHT_DECAY))
    counts = MetricRecord({"num-examples": len(y), "steps": -(-len(y) // batch_size)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "counts": counts}), reply_to=message)


class Clock:
    """Seconds of each round, by the clock and of CPU, and the largest memory in bytes, of this process and Ray's."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.of_cpu: list[float] = []
        self.peak_bytes = 0

    def start(self) -> None:
        """Begin a round."""
        self._cpu, self._begun = self._worked(), time.perf_counter()

    def stop(self) -> None:
        """Take the time of a round, and the memory after it."""
        self.seconds.append(time.perf_counter() - self._begun)
        self.of_cpu.append(sum(now - self._cpu.get(pid, 0.0) for pid, now in self._worked().items()))
        self.peak_bytes = max(self.peak_bytes, sum(one.memory_full_info().pss for one in self._processes()))

    @staticmethod
    def _processes() -> list[psutil.Process]:
        return [psutil.Process(), *psutil.Process().children(recursive=True)]

    def _worked(self) -> dict[int, float]:
        """Return the CPU seconds of each process, to the nanosecond; see clock_getcpuclockid(3)."""
        return {one.pid: time.clock_gettime(~one.pid << 3 | 2) for one in self._processes()}


def simulate(workload: str, folder: str, rounds: int) -> tuple[ArrayRecord, Clock]:
    """Run the rounds and return the model and their times."""
    files = Data(folder, torch.device("cpu"))
    cohort, count, samples, tests = len(files.cohorts[0]), len(files.clients), len(files.clients[0][1]), files.tests
    del files  # of which this process needs no more
    steps = -(-samples // MODELS[workload][1])
    torch.manual_seed(0)
    server, clock, found = MODELS[workload][0](), Clock(), []

    def counted(replies: list[RecordDict], _: str) -> MetricRecord:
        done = [sum(reply["counts"][name] for reply in replies) for name in ("num-examples", "steps")]
        if done != [cohort * samples, cohort * steps]:
            raise RuntimeError(f"samples and steps of a round: expected {cohort} × {samples}, {steps}; got {done}")
        return MetricRecord({"clients": len(replies)})

    def after_round(number: int, arrays: ArrayRecord) -> None:
        if number > 0:
            if tests and number % EVALUATE_EVERY == 0:
                server.load_state_dict(arrays.to_torch_state_dict())
                evaluate(server, tests)
            clock.stop()
        clock.start()

    server_app = ServerApp()

    @server_app.main()
    def run(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=cohort / count,
            fraction_evaluate=0.0,
            min_train_nodes=cohort,
            train_metrics_aggr_fn=counted,
        )
        config = ConfigRecord({"workload": workload, "folder": folder})
        initial = ArrayRecord(server.state_dict())
        found.append(strategy.start(grid, initial, rounds, train_config=config, evaluate_fn=after_round))

    one = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
    run_simulation(server_app, client_app, count, backend_config=one)
    (result,) = found
    if len(result.train_metrics_clientapp) != rounds:
        raise RuntimeError(f"rounds with replies: expected {rounds}, got {len(result.train_metrics_clientapp)}")
    return result.arrays, clock


def main(workload: str, folder: str, rounds: str = "25", warm_up: str = "5", device: str = "cpu") -> None:
    """Run the rounds and print their times, medians or means."""
    if device != "cpu":
        sys.exit("flower_rounds.py is for a CPU")
    counted, left_out = int(rounds), int(warm_up)
    _, clock = simulate(workload.partition("-")[0], str(Path(folder).resolve()), counted + left_out)
    evaluates = workload == "pfl-cifar10"
    key, middle = ("ms_mean", fmean) if evaluates else ("ms_med", median)
    times = {key: 1e3 * middle(clock.seconds[left_out:]), f"cpu_{key}": 1e3 * middle(clock.of_cpu[left_out:])}
    print(json.dumps({**times, "peak_bytes": clock.peak_bytes, "rounds": counted, "torch": torch.__version__}))


if __name__ == "__main__":
    from flower_rounds import main as by_name  # actors import it by name, and so keep what they have loaded

    by_name(*sys.argv[1:6])
