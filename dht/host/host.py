"""The libp2p host: noise over TCP with yamux, and nothing else. Runs in trio.

What py-libp2p would do by itself and must not is in `libp2p_hardening.py`.
"""

import contextlib
import functools
import ipaddress
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetConn, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from multiaddr import Multiaddr

from molink.dht.host.framing import FrameStream
from molink.dht.host.lean_libp2p import bring_in_swarm_cipher
from molink.dht.host.libp2p_hardening import (
    DialledSockets,
    connection_config,
    harden,
    quiet_logging,
    require_free,
    resource_manager,
)
from molink.dht.host.libp2p_limits import YAMUX, BoundedYamux, SoundNoise
from molink.dht.host.listener import LIMITS, GuardedListener
from molink.dht.identity.addresses import PeerAddress, multiaddress
from molink.dht.identity.identity import Identity, public_key_of
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.membership.door import ConnectionLimits
from molink.dht.refusals import RefusalLog

logger = logging.getLogger(__name__)

StreamHandler = Callable[[FrameStream], Awaitable[None]]

_LOOKUPS = 8
"""Names looked up at once, each in a thread that nobody can stop."""
_MOST_ADDRESSES = 4
"""Of one name that are tried."""


class DialError(ConnectionError):
    """A peer could not be reached at an address."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Listening addresses of a host. Port 0: any free one. `announce_host`, `announce_port`: how others reach it."""

    host: str
    port: int
    announce_host: str | None = None
    announce_port: int | None = None


