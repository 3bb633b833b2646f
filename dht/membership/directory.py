"""Directory of a swarm's peers: the records that are verified and alive, as one peer or client has them. Pure."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from molink.dht.identity.identity import peer_id_of, public_key_of
from molink.dht.membership.failure_detector import MAX_AHEAD_MS, FailureDetector
from molink.dht.membership.held import LOCAL, AgedRecord, Origin, PeerEntry, RecordReceipt, VerifiedRecord
from molink.dht.membership.neighbours import network_at
from molink.dht.membership.places import EvictionOrder, NewcomerBudget
from molink.dht.membership.swarm_clock import SwarmClock
from molink.dht.records.announcement import AnnouncementError, Reason, verify_facts, verify_loss, verify_state
from molink.dht.records.records import PROTOCOL_VERSION, PeerFacts, PeerState, PeerView
from molink.dht.records.state_codec import peer_tag

REMEMBER_GONE_S = 600.0
"""How long a gone peer is remembered by its last sequence, so that old records cannot bring it back; longer, if its
last state would still be good then."""
REFUTE_S = 60.0
"""Within which a peer that two others call gone must have said something newer."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Accepted record: it is true and new."""

    peer_id: str
    facts_wanted: bool = False
    """The state goes with facts that are not here: ask a neighbour for them."""
    newcomer: bool = False
    """These are the first facts of a peer."""


