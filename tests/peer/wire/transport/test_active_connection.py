"""Two carriers back to back: what is posted leaves, whoever wakes the writer; the last packet is the last."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from support.links.data_plane import asynchronous, soon, until

from molink.peer.wire.link.connection import PacketPump
from molink.peer.wire.protocol.packets import CloseCode, encode_close
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.packet_engine import LinkClosed, PacketEngine
from molink.peer.wire.transport.shared_uplink import SharedUplink


class Pipe:
    """A stream in memory."""

    def __init__(self, incoming: "asyncio.Queue[bytes]", outgoing: "asyncio.Queue[bytes]") -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def read(self) -> object:
        return await self._incoming.get()

    async def write(self, message: bytes, /) -> None:
        await self._outgoing.put(message)


class Side:
    """A carrier with its traffic. `answers`: each message is posted back while it is taken in."""

    def __init__(self, pipe: Pipe, *, answers: bool, pace: Callable[[], float] | None = None) -> None:
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._answers = answers
        self._now_s = asyncio.get_running_loop().time
        self.traffic = PacketEngine(SharedUplink(), self._wake, lambda: None, self._now_s())
        self.carrier = PacketPump(pipe, self.traffic, self._deliver, pace)
        self.reading = asyncio.create_task(self.carrier.read())
        self.writing = asyncio.create_task(self.carrier.write())

    def post(self, content: bytes, traffic_class: TrafficClass = TrafficClass.DECODE) -> None:
        assert self.traffic.push(content, traffic_class, (), self._now_s())

    def _wake(self) -> None:
        self.carrier.wake()

    def _deliver(self, message: memoryview) -> None:
        self.messages.put_nowait(bytes(message))
        if self._answers:
            self.post(bytes(message))

    async def end(self) -> None:
        self.carrier.stop_timer()
        for task in (self.reading, self.writing):
            task.cancel()
        await asyncio.gather(self.reading, self.writing, return_exceptions=True)


@asynccontextmanager
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    there: asyncio.Queue[bytes] = asyncio.Queue()
    back: asyncio.Queue[bytes] = asyncio.Queue()
    pair = (Side(Pipe(back, there), answers=False), Side(Pipe(there, back), answers=True))
    try:
        yield pair
    finally:
        for side in pair:
            await side.end()


@asynchronous
async def test_what_is_posted_while_the_writer_waits_leaves_and_is_answered_and_acknowledged() -> None:
    async with sides() as (side, other):
        for content in (b"first", b"second"):
            side.post(content)
            assert await soon(other.messages.get()) == content
            assert await soon(side.messages.get()) == content
            await until(lambda: not side.traffic.owes_or_is_owed and not other.traffic.owes_or_is_owed)


@asynchronous
async def test_bulk_that_waits_for_its_window_leaves_when_time_or_an_acknowledgement_lets_it() -> None:
    async with sides() as (side, other):
        content = bytes(range(256)) * 8192
        side.post(content, TrafficClass.PREFILL)
        assert await soon(other.messages.get()) == content
        await until(lambda: not side.traffic.owes_or_is_owed)


@asynchronous
async def test_the_last_packet_wakes_a_writer_that_waits_and_nothing_follows_it() -> None:
    async with sides() as (side, other):
        side.carrier.say_last(encode_close(CloseCode.DONE, "enough"))
        side.post(b"too late")
        assert await soon(side.writing) == "this end closed it"
        (ended,) = await asyncio.gather(other.reading, return_exceptions=True)
        assert isinstance(ended, LinkClosed)
        assert other.messages.empty()


class Waits:
    """Traffic that has nothing to send, and says until when: one time after another, then never."""

    def __init__(self, *until_s: float) -> None:
        self._until_s = list(until_s)
        self.looked_s: list[float] = []

    def next_packet(self, now_s: float) -> float:
        self.looked_s.append(now_s)
        return self._until_s.pop(0) if self._until_s else math.inf


@asynchronous
async def test_it_looks_for_something_to_send_when_it_was_told_last() -> None:
    now_s = asyncio.get_running_loop().time()
    traffic = Waits(now_s + 0.05, now_s + 0.2)
    carrier = PacketPump(Pipe(asyncio.Queue(), asyncio.Queue()), traffic, lambda _: None)  # type: ignore[arg-type]
    writing = asyncio.create_task(carrier.write())
    await until(lambda: len(traffic.looked_s) == 1)
    carrier.wake()
    await until(lambda: len(traffic.looked_s) == 3)
    assert traffic.looked_s[2] >= now_s + 0.2
    carrier.stop_timer()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


@asynchronous
async def test_while_the_pace_says_wait_nothing_more_is_read() -> None:
    there: asyncio.Queue[bytes] = asyncio.Queue()
    asked: asyncio.Queue[None] = asyncio.Queue()
    waits_s = [0.0]

    def pace() -> float:
        asked.put_nowait(None)
        return waits_s[-1]

    sender = Side(Pipe(asyncio.Queue(), there), answers=False)
    paced = Side(Pipe(there, asyncio.Queue()), answers=False, pace=pace)
    try:
        sender.post(b"first")
        assert await soon(paced.messages.get()) == b"first"
        await soon(asked.get())
        waits_s.append(0.001)
        sender.post(b"second")
        assert await soon(paced.messages.get()) == b"second"
        sender.post(b"third")
        for _ in range(20):
            await soon(asked.get())
        assert paced.messages.empty()
        waits_s.append(0.0)
        assert await soon(paced.messages.get()) == b"third"
    finally:
        await sender.end()
        await paced.end()
