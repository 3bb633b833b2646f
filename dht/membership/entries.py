"""Directory entries of a swarm's peers: what is remembered of each, and what of it may be shown. Pure."""

from collections.abc import Iterable, Iterator

from molink.dht.identity.identity import peer_id_of
from molink.dht.membership.held import AgedRecord, PeerEntry, VerifiedRecord
from molink.dht.membership.places import EvictionOrder
from molink.dht.records.announcement import AnnouncementError, Reason
from molink.dht.records.records import PROTOCOL_VERSION, PeerFacts, PeerState, PeerView
from molink.dht.records.state_codec import peer_tag


class DirectoryEntries:
    """Directory entries, in order of when their peers were heard. What goes in has been verified."""

    def __init__(self, own_key: bytes | None, capacity: int) -> None:
        """`own_key`: public key of this peer, which is never evicted. `capacity`: most peers remembered."""
        self._own_peer_id = peer_id_of(own_key) if own_key is not None else None
        self._by_id: dict[str, PeerEntry] = {}
        self._held: set[bytes] = set()
        self.keys: dict[int, bytes] = {} if own_key is None else {peer_tag(own_key): own_key}
        """Public keys of known peers by tag. Not to be changed by callers."""
        self.eviction = EvictionOrder(capacity)
        self.version = 0
        """Grows whenever a snapshot could have changed."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[PeerEntry]:
        return iter(tuple(self._by_id.values()))

    @property
    def own(self) -> PeerEntry | None:
        """This peer's own."""
        return self._by_id.get(self._own_peer_id) if self._own_peer_id is not None else None

    def get(self, peer_id: str) -> PeerEntry | None:
        return self._by_id.get(peer_id)

    def of_tag(self, tag: int) -> PeerEntry | None:
        """The entry of the peer whose state carries that tag."""
        key = self.keys.get(tag)
        return self._by_id.get(peer_id_of(key)) if key is not None else None

    def holds(self, record: bytes) -> bool:
        """Whether that very record is one of the newest."""
        return record in self._held

    def is_first_hand(self, source: str | None, peer_id: str) -> bool:
        """Whether the peer's words come from itself, or did before: then its own clock is known."""
        return peer_id in (source, self._own_peer_id) or self.eviction.was_contacted(peer_id)

    def require_own_tag(self, facts: PeerFacts) -> None:
        """Raises AnnouncementError if another peer has the tag that such facts would have."""
        if self.keys.get(peer_tag(facts.public_key), facts.public_key) != facts.public_key:
            raise AnnouncementError(Reason.FORGED, f"{facts.peer_id} imitates the tag of another peer")

    def record_heard(self, facts: PeerFacts, now: float) -> PeerEntry:
        """Moves the peer's entry to the end, and adds it where it is a newcomer's."""
        entry = self._by_id.pop(facts.peer_id, None)
        if entry is None:
            entry = PeerEntry(facts.peer_id, facts.public_key)
            if facts.peer_id != self._own_peer_id:
                self.eviction.add_peer(facts.peer_id)
        self.keys[peer_tag(facts.public_key)] = facts.public_key
        self._by_id[facts.peer_id] = entry
        entry.heard = now
        return entry

    def record_spoken(self, entry: PeerEntry, now: float) -> None:
        """Moves the entry of a peer that has spoken to the end."""
        self._by_id[entry.peer_id] = self._by_id.pop(entry.peer_id)
        entry.heard, entry.answers = now, True
        self.eviction.mark_alive(entry.peer_id)

    def hold_facts(self, entry: PeerEntry, facts: VerifiedRecord[PeerFacts]) -> None:
        """Takes in newer facts."""
        self._replace(entry.newest_facts, facts.record)
        entry.newest_facts = facts
        self._pair(entry)

    def hold_state(self, entry: PeerEntry, state: VerifiedRecord[PeerState]) -> None:
        """Takes in a newer state."""
        self._replace(entry.newest_state, state.record)
        entry.newest_state = state
        entry.sequence, entry.last_words = state.value.sequence, state.record
        self._pair(entry)

    def mark(self, peer_id: str, *, answers: bool) -> None:
        """Notes whether this process can reach the peer: if not, it is shown to people only, until it speaks again."""
        entry = self._by_id.get(peer_id)
        if entry is not None and entry.answers != answers:
            entry.answers = answers
            self.version += 1

    def clear(self, entry: PeerEntry, *, keep_facts: bool = False) -> None:
        """Drops what the peer has said, but for its sequence and its last words."""
        if entry.newest_state is not None:
            entry.last_alive = entry.newest_state.received + entry.newest_state.ttl_s
            self._held.discard(entry.newest_state.record)
        entry.newest_state = None
        if keep_facts:
            return
        entry.state = None
        self._drop_facts(entry)
        self.eviction.mark_gone(entry.peer_id)

    def expire(self, entry: PeerEntry, now: float) -> None:
        """Drops of what the peer has said that which is over."""
        if entry.state is not None and not entry.state.alive(now):
            entry.state = None
            self.version += 1
        if entry.newest_state is not None and not entry.newest_state.alive(now):
            self.clear(entry, keep_facts=True)
        if entry.newest_facts is not None and not entry.newest_facts.alive(now):
            self._drop_facts(entry)
        if entry.newest_state is None:
            self.eviction.mark_gone(entry.peer_id)

    def drop_entry(self, entry: PeerEntry) -> None:
        """Removes the entry."""
        del self._by_id[entry.peer_id]
        self.eviction.remove_peer(entry.peer_id)
        self.clear(entry)
        if entry.peer_id != self._own_peer_id:
            self.keys.pop(peer_tag(entry.public_key), None)

    def _drop_facts(self, entry: PeerEntry) -> None:
        if entry.newest_facts is not None:
            self._held.discard(entry.newest_facts.record)
        entry.newest_facts = entry.facts = None
        self.version += 1

    def _replace(self, before: VerifiedRecord[object] | None, record: bytes) -> None:
        if before is not None:
            self._held.discard(before.record)
        self._held.add(record)

    def _pair(self, entry: PeerEntry) -> None:
        if entry.pair():
            self.version += 1


