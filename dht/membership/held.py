"""Directory entries: the verified records of one peer, and how they came."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from molink.dht.records.records import PeerFacts, PeerState

Value_co = TypeVar("Value_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a record."""

    source: str | None = None
    """The peer that handed it on; None: this process."""
    wall_s: float | None = None
    """This machine's clock then, in seconds since 1970; None: ages are believed."""
    settled: bool = False
    """Whether the receiver has copied the swarm's table before."""


LOCAL = Origin()


@dataclass(frozen=True, slots=True)
class RecordReceipt:
    """Receipt of a record: when it came, how old whoever forwarded it says that it is, and from where."""

    now: float
    age_s: float = 0.0
    origin: Origin = LOCAL


@dataclass(frozen=True, slots=True)
class AgedRecord:
    """One peer's signed records with their ages, to hand on."""

    peer_tag: int
    facts: bytes
    state: bytes
    facts_age_s: float
    state_age_s: float


@dataclass(frozen=True, slots=True)
class VerifiedRecord(Generic[Value_co]):
    """Verified value, with the record that it came from."""

    value: Value_co
    record: bytes
    received: float
    """When its author sent it, by this machine's monotonic clock."""
    ttl_s: int

    def alive(self, now: float) -> bool:
        return now < self.received + self.ttl_s


@dataclass(slots=True)
class PeerEntry:
    """Directory entry of one peer. Facts and state in use change together, so that a restart is never half seen."""

    peer_id: str
    public_key: bytes
    newest_facts: VerifiedRecord[PeerFacts] | None = None
    newest_state: VerifiedRecord[PeerState] | None = None
    facts: VerifiedRecord[PeerFacts] | None = None
    """With `state`: the pair in use."""
    state: VerifiedRecord[PeerState] | None = None
    sequence: int = -1
    """Of its newest state or leave, kept after these are forgotten."""
    left_sequence: int = -1
    last_words: bytes = b""
    """The record of that newest state or leave, to be told to its author if it comes back and has lost count."""
    answers: bool = True
    """Whether this process can still reach it, as far as it has tried since the peer last spoke."""
    heard: float = 0.0
    last_alive: float = 0.0
    """Until when its last state was good: a copy of that may be somewhere, and must not bring it back."""

    @property
    def newest_facts_sequence(self) -> int:
        """Facts must be newer than this to count; facts that were forgotten may be learned again."""
        return max(self.left_sequence, self.newest_facts.value.sequence if self.newest_facts else -1)

    def has_facts(self, sequence: int, now: float) -> bool:
        """Whether the facts of that sequence, or newer ones, are here and alive."""
        facts = self.newest_facts
        return facts is not None and facts.alive(now) and facts.value.sequence >= sequence

    def living_facts(self, now: float) -> PeerFacts | None:
        """The newest facts, while they and the newest state are alive."""
        facts, state = self.newest_facts, self.newest_state
        if facts is None or state is None or not (facts.alive(now) and state.alive(now)):
            return None
        return facts.value

    def pair(self) -> bool:
        """Takes the newest state into use if facts that go with it are here. Returns whether it did."""
        state = self.newest_state
        if state is None:
            return False
        for facts in (self.newest_facts, self.facts):
            if facts is not None and facts.value.sequence == state.value.facts_sequence:
                if not all(span.stop <= facts.value.model.layers for span in state.value.spans):
                    return False
                self.facts, self.state = facts, state
                return True
        return False
