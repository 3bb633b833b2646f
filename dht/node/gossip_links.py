"""Neighbour links: dials peers, keeps the gossip links that this peer chose, leaves alone who failed lately."""

import logging
import math
import random
from collections.abc import Sequence

import trio

from molink.dht.gossip.gossip import PROTOCOL as GOSSIP
from molink.dht.gossip.gossip import Gossip
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.host import DialError, Host
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.membership.neighbours import (
    COPIES_HELD_S,
    HAND_OVER_S,
    LinkCounts,
    Neighbour,
    link_counts,
    network_at,
    redial_spread_s,
    to_dial,
    to_hand_over,
)
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.records.records import PeerFacts

logger = logging.getLogger(__name__)

STAGGER_S = 0.25
"""Between the dials of one peer's addresses (RFC 8305, section 5)."""


class GossipLinks:
    """Neighbour links of one peer (`serves`) or client, which has none and only dials."""

    def __init__(self, host: Host, timing: DiscoveryTiming, tasks: NeighbourTasks, *, serves: bool) -> None:
        self._host = host
        self._timing = timing
        self._tasks = tasks
        self._serves = serves
        self._not_before: dict[str, float] = {}
        self._linking: dict[str, str] = {}
        """Peers that are being dialled, or whose link was dialled from here, and the networks of these."""
        self._dial_at: float | None = None
        """When a link that is missing is dialled; None: none is."""
        self._hand_over_at = 0.0
        self._copies, self._copies_until = 1.0, 0.0
        self.gossip: Gossip | None = None

    @property
    def neighbours(self) -> tuple[str, ...]:
        """Peers that announcements are exchanged with."""
        return self.gossip.neighbours if self.gossip is not None else ()

    def failed_lately(self, peer_id: str) -> bool:
        """Whether that peer is left alone for now."""
        return self._not_before.get(peer_id, 0.0) > trio.current_time()

    def record_failure(self, peer_id: str) -> None:
        """Leaves that peer alone for a while."""
        self._not_before[peer_id] = trio.current_time() + jittered(self._timing, self._timing.redial_s)

    def open_missing(self, living: Sequence[PeerFacts]) -> None:
        """Dials others until so many links have been chosen here, however many others have chosen this peer."""
        linked, now = self.neighbours, trio.current_time()
        self._not_before = {peer_id: at for peer_id, at in self._not_before.items() if at > now}
        dialled = {link.peer_id: link.network for link in self.gossip.dialled} if self.gossip else {}
        dialled |= self._linking
        counts = self.count(living)
        self._hand_over(living, counts.share)
        if len(dialled) >= counts.to_dial:
            self._end_surplus(counts.to_dial)
            self._dial_at = None
            return
        if not self._is_time_to_dial(redial_spread_s(counts.copies) if dialled else 0.0):
            return
        addresses = {
            facts.peer_id: facts.addresses
            for facts in living
            if facts.addresses
            and facts.peer_id != self._host.peer_id
            and facts.peer_id not in linked
            and facts.peer_id not in dialled
            and facts.peer_id not in self._not_before
        }
        order = random.sample(sorted(addresses), len(addresses))
        candidates = [Neighbour(peer_id, network_at(addresses[peer_id][0])) for peer_id in order]
        for one in to_dial(candidates, dialled.values(), counts.to_dial - len(dialled)):
            self.open(one.peer_id, addresses[one.peer_id])

    def _is_time_to_dial(self, spread_s: float) -> bool:
        """Whether a missing link is dialled now: at any moment of so many seconds after it was missed first."""
        now = trio.current_time()
        if self._dial_at is None:
            self._dial_at = now + random.uniform(0.0, spread_s)
        return now >= min(self._dial_at, now + spread_s)

    def count(self, living: Sequence[PeerFacts]) -> LinkCounts:
        """Counts the links that the living make fitting, and has gossip admit as many and announce accordingly."""
        counts = link_counts(living, self._host.peer_id)
        now = trio.current_time()
        if counts.copies >= self._copies or now >= self._copies_until:
            self._copies, self._copies_until = counts.copies, now + COPIES_HELD_S
        if self.gossip is not None:
            self.gossip.most_incoming, self.gossip.copies = counts.incoming, self._copies
        return counts

    def _hand_over(self, living: Sequence[PeerFacts], share: float) -> None:
        """Ends a link of too many from peers that nobody can dial, from time to time."""
        now = trio.current_time()
        if self.gossip is None or share == math.inf or now < self._hand_over_at:
            return
        hidden = {facts.peer_id for facts in living if not facts.addresses}
        leaves = to_hand_over([link for link in self.gossip.incoming if link.peer_id in hidden], share, now)
        if leaves is not None:
            self._hand_over_at = now + jittered(self._timing, HAND_OVER_S)
            self.gossip.end_link(leaves.peer_id)

    def _end_surplus(self, to_dial: int) -> None:
        """Ends a link of too many that were dialled, as by a peer that has found out since that nobody can dial it:
        where few can be dialled, others need its place there."""
        chosen = self.gossip.dialled if self.gossip is not None else ()
        if self.gossip is not None and len(chosen) > to_dial:
            self.gossip.end_link(min(chosen, key=lambda link: link.useful_at).peer_id)

    def open(self, peer_id: str, addresses: tuple[str, ...] = ()) -> None:
        """Opens a link to a peer; without addresses, to one that is connected already."""
        if self._serves and peer_id not in self._linking:
            network = network_at(addresses[0]) if addresses else ""
            self._linking[peer_id] = network
            self._tasks.start_soon(peer_id, self._link, peer_id, network, addresses)

    async def _link(self, peer_id: str, network: str, addresses: tuple[str, ...]) -> None:
        """A link for as long as it lasts; then the peer is left alone for a while."""
        began_at = trio.current_time()
        try:
            await self.connect(peer_id, addresses)
            began_at = trio.current_time()
            if peer_id in self.neighbours:  # it has dialled meanwhile
                return
            stream = await self._host.open_stream(peer_id, GOSSIP, timeout_s=self._timing.dial_timeout_s)
        except DialError as error:
            logger.debug("no link to %s: %s", peer_id, error)
        else:
            if self.gossip is not None:
                await self.gossip.run_link(CompressedStream(stream), network, dialled=True)
        finally:
            self._linking.pop(peer_id, None)
            self.record_failure(peer_id)
        if self.gossip is not None and peer_id not in self.neighbours:
            await self._host.hang_up(peer_id, opened_by=began_at)

    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> None:
        """A connection to the peer, over whichever of its addresses answers first; each gets STAGGER_S before the
        next is tried beside it.

        Raises:
            DialError: none of them has answered.
        """
        failure = DialError(f"no address of {peer_id} is known")
        if self._host.is_connected(peer_id):
            return
        async with trio.open_nursery() as nursery:

            async def dial(address: str, ended: trio.Event) -> None:
                nonlocal failure
                try:
                    await self._host.dial(address, timeout_s=self._timing.dial_timeout_s)
                except DialError as error:
                    failure = error
                else:
                    nursery.cancel_scope.cancel()
                finally:
                    ended.set()

            for address in addresses:
                ended = trio.Event()
                nursery.start_soon(dial, address, ended)
                with trio.move_on_after(STAGGER_S):
                    await ended.wait()
        if self._host.is_connected(peer_id):
            return
        self.record_failure(peer_id)
        raise failure


def jittered(timing: DiscoveryTiming, seconds: float) -> float:
    """Draws a time near `seconds`, so that peers do not act in unison."""
    return seconds * random.uniform(1 - timing.jitter, 1 + timing.jitter)
