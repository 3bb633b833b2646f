"""Homes behind access lines: every home has one uplink, which all that leaves it shares.

Peers are put in homes by the addresses at which they listen. A peer dials through its home's `AccessRouter`, an HTTP
CONNECT proxy (gRPC: the channel argument `grpc.http_proxy`). What it sends takes its home's uplink, what comes back
takes the other home's uplink: a link is shaped in both directions whoever dialled.
"""

import contextlib
import re
import selectors
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from molink.simnet.lines.flows import Path, RelayPort
from molink.simnet.lines.line import Line
from molink.simnet.lines.shaper import Shaper
from molink.simnet.lines.sockets import Dialling, address
from molink.simnet.lines.transit import Chunk

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
END_OF_REQUEST = b"\r\n\r\n"
_CONNECT = re.compile(rb"CONNECT (\S+) HTTP/1\.[01]\r\n")
_METHOD = re.compile(rb"[A-Z]+ \S+ HTTP/1\.[01]\r\n")

Target = tuple[str, int]


class TunnelRefused(ValueError):
    """What the answer to a request says: a status of HTTP and its reason."""


@dataclass(frozen=True, slots=True)
class RoundTripPath:
    """What a connection passes, there and back: lines, and each way a delay in seconds."""

    paths: tuple[Path, Path]
    delay_s: float


class Neighbourhood:
    """The uplinks of homes, who lives where, and how far apart homes are, one way: equally, or by pairs of homes."""

    def __init__(
        self,
        uplinks: Mapping[str, Line[Chunk]],
        delay_ms: float,
        pairs_ms: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        self._uplinks = dict(uplinks)
        self._places: dict[Target, str] = {}
        self._delay_ms = delay_ms
        self._pairs_ms = dict(pairs_ms or {})

    def place(self, target: Target, home: str) -> None:
        """The address belongs to a home from now on. KeyError if there is no such home."""
        if home not in self._uplinks:
            raise KeyError(home)
        self._places[target] = home

    def route(self, home: str, target: Target) -> RoundTripPath | None:
        """From a home to an address; None if nobody is known there. Peers of one home do not load its uplink."""
        other = self._places.get(target)
        if other is None:
            return None
        if home == other:
            return RoundTripPath(((Line(),), (Line(),)), 0.0)
        delay_ms = self._pairs_ms.get((home, other), self._delay_ms)
        return RoundTripPath(((self._uplinks[home],), (self._uplinks[other],)), delay_ms / 1000)


def parse_connect(head: bytes) -> Target:
    """The target of the head of a CONNECT request. TunnelRefused says what to answer to anything else."""
    match = _CONNECT.match(head)
    if match is None:
        raise TunnelRefused("405 Method Not Allowed" if _METHOD.match(head) else "400 Bad Request")
    try:
        return address(match[1].decode("ascii"))
    except ValueError as error:
        raise TunnelRefused("400 Bad Request") from error


class AccessRouter(RelayPort):
    """The CONNECT proxy of one home, between `__enter__` and `__exit__`. Connects only to addresses placed in homes."""

    def __init__(self, shaper: Shaper, neighbourhood: Neighbourhood, home: str) -> None:
        super().__init__(shaper, 0, "127.0.0.1")
        self._neighbourhood = neighbourhood
        self._home = home

    @property
    def url(self) -> str:
        """As gRPC and HTTP clients take a proxy."""
        return f"http://{self.host}:{self.port}"

    def _arrive(self, client: socket.socket) -> None:
        self._arriving[client] = b""
        self._shaper.watch(client, selectors.EVENT_READ, lambda _: self._read(client))
        self._shaper.after(REQUEST_TIMEOUT_S, lambda: self._late(client))

    def _late(self, client: socket.socket) -> None:
        if END_OF_REQUEST not in self._arriving.get(client, END_OF_REQUEST):
            self._refuse(client, "408 Request Timeout")

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        head = self._arriving[client] = self._arriving[client] + data
        if END_OF_REQUEST in head:
            self._shaper.watch(client, 0, lambda _: None)
            try:
                self._begin(client, head)
            except TunnelRefused as error:
                self._refuse(client, str(error))
        elif not data:
            self._drop(client)
        elif len(head) > MAX_REQUEST_BYTES:
            self._refuse(client, "431 Request Header Fields Too Large")

    def _begin(self, client: socket.socket, head: bytes) -> None:
        """Connects to the target, a round trip later: so long does the first byte of a connection take."""
        target = parse_connect(head)
        route = self._neighbourhood.route(self._home, target)
        if route is None:
            raise TunnelRefused("403 Forbidden")
        dialling = Dialling(
            self._shaper,
            target,
            partial(self._join, client, route),
            lambda _: self._refuse(client, "502 Bad Gateway"),
        )
        self._shaper.after(2 * route.delay_s, dialling.begin)

    def _join(self, client: socket.socket, route: RoundTripPath, server: socket.socket) -> None:
        head = self._arriving.pop(client, None)
        if head is None:
            server.close()
            return
        connection = self._connect(client, server, route.paths, route.delay_s)
        connection.guard(lambda: _answer(client, "200 Connection established"))
        connection.begin(head.partition(END_OF_REQUEST)[2])

    def _refuse(self, client: socket.socket, status: str) -> None:
        if client in self._arriving:
            with contextlib.suppress(OSError):  # It does not wait for the answer.
                _answer(client, status)
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._arriving.pop(client, None)
        self._shaper.watch(client, 0, lambda _: None)
        client.close()


def _answer(client: socket.socket, status: str) -> None:
    """A few bytes into an empty socket buffer: they are taken whole."""
    body = "" if status.startswith("200") else "Content-Length: 0\r\nConnection: close\r\n"
    client.send(f"HTTP/1.1 {status}\r\n{body}\r\n".encode())
