"""A link: one long-lived bidirectional gRPC stream between two peers, or a client and a peer. Frames are symmetric.

Whoever dialled, both ends read and write the same kinds of frame. What waits to be sent is ordered by traffic class;
pings keep watch and measure the round trip.
"""

import asyncio
import collections
import itertools
from typing import Protocol

import grpc
from google.protobuf.message import Message

from molink.peer.handshake import Remote
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import Frame, ProtocolError, decode, encode
from molink.peer.transmission.classes import TrafficClass
from molink.peer.transmission.queue import SendQueue

PING_INTERVAL_S = 1.0
LOST_AFTER_S = 4.0
"""A link on which nothing arrived for so long, pings unanswered, is lost."""
MAX_REQUESTS_IN_FLIGHT = 64
MAX_RELEASES_IN_FLIGHT = 512
"""On top of them: a release refused would leave its lease standing. Whoever sends more loses the link, and with it all
its leases."""
RTT_SAMPLES = 8
"""The round trip is the least of so many: what is above it was waiting, which routers count elsewhere."""
FIRST_PINGS = 3
FIRST_PING_INTERVAL_S = 0.05
"""A new link is measured a few times at once."""


class LinkError(ConnectionError):
    """A link could not be made, or broke while something waited on it."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(f"link to {peer_id}: {reason}")
        self.peer_id = peer_id
        self.reason = reason


class Stream(Protocol):
    """What grpc.aio offers on both ends of a bidirectional call."""

    async def read(self) -> object: ...

    async def write(self, message: bytes) -> None: ...


class LinkHandler(Protocol):
    """What the owner of a link does with what arrives."""

    def on_frame(self, link: "Link", frame: Frame) -> None:
        """A frame of a session. Must not block. ProtocolError closes the link."""

    async def on_request(self, link: "Link", request: pb.Request) -> tuple[pb.Response, bytes]:
        """The answer to a request, and its payload."""

    def on_closed(self, link: "Link", reason: str) -> None:
        """The link is gone for good."""


class Link:
    """One end of a link whose other end is proven. `run` it; `post` and `request` from anywhere on the loop."""

    def __init__(self, stream: Stream, remote: Remote, handler: LinkHandler) -> None:
        self.remote = remote
        self._rtts_ms: collections.deque[float] = collections.deque(maxlen=RTT_SAMPLES)
        self.closed_because: str | None = None
        self._stream = stream
        self._handler = handler
        self._queue = SendQueue()
        self._wake = asyncio.Event()
        self._closing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[tuple[pb.Response, memoryview]]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._pings: dict[int, float] = {}
        self._heard_s = asyncio.get_running_loop().time()
        self._measured = asyncio.Event()

    @property
    def peer_id(self) -> str:
        return self.remote.peer_id

    @property
    def unheard_s(self) -> float:
        """Seconds since anything arrived; the other end answers pings every PING_INTERVAL_S."""
        return asyncio.get_running_loop().time() - self._heard_s

    @property
    def rtt_ms(self) -> float | None:
        """The round trip in milliseconds, once measured."""
        return min(self._rtts_ms, default=None)

    def post(
        self,
        header: Message,
        payload: bytes | memoryview = b"",
        traffic_class: TrafficClass = TrafficClass.CONTROL,
    ) -> bool:
        """Queues a frame. False, and nothing queued, when the queue is full or the link is closed."""
        if self.closed_because is not None or not self._queue.push(traffic_class, encode(header, payload)):
            return False
        self._wake.set()
        return True

    async def request(self, request: pb.Request, timeout_s: float) -> tuple[pb.Response, memoryview]:
        """Sends a request (its id is set here) and waits for the answer.

        Raises:
            LinkError: the link is closed, breaks, is full, or `timeout_s` passes.
        """
        request.id = next(self._ids)
        answer: asyncio.Future[tuple[pb.Response, memoryview]] = asyncio.get_running_loop().create_future()
        self._answers[request.id] = answer
        try:
            if not self.post(request):
                raise LinkError(self.peer_id, self.closed_because or "its queue is full")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            asked = request.WhichOneof("body")
            raise LinkError(self.peer_id, f"no answer to {asked} within {timeout_s:g} s") from None
        finally:
            del self._answers[request.id]

    async def measured(self) -> float:
        """The round trip in milliseconds, as soon as the first pings are answered. Give it a deadline."""
        await self._measured.wait()
        return min(self._rtts_ms)

    def close(self, reason: str) -> None:
        """Ends `run` soon."""
        if not self._closing.done():
            self._closing.set_result(reason)

    async def run(self) -> str:
        """Serves the link until either end closes it or it is lost; returns why."""
        parts = [
            asyncio.create_task(part, name=f"link {self.peer_id} {name}")
            for name, part in (("read", self._read()), ("write", self._write()), ("watch", self._watch()))
        ]
        reason = "one of its ends stopped"
        try:
            done, _ = await asyncio.wait({*parts, self._closing}, return_when=asyncio.FIRST_COMPLETED)
            reason = _reason(done.pop())
        finally:
            self.closed_because = reason
            ending = (*parts, *self._serving)
            for task in ending:
                task.cancel()
            self._closing.cancel()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(LinkError(self.peer_id, reason))
            self._handler.on_closed(self, reason)
            # Last, because gRPC may cancel this a second time: nobody must be left waiting then.
            await asyncio.gather(*ending, return_exceptions=True)
        return reason

    async def _read(self) -> str:
        clock = asyncio.get_running_loop().time
        while True:
            data = await self._stream.read()
            if not isinstance(data, bytes):
                return "the other end closed it"
            self._heard_s = clock()
            self._dispatch(decode(data))

    def _dispatch(self, frame: Frame) -> None:
        header = frame.header
        if isinstance(header, pb.Ping):
            self.post(pb.Pong(id=header.id))
        elif isinstance(header, pb.Pong):
            self._measure(header)
        elif isinstance(header, pb.Response):
            answer = self._answers.get(header.id)
            if answer is not None and not answer.done():
                answer.set_result((header, frame.payload))
        elif isinstance(header, pb.Request):
            releases = header.WhichOneof("body") == "release"
            if len(self._serving) >= MAX_REQUESTS_IN_FLIGHT + (MAX_RELEASES_IN_FLIGHT if releases else 0):
                if releases:
                    raise ProtocolError(f"more than {MAX_RELEASES_IN_FLIGHT} releases at once")
                refusal = pb.Refusal(
                    code="busy", detail="too many requests at once on this link", retry_after_ms=500
                )
                self.post(pb.Response(id=header.id, refusal=refusal))
                return
            task = asyncio.create_task(self._answer(header))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        else:
            self._handler.on_frame(self, frame)

    async def _answer(self, request: pb.Request) -> None:
        response, payload = await self._handler.on_request(self, request)
        response.id = request.id
        self.post(response, payload, TrafficClass.WEIGHTS if payload else TrafficClass.CONTROL)

    async def _write(self) -> str:
        while True:
            frame = self._queue.pop()
            if frame is None:
                self._wake.clear()
                await self._wake.wait()
            else:
                await self._stream.write(frame)

    async def _watch(self) -> str:
        """Pings, and declares the link lost when nothing at all arrives for LOST_AFTER_S."""
        clock = asyncio.get_running_loop().time
        self._heard_s = clock()
        for ping_id in itertools.count(1):
            interval_s = FIRST_PING_INTERVAL_S if ping_id < FIRST_PINGS else PING_INTERVAL_S
            sent_s = clock()
            self._pings[ping_id] = sent_s
            self._pings.pop(ping_id - RTT_SAMPLES, None)
            self.post(pb.Ping(id=ping_id))
            await asyncio.sleep(interval_s)
            # A loop of ours that slept late has not had its chance to read: that says nothing of the other end.
            overslept_s = clock() - sent_s - interval_s
            if clock() - self._heard_s > LOST_AFTER_S and overslept_s < PING_INTERVAL_S:
                return f"nothing heard for {LOST_AFTER_S:g} s"
        raise AssertionError("unreachable: the ping counter is endless")

    def _measure(self, pong: pb.Pong) -> None:
        sent_s = self._pings.pop(pong.id, None)
        if sent_s is not None:
            self._rtts_ms.append((asyncio.get_running_loop().time() - sent_s) * 1000)
            if len(self._rtts_ms) >= FIRST_PINGS:
                self._measured.set()


def _reason(ended: "asyncio.Future[str]") -> str:
    """Why a part of a link ended: its own word, or the error that ended it."""
    error = ended.exception()
    if error is None:
        return ended.result()
    if isinstance(error, ProtocolError):
        return f"protocol error: {error}"
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    if isinstance(error, (ConnectionError, asyncio.InvalidStateError, grpc.RpcError, grpc.aio.UsageError)):
        return f"the connection broke: {error}"
    raise error
