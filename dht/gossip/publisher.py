"""Says what this peer is: on change at once, otherwise at jittered intervals, always newer than before.

How often depends on what the records of all peers leave of the budget (`timing.py`). Who is called gone speaks at once.
"""

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace

import trio

from molink.dht.gossip.gossip import Gossip
from molink.dht.gossip.sequences import DurableState, Sequences
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import Membership
from molink.dht.membership.swarm_clock import TOLERANCE_S
from molink.dht.membership.timing import (
    DiscoveryTiming,
    Pace,
    announced_links,
    announcement_interval_s,
    change_burst,
    change_spacing_s,
    facts_burst,
    facts_interval_s,
    facts_spacing_s,
    facts_ttl_s,
    state_ttl_s,
)
from molink.dht.records.announcement import seal_facts, seal_state
from molink.dht.records.records import PeerFacts, PeerState

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
        durable: DurableState | None = None,
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
        self.sequences = Sequences(durable, self._clock_ms, self._others_know)
        self._facts_record = b""
        self._facts_sequence = 0
        self._facts_changed = False
        self._facts_pace = Pace(float(timing.change_burst), 0.0)
        self._facts_due = 0.0
        self._changed = trio.Event()
        self._accused = trio.Event()
        self._interval_s = math.inf
        self._said_at = -math.inf
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
            self._facts, self._facts_changed = facts, True
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
            news_bits_per_s = self._gossip.news_bits_per_s()
            peers = self._membership.peers()
            interval_s = announcement_interval_s(
                peers, news_bits_per_s, self._interval_s, self._timing.interval_s
            )
            spacing_s = change_spacing_s(peers, interval_s, self._timing.interval_s)
            burst = change_burst(self._timing, news_bits_per_s)
            pace = pace.after(trio.current_time(), self._timing, spacing_s, burst)
            if (wait_s := self._wait_s(pace, spacing_s)) > 0:
                with trio.move_on_after(wait_s):
                    await (trio.sleep_forever if self._accused.is_set() else self._accused.wait)()
                continue
            await self.sequences.prepare()
            self._changed, self._accused = trio.Event(), trio.Event()
            pace, self._interval_s = pace.spent(), interval_s
            self._publish(interval_s)
            next_s = self._jittered(interval_s)
            await trio.sleep(min(self._timing.change_gap_s, next_s))
            due = trio.current_time() + next_s - min(self._timing.change_gap_s, next_s)

    def contradicted(self) -> None:
        """Speaks again if others hold newer statements of this peer than its own, as when its clock went back, or say
        that it is gone."""
        if self._state is None or self._left:
            return
        if self._membership.own_sequence > self.sequences.last:
            self._facts_record = b""
            self._changed.set()
        if self._membership.accused_sequence >= self.sequences.last:
            self._accused.set()
            self._changed.set()

    def _wait_s(self, pace: Pace, spacing_s: float) -> float:
        """How long until it may speak; who is called gone may do so six times in the time that it has."""
        wait_s = pace.wait_s(self._timing, spacing_s)
        if self._accused.is_set():
            wait_s = min(wait_s, self._said_at + self._timing.refute_s / 6 - trio.current_time())
        return wait_s

    async def leave(self) -> None:
        """Takes everything back, and waits until the neighbours have been told."""
        if self._state is None or self._left:
            return
        self._left = True
        state = replace(
            self._state, sequence=self.sequences.take(), facts_sequence=0, ttl_s=0, spans=(), loading=()
        )
        self._membership.forget_own()
        self._gossip.broadcast(seal_state(state, self._identity))
        await self._gossip.drained()
        await trio.to_thread.run_sync(self.sequences.give_back)

    def _publish(self, interval_s: float) -> None:
        if self._left or self._facts is None or self._state is None:
            return
        now = self._said_at = trio.current_time()
        if self._facts_are_due(now):
            self._publish_facts(self._facts, now)
        state = replace(
            self._state,
            sequence=self.sequences.take(),
            facts_sequence=self._facts_sequence,
            ttl_s=state_ttl_s(interval_s, self._timing.jitter),
        )
        record = seal_state(state, self._identity)
        self._membership.hold_own(self._facts_record, record)
        self._gossip.broadcast(record)

    def _facts_are_due(self, now: float) -> bool:
        """Facts that have changed keep a pace of their own: they are large, and states can do without the newest."""
        spacing_s = facts_spacing_s(self._membership.peers())
        burst = facts_burst(self._gossip.news_bits_per_s())
        self._facts_pace = self._facts_pace.after(now, self._timing, spacing_s, burst)
        may_change = self._facts_changed and self._facts_pace.wait_s(self._timing, spacing_s) <= 0
        return not self._facts_record or now >= self._facts_due or may_change

    def _publish_facts(self, facts: PeerFacts, now: float) -> None:
        peers = self._membership.peers()
        every_s = facts_interval_s(peers, self._timing.facts_interval_s)
        self._facts_sequence = self.sequences.take()
        nearest = sorted(facts.links, key=lambda link: (link.rtt_ms, link.peer_id))
        told = replace(
            facts,
            sequence=self._facts_sequence,
            ttl_s=facts_ttl_s(every_s),
            links=tuple(nearest[: announced_links(peers)]),
        )
        self._facts_record = seal_facts(told, self._identity)
        self._facts_due = now + self._jittered(every_s)
        self._facts_changed, self._facts_pace = False, self._facts_pace.spent()
        self._gossip.broadcast(self._facts_record)

    def _completed(self, facts: PeerFacts) -> PeerFacts:
        return replace(
            facts,
            peer_id=self._identity.peer_id,
            public_key=self._identity.public_key,
            addresses=facts.addresses or self._addresses,
            sequence=0,
            ttl_s=1,
        )

    def _others_know(self) -> int:
        """The highest sequence that others hold of this peer, or pretend to have heard of it."""
        return max(self._membership.own_sequence, self._membership.accused_sequence)

    def _clock_ms(self) -> int:
        """Milliseconds since 1970; by the swarm's clock, if this machine's is far behind."""
        ahead_s = self._membership.clock_ahead_s()
        return int(1000 * (self._wall_clock() + (ahead_s if ahead_s > TOLERANCE_S / 2 else 0.0)))

    def _jittered(self, seconds: float) -> float:
        return seconds * random.uniform(1 - self._timing.jitter, 1 + self._timing.jitter)
