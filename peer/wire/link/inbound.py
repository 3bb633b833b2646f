"""Inbound guard of the gRPC port: of connections that have not proven who they are, the oldest make room.

gRPC accepts for itself, gives each connection a few seconds, and refuses all beyond a number; it knows no networks, and
tells nobody of a connection before a call comes over it. So those are looked for among this process's descriptors, and
shut down where there are too many: gRPC then sees their other end hang up. Where descriptors cannot be listed, as on
Windows, there is only what gRPC itself does.
"""

import asyncio
import contextlib
import os
import socket
import stat
import sys
from dataclasses import dataclass
from urllib.parse import unquote

from molink.dht.membership.door import ConnectionLimiter, ConnectionLimits, network_of
from molink.dht.refusals import RefusalLog

HANDSHAKE_TIMEOUT_S = 5.0
"""For TLS, and then again for the proof."""
LOOK_EVERY_S = 0.25
QUIET_LOOK_EVERY_S = 1.0
"""While every connection is proven."""
MOST_CONNECTIONS = 768
"""Proven or not: beyond, gRPC closes a connection as soon as it comes."""
LEAST_CONNECTIONS = 64
DESCRIPTOR_PART = 2
"""No more than one in so many of the process's descriptors are for connections to this port."""
UNPROVEN_PART = 4
"""No more than one in so many of the connections are unproven for longer than LOOK_EVERY_S, or, the first ones,
QUIET_LOOK_EVERY_S."""
_DESCRIPTORS = "/dev/fd"
_INODES = sys.platform == "linux"
"""Whether a socket has a number of its own, which tells it from a later one under the same descriptor."""
_MAPPED = "::ffff:"
"""How a socket for both kinds of addresses, as gRPC's are, calls one of IPv4."""

Address = tuple[str, int]
"""Host and port of the other end."""


@dataclass(frozen=True, slots=True)
class InboundLimits:
    """Inbound limits: how many connections the port takes."""

    connections: int
    unproven: int


def inbound_limits(descriptors: int | None) -> InboundLimits:
    """For a process that may have so many descriptors; None: nobody knows, or nothing limits them."""
    connections = MOST_CONNECTIONS
    if descriptors is not None:
        connections = max(LEAST_CONNECTIONS, min(connections, descriptors // DESCRIPTOR_PART))
    return InboundLimits(connections, connections // UNPROVEN_PART)


def descriptor_limit() -> int | None:
    """How many descriptors this process may have; None where nothing limits them, or nobody can tell."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def grpc_options(limits: InboundLimits) -> list[tuple[str, int]]:
    """What gRPC itself does about connections over which nothing comes."""
    timeout_ms = round(HANDSHAKE_TIMEOUT_S * 1000)
    return [
        ("grpc.server_handshake_timeout_ms", timeout_ms),  # TLS, and HTTP/2's first frame
        ("grpc.max_connection_idle_ms", timeout_ms),  # no call
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_concurrent_streams", 4),  # of a link's channel one is used
    ]


def parse_peer(peer: str) -> Address:
    """Host and port of what gRPC calls `ipv4:192.0.2.1:5000` or `ipv6:%5B::1%5D:5000`; of anything else port 0."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return (host.strip("[]").removeprefix(_MAPPED), int(port)) if port.isdecimal() else (peer, 0)


class InboundGuard:
    """Inbound guard: owner of what is known of a port's unproven connections. `keep_few` while the port is open."""

    def __init__(self, port: int, limits: InboundLimits, refusals: RefusalLog) -> None:
        self._port = port
        self._limits = limits
        self._refusals = refusals
        # what is proven has places of its own, in the acceptor's
        self._limiter = ConnectionLimiter(
            ConnectionLimits(limits.unproven, 1, 1, 1, HANDSHAKE_TIMEOUT_S, HANDSHAKE_TIMEOUT_S),
            lambda _: False,
        )
        self._proven: set[Address] = set()
        self._guests: dict[Address, int] = {}
        self._sockets: dict[tuple[int, int], Address | None] = {}
        """By descriptor and inode: the other end, where it is a connection to the port."""

    def proven(self, address: Address) -> None:
        """Records that somebody has proven who he is over the connection from there."""
        self._proven.add(address)

    def gone(self, address: Address) -> None:
        """Forgets a proven connection that has ended."""
        self._proven.discard(address)

    async def keep_few(self) -> None:
        """Looks from time to time, until cancelled."""
        if not os.path.isdir(_DESCRIPTORS):  # noqa: PTH112, ASYNC240 - a look at a device folder does not wait
            return
        while True:
            self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_EVERY_S if self._guests else QUIET_LOOK_EVERY_S)

    def look(self, now_s: float) -> None:
        """Shuts down what is too many at this moment. While descriptors cannot be listed, nothing."""
        with contextlib.suppress(OSError):
            self._sockets = {key: address for key, address in self._list()}  # noqa: C416
        descriptors = {address: key[0] for key, address in self._sockets.items() if address is not None}
        for address in tuple(self._guests):
            if address not in descriptors or address in self._proven:
                self._limiter.remove_guest(self._guests.pop(address))
        for address in descriptors:
            if address in self._proven or address in self._guests:
                continue
            entry = self._limiter.admit(now_s, network_of(address[0]))
            if entry.guest is not None:
                self._guests[address] = entry.guest
            for guest in entry.sent_away:
                self._shut(guest, descriptors)

    def _shut(self, guest: int, descriptors: dict[Address, int]) -> None:
        address = next(known for known, number in self._guests.items() if number == guest)
        del self._guests[address]
        self._refusals.refused("silent connections", address[0])
        with contextlib.suppress(OSError), _duplicate(descriptors[address]) as connection:
            # the descriptor may have been closed meanwhile, and be another's now
            if self._end_of(connection) == address:
                connection.shutdown(socket.SHUT_RDWR)

    def _list(self) -> list[tuple[tuple[int, int], Address | None]]:
        found: list[tuple[tuple[int, int], Address | None]] = []
        for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - names are numbers here, and there are many
            with contextlib.suppress(OSError):
                descriptor = int(name)
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode):
                    key = descriptor, status.st_ino
                    known = _INODES and key in self._sockets
                    found.append((key, self._sockets[key] if known else self._other_end(descriptor)))
        return found

    def _other_end(self, descriptor: int) -> Address | None:
        """Of a connection to the port. Raises OSError: it has none (yet)."""
        with _duplicate(descriptor) as connection:
            return self._end_of(connection)

    def _end_of(self, connection: socket.socket) -> Address | None:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if connection.getsockname()[1] != self._port:
            return None
        host, port = connection.getpeername()[:2]
        return str(host).removeprefix(_MAPPED), int(port)


def _duplicate(descriptor: int) -> socket.socket:
    """The same socket under another descriptor, to be closed without closing the first."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
