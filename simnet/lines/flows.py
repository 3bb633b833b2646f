"""The connections behind an emulated line: sockets in, lines, sockets out.

Bytes are copied once, when they are read. A full line, and a reader that has stopped, are felt by the sender: nothing
more is read from it, and the buffers between are small.
"""

import collections
import functools
import math
import selectors
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

from molink.simnet.lines.line import Line
from molink.simnet.lines.shaper import Shaper
from molink.simnet.lines.sockets import Listening, reset
from molink.simnet.lines.transit import Chunk

MAX_STALLED_BYTES = 256 * 1024
"""What may wait for a reader that does not read, before nothing more is taken from the sender."""
Path = tuple[Line[Chunk], ...]
"""The lines that bytes pass, one after the other. At least one."""


class SocketFlow:
    """One direction, `source` to `sink`."""

    def __init__(
        self,
        owner: "ProxiedConnection",
        source: socket.socket,
        sink: socket.socket,
        path: Path,
        delay_s: float,
    ) -> None:
        self.path = path
        self.delay_s = delay_s
        self.due_s = -math.inf
        self.source = source
        self.sink = sink
        self.read_ended = False
        self.write_ended = False
        """The end of the stream was read, was passed on."""
        self.pending: collections.deque[memoryview] = collections.deque()
        self._owner = owner
        self._pending_bytes = 0
        self._end_arrived = False

    def update(self) -> None:
        self._owner.update()

    def deliver(self, data: bytes) -> None:
        if self._owner.closed:
            return
        if data:
            self.pending.append(memoryview(data))
            self._pending_bytes += len(data)
        else:
            self._end_arrived = True
        if len(self.pending) <= 1:
            self._owner.guard(self.write)
            self._owner.update()

    @property
    def stalled(self) -> bool:
        return self._pending_bytes >= MAX_STALLED_BYTES

    def read(self) -> None:
        """Takes as much as one connection may put on the line at once. OSError if the connection is broken."""
        try:
            data = self.source.recv(min(line.quantum_bytes for line in self.path))
        except (BlockingIOError, InterruptedError):
            return
        self.take(data)

    def take(self, data: bytes) -> None:
        self.read_ended = self.read_ended or not data
        self._owner.shaper.offer(self, data)

    def write(self) -> None:
        """Hands over what has arrived, as far as the reader takes it. OSError if the connection is broken."""
        if self._owner.paused:
            return
        try:
            while self.pending:
                sent = self.sink.send(self.pending[0])
                self._pending_bytes -= sent
                if sent < len(self.pending[0]):
                    self.pending[0] = self.pending[0][sent:]
                    break
                self.pending.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        if self._end_arrived and not self.pending and not self.write_ended:
            self.write_ended = True
            self.sink.shutdown(socket.SHUT_WR)


class ProxiedConnection:
    """Two connected sockets and the flows between them. On the shaper's thread only."""

    def __init__(
        self,
        shaper: Shaper,
        client: socket.socket,
        server: socket.socket,
        paths: tuple[Path, Path],
        delays_s: tuple[float, float],
        on_closed: Callable[["ProxiedConnection"], None],
    ) -> None:
        self.shaper = shaper
        self.closed = False
        self.paused = False
        self.flows = (
            SocketFlow(self, client, server, paths[0], delays_s[0]),
            SocketFlow(self, server, client, paths[1], delays_s[1]),
        )
        self._sockets = (client, server)
        self._ready = tuple(functools.partial(self._serve, index) for index in (0, 1))
        self._events = [0, 0]
        self._on_closed = on_closed

    def begin(self, first: bytes = b"") -> None:
        """Moves bytes from now on. `first` has been read from the client already."""
        if self.closed:
            return
        self.shaper.at_exit(self.cut)
        for sock in self._sockets:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if first:
            self.flows[0].take(first)
        self.update()

    def pause(self, paused: bool) -> None:
        """Nothing is read or written while paused; the connection stays open."""
        self.paused = paused
        for flow in self.flows:
            self.guard(flow.write)
        self.update()

    def cut(self) -> None:
        """Resets both ends; what was on its way is lost."""
        self._close(reset)

    def guard(self, act: Callable[[], None]) -> None:
        """Does something with the sockets; if one of them is broken, the other is broken, too."""
        try:
            act()
        except OSError:
            self.cut()

    def update(self) -> None:
        """Watches for what can be done now; closes when both directions have ended."""
        if self.closed:
            return
        if all(flow.write_ended for flow in self.flows):
            self._close(socket.socket.close)
            return
        for index, sock in enumerate(self._sockets):
            events = selectors.EVENT_READ if self._wants_read(self.flows[index]) else 0
            if self.flows[1 - index].pending and not self.paused:
                events |= selectors.EVENT_WRITE
            if events != self._events[index]:
                self._events[index] = events
                self.shaper.watch(sock, events, self._ready[index])

    def _serve(self, index: int, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.guard(self.flows[1 - index].write)
        if events & selectors.EVENT_READ and not self.closed:
            self.guard(self.flows[index].read)
        self.update()

    def _wants_read(self, flow: SocketFlow) -> bool:
        return not (self.paused or flow.read_ended or flow.stalled or self.shaper.wait_for_room(flow))

    def _close(self, close: Callable[[socket.socket], None]) -> None:
        if self.closed:
            return
        self.closed = True
        self.shaper.forget_exit(self.cut)
        for sock in self._sockets:
            self.shaper.watch(sock, 0, self._ready[0])
            close(sock)
        self._on_closed(self)


class RelayPort(ABC):
    """Owner of a listening port and of the connections to it, between `__enter__` and `__exit__`; subclasses say where
    each leads."""

    def __init__(self, shaper: Shaper, port: int, host: str) -> None:
        self.port = port
        self.host = host
        self._shaper = shaper
        self._listening = Listening(shaper, host, self._arrive)
        self._arriving: dict[socket.socket, bytes] = {}
        """Those that are connected to nobody yet, with what was read of them."""
        self._connections: dict[ProxiedConnection, None] = {}

    def __enter__(self) -> Self:
        """Listens. OSError if the port is taken."""
        self.port = self._shaper.call(lambda: self._listening.begin(self.port))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shaper.call(self._stop)

    def _stop(self) -> None:
        self._listening.end()
        self._cut()

    def _cut(self) -> int:
        """Ends all connections, and tells how many were open."""
        connections = tuple(self._connections)
        for connection in connections:
            connection.cut()
        for client in tuple(self._arriving):
            self._drop(client)
        return len(connections)

    def _connect(
        self, client: socket.socket, server: socket.socket, paths: tuple[Path, Path], delay_s: float
    ) -> ProxiedConnection:
        """Puts lines between the two; the caller begins it."""
        connection = ProxiedConnection(
            self._shaper, client, server, paths, (delay_s, delay_s), self._connections.__delitem__
        )
        self._connections[connection] = None
        return connection

    @abstractmethod
    def _arrive(self, client: socket.socket) -> None:
        """Somebody has connected."""

    @abstractmethod
    def _drop(self, client: socket.socket) -> None:
        """Closes one of `_arriving`."""
