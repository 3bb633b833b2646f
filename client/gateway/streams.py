"""Several generations at once for one request, ended as soon as the client is gone."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from molink.client.api.event_streams import PROMPT_COUNTED
from molink.client.api.generation import TextPiece

QUEUED_PIECES: Final = 64
T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection."""


class WatchesChoices(Protocol):
    """What is told how generations go, each by its number: `AdmittedRequest`."""

    def begin(self, generation: int) -> None:
        """It begins."""
        ...

    def count_prompt(self, generation: int, tokens: int) -> None:
        """Its prompt has so many tokens."""
        ...

    def note(self, generation: int, piece: TextPiece) -> None:
        """It has come to one more piece."""
        ...

    def fail(self, error: Exception, generation: int | None = None) -> None:
        """It has failed; None: all of them have."""
        ...


class Choices:
    """The pieces of several generations, in the order in which they come. Leaving it ends those still under
    way.
    """

    def __init__(self, streams: Sequence[AsyncIterator[TextPiece]]) -> None:
        self._streams = streams
        self._queue: asyncio.Queue[tuple[int, TextPiece | Exception]] = asyncio.Queue(QUEUED_PIECES)
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(streams)
        self._failure: Exception | None = None
        """What has ended them, behind pieces that were taken with it."""
        self._ended_by: Exception | None = None
        """What has ended them from outside, behind all pieces that have come."""
        self._watcher: WatchesChoices | None = None

    @property
    def count(self) -> int:
        """How many generations there are."""
        return len(self._streams)

    @property
    def left(self) -> int:
        """Those of which the end has not come."""
        return self._left

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._pump(*numbered)) for numbered in enumerate(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def watch(self, watcher: WatchesChoices) -> None:
        """Has somebody told how they go; before anything has begun."""
        self._watcher = watcher

    async def next(self) -> list[tuple[int, TextPiece]]:
        """The pieces that have come since, each with the number of its choice, at least one; not to be asked for after
        the last.

        Raises whatever one of the generations raised, once the pieces before that are taken.
        """
        if self._failure is None and self._queue.empty():
            self._failure = self._ended_by
        if self._failure is not None:
            raise self._failure
        taken: list[tuple[int, TextPiece]] = []
        item = await self._queue.get()
        while True:
            choice, piece = item
            if isinstance(piece, Exception):
                if not taken:
                    raise piece
                self._failure = piece
                return taken
            if piece.finish_reason is not None:
                self._left -= 1
            taken.append((choice, piece))
            if self._queue.empty():
                return taken
            item = self._queue.get_nowait()

    def fail(self, error: Exception) -> None:
        """Ends all of them: `next` raises the error after at most QUEUED_PIECES pieces that have come before."""
        for task in self._tasks:
            task.cancel()
        if self._watcher is not None:
            self._watcher.fail(error)
        self._ended_by = error
        if self._queue.empty():
            self._queue.put_nowait((0, error))  # somebody may wait for a piece

    async def _pump(self, choice: int, stream: AsyncIterator[TextPiece]) -> None:
        watcher = self._watcher
        if watcher is not None:
            watcher.begin(choice)
            PROMPT_COUNTED.set(partial(watcher.count_prompt, choice))
        try:
            async for piece in stream:
                if watcher is not None:
                    watcher.note(choice, piece)
                await self._queue.put((choice, piece))
                if piece.finish_reason is not None:
                    return
            raise RuntimeError("a generation ended without saying why")
        except Exception as error:  # noqa: BLE001 - it goes to whoever waits in next()
            if watcher is not None:
                watcher.fail(error, choice)
            await self._queue.put((choice, error))
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. Raises `ClientGone`, and ends the work, if the client leaves before."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, as they go over the wire, out of an async generator, which is closed however the response
    ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        async with aclosing(self._events) as events:
            try:
                await until_gone(receive, self._send_all(events, send))
            except (ClientGone, OSError):
                return

    async def _send_all(self, events: AsyncIterator[bytes], send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in events:
            # A client that does not read is the connection's to end: this then meets a client that is gone.
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
