"""Connection of a link: a gRPC stream, and the pump that moves packets to and from it until it breaks."""

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from molink.peer.wire.transport.packet_engine import PacketEngine

FAREWELL_S = 0.5
"""How long the last packet of a link may take."""
BREAKS = (ConnectionError, asyncio.InvalidStateError, grpc.RpcError, grpc.aio.UsageError)
"""What reading or writing raises when a connection is gone."""


class Stream(Protocol):
    """Stream: what grpc.aio offers on both ends of a bidirectional call."""

    async def read(self) -> object: ...

    async def write(self, message: bytes, /) -> None: ...


class Connection(Protocol):
    """A proven stream. `close` it when nothing uses it any more."""

    @property
    def stream(self) -> Stream: ...

    @property
    def gone(self) -> "asyncio.Future[None]":
        """Done when the stream is gone, or has to be."""

    def lost(self) -> None:
        """Ends the stream: it is gone, or has to be."""

    async def close(self) -> None: ...


def why_broken(error: BaseException) -> str:
    """What one of BREAKS says."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return f"the connection broke: {error}"


class PacketPump:
    """Packet pump: reads and writes one connection for a link. At most one at a time works for a packet engine."""

    def __init__(
        self,
        stream: Stream,
        packets: PacketEngine,
        deliver: Callable[[memoryview], None],
        pace: Callable[[], float] | None = None,
    ) -> None:
        """After each packet `pace` says for how many seconds nothing more is to be read, until it says 0."""
        self._stream = stream
        self._pace = pace
        self._packets = packets
        self._deliver = deliver
        self._idle: asyncio.Future[bytes | None] | None = None
        """What `write` waits for while there is nothing to send: the next packet, or None to have it look itself."""
        self._taking = False
        """A packet is being taken in: what may be sent then is looked for once, at its end."""
        self._timer: asyncio.TimerHandle | None = None
        self._look_s = math.inf
        """When to look for something to send. `_timer` rings no later; if it rings earlier, it is set anew."""
        self._last: bytes | None = None

    async def read(self) -> str:
        """Reads until the stream ends. Returns why.

        Raises:
            PacketError, LinkClosed: as `PacketEngine.on_packet`.
            BREAKS: as they come.
        """
        clock = asyncio.get_running_loop().time
        traffic = self._packets
        while True:
            data = await self._stream.read()
            if not isinstance(data, bytes):
                return "the other end's stream ended"
            if self._last is not None:
                continue  # the link has ended here: the other end has yet to hear of it
            self._taking = True
            try:
                message = traffic.on_packet(data, clock())
                if message is not None:
                    self._deliver(message)
            finally:
                self._taking = False
            self._look()
            if self._pace is not None:
                await self._slow_down(self._pace)

    async def _slow_down(self, pace: Callable[[], float]) -> None:
        while True:
            wait_s = pace()
            if wait_s <= 0:
                return
            await asyncio.sleep(wait_s)

    async def write(self) -> str:
        """Writes until told the last packet; raises BREAKS as they come."""
        loop = asyncio.get_running_loop()
        while self._last is None:
            packet: bytes | float | None = self._packets.next_packet(loop.time())
            if isinstance(packet, float):
                self._look_at(packet)
                self._idle = loop.create_future()
                packet = await self._idle
            if packet is not None:
                await self._stream.write(packet)
        await self._stream.write(self._last)
        return "this end closed it"

    def wake(self) -> None:
        """Wakes the writer: there may be something to send."""
        if not self._taking and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def say_last(self, packet: bytes) -> None:
        """`write` sends this after what it is sending, and nothing more."""
        self._last = packet
        self.wake()

    def stop_timer(self) -> None:
        """Stops the timer: nobody is to be woken any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Hands `write` what there is to send, if it waits. To wake it for nothing costs more than to look."""
        if self._last is not None or self._idle is None or self._idle.done():
            return
        packet = self._packets.next_packet(asyncio.get_running_loop().time())
        if isinstance(packet, bytes):
            self._idle.set_result(packet)
        else:
            self._look_at(packet)

    def _look_at(self, at_s: float) -> None:
        self._look_s = at_s
        if at_s == math.inf or (self._timer is not None and self._timer.when() <= at_s):
            return
        self.stop_timer()
        self._timer = asyncio.get_running_loop().call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        rang_s = self._timer.when() if self._timer is not None else -math.inf
        self._timer = None
        if self._look_s > rang_s:
            self._look_at(self._look_s)
        else:
            self._look()
