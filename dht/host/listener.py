"""Guarded listener: accepting goes on whatever happens, and a `ConnectionLimiter` decides who stays.

libp2p's own listener shares its port with any other process, and what `accept` may raise besides running out of file
descriptors ends the whole host.
"""

import contextlib
import contextvars
import errno
import logging
import math
import socket
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import trio
from libp2p.abc import IListener, INetworkService, IRawConnection, ISecureConn
from libp2p.io.trio import TrioTCPStream
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError, SecurityUpgradeFailure
from multiaddr import Multiaddr

from molink.dht.identity.addresses import PeerAddress, multiaddress
from molink.dht.membership.door import ConnectionLimiter, ConnectionLimits, network_of
from molink.dht.refusals import RefusalLog

logger = logging.getLogger(__name__)

LIMITS = ConnectionLimits(unproven=64, proven=256, of_network=128, of_identity=4, proof_s=8.0, idle_s=60.0)
_BACKLOG = 128
_PAUSE_S = 0.2
"""After an accept that failed."""
_ROOM = 8
"""Connections closed where the process can hold no more."""
_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_SWEEP_S = 1.0
_TURNS_AT_ONCE = 50
_TURNS_PER_S = 25.0


class HandshakeQueue:
    """Rate limiter of handshakes, which cost the process 10 ms each: a token bucket of fifty, 25 a second.

    Each network has a turn in its turn: whoever floods a peer with new identities waits behind itself.
    """

    def __init__(self) -> None:
        self._saved = float(_TURNS_AT_ONCE)
        self._saved_at = -math.inf
        self._waiting: dict[str, dict[int, trio.Event]] = {}
        self._wanted = trio.Event()

    async def wait_turn(self, guest: int, network: str) -> None:
        """Waits for this guest's turn, or until `release`."""
        now = trio.current_time()
        self._saved = min(float(_TURNS_AT_ONCE), self._saved + (now - self._saved_at) * _TURNS_PER_S)
        self._saved_at = now
        if not self._waiting and self._saved >= 1.0:
            self._saved -= 1.0
            return
        self._saved = 0.0
        turn = self._waiting.setdefault(network, {})[guest] = trio.Event()
        self._wanted.set()
        try:
            await turn.wait()
        finally:
            self.release(guest, network)

    def release(self, guest: int, network: str) -> None:
        """Releases a guest that waits for its turn: it goes on, or is gone."""
        others = self._waiting.get(network, {})
        turn = others.pop(guest, None)
        if turn is not None:
            turn.set()
        if not others:
            self._waiting.pop(network, None)

    async def run(self) -> None:
        """Gives turns until cancelled."""
        while True:
            await self._wanted.wait()
            while self._waiting:
                await trio.sleep(1.0 / _TURNS_PER_S)
                for network, others in tuple(self._waiting.items())[:1]:
                    self.release(next(iter(others)), network)
                    if others:
                        self._waiting[network] = self._waiting.pop(network)
            self._wanted = trio.Event()


