"""Neighbour prober: redials neighbours whose links ended, and gossips a suspicion of those that do not answer.

The probe and suspect steps of SWIM (Das, Gupta and Motivala, 2002); `failure_detector.py` confirms or refutes.
"""

import logging
import math
import random
from collections.abc import Awaitable, Callable

import trio

from molink.dht.gossip.gossip import Gossip
from molink.dht.gossip.table import PROTOCOL as TABLE
from molink.dht.host.host import DialError, Host
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.identity.identity import Identity
from molink.dht.membership.directory import Accepted
from molink.dht.membership.failure_detector import WITNESSES
from molink.dht.membership.membership import Membership, tag_of
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.records.announcement import sign_loss
from molink.dht.records.records import PeerFacts, PeerLoss

logger = logging.getLogger(__name__)

_MOST = 32
"""Lost neighbours that are looked for at once."""
_MOST_LOOKS = 12
SECOND_OPINIONS = 6.0
"""Peers, on average, that begin within 20 s (`redial_s`) to probe one which another calls gone, as long as only one
does: in one of 400 such losses nobody has begun by then, in one of 160,000 by 40 s."""
_AT_ONCE_S = 0.5
"""After a link has ended: who has left, or has another link already, has said so by then."""


class NeighbourProber:
    """Neighbour prober of one peer."""

    def __init__(
        self,
        identity: Identity,
        host: Host,
        membership: Membership,
        timing: DiscoveryTiming,
        tasks: NeighbourTasks,
    ) -> None:
        self._identity = identity
        self._host = host
        self._membership = membership
        self._timing = timing
        self._tasks = tasks
        self._looking: set[str] = set()
        self.gossip: Gossip | None = None
        self.over_relays: Callable[[PeerFacts], Awaitable[bool]] | None = None
        """Whether a peer answers over the relays that it announces."""

    def probe(self, peer_id: str) -> None:
        """Starts to probe a peer, as a neighbour whose link has ended, unless it has left."""
        if peer_id not in self._looking and len(self._looking) < _MOST:
            self._looking.add(peer_id)
            self._tasks.start_soon(peer_id, self._look_for, peer_id)

    async def run(self) -> None:
        """Probes peers that too few call gone, until cancelled: of all peers some six do each 20 s (SWIM's indirect
        probe), until a second one has confirmed it or the peer has spoken. Who has lost its other links just before has
        one neighbour that can miss it."""
        while True:
            await trio.sleep(self._timing.upkeep_s)
            rate_per_s = SECOND_OPINIONS / max(1, self._membership.peers()) / self._timing.redial_s
            chance = 1.0 - math.exp(-rate_per_s * self._timing.upkeep_s)
            for peer_id in self._membership.undecided(self._timing.redial_before_loss_s):
                if peer_id != self._identity.peer_id and random.random() < chance:
                    self.probe(peer_id)

    async def _look_for(self, peer_id: str) -> None:
        """At once for this peer itself, once more before the swarm is told, and then for as long as the swarm may take
        to say which of the two was cut off."""
        waits_s = random.uniform(0.1, 1.0) * self._timing.redial_before_loss_s
        tag, told = tag_of(peer_id), -1
        try:
            await trio.sleep(min(_AT_ONCE_S, waits_s))
            for look in range(_MOST_LOOKS):
                if not self._is_missed(peer_id):
                    return
                before = self._membership.sequence_of(tag)
                answers = await self._answers(peer_id)
                if answers or self._membership.sequence_of(tag) == before:  # else it has spoken meanwhile
                    self._membership.mark(peer_id, answers=answers)
                if answers and look > 0:  # the first time it may be about to end
                    return
                await trio.sleep(waits_s)
                known = self._membership.sequence_of(tag)
                # again where words of its last moments have come since, which the first time did not speak of
                if known > told and self._may_be_gone(peer_id) and not await self._answers(peer_id):
                    self._tell(peer_id, known)
                    told = known
                waits_s = self._timing.redial_s
        finally:
            self._looking.discard(peer_id)

    def _is_missed(self, peer_id: str) -> bool:
        """Whether it has neither left nor come back."""
        neighbours = self.gossip.neighbours if self.gossip else ()
        return peer_id not in neighbours and any(
            facts.peer_id == peer_id for facts in self._membership.living()
        )

    def _may_be_gone(self, peer_id: str) -> bool:
        """Whether nobody knows better: it has not left or come back, and this peer is not the one that is cut off."""
        return (
            self.gossip is not None
            and bool(self.gossip.neighbours)
            and self._membership.witnesses(tag_of(peer_id)) < WITNESSES
            and self._is_missed(peer_id)
        )

    async def _answers(self, peer_id: str) -> bool:
        """Whether it opens a stream, over what is left of a connection or over a new one, or answers over a relay: who
        cannot be dialled is not gone because one link has ended."""
        facts, asked_at = self._membership.facts_of(peer_id), trio.current_time()
        if await self._opens_stream(peer_id):
            return True
        await self._host.hang_up(peer_id, opened_by=asked_at)
        with trio.move_on_after(2 * self._timing.dial_timeout_s):
            for address in facts.addresses if facts is not None else ():
                with self._tasks.at_the_risk_of(peer_id):
                    try:
                        await self._host.dial(address, timeout_s=self._timing.dial_timeout_s)
                    except DialError as error:
                        logger.debug("%s does not answer at %s: %s", peer_id, address, error)
                    else:
                        return await self._opens_stream(peer_id)
        if facts is None or not facts.relays or self.over_relays is None:
            return False
        return await self.over_relays(facts)

    async def _opens_stream(self, peer_id: str) -> bool:
        try:
            stream = await self._host.open_stream(peer_id, TABLE, timeout_s=self._timing.dial_timeout_s)
        except DialError:
            return False
        await stream.reset()
        return True

    def _tell(self, peer_id: str, known: int) -> None:
        """Unless it has said something newer than was known before it was asked: whoever has just come back may not
        have answered at its address yet."""
        tag = tag_of(peer_id)
        if self.gossip is None or not self._may_be_gone(peer_id) or self._membership.sequence_of(tag) > known:
            return
        loss = PeerLoss(tag_of(self._identity.peer_id), tag, known)
        record = sign_loss(loss, self._identity)
        if isinstance(self._membership.receive(record), Accepted):
            logger.info("%s does not answer any more", peer_id)
            self.gossip.broadcast(record)
