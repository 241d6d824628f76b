"""Findings on what is slow or wrong in a job, each with its remedy.

Each check is a pure function of the facts that yields `(what, remedy)`. Equal findings on several hosts are merged.
The thresholds are the constants below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hpcfed.cluster.doctor.facts import Facts, Host, Rank
from hpcfed.errors import first_of
from hpcfed.ranks.world import SHM_BYTES

Found = tuple[str, str]
"""(what is slow or wrong, its remedy)."""

PROCESS_BYTES = 512 * 2**20
"""Bytes of memory of one rank with torch loaded and a small model."""
ROOM_BYTES = 2**30
"""Bytes of free disk space that a run needs for its record and models."""
LITTLE_TIME = 600.0
"""Seconds left until the time limit below which a job is reported."""
SLOW_RANK = 0.5
"""A rank below this fraction of the fastest rank's speed is reported, since every round waits for it."""
SLOW_ALLREDUCE_S = 1e-3
"""Seconds above which an Allreduce of 8 bytes is reported. TCP between two hosts takes 0.1 ms; a millisecond means
that ranks wait for a core.
"""
SLOW_LINK_GB_PER_S = 0.125
"""A large Allreduce below this rate, in GB/s, is reported: it is the bandwidth of 1 Gbit/s Ethernet."""
SLOW_FILE_S = 0.2
"""Seconds for writing one small file above which a folder is reported: a run writes several at its start and end."""


@dataclass(frozen=True)
class Finding:
    """A problem of a job: its place (hosts, or a part such as ``MPI``), what is slow or wrong, and the remedy."""

    where: str
    what: str
    remedy: str


def find(facts: Facts) -> list[Finding]:
    """Return all findings: first those of the host checks, then those of the job checks."""
    found: dict[Found, list[str]] = {}
    for host in facts.hosts:
        for check in HOST_CHECKS:
            for finding in check(host):
                found.setdefault(finding, []).append(host.name)
    findings = [Finding(_name_hosts(hosts, len(facts.hosts)), *finding) for finding, hosts in found.items()]
    return findings + [Finding(where, *finding) for where, check in JOB_CHECKS for finding in check(facts)]


def _crowded_cores(host: Host) -> Iterator[Found]:
    """Yield a finding for each set of cores that is smaller than the number of ranks confined to it."""
    for mask in dict.fromkeys(frozenset(rank.cores) for rank in host.ranks):
        inside = [rank for rank in host.ranks if mask.issuperset(rank.cores)]
        if len(inside) <= len(mask):
            continue
        total = inside[0].host_cores
        if len(mask) == total:
            yield f"{len(inside)} ranks on {total} cores", f"start at most {total} ranks there: waiting ranks spin"
        else:
            cores = ", ".join(map(str, sorted(mask)))
            remedy = "give each rank its own: mpirun --bind-to core, srun --cpus-per-task=1 --cpu-bind=cores"
            yield f"{len(inside)} ranks may use only core {cores} of {total}", remedy


