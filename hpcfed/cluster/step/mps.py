"""NVIDIA's Multi-Process Service (MPS) on the nodes of a SLURM job: ranks that share a GPU compute at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SERVE = """mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
nvidia-cuda-mps-control -f
rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
"""
AWAIT = """command -v nvidia-cuda-mps-control || exit 1
for _ in {1..100}; do echo get_server_list | nvidia-cuda-mps-control && exit; sleep 0.1; done
exit 1
"""
END = "echo quit -t 10 | nvidia-cuda-mps-control"
"""Shell commands for each node: start the MPS daemon, wait until it answers, stop it. The daemon runs in a separate job
step, since SLURM ends the processes that a step leaves behind.
"""
ENDS_WITHIN = 15.0
"""Seconds for the MPS daemons to end; after that their job step is terminated."""


def shares_gpus() -> bool:
    """Return whether the SLURM job of this process has GPUs, and more ranks than GPUs on a node."""
    ranks, gpus = (os.environ.get(name, "") for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE"))
    return ranks.isdecimal() and gpus.isdecimal() and int(ranks) > int(gpus) > 0


@contextmanager
def serve() -> Iterator[dict[str, str]]:
    """Run MPS on all nodes of the SLURM job during the context; yield the environment variables that ranks need for it.

    If MPS does not start, a line on stderr says so, and the ranks that share a GPU take turns.
    """
    folder, nodes = f"/tmp/hpcfed-mps-{os.environ['SLURM_JOB_ID']}", os.environ["SLURM_JOB_NUM_NODES"]
    variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    once_a_node = ["srun", "--overlap", "--mpi=none", "--cpu-bind=none", f"--nodes={nodes}", f"--ntasks={nodes}"]
    once_a_node += ["--ntasks-per-node=1", "--cpus-per-task=1", "--quiet", "bash", "-c"]

    def on_nodes(shell: str) -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        return subprocess.Popen(
            [*once_a_node, shell], env={**os.environ, **variables}, stdin=null, stdout=null, stderr=null
        )

    servers = on_nodes(SERVE)
    if on_nodes(AWAIT).wait() != 0:
        print("hpcfed: MPS is not up on every node, so ranks that share a GPU take turns", file=sys.stderr, flush=True)
    try:
        yield variables
    finally:
        on_nodes(END).wait()
        try:
            servers.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            servers.terminate()
            servers.wait()
