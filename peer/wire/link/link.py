"""A link: two peers, or a client and a peer, that exchange frames. Frames are symmetric, whoever dialled.

A link outlives its connections: when one breaks, the end that dialled dials again, and both go on where they were.
What the other end may send, how it is cut into packets and in which order they leave is `packet_engine`'s.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import Message

from molink.peer.wire.link.active_connection import ActiveConnection
from molink.peer.wire.link.connection import BREAKS, Connection, why_broken
from molink.peer.wire.link.handshake import Remote
from molink.peer.wire.link.link_resources import LinkResources
from molink.peer.wire.link.requests import Requests
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError, decode, encode
from molink.peer.wire.protocol.packets import CloseCode, PacketError, encode_close
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.keepalive import FIRST_PING_INTERVAL_S, FIRST_PINGS, TICK_S
from molink.peer.wire.transport.line_quality import LinkQuality
from molink.peer.wire.transport.packet_engine import LinkClosed, PacketEngine


class LinkError(ConnectionError):
    """A link could not be made, or broke while something waited on it."""

    def __init__(self, peer_id: str, reason: str, *, final: bool = False) -> None:
        super().__init__(f"link to {peer_id}: {reason}")
        self.peer_id = peer_id
        self.reason = reason
        self.final = final
        """Another try would end the same."""


class LinkHandler(Protocol):
    """Link handler: what the owner of a link does with what arrives."""

    def on_frame(self, link: "Link", frame: Frame) -> None:
        """A frame of a session. Must not block. ProtocolError closes the link."""

    async def on_request(self, link: "Link", request: pb.Request) -> tuple[pb.Response, bytes]:
        """The answer to a request, and its payload."""

    def on_closed(self, link: "Link", reason: str) -> None:
        """Handles the end of the link: it is gone for good."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Another connection of a link, and the last chunk that the other end has received."""

    connection: Connection
    received: int


Redial = Callable[["Link"], Awaitable[Resumed]]  # raises LinkError


@dataclass(frozen=True, slots=True)
class _End:
    """A link ends: why, and what the other end is told, if it is to be told."""

    reason: str
    code: CloseCode | None = None


