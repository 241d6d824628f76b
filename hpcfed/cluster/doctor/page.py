"""The report of ``doctor`` as text: facts, measurements, findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.filesize import decimal
from rich.table import Table

from hpcfed.cluster.doctor.facts import Facts, Host, Rank
from hpcfed.cluster.doctor.findings import Finding
from hpcfed.cluster.doctor.folders import Folder
from hpcfed.cluster.doctor.probe import Rates
from hpcfed.errors import sentence
from hpcfed.io.console import Console

GPU_MEMORY = {True: "takes CUDA memory", False: "takes no CUDA memory", None: None}
"""Text for each value of `Mpi.reads_gpu_memory`; None is left out."""


def show(facts: Facts, findings: Sequence[Finding], console: Console) -> None:
    """Print a table of the facts, a map of the ranks' GPUs if any rank has one, and a line for each finding."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(facts):
        table.add_row(name, text)
    console.print(table)
    if any(rank.gpu for rank in facts.ranks):
        console.print(_gpu_map(facts.ranks))
    console.print()
    if not findings:
        console.print("Nothing looks slow or wrong.")
        return
    console.print("What looks slow or wrong:", style="bold")
    for finding in findings:
        console.print(f"- {sentence(finding.what, where=finding.where, remedy=finding.remedy)}", soft_wrap=True)


def _rows(facts: Facts) -> Iterable[tuple[str, str]]:
    first = facts.ranks[0]
    versions = first.versions
    yield "hpcfed", f"{versions['hpcfed']}, Python {versions['python']}, numpy {versions['numpy']}"
    yield "torch", f"{versions['torch']}, {first.torch_build} build, {first.instructions} instructions"
    yield from _mpi_rows(facts)
    yield "HDF5", f"{versions['hdf5']}, h5py {versions['h5py']}; {_locking(facts)}"
    for host in facts.hosts:
        yield "host", _host(host)
    yield "working folder", _folder(facts.working)
    yield "temporary", _folder(facts.temporary)
    if facts.job is not None:
        left = facts.job.seconds_left
        parts = [f"job {facts.job.id}", f"{facts.job.nodes} nodes ({facts.job.node_list})"]
        parts += [f"{facts.job.tasks} tasks in this step"] if facts.job.tasks else []
        parts += [f"{left / 60:.0f} min left"] if left is not None else []
        yield "SLURM", ", ".join(parts)
    if facts.measured is not None:
        yield from _measured(facts.measured)


def _mpi_rows(facts: Facts) -> Iterable[tuple[str, str]]:
    mpi = facts.mpi
    if mpi.library is None:
        yield "MPI", "none can be loaded"
    else:
        parts = [mpi.library, mpi.standard, mpi.abi and f"{mpi.abi} ABI", mpi.threads and f"thread level {mpi.threads}"]
        parts += [GPU_MEMORY[mpi.reads_gpu_memory]]
        yield "MPI", ", ".join(filter(None, [*parts, f"mpi4py {facts.ranks[0].versions['mpi4py']}"]))
        if mpi.path:
            yield "", mpi.path
    ranks = "1 rank" if len(facts.ranks) == 1 else f"{len(facts.ranks)} ranks"
    hosts = "1 host" if len(facts.hosts) == 1 else f"{len(facts.hosts)} hosts"
    yield "started by", f"{facts.launcher or 'no launcher'}: {ranks} on {hosts}"
    if mpi.mpirun:
        yield "mpirun", f"{mpi.mpirun} ({mpi.mpirun_vendor or 'of an unknown MPI'})"


def _host(host: Host) -> str:
    first = host.ranks[0]
    cores = sorted({len(rank.cores) for rank in host.ranks})
    threads = {name: max(rank.threads.get(name, 0) for rank in host.ranks) for name in first.threads}
    pools = ", ".join(f"{name} {size}" for name, size in threads.items())
    shm = "" if first.shm_bytes is None else f"; /dev/shm {_room(first.shm_free_bytes or 0, first.shm_bytes)}"
    each = str(cores[0]) if len(cores) == 1 else f"{cores[0]} to {cores[-1]}"
    ranks = "rank" if len(host.ranks) == 1 else "ranks"
    return (
        f"{host.name}: {ranks} {_ranges([rank.rank for rank in host.ranks])}; {first.cpu}, {first.host_cores} cores, "
        f"{each} visible to each rank (cores {_ranges(sorted(host.cores))}); threads per rank: {pools}; "
        f"memory {_room(first.memory_free_bytes, first.memory_bytes)}{shm}"
    )


def _gpu_map(ranks: Sequence[Rank]) -> Table:
    table = Table(box=None, pad_edge=False, title="GPU of each rank", title_justify="left")
    for heading in ("rank", "host", "NUMA nodes", "device", "its node", "uuid", "memory", "CUDA_VISIBLE_DEVICES"):
        table.add_column(heading, overflow="fold")
    for rank in ranks:
        gpu = rank.gpu
        node = "" if gpu is None or gpu.numa is None else str(gpu.numa)
        cells = (gpu.name, node, gpu.uuid, decimal(gpu.memory_bytes)) if gpu else ("CPU", "", "", "")
        table.add_row(str(rank.rank), rank.host, _ranges(rank.numa), *cells, rank.cuda_visible_devices or "")
    return table


def _measured(measured: Rates) -> Iterable[tuple[str, str]]:
    yield "matrix product", f"{_spread(measured.gflops)} GFLOP/s on one thread of each rank (float32)"
    yield "memory copy", f"{_spread(measured.copy_gb_per_s)} GB/s on each rank, all at once"
    if measured.allreduce_small_s is not None and measured.allreduce_large_gb_per_s is not None and measured.allreduce:
        middle, (size, seconds) = measured.allreduce[1][1], measured.allreduce[-1]
        large = f"{size >> 20} MiB in {_time(seconds)} ({measured.allreduce_large_gb_per_s:.3g} GB/s)"
        yield "Allreduce", f"8 bytes in {_time(measured.allreduce_small_s)}, 64 KiB in {_time(middle)}, {large}"
        (_, ping), (size, message) = measured.ping_pong
        yield (
            "message",
            f"8 bytes in {_time(ping)}, {size >> 20} MiB in {_time(message)} ({size / 1e9 / message:.3g} GB/s)",
        )
    if measured.write_mb_per_s is not None and measured.small_file_s is not None:
        small = f"a small file in {measured.small_file_s * 1e3:.1f} ms"
        yield "files", f"{measured.write_mb_per_s:.0f} MB/s to disk in the working folder, {small}"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _folder(folder: Folder) -> str:
    state = f"cannot be written: {folder.problem}" if folder.problem else "can be written"
    return f"{folder.path} ({folder.filesystem}): {_room(folder.free_bytes, folder.bytes)}, {state}"


def _locking(facts: Facts) -> str:
    setting = f"HDF5_USE_FILE_LOCKING={facts.hdf5_locking}" if facts.hdf5_locking else "files are opened without locks"
    if facts.working.problem:
        return setting
    return f"{setting} (locks {'work' if facts.working.locks else 'do not work'} in the working folder)"


def _room(free: int, total: int) -> str:
    return f"{decimal(free)} free of {decimal(total)}"


def _spread(rates: Sequence[float]) -> str:
    low, high = f"{min(rates):.1f}", f"{max(rates):.1f}"
    return low if low == high else f"{low} to {high}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted integers as text, with ranges for consecutive ones: ``0–3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in runs)
