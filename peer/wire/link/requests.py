"""Requests over a link: questions of this end that wait for their answers, and those of the other end that are being
answered."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.message_memory import MemoryAccount
from molink.peer.wire.transport.packet_engine import PacketEngine

MAX_REQUESTS_IN_FLIGHT = 64
MAX_RELEASES_IN_FLIGHT = 512
"""On top of them: a release refused would leave its lease standing. Whoever sends more loses the link, and with it all
its leases."""
MAX_TURNED_AWAY = 512
"""So many more requests beyond those in flight than are taken meanwhile, and the link ends."""
BUSY_RETRY_MS = 500
LARGE = frozenset(("get_manifest", "get_file"))
"""Requests whose answers have payloads: of each link one at a time is made, when those before it are acknowledged."""
ANSWER_BYTES = 1024 * 1024
"""While more than this of such answers is not acknowledged, no further one is made."""

Answer = tuple[pb.Response, memoryview]
Send = Callable[[pb.Response, bytes, TrafficClass], bool]
Serve = Callable[[pb.Request], Awaitable[tuple[pb.Response, bytes]]]


class Requests:
    """Requests of a link, in both directions, and their owner."""

    def __init__(self, send: Send, serve: Serve, packets: PacketEngine, holder: MemoryAccount) -> None:
        """`serve` makes an answer, and its payload; `send` posts it. `holder` has the memory of what is asked."""
        self._send = send
        self._serve = serve
        self._packets = packets
        self._holder = holder
        self._large = asyncio.Lock()
        self._turned_away = 0
        """Requests, less those that were taken since."""
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> bool:
        """Whether this end waits for an answer."""
        return bool(self._answers)

    @property
    def serving(self) -> tuple[asyncio.Task[None], ...]:
        """Answers that are being made."""
        return tuple(self._serving)

    @contextmanager
    def asking(self, request: pb.Request) -> Iterator["asyncio.Future[Answer]"]:
        """Sets the request's id; its answer comes within the block, or never."""
        request.id = next(self._ids)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[request.id] = answer
        try:
            yield answer
        finally:
            del self._answers[request.id]

    def answered(self, response: pb.Response, payload: memoryview) -> None:
        """Takes in an answer of the other end. Nobody may be waiting for it any more."""
        answer = self._answers.get(response.id)
        if answer is not None and not answer.done():
            answer.set_result((response, payload))

    def asked(self, request: pb.Request, size_bytes: int) -> None:
        """The other end asks, in a message of so many bytes.

        Raises:
            ProtocolError: it does so much more often than it gets answers.
        """
        releases = request.WhichOneof("body") == "release"
        full = len(self._serving) >= MAX_REQUESTS_IN_FLIGHT + (MAX_RELEASES_IN_FLIGHT if releases else 0)
        if full or not self._holder.take_in(size_bytes):
            self._turned_away += 1
            if releases:
                raise ProtocolError(f"more than {MAX_RELEASES_IN_FLIGHT} releases at once, or too large ones")
            if self._turned_away > MAX_TURNED_AWAY:
                raise ProtocolError(f"{self._turned_away} requests beyond {MAX_REQUESTS_IN_FLIGHT} at once")
            refusal = pb.Refusal(
                code="busy", detail="too many requests at once on this link", retry_after_ms=BUSY_RETRY_MS
            )
            self._send(pb.Response(id=request.id, refusal=refusal), b"", TrafficClass.CONTROL)
            return
        self._turned_away = max(0, self._turned_away - 1)
        task = asyncio.create_task(self._answer(request))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        task.add_done_callback(lambda _: self._holder.give_in(size_bytes))

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fails all requests under way: whoever waits for an answer gets an error."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error())

    async def _answer(self, request: pb.Request) -> None:
        if request.WhichOneof("body") not in LARGE:
            await self._serve_and_send(request)
            return
        async with self._large:
            while self._packets.answer_bytes > ANSWER_BYTES:
                await self._room()
            await self._serve_and_send(request)

    async def _serve_and_send(self, request: pb.Request) -> None:
        response, payload = await self._serve(request)
        response.id = request.id
        traffic_class = TrafficClass.WEIGHTS if payload else TrafficClass.CONTROL
        while not self._send(response, payload, traffic_class) and payload:
            await self._room()

    async def _room(self) -> None:
        """Until something has left the link, or was acknowledged. The link ends if that takes too long, and this with
        it."""
        room = asyncio.Event()
        self._packets.when_room(room.set)
        await room.wait()
