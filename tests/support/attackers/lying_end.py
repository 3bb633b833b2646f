"""A link whose other end is driven by hand, without sockets: it follows the protocol until it is told to lie."""

import asyncio
import itertools
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

from support.links.data_plane import Recorder

from molink.peer.wire.link.handshake import LINK_ID_BYTES, Remote
from molink.peer.wire.link.link import Link, Resumed
from molink.peer.wire.link.link_resources import LinkResources
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol import packets
from molink.peer.wire.protocol.frames import decode, encode
from molink.peer.wire.protocol.packets import Ack, Close, Data, Packet, Ping
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.message_memory import MessageMemory
from molink.peer.wire.transport.reassembly import Reassembly
from molink.peer.wire.transport.shared_uplink import SharedUplink

DEADLINE_S = 120.0
T = TypeVar("T")


class PipeConnection:
    """A connection in memory."""

    def __init__(self) -> None:
        self.stream = self
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.inward: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.outward: list[bytes] = []

    async def read(self) -> object:
        return await self.inward.get()

    async def write(self, message: bytes, /) -> None:
        self.outward.append(message)
        await asyncio.sleep(0)

    def lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def close(self) -> None:
        self.lost()


class LyingEnd:
    """The other end of one link, and the link."""

    def __init__(self, name: str, uplink: SharedUplink, memory: MessageMemory) -> None:
        self.handler = Recorder()
        self.connection = PipeConnection()
        self.link = Link(
            bytes(LINK_ID_BYTES),
            Remote(name, is_client=True),
            self.connection,
            self.handler,
            LinkResources(uplink, memory),
        )
        self.running = asyncio.create_task(self.link.run(), name=f"link of {name}")
        self.sequence = 0
        self.partials: dict[int, tuple[TrafficClass, int, int]] = {}
        """Class, length and offset of messages that are not whole."""
        self.answered: set[int] = set()
        self.closed: Close | None = None
        self.numbers = itertools.count(1)
        self._read = 0
        self._reassembly = Reassembly()

    # -- what follows the protocol

    def send(self, packet: bytes) -> None:
        self.connection.inward.put_nowait(packet)

    def chunk(self, message: int, size_bytes: int) -> bytes:
        """The next chunk of a message that was begun."""
        traffic_class, length, offset = self.partials.pop(message)
        size_bytes = min(size_bytes, length - offset)
        if offset + size_bytes < length:
            self.partials[message] = (traffic_class, length, offset + size_bytes)
        self.sequence += 1
        return packets.encode_data(traffic_class, message, length, offset, self.sequence, bytes(size_bytes))

    def begin(self, traffic_class: TrafficClass, length: int) -> int:
        """A message of which nothing is sent yet."""
        message = next(self.numbers)
        self.partials[message] = (traffic_class, length, 0)
        return message

    def whole(self, content: bytes) -> bytes:
        self.sequence += 1
        return packets.encode_data(
            TrafficClass.CONTROL, next(self.numbers), len(content), 0, self.sequence, content
        )

    def ask(self, request: pb.Request) -> int:
        """Sends a request; its number."""
        request.id = next(self.numbers)
        self.send(self.whole(encode(request)))
        return request.id

    def take(self) -> list[Packet]:
        """What has come since, acknowledged and with pings answered."""
        new = [packets.decode(data) for data in self.connection.outward[self._read :]]
        self._read = len(self.connection.outward)
        for packet in new:
            if isinstance(packet, Ping):
                self.send(packets.encode_pong(packet.number))
            elif isinstance(packet, Close):
                self.closed = packet
            elif isinstance(packet, Data) and packet.sequence == self._reassembly.received + 1:
                message = self._reassembly.add_chunk(packet)
                self.send(packets.encode_ack(Ack(packet.sequence, 0, ())))
                if message is not None:
                    self._note(bytes(message))
        return new

    def _note(self, message: bytes) -> None:
        header = decode(message).header
        if isinstance(header, pb.Response):
            self.answered.add(header.id)

    @property
    def received(self) -> int:
        return self._reassembly.received

    async def settle(self) -> None:
        """Until the link has nothing more to do with what was sent."""
        for _ in range(200):
            await asyncio.sleep(0)
            self.take()
            if self.connection.inward.empty():
                break
        for _ in range(20):
            await asyncio.sleep(0)
            self.take()

    async def until_closed(self) -> str:
        async with asyncio.timeout(DEADLINE_S):
            reason = await asyncio.shield(self.running)
        self.take()
        return reason

    async def break_and_resume(self, received: int) -> bool:
        """Cuts the connection and dials again, as an end that has received so much; whether it is let in."""
        self.connection.inward.put_nowait(None)
        async with asyncio.timeout(DEADLINE_S):
            await self.link.detach()
        self.connection = PipeConnection()
        self._read = 0
        return self.link.attach(Resumed(self.connection, received))

    async def end(self) -> None:
        self.link.close("the test ends")
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(self.running, return_exceptions=True)


class Loop:
    """An event loop that runs only when told to."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.errors: list[dict[str, Any]] = []
        self._runner.get_loop().set_exception_handler(lambda _, context: self.errors.append(context))

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(what)

    def close(self) -> None:
        self._runner.close()


def noise(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)
