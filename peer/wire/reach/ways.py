"""Ways to a peer: each opens a connected socket at whose other end the peer's gRPC port is, for TLS to begin on.

gRPC for Python takes no sockets, only addresses. So what is not dialled directly is spliced to a local socket: a unix
socket in a folder of this process's own or, where gRPC has none or its path would be too long, a port on loopback, for
one connection. TLS and the proof of identity are end to end: what lies between can delay and drop, and no more.
"""

import asyncio
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from molink.dht.identity.identity import public_key_of
from molink.dht.records.records import RelayAt
from molink.peer.wire.reach.packets import TOKEN_BYTES, ReachRequest, RelayError
from molink.peer.wire.reach.relay_client import RelayUser, open_session
from molink.peer.wire.reach.splice import Pump, Splice, Splices

REVERSED_TIMEOUT_S = 2.0
_LONGEST_PATH = 96
"""Of a unix socket: systems allow 104 or 108 bytes."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A connected, non-blocking socket to a peer."""

    connection: socket.socket
    host: str
    """Where whoever opened it sees the peer: of a relayed one, the relay. It is nobody's proof."""


class Way(Protocol):
    """Way to a peer."""

    @property
    def name(self) -> str:
        """For people: `relayed`, `reversed`, `punched`."""

    async def open(self) -> Opened:
        """Opens a socket. Raises RelayError or OSError."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """The peer dials a relay at which it stays, which joins both connections."""

    peer_id: str
    relay: RelayAt
    user: RelayUser
    name: str = "relayed"
    on_joined: Callable[[str], None] = lambda _: None
    """Hears of the peer id as soon as the relay has joined both, before TLS has begun."""

    async def open(self) -> Opened:
        token = secrets.token_bytes(TOKEN_BYTES)
        question = ReachRequest(public_key_of(self.peer_id), token, direct=False)
        session = await open_session(self.relay, self.user, question)
        try:
            joined = await session.joined()
        except BaseException:
            session.close()
            raise
        self.on_joined(self.peer_id)
        return Opened(session.connection, joined.host)


Expect = Callable[[str, bytes, float], Awaitable[tuple[socket.socket, str]]]
"""What this process's own relay offers: waits for a peer with a token, so many seconds."""


@dataclass(frozen=True, slots=True)
class Reversed:
    """The peer dials this process's own relay, asked to over one at which it stays."""

    peer_id: str
    relay: RelayAt
    user: RelayUser
    expect: Expect
    name: str = "reversed"

    async def open(self) -> Opened:
        token = secrets.token_bytes(TOKEN_BYTES)
        coming = asyncio.ensure_future(self.expect(self.peer_id, token, REVERSED_TIMEOUT_S))
        try:
            question = ReachRequest(public_key_of(self.peer_id), token, direct=True)
            session = await open_session(self.relay, self.user, question)
            try:
                await session.invited()
            finally:
                session.close()
            return Opened(*await coming)
        except BaseException:
            coming.cancel()
            with suppress(RelayError, asyncio.CancelledError):
                (await coming)[0].close()
            raise


@dataclass(frozen=True, slots=True)
class Called:
    """The peer stays at this process's own relay, which tells it to come."""

    peer_id: str
    call: Expect
    name: str = "reversed"

    async def open(self) -> Opened:
        return Opened(*await self.call(self.peer_id, secrets.token_bytes(TOKEN_BYTES), REVERSED_TIMEOUT_S))


@dataclass(frozen=True, slots=True)
class Punched:
    """A connection that both ends have opened at once already."""

    connection: socket.socket
    host: str
    name: str = "punched"

    async def open(self) -> Opened:
        return Opened(self.connection, self.host)


class LocalTarget:
    """Local target of a way: what gRPC is told to dial. It is good for one connection; `close` it then."""

    def __init__(self, splices: Splices, folder: Path | None = None) -> None:
        """`folder`: where the unix socket is made, for this process's user alone; by default a new one."""
        self._splices = splices
        self._folder = folder
        self._own_folder: Path | None = None
        self._path: Path | None = None
        self._server: asyncio.Server | None = None
        self._far: Pump | None = None
        self._joined = False
        self._splice: Splice | None = None

    async def open(self, connection: socket.socket) -> str:
        """Takes over a connected socket, and returns the target that leads to it. Raises OSError."""
        loop = asyncio.get_running_loop()
        far = self._far = self._splices.pump()
        try:
            await loop.create_connection(lambda: far, sock=connection)
            return await self._listen(loop)
        except BaseException:
            connection.close()
            self.close()
            raise

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> str:
        path = self._socket_path()
        if path is None:
            self._server = await loop.create_server(self._near, "127.0.0.1", 0, backlog=1)
            return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._path = path
        self._server = await loop.create_unix_server(self._near, path, backlog=1)
        return f"unix:{path}"

    def _socket_path(self) -> Path | None:
        if sys.platform == "win32":
            return None
        folder = self._folder
        if folder is None or len(str(folder)) > _LONGEST_PATH - 20:
            folder = self._own_folder = Path(tempfile.mkdtemp(prefix="molink-"))
        path = folder / f"way-{secrets.token_hex(6)}"
        return path if len(str(path)) <= _LONGEST_PATH else None

    def _near(self) -> Pump:
        return self._splices.pump(self._join)

    def _join(self, near: Pump) -> None:
        if self._joined or self._far is None:
            near.abort()
            return
        self._joined = True
        self._splice = self._splices.join(near, self._far)
        self._stop_listening()

    def close(self) -> None:
        """Listens no more; a way that nobody has dialled ends."""
        self._stop_listening()
        if self._far is not None and not self._joined:
            self._far.abort()

    def end(self) -> None:
        """Ends the way, once what waits has been sent: gRPC may keep its connection for long after its last use."""
        self.close()
        if self._splice is not None:
            self._splice.finish()

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


async def splice_to_port(splices: Splices, connection: socket.socket, at: tuple[str, int]) -> Splice:
    """Splices a connected socket to a port of this machine. Raises OSError, and closes it then."""
    near = socket.socket(socket.AF_INET6 if ":" in at[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        near.setblocking(False)
        await asyncio.get_running_loop().sock_connect(near, at)
    except BaseException:
        near.close()
        connection.close()
        raise
    return await splices.splice(connection, near)
