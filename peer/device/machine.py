"""What else of the machine a volunteer wants to know, its disk and its network; and what this process may use of it."""

import os
import random
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

CHUNK_BYTES = 4 * 1024 * 1024
MIN_ELAPSED_S = 1e-6
MOST_DESCRIPTORS = 65536
"""More are of no use to a peer, and some systems refuse what they call unlimited."""
LASTING_PORTS = range(20_000, 32_768)
"""No system takes these for outgoing connections: one that is free stays so for some time."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """How fast files of a folder are read and written, in order."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    """Until the data is on the disk."""
    cached: bool
    """The read may have come from memory: this system does not let a program ask for the disk."""


@dataclass(frozen=True, slots=True)
class NetworkAddress:
    """An address of this machine."""

    interface: str
    address: str
    loopback: bool


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and sockets as the system allows without asking anybody. Windows has no such
    limit."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    with suppress(OSError, ValueError):  # macOS allows less than it says: all is as before then
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def measure_disk(folder: Path, size_bytes: int = 64 * 1024 * 1024) -> DiskSpeed:
    """Writes a file of `size_bytes` to `folder`, reads it back, and removes it.

    Raises:
        OSError: the folder cannot be written, or has too little room.
    """
    chunk = os.urandom(CHUNK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".disk-", buffering=0) as file:
        started_s = time.perf_counter()
        for _ in range(max(1, size_bytes // CHUNK_BYTES)):
            file.write(chunk)
        os.fsync(file.fileno())
        written_s = max(time.perf_counter() - started_s, MIN_ELAPSED_S)
        written_bytes = file.tell()
        dropped = _forget(file.fileno())
        file.seek(0)
        buffer = bytearray(CHUNK_BYTES)
        started_s = time.perf_counter()
        while file.readinto(buffer):
            pass
        read_s = max(time.perf_counter() - started_s, MIN_ELAPSED_S)
    return DiskSpeed(written_bytes / read_s, written_bytes / written_s, cached=not dropped)


def network_addresses() -> tuple[NetworkAddress, ...]:
    """IPv4 and IPv6 addresses of the interfaces that are up, those of other machines' reach first."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        NetworkAddress(name, entry.address, _is_loopback(entry.address))
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
    ]
    return tuple(sorted(found, key=lambda address: (address.loopback, ":" in address.address)))


def free_port(host: str, port: int | None) -> int:
    """The remembered port if nobody listens on it, else 0 for any. Connections of a process that was killed are ending
    there for a minute, which keeps nobody from listening."""
    if port is None:
        return 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if os.name != "nt":  # there it would mean sharing the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return 0
    return port


def unused_port(host: str, port: int | None, *others: int) -> int:
    """The remembered port if it is free still, else one of LASTING_PORTS that is. None of `others`."""
    remembered = () if port is None else (port,)
    candidates: tuple[int, ...] = (*remembered, *random.sample(LASTING_PORTS, 50))
    return next((one for one in candidates if one not in others and free_port(host, one)), candidates[-1])


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _forget(descriptor: int) -> bool:
    """Asks the system to drop its copy of the file from memory; whether it can be asked at all."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return False
    advise(descriptor, 0, 0, getattr(os, "POSIX_FADV_DONTNEED", 4))
    return True
