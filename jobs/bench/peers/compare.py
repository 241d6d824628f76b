"""Rounds of hpcfed beside a bare loop, fedjax, pfl and FedLab, in one run.

    python jobs/bench/peers/compare.py [WORKLOAD ...] [--environments FOLDER | --here] [OPTION OF `hpcfed bench` ...]

The peers are installed apart, each once into a virtual environment in FOLDER; --here takes those of this environment,
as on a machine without internet. Workloads: mlp, cnn, logistic (default: all three) and the others, which pfl runs, but
not fedjax and FedLab. `{workload}` in an option is replaced. On a machine of few cores start it by ``taskset -c 1``,
and compare the CPU times.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = {
    "fedjax": ("fedjax==0.0.17", "jax==0.10.2", "jaxlib==0.10.2", "dm-haiku==0.0.17", "optax==0.2.8", "h5py"),
    "pfl": ("pfl==0.6.0", "torch==2.13.0", "h5py"),
    "fedlab": ("fedlab==1.3.0", "torch==2.13.0", "h5py"),
}


WORKLOADS = dict.fromkeys(("fedjax", "fedlab"), ("mlp", "cnn", "logistic"))
"""Of a peer that does not run all of them."""


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


def loops(workload: str, environments: Path | None) -> list[str]:
    """Return the options of `hpcfed bench rounds` that add the peers; without environments those installed here."""
    found = []
    for peer in PEERS:
        if workload.partition("-")[0] not in WORKLOADS.get(peer, (workload.partition("-")[0],)):
            continue
        if environments is None and importlib.util.find_spec(peer) is None:
            print(f"{peer} is not installed here", flush=True)
            continue
        python = sys.executable if environments is None else str(python_of(peer, environments))
        loop = shlex.join([python, str(HERE / f"{peer}_rounds.py")])
        found += ["--own", f"{peer}={loop} {{workload}} {{folder}} {{rounds}} {{warm_up}} {{device}}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounds of hpcfed beside a bare loop, fedjax, pfl and FedLab.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD")
    parser.add_argument("--environments", type=Path, default=Path("runs/peers"))
    parser.add_argument("--here", action="store_true", help="take peers that are installed in this environment")
    known, options = parser.parse_known_args()
    codes = []
    for workload in known.workloads or ("mlp", "cnn", "logistic"):
        peers = loops(workload, None if known.here else known.environments)
        own = [option.replace("{workload}", workload) for option in options]
        command = [sys.executable, "-m", "hpcfed", "bench", "rounds", workload, *peers, *own]
        codes.append(subprocess.run(command, check=False).returncode)
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
