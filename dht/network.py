"""The parts of the control plane put together, in trio: what runs inside the network thread."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import trio

from molink.dht.framing import FrameStream
from molink.dht.gossip import PROTOCOL as GOSSIP
from molink.dht.gossip import Gossip
from molink.dht.host import Host, Listen, open_host
from molink.dht.identity import Identity
from molink.dht.membership import Membership, tag_of
from molink.dht.packed import PackedStream
from molink.dht.publisher import Publisher
from molink.dht.swarm_key import SwarmKey
from molink.dht.table import PROTOCOL as TABLE
from molink.dht.table import TableService
from molink.dht.timing import DiscoveryTiming
from molink.dht.traffic import Traffic
from molink.dht.upkeep import Upkeep
from molink.dht.witness import Witness


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """What a network is made of. `listen` None: a client, which accepts nobody and announces nothing."""

    identity: Identity
    listen: Listen | None
    initial_peers: tuple[str, ...]
    swarm_key: SwarmKey | None
    timing: DiscoveryTiming


@dataclass(frozen=True, slots=True)
class Network:
    """A running control plane. To be used in its own thread, but for `host.addresses`."""

    host: Host
    gossip: Gossip
    publisher: Publisher
    upkeep: Upkeep
    traffic: Traffic


@contextlib.asynccontextmanager
async def open_network(settings: NetworkSettings, membership: Membership) -> AsyncIterator[Network]:
    """A network that has found the swarm, if it was told where.

    Raises:
        PortInUse, BootstrapUnreachable.
    """
    serves = settings.listen is not None
    timing = settings.timing

    def is_member(peer_id: str) -> bool:
        return membership.sequence_of(tag_of(peer_id)) >= 0

    async with (
        open_host(settings.identity, settings.listen, settings.swarm_key, is_member) as host,
        trio.open_nursery() as nursery,
    ):
        traffic = Traffic()
        upkeep = Upkeep(host, membership, timing, traffic, settings.initial_peers, nursery, serves=serves)
        witness = Witness(settings.identity, host, membership, timing, nursery)
        gossip = Gossip(
            host.peer_id,
            membership,
            timing,
            traffic,
            upkeep.facts_wanted,
            upkeep.repair_soon,
            witness.link_lost,
        )
        publisher = Publisher(settings.identity, host.addresses, membership, gossip, timing)
        upkeep.gossip, upkeep.after_pull, witness.gossip = gossip, publisher.contradicted, gossip
        gossip.after_loss = publisher.contradicted
        if serves:
            tables = TableService(
                membership,
                traffic,
                timeout_s=timing.table_timeout_s,
                host_of=host.host_of,
                is_member=is_member,
            )
            _serve(host, gossip, tables)
        await upkeep.bootstrap()
        nursery.start_soon(upkeep.run)
        nursery.start_soon(publisher.run)
        nursery.start_soon(gossip.run)
        yield Network(host, gossip, publisher, upkeep, traffic)
        nursery.cancel_scope.cancel()


def _serve(host: Host, gossip: Gossip, tables: TableService) -> None:
    async def accept_link(stream: FrameStream) -> None:
        await gossip.run_link(PackedStream(stream), dialled=False)
        if stream.peer_id not in gossip.neighbours:
            await host.hang_up(stream.peer_id)

    async def hand_out_table(stream: FrameStream) -> None:
        await tables.serve(PackedStream(stream))

    host.handle(GOSSIP, accept_link)
    host.handle(TABLE, hand_out_table)
