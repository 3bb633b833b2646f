"""Connections that say nothing, or no more than they have to, in each stage before a link."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from molink.dht.records.records import PeerFacts

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
CONNECT_TIMEOUT_S = 60.0
AT_ONCE = 50


def grpc_port(facts: PeerFacts) -> int:
    return int(facts.grpc_addresses[0].rsplit(":", 1)[1])


def careless_tls() -> ssl.SSLContext:
    """Takes any certificate, and speaks HTTP/2."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


class Silence:
    """Connections that are held open, and opened again when the other end closes them."""

    def __init__(self, port: int, count: int, tls: ssl.SSLContext | None, opening: bytes) -> None:
        self.opened = 0
        self._port = port
        self._count = count
        self._tls = tls
        self._opening = opening
        self._held: list[asyncio.StreamWriter] = []
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def connect(self) -> None:
        """All of them once; what is refused is refused."""
        await asyncio.gather(*(self._connect() for _ in range(self._count)))

    async def hold(self) -> None:
        """Keeps as many, until cancelled."""
        while True:
            alive = [writer for writer in self._held if not writer.transport.is_closing()]
            self._held = alive
            missing = self._count - len(alive)
            await asyncio.gather(*(self._connect() for _ in range(min(missing, 2 * AT_ONCE))))
            await asyncio.sleep(0.1)

    def close(self) -> None:
        for writer in self._held:
            writer.transport.abort()

    async def _connect(self) -> None:
        async with self._gate:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    _, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls)
                self._held.append(writer)
                self.opened += 1
                writer.write(self._opening)


@asynccontextmanager
async def silence(
    port: int, count: int, *, tls: ssl.SSLContext | None = None, opening: bytes = b""
) -> AsyncIterator[Silence]:
    """Holds so many connections open while the block runs, after all have been opened once."""
    attack = Silence(port, count, tls, opening)
    holding = asyncio.create_task(attack.hold(), name="silent connections")
    try:
        await attack.connect()
        yield attack
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        attack.close()
