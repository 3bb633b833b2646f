"""Requests over a link: questions of this end that wait for their answers, and those of the other end that are being
answered."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import ProtocolError
from molink.peer.transmission.classes import TrafficClass

MAX_REQUESTS_IN_FLIGHT = 64
MAX_RELEASES_IN_FLIGHT = 512
"""On top of them: a release refused would leave its lease standing. Whoever sends more loses the link, and with it all
its leases."""
BUSY_RETRY_MS = 500

Answer = tuple[pb.Response, memoryview]
Send = Callable[[pb.Response, bytes, TrafficClass], object]
Serve = Callable[[pb.Request], Awaitable[tuple[pb.Response, bytes]]]


class Requests:
    """Owner of what a link has been asked and asks."""

    def __init__(self, send: Send, serve: Serve) -> None:
        """`serve` makes an answer, and its payload; `send` posts it."""
        self._send = send
        self._serve = serve
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
        """The other end has answered. Nobody may be waiting for it any more."""
        answer = self._answers.get(response.id)
        if answer is not None and not answer.done():
            answer.set_result((response, payload))

    def asked(self, request: pb.Request) -> None:
        """The other end asks.

        Raises:
            ProtocolError: it does so much more often than it gets answers.
        """
        releases = request.WhichOneof("body") == "release"
        if len(self._serving) >= MAX_REQUESTS_IN_FLIGHT + (MAX_RELEASES_IN_FLIGHT if releases else 0):
            if releases:
                raise ProtocolError(f"more than {MAX_RELEASES_IN_FLIGHT} releases at once")
            refusal = pb.Refusal(
                code="busy", detail="too many requests at once on this link", retry_after_ms=BUSY_RETRY_MS
            )
            self._send(pb.Response(id=request.id, refusal=refusal), b"", TrafficClass.CONTROL)
            return
        task = asyncio.create_task(self._answer(request))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def fail(self, error: Callable[[], Exception]) -> None:
        """There will be no answers any more: whoever waits for one gets an error."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error())

    async def _answer(self, request: pb.Request) -> None:
        response, payload = await self._serve(request)
        response.id = request.id
        self._send(response, payload, TrafficClass.WEIGHTS if payload else TrafficClass.CONTROL)
