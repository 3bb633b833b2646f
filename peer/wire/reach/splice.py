"""Splices of two sockets: bytes of one go to the other and back, unread, with back-pressure and half-closes.

A relay splices two connections that came to it; each end of a way that is not direct splices it to a local socket that
gRPC dials or listens on.
"""

import asyncio
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Self

RECEIVE_BYTES = 65536
"""Taken from a socket at once; one such buffer serves all splices of an event loop's owner."""
WRITE_BUFFER_BYTES = 65536
"""Waits in this process for a slow end; then nothing more is read from the other one."""
LINGER_S = 30.0
"""For so long an end may leave what waits for it unread, before a splice ends."""

Pace = Callable[[int], float]
"""Told of so many bytes that were passed on; for how many seconds nothing more is to be read."""


class Splices:
    """Splices of one owner. Open between `__aenter__` and `__aexit__`."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._open: set[Splice] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every splice."""
        open_now = tuple(self._open)
        for splice in open_now:
            splice.close()
        await asyncio.gather(*(splice.gone for splice in open_now))

    def __len__(self) -> int:
        return len(self._open)

    def pump(self, joined: Callable[["Pump"], None] | None = None) -> "Pump":
        """One end of a splice, to be made the protocol of a transport; `joined` is called once it has one."""
        return Pump(self._buffer, joined)

    async def splice(self, one: socket.socket, other: socket.socket, pace: Pace | None = None) -> "Splice":
        """Splices two connected sockets, which are its own from now on. Raises OSError, and closes them."""
        pumps: list[Pump] = []
        try:
            for connection in (one, other):
                connection.setblocking(False)
                pump = self.pump()
                await asyncio.get_running_loop().create_connection(lambda pump=pump: pump, sock=connection)  # type: ignore[misc]
                pumps.append(pump)
        except BaseException:
            for pump in pumps:
                pump.abort()
            for connection in (one, other):
                connection.close()
            raise
        return self.join(pumps[0], pumps[1], pace)

    def join(self, one: "Pump", other: "Pump", pace: Pace | None = None) -> "Splice":
        """Joins two pumps that have transports: from now on bytes move."""
        splice = Splice(one, other, pace)
        self._open.add(splice)
        splice.gone.add_done_callback(lambda _: self._open.discard(splice))
        return splice


class Splice:
    """Two pumps that pass bytes to each other until either end is gone."""

    def __init__(self, one: "Pump", other: "Pump", pace: Pace | None) -> None:
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.moved_s = loop.time()
        """When a byte last moved, on the event loop's clock."""
        self._pumps = (one, other)
        self._pace = pace
        self._timer: asyncio.TimerHandle | None = None
        self._left = 2
        one.begin(self, other)
        other.begin(self, one)

    def close(self) -> None:
        """Ends both connections at once."""
        for pump in self._pumps:
            pump.abort()

    def finish(self) -> None:
        """Ends both connections when what waits has been sent, or LINGER_S later."""
        for pump in self._pumps:
            pump.close()

    def moved(self, count: int) -> None:
        """So many bytes were passed on."""
        self.moved_s = asyncio.get_running_loop().time()
        wait_s = self._pace(count) if self._pace is not None else 0.0
        if wait_s <= 0:
            return
        for pump in self._pumps:
            pump.hold(paced=True)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._go_on)

    def ended(self, pump: "Pump") -> None:
        """One of the ends is gone: what it has sent still reaches the other one, which then ends too."""
        self._left -= 1
        for other in self._pumps:
            if other is not pump:
                other.close()
        if self._left == 0:
            if self._timer is not None:
                self._timer.cancel()
            if not self.gone.done():
                self.gone.set_result(None)

    def _go_on(self) -> None:
        for pump in self._pumps:
            pump.go_on(paced=True)


class Pump(asyncio.BufferedProtocol):
    """One end of a splice. Nothing is read before it is joined to the other end."""

    def __init__(self, buffer: memoryview, joined: Callable[["Pump"], None] | None) -> None:
        self._buffer = buffer
        self._joined = joined
        self._transport: asyncio.Transport | None = None
        self._splice: Splice | None = None
        self._other: Pump | None = None
        self._gone = self._ended = False
        self._full = self._paced = False
        """Why nothing is read: the other end takes no more, or the rate is used up."""
        self._overdue: asyncio.TimerHandle | None = None
        """Set while what waits is to be read by this end; meanwhile nobody hears whether the other one is gone."""

    def begin(self, splice: Splice, other: "Pump") -> None:
        """From now on what comes goes to `other`."""
        self._splice, self._other = splice, other
        if self._gone:
            splice.ended(self)
        else:
            self._look()

    def hold(self, *, paced: bool = False) -> None:
        """Reads nothing more for a while."""
        self._paced, self._full = self._paced or paced, self._full or not paced
        self._look()

    def go_on(self, *, paced: bool = False) -> None:
        """Reads on, if nothing else speaks against it."""
        self._paced, self._full = self._paced and not paced, self._full and paced
        self._look()

    def pass_on(self, data: bytes) -> None:
        """Sends what came at the other end."""
        if self._transport is not None:
            self._transport.write(data)

    def end_writing(self) -> None:
        """The other end has ended its stream: so does this one, once all is sent."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """Ends the connection when what waits has been sent, or with its splice LINGER_S later."""
        if self._transport is not None and not self._gone:
            self._transport.close()
            self._must_read()

    def abort(self) -> None:
        """Ends the connection now."""
        if self._transport is not None:
            self._transport.abort()

    # -- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of a stream socket
        self._transport = transport
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._wait_to_be_joined)
        if self._joined is not None:
            self._joined(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._other is not None and self._splice is not None:
            # copied, because a transport may keep what the kernel does not take at once
            self._other.pass_on(bytes(self._buffer[:nbytes]))
            self._splice.moved(nbytes)

    def pause_writing(self) -> None:
        self._must_read()
        if self._other is not None:
            self._other.hold()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._has_read()
        if self._other is not None:
            self._other.go_on()

    def eof_received(self) -> bool:
        self._ended = True
        if self._other is not None:
            self._other.end_writing()
            if self._other.has_ended:
                self.close()
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._gone = True
        self._has_read()
        if self._splice is not None:
            self._splice.ended(self)

    @property
    def has_ended(self) -> bool:
        """Whether its peer sends nothing more."""
        return self._ended

    def _must_read(self) -> None:
        if self._overdue is None:
            end = self.abort if self._splice is None else self._splice.close
            self._overdue = asyncio.get_running_loop().call_later(LINGER_S, end)

    def _has_read(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _wait_to_be_joined(self) -> None:
        """Has the transport wait: that of Python 3.11.2 begins to read although `connection_made` has paused it, and
        what it read before there is another end would be lost."""
        transport = self._transport
        if self._other is None and transport is not None and not transport.is_closing():
            transport.resume_reading()
            transport.pause_reading()

    def _look(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self._other is None:
            return
        if self._full or self._paced:
            transport.pause_reading()
        else:
            transport.resume_reading()
