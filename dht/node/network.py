"""Network of the control plane: its parts put together, in trio, inside the network thread."""

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import trio

from molink.dht.gossip.gossip import PROTOCOL as GOSSIP
from molink.dht.gossip.gossip import Gossip, GossipObserver
from molink.dht.gossip.publisher import Publisher
from molink.dht.gossip.suspicion import NeighbourProber
from molink.dht.gossip.table import PROTOCOL as TABLE
from molink.dht.gossip.table import TableService
from molink.dht.gossip.table_reader import TableReader
from molink.dht.gossip.traffic import TrafficCounters
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.framing import FrameStream
from molink.dht.host.host import Host, open_host
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.membership.door import network_of
from molink.dht.membership.membership import Membership
from molink.dht.node.gossip_links import GossipLinks
from molink.dht.node.joining import Joining, NetworkSettings
from molink.dht.node.maintenance import Maintenance
from molink.dht.node.visibility_check import VisibilityCheck
from molink.dht.refusals import RefusalLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Network:
    """A running control plane. To be used in its own thread, but for `host.addresses`."""

    host: Host
    gossip: Gossip
    publisher: Publisher
    maintenance: Maintenance
    traffic: TrafficCounters


@contextlib.asynccontextmanager
async def open_network(settings: NetworkSettings, membership: Membership) -> AsyncIterator[Network]:
    """A network that has found the swarm, if it was told where.

    Raises:
        PortInUse, BootstrapUnreachable.
    """
    serves = settings.listen is not None
    timing = settings.timing

    async with (
        open_host(
            settings.identity, settings.listen, settings.swarm_key, membership.knows, settings.connections
        ) as host,
        trio.open_nursery() as nursery,
    ):
        traffic, refusals = TrafficCounters(), RefusalLog(logger)
        tasks = NeighbourTasks(nursery, refusals)
        reader = TableReader(host, membership, timing, traffic, tasks)
        links = GossipLinks(host, timing, tasks, serves=serves)
        visibility = VisibilityCheck(host.peer_id, membership, timing, reader, tasks, links)
        maintenance = Maintenance(host, settings, membership, reader, tasks, links, visibility)
        prober = NeighbourProber(settings.identity, host, membership, timing, tasks)
        prober.over_relays = settings.over_relays
        observer = GossipObserver(reader.facts_wanted, maintenance.schedule_anti_entropy, prober.probe)
        gossip = Gossip(host.peer_id, membership, timing, traffic, refusals, observer)
        publisher = Publisher(settings.identity, host.addresses, membership, gossip, timing, settings.durable)
        links.gossip = prober.gossip = gossip
        visibility.sequences = publisher.sequences
        reader.after_pull = gossip.after_loss = publisher.contradicted
        if serves:
            tables = TableService(
                membership,
                traffic,
                timeout_s=timing.table_timeout_s,
                host_of=host.host_of,
                is_member=membership.knows,
                limits=settings.table_callers,
            )
            _serve(host, gossip, tables)
        await Joining(host, timing, reader, membership.living, links.open).join(
            settings.initial_peers, settings.fallback
        )
        membership.settle()
        reader.hot_pulled = gossip.announce_pulled  # what a newcomer copies the others have
        links.count(membership.living())  # before the first word, which else lapses before the second is due
        nursery.start_soon(maintenance.run)
        nursery.start_soon(publisher.run)
        nursery.start_soon(gossip.run)
        nursery.start_soon(prober.run)
        yield Network(host, gossip, publisher, maintenance, traffic)
        nursery.cancel_scope.cancel()


def _serve(host: Host, gossip: Gossip, tables: TableService) -> None:
    async def accept_link(stream: FrameStream) -> None:
        network, began_at = network_of(host.host_of(stream.peer_id)), trio.current_time()
        await gossip.run_link(CompressedStream(stream), network, dialled=False)
        if stream.peer_id not in gossip.neighbours:
            await host.hang_up(stream.peer_id, opened_by=began_at)

    async def hand_out_table(stream: FrameStream) -> None:
        await tables.serve(CompressedStream(stream))

    host.handle(GOSSIP, accept_link)
    host.handle(TABLE, hand_out_table)