def living_views(
    entries: DirectoryEntries,
    now: float,
    model_hash: str | None = None,
    *,
    other_versions: bool = False,
    silent: bool = False,
) -> tuple[PeerView, ...]:
    """The peers whose facts and state are both alive, by peer id.

    `model_hash`: only those that serve this model. `other_versions`: also those of another protocol, `silent`: also
    those that do not answer, to be shown to people (`facts.protocol_version`, `answers` tell them apart) and never
    to be used.
    """
    views: list[PeerView] = []
    for entry in sorted(entries, key=lambda one: one.peer_id):
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


def living_records(entries: Iterable[PeerEntry], now: float) -> tuple[AgedRecord, ...]:
    """The newest records, with ages, of the peers that live and answer, to hand on: those that can be dialled first, as
    they can be asked for the others, then most recently heard ones. `entries` in order of when they were heard."""
    aged: list[AgedRecord] = []
    recent_first = list(entries)[::-1]
    for entry in sorted(recent_first, key=_is_dialable, reverse=True):
        facts, state = entry.newest_facts, entry.newest_state
        if not entry.answers or facts is None or state is None:
            continue
        if facts.alive(now) and state.alive(now):
            ages = (max(0.0, now - facts.received), max(0.0, now - state.received))
            aged.append(AgedRecord(peer_tag(entry.public_key), facts.record, state.record, *ages))
    return tuple(aged)


def _is_dialable(entry: PeerEntry) -> bool:
    return entry.newest_facts is not None and bool(entry.newest_facts.value.addresses)


def last_words(entries: DirectoryEntries, tag: int, now: float) -> AgedRecord | None:
    """Returns what a peer that is gone, or does not answer, said last: it may come back and must go beyond it."""
    entry = entries.of_tag(tag)
    if entry is None or not entry.last_words:
        return None
    return AgedRecord(tag, b"", entry.last_words, 0.0, max(0.0, now - entry.heard))


def farewell_since(entries: DirectoryEntries, tag: int, sequence: int, now: float) -> AgedRecord | None:
    """Returns the goodbye of a peer that has left after it said the state of that sequence; None: it has said none."""
    entry = entries.of_tag(tag)
    if entry is None or entry.sequence <= sequence or entry.left_sequence != entry.sequence:
        return None
    return last_words(entries, tag, now)


def sequence_of(entries: DirectoryEntries, tag: int) -> int:
    """The sequence of the newest state that is or was known of a peer; -1: none."""
    entry = entries.of_tag(tag)
    return entry.sequence if entry is not None else -1


def lacks_facts(entries: DirectoryEntries, tag: int, now: float) -> bool:
    """Whether the newest state of a peer, which lives, goes with facts that are not here."""
    entry = entries.of_tag(tag)
    if entry is None or entry.newest_state is None or not entry.newest_state.alive(now):
        return False
    return not entry.has_facts(entry.newest_state.value.facts_sequence, now)


def living_facts(entries: DirectoryEntries, now: float) -> tuple[PeerFacts, ...]:
    """The newest living facts of every peer with a living state: whom to connect to."""
    found = (entry.living_facts(now) for entry in entries)
    return tuple(facts for facts in found if facts is not None)
