"""Announcing core: when a peer speaks, without input or output: `handle(event, now_s)` returns what to say, and when to
look.

Changes are said at once, within a pace; what has not changed is said again at intervals. How often depends on what the
records of all peers leave of the budget (`timing.py`). Facts go with states, seldom. Who is called gone speaks at once.
A running peer drives this with trio (`gossip/publisher.py`), the simulator in virtual time.
"""

import math
from dataclasses import dataclass, replace

from molink.dht.membership.timing import (
    DiscoveryTiming,
    TokenBucket,
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
from molink.dht.records.records import PeerState

_EPSILON_S = 1e-9
_REFUTED_TIMES = 6
"""Who is called gone may say so many times, in the time that it has, that it is not."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Event: there is something else to say than before."""

    facts: bool = False
    """Whether facts have changed too."""


@dataclass(frozen=True, slots=True)
class Contradicted:
    """Event: others hold newer statements of this peer than its own. Facts go again, too."""


@dataclass(frozen=True, slots=True)
class Accused:
    """Event: others say that this peer is gone."""


@dataclass(frozen=True, slots=True)
class Look:
    """Event: the time of the latest `Wake` has come."""

    peers: int
    """That are known."""
    news_bits_per_s: float
    """What all records have cost of late."""
    draw: float
    """Evenly from -1 to 1: peers do not speak in unison."""
    copies: float = 1.0
    """Of each record that a peer sends which can be dialled: its line is what all share."""


@dataclass(frozen=True, slots=True)
class Left:
    """Event: this peer takes everything back, and says nothing any more."""


@dataclass(frozen=True, slots=True)
class SaidFacts:
    """Manner in which facts are said."""

    ttl_s: int
    links: int
    """How many measured links they name, the nearest ones."""


@dataclass(frozen=True, slots=True)
class Speak:
    """Effect: the state is to be said now, and before it, if there is something of them, the facts."""

    ttl_s: int
    facts: SaidFacts | None


@dataclass(frozen=True, slots=True)
class Wake:
    """Effect: `Look` at that time, and at no other that was named before."""

    at_s: float


Event = Changed | Contradicted | Accused | Look | Left
Effect = Speak | Wake


class AnnouncingCore:
    """Core of one peer's announcements: what it has said and has yet to say. Times are those of any one clock."""

    def __init__(self, timing: DiscoveryTiming) -> None:
        self.said_s = -math.inf
        """When it spoke last."""
        self.due_s = math.inf
        """When it says its state again, if nothing changes."""
        self.interval_s = math.inf
        """Between its statements of what has not changed, as of the last one."""
        self._timing = timing
        self._changed = False
        self._accused = False
        self._left = False
        self._pace = TokenBucket(float(timing.change_burst), 0.0)
        self._facts_pace = self._pace
        self._facts_changed = False
        self._facts_due_s = -math.inf

    @classmethod
    def standing(
        cls, timing: DiscoveryTiming, said_s: float, interval_s: float, due_s: float, facts_due_s: float
    ) -> "AnnouncingCore":
        """One that has spoken before, and whose facts are known."""
        core = cls(timing)
        core.said_s, core.interval_s, core.due_s, core._facts_due_s = said_s, interval_s, due_s, facts_due_s
        return core

    @property
    def left(self) -> bool:
        """Whether it says nothing any more."""
        return self._left

    @property
    def has_news(self) -> bool:
        """Whether there is something to say that has not been said."""
        return self._changed

    def handle(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Returns what follows; the time of the next look first, if it is another now."""
        if self._left:
            return ()
        match event:
            case Look():
                return self._look(event, now_s)
            case Changed(facts):
                self._facts_changed |= facts
            case Contradicted():
                self._facts_due_s = -math.inf
            case Accused():
                self._accused = True
            case Left():
                self._left = True
                return (Wake(math.inf),)
        self._changed = True
        return (Wake(max(now_s, self.said_s + self._gap_s())),)

    def _gap_s(self) -> float:
        """Between any two statements."""
        return min(self._timing.change_gap_s, self.due_s - self.said_s) if self.due_s < math.inf else 0.0

    def _look(self, look: Look, now_s: float) -> tuple[Effect, ...]:
        """What is sent in so many copies is counted as so many records, of so many peers."""
        peers, news_bits_per_s = math.ceil(look.peers * look.copies), look.news_bits_per_s * look.copies
        jitter = 1 + look.draw * self._timing.jitter
        if not self._changed and now_s < self.due_s - _EPSILON_S:
            return (Wake(self.due_s),)
        timing = self._timing
        interval_s = announcement_interval_s(peers, news_bits_per_s, self.interval_s, timing.interval_s)
        spacing_s = change_spacing_s(peers, interval_s, timing.interval_s)
        self._pace = self._pace.refilled(now_s, timing, spacing_s, change_burst(timing, news_bits_per_s))
        wait_s = self._pace.wait_s(timing, spacing_s)
        if (
            self.interval_s < math.inf
        ):  # what was said for a shorter interval must not lapse before it is said again
            wait_s = min(wait_s, self.said_s + 2 * self.interval_s - now_s)
        if self._accused:
            wait_s = min(wait_s, self.said_s + timing.refute_s / _REFUTED_TIMES - now_s)
        if wait_s > _EPSILON_S:
            return (Wake(now_s + wait_s),)
        self._pace, self.interval_s = self._pace.spend(), interval_s
        self._changed = self._accused = False
        self.said_s, self.due_s = now_s, now_s + interval_s * jitter
        facts = self._said_facts(peers, news_bits_per_s, jitter, now_s)
        return (Wake(self.due_s), Speak(state_ttl_s(interval_s, timing.jitter), facts))

    def _said_facts(
        self, peers: int, news_bits_per_s: float, jitter: float, now_s: float
    ) -> SaidFacts | None:
        """Facts that have changed keep a pace of their own: they are large, and states can do without the newest."""
        timing, spacing_s = self._timing, facts_spacing_s(peers)
        self._facts_pace = self._facts_pace.refilled(now_s, timing, spacing_s, facts_burst(news_bits_per_s))
        may_change = self._facts_changed and self._facts_pace.wait_s(timing, spacing_s) <= 0
        if now_s < self._facts_due_s and not may_change:
            return None
        every_s = facts_interval_s(peers, timing.facts_interval_s)
        self._facts_due_s = now_s + every_s * jitter
        self._facts_changed, self._facts_pace = False, self._facts_pace.spend()
        return SaidFacts(facts_ttl_s(every_s), announced_links(peers))


def farewell(state: PeerState) -> PeerState:
    """Returns what a peer says last; its sequence is yet to be filled in."""
    return replace(state, facts_sequence=0, ttl_s=0, spans=(), loading=())
