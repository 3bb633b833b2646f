"""Says what this peer is: on change at once, otherwise at jittered intervals, always newer than before."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace

import trio

from molink.dht.announcement import seal_facts, seal_state
from molink.dht.gossip import Gossip
from molink.dht.identity import Identity
from molink.dht.membership import Membership
from molink.dht.records import PeerFacts, PeerState
from molink.dht.timing import (
    DiscoveryTiming,
    Pace,
    announcement_interval_s,
    change_spacing_s,
    facts_interval_s,
    facts_ttl_s,
    state_ttl_s,
)

logger = logging.getLogger(__name__)


class Publisher:
    """One peer's own announcements."""

    def __init__(
        self,
        identity: Identity,
        addresses: tuple[str, ...],
        membership: Membership,
        gossip: Gossip,
        timing: DiscoveryTiming,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._addresses = addresses
        self._membership = membership
        self._gossip = gossip
        self._timing = timing
        self._wall_clock = wall_clock
        self._facts: PeerFacts | None = None
        self._state: PeerState | None = None
        self._sequence = 0
        self._facts_record = b""
        self._facts_sequence = 0
        self._facts_due = 0.0
        self._changed = trio.Event()
        self._left = False

    def announce(self, facts: PeerFacts | None, state: PeerState) -> None:
        """Takes over what is to be said; sequence numbers, times to live and identity are filled in here.

        Raises:
            AnnouncementError: a value is out of bounds.
            ValueError: the first call must bring facts.
        """
        if facts is not None:
            facts = self._completed(facts)
            seal_facts(facts, self._identity)  # what cannot be said is refused here, not when its time comes
        state = replace(state, peer_id=self._identity.peer_id, sequence=0, facts_sequence=0, ttl_s=1)
        seal_state(state, self._identity)
        if facts is None and self._facts is None:
            raise ValueError("the first announcement needs facts")
        if facts is not None and facts != self._facts:
            self._facts, self._facts_record = facts, b""
            self._changed.set()
        if state != self._state:
            self._state = state
            self._changed.set()

    async def run(self) -> None:
        """Publishes until cancelled."""
        pace = Pace(float(self._timing.change_burst), trio.current_time())
        due = trio.current_time()
        while True:
            with trio.CancelScope(deadline=due if self._state is not None else float("inf")):
                await self._changed.wait()
            spacing_s = change_spacing_s(self._membership.peers())
            pace = pace.after(trio.current_time(), self._timing, spacing_s)
            if (wait_s := pace.wait_s(self._timing, spacing_s)) > 0:
                await trio.sleep(wait_s)
                continue
            self._changed = trio.Event()
            pace = pace.spent()
            interval_s = announcement_interval_s(self._membership.peers(), self._timing.interval_s)
            self._publish(interval_s)
            next_s = self._jittered(interval_s)
            await trio.sleep(min(self._timing.change_gap_s, next_s))
            due = trio.current_time() + next_s - min(self._timing.change_gap_s, next_s)

    def contradicted(self) -> None:
        """Speaks again if others hold newer statements of this peer than its own: its clock went back."""
        if self._state is not None and self._membership.own_sequence > self._sequence:
            self._facts_record = b""
            self._changed.set()

    async def leave(self) -> None:
        """Takes everything back, and waits until the neighbours have been told."""
        if self._state is None or self._left:
            return
        self._left = True
        state = replace(self._state, sequence=self._next(), facts_sequence=0, ttl_s=0, spans=(), loading=())
        self._membership.forget_own()
        self._gossip.broadcast(seal_state(state, self._identity))
        await self._gossip.drained()

    def _publish(self, interval_s: float) -> None:
        if self._left or self._facts is None or self._state is None:
            return
        now = trio.current_time()
        if not self._facts_record or now >= self._facts_due:
            every_s = facts_interval_s(self._membership.peers(), self._timing.facts_interval_s)
            self._facts_sequence = self._next()
            facts = replace(self._facts, sequence=self._facts_sequence, ttl_s=facts_ttl_s(every_s))
            self._facts_record = seal_facts(facts, self._identity)
            self._facts_due = now + self._jittered(every_s)
            self._gossip.broadcast(self._facts_record)
        state = replace(
            self._state,
            sequence=self._next(),
            facts_sequence=self._facts_sequence,
            ttl_s=state_ttl_s(interval_s, self._timing.jitter),
        )
        record = seal_state(state, self._identity)
        self._membership.hold_own(self._facts_record, record)
        self._gossip.broadcast(record)

    def _completed(self, facts: PeerFacts) -> PeerFacts:
        return replace(
            facts,
            peer_id=self._identity.peer_id,
            public_key=self._identity.public_key,
            addresses=facts.addresses or self._addresses,
            sequence=0,
            ttl_s=1,
        )

    def _next(self) -> int:
        """Milliseconds since 1970, or more: whatever the clock says, beyond all this peer ever said."""
        known = max(self._sequence, self._membership.own_sequence)
        self._sequence = max(known + 1, int(1000 * self._wall_clock()))
        return self._sequence

    def _jittered(self, seconds: float) -> float:
        return seconds * random.uniform(1 - self._timing.jitter, 1 + self._timing.jitter)
