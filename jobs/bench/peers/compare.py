"""Rounds of hpcfed beside a bare loop, fedjax and pfl, in one run.

    python jobs/bench/peers/compare.py [WORKLOAD ...] [--environments FOLDER] [OPTION OF `hpcfed bench rounds` ...]

The peers are installed apart, each once into a virtual environment in FOLDER. Workloads: mlp, cnn, logistic (default:
all three). On a machine of few cores start it by ``taskset -c 1``, and compare the CPU times.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = {
    "fedjax": ("fedjax==0.0.17", "jax==0.10.2", "jaxlib==0.10.2", "dm-haiku==0.0.17", "optax==0.2.8", "h5py"),
    "pfl": ("pfl==0.6.0", "torch==2.13.0", "h5py"),
}


def python_of(peer: str, environments: Path) -> Path:
    """Return the Python of a peer's environment, which is made if there is none."""
    folder = environments.resolve() / peer
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        print(f"installing {peer} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PEERS[peer]], check=True)
        made.touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounds of hpcfed beside a bare loop, fedjax and pfl.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD")
    parser.add_argument("--environments", type=Path, default=Path("runs/peers"))
    known, options = parser.parse_known_args()
    command = [sys.executable, "-m", "hpcfed", "bench", "rounds", *(known.workloads or ("mlp", "cnn", "logistic"))]
    for peer in PEERS:
        loop = [str(python_of(peer, known.environments)), str(HERE / f"{peer}_rounds.py")]
        command += ["--own", f"{peer}={shlex.join(loop)} {{workload}} {{folder}} {{rounds}} {{warm_up}}"]
    sys.exit(subprocess.run([*command, *options], check=False).returncode)


if __name__ == "__main__":
    main()
