"""Service discovery on the local network by mDNS (RFC 6762, 6763): peers find each other where nobody has told them of
anybody.

What is found is what some machine of this network says: an address to ask, and nothing more. Who answers there proves
its identity as everybody does.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from itertools import chain
from typing import TYPE_CHECKING, Final, Self

from molink.dht.identity.addresses import PeerAddress
from molink.dht.identity.dialable import Ranges, own_ranges
from molink.dht.identity.identity import public_key_of
from molink.shards.address_ranges import ALL_INTERFACES, AddressRange, range_of

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

SERVICE: Final = "_molink._tcp.local."
VERSION: Final = b"1"
PRIVATE: Final = b"1"
OPEN: Final = b"0"
WITHIN_S: Final = 1.5
"""For how long peers are looked for: answers come within 0.5 s, and a lost question is asked again after 1 s."""
SETTLES_S: Final = 0.3
"""How long others may still answer after the first has."""
MOST_PEERS: Final = 8
MOST_ASKED: Final = 32
"""Names that are asked about side by side: one of which nobody says anything keeps no other waiting."""
MOST_ADDRESSES: Final = 4
"""Of one peer: a machine with containers has many, and others reach it at one or two."""
_RANGES: Final = frozenset({AddressRange.PRIVATE, AddressRange.LINK_LOCAL})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NearbyPeer:
    """Describes a peer of the local network as it says of itself; none of it is proven before it is dialled."""

    peer_id: str
    addresses: tuple[str, ...]
    """Multiaddresses of its control plane: one or more."""
    private: bool
    """Whether its swarm asks for a key."""
    links: tuple[str, ...] = ()
    """Where its data plane is, as host:port; empty: it does not say."""


@dataclass(frozen=True, slots=True)
class LocalService:
    """Describes what a peer lets the local network know."""

    peer_id: str
    addresses: tuple[str, ...]
    """Of this machine, as IPv4: where the network reaches it, and learns of it. None: it stays unknown."""
    port: int
    """Of the control plane."""
    private: bool
    data_port: int | None = None
    """Of the data plane; None: nobody is told."""


class LocalAdvertisement:
    """Advertises one peer on the local network while the context is open.

    A network without multicast is no failure: the peer is then found by its multiaddress alone, as before.
    """

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self._zeroconf: AsyncZeroconf | None = None
        self._registering: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._zeroconf = open_zeroconf(self._service.addresses)
        if self._zeroconf is not None:
            self._registering = asyncio.create_task(
                _register(self._zeroconf, self._service), name="local advertisement"
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.gather(self._registering, return_exceptions=True)
        if self._zeroconf is not None:
            await close_zeroconf(self._zeroconf)


async def find_local_peers(
    addresses: tuple[str, ...] | None = None, within_s: float = WITHIN_S
) -> tuple[NearbyPeer, ...]:
    """Finds the peers that advertise themselves on the local network, at most `MOST_PEERS`, in the order of their ids.

    `addresses`: those of this machine to ask from; None: all in private ranges. Empty if nobody answers or there is no
    such network.
    """
    own = addresses_of(ALL_INTERFACES[0]) if addresses is None else addresses
    zeroconf = open_zeroconf(own)
    if zeroconf is None:
        return ()
    ranges = own_ranges(own) - {AddressRange.PUBLIC}
    from zeroconf import ServiceStateChange
    from zeroconf.asyncio import AsyncServiceBrowser

    answers: asyncio.Queue[NearbyPeer] = asyncio.Queue(MOST_PEERS)
    asking: set[asyncio.Task[None]] = set()

    async def ask(name: str) -> None:
        peer = await ask_local_peer(zeroconf, name, ranges, within_s)
        if peer is not None:
            await answers.put(peer)

    def note(name: str, state_change: ServiceStateChange, **_: object) -> None:
        if state_change is ServiceStateChange.Added and len(asking) < MOST_ASKED and peer_id_named(name):
            task = asyncio.create_task(ask(name), name="ask a local peer")
            asking.add(task)
            task.add_done_callback(asking.discard)

    browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[note])
    found: dict[str, NearbyPeer] = {}
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s) as limit:
                while len(found) < MOST_PEERS:
                    peer = await answers.get()
                    found[peer.peer_id] = peer
                    settled_s = asyncio.get_running_loop().time() + SETTLES_S
                    limit.reschedule(min(limit.when() or settled_s, settled_s))
    finally:
        await browser.async_cancel()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await close_zeroconf(zeroconf)
    return tuple(found[peer_id] for peer_id in sorted(found))


def addresses_of(host: str) -> tuple[str, ...]:
    """This machine's IPv4 addresses at which its local network reaches who listens on `host`: none if that is loopback,
    public, or no address of IPv4."""
    hosts = _own_addresses() if host in ALL_INTERFACES else (host,)
    return tuple(one for one in hosts if ":" not in one and range_of(one) in _RANGES)[:MOST_ADDRESSES]


def _own_addresses() -> tuple[str, ...]:
    import psutil

    entries = chain.from_iterable(psutil.net_if_addrs().values())
    return tuple(entry.address for entry in entries if entry.family is socket.AF_INET)


def open_zeroconf(addresses: tuple[str, ...]) -> "AsyncZeroconf | None":
    """None: there is no local network, or it takes no multicast. Addresses that are not this machine's are left out:
    zeroconf leaves its sockets open where one fails."""
    own = _own_addresses()
    addresses = tuple(address for address in addresses if address in own)
    if not addresses:
        return None
    from zeroconf import Error, IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    try:
        return AsyncZeroconf(interfaces=list(addresses), ip_version=IPVersion.V4Only)
    except (OSError, Error) as error:
        _log.info("no peers can be looked for on the local network: %s", error)
        return None


async def close_zeroconf(zeroconf: "AsyncZeroconf") -> None:
    """Says goodbye to the network, and waits a second for it at most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(zeroconf.async_close(), 1.0)


