# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine, and a network between them that can be made to misbehave.

    host (a network namespace) -- tun device --+
    host -- tun device ------------------------+-- Network: drops, delays and reorders packets
    host -- tun device --------------------------+

Every packet between two hosts passes through a thread of this process, so no module of the kernel
beyond `tun` is needed. What is cut off vanishes without a word, as with a pulled cable.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 60_000  # large, because each packet costs a turn of the thread


def missing() -> str:
    """Returns what such a network needs and does not find here; empty if all is there."""
    if os.geteuid() != 0:
        return "network namespaces need root (make test-root)"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"the hosts are connected by {_TUN}, which is not there"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "network namespaces cannot be made here"


@dataclass
class Weather:
    """The faults of a network: the share of packets that is lost, and the most that one waits.

    delay_s: in seconds; each packet waits a random part of it, so packets overtake each other.
    """

    loss: float = 0.0
    delay_s: float = 0.0


@dataclass
class Host:
    """A network namespace with one address."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]  # keeps the namespace
    device: int  # file descriptor of the tun device

    @property
    def words(self) -> list[str]:
        """The words before a command that run it there."""
        return ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", "--"]


@dataclass
class Network:
    """Hosts and the packets between them; use it in a `with` statement."""

    names: Sequence[str]
    seed: int = 0
    hosts: dict[str, Host] = field(default_factory=dict)
    weather: Weather = field(default_factory=Weather)
    carried: int = 0  # packets
    dropped: int = 0

    def __enter__(self) -> Network:
        for number, name in enumerate(self.names, 1):
            self.hosts[name] = _host(name, f"10.77.0.{number}")
        self._cut: set[str] = set()
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._end, b"x")
        self._thread.join()
        for descriptor in (self._ended, self._end):
            os.close(descriptor)
        for host in self.hosts.values():
            os.close(host.device)
            host.holder.kill()
            host.holder.wait()

    def cut(self, name: str) -> None:
        """Nothing reaches the host or leaves it from now on."""
        self._cut.add(self.hosts[name].address)

    def heal(self, name: str) -> None:
        """Ends a cut."""
        self._cut.discard(self.hosts[name].address)

    def _carry(self) -> None:
        devices = {host.address: host.device for host in self.hosts.values()}
        rng, waiting, count = random.Random(self.seed), [], 0
        poll = select.poll()
        for descriptor in (*devices.values(), self._ended):
            poll.register(descriptor, select.POLLIN)
        while True:
            timeout = 1000 * (waiting[0][0] - time.monotonic()) if waiting else None
            for descriptor, _ in poll.poll(None if timeout is None else max(0.0, timeout)):
                if descriptor == self._ended:
                    return
                packet = os.read(descriptor, _MTU + 64)
                device = self._way(packet, devices, rng)
                if device is not None:
                    due = time.monotonic() + rng.random() * self.weather.delay_s
                    heapq.heappush(waiting, (due, count := count + 1, device, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                self.carried += 1
                os.write(device, packet)

    def _way(self, packet: bytes, devices: dict[str, int], rng: random.Random) -> int | None:
        """Returns the device of a packet's destination; None if it is lost."""
        if packet[0] >> 4 != 4:  # of IPv6, which the hosts do not use
            return None
        source, target = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
        is_lost = source in self._cut or target in self._cut or rng.random() < self.weather.loss
        self.dropped += is_lost
        return None if is_lost else devices.get(target)


def _host(name: str, address: str) -> Host:
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec sleep 1000000"], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()  # it is in its namespace now
    holder.stdout.close()
    host = Host(name, address, holder, _tun_of(holder.pid))
    for words in (
        ["link", "set", "lo", "up"],
        ["address", "add", f"{address}/24", "dev", "lab0"],
        ["link", "set", "lab0", "mtu", str(_MTU), "up"],
    ):
        subprocess.run([*host.words, "ip", *words], check=True)
    return host


def _tun_of(pid: int) -> int:
    """Opens a tun device in the namespace of a process; only a thread of its own goes there."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_open_tun(pid)))
    thread.start()
    thread.join()
    return found[0]


def _open_tun(pid: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "the namespace cannot be entered")
    device = os.open(_TUN, os.O_RDWR)
    flags = struct.pack("16sH14x", b"lab0", _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, flags)
    return device