def _too_many_threads(host: Host) -> Iterator[Found]:
    """Yield a finding if a library's threads in all ranks outnumber the cores; `hpcfed run` sets only torch's."""
    ranks, cores = len(host.ranks), len(host.cores)
    sizes = {name: max(rank.threads.get(name, 0) for rank in host.ranks) for name in host.ranks[0].threads}
    large = [f"{name} {size}" for name, size in sizes.items() if size > 1 and size * ranks > cores]
    if large:
        share = max(1, cores // ranks)
        among = "" if ranks == 1 else f" for {ranks} ranks"
        yield (
            f"more threads than the {cores} cores{among}: {', '.join(large)} in each rank",
            f"export OMP_NUM_THREADS={share}; hpcfed run sets torch's threads itself (threads in the recipe, 1 by "
            "default), but not those of numpy nor of other programs",
        )


def _little_memory(host: Host) -> Iterator[Found]:
    free = min(rank.memory_free_bytes for rank in host.ranks)
    if free < PROCESS_BYTES * len(host.ranks):
        yield (
            f"little memory is free for {len(host.ranks)} more of these processes",
            "start fewer ranks per host, or ask for more memory",
        )
    shm = [rank.shm_free_bytes for rank in host.ranks if rank.shm_free_bytes is not None]
    if len(host.ranks) > 1 and shm and min(shm) < SHM_BYTES * len(host.ranks):
        yield (
            f"/dev/shm has less than {SHM_BYTES // 2**20} MiB free for each of {len(host.ranks)} ranks, which talk "
            "through it",
            "enlarge it (docker run --shm-size=1g, apptainer --bind /dev/shm), or remove what others left there",
        )


def _gpus(host: Host) -> Iterator[Found]:
    """Yield findings on GPUs that are shared by ranks, unused, far from a rank's cores, or not visible to a process."""
    ranks_of: dict[str, list[Rank]] = {}
    for rank in host.ranks:
        if rank.gpu is not None:
            ranks_of.setdefault(rank.gpu.uuid, []).append(rank)
    most = max(map(len, ranks_of.values()), default=0)
    if most > 1 and not any(rank.mps for rank in host.ranks):
        yield (
            f"up to {most} ranks share a GPU and take turns on it",
            "start one rank per GPU, or NVIDIA's Multi-Process Service on that host (nvidia-cuda-mps-control -d)",
        )
    visible = max((rank.gpu.visible for rank in host.ranks if rank.gpu is not None), default=0)
    if 0 < len(ranks_of) < visible:
        yield f"{len(ranks_of)} of {visible} GPUs are used", f"start {visible} ranks there"
    if len(ranks_of) > visible and not any(uuid.startswith("MIG-") for uuid in ranks_of):  # CUDA shows one slice
        yield (
            f"each rank sees {visible} of {len(ranks_of)} GPUs, so MPI and NCCL copy between them through the host",
            "ask for --gpus-per-node with --gpu-bind=none in place of --gpus-per-task",
        )
    far = [
        f"rank {rank.rank}: cores of node {', '.join(map(str, rank.numa))}, GPU of node {rank.gpu.numa}"
        for rank in host.ranks
        if rank.gpu is not None and rank.gpu.nearer and rank.gpu.numa not in rank.numa
    ]
    if far:
        yield (
            f"{len(far)} of {len(host.ranks)} ranks have a GPU of another NUMA node, since nearer ones are taken "
            f"({first_of(far, 4)})",
            "spread ranks over sockets: srun --distribution=block:cyclic --cpu-bind=cores, mpirun --map-by numa",
        )
    if ranks_of or not host.ranks[0].gpu_driver:
        return
    if host.ranks[0].torch_build == "CPU":
        yield "an NVIDIA driver, but torch is a CPU build", "install a CUDA build of torch to use the GPU"
    elif host.ranks[0].cuda_visible_devices not in ("", "-1"):
        yield (
            f"an NVIDIA driver and a {host.ranks[0].torch_build} build of torch, which sees no GPU",
            "check nvidia-smi there, CUDA_VISIBLE_DEVICES, and whether the job asked for GPUs (--gpus-per-node)",
        )


def _mixed(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each kind of hardware or software that differs between ranks and can change the result."""
    kinds: dict[str, Callable[[Rank], str | None]] = {
        "instruction sets": lambda rank: rank.instructions,
        "CPU models": lambda rank: rank.cpu,
        "GPU models": lambda rank: rank.gpu.name if rank.gpu else "none",
        "torch builds": lambda rank: f"{rank.versions['torch']} ({rank.torch_build})",
        "numpy versions": lambda rank: rank.versions["numpy"],
        "Python versions": lambda rank: rank.versions["python"],
        "hpcfed versions": lambda rank: rank.versions["hpcfed"],
    }
    for kind, value_of in kinds.items():
        if values := _differing(facts, value_of):
            remedy = "use hosts of one kind (sbatch --constraint=…) and one environment"
            yield f"ranks have different {kind}: {values}, so bits depend on which rank trains which client", remedy


def _differing(facts: Facts, value_of: Callable[[Rank], str | None]) -> str:
    """Return, as text, the different values of the ranks, each with its first host; "" if all ranks have the same."""
    hosts: dict[str, str] = {str(value_of(rank)): rank.host for rank in reversed(facts.ranks)}
    return ", ".join(f"{value} ({host})" for value, host in sorted(hosts.items())) if len(hosts) > 1 else ""


def _mixed_code(facts: Facts) -> Iterator[Found]:
    copies = {rank.code: rank for rank in reversed(facts.ranks)}
    if len(copies) > 1:
        ranks = sorted((rank.rank, code, rank.host) for code, rank in copies.items())
        found = ", ".join(f"{code} (rank {number} on {host})" for number, code, host in ranks)
        yield f"ranks run different code of hpcfed: {found}, and runs refuse to start", "unpack one copy on every node"


def _mpi(facts: Facts) -> Iterator[Found]:
    mpi, alone = facts.mpi, len(facts.ranks) == 1
    if mpi.library is None:
        yield (
            f"no MPI library can be loaded, so runs have one rank ({mpi.problem})",
            "load the site's MPI module, or pip install mpich",
        )
        return
    if libraries := _differing(facts, lambda rank: rank.versions.get("mpi")):
        yield (
            f"ranks load different MPI libraries: {libraries}, and what one sends another may not understand",
            "load the same MPI module on every node, in the job script rather than in a shell's start-up files",
        )
    open_mpi = "Open MPI"
    if alone and mpi.mpirun_vendor and (mpi.mpirun_vendor == open_mpi) != (mpi.vendor == open_mpi):
        yield (
            f"{mpi.mpirun} is {mpi.mpirun_vendor}'s, but mpi4py loads {mpi.library}: it would start ranks that do not "
            "know each other",
            f"put the mpirun of {mpi.library} first on the PATH",
        )
    if mpi.threads not in (None, "multiple"):
        yield (
            f"the MPI library grants the thread level {mpi.threads!r} only, so a rank that fails while others wait "
            "may not end the job",
            "use a build of MPI with MPI_THREAD_MULTIPLE",
        )
    if mpi.vendor == open_mpi and facts.launcher and len(facts.hosts) == 1 and facts.btl is None:
        yield "Open MPI looks for a network for about a second at start", "on one host only: export OMPI_MCA_btl=^ofi"


def _folders(facts: Facts) -> Iterator[Found]:
    working, temporary = facts.working, facts.temporary
    if working.problem:
        yield (
            f"the working folder {working.path} cannot be written ({working.problem}), and runs/ goes there",
            "set output in the recipe, or start elsewhere",
        )
    elif working.free_bytes < ROOM_BYTES:
        yield f"less than 1 GiB is free in the working folder {working.path}", "set output in the recipe to another"
    if temporary.problem:
        yield f"the temporary folder {temporary.path} cannot be written ({temporary.problem})", "set TMPDIR"
    locking = (facts.hdf5_locking or "").upper()
    if locking in ("TRUE", "1"):
        yield (
            f"HDF5_USE_FILE_LOCKING={facts.hdf5_locking} makes HDF5 lock federation files, which fails on many "
            f"parallel file systems{'' if working.locks else f' and on this one ({working.filesystem})'}",
            "unset HDF5_USE_FILE_LOCKING: hpcfed opens them without locks",
        )


def _job(facts: Facts) -> Iterator[Found]:
    job = facts.job
    if job is None:
        return
    if job.nodes and job.nodes > len(facts.hosts):
        yield f"ranks on {len(facts.hosts)} of {job.nodes} nodes of the job", "start the ranks with srun or mpirun"
    if job.seconds_left is not None and job.seconds_left < LITTLE_TIME:
        yield f"the job ends in {max(0, job.seconds_left) / 60:.0f} min", "submit with a longer --time"


def _measurements(facts: Facts) -> Iterator[Found]:
    measured = facts.measured
    if measured is None:
        return
    fastest = max(measured.gflops)
    slow = [rank for rank, rate in zip(facts.ranks, measured.gflops, strict=True) if rate < SLOW_RANK * fastest]
    if slow:
        names = first_of([f"{rank.rank} on {rank.host}" for rank in slow], 4)
        yield (
            f"rank {names} computes at less than half the speed of the fastest, and every round waits for it",
            "look for other work on those cores (top), shared hyperthreads, or another kind of CPU",
        )
    if measured.allreduce_small_s is not None and measured.allreduce_small_s > SLOW_ALLREDUCE_S:
        yield (
            f"an Allreduce of 8 bytes takes {measured.allreduce_small_s * 1e3:.1f} ms, where 0.1 is ordinary",
            "start no more ranks than free cores; between hosts, check that MPI uses the fast network",
        )
    speed = measured.allreduce_large_gb_per_s
    if speed is not None and speed < SLOW_LINK_GB_PER_S and len(facts.hosts) > 1:
        yield (
            f"a large Allreduce runs at {speed:.3f} GB/s, no more than 1 Gbit/s Ethernet",
            "check that MPI uses the fast network (fi_info, ucx_info -d), or use fewer hosts",
        )
    if measured.small_file_s is not None and measured.small_file_s > SLOW_FILE_S:
        yield (
            f"writing one small file in the working folder takes {measured.small_file_s:.2f} s",
            "set output in the recipe to a faster file system",
        )


def _name_hosts(hosts: Sequence[str], total: int) -> str:
    return f"all {total} hosts" if len(hosts) == total > 1 else first_of(hosts, 4)


HOST_CHECKS: tuple[Callable[[Host], Iterator[Found]], ...] = (_crowded_cores, _too_many_threads, _little_memory, _gpus)
JOB_CHECKS: tuple[tuple[str, Callable[[Facts], Iterator[Found]]], ...] = (
    ("ranks", _mixed),
    ("ranks", _mixed_code),
    ("MPI", _mpi),
    ("files", _folders),
    ("SLURM", _job),
    ("measured", _measurements),
)