class Directory:
    """Directory of the peers that a router may use. Nothing unverified gets in, and nothing expired is shown."""

    def __init__(
        self, own_peer_id: str | None = None, *, capacity: int = 20_000, refute_s: float = REFUTE_S
    ) -> None:
        """`own_peer_id`: this peer, whose records are taken from itself only (`hold_own`).
        `capacity`: most peers remembered; see `places.py` for who goes first.
        `refute_s`: how long a peer has to refute its loss."""
        self._own_peer_id = own_peer_id
        self._entries: dict[str, PeerEntry] = {}  # in order of when they were heard
        self._eviction = EvictionOrder(capacity)
        self._budget = NewcomerBudget()
        self.clock = SwarmClock()
        self._keys: dict[int, bytes] = {}
        self._held: set[bytes] = set()
        self._failure_detector = FailureDetector(refute_s)
        if own_peer_id is not None:
            own_key = public_key_of(own_peer_id)
            self._keys[peer_tag(own_key)] = own_key
        self.refusals: Counter[Reason] = Counter()
        """Records refused since the start, by reason."""
        self.own_sequence = -1
        """The highest sequence of this peer's own that others hold: its next statement must go beyond it."""
        self.last_heard_own: int | None = None
        """The sequence of this peer's own that somebody told it last."""
        self.accused_sequence = -1
        """The highest sequence of this peer's own of which another said that this peer is gone: its next statement
        must go beyond it."""
        self.version = 0
        """Grows whenever a snapshot could have changed."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keys(self) -> dict[int, bytes]:
        """Public keys of known peers by tag. Not to be changed by callers."""
        return self._keys

    def accept_facts(
        self, record: bytes, now: float, age_s: float = 0.0, origin: Origin = LOCAL
    ) -> Accepted | Reason:
        """Takes in signed facts that are `age_s` seconds old, or says why not."""
        arrival = RecordReceipt(now, age_s, origin)
        return self._counted(lambda: self._accept_facts(record, arrival, own=False))

    def accept_state(
        self, record: bytes, now: float, age_s: float = 0.0, origin: Origin = LOCAL
    ) -> Accepted | Reason:
        """Takes in a signed state that is `age_s` seconds old, or says why not."""
        arrival = RecordReceipt(now, age_s, origin)
        return self._counted(lambda: self._accept_state(record, arrival, own=False))

    def accept_loss(self, record: bytes, now: float) -> Accepted | Reason:
        """Takes in that a witness calls a peer gone, or says why not. It is shown until that is believed."""
        return self._counted(lambda: self._accept_loss(record, now))

    def witnesses(self, tag: int) -> int:
        """Counts the witnesses that call the peer of that tag gone."""
        return self._failure_detector.count_witnesses(tag)

    def sequence_of(self, tag: int) -> int:
        """Returns the sequence of the newest state that is or was known of the peer of that tag; -1: none."""
        entry = self._entry_of(tag)
        return entry.sequence if entry is not None else -1

    def hold_own(self, facts: bytes, state: bytes, now: float) -> None:
        """Takes in what this peer itself has just said, to show it and to hand it on.

        Raises AnnouncementError if it is not newer than what this peer said before.
        """
        if facts not in self._held:
            self._accept_facts(facts, RecordReceipt(now), own=True)
        self._accept_state(state, RecordReceipt(now), own=True)

    def own_records(self) -> tuple[bytes, ...]:
        """The records that `hold_own` took in last, facts first."""
        entry = self._entries.get(self._own_peer_id) if self._own_peer_id else None
        held = (entry.newest_facts, entry.newest_state) if entry else ()
        return tuple(item.record for item in held if item is not None)

    def forget_own(self) -> None:
        """Drops what `hold_own` took in."""
        if self._own_peer_id in self._entries:
            self._drop(self._own_peer_id)

    def _counted(self, accept: Callable[[], Accepted]) -> Accepted | Reason:
        try:
            return accept()
        except AnnouncementError as error:
            self.refusals[error.reason] += 1
            return error.reason

    def _accept_facts(self, record: bytes, arrival: RecordReceipt, *, own: bool) -> Accepted:
        if record in self._held:
            raise _stale("these facts are known")
        facts = verify_facts(record)
        if facts.peer_id == self._own_peer_id and not own:
            raise self._heard_own(facts.sequence)
        age_s = self._age_s(facts, arrival)
        _require_alive(facts.ttl_s, age_s)
        entry = self._entries.get(facts.peer_id)
        if entry is not None and facts.sequence <= entry.newest_facts_sequence:
            raise _stale("newer facts are known")
        newcomer = entry is None
        entry = self._heard(facts, arrival)
        if facts.ttl_s == 0:
            return self._leave(entry, facts.sequence, record)
        self._hold(record, entry.newest_facts)
        entry.newest_facts = VerifiedRecord(facts, record, arrival.now - age_s, facts.ttl_s)
        self._pair(entry)
        return Accepted(facts.peer_id, newcomer=newcomer)

    def _accept_state(self, record: bytes, arrival: RecordReceipt, *, own: bool) -> Accepted:
        if record in self._held:
            raise self._heard_again(record)
        state = verify_state(record, self._keys)
        if state.peer_id == self._own_peer_id and not own:
            raise self._heard_own(state.sequence)
        entry = self._entries.get(state.peer_id)
        if entry is None:
            raise AnnouncementError(Reason.UNKNOWN_PEER, f"no facts are known of {state.peer_id}")
        if state.sequence <= entry.sequence:
            raise _stale("a newer state is known")
        age_s = self._age_s(state, arrival)
        _require_alive(state.ttl_s, age_s)
        now, tag = arrival.now, peer_tag(entry.public_key)
        self._entries[state.peer_id] = self._entries.pop(state.peer_id)
        entry.heard, entry.answers = now, True
        self._eviction.mark_alive(state.peer_id)
        if arrival.origin.source == state.peer_id:
            self._eviction.record_contact(state.peer_id)
            self.clock.record_sequence(tag, state.sequence, now, arrival.age_s)
        self._failure_detector.refute(tag, state.sequence)
        if state.ttl_s == 0:
            return self._leave(entry, state.sequence, record)
        self._hold(record, entry.newest_state)
        entry.newest_state = VerifiedRecord(state, record, now - age_s, state.ttl_s)
        entry.sequence, entry.last_words = state.sequence, record
        self._pair(entry)
        return Accepted(state.peer_id, facts_wanted=not entry.has_facts(state.facts_sequence, now))

    def _age_s(self, said: PeerFacts | PeerState, arrival: RecordReceipt) -> float:
        """How old it is: as claimed, or, if it was handed on by another, as old as its sequence says."""
        source, wall_s = arrival.origin.source, arrival.origin.wall_s
        if wall_s is None or source is None or self._is_first_hand(source, said.peer_id):
            return arrival.age_s
        return max(arrival.age_s, self.clock.least_age_s(said.sequence, arrival.now, wall_s))

    def _is_first_hand(self, source: str | None, peer_id: str) -> bool:
        """Whether the peer's words come from itself, or did before: then its own clock is known."""
        return peer_id in (source, self._own_peer_id) or self._eviction.was_contacted(peer_id)

    def _accept_loss(self, record: bytes, now: float) -> Accepted:
        loss = verify_loss(record, self._keys)
        if loss.witness_tag == loss.peer_tag:
            raise AnnouncementError(Reason.MALFORMED, "nobody is the witness of its own loss")
        witness, entry = self._entry_of(loss.witness_tag), self._entry_of(loss.peer_tag)
        if witness is None or witness.state is None or entry is None:
            raise AnnouncementError(Reason.UNKNOWN_PEER, "the witness or the lost peer is not known")
        if entry.newest_state is None or loss.sequence < entry.sequence:
            raise _stale("the peer has spoken or left since")
        since_ms = 1000 * max(0.0, now - entry.newest_state.received)
        if loss.sequence > entry.sequence + since_ms + MAX_AHEAD_MS:
            raise AnnouncementError(
                Reason.UNKNOWN_PEER, "the witness claims a state that nobody can have heard"
            )
        addresses = witness.newest_facts.value.addresses if witness.newest_facts is not None else ()
        network = network_at(addresses[0]) if addresses else ""
        if not self._failure_detector.record_suspicion(loss, now, network, len(self._entries)):
            raise _stale("the loss is known, or too many are told")
        if entry.peer_id == self._own_peer_id:
            self.accused_sequence = max(self.accused_sequence, loss.sequence)
        return Accepted(entry.peer_id)

    def mark(self, peer_id: str, *, answers: bool) -> None:
        """Whether this process can reach the peer: if not, it is shown to people only, until it speaks again."""
        entry = self._entries.get(peer_id)
        if entry is not None and entry.answers != answers:
            entry.answers = answers
            self.version += 1

    def snapshot(
        self, now: float, model_hash: str | None = None, *, other_versions: bool = False, silent: bool = False
    ) -> tuple[PeerView, ...]:
        """The peers whose facts and state are both alive, by peer id.

        `model_hash`: only those that serve this model. `other_versions`: also those of another protocol, `silent`: also
        those that do not answer, to be shown to people (`facts.protocol_version`, `answers` tell them apart) and never
        to be used.
        """
        views: list[PeerView] = []
        for peer_id in sorted(self._entries):
            entry = self._entries[peer_id]
            facts, state = entry.facts, entry.state
            if facts is None or state is None or not (facts.alive(now) and state.alive(now)):
                continue
            if facts.value.protocol_version != PROTOCOL_VERSION and not other_versions:
                continue
            if not (entry.answers or silent):
                continue
            if model_hash is None or facts.value.model.model_hash == model_hash:
                age_s = max(0.0, now - max(facts.received, state.received))
                views.append(PeerView(facts.value, state.value, age_s, facts.record, entry.answers))
        return tuple(views)

    def records(self, now: float) -> tuple[AgedRecord, ...]:
        """The newest records, with ages, of the peers that live and answer, most recently heard first, to hand on."""
        aged: list[AgedRecord] = []
        for entry in reversed(self._entries.values()):
            facts, state = entry.newest_facts, entry.newest_state
            if not entry.answers or facts is None or state is None:
                continue
            if facts.alive(now) and state.alive(now):
                ages = (max(0.0, now - facts.received), max(0.0, now - state.received))
                aged.append(AgedRecord(peer_tag(entry.public_key), facts.record, state.record, *ages))
        return tuple(aged)

    def last_words(self, tag: int, now: float) -> AgedRecord | None:
        """What a peer that is gone, or does not answer, said last: it may come back and must go beyond it."""
        entry = self._entry_of(tag)
        if entry is None or not entry.last_words:
            return None
        return AgedRecord(tag, b"", entry.last_words, 0.0, max(0.0, now - entry.heard))

    def facts(self, now: float) -> tuple[PeerFacts, ...]:
        """The newest living facts of every peer with a living state: whom to connect to."""
        return tuple(
            entry.newest_facts.value
            for entry in self._entries.values()
            if entry.newest_facts is not None
            and entry.newest_facts.alive(now)
            and entry.newest_state is not None
            and entry.newest_state.alive(now)
        )

    def expire(self, now: float, wall_s: float | None = None) -> None:
        """Forgets what is over: the dead, the lost and what turns out to be old at once, their sequence numbers
        later."""
        for tag in self._failure_detector.take_confirmed(now):
            lost = self._entry_of(tag)
            if lost is not None and lost.peer_id != self._own_peer_id:
                self._clear(lost)
        earliest_s = -math.inf if wall_s is None else self.clock.forgiving_s(now, wall_s)
        for peer_id, entry in list(self._entries.items()):
            if entry.state is not None and not entry.state.alive(now):
                entry.state = None
                self.version += 1
            newest = entry.newest_state
            if newest is not None and not newest.alive(now):
                self._clear(entry, keep_facts=True)
            elif newest is not None and earliest_s >= newest.value.sequence / 1000 + newest.ttl_s:
                self._clear_hearsay(entry)
            if entry.newest_facts is not None and not entry.newest_facts.alive(now):
                self._held.discard(entry.newest_facts.record)
                entry.newest_facts = entry.facts = None
                self.version += 1
            if entry.newest_state is None:
                self._eviction.mark_gone(peer_id)
                if now > max(entry.heard + REMEMBER_GONE_S, entry.last_alive):
                    self._drop(peer_id)

    def _entry_of(self, tag: int) -> PeerEntry | None:
        key = self._keys.get(tag)
        return self._entries.get(peer_id_of(key)) if key is not None else None

    def _heard(self, facts: PeerFacts, arrival: RecordReceipt) -> PeerEntry:
        tag, now = peer_tag(facts.public_key), arrival.now
        if self._keys.get(tag, facts.public_key) != facts.public_key:
            raise AnnouncementError(Reason.FORGED, f"{facts.peer_id} imitates the tag of another peer")
        entry = self._entries.pop(facts.peer_id, None)
        if entry is None:
            entry = PeerEntry(facts.public_key)
            if facts.peer_id != self._own_peer_id:
                self._make_room(facts.peer_id, arrival)
                self._eviction.add_peer(facts.peer_id)
        if facts.peer_id == arrival.origin.source:
            self._eviction.record_contact(facts.peer_id)
        self._keys[tag] = facts.public_key
        self._entries[facts.peer_id] = entry
        entry.heard = now
        return entry

    def _make_room(self, newcomer: str, arrival: RecordReceipt) -> None:
        """For a newcomer, who speaks itself or is told of by a neighbour that has not told of too many."""
        source = arrival.origin.source if arrival.origin.settled else None
        if source not in (None, newcomer) and not self._budget.spend(source, arrival.now, len(self._entries)):
            raise AnnouncementError(Reason.CROWDED, f"{source} tells of too many newcomers")
        if self._eviction.full:
            leaves = self._eviction.first_to_go()
            if leaves is None:
                raise AnnouncementError(Reason.CROWDED, "no more peers can be remembered")
            self._drop(leaves)

    def _heard_own(self, sequence: int) -> AnnouncementError:
        self.last_heard_own = sequence
        self.own_sequence = max(self.own_sequence, sequence)
        return _stale("this peer knows itself best")

    def _heard_again(self, record: bytes) -> AnnouncementError:
        own = self._entries.get(self._own_peer_id) if self._own_peer_id else None
        if own is not None and own.newest_state is not None and own.newest_state.record == record:
            self.last_heard_own = own.sequence
        return _stale("this state is known")

    def _drop(self, peer_id: str) -> None:
        entry = self._entries.pop(peer_id)
        self._eviction.remove_peer(peer_id)
        self._clear(entry)
        self._failure_detector.forget_peer(peer_tag(entry.public_key))
        if peer_id != self._own_peer_id:
            self._keys.pop(peer_tag(entry.public_key), None)

    def _leave(self, entry: PeerEntry, sequence: int, record: bytes) -> Accepted:
        if sequence <= entry.sequence:
            raise _stale("the peer has spoken since it left")
        entry.sequence = entry.left_sequence = sequence
        entry.last_words = record
        self._clear(entry)
        return Accepted(entry.peer_id)

    def _clear(self, entry: PeerEntry, *, keep_facts: bool = False) -> None:
        if entry.newest_state is not None:
            entry.last_alive = entry.newest_state.received + entry.newest_state.ttl_s
            self._held.discard(entry.newest_state.record)
        entry.newest_state = None
        if keep_facts:
            return
        if entry.newest_facts is not None:
            self._held.discard(entry.newest_facts.record)
        entry.newest_facts = entry.facts = entry.state = None
        self._eviction.mark_gone(entry.peer_id)
        self.version += 1

    def _clear_hearsay(self, entry: PeerEntry) -> None:
        """Its newest state turns out to be older than was said."""
        if not self._is_first_hand(None, entry.peer_id):
            self._clear(entry)

    def _hold(self, record: bytes, before: VerifiedRecord[object] | None) -> None:
        if before is not None:
            self._held.discard(before.record)
        self._held.add(record)

    def _pair(self, entry: PeerEntry) -> None:
        if entry.pair():
            self.version += 1


def _require_alive(ttl_s: int, age_s: float) -> None:
    """A leave (0) is true at any age."""
    if ttl_s > 0 and not 0.0 <= age_s < ttl_s:
        raise AnnouncementError(
            Reason.EXPIRED, f"the announcement is {age_s:g} s old, it was good for {ttl_s} s"
        )


def _stale(message: str) -> AnnouncementError:
    return AnnouncementError(Reason.STALE, message)
