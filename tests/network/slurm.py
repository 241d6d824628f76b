"""A SLURM cluster of hosts on this machine: the controller on the first one, a slurmd on each."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.network.hosts import Hosts

SETTINGS = """
ClusterName=hosts
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
TmpFS={folder}/tmp-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={names} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")


def missing_programs() -> list[str]:
    """Return the programs of SLURM that are not here."""
    return [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin") is None]


@contextmanager
def slurm_on(network: Hosts, timeout: float = 20) -> Iterator[dict[str, str]]:
    """Start SLURM on all hosts and yield the variables with which its commands find it; end it with the block."""
    folder = Path(tempfile.mkdtemp(dir=network.folder, prefix="slurm-"))
    (folder / "state").mkdir()
    folder.chmod(0o755)
    (folder / "slurm.conf").write_text(
        SETTINGS.format(controller=network.names[0], folder=folder, names=",".join(network.names))
    )
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (folder / "munge.key").write_bytes(b"only of this test" * 8)
    (folder / "munge.key").chmod(0o400)
    env = {"SLURM_CONF": f"{folder}/slurm.conf"}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in MUNGE.items()]
    _succeed(network, env, network.names[0], "munged", "--force", *munge)
    _succeed(network, env, network.names[0], "slurmctld", "-c")
    for name in network.names:
        (folder / f"tmp-{name}").mkdir()
        _succeed(network, env, name, "slurmd", "-N", name)
    try:
        deadline = time.monotonic() + timeout
        while _idle(network, env) < len(network.names):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.1)
        yield env
    finally:
        network.kill()


MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def _succeed(network: Hosts, env: dict[str, str], host: str, program: str, *arguments: str) -> None:
    """Run a program that goes to the background: what it inherits must not be a pipe that is waited for."""
    command = network.inside(host, "env", *(f"{name}={value}" for name, value in env.items()), f"/usr/sbin/{program}")
    said = Path(env["SLURM_CONF"]).with_name(f"{program}-{host}.err")
    with said.open("w") as file:
        code = subprocess.run([*command, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=30)
    assert code.returncode == 0, said.read_text()


def _idle(network: Hosts, env: dict[str, str]) -> int:
    done = network.call(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], Path("/"), env=env)
    return len(set(done.stdout.split()))
