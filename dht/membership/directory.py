"""Directory of a swarm's peers: the records that are verified and alive, as one peer or client has them. Pure."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from molink.dht.identity.identity import public_key_of
from molink.dht.membership.entries import DirectoryEntries, living_views
from molink.dht.membership.failure_detector import MAX_AHEAD_MS, DeferredSuspicions, FailureDetector
from molink.dht.membership.held import LOCAL, Origin, PeerEntry, RecordReceipt, VerifiedRecord
from molink.dht.membership.neighbours import network_at
from molink.dht.membership.places import NewcomerBudget
from molink.dht.membership.swarm_clock import SwarmClock
from molink.dht.records.announcement import AnnouncementError, Reason, verify_facts, verify_loss, verify_state
from molink.dht.records.records import PeerFacts, PeerState, PeerView
from molink.dht.records.state_codec import peer_tag

REMEMBER_GONE_S = 600.0
"""How long a gone peer is remembered by its last sequence, so that old records cannot bring it back; longer, if its
last state would still be good then."""
REFUTE_S = 60.0
"""Within which a peer that two others call gone must have said something newer."""


@dataclass(slots=True)
class OwnSequences:
    """Sequences of this peer's own statements, as others have told them."""

    held: int = -1
    """The highest that others hold: its next statement must go beyond it."""
    told_last: int | None = None
    """The one that somebody told it last."""
    accused: int = -1
    """The highest of which another said that this peer is gone: its next statement must go beyond it."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Accepted record: it is true and new."""

    peer_id: str
    facts_wanted: bool = False
    """The state goes with facts that are not here: ask a neighbour for them."""
    newcomer: bool = False
    """These are the first facts of a peer."""
    gone: bool = False
    """The peer leaves, or is called gone."""
    returns: bool = False
    """The peer is shown from now on, or is not called gone any more."""

    @property
    def urgent(self) -> bool:
        """Whether it says who is there, and not how."""
        return self.newcomer or self.gone or self.returns


