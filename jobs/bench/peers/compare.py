"""Rounds of hpcfed beside a bare loop, fedjax, pfl, FedLab, Flower's simulation and blazefl, in one run.

    python jobs/bench/peers/compare.py [WORKLOAD ...] [--environments FOLDER | --here] [OPTION OF `hpcfed bench` ...]

The peers are installed apart, each once into a virtual environment in FOLDER; --here takes those of this environment,
as on a machine without internet. blazefl needs Python 3.12 or 3.13, by that name on the PATH, and is left out with a
remark where there is none. Workloads: mlp, cnn, logistic (default: all three) and the others, which pfl, Flower and
blazefl run, but not fedjax and FedLab. `{workload}` in an option is replaced. On a machine of few cores start it by
``taskset -c 1``, and compare the CPU times, which are, as the memory, of all processes of a peer.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = {
    "fedjax": ("fedjax==0.0.17", "jax==0.10.2", "jaxlib==0.10.2", "dm-haiku==0.0.17", "optax==0.2.8", "h5py"),
    "pfl": ("pfl==0.6.0", "torch==2.13.0", "h5py"),
    "fedlab": ("fedlab==1.3.0", "torch===2.13.0", "h5py"),  # PyPI's own: its torchvision loads with no +cpu build
    "flower": ("flwr[simulation]==1.42.0", "ray==2.55.1", "torch==2.13.0", "h5py", "psutil"),
    "blazefl": ("blazefl[contrib,reproducibility]==2.0.3", "torch==2.13.0", "h5py"),
}
PYTHONS = {"blazefl": ("3.12", "3.13")}
"""Of a peer that does not run on all of hpcfed's."""
WORKLOADS = dict.fromkeys(("fedjax", "fedlab"), ("mlp", "cnn", "logistic"))
"""Of a peer that does not run all of them."""


def python_of(peer: str, environments: Path) -> Path | None:
    """Return the Python of a peer's environment, which is made if there is none; None without a Python to make it."""
    folder = environments.resolve() / peer
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        base = base_of(peer)
        if base is None:
            return None
        print(f"installing {peer} into {folder}", flush=True)
        subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PEERS[peer]], check=True)
        made.touch()
    return python


def base_of(peer: str) -> str | None:
    """Return a Python that a peer runs on: this one, or one of the PATH, which must start; None if there is none."""
    versions = PYTHONS.get(peer)
    if versions is None or f"{sys.version_info.major}.{sys.version_info.minor}" in versions:
        return sys.executable
    found = [path for path in (shutil.which(f"python{version}") for version in versions) if path]
    works = (
        path for path in found if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    )
    return next(works, None)


def loops(workload: str, environments: Path | None) -> list[str]:
    """Return the options of `hpcfed bench rounds` that add the peers; without environments those installed here."""
    found = []
    for peer, requirements in PEERS.items():
        if workload.partition("-")[0] not in WORKLOADS.get(peer, (workload.partition("-")[0],)):
            continue
        if environments is None and importlib.util.find_spec(re.split(r"\W", requirements[0])[0]) is None:
            print(f"{peer} is not installed here", flush=True)
            continue
        python = sys.executable if environments is None else python_of(peer, environments)
        if python is None:
            print(f"{peer} is left out: it needs Python {' or '.join(PYTHONS[peer])} on the PATH", flush=True)
            continue
        loop = shlex.join([str(python), str(HERE / f"{peer}_rounds.py")])
        found += ["--own", f"{peer}={loop} {{workload}} {{folder}} {{rounds}} {{warm_up}} {{device}}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=Path("runs/peers"), help="default: %(default)s")
    parser.add_argument("--here", action="store_true", help="take peers that are installed in this environment")
    workloads = list(takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    known, options = parser.parse_known_args(sys.argv[1 + len(workloads) :])
    codes = []
    for workload in workloads or ("mlp", "cnn", "logistic"):
        peers = loops(workload, None if known.here else known.environments)
        own = [option.replace("{workload}", workload) for option in options]
        command = [sys.executable, "-m", "hpcfed", "bench", "rounds", workload, *peers, *own]
        codes.append(subprocess.run(command, check=False).returncode)
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
