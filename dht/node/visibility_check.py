"""Visibility check: asks another peer what it holds of this one, and warns the owner if nobody shows it."""

import logging
import math
from collections.abc import Callable, Sequence

import trio

from molink.dht.gossip.sequences import Sequences
from molink.dht.gossip.table_reader import TableReader
from molink.dht.host.framing import StreamEndedError
from molink.dht.host.host import DialError
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.membership.membership import Membership, tag_of
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.node.gossip_links import GossipLinks, jittered
from molink.dht.node.hearing import ClockMonitor, Visibility, VisibilityMonitor, visibility_of

logger = logging.getLogger(__name__)


class VisibilityCheck:
    """Visibility check of one peer: soon after its first words, and from time to time."""

    def __init__(
        self,
        peer_id: str,
        membership: Membership,
        timing: DiscoveryTiming,
        reader: TableReader,
        tasks: NeighbourTasks,
        links: GossipLinks,
    ) -> None:
        self._peer_id = peer_id
        self._membership = membership
        self._timing = timing
        self._reader = reader
        self._tasks = tasks
        self._links = links
        self._monitor = VisibilityMonitor()
        self._clock_monitor = ClockMonitor()
        self._due = trio.current_time()
        self.sequences: Sequences | None = None

    def look(self, sources: Callable[[], Sequence[tuple[str, tuple[str, ...]]]]) -> None:
        """Begins to ask the first of `sources` (peer ids with addresses), if it is time to."""
        if self.sequences is None or trio.current_time() < self._due:
            return
        self._due = trio.current_time() + jittered(self._timing, self._timing.heard_s)
        if self.sequences.first is not None and (found := sources()):
            peer_id, addresses = found[0]
            self._due = math.inf
            self._tasks.start_soon(peer_id, self._ask, peer_id, addresses, self.sequences)

    async def _ask(self, peer_id: str, addresses: tuple[str, ...], sequences: Sequences) -> None:
        outcome = Visibility.SILENT
        try:
            await self._links.connect(peer_id, addresses)
            self._membership.own.forget_told()
            await self._reader.pull(peer_id, tags=(tag_of(self._peer_id),), states_only=True)
            held = self._membership.own.sequence_told_last
            outcome = visibility_of(sequences.first or 0, sequences.last, held)
        except (DialError, StreamEndedError) as error:
            logger.debug("%s does not say what it holds of this peer: %s", peer_id, error)
        finally:
            self._due = trio.current_time() + jittered(self._timing, self._timing.heard_s)
        ahead_s = (self._membership.own.held_sequence - sequences.last) / 1000
        line = self._monitor.record_answer(outcome, peer_id, self._membership.clock_ahead_s(), ahead_s)
        of_clock = self._clock_monitor.record_difference(self._membership.clock_behind_s())
        for told in filter(None, (line, of_clock)):
            logger.warning("%s", told)
        if self._monitor.heard:
            self._due = trio.current_time() + jittered(self._timing, self._timing.anti_entropy_interval_s)
