"""Publisher of one peer's announcements, each newer than the last. `AnnouncingCore` decides when; trio does it here."""

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from molink.dht.gossip.gossip import Gossip
from molink.dht.gossip.sequences import DurableState, Sequences
from molink.dht.identity.identity import Identity
from molink.dht.membership import announcing_core as core
from molink.dht.membership.membership import Membership
from molink.dht.membership.swarm_clock import TOLERANCE_S
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.records.announcement import sign_facts, sign_state
from molink.dht.records.records import PeerFacts, PeerState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SignedFacts:
    """Facts as they were said last."""

    record: bytes
    sequence: int


class Publisher:
    """Publisher of one peer's own announcements."""

    def __init__(
        self,
        identity: Identity,
        addresses: tuple[str, ...],
        membership: Membership,
        gossip: Gossip,
        timing: DiscoveryTiming,
        durable: DurableState | None = None,
    ) -> None:
        self._identity = identity
        self._addresses = addresses
        self._membership = membership
        self._gossip = gossip
        self.wall_clock: Callable[[], float] = time.time
        """This machine's, in seconds since 1970."""
        self._facts: PeerFacts | None = None
        self._state: PeerState | None = None
        self.sequences = Sequences(durable, self._clock_ms, self._others_know)
        self._signed_facts = _SignedFacts(b"", 0)
        self._core = core.AnnouncingCore(timing)
        self._wake_at = math.inf
        self._wake_changed = trio.Event()

    def announce(self, facts: PeerFacts | None, state: PeerState) -> None:
        """Takes over what is to be said; sequence numbers, times to live and identity are filled in here.

        Raises:
            AnnouncementError: a value is out of bounds.
            ValueError: the first call must bring facts.
        """
        if facts is not None:
            facts = self._completed(facts)
            sign_facts(facts, self._identity)  # what cannot be said is refused here, not when its time comes
        state = replace(state, peer_id=self._identity.peer_id, sequence=0, facts_sequence=0, ttl_s=1)
        sign_state(state, self._identity)
        if facts is None and self._facts is None:
            raise ValueError("the first announcement needs facts")
        facts_changed = facts is not None and facts != self._facts
        if not facts_changed and state == self._state:
            return
        self._facts, self._state = facts or self._facts, state
        self._tell(core.Changed(facts=facts_changed))

    async def run(self) -> None:
        """Publishes until cancelled."""
        while True:
            with trio.CancelScope(deadline=self._wake_at):
                await self._wake_changed.wait()
            self._wake_changed = trio.Event()
            if trio.current_time() >= self._wake_at:
                draw = random.uniform(-1.0, 1.0)
                peers, gossip = self._membership.peers(), self._gossip
                spoken = self._tell(core.Look(peers, gossip.news_bits_per_s(), draw, gossip.copies))
                for words in spoken:
                    await self.sequences.prepare()
                    self._publish(words)

    def contradicted(self) -> None:
        """Speaks again if others hold newer statements of this peer than its own, as when its clock went back, or say
        that it is gone."""
        if self._state is None:
            return
        if self._membership.own.held_sequence > self.sequences.last:
            self._tell(core.Contradicted())
        if self._membership.own.accused_sequence >= self.sequences.last:
            self._tell(core.Accused())

    def _tell(self, event: core.Event) -> list[core.Speak]:
        """Tells the core, and returns what is to be said."""
        effects = self._core.handle(event, trio.current_time())
        for effect in effects:
            if isinstance(effect, core.Wake):
                self._wake_at = effect.at_s
                self._wake_changed.set()
        return [effect for effect in effects if isinstance(effect, core.Speak)]

    async def leave(self) -> None:
        """Takes everything back, and waits until the neighbours have been told."""
        if self._state is None or self._core.left:
            return
        self._tell(core.Left())
        state = replace(core.farewell(self._state), sequence=self.sequences.take())
        self._membership.own.forget_records()
        self._gossip.broadcast(sign_state(state, self._identity))
        await self._gossip.drained()
        await trio.to_thread.run_sync(self.sequences.give_back)

    def _publish(self, words: core.Speak) -> None:
        if self._core.left or self._facts is None or self._state is None:
            return
        if words.facts is not None:
            self._publish_facts(self._facts, words.facts)
        state = replace(
            self._state,
            sequence=self.sequences.take(),
            facts_sequence=self._signed_facts.sequence,
            ttl_s=words.ttl_s,
        )
        record = sign_state(state, self._identity)
        self._membership.own.hold(self._signed_facts.record, record)
        self._gossip.broadcast(record)

    def _publish_facts(self, facts: PeerFacts, words: core.SaidFacts) -> None:
        sequence = self.sequences.take()
        nearest = sorted(facts.links, key=lambda link: (link.rtt_ms, link.peer_id))
        told = replace(
            facts,
            sequence=sequence,
            ttl_s=words.ttl_s,
            links=tuple(nearest[: words.links]),
        )
        self._signed_facts = _SignedFacts(sign_facts(told, self._identity), sequence)
        self._gossip.broadcast(self._signed_facts.record)

    def _completed(self, facts: PeerFacts) -> PeerFacts:
        return replace(
            facts,
            peer_id=self._identity.peer_id,
            public_key=self._identity.public_key,
            addresses=facts.addresses or (() if facts.relays else self._addresses),
            sequence=0,
            ttl_s=1,
        )

    def _others_know(self) -> int:
        """The highest sequence that others hold of this peer, or pretend to have heard of it."""
        return max(self._membership.own.held_sequence, self._membership.own.accused_sequence)

    def _clock_ms(self) -> int:
        """Milliseconds since 1970; by the swarm's clock, if this machine's is far behind."""
        ahead_s = self._membership.clock_ahead_s()
        return int(1000 * (self.wall_clock() + (ahead_s if ahead_s > TOLERANCE_S / 2 else 0.0)))
