"""An HTTP proxy on loopback that passes connections on (CONNECT), and cuts or mutes them when it is told to."""

import asyncio
from types import TracebackType
from typing import Self

READ_BYTES = 65536


class CuttingProxy:
    """Listens between `__aenter__` and `__aexit__`. Links of peers that are given `url` run through it."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        """What was asked for, host and port, in order."""
        self.refuses = False
        """Whether new connections are refused."""
        self.refused: set[str] = set()
        """Targets to which new connections are refused."""
        self._muted: set[asyncio.StreamWriter] = set()
        """Ends of connections that pass nothing on any more."""
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, str] = {}
        """Both ends of connections, and what was asked for."""
        self._passing: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def connections(self) -> int:
        """How many are open, each counted once."""
        return len(self._passing)

    def cut(self, target: str = "") -> int:
        """Breaks every connection at once, or those to `target`, in the middle of whatever they carry; returns how many
        there were in all."""
        count = self.connections
        for writer in self._ends(target):
            writer.transport.abort()
        return count

    def mute(self, target: str = "") -> int:
        """From now on the present connections, or those to `target`, stay open and swallow whatever comes; returns how
        many there are in all."""
        self._muted.update(self._ends(target))
        return self.connections

    def _ends(self, target: str) -> list[asyncio.StreamWriter]:
        return [writer for writer, asked in self._open.items() if target in ("", asked)]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
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
        task = asyncio.create_task(self._serve(reader, writer), name="proxy")
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = ""
        far_writer: asyncio.StreamWriter | None = None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, *_ = head.decode("ascii").split()
            assert method == "CONNECT"
            self.targets.append(target)
            self._open[writer] = target
            host, port = target.rsplit(":", 1)
            if self.refuses or target in self.refused:
                return
            far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), int(port))
            self._open[far_writer] = target
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            ways = [
                asyncio.create_task(self._pass_on(*way), name="proxy, one way")
                for way in ((reader, far_writer), (far_reader, writer))
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the ends is gone
        finally:
            for one in (writer, far_writer):
                if one is not None:
                    self._open.pop(one, None)
                    one.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the end of what comes, or a broken connection."""
        try:
            while data := await reader.read(READ_BYTES):
                if writer not in self._muted:
                    writer.write(data)
                    await writer.drain()
        except ConnectionError:
            return
