"""A switch between hosts on this machine: forwards Ethernet frames between their TAP devices, each after a delay.

    python relay.py PID…          one process of each host, whose network namespace gets a device ``eth0``

It says ``ready`` once the devices exist. Each line that it reads from stdin is a new delay in seconds. Frames come from
the hosts' own queues, which limit the rate. It ends when stdin does.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x2, 0x1000
DEVICE = b"eth0"
LARGEST = 1 << 16
AT_ONCE = 64
"""Frames read from one device before the others have their turn."""
BROADCAST = 0x01
"""Bit of the first byte of a MAC address that addresses more than one device."""


def open_device(pid: int) -> int:
    """Create ``eth0`` in the network namespace of a process, and return its file descriptor; it stays usable here."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    _enter(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE, IFF_TAP | IFF_NO_PI))
    _enter(own)
    return device


def _enter(namespace: int) -> None:
    """Enter a network namespace, and close its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(namespace)


def forward(devices: Sequence[int]) -> None:
    """Forward frames until stdin ends; the last byte of a MAC address is the number of its host, from 1."""
    delay, waiting = 0.0, deque[tuple[float, int, bytes]]()  # in the order of arrival; a shorter delay never overtakes
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([0, *devices], [], [], left)
        if 0 in readable:
            readable.remove(0)
            line = sys.stdin.readline()
            if not line:
                return
            delay = float(line)
        for device in readable:
            due = time.monotonic() + delay
            waiting.extend((due, device, frame) for frame in _frames(device))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, source, frame = waiting.popleft()
            _send(frame, source, devices)


def _frames(device: int) -> list[bytes]:
    frames: list[bytes] = []
    with suppress(OSError):  # empty, or the link is down
        while len(frames) < AT_ONCE:
            frames.append(os.read(device, LARGEST))
    return frames


def _send(frame: bytes, source: int, devices: Sequence[int]) -> None:
    many, number = frame[0] & BROADCAST, frame[5]
    targets = [device for device in devices if device != source] if many else devices[number - 1 : number]
    for device in targets:
        with suppress(OSError):  # the link is down
            os.write(device, frame)


if __name__ == "__main__":
    opened = [open_device(int(pid)) for pid in sys.argv[1:]]
    print("ready", flush=True)
    forward(opened)
