"""Hosts on this machine: namespaces with a network, a name and shared memory of their own, joined by a relay.

The file system, the processes and the cores are this machine's. A link's rate is limited by the host's own queue
(htb), its delay by the relay: not every kernel has netem.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil

from tests.launch import LEAKED, OPEN_MPI, ROOT, Completed, launcher

RELAY = Path(__file__).with_name("relay.py")
PROGRAMS = ("ip", "tc", "nsenter", "unshare", "setpriv")
PACKAGES = "apt-get install -y --no-install-recommends iproute2"
TUN = Path("/dev/net/tun")
MTU = 9000


def missing() -> str:
    """Return what a network on this machine lacks, "" if nothing."""
    if os.geteuid() != 0:
        return "this is not root"
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
    programs = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if programs:
        return f"no {', '.join(programs)} here; {PACKAGES}"
    return "" if TUN.exists() else f"no {TUN} here"


class Hosts:
    """Running hosts ``h1``, ``h2``, …; made by `hosts`.

    Attributes:
        names: of all hosts.
        folder: for files of the hosts.
    """

    def __init__(self, folder: Path, pids: Sequence[int], relay: subprocess.Popen[str]):
        self.folder = folder
        self.names = [f"h{number}" for number in range(1, len(pids) + 1)]
        self._pids = dict(zip(self.names, pids, strict=True))
        self._relay = relay
        self._rsh = folder / "rsh"
        for number, name in enumerate(self.names, 1):
            (folder / name).mkdir()
            boot_id = folder / f"boot-id-{name}"  # by it MPI libraries tell whether two ranks share memory
            boot_id.write_text(f"{uuid4()}\n")
            files = {"hosts": folder / "hosts", "boot_id": boot_id}
            self._call(name, _SET_UP.format(name=name, number=number, mtu=MTU, **files))
        self.link()

    def inside(self, host: str, *command: str) -> list[str]:
        """Return a command that runs another on a host."""
        return ["nsenter", "-t", str(self._pids[host]), "-p", "-n", "-u", "-i", "-m", *command]

    def link(self, rate: float = 10e9, delay: float = 0.0) -> None:
        """Set the rate, bits a second, of every host's link, and the delay, seconds, from any host to another."""
        for name in self.names:
            self._call(name, f"tc class change dev eth0 parent 1: classid 1:1 htb rate {rate:.0f}bit quantum {MTU}")
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{delay}\n")
        self._relay.stdin.flush()

    def pull(self, host: str) -> None:
        """Take a host's link down."""
        self._call(host, "ip link set eth0 down")

    def plug(self, host: str) -> None:
        """Take a host's link up again."""
        self._call(host, "ip link set eth0 up")

    def mpirun(self, python: str, ranks: int, hosts: Sequence[str] | None = None) -> list[str]:
        """Return the start of a command line, to be run on the first host: ranks spread over hosts in equal blocks."""
        names = list(hosts or self.names)
        each = -(-ranks // len(names))
        mpi = launcher(python)
        if mpi.mpi == "MPICH":
            where = ("-launcher", "ssh", "-launcher-exec", str(self._rsh), "-hosts", ",".join(names), "-ppn", str(each))
            return [mpi.command[0], *where, "-n", str(ranks)]
        where = (
            "--host",
            ",".join(f"{name}:{each}" for name in names),
            "--bind-to",
            "none",
            "--map-by",
            f"ppr:{each}:node",
        )
        agent = ("--prtemca", "plm_ssh_agent", str(self._rsh))
        return [mpi.command[0], *agent, *where, "-n", str(ranks)]

    def start(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, host: str | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host, by default the first."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith((*LEAKED, "SLURM", "OMPI"))}
        settings = {name: value for name, value in OPEN_MPI.items() if "btl" not in name}
        settings["TMPDIR"] = str(self.folder / (host or self.names[0]))
        python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        kept |= settings | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path} | dict(env or {})
        return subprocess.Popen(
            self.inside(host or self.names[0], "env", "-C", str(cwd), *command),
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def finish(self, job: subprocess.Popen[str], timeout: float = 120) -> Completed:
        """Wait for a command to end; on time-out every process of the hosts is killed."""
        began = time.monotonic()
        try:
            stdout, stderr = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            stdout, stderr = job.communicate()
            raise AssertionError(f"not done after {timeout:g} s: {job.args}\n{stdout}\n{stderr}") from None
        return Completed(job.returncode, stdout, stderr, time.monotonic() - began)

    def call(
        self,
        command: Sequence[str],
        cwd: Path,
        *,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> Completed:
        """Run a command on a host to its end."""
        return self.finish(self.start(command, cwd, env, host), timeout)

    def processes(self, host: str) -> list[psutil.Process]:
        """Return the processes on a host, without the one that holds its namespaces."""
        holder = self._pids[host]
        namespace = Path(f"/proc/{holder}/ns/net").readlink()
        return [process for process in psutil.process_iter() if process.pid != holder and _net(process) == namespace]

    def ranks(self, host: str) -> list[psutil.Process]:
        """Return the ranks on a host, without their parents (`hpcfed.ranks.parent`)."""
        found = {}
        for process in self.processes(host):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if process.name().startswith("python") and "hpcfed" in process.cmdline():
                    found[process.pid] = process.ppid(), process
        parents = {parent for parent, _ in found.values()}
        return [process for pid, (_, process) in found.items() if pid not in parents]

    def kill(self, *names: str) -> None:
        """Kill every process on hosts, by default on all."""
        for name in names or self.names:
            for process in self.processes(name):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def _call(self, host: str, script: str) -> None:
        done = subprocess.run(self.inside(host, "sh", "-ec", script), capture_output=True, text=True)
        assert done.returncode == 0, f"{host}: {script}\n{done.stderr}"


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Make `count` hosts with links of 10 Gbit/s and no delay; all that runs on them ends with the block."""
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="net-")))
        world = ends.enter_context(_held(_WORLD, "bash"))
        enter = ("nsenter", "-t", str(world.pid), "-p", "-m")
        holders = [ends.enter_context(_held((*enter, *_HOST), "sleep")) for _ in range(count)]
        _write(folder, holders)
        with _relay(holders) as relay:
            yield Hosts(folder, [holder.pid for holder in holders], relay)


_WORLD = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", "sleep infinity & wait")
"""Holds the hosts' process namespace: when it ends, so does every process in it."""
_HOST = ("unshare", "--net", "--uts", "--ipc", "--mount", "sleep", "infinity")


@contextmanager
def _held(command: Sequence[str], name: str, timeout: float = 10) -> Iterator[psutil.Process]:
    """Start a command that ends with this process, and return the process of that name which it becomes or starts."""
    starter = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *command])
    try:
        deadline = time.monotonic() + timeout
        family = psutil.Process(starter.pid)
        while not (found := [one for one in (family, *family.children(recursive=True)) if one.name() == name]):
            assert time.monotonic() < deadline, f"did not start: {' '.join(command)}"
            time.sleep(0.01)
        yield found[0]
    finally:
        starter.kill()
        starter.wait()


@contextmanager
def _relay(holders: Sequence[psutil.Process]) -> Iterator[subprocess.Popen[str]]:
    command = ["nice", "-n", "-10", sys.executable, str(RELAY), *(str(holder.pid) for holder in holders)]
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n", "the relay did not start"
        yield relay
    finally:
        relay.communicate("")


_SET_UP = """
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount --bind {hosts} /etc/hosts
mount --bind {boot_id} /proc/sys/kernel/random/boot_id
ip link set lo up
ip link set eth0 address 02:00:00:00:00:{number:02x} mtu {mtu} txqueuelen 10000
ip addr add 10.24.0.{number}/24 dev eth0
tc qdisc add dev eth0 root handle 1: htb default 1
tc class add dev eth0 parent 1: classid 1:1 htb rate 10gbit quantum {mtu}
ip link set eth0 up
"""


def _write(folder: Path, holders: Sequence[psutil.Process]) -> None:
    """Write the hosts' /etc/hosts, and the command that starts programs on another host."""
    pids = [_inner(holder.pid) for holder in holders]
    lines = [f"10.24.0.{number} h{number}" for number in range(1, len(pids) + 1)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    cases = "\n".join(f"  h{number}) pid={pid} ;;" for number, pid in enumerate(pids, 1))
    rsh = folder / "rsh"
    rsh.write_text(_RSH.format(cases=cases, folder=folder))
    rsh.chmod(0o755)


_RSH = """#!/bin/sh
# rsh [-x] HOST COMMAND…: as ssh, joins the words and has a shell of that host split them.
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
  *) echo "rsh: no host $1" >&2; exit 255 ;;
esac
export TMPDIR={folder}/$1
shift
exec nsenter -t "$pid" -n -u -i -m sh -c "$*"
"""


def _inner(pid: int) -> str:
    """Return the number that a process has in its own namespace."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))


def _net(process: psutil.Process) -> Path | None:
    try:
        return Path(f"/proc/{process.pid}/ns/net").readlink()
    except OSError:  # it has ended
        return None
