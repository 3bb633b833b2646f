"""Opens what makes a peer reachable, from what its owner has said and what is running by then."""

import ipaddress
from contextlib import AsyncExitStack

from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.node.discovery import Discovery
from molink.peer.daemon.settings import JoinSettings
from molink.peer.reach.moving import PunchingHandler
from molink.peer.reach.reach import Reach, ReachSettings, Surroundings
from molink.peer.serving.data_plane import DataPlane
from molink.peer.wire.reach.relay_client import RelayUser


async def open_reach(
    stack: AsyncExitStack,
    settings: JoinSettings,
    identity: Identity,
    swarm_key: SwarmKey | None,
    serving: DataPlane,
    discovery: Discovery,
    told: str,
) -> Reach:
    """It stays open on `stack`. `told`: host:port where the owner has said that others dial it; empty: he has not.
    Raises PortInUse."""
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


def _reach_settings(settings: JoinSettings, told: str) -> ReachSettings:
    is_mapped = settings.announced_ports is not None
    return ReachSettings(
        host=settings.listen,
        relay_port=settings.options.relay_port,
        # where ports are mapped, nobody knows as what others see a third one, unless its owner does
        offer="off" if is_mapped and not settings.options.relay_port else str(settings.options.offer_relay),
        relay=settings.options.relay,
        told=told,
        # through a proxy nothing is dialled but links, and nothing comes in
        is_local=ipaddress.ip_address(settings.listen).is_loopback or settings.options.http_proxy is not None,
    )
