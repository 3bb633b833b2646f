"""The lines' process of an emulation: homes with an uplink each, and an HTTP proxy into the net for each home.

    python -m molink.simnet.emulated_lines CONFIGURATION

The configuration is a JSON object (see LinesConfiguration). It prints a JSON line with the proxies when it is ready and
answers every line on its stdin with one; at the end of stdin it ends (see `child_process`). It is a process of its own,
since Python lets one thread of a process run at a time.
"""

import json
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Self

from molink.simnet.flows import Connection
from molink.simnet.line import Line
from molink.simnet.shaper import Chunk, Shaper
from molink.simnet.sockets import Dialling, Listening, address, reset

Address = tuple[str, int]
MOST_REQUEST_BYTES = 8192
_END_OF_REQUEST = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class LinesConfiguration:
    """So many homes, equal uplinks."""

    homes: int
    rate_mbps: float
    delay_ms: float
    """One way, to any other home."""


@dataclass(frozen=True, slots=True)
class LinesCounters:
    """What the lines have done since the start."""

    at_s: float
    """On a clock of its own."""
    cpu_s: float
    """The whole process's."""
    busy_s: tuple[float, ...]
    """Of each home's uplink: time in which bytes were leaving."""


class HomeProxy:
    """What a home's peers dial through: connections to other homes share its uplink, answers come by the others'.

    Between `__enter__` and `__exit__`; everything else happens on the shaper's thread.
    """

    def __init__(self, shaper: Shaper, uplink: Line[Chunk], homes: Mapping[Address, Line[Chunk]]) -> None:
        """`homes` says whose uplink an address is behind; it may be filled later."""
        self.port = 0
        self._shaper = shaper
        self._uplink = uplink
        self._homes = homes
        self._listening = Listening(shaper, "127.0.0.1", self._arrive)
        self._arriving: dict[socket.socket, bytes] = {}
        self._connections: dict[Connection, None] = {}

    def __enter__(self) -> Self:
        self.port = self._shaper.call(lambda: self._listening.begin(0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shaper.call(self._end)

    def _end(self) -> None:
        self._listening.end()
        for client in tuple(self._arriving):
            self._drop(client)
        for connection in tuple(self._connections):
            connection.cut()

    def _arrive(self, client: socket.socket) -> None:
        self._arriving[client] = b""
        self._shaper.watch(client, selectors.EVENT_READ, partial(self._read, client))

    def _read(self, client: socket.socket, _: int) -> None:
        """The request to connect, until it is whole."""
        try:
            data = client.recv(MOST_REQUEST_BYTES)
        except OSError:
            data = b""
        request = self._arriving[client] + data
        self._arriving[client] = request
        if _END_OF_REQUEST in request:
            self._shaper.watch(client, 0, partial(self._read, client))
            self._connect(client, *request.split(_END_OF_REQUEST, 1))
        elif not data or len(request) > MOST_REQUEST_BYTES:
            self._drop(client)

    def _connect(self, client: socket.socket, request: bytes, rest: bytes) -> None:
        words = request.split(b"\r\n", 1)[0].decode("latin-1").split()
        try:
            target = address(words[1]) if words[0] == "CONNECT" else ("", 0)
            other = self._homes[target]
        except (ValueError, IndexError, KeyError):
            self._drop(client)
            return
        dialling = Dialling(
            self._shaper, target, partial(self._join, client, other, rest), lambda _: self._drop(client)
        )
        self._shaper.after(self._uplink.delay_s + other.delay_s, dialling.begin)

    def _join(self, client: socket.socket, other: Line[Chunk], rest: bytes, server: socket.socket) -> None:
        if client not in self._arriving:
            reset(server)
            return
        del self._arriving[client]
        try:
            client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        except OSError:
            reset(client)
            reset(server)
            return
        paths = ((self._uplink,), (other,))
        connection = Connection(self._shaper, client, server, paths, (0.0, 0.0), self._connections.pop)
        self._connections[connection] = None
        connection.begin(rest)

    def _drop(self, client: socket.socket) -> None:
        if self._arriving.pop(client, None) is not None:
            self._shaper.watch(client, 0, partial(self._read, client))
            reset(client)


def serve(configuration: LinesConfiguration) -> None:
    """Until stdin ends."""
    shaper = Shaper()
    uplinks = [
        Line[Chunk](configuration.rate_mbps, configuration.delay_ms) for _ in range(configuration.homes)
    ]
    homes: dict[Address, Line[Chunk]] = {}
    with ExitStack() as stack:
        stack.enter_context(shaper)
        proxies = [stack.enter_context(HomeProxy(shaper, uplink, homes)) for uplink in uplinks]
        _print({"proxies": [f"http://127.0.0.1:{proxy.port}" for proxy in proxies]})
        for line in sys.stdin:
            question = json.loads(line)
            if question == "counters":
                _print(asdict(_counters(shaper, uplinks)))
            else:
                for uplink, known in zip(uplinks, question["addresses"], strict=True):
                    homes.update(dict.fromkeys(map(address, known), uplink))
                _print({})


def _counters(shaper: Shaper, uplinks: Sequence[Line[Chunk]]) -> LinesCounters:
    busy_s = shaper.call(lambda: tuple(line.counters().busy_s for line in uplinks))
    return LinesCounters(time.perf_counter(), time.process_time(), busy_s)


def _print(value: dict[str, object]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    """The process's whole life. A Ctrl-C is its parent's to handle: the end of stdin follows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(LinesConfiguration(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
