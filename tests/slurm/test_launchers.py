"""Runs under srun and mpirun over two nodes, with each MPI; and wrong launches."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.slurm.conftest import PACKAGES, Cluster, Python

CLUSTERS = ROOT / "docs" / "clusters.md"
HPCFED = ("-m", "hpcfed", "run", "recipe.yaml", "--quiet")
SITE_MPIRUN = Path("/usr/bin/mpirun.openmpi")
SITE_LIBRARY = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")


def left(place: Path) -> tuple[bytes, int]:
    """The final model and the number of ranks that a run left."""
    run = place / "run"
    return (run / "model.safetensors").read_bytes(), json.loads((run / "environment.json").read_text())["ranks"]


def test_srun_over_two_nodes(cluster: Cluster, python: Python, place: Path, reference: bytes) -> None:
    srun = ("srun", "--nodes=2", "--ntasks-per-node=2", f"--mpi={python.pmi}", "--quiet")
    done = cluster.call(*srun, python.path, *HPCFED, cwd=place)
    assert done.returncode == 0, done.stderr
    assert left(place) == (reference, 4)


def test_mpirun_over_two_nodes(cluster: Cluster, python: Python, place: Path, reference: bytes) -> None:
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
    done = cluster.call(*salloc, *python.mpirun, "-n", "2", python.path, *HPCFED, cwd=place)
    assert done.returncode == 0, done.stderr
    assert left(place) == (reference, 2)


def test_a_wrong_pmi_type_is_refused(cluster: Cluster, python: Python, place: Path) -> None:
    """Else srun would start four runs of one rank each in one folder, and say that all is well."""
    wrong = {"pmi2": "none", "pmix": "pmi2"}[python.pmi]
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1", f"--mpi={wrong}", "--quiet")
    done = cluster.call(*srun, python.path, *HPCFED, cwd=place)
    assert done.returncode == 4, done.stderr
    assert "the launcher started 2 ranks, but MPI" in done.stderr
    assert "sees only one; use the launcher of that MPI, or under srun the matching --mpi" in done.stderr
    assert not (place / "run").exists()


def test_mpich_under_pmix_ends_with_the_line_on_the_page(cluster: Cluster, place: Path, pmi: str) -> None:
    if pmi != "pmi2":
        pytest.skip("MPICH UNDER PMIX IS NOT TESTED: this environment has another MPI")
    done = cluster.call("srun", "--ntasks=2", "--mpi=pmix", "--quiet", sys.executable, *HPCFED, cwd=place)
    assert done.returncode == 16, done.stderr
    page = CLUSTERS.read_text(encoding="utf-8")
    (line,) = re.findall(r"^`(Runtime environment .* Aborting\.)`", page, flags=re.MULTILINE)
    assert line in done.stderr


def test_plain_python_in_a_batch_script_works(cluster: Cluster, place: Path, reference: bytes) -> None:
    """Of a job with several tasks, too: no step runs them."""
    program = 'import hpcfed; hpcfed.run("recipe.yaml", quiet=True)'
    number = cluster.submit("--nodes=2", "--ntasks=2", f"--wrap={sys.executable} -c '{program}'", cwd=place)
    cluster.wait(number, JobState="COMPLETED")
    assert left(place) == (reference, 1)


def test_the_sites_open_mpi(cluster: Cluster, place: Path, reference: bytes) -> None:
    """Debian's Open MPI 4 under this interpreter's mpi4py; on one node, since it fails between virtual ones."""
    if not (SITE_MPIRUN.exists() and SITE_LIBRARY.exists()):
        pytest.skip(f"A SITE'S OPEN MPI IS NOT TESTED: no {SITE_MPIRUN} here; {PACKAGES}")
    salloc = ("salloc", "--quiet", "--nodes=1", "--ntasks=2")
    mpirun = (SITE_MPIRUN, "--bind-to", "none", "-n", "2")
    env = {"MPI4PY_LIBMPI": str(SITE_LIBRARY)}
    wrong = cluster.call("srun", "--ntasks=2", "--mpi=pmi2", "--quiet", sys.executable, *HPCFED, cwd=place, env=env)
    assert (wrong.returncode, (place / "run").exists()) == (1, False)
    (line,) = re.findall(
        r"^`(The application appears .* \"srun\",)`", CLUSTERS.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert line in wrong.stderr
    done = cluster.call(*salloc, *mpirun, sys.executable, *HPCFED, cwd=place, env=env)
    assert done.returncode == 0, done.stderr
    assert left(place) == (reference, 2)
    assert "Open MPI v4" in json.loads((place / "run" / "environment.json").read_text())["mpi"]
