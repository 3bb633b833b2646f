"""Hardening of py-libp2p 0.8.1 against what it does by itself and must not. Its insides are touched here, in
`libp2p_limits.py` and in `listener.py`, and nowhere else."""

import contextlib
import contextvars
import errno
import logging
import os
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterator

import trio
from libp2p.abc import IHost, INetStream, INetworkService, IRawConnection
from libp2p.network import auto_connector
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection import swarm_connection
from libp2p.rcmgr.manager import ResourceManager
from multiaddr import Multiaddr

from molink.dht.errors import PortInUse
from molink.dht.host.libp2p_limits import limit_negotiation, limit_streams

logger = logging.getLogger(__name__)

_BEYOND_REACH = 1024
"""Of connections, streams and the like, where limits of this package come first (`listener.py`, `libp2p_limits.py`)."""
_NEGOTIATION_S = 5.0


def quiet_logging() -> None:
    """Under load libp2p logs thousands of lines a minute; one of its modules sets up the root logger."""
    root = logging.getLogger("libp2p")
    root.setLevel(logging.CRITICAL)
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    auto_connector.logger.setLevel(logging.NOTSET)  # it sets its own, and speaks every half minute
    swarm_connection.logging = logging.getLogger("libp2p.network.connection.swarm_connection")


def connection_config() -> ConnectionConfig:
    """Configures connections without limits: the door decides how many there may be."""
    return ConnectionConfig(
        max_connections=_BEYOND_REACH,
        high_watermark=_BEYOND_REACH,
        low_watermark=0,
        min_connections=0,
        max_connections_per_peer=_BEYOND_REACH,
        inbound_stream_protocol_negotiation_timeout=_NEGOTIATION_S,
        inbound_upgrade_timeout=8.0,
        outbound_upgrade_timeout=8.0,
    )


def resource_manager() -> ResourceManager:
    """Plain limits. Its rate limit is left out: before the handshake all strangers share one bucket."""
    return ResourceManager(
        enable_rate_limiting=False,
        enable_circuit_breaker=False,
        enable_graceful_degradation=False,
        enable_memory_limits=False,
        enable_metrics=False,
    )


def harden(host: IHost) -> None:
    """To be called before the host runs."""
    network = host.get_network()
    network.retry_config.max_retries = 0  # who dials decides when to try again
    limit_negotiation()
    limit_streams(network)
    _guard_streams(network)
    _release_inbound_slots(network)
    _remove_identify(host)
    network.auto_connector.maybe_connect = _connect_to_nobody


async def _connect_to_nobody() -> None:
    """By default libp2p dials whomever it knows, half way up to the most connections allowed."""


def _guard_streams(network: INetworkService) -> None:
    """An exception in a stream's handler or negotiation would cancel the whole host."""
    handle = network.common_stream_handler

    async def guarded(stream: INetStream) -> None:
        try:
            await handle(stream)
        except Exception as error:  # noqa: BLE001 the boundary of a stream: its failure is its own
            logger.debug("a stream from %s failed: %r", stream.muxed_conn.peer_id, error)
            with trio.move_on_after(1.0):
                try:
                    await stream.reset()
                except Exception:  # it is over either way
                    logger.debug("resetting it failed too", exc_info=True)

    network.set_stream_handler(guarded)


def _release_inbound_slots(network: INetworkService) -> None:
    """An inbound connection would keep its slot and task until the host ends, and then nobody gets in."""
    upgrade = network.upgrade_inbound_raw_conn

    async def upgrade_and_stay(raw_connection: IRawConnection, address: Multiaddr) -> None:
        connection = await upgrade(raw_connection, address)
        await connection.event_closed.wait()
        raise ConnectionError("the connection is over")  # its caller closes and releases on any exception

    network.upgrade_inbound_raw_conn = upgrade_and_stay


def _remove_identify(host: IHost) -> None:
    """Addresses come from signed facts alone; identify would take them from whoever is connected."""
    for protocol in [protocol for protocol in host.multiselect.handlers if "/ipfs/id/" in str(protocol)]:
        host.remove_stream_handler(protocol)

    def no_identify(*_: object, **__: object) -> None:
        return None

    host._schedule_identify = no_identify  # noqa: SLF001 there is no switch for it


class DialledSockets:
    """The sockets of outgoing connections: what is cancelled in mid-handshake leaves them open."""

    def __init__(self, network: INetworkService) -> None:
        self._open: weakref.WeakSet[IRawConnection] = weakref.WeakSet()
        self._of_this_dial: contextvars.ContextVar[list[IRawConnection] | None]
        self._of_this_dial = contextvars.ContextVar("of_this_dial", default=None)
        for transport in network.transport_manager.get_transports():
            transport.dial = self._tracked(transport.dial)

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Closes what is opened inside by this task, if the block is left by an exception."""
        opened: list[IRawConnection] = []
        token = self._of_this_dial.set(opened)
        try:
            yield
        except BaseException:
            for connection in opened:
                _close_socket(connection)
            raise
        finally:
            self._of_this_dial.reset(token)

    def close_all(self) -> None:
        for connection in tuple(self._open):
            _close_socket(connection)

    def _tracked(
        self, dial: Callable[[Multiaddr], Awaitable[IRawConnection]]
    ) -> Callable[[Multiaddr], Awaitable[IRawConnection]]:
        async def tracked(address: Multiaddr) -> IRawConnection:
            connection = await dial(address)
            self._open.add(connection)
            opened = self._of_this_dial.get()
            if opened is not None:
                opened.append(connection)
            host, port = connection.stream.stream.socket.getpeername()[:2]
            connection.stream._cached_remote_address = host, port  # noqa: SLF001 it would find none of IPv6
            return connection

        return tracked


def _close_socket(connection: IRawConnection) -> None:
    """At once: what is awaited in a task that is cancelled may never run."""
    connection.stream.stream.socket.close()


def require_free(host: str, port: int) -> None:
    """Refuses a port that another process listens on: libp2p would silently share it (SO_REUSEPORT).

    Raises:
        PortInUse: the port is taken.
        OSError: `host` is no address of this machine.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if os.name != "nt":  # there it would mean sharing the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise PortInUse(
                f"port {port} of {host} is taken by another program: try another --port, or 0 for any"
            ) from error
