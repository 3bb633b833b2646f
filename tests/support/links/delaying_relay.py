"""A slow network on loopback: TCP connections passed on to another port, every byte later than it came."""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Self

CHUNK_BYTES = 65536


class DelayingRelay:
    """Listens between `__aenter__` and `__aexit__`; bytes keep their order and are delayed in both directions.

    `delay_of`, where given, says how many seconds one way a connection takes, by the dialler's port; it is asked
    anew for each chunk. Else it is `delay_s`, which may be changed at any time.
    """

    def __init__(
        self,
        target_port: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        delay_of: Callable[[int], float] | None = None,
    ) -> None:
        self.port = port
        self.delay_s = 0.0
        self._host = host
        self._target_port = target_port
        self._delay_of = delay_of
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end closes or breaks."""
        dialler_port = writer.get_extra_info("peername")[1]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        directions = [
            asyncio.create_task(part)
            for there, back in ((reader, far_writer), (far_reader, writer))
            for part in self._one_way(there, back, dialler_port)
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in directions:
                task.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            writer.close()
            far_writer.close()

    def _one_way(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, dialler_port: int
    ) -> tuple[Coroutine[None, None, None], Coroutine[None, None, None]]:
        """What takes bytes in, and what hands them out when they are due: the end of the stream too."""
        clock = asyncio.get_running_loop().time
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def collect() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(CHUNK_BYTES)
                except ConnectionError:
                    data = b""
                delay_s = self.delay_s if self._delay_of is None else self._delay_of(dialler_port)
                waiting.put_nowait((clock() + delay_s, data))
            await asyncio.Event().wait()  # what hands it out ends the connection

        async def hand_out() -> None:
            while True:
                due_s, data = await waiting.get()
                await asyncio.sleep(due_s - clock())
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        return collect(), hand_out()