async def _register(zeroconf: "AsyncZeroconf", service: LocalService) -> None:
    """Probes the name, and announces it."""
    from zeroconf import Error, ServiceInfo

    info = ServiceInfo(
        SERVICE,
        f"{service.peer_id}.{SERVICE}",
        port=service.port,
        addresses=[IPv4Address(address).packed for address in service.addresses],
        properties={
            "version": VERSION,
            "private": PRIVATE if service.private else OPEN,
            **({} if service.data_port is None else {"data": str(service.data_port)}),
        },
        server=f"{service.peer_id.lower()}.local.",
    )
    try:
        await (await zeroconf.async_register_service(info))
    except (OSError, Error) as error:
        _log.info("the local network does not learn of this peer: %s", str(error) or type(error).__name__)


async def ask_local_peer(
    zeroconf: "AsyncZeroconf", name: str, ranges: Ranges, within_s: float
) -> NearbyPeer | None:
    """What the network says of one name; None if no peer would have it, or if it says nothing in time, or nothing that
    a peer would."""
    from zeroconf import Error

    peer_id = peer_id_named(name)
    if peer_id is None:
        return None
    try:
        info = await zeroconf.async_get_service_info(SERVICE, name, int(within_s * 1000))
    except Error as error:
        _log.debug("the local network cannot be asked about %s: %s", peer_id, error)
        return None
    if info is None or info.port is None:
        return None
    return read_local_peer(peer_id, info.parsed_addresses(), info.port, info.properties, ranges)


def peer_id_named(name: str) -> str | None:
    """The peer id in the name of a service; None: it is no peer's. Any machine of the network may point to any name,
    also to one of another service, or that zeroconf refuses."""
    peer_id = name.removesuffix(f".{SERVICE}")
    try:
        public_key_of(peer_id)
    except ValueError:
        return None
    return peer_id if peer_id != name else None


def read_local_peer(
    peer_id: str, hosts: Iterable[str], port: int, properties: Mapping[bytes, bytes | None], ranges: Ranges
) -> NearbyPeer | None:
    """Checks what a stranger of the local network says of a peer; None if no peer would say it.

    Only addresses of `ranges` count, those in which this machine asked: nobody of this network has others dial the
    world.
    """
    if properties.get(b"version") != VERSION:
        return None
    addresses: list[str] = []
    for host in hosts:
        address = f"/ip4/{host}/tcp/{port}/p2p/{peer_id}"
        with contextlib.suppress(ValueError):
            PeerAddress.parse(address)
            if range_of(host) in ranges:
                addresses.append(address)
    if not addresses:
        return None
    addresses = addresses[:MOST_ADDRESSES]
    data_port = properties.get(b"data") or b""
    links: tuple[str, ...] = ()
    if data_port.isdigit() and len(data_port) <= 5 and 0 < int(data_port) < 65536:
        links = tuple(f"{PeerAddress.parse(address).host}:{int(data_port)}" for address in addresses)
    return NearbyPeer(peer_id, tuple(addresses), properties.get(b"private") == PRIVATE, links)