class Directory:
    """Directory of the peers that a router may use. Nothing unverified gets in, and nothing expired is shown."""

    def __init__(
        self,
        own_peer_id: str | None = None,
        *,
        capacity: int = 20_000,
        refute_s: float = REFUTE_S,
        budget: NewcomerBudget | None = None,
    ) -> None:
        """`own_peer_id`: this peer, whose records are taken from itself only (`hold_own`).
        `capacity`: most peers remembered; see `places.py` for who goes first.
        `refute_s`: how long a peer has to refute its loss. `budget`: of newcomers that neighbours tell of."""
        self._own_peer_id = own_peer_id
        self.entries = DirectoryEntries(
            public_key_of(own_peer_id) if own_peer_id is not None else None, capacity
        )
        self._budget = budget or NewcomerBudget()
        self.clock = SwarmClock()
        self.failure_detector = FailureDetector(refute_s)
        self._deferred = DeferredSuspicions()
        self.refusals: Counter[Reason] = Counter()
        """Records refused since the start, by reason."""
        self.own = OwnSequences()

    @property
    def version(self) -> int:
        """Grows whenever a snapshot could have changed."""
        return self.entries.version

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
        """Takes in that a witness calls a peer gone, or says why not. It is shown until that is believed. What cannot
        be judged yet is kept for `retry_losses`."""
        outcome = self._counted(lambda: self._accept_loss(record, now))
        if outcome is Reason.UNKNOWN_PEER:
            self._deferred.defer(record, now)
        return outcome

    def retry_losses(self, now: float) -> tuple[tuple[bytes, Accepted], ...]:
        """Takes in what could not be judged when it came, and can be now."""
        accepted: list[tuple[bytes, Accepted]] = []
        for record, until in self._deferred.take(now):
            try:
                accepted.append((record, self._accept_loss(record, now)))
            except AnnouncementError as error:  # it was counted when it came
                if error.reason is Reason.UNKNOWN_PEER:
                    self._deferred.put_back(record, until)
        return tuple(accepted)

    def hold_own(self, facts: bytes, state: bytes, now: float) -> None:
        """Takes in what this peer itself has just said, to show it and to hand it on.

        Raises AnnouncementError if it is not newer than what this peer said before.
        """
        if not self.entries.holds(facts):
            self._accept_facts(facts, RecordReceipt(now), own=True)
        self._accept_state(state, RecordReceipt(now), own=True)

    def own_records(self) -> tuple[bytes, ...]:
        """The records that `hold_own` took in last, facts first."""
        entry = self.entries.own
        held = (entry.newest_facts, entry.newest_state) if entry else ()
        return tuple(item.record for item in held if item is not None)

    def forget_own(self) -> None:
        """Drops what `hold_own` took in."""
        if (entry := self.entries.own) is not None:
            self._drop(entry)

    def snapshot(
        self, now: float, model_hash: str | None = None, *, other_versions: bool = False, silent: bool = False
    ) -> tuple[PeerView, ...]:
        """As `living_views`."""
        return living_views(self.entries, now, model_hash, other_versions=other_versions, silent=silent)

    def expire(self, now: float, wall_s: float | None = None) -> None:
        """Forgets what is over: the dead, the lost and what turns out to be old at once, their sequence numbers
        later."""
        for tag in self.failure_detector.take_confirmed(now):
            lost = self.entries.of_tag(tag)
            if lost is not None and lost.peer_id != self._own_peer_id:
                self.entries.clear(lost)
        earliest_s = -math.inf if wall_s is None else self.clock.forgiving_s(now, wall_s)
        for entry in self.entries:
            newest = entry.newest_state
            outlived = newest is not None and earliest_s >= newest.value.sequence / 1000 + newest.ttl_s
            self.entries.expire(entry, now)
            if (
                outlived
                and entry.newest_state is not None
                and not self.entries.is_first_hand(None, entry.peer_id)
            ):
                self.entries.clear(entry)  # hearsay, and older than was said
            if entry.newest_state is None and now > max(entry.heard + REMEMBER_GONE_S, entry.last_alive):
                self._drop(entry)

    def _counted(self, accept: Callable[[], Accepted]) -> Accepted | Reason:
        try:
            return accept()
        except AnnouncementError as error:
            self.refusals[error.reason] += 1
            return error.reason

    def _accept_facts(self, record: bytes, arrival: RecordReceipt, *, own: bool) -> Accepted:
        if self.entries.holds(record):
            raise _stale("these facts are known")
        facts = verify_facts(record)
        if facts.peer_id == self._own_peer_id and not own:
            raise self._told_own(facts.sequence)
        age_s = self._age_s(facts, arrival)
        _require_alive(facts.ttl_s, age_s)
        entry = self.entries.get(facts.peer_id)
        if entry is not None and facts.sequence <= entry.newest_facts_sequence:
            raise _stale("newer facts are known")
        newcomer = entry is None
        self.entries.require_own_tag(facts)
        if newcomer and not own:
            self._make_room(facts.peer_id, arrival)
        entry = self.entries.record_heard(facts, arrival.now)
        if facts.peer_id == arrival.origin.source:
            self.entries.eviction.record_contact(facts.peer_id)
        if facts.ttl_s == 0:
            return self._leave(entry, facts.sequence, record)
        received_s = arrival.now - age_s
        self.entries.hold_facts(entry, VerifiedRecord(facts, record, received_s, facts.ttl_s))
        return Accepted(facts.peer_id, newcomer=newcomer)

    def _accept_state(self, record: bytes, arrival: RecordReceipt, *, own: bool) -> Accepted:
        if self.entries.holds(record):
            entry = self.entries.own
            if entry is not None and entry.newest_state is not None and entry.newest_state.record == record:
                self.own.told_last = entry.sequence
            raise _stale("this state is known")
        state = verify_state(record, self.entries.keys)
        if state.peer_id == self._own_peer_id and not own:
            raise self._told_own(state.sequence)
        entry = self.entries.get(state.peer_id)
        if entry is None:
            raise AnnouncementError(Reason.UNKNOWN_PEER, f"no facts are known of {state.peer_id}")
        if state.sequence <= entry.sequence:
            raise _stale("a newer state is known")
        age_s = self._age_s(state, arrival)
        _require_alive(state.ttl_s, age_s)
        now, tag = arrival.now, peer_tag(entry.public_key)
        self.entries.record_spoken(entry, now)
        if arrival.origin.source == state.peer_id:
            self.entries.eviction.record_contact(state.peer_id)
            self.clock.record_sequence(tag, state.sequence, now, arrival.age_s)
        returns = entry.newest_state is None or self.failure_detector.count_witnesses(tag) > 0
        self.failure_detector.refute(tag, state.sequence)
        if state.ttl_s == 0:
            return self._leave(entry, state.sequence, record)
        self.entries.hold_state(entry, VerifiedRecord(state, record, now - age_s, state.ttl_s))
        wanted = not entry.has_facts(state.facts_sequence, now)
        return Accepted(state.peer_id, facts_wanted=wanted, returns=returns)

    def _age_s(self, said: PeerFacts | PeerState, arrival: RecordReceipt) -> float:
        """Returns how old it is, in seconds: as claimed, or, if it was handed on by another, as old as its sequence
        says."""
        source, wall_s = arrival.origin.source, arrival.origin.wall_s
        if wall_s is None or source is None or self.entries.is_first_hand(source, said.peer_id):
            return arrival.age_s
        return max(arrival.age_s, self.clock.least_age_s(said.sequence, arrival.now, wall_s))

    def _accept_loss(self, record: bytes, now: float) -> Accepted:
        loss = verify_loss(record, self.entries.keys)
        if loss.witness_tag == loss.peer_tag:
            raise AnnouncementError(Reason.MALFORMED, "nobody is the witness of its own loss")
        witness, entry = self.entries.of_tag(loss.witness_tag), self.entries.of_tag(loss.peer_tag)
        if witness is None or entry is None or not _may_witness(witness, now):
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
        if not self.failure_detector.record_suspicion(loss, now, network, len(self.entries)):
            raise _stale("the loss is known, or too many are told")
        if entry.peer_id == self._own_peer_id:
            self.own.accused = max(self.own.accused, loss.sequence)
        return Accepted(entry.peer_id, gone=True)

    def _make_room(self, newcomer: str, arrival: RecordReceipt) -> None:
        """For a newcomer, who speaks itself or is told of by a neighbour that has not told of too many."""
        source = arrival.origin.source if arrival.origin.settled else None
        if source not in (None, newcomer) and not self._budget.spend(source, arrival.now, len(self.entries)):
            raise AnnouncementError(Reason.CROWDED, f"{source} tells of too many newcomers")
        if self.entries.eviction.full:
            leaves = self.entries.get(self.entries.eviction.first_to_go() or "")
            if leaves is None:
                raise AnnouncementError(Reason.CROWDED, "no more peers can be remembered")
            self._drop(leaves)

    def _told_own(self, sequence: int) -> AnnouncementError:
        self.own.told_last = sequence
        self.own.held = max(self.own.held, sequence)
        return _stale("this peer knows itself best")

    def _drop(self, entry: PeerEntry) -> None:
        self.entries.drop_entry(entry)
        self.failure_detector.forget_peer(peer_tag(entry.public_key))

    def _leave(self, entry: PeerEntry, sequence: int, record: bytes) -> Accepted:
        if sequence <= entry.sequence:
            raise _stale("the peer has spoken since it left")
        entry.sequence = entry.left_sequence = sequence
        entry.last_words = record
        self.entries.clear(entry)
        return Accepted(entry.peer_id, gone=True)


def _may_witness(witness: PeerEntry, now: float) -> bool:
    """Who is shown, or was until lately: what it says of others may come later than that it leaves."""
    return witness.state is not None or (witness.sequence >= 0 and now < witness.heard + REFUTE_S)


def _require_alive(ttl_s: int, age_s: float) -> None:
    """A leave (0) is true at any age."""
    if ttl_s > 0 and not 0.0 <= age_s < ttl_s:
        raise AnnouncementError(
            Reason.EXPIRED, f"the announcement is {age_s:g} s old, it was good for {ttl_s} s"
        )


def _stale(message: str) -> AnnouncementError:
    return AnnouncementError(Reason.STALE, message)