class Host:
    """One peer's or client's libp2p connections."""

    def __init__(
        self, host: IHost, sockets: DialledSockets, guarded: GuardedListener, addresses: tuple[str, ...]
    ) -> None:
        self._host = host
        self._sockets = sockets
        self._guarded = guarded
        self._network = host.get_network()
        self._lookups = trio.CapacityLimiter(_LOOKUPS)
        self.peer_id = str(host.get_id())
        self.addresses = addresses
        self.port = _listening_port(host)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serves `protocol`; whatever `handler` raises ends its stream only."""

        async def serve(stream: INetStream) -> None:
            with self._guarded.serving(stream.muxed_conn.secured_conn):
                await handler(FrameStream(stream, str(stream.muxed_conn.peer_id)))

        self._host.set_stream_handler(protocol, serve)

    async def dial(self, address: str, *, timeout_s: float) -> str:
        """Connects to a multiaddress that ends in /p2p/PEER_ID, if there is no connection to that peer yet.

        A name is looked up, and its addresses are tried in turn. Returns the peer id, which is proven then.

        Raises:
            DialError: with the reason; also where the address is none.
        """
        try:
            target = PeerAddress.parse(address)
        except ValueError as error:
            raise DialError(str(error)) from error
        if target.peer_id is None:
            raise DialError("the address does not end in /p2p/PEER_ID")
        if self.is_connected(target.peer_id):
            return target.peer_id
        try:
            with trio.fail_after(timeout_s):
                await self._dial_any(target, target.peer_id, trio.current_time() + timeout_s)
        except trio.TooSlowError:
            raise DialError(f"no answer within {timeout_s:g} s") from None
        return target.peer_id

    async def _dial_any(self, target: PeerAddress, peer_id: str, deadline: float) -> None:
        """Each address of a name has an equal part of the time left."""
        places = await self._places(target)
        for left, place in zip(range(len(places), 0, -1), places, strict=True):
            try:
                with (
                    trio.fail_after(max(0.0, deadline - trio.current_time()) / left),
                    self._sockets.closed_on_failure(),
                ):
                    await self._network.dial_addr(Multiaddr(str(place)), ID.from_base58(peer_id))
            except trio.TooSlowError:
                if left == 1:
                    raise
            except Exception as error:  # libp2p raises a dozen unrelated types
                if left == 1:
                    raise DialError(_why_not(error, target)) from error
            else:
                return

    async def _places(self, target: PeerAddress) -> list[PeerAddress]:
        if not target.is_name:
            return [target]
        look_up = functools.partial(
            socket.getaddrinfo, target.host, target.port, target.family, socket.SOCK_STREAM
        )
        try:
            found = await trio.to_thread.run_sync(  # type: ignore[call-arg]
                look_up, abandon_on_cancel=True, limiter=self._lookups
            )
        except (OSError, UnicodeError) as error:
            raise DialError(f"no host named {target.host} is known") from error
        places = dict.fromkeys(target.at(str(sockaddr[0])) for *_, sockaddr in found)
        if not places:
            raise DialError(f"the host {target.host} has no address")
        return list(places)[:_MOST_ADDRESSES]

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float) -> FrameStream:
        """A new stream over a connection that is there already.

        Raises:
            DialError: there is no connection, or the other side does not serve the protocol.
        """
        if not self.is_connected(peer_id):
            raise DialError(f"not connected to {peer_id}")
        try:
            with trio.fail_after(timeout_s):
                return FrameStream(await self._host.new_stream(ID.from_base58(peer_id), [protocol]), peer_id)
        except trio.TooSlowError:
            raise DialError(f"{peer_id} did not open a stream within {timeout_s:g} s") from None
        except Exception as error:  # libp2p raises a dozen unrelated types
            raise DialError(f"{peer_id} did not open a stream: {_reason(error)}") from error

    def is_connected(self, peer_id: str) -> bool:
        """Whether there is a connection to that peer; to what is no peer id there is none."""
        try:
            connections = self._network.get_connections(_id_of(peer_id))
        except ValueError:
            return False
        return any(not connection.is_closed for connection in connections)

    def host_of(self, peer_id: str) -> str:
        """The IP address at the other end of a connection to the peer; empty if there is none."""
        for connection in self._network.get_connections(ID.from_base58(peer_id)):
            remote = connection.muxed_conn.get_remote_address()
            if remote is not None:
                return str(remote[0])
        return ""

    @property
    def connections(self) -> int:
        return len(self._network.get_connections())

    async def hang_up(self, peer_id: str, *, opened_by: float = math.inf) -> None:
        """Closes the connections to the peer that were opened by that time: whose old one is lost, that peer may have
        been started again, and have opened another meanwhile."""
        with trio.CancelScope(deadline=trio.current_time() + 2.0, shield=True):
            try:
                for connection in tuple(self._network.get_connections(_id_of(peer_id))):
                    if connection.muxed_conn.opened_at <= opened_by:
                        await self._close(connection)
            except Exception:  # it is over either way
                logger.debug("hanging up on %s failed", peer_id, exc_info=True)

    async def _close(self, connection: INetConn) -> None:
        """Not by libp2p's `close_peer`, which forgets what is opened while it closes what was there."""
        try:
            await connection.close()
        finally:
            self._network.remove_conn(connection)

    async def close_connections(self) -> None:
        """Closes every connection: a host that is cancelled, as hosts end, would leave their sockets open."""
        with trio.CancelScope(deadline=trio.current_time() + 2.0, shield=True):
            async with trio.open_nursery() as nursery:
                for peer_id in tuple(self._network.connections):
                    nursery.start_soon(self.hang_up, str(peer_id))
        self._sockets.close_all()


