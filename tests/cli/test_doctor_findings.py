"""Findings of ``hpcfed doctor`` from made-up facts: each problem is named with its remedy, and no other is."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from hpcfed.cluster.doctor.facts import Facts, Gpu, Rank
from hpcfed.cluster.doctor.findings import find
from hpcfed.cluster.doctor.folders import Folder
from hpcfed.cluster.doctor.launch import LauncherJob, Mpi, abi_of, find_job, find_launcher, vendor_of
from hpcfed.cluster.doctor.probe import Rates
from hpcfed.ranks import world

pytestmark = pytest.mark.one_mpi
GIB = 2**30
VERSIONS = {"hpcfed": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "mpi4py": "4.1.2"}
MPICH = Mpi("MPICH 5.0.2", "MPICH", "MPI 5.0", "MPICH 18:2:6", threads="multiple")
OPEN_MPI = Mpi("Open MPI v5.0.11", "Open MPI", "MPI 3.1", "Open MPI", threads="multiple")
FOLDER = Folder("/home/ada", "ext4", bytes=500 * GIB, free_bytes=100 * GIB)
MEASURED = Rates((90.0, 88.0), (10.0, 9.5), 2e-6, 5.0, 800.0, 0.002)


def rank(number: int, **changes: Any) -> Rank:
    """A rank on a core of its own, of a host with 16 cores and nothing wrong with it."""
    healthy = Rank(
        rank=number,
        host="node1",
        versions=VERSIONS,
        torch_build="CPU",
        cpu="AMD EPYC 9654",
        instructions="AVX512",
        cores=(number,),
        host_cores=16,
        threads={"torch": 1, "openblas": 1},
        memory_bytes=64 * GIB,
        memory_free_bytes=60 * GIB,
        shm_bytes=32 * GIB,
        shm_free_bytes=32 * GIB,
    )
    return replace(healthy, **changes)


def facts(*ranks: Rank, **changes: Any) -> Facts:
    """The facts of a job with nothing wrong but what `ranks` and `changes` say."""
    told = {"mpi": MPICH, "launcher": "srun", "job": None, "working": FOLDER, "temporary": FOLDER}
    return Facts(ranks=ranks or (rank(0), rank(1)), **{**told, **changes})


def gpu_rank(number: int, uuid: str, visible: int, **changes: Any) -> Rank:
    """A rank with a GPU."""
    gpu = Gpu("H200", uuid, 141 * GIB, visible, numa=0)
    return rank(number, **{"gpu": gpu, "gpu_driver": True, "torch_build": "CUDA 12.8", "numa": (0,), **changes})


HEALTHY = {
    "two ranks": facts(measured=MEASURED),
    "alone, as many threads as cores": facts(
        rank(0, cores=(0, 1), host_cores=2, threads={"torch": 2}), launcher=None, job=None
    ),
    "as many ranks as cores, not bound": facts(*(rank(i, cores=(0, 1, 2), host_cores=3) for i in range(3))),
    "the same core numbers on two hosts": facts(rank(0), rank(1, host="node2", cores=(0,))),
    "a GPU each": facts(gpu_rank(0, "GPU-a", 2), gpu_rank(1, "GPU-b", 2)),
    "slices of a GPU": facts(gpu_rank(0, "MIG-a", 1), gpu_rank(1, "MIG-b", 1)),
    "not bound to cores": facts(
        gpu_rank(0, "GPU-a", 1, numa=(0, 1), gpu=Gpu("H200", "GPU-a", 141 * GIB, 1, numa=1, nearer=0))
    ),
    "a GPU shared through MPS": facts(gpu_rank(0, "GPU-a", 1, mps=True), gpu_rank(1, "GPU-a", 1, mps=True)),
    "GPUs hidden on purpose": facts(rank(0, gpu_driver=True, torch_build="CUDA 12.8", cuda_visible_devices="")),
    "a world of one without MPI started": facts(rank(0), mpi=replace(MPICH, threads=None), launcher=None),
    "mpirun of a library with the same interface": facts(rank(0), mpi=replace(MPICH, mpirun_vendor="Intel MPI")),
    "all nodes used": facts(job=LauncherJob("7", 1, "node1", 2, 3600.0)),
    "no locks, none asked for": facts(working=replace(FOLDER, filesystem="lustre", locks=False)),
}

WRONG: dict[str, tuple[Facts, str, str, str]] = {
    # title → facts, place, words, remedy
    "16 threads per rank on 2 cores": (
        facts(*(rank(i, cores=(0, 1), host_cores=2, threads={"torch": 1, "openblas": 16}) for i in range(2))),
        "node1",
        "more threads than the 2 cores for 2 ranks: openblas 16 in each rank",
        "export OMP_NUM_THREADS=1; hpcfed run sets torch's threads itself",
    ),
    "3 ranks with 8 threads on 16 cores": (
        facts(*(rank(i, cores=tuple(range(16)), threads={"torch": 8}) for i in range(3))),
        "node1",
        "torch 8",
        "OMP_NUM_THREADS=5",
    ),
    "more ranks than cores": (
        facts(*(rank(i, cores=(0, 1), host_cores=2) for i in range(3))),
        "node1",
        "3 ranks on 2 cores",
        "at most 2 ranks",
    ),
    "two ranks bound to one core": (
        facts(rank(0, cores=(4,)), rank(1, cores=(4,)), rank(2, cores=(5,))),
        "node1",
        "2 ranks may use only core 4 of 16",
        "--bind-to core",
    ),
    "instruction sets": (
        facts(rank(0), rank(1, host="node2", instructions="AVX2")),
        "ranks",
        "different instruction sets: AVX2 (node2), AVX512 (node1)",
        "--constraint",
    ),
    "CPU models": (facts(rank(0), rank(1, cpu="Intel Xeon 8592+")), "ranks", "different CPU models", "one kind"),
    "torch builds": (
        facts(rank(0), rank(1, versions={**VERSIONS, "torch": "2.12.1"})),
        "ranks",
        "different torch builds: 2.12.1 (CPU) (node1), 2.13.0 (CPU) (node1)",
        "one environment",
    ),
    "copies of hpcfed": (
        facts(rank(0, code="1a"), rank(1, host="node2", code="2b")),
        "ranks",
        "ranks run different code of hpcfed: 1a (rank 0 on node1), 2b (rank 1 on node2), and runs refuse to start",
        "unpack one copy on every node",
    ),
    "MPI libraries": (
        facts(
            rank(0, versions={**VERSIONS, "mpi": "MPICH Version: 4.3.0"}),
            rank(1, host="node2", versions={**VERSIONS, "mpi": "MPICH Version: 5.0.2"}),
        ),
        "MPI",
        "different MPI libraries: MPICH Version: 4.3.0 (node1), MPICH Version: 5.0.2 (node2)",
        "same MPI module",
    ),
    "a GPU on one rank only": (
        facts(gpu_rank(0, "GPU-a", 1), rank(1, host="node2", torch_build="CUDA 12.8")),
        "ranks",
        "different GPU models: H200 (node1), none (node2)",
        "one kind",
    ),
    "ranks sharing a GPU": (
        facts(*(gpu_rank(i, "GPU-a", 1) for i in range(3))),
        "node1",
        "up to 3 ranks share a GPU",
        "Multi-Process Service",
    ),
    "idle GPUs": (facts(gpu_rank(0, "GPU-a", 4)), "node1", "1 of 4 GPUs are used", "start 4 ranks"),
    "a GPU of another socket": (
        facts(
            gpu_rank(0, "GPU-a", 2), gpu_rank(1, "GPU-b", 2, gpu=Gpu("H200", "GPU-b", 141 * GIB, 2, numa=1, nearer=1))
        ),
        "node1",
        "1 of 2 ranks have a GPU of another NUMA node, since nearer ones are taken (rank 1: cores of node 0, GPU of ",
        "--distribution=block:cyclic",
    ),
    "a GPU visible to each": (
        facts(gpu_rank(0, "GPU-a", 1), gpu_rank(1, "GPU-b", 1)),
        "node1",
        "each rank sees 1 of 2 GPUs, so MPI and NCCL copy between them through the host",
        "--gpu-bind=none",
    ),
    "torch without CUDA": (facts(rank(0, gpu_driver=True)), "node1", "torch is a CPU build", "CUDA build"),
    "torch sees no GPU": (
        facts(rank(0, gpu_driver=True, torch_build="CUDA 12.8")),
        "node1",
        "sees no GPU",
        "nvidia-smi",
    ),
    "little shared memory": (
        facts(*(rank(i, shm_bytes=64 * 2**20, shm_free_bytes=63 * 2**20) for i in range(2))),
        "node1",
        "/dev/shm has less than 32 MiB free for each of 2 ranks",
        "--shm-size",
    ),
    "little memory": (facts(rank(0, memory_free_bytes=2**28)), "node1", "little memory", "fewer ranks"),
    "no MPI library": (
        facts(rank(0), mpi=Mpi(None, None, None, None, problem="cannot load MPI library"), launcher=None),
        "MPI",
        "runs have one rank (cannot load MPI library)",
        "pip install mpich",
    ),
    "another MPI's mpirun": (
        facts(rank(0), mpi=replace(MPICH, mpirun="/usr/bin/mpirun", mpirun_vendor="Open MPI"), launcher=None),
        "MPI",
        "/usr/bin/mpirun is Open MPI's, but mpi4py loads MPICH 5.0.2",
        "first on the PATH",
    ),
    "MPI without threads": (
        facts(mpi=replace(MPICH, threads="funneled")),
        "MPI",
        "thread level 'funneled' only",
        "MPI_THREAD_MULTIPLE",
    ),
    "Open MPI on one host": (facts(mpi=OPEN_MPI), "MPI", "a second at start", "export OMPI_MCA_btl=^ofi"),
    "unwritable working folder": (
        facts(working=replace(FOLDER, problem="Read-only file system")),
        "files",
        "/home/ada cannot be written (Read-only file system)",
        "set output",
    ),
    "full working folder": (facts(working=replace(FOLDER, free_bytes=2**20)), "files", "less than 1 GiB", "output"),
    "unwritable temporary folder": (
        facts(temporary=replace(FOLDER, problem="No space left on device")),
        "files",
        "temporary folder /home/ada cannot be written",
        "TMPDIR",
    ),
    "HDF5 locks where locks fail": (
        facts(hdf5_locking="TRUE", working=replace(FOLDER, filesystem="lustre", locks=False)),
        "files",
        "HDF5_USE_FILE_LOCKING=TRUE makes HDF5 lock federation files, which fails on many parallel file systems and on "
        "this one (lustre)",
        "unset HDF5_USE_FILE_LOCKING",
    ),
    "idle nodes": (facts(job=LauncherJob("7", 4, "node[1-4]", 2, 3600.0)), "SLURM", "1 of 4 nodes", "srun"),
    "job about to end": (facts(job=LauncherJob("7", 1, "node1", 2, 240.0)), "SLURM", "ends in 4 min", "--time"),
    "a slow rank": (
        facts(measured=replace(MEASURED, gflops=(90.0, 31.0))),
        "measured",
        "rank 1 on node1 computes at less than half",
        "other work on those cores",
    ),
    "a slow Allreduce": (
        facts(measured=replace(MEASURED, allreduce_small_s=0.012)),
        "measured",
        "8 bytes takes 12.0 ms",
        "free cores",
    ),
    "a slow network": (
        facts(rank(0), rank(1, host="node2"), measured=replace(MEASURED, allreduce_large_gb_per_s=0.09)),
        "measured",
        "0.090 GB/s",
        "fast network",
    ),
    "slow files": (
        facts(measured=replace(MEASURED, small_file_s=0.5)),
        "measured",
        "one small file in the working folder takes 0.50 s",
        "faster file system",
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_job(name: str) -> None:
    assert find(HEALTHY[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_thing_is_found_alone_and_with_its_remedy(name: str) -> None:
    told, where, what, remedy = WRONG[name]
    (found,) = find(told)
    assert found.where == where
    assert what in found.what
    assert remedy in found.remedy


def test_equal_findings_of_several_hosts_are_one() -> None:
    crowded = [rank(i, host=f"node{i // 2}", cores=(0,), host_cores=1) for i in range(12)]
    (everywhere,) = find(facts(*crowded))
    assert everywhere.where == "all 6 hosts"
    (elsewhere,) = find(facts(*crowded, rank(12, host="node7")))
    assert elsewhere.where == "node0, node1, node2, node3 and 2 more"


def test_versions_tell_vendor_and_binary_interface() -> None:
    mpich = "MPICH Version:      4.2.0\nMPICH ABI:          16:1:4\n"
    assert (vendor_of(mpich), abi_of("/opt/lib/libmpi.so.12", mpich)) == ("MPICH", "MPICH 16:1:4")
    intel = "Intel(R) MPI Library 2021.12 for Linux* OS"
    assert (vendor_of(intel), abi_of("/opt/lib/libmpi.so.12", intel)) == ("Intel MPI", "MPICH")
    open_mpi = "Open MPI v5.0.3, package: Open MPI, ident: 5.0.3"
    assert (vendor_of(open_mpi), abi_of("/opt/lib/libmpi.so.40", open_mpi)) == ("Open MPI", "Open MPI")
    assert abi_of("/opt/lib/libmpi_abi.so.0", mpich) == "MPI standard"
    assert vendor_of("mpirun (Open MPI) 4.1.4") == vendor_of("prterun (PRRTE) 3.0.8") == "Open MPI"
    assert vendor_of("HYDRA build details:\n    Version: 4.2.0") == "MPICH"
    assert vendor_of("1.0") is None


def test_variables_tell_launcher_and_job() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "PMI_RANK": "0"}
    assert find_launcher(step) == "srun"
    assert find_launcher({**step, "MPI_LOCALRANKID": "0"}) == "MPICH's mpirun"
    assert find_launcher({"SLURM_JOB_ID": "7"}) is None
    assert find_job({"PMI_RANK": "0"}) is None
    end = str(int(time.time()) + 600)
    job = find_job({**step, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_END_TIME": end})
    assert job is not None
    assert (job.id, job.nodes, job.node_list, job.tasks) == ("7", 2, "n[1-2]", 8)
    assert job.seconds_left == pytest.approx(600, abs=5)


def test_little_shared_memory_is_told_before_mpi_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPI_LOCALNRANKS", str(10**9))  # more than any host's memory holds
    said = []
    for number in ("0", "1"):
        monkeypatch.setenv("MPI_LOCALRANKID", number)
        world._warn_of_scant_memory()
        said.append(capsys.readouterr().err)
    assert re.fullmatch(
        r"hpcfed: /dev/shm has .* free for 1000000000 ranks of MPI, which may end .*1g\), or .*\n", said[0]
    )
    assert not said[1]
