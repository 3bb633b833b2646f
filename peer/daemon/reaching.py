"""Opens what makes a peer reachable, from what its owner has said and what is running by then."""

import asyncio
import ipaddress
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.node.discovery import Discovery
from molink.dht.records.records import PeerFacts, RelayAt
from molink.peer.daemon.settings import AnnouncedPorts, JoinSettings, where_to_join
from molink.peer.device.machine import unused_port
from molink.peer.reach.moving import PunchingHandler
from molink.peer.reach.port_mapping import InnerPorts, PortMapper, PortMapping
from molink.peer.reach.reach import Reach, ReachSettings, Surroundings
from molink.peer.reach.upnp_gateway import find_gateway
from molink.peer.serving.data_plane import DataPlane
from molink.peer.wire.link.links import Links
from molink.peer.wire.reach.relay_client import RelayUser
from molink.routing.snapshot import Snapshot
from molink.shards.address_ranges import ALL_INTERFACES
from molink.shards.spec import ModelSpec


def hosts_of(settings: JoinSettings, discovery: Discovery) -> list[str]:
    """Where this peer's swarm is: at its own addresses, but for all interfaces, and where its owner had it join."""
    listens = () if settings.listen in ALL_INTERFACES else (settings.listen,)
    announces = (settings.options.announce,) if settings.options.announce else ()
    return [*discovery.addresses, *listens, *announces, *where_to_join(settings).initial_peers]


def data_address(settings: JoinSettings, discovery: Discovery, port: int) -> str:
    """Where others dial this peer's links, as HOST:PORT. `port`: where it listens."""
    host = settings.options.announce or discovery.addresses[0].split("/")[2]
    if settings.announced_ports is not None:
        port = settings.announced_ports.data
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def with_mapped_ports(
    stack: AsyncExitStack,
    settings: JoinSettings,
    remembered: tuple[int | None, int | None],
    say: Callable[[str], None],
    find: Callable[[str], PortMapper] = find_gateway,
) -> JoinSettings:
    """Settings that name the ports which the router maps, as if the owner had; those given where it maps none. They
    stay mapped, and are renewed, on `stack`. `remembered`: ports of the last start."""
    options = settings.options
    if options.port_mapping == "off":
        return settings
    control = options.port or unused_port(
        settings.listen, remembered[0], options.grpc_port, options.relay_port
    )
    data = options.grpc_port or unused_port(settings.listen, remembered[1], control, options.relay_port)
    relay = None
    if options.offer_relay != "off":
        relay = options.relay_port or unused_port(settings.listen, None, control, data)
    mapping = PortMapping(lambda: find(settings.listen), InnerPorts(control, data, relay), say)
    stack.push_async_callback(mapping.close)
    mapped = await mapping.open()
    if mapped is None:
        return settings
    keeping = asyncio.create_task(mapping.keep(), name="keep ports mapped")

    async def end() -> None:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    stack.push_async_callback(end)
    say(
        f"--port-mapping on: the router says that it passes ports {mapped.control} and {mapped.data} of {mapped.host} "
        f"on to {control} and {data} here"
        + (f", and {mapped.relay} to its relay" if mapped.relay is not None else "")
        + "; relays, where there are any, are asked whether it does"
    )
    relay_port = options.relay_port if relay is None or mapped.relay is None else relay
    return replace(
        settings,
        options=replace(options, announce=mapped.host, port=control, grpc_port=data, relay_port=relay_port),
        announced_ports=AnnouncedPorts(mapped.control, mapped.data, mapped.relay),
    )


async def open_reach(
    stack: AsyncExitStack,
    settings: JoinSettings,
    identity: Identity,
    swarm_key: SwarmKey | None,
    serving: DataPlane,
    discovery: Discovery,
    told: str,
) -> Reach:
    """It stays open on `stack`. `told`: host:port where the owner, or his router, has said that others dial it; empty:
    nobody has. Raises PortInUse."""
    assert isinstance(serving.handler, PunchingHandler)  # noqa: S101 - as it was made

    def uplink_mbps() -> float | None:
        measured = serving.measure_line().uplink_bytes_per_s
        return None if measured is None else measured * 8 / 1e6

    reach = Reach(
        _reach_settings(settings, told),
        RelayUser(identity, swarm_key),
        Surroundings(
            serving.links,
            serving.handler,
            serving.port,
            discovery.snapshot,
            discovery.facts_of,
            discovery.knows,
            uplink_mbps,
        ),
    )
    await stack.enter_async_context(reach)
    discovery.over_relays = reach.answers

    def ask_no_more() -> None:
        discovery.over_relays = None

    stack.callback(ask_no_more)
    return reach


def prefer_predicted_relays(links: Links, discovery: Discovery, own_peer_id: str, model: ModelSpec) -> None:
    """From now on peers are asked for first at the relay over which routers predict the link to them."""

    def preferred(facts: PeerFacts) -> tuple[RelayAt, ...]:
        snapshot = Snapshot(discovery.snapshot(model.model_hash), model)
        return snapshot.preferred_relays(own_peer_id, facts)

    links.dialler.preferred_relays = preferred
    links.dialler.is_member = lambda peer_id: discovery.facts_of(peer_id) is not None


def _reach_settings(settings: JoinSettings, told: str) -> ReachSettings:
    ports = settings.announced_ports
    is_mapped = ports is not None
    by_router = is_mapped and settings.options.port_mapping == "on"
    unknown = ports is not None and ports.relay is None and (by_router or not settings.options.relay_port)
    return ReachSettings(
        host=settings.listen,
        relay_port=settings.options.relay_port,
        announced_relay_port=None if ports is None else ports.relay,
        # where ports are mapped, nobody knows as what others see a third one, unless its owner or router does
        offer="off" if unknown else str(settings.options.offer_relay),
        relay=settings.options.relay,
        told="" if by_router else told,
        joined_at=settings.initial_peers,
        # through a proxy nothing is dialled but links, and nothing comes in
        is_local=ipaddress.ip_address(settings.listen).is_loopback or settings.options.http_proxy is not None,
        mapped=told if by_router else "",
    )
