"""Requests from this machine alone: one exchange a connection, on loopback, of which silent ones make room."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
CONNECTIONS = 8
"""At once. Beyond that, whoever has not said for longest what he wants makes room."""
REQUEST_TIMEOUT_S = 5.0
"""For a request and its answer together."""
END_TIMEOUT_S = 1.0
"""An answer that is on its way when the listener closes may still arrive within this time."""
_log = logging.getLogger(__name__)

Read = Callable[[asyncio.StreamReader], Awaitable[bytes]]
Answer = Callable[[bytes], bytes]


class LocalListener:
    """Answers requests while the context is open."""

    def __init__(self, read: Read, answer: Answer, request_bytes: int, port: int = 0) -> None:
        """`read` takes a request of at most `request_bytes` off a connection, `answer` makes its answer."""
        self.port = port
        self._read = read
        self._answer = answer
        self._request_bytes = request_bytes
        self._listener: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}
        """Of those, who has not said what he wants, in the order in which they came."""

    async def __aenter__(self) -> Self:
        """Raises OSError: the port is taken."""
        self._listener = await asyncio.start_server(self._accept, HOST, self.port, limit=self._request_bytes)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()
        for task in self._silent:
            task.cancel()
        if self._answering:
            _, late = await asyncio.wait(self._answering, timeout=END_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._answering) >= CONNECTIONS:
            oldest = next(iter(self._silent), None)
            if oldest is None:  # all of them are being answered
                writer.close()
                return
            del self._silent[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._exchange(reader, writer), name="local request")
        self._answering.add(task)
        self._silent[task] = None
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: writer.close())  # also of a task that was cancelled before it began

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._answering.discard(task)
        self._silent.pop(task, None)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await self._read(reader)
                if task is not None:
                    self._silent.pop(task, None)
                writer.write(self._answer(request))
                await writer.drain()
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            _log.debug("a local connection ended: %r", error)  # too late, too long, or hung up
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