class Link:
    """One end of a link whose other end is proven. `run` it; `post` and `request` from anywhere on the loop."""

    def __init__(
        self,
        link_id: bytes,
        remote: Remote,
        connection: Connection,
        handler: LinkHandler,
        resources: LinkResources,
        redial: "Redial | None" = None,
    ) -> None:
        """`redial` makes another connection, or raises LinkError; without it the other end is who dials, and its pace
        is kept."""
        loop = asyncio.get_running_loop()
        self.link_id = link_id
        self.remote = remote
        self.closed_because: str | None = None
        self._connection = connection
        self._handler = handler
        self._redial = redial
        self._next_redial: Redial | None = None
        self._pace = resources.pace if redial is None else None
        self._paced_acknowledged = 0
        self._measured = asyncio.Event()
        holder = resources.memory.open(remote.peer_id, self._evicted, self._room)
        self._resume_s = resources.times.resume_s
        self._packets = PacketEngine(
            resources.uplink,
            self._wake,
            self._measured.set,
            loop.time(),
            holder,
            resources.times.busy_lost_after_s,
        )
        self._packets.round_trips.secret = secrets.token_bytes(16)
        self._closing: asyncio.Future[_End] = loop.create_future()
        self._suspended = asyncio.Event()
        self._resumed: asyncio.Future[Resumed] = loop.create_future()
        self._carried: ActiveConnection | None = None
        self._requests = Requests(
            self.post, lambda request: handler.on_request(self, request), self._packets, holder
        )

    @property
    def peer_id(self) -> str:
        return self.remote.peer_id

    @property
    def connection(self) -> Connection:
        """The connection in use, or the last one."""
        return self._connection

    @property
    def received(self) -> int:
        """The last chunk that has arrived here."""
        return self._packets.received

    @property
    def unheard_s(self) -> float:
        """Seconds since anything arrived."""
        return asyncio.get_running_loop().time() - self._packets.keepalive.heard_s

    def seems_dead_in_s(self) -> float:
        """Seconds in which no sign of life can be late; 0 or less if one is: the connection may be gone."""
        if self._carried is None:
            return TICK_S
        now_s, least_s = asyncio.get_running_loop().time(), self._packets.round_trips.least_s or 0.0
        return self._packets.keepalive.seems_dead_s(now_s, least_s) - now_s

    @property
    def quiet_s(self) -> float:
        """Seconds since anything but signs of life travelled, in either direction; 0 while something is to."""
        if self._packets.owes_or_is_owed:
            return 0.0
        return asyncio.get_running_loop().time() - self._packets.keepalive.used_s

    @property
    def used_s(self) -> float:
        """When anything but signs of life last travelled, on the event loop's clock."""
        return self._packets.keepalive.used_s

    @property
    def quality(self) -> LinkQuality:
        """Quality of the link, as this end has measured it."""
        estimate, rtt_ms = self._packets.estimate(), self.rtt_ms
        round_trip_s = None if rtt_ms is None else rtt_ms / 1000
        return LinkQuality(self.peer_id, estimate.bandwidth_bytes_per_s, round_trip_s, estimate.queueing_s)

    def expect_decode(self, at_s: float) -> None:
        """Tells the scheduler when the next decode is predicted to be posted here, on the event loop's clock."""
        if self.closed_because is None:
            self._packets.expect_decode(at_s)

    @property
    def rtt_ms(self) -> float | None:
        """The round trip in milliseconds, once measured."""
        least_s = self._packets.round_trips.least_s
        return None if least_s is None else least_s * 1000

    def post(
        self,
        header: Message,
        payload: bytes | memoryview = b"",
        traffic_class: TrafficClass = TrafficClass.CONTROL,
        sessions: tuple[bytes, ...] = (),
        deadline_s: float = 0.0,
    ) -> bool:
        """Queues a frame. False, and nothing queued, when the queue is full or the link is closed.

        `sessions`: it is dropped if all of them are cancelled before it has left; without any it stays.
        `deadline_s`: earliest deadline first among the messages of its class (`transmission.values`).
        """
        if self.closed_because is not None:
            return False
        now_s = asyncio.get_running_loop().time()
        return self._packets.push(encode(header, payload), traffic_class, sessions, now_s, deadline_s)

    def when_room(self, room: Callable[[], None]) -> None:
        """Calls `room` once and soon after there may be room where `post` found none, or after the link has closed."""

        def call_soon() -> None:
            asyncio.get_running_loop().call_soon(room)

        if self.closed_because is not None:
            call_soon()
        else:
            self._packets.when_room(call_soon)

    async def request(self, request: pb.Request, timeout_s: float) -> tuple[pb.Response, memoryview]:
        """Sends a request (its id is set here) and waits for the answer.

        Raises:
            LinkError: the link is closed, breaks, is full, or `timeout_s` passes.
        """
        with self._requests.asking(request) as answer:
            if not self.post(request):
                raise LinkError(self.peer_id, self.closed_because or "its queue is full")
            try:
                async with asyncio.timeout(timeout_s):
                    return await answer
            except TimeoutError:
                asked = request.WhichOneof("body")
                raise LinkError(self.peer_id, f"no answer to {asked} within {timeout_s:g} s") from None

    async def measured(self) -> float:
        """The round trip in milliseconds, as soon as the first pings are answered. Give it a deadline."""
        await self._measured.wait()
        return self.rtt_ms or 0.0

    def close(self, reason: str, code: CloseCode = CloseCode.DONE) -> None:
        """Ends `run` soon, and tells the other end."""
        if not self._closing.done():
            self._closing.set_result(_End(reason, code))

    async def detach(self) -> None:
        """Lets go of the present connection: the other end has dialled again. `received` stands still then."""
        if self._carried is not None:
            self._carried.lost()
        await self._suspended.wait()

    def attach(self, resumed: Resumed) -> bool:
        """Goes on over another connection. False: the link has ended, or has one already."""
        if not self._suspended.is_set() or self._resumed.done() or self.closed_because is not None:
            return False
        self._resumed.set_result(resumed)
        return True

    def move(self, redial: "Redial") -> bool:
        """Goes on over the connection that `redial` resumes it with; the present one is let go of first, for what has
        arrived must stand still then. False: this end did not dial, or the link has no connection now."""
        if self._redial is not None and self._carried is not None and self.closed_because is None:
            self._next_redial = redial
            self._carried.lost()
        return self._next_redial is redial

    async def run(self) -> str:
        """Serves the link until either end closes it or it is lost; returns why."""
        watch = asyncio.create_task(self._watch(), name=f"link {self.peer_id} watch")
        end = _End("one of its ends stopped", CloseCode.DONE)
        try:
            end = await self._serve()
        finally:
            self.closed_because = end.reason
            self._packets.close()
            ending = (watch, *self._requests.serving)
            for task in ending:
                task.cancel()
            self._closing.cancel()
            self._suspended.set()
            self._requests.fail(lambda: LinkError(self.peer_id, end.reason))
            self._handler.on_closed(self, end.reason)
            # Last, because gRPC may cancel this a second time: nobody must be left waiting then.
            await self._let_go(end)
            await asyncio.gather(*ending, return_exceptions=True)
        return end.reason

    # -- connections

    async def _serve(self) -> _End:
        """Over one connection after the other."""
        connection, clock = self._connection, asyncio.get_running_loop().time
        while True:
            broken = await self._carry(connection)
            if isinstance(broken, _End):
                return broken
            self._packets.suspend(clock())
            await self._let_go()
            resumed = await self._another(broken)
            if isinstance(resumed, _End):
                return resumed
            connection = self._connection = resumed.connection
            try:
                self._packets.resume(resumed.received, clock())
            except PacketError as error:
                await connection.close()
                return _End(f"protocol error: {error}")

    def _wait_s(self) -> float:
        """For how long nothing more is to be read. What acknowledges something was asked for."""
        acknowledged, before = self._packets.acknowledged, self._paced_acknowledged
        self._paced_acknowledged = acknowledged
        return self._pace(self) if acknowledged == before and self._pace is not None else 0.0

    def _evicted(self) -> None:
        """What the link holds of the process's memory has to make room."""
        self._packets.forget_unfinished()
        self.close("its messages had to make room for those of others", CloseCode.OVERLOAD)

    def _room(self) -> None:
        self._packets.tell_room()

    def _wake(self) -> None:
        """There may be something to send. A connection that comes later looks by itself."""
        if self._carried is not None:
            self._carried.wake()

    async def _carry(self, connection: Connection) -> str | _End:
        """Uses a connection until it breaks, or the link ends; why."""
        pace = self._wait_s if self._pace is not None else None
        carried = self._carried = ActiveConnection(
            connection, self._packets, self._dispatch, self.peer_id, pace
        )
        ended = await carried.ended(self._closing)
        return self._closing.result() if self._closing.done() else _outcome(ended)

    async def _another(self, broken: str) -> Resumed | _End:
        """Another connection, or why there is none."""
        resumed = self._resumed
        if self._redial is not None:
            resumed = asyncio.ensure_future(self._redialled(self._redial))
        self._suspended.set()
        try:
            await asyncio.wait(
                (resumed, self._closing), timeout=self._resume_s, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            if resumed.done() and not resumed.cancelled() and resumed.exception() is None:
                await resumed.result().connection.close()  # nobody else will
            raise
        finally:
            self._suspended.clear()
            self._resumed = asyncio.get_running_loop().create_future()
            if not resumed.done():
                resumed.cancel()
                await asyncio.gather(resumed, return_exceptions=True)
        if resumed.cancelled():
            return self._closing.result() if self._closing.done() else _End(broken)
        error = resumed.exception()
        if isinstance(error, LinkError):
            return _End(f"{broken}, and could not be resumed: {error.reason}")
        if error is not None:
            raise error
        return resumed.result()

    async def _redialled(self, redial: Redial) -> Resumed:
        """Over the connection that the link moves to, or else as always. Raises LinkError."""
        if (moving := self._next_redial) is not None:
            self._next_redial = None
            with suppress(LinkError):
                return await moving(self)
        return await redial(self)

    async def _let_go(self, end: _End | None = None) -> None:
        """Leaves the present connection, with a last packet if the other end is to be told that the link ends."""
        carried, self._carried = self._carried, None
        if carried is not None:
            farewell = None if end is None or end.code is None else encode_close(end.code, end.reason)
            await carried.let_go(farewell, dialled=self._redial is not None)

    def _dispatch(self, message: memoryview) -> None:
        frame = decode(message)
        header = frame.header
        if isinstance(header, pb.Response):
            self._requests.answered(header, frame.payload)
        elif isinstance(header, pb.Request):
            self._requests.asked(header, len(message))
        else:
            self._handler.on_frame(self, frame)

    async def _watch(self) -> None:
        """Measures a new link, then keeps an eye on the other end's life."""
        clock, traffic = asyncio.get_running_loop().time, self._packets
        for _ in range(FIRST_PINGS):
            traffic.ping(clock())
            await asyncio.sleep(FIRST_PING_INTERVAL_S)
        while True:
            await asyncio.sleep(TICK_S)
            if self._carried is None:
                continue
            if not traffic.tick(clock(), awaits=self._requests.waiting):
                self.close(f"nothing heard for {traffic.keepalive.silent_s(clock()):.0f} s", CloseCode.SILENT)
            elif (stalled := traffic.stalled(clock())) is not None:
                self.close(stalled, CloseCode.OVERLOAD)


def _outcome(ended: "asyncio.Task[str]") -> str | _End:
    """What the end of one of a connection's tasks means for the link: the connection broke, or the link ends."""
    if not ended.done() or ended.cancelled():
        return "the connection is gone"
    error = ended.exception()
    if error is None:
        return ended.result()
    if isinstance(error, PacketError):
        return _End(f"protocol error: {error}", error.code)
    if isinstance(error, ProtocolError):
        return _End(f"protocol error: {error}", CloseCode.MESSAGE)
    if isinstance(error, LinkClosed):
        return _End(f"the other end closed it: {error}")
    if isinstance(error, BREAKS):
        return why_broken(error)
    raise error