@contextlib.asynccontextmanager
async def open_host(
    identity: Identity,
    listen: Listen | None,
    swarm_key: SwarmKey | None,
    is_member: Callable[[str], bool] | None = None,
    limits: ConnectionLimits = LIMITS,
) -> AsyncIterator[Host]:
    """A running host. `listen` None: it accepts nobody. `is_member`: whether a peer id is known to be of the swarm; by
    default all are strangers. `limits` of those who dial it.

    Raises:
        PortInUse: the port is taken.
    """
    quiet_logging()
    if swarm_key is not None:
        bring_in_swarm_cipher()
    if listen is not None:
        require_free(listen.host, listen.port)
    key_pair = create_new_key_pair(identity.private_bytes())
    guarded = GuardedListener(is_member or _nobody, RefusalLog(logger), limits)
    host = new_host(
        key_pair=key_pair,
        sec_opt={NOISE: SoundNoise(key_pair, guarded.turn)},
        muxer_opt={YAMUX: BoundedYamux},
        connection_config=connection_config(),
        resource_manager=resource_manager(),
        psk=swarm_key.libp2p_psk if swarm_key else None,
        disable_identify_address_discovery=True,
    )
    harden(host)
    sockets = DialledSockets(host.get_network())
    guarded.guard(host.get_network())
    at = [Multiaddr(f"{multiaddress(listen.host, 1)[:-1]}{listen.port}")] if listen is not None else []
    async with host.run(listen_addrs=at), trio.open_nursery() as nursery:
        running = Host(host, sockets, guarded, _announced(host, listen, identity.peer_id))
        nursery.start_soon(guarded.run)
        try:
            yield running
        finally:
            await running.close_connections()
            nursery.cancel_scope.cancel()


def _nobody(peer_id: str) -> bool:  # noqa: ARG001 whoever it is
    return False


def _id_of(peer_id: str) -> ID:
    """Raises ValueError if it is not the peer id of an Ed25519 key."""
    public_key_of(peer_id)
    return ID.from_base58(peer_id)


def peer_id_in(address: str) -> str:
    """The peer id at the end of a multiaddress.

    Raises:
        ValueError: it has none, or is no multiaddress.
    """
    try:
        peer_id = PeerAddress.parse(address).peer_id
    except ValueError as error:
        raise ValueError(f"{address!r} is not a multiaddress that ends in /p2p/PEER_ID: {error}") from error
    if not peer_id:
        raise ValueError(f"{address!r} does not end in /p2p/PEER_ID")
    return peer_id


def _announced(host: IHost, listen: Listen | None, peer_id: str) -> tuple[str, ...]:
    if listen is None:
        return ()
    port = _listening_port(host)
    if not port:
        raise OSError(
            f"listening on {listen.host} port {listen.port} failed: is it an address of this machine?"
        )
    announced = listen.announce_host or _reachable(listen.host)
    return (f"{multiaddress(announced, listen.announce_port or port)}/p2p/{peer_id}",)


def _listening_port(host: IHost) -> int:
    """0: it listens nowhere."""
    return next((int(address.value_for_protocol("tcp")) for address in host.get_transport_addrs()), 0)


def _reachable(host: str) -> str:
    """`host`, or if that means every interface, this machine's address on the way to the Internet."""
    if not ipaddress.ip_address(host).is_unspecified:
        return host
    family, elsewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a datagram socket only looks up the route
        try:
            probe.connect((elsewhere, 9))
        except OSError:
            return "::1" if ":" in host else "127.0.0.1"
        return str(probe.getsockname()[0])


def _why_not(error: BaseException, target: PeerAddress) -> str:
    """Formats why a dial failed, for whoever gave the address."""
    causes = tuple(_causes(error))
    for cause in causes:
        if isinstance(cause, PeerIDMismatchesPubkey):
            return f"the peer at {target.host} port {target.port} is another one than the address says"
    for cause in causes:
        if isinstance(cause, OSError) and not isinstance(cause, DialError):
            return _reason(error)
    return (
        f"what listens at {target.host} port {target.port} does not answer as a peer of this swarm: is it a peer, is "
        "the swarm private, and is there room for another connection?"
    )


def _reason(error: BaseException) -> str:
    """The innermost cause, which libp2p and trio wrap in several layers."""
    *_, innermost = _causes(error)
    return str(innermost) or type(innermost).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what each was caused by."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        error = inner or error.__cause__ or error.__context__ or error