class GuardedListener:
    """Guarded listener of one host: the connections that others have opened. To be used in its trio thread."""

    def __init__(
        self, is_member: Callable[[str], bool], refusals: RefusalLog, limits: ConnectionLimits = LIMITS
    ) -> None:
        self._limiter = ConnectionLimiter(limits, is_member)
        self._handshakes = HandshakeQueue()
        self._refusals = refusals
        self._sockets: dict[int, tuple[trio.socket.SocketType, str]] = {}
        self._sessions: weakref.WeakKeyDictionary[ISecureConn, int] = weakref.WeakKeyDictionary()
        self._services: Counter[int] = Counter()
        self._of_this_task: contextvars.ContextVar[int | None]
        self._of_this_task = contextvars.ContextVar("guest_of_this_task", default=None)

    def guard(self, network: INetworkService) -> None:
        """From here on `network` listens through this guard. To be called before it listens."""
        for transport in network.transport_manager.get_transports():
            transport.create_listener = lambda handler: _Listener(handler, self)
        upgrade = network.upgrader.upgrade_security

        async def upgrade_and_ask(
            connection: IRawConnection, is_initiator: bool, peer_id: ID | None = None
        ) -> ISecureConn:
            if is_initiator:
                return await upgrade(connection, is_initiator, peer_id)
            session = await upgrade(connection, is_initiator, peer_id)
            self._prove(self._of_this_task.get() or 0, session)
            return session

        network.upgrader.upgrade_security = upgrade_and_ask

    async def turn(self) -> None:
        """Waits until the guest for whom this task works may begin its handshake."""
        guest = self._of_this_task.get() or 0
        await self._handshakes.wait_turn(guest, network_of(self._host_of(guest)))
        if guest not in self._sockets:
            raise SecurityUpgradeFailure("the connection had to make room for others")

    async def run(self) -> None:
        """Gives turns and sends away who does nothing, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._handshakes.run)
            while True:
                await trio.sleep(_SWEEP_S)
                for guest in self._limiter.evict_overdue(trio.current_time()):
                    self._close(guest)

    @contextlib.contextmanager
    def serving(self, session: ISecureConn) -> Iterator[None]:
        """Whoever is at the other end of `session` is served for as long as the block lasts, and stays."""
        guest = self._sessions.get(session)
        if guest is None:
            yield
            return
        self._services[guest] += 1
        self._limiter.mark_busy(guest)
        try:
            yield
        finally:
            self._services[guest] -= 1
            if not self._services[guest]:
                del self._services[guest]
                self._limiter.mark_idle(guest, trio.current_time())

    def enter(self, connection: trio.socket.SocketType, host: str) -> int:
        """The number of a guest that has just connected."""
        entry = self._limiter.admit(trio.current_time(), network_of(host))
        self._send_away(entry.sent_away, "unproven connections")
        guest = entry.guest or 0
        self._sockets[guest] = connection, host
        return guest

    @contextlib.contextmanager
    def inside(self, guest: int) -> Iterator[None]:
        """Works for this guest within the block; the guest leaves at its end."""
        token = self._of_this_task.set(guest)
        try:
            yield
        finally:
            self._of_this_task.reset(token)
            self._limiter.remove_guest(guest)
            self._close(guest)

    def make_room(self) -> None:
        """Closes connections, because the process can hold no more."""
        self._send_away(self._limiter.make_room(_ROOM), "connections for want of file descriptors or memory")

    def _prove(self, guest: int, session: ISecureConn) -> None:
        entry = self._limiter.prove(guest, trio.current_time(), str(session.get_remote_peer()))
        self._send_away(entry.sent_away, "idle connections")
        if entry.guest is None:
            self._refusals.refused("connections", self._host_of(guest))
            raise SecurityUpgradeFailure("there is no room for another connection")
        self._sessions[session] = entry.guest

    def _send_away(self, guests: tuple[int, ...], what: str) -> None:
        for guest in guests:
            self._refusals.refused(what, self._host_of(guest))
            self._close(guest)

    def _host_of(self, guest: int) -> str:
        return self._sockets[guest][1] if guest in self._sockets else "somebody"

    def _close(self, guest: int) -> None:
        """At once: what reads or writes is woken, and cleans up behind itself."""
        connection, host = self._sockets.pop(guest, (None, ""))
        if connection is not None:
            self._handshakes.release(guest, network_of(host))
            connection.close()


class _Listener(IListener):  # type: ignore[misc]
    """One listening socket."""

    background_nursery: trio.Nursery
    """Given by the network before it listens."""

    def __init__(self, handler: Callable[[TrioTCPStream], Awaitable[None]], guarded: GuardedListener) -> None:
        self._handler = handler
        self._guarded = guarded
        self._socket: trio.socket.SocketType | None = None
        self._scope = trio.CancelScope()

    async def listen(self, maddr: Multiaddr) -> None:
        at = PeerAddress.parse(str(maddr).replace("/tcp/0", "/tcp/1"))
        port = int(maddr.value_for_protocol("tcp"))
        listening = trio.socket.socket(at.family, socket.SOCK_STREAM)
        try:
            _claim(listening)
            await listening.bind((at.host, port))
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            raise OpenConnectionError(f"cannot listen on {at.host} port {port}: {error}") from error
        self._socket = listening
        self.background_nursery.start_soon(self._accept_all, listening)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        if self._socket is None:
            return ()
        host, port = self._socket.getsockname()[:2]
        return (Multiaddr(multiaddress(host, port)),)

    async def close(self) -> None:
        self._scope.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _accept_all(self, listening: trio.socket.SocketType) -> None:
        with listening, self._scope:
            async with trio.open_nursery() as nursery:
                while self._socket is listening:
                    try:
                        connection, (host, port, *_) = await listening.accept()
                    except trio.ClosedResourceError:
                        return
                    except OSError as error:  # no reason to accept nobody ever after
                        logger.debug("a connection could not be accepted: %s", error)
                        if error.errno in _NO_ROOM:
                            self._guarded.make_room()
                        await trio.sleep(_PAUSE_S)
                    else:
                        host = host.partition("%")[0]
                        guest = self._guarded.enter(connection, host)
                        nursery.start_soon(self._serve, connection, (host, port), guest)

    async def _serve(self, connection: trio.socket.SocketType, address: tuple[str, int], guest: int) -> None:
        with self._guarded.inside(guest):
            try:
                stream = TrioTCPStream(trio.SocketStream(connection))
                stream._cached_remote_address = address  # noqa: SLF001 it would find none of IPv6
                await self._handler(stream)
            except Exception as error:  # noqa: BLE001 the boundary of a connection: its failure is its own
                logger.debug("a connection failed: %r", error)


def _claim(listening: trio.socket.SocketType) -> None:
    """The port for this process alone, also where connections of an earlier one are still ending."""
    if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows, where SO_REUSEADDR would share the port
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
