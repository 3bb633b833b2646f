"""A conversation with a relay: both ends prove who they are, the relay says where it sees this end, one thing is asked.

Sockets here are non-blocking, and read to the byte: what follows JOINED is somebody else's.
"""

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import TypeVar

from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import RelayAt
from molink.peer.wire.reach.packets import (
    Challenge,
    DialBack,
    DialledBack,
    Invited,
    Joined,
    JoinRequest,
    Packet,
    ReachRequest,
    RelayError,
    RelayRefusal,
    RelayUnreachable,
    RelayWelcome,
    read_relay,
    write_relay,
)
from molink.peer.wire.reach.relay_proof import check_relay, prove_user

OPEN_TIMEOUT_S = 4.0
"""To connect and to prove."""
ANSWER_TIMEOUT_S = 4.0
"""Longer than a relay gives an invited peer."""
PING_EVERY_S = 20.0
"""Of who stays: NATs forget a quiet connection after some minutes, the worst after half a minute."""

_MOST_PORT, _PORT_DIGITS = 65535, 5

PacketT = TypeVar("PacketT", bound=Packet)


@dataclass(frozen=True, slots=True)
class RelayUser:
    """Who asks relays for something."""

    identity: Identity
    swarm_key: SwarmKey | None


class RelaySession:
    """A proven conversation. `close` it unless the socket was taken over."""

    def __init__(self, connection: socket.socket, observed: str) -> None:
        self.connection = connection
        self.observed = observed
        """Where the relay sees this end, as host:port."""

    def close(self) -> None:
        self.connection.close()

    async def dialled_back(self, port: int, certificate_hash: bytes) -> bool:
        """Whether the relay finds that certificate when it dials this host at a port. Raises RelayError."""
        return (await self._answer(DialledBack, DialBack(port, certificate_hash))).found

    async def joined(self) -> Joined:
        """The answer to the question with which this end came: the socket is the way to the other end from then on.
        Raises RelayError."""
        return _checked(await self._answer(Joined))

    async def invited(self) -> None:
        """As `joined`, of a peer that was asked to come to the relay that this end is itself."""
        await self._answer(Invited)

    async def _answer(self, answer_type: type[PacketT], question: Packet | None = None) -> PacketT:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if question is not None:
                    await write_relay(self.connection, question)
                return expect_relay(await read_relay(self.connection), answer_type)
        except TimeoutError:
            raise RelayError(f"no answer within {ANSWER_TIMEOUT_S:g} s") from None
        except RelayError:
            raise
        except OSError as error:
            raise RelayError(f"the connection to the relay broke: {error}") from error


async def open_session(
    relay: RelayAt,
    user: RelayUser,
    question: ReachRequest | JoinRequest | None = None,
    *,
    local_port: int = 0,
    timeout_s: float = OPEN_TIMEOUT_S,
) -> RelaySession:
    """Connects to a relay, and proves both ends. `local_port`: from which, shared with other sockets; 0: any.

    `question` goes with the proof, a round trip before the relay's own has come: what it says is no secret, and a token
    is worth nothing to anybody but the invited peer.

    Raises:
        RelayUnreachable: nobody answers there.
        RelayError: it is another, or it sends this end away.
    """
    try:
        connection = shared_socket(relay.address, local_port)
    except (OSError, ValueError) as error:
        raise RelayUnreachable(f"{relay.address} cannot be dialled: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(connection, endpoint(relay.address))
            challenge = expect_relay(await read_relay(connection), Challenge)
            proof = prove_user(challenge, relay.peer_id, user.identity, user.swarm_key)
            await write_relay(connection, proof)
            if question is not None:
                await write_relay(connection, question)
            welcome = expect_relay(await read_relay(connection), RelayWelcome)
            check_relay(welcome, challenge, proof, relay.peer_id, user.identity.peer_id, user.swarm_key)
            _require_observed(welcome.observed)
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise RelayUnreachable(f"the relay did not answer within {timeout_s:g} s") from None
        if isinstance(error, OSError) and not isinstance(error, RelayError):
            raise RelayUnreachable(f"the relay cannot be reached: {error}") from error
        raise
    return RelaySession(connection, welcome.observed)


def expect_relay(packet: Packet, packet_type: type[PacketT]) -> PacketT:
    """The packet, if it is of that type.

    Raises:
        RelayError: it is another, or a refusal.
    """
    if isinstance(packet, RelayRefusal):
        raise RelayError(f"the relay refused: {packet.reason}")
    if not isinstance(packet, packet_type):
        raise RelayError(f"expected {packet_type.__name__}, got {type(packet).__name__}")
    return packet


def _require_observed(observed: str) -> None:
    """Raises RelayError if a relay says of where it sees this end what is no address."""
    try:
        endpoint(observed)
    except ValueError:
        raise RelayError("the relay says that it sees this end at what is no address") from None


def _checked(joined: Joined) -> Joined:
    """Raises RelayError if the host of the other end is none. A relay that itself is the other end names none."""
    try:
        return joined if not joined.host else Joined(str(ipaddress.ip_address(joined.host)))
    except ValueError:
        raise RelayError("the relay says that it sees the other end at what is no address") from None


def endpoint(address: str) -> tuple[str, int]:
    """Host and port of host:port, an IPv6 host in brackets.

    Raises:
        ValueError: the host is no IP address, or the port none.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS and int(port) <= _MOST_PORT):
        raise ValueError(f"{address} has no port")
    return str(ipaddress.ip_address(host.strip("[]"))), int(port)


def host_and_port_of(host: str, port: int) -> str:
    """host:port, an IPv6 host in brackets; an IPv4 address that a socket for both calls mapped is written as IPv4."""
    bare = host.partition("%")[0].removeprefix("::ffff:")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def shared_socket(address: str, local_port: int = 0) -> socket.socket:
    """A non-blocking TCP socket to dial `address` with, bound to a local port that several sockets share; 0: unbound.

    Raises:
        OSError: the port is another's.
        ValueError: `address` is not that of an IP address.
    """
    family = socket.AF_INET6 if ":" in endpoint(address)[0] else socket.AF_INET
    return shared_port_socket(family, local_port)


def shared_port_socket(family: socket.AddressFamily, local_port: int) -> socket.socket:
    """As `shared_socket`, of an address family. Raises OSError."""
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if local_port:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            connection.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", local_port))  # noqa: S104
    except OSError:
        connection.close()
        raise
    return connection


async def accept(listener: socket.socket) -> tuple[socket.socket, str, int]:
    """Accepts a connection: its non-blocking socket, and host and port that it came from.

    Cancelling this loses no connection. asyncio's own `sock_accept` does, if one came in the same turn of the loop.

    Raises:
        OSError: no descriptors are left, or who came has gone.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            if not isinstance(loop, asyncio.SelectorEventLoop):  # Windows has no readiness to wait for
                connection, address = await loop.sock_accept(listener)
                break
            await _readable(loop, listener)
        else:
            break
    connection.setblocking(False)
    return connection, str(address[0]), int(address[1])


async def _readable(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
    ready = asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)
