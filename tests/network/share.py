"""A shared folder between hosts on this machine: one serves it by SFTP, others mount it by sshfs, over the network.

A network file system in earnest (FUSE): every look-up, read and write of a host goes over its link, at its rate and
delay; attributes are cached for seconds, and locks are each host's own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.network.hosts import Hosts

SFTP = Path("/usr/lib/openssh/sftp-server")
FUSE = Path("/dev/fuse")
PACKAGES = "apt-get install -y --no-install-recommends sshfs openssh-sftp-server"
PORT = 2222
SERVE = f"""
import socket, subprocess
listener = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    subprocess.Popen(["{SFTP}"], stdin=connection, stdout=connection)
    connection.close()
"""


def missing() -> str:
    """Return what a shared folder lacks here, "" if nothing."""
    if shutil.which("sshfs") is None or not SFTP.exists():
        return f"no sshfs or sftp-server here; {PACKAGES}"
    return "" if FUSE.exists() else f"no {FUSE} here"


@contextmanager
def shared(network: Hosts, folder: Path, server: str, clients: Sequence[str], at: Path) -> Iterator[None]:
    """Serve a folder from one host, and mount it at a path on others; no other process here sees it there."""
    at.mkdir()
    serving = subprocess.Popen(
        network.inside(server, sys.executable, "-c", SERVE), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready\n", "nothing serves the folder"
        address = f"10.24.0.{network.names.index(server) + 1}"
        options = f"directport={PORT},allow_other"
        for name in clients:
            command = ["sshfs", "-o", options, f"{address}:{folder}", str(at)]
            done = subprocess.run(network.inside(name, *command), capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"{name}: {done.stderr}"
        yield
    finally:
        for name in clients:
            subprocess.run(network.inside(name, "umount", "-l", str(at)), capture_output=True)
        network.kill(server)
        serving.wait()
