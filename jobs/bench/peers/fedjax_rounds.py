"""The rounds of `jobs/bench/bare.py` by fedjax (0.0.17, JAX on one CPU thread or one GPU).

In the interface of ``hpcfed bench --own``.

Usage: fedjax_rounds.py (mlp | cnn | logistic) FOLDER [ROUNDS] [WARM-UP ROUNDS] [DEVICE]

It runs in an environment of its own, and uses nothing of hpcfed. Compilation falls into the warm-up.
"""

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"
if "".join(sys.argv[5:6]) in ("", "cpu"):
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # other contenders share the GPU

import fedjax
import h5py
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg

jax.tree_map = jax.tree_util.tree_map  # which fedjax calls by the name that later versions of JAX lack

LR, WEIGHT_DECAY = 0.1, 1e-4
BATCH = {"mlp": 50, "cnn": 50, "logistic": 5}
WIDTHS = {"mlp": (784, 200, 100, 10), "cnn": (64 * 5 * 5, 394, 192, 10), "logistic": (60, 5)}


def initial(name):
    """Return the parameters: normal with the variance that keeps activations of their size."""
    draw = np.random.default_rng(0)
    shapes = [(64, 3, 5, 5), (64, 64, 5, 5)] if name == "cnn" else []
    filters = [(draw.normal(size=s) * np.prod(s[1:]) ** -0.5, np.zeros((s[0], 1, 1))) for s in shapes]
    layers = [(draw.normal(size=(a, b)) * a**-0.5, np.zeros(b)) for a, b in pairwise(WIDTHS[name])]
    return jax.tree_util.tree_map(lambda part: jnp.asarray(part, jnp.float32), {"filters": filters, "layers": layers})


def logits(parameters, x):
    """Return (B, classes) of x, (B, …)."""
    for weight, bias in parameters["filters"]:
        x = jax.nn.relu(jax.lax.conv(x, weight, (1, 1), "VALID") + bias)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for weight, bias in parameters["layers"][:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = parameters["layers"][-1]
    return x @ weight + bias


def loss(parameters, batch):
    """Return the mean cross-entropy with weight decay."""
    log_p = jax.nn.log_softmax(logits(parameters, batch["x"]))
    decay = sum(jnp.sum(part**2) for part in jax.tree_util.tree_leaves(parameters))
    return -jnp.mean(jnp.take_along_axis(log_p, batch["y"][:, None], 1)) + WEIGHT_DECAY / 2 * decay


def main(name: str, folder: str, rounds: str = "25", warm_up: str = "5") -> None:
    """Run the rounds and print their median times."""
    name = name.partition("-")[0]
    counted, left_out = int(rounds), int(warm_up)
    with h5py.File(Path(folder) / "federation.h5") as file:
        x, y, bounds = (file[f"train/{part}"][()] for part in ("x", "y", "offsets"))
    clients = [
        fedjax.ClientDataset({"x": np.float32(x[a:b]), "y": np.int32(y[a:b])}) for a, b in pairwise(bounds.tolist())
    ]
    cohorts = json.loads((Path(folder) / "cohorts.json").read_text())
    gradient = jax.grad(loss)
    algorithm = fed_avg.federated_averaging(
        lambda parameters, batch, rng: gradient(parameters, batch),
        fedjax.optimizers.sgd(LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH[name]),
    )
    state, keys = algorithm.init(initial(name)), jax.random.split(jax.random.PRNGKey(0), len(clients))
    seconds, of_cpu = [], []
    for cohort in cohorts[: counted + left_out]:
        started, worked = time.perf_counter(), time.process_time()
        state, _ = algorithm.apply(state, [(client, clients[client], keys[client]) for client in cohort])
        jax.block_until_ready(state.params)
        seconds.append(time.perf_counter() - started)
        of_cpu.append(time.process_time() - worked)
    times = {"ms_med": 1e3 * median(seconds[left_out:]), "cpu_ms_med": 1e3 * median(of_cpu[left_out:])}
    print(json.dumps({**times, "rounds": counted, "jax": jax.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:5])  # the device is set above
