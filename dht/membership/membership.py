"""Membership: the directory as two threads share it, the network's writes, the application's reads."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from types import MappingProxyType

from molink.dht.identity.identity import public_key_of
from molink.dht.membership.directory import REFUTE_S, Accepted, Directory
from molink.dht.membership.entries import (
    farewell_since,
    lacks_facts,
    last_words,
    living_facts,
    living_records,
    sequence_of,
)
from molink.dht.membership.held import AgedRecord, Origin, PeerEntry
from molink.dht.records.announcement import Reason, is_facts, is_loss
from molink.dht.records.records import PeerFacts, PeerView
from molink.dht.records.state_codec import peer_tag


class Membership:
    """Membership: a directory with lock and clock; `on_change` is called in the thread that changes the view."""

    def __init__(
        self,
        own_peer_id: str | None,
        on_change: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        refute_s: float = REFUTE_S,
    ) -> None:
        self._directory = Directory(own_peer_id, refute_s=refute_s)
        self._lock = threading.Lock()
        self._clock = clock
        self._wall_clock = wall_clock
        self._settled = False
        self._on_change = on_change
        self._told = 0
        self.own = OwnRecords(self._directory, self._lock, clock, self._tell)

    @property
    def version(self) -> int:
        """Grows whenever a snapshot could have changed."""
        return self._directory.version

    @property
    def refusals(self) -> Counter[Reason]:
        with self._lock:
            return self._directory.refusals.copy()

    def settle(self) -> None:
        """Ends the bootstrap: from now on neighbours may tell of so many newcomers a minute only."""
        self._settled = True

    def receive(self, record: bytes, age_s: float = 0.0, *, source: str | None = None) -> Accepted | Reason:
        """Takes in a signed record of any kind, or says why not. `source`: the peer that handed it on."""
        with self._lock:
            if is_loss(record):
                return self._directory.accept_loss(record, self._clock())
            accept = self._directory.accept_facts if is_facts(record) else self._directory.accept_state
            origin = Origin(source, self._wall_clock(), self._settled)
            outcome = accept(record, self._clock(), age_s, origin)
        self._tell()
        return outcome

    def mark(self, peer_id: str, *, answers: bool) -> None:
        """Whether this process can reach the peer: if not, it is shown to people only, until it speaks again."""
        with self._lock:
            self._directory.entries.mark(peer_id, answers=answers)
        self._tell()

    def clock_ahead_s(self) -> float:
        """By how much this peer's words should be ahead of its clock so that others find them new."""
        with self._lock:
            return self._directory.clock.ahead_to_speak_s(self._clock(), self._wall_clock())

    def clock_behind_s(self) -> float:
        """By how much this machine's clock is behind other peers'; below 0: it is ahead."""
        with self._lock:
            return self._directory.clock.behind_s(self._clock(), self._wall_clock())

    def expire(self) -> tuple[tuple[bytes, Accepted], ...]:
        """Forgets what is over. Returns accusations that could not be judged when they came, and could now."""
        with self._lock:
            accepted = self._directory.retry_losses(self._clock())
            self._directory.expire(self._clock(), self._wall_clock())
        self._tell()
        return accepted

    def snapshot(
        self, model_hash: str | None = None, *, other_versions: bool = False, silent: bool = False
    ) -> tuple[PeerView, ...]:
        with self._lock:
            return self._directory.snapshot(
                self._clock(), model_hash, other_versions=other_versions, silent=silent
            )

    def table(
        self, tags: Collection[int] = (), held: Mapping[int, int] = MappingProxyType({})
    ) -> tuple[AgedRecord, ...]:
        """Records of living peers that are not suspected; with `tags`, only theirs, and others' last words. `held`:
        sequences of states by tag, of which whoever asks lacks only newer ones, and the goodbyes of who has left."""
        wanted = frozenset(tags)
        with self._lock:
            entries, now = self._directory.entries, self._clock()
            known = (entries.of_tag(tag) for tag in wanted)
            asked = [entry for entry in known if entry is not None] if wanted else None
            living = tuple(
                record
                for record in _shared(self._directory, now, asked)
                if record.peer_tag not in held
                or sequence_of(entries, record.peer_tag) > held[record.peer_tag]
            )
            if not wanted:
                goodbyes = (farewell_since(entries, tag, sequence, now) for tag, sequence in held.items())
                return (*(record for record in goodbyes if record is not None), *living)
            gone = wanted - {record.peer_tag for record in living}
            last = (last_words(entries, tag, now) for tag in sorted(gone))
            return (*living, *(record for record in last if record is not None))

    def digests(self) -> tuple[tuple[int, int], ...]:
        """Digests for anti-entropy: tag and sequence of the newest state of each living peer that is not suspected."""
        with self._lock:
            return tuple(
                (record.peer_tag, sequence_of(self._directory.entries, record.peer_tag))
                for record in _shared(self._directory, self._clock())
            )

    def sequence_of(self, tag: int) -> int:
        """Returns the sequence of the newest state that is or was known of the peer of that tag; -1: none."""
        with self._lock:
            return sequence_of(self._directory.entries, tag)

    def lacks_facts(self, tag: int) -> bool:
        """Whether the newest state of the peer of that tag, which lives, goes with facts that are not here."""
        with self._lock:
            return lacks_facts(self._directory.entries, tag, self._clock())

    def knows(self, peer_id: str) -> bool:
        """Whether that peer has announced itself, and is not forgotten."""
        return self.sequence_of(tag_of(peer_id)) >= 0

    def witnesses(self, tag: int) -> int:
        """Counts the witnesses that call the peer of that tag gone."""
        with self._lock:
            return self._directory.failure_detector.count_witnesses(tag)

    def undecided(self, for_s: float) -> tuple[str, ...]:
        """Returns the ids of the living peers that too few witnesses call gone, the first of them so long ago."""
        with self._lock:
            tags = self._directory.failure_detector.undecided(self._clock() - for_s)
            entries = (self._directory.entries.of_tag(tag) for tag in tags)
            return tuple(entry.peer_id for entry in entries if entry is not None and entry.state is not None)

    def living(self) -> tuple[PeerFacts, ...]:
        """The newest facts of every living peer."""
        with self._lock:
            return living_facts(self._directory.entries, self._clock())

    def facts_of(self, peer_id: str) -> PeerFacts | None:
        """The newest facts of a living peer, if it is known. Looks at that peer's entry alone."""
        with self._lock:
            entry = self._directory.entries.get(peer_id)
            return None if entry is None else entry.living_facts(self._clock())

    def peers(self) -> int:
        """Counts the living peers."""
        return len(self.living())

    def _tell(self) -> None:
        version = self._directory.version
        if version != self._told:
            self._told = version
            self._on_change()


def _shared(
    directory: Directory, now: float, asked: Collection[PeerEntry] | None = None
) -> tuple[AgedRecord, ...]:
    """What is handed on of all peers, or of those asked for: who copies the state of a suspected peer may never hear of
    the accusations."""
    suspected = directory.failure_detector.is_suspected
    entries = directory.entries if asked is None else sorted(asked, key=lambda entry: entry.heard)
    return tuple(record for record in living_records(entries, now) if not suspected(record.peer_tag))


class OwnRecords:
    """Own records of a peer: what it has said last, and what others tell of it. As safe in threads as Membership."""

    def __init__(
        self,
        directory: Directory,
        lock: threading.Lock,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._clock = clock
        self._changed = changed

    @property
    def held_sequence(self) -> int:
        """The highest sequence of this peer's own that others hold."""
        return self._directory.own.held

    @property
    def accused_sequence(self) -> int:
        """The highest sequence of this peer's own of which another said that this peer is gone."""
        return self._directory.own.accused

    @property
    def sequence_told_last(self) -> int | None:
        """The sequence of this peer's own that somebody told it last."""
        return self._directory.own.told_last

    def forget_told(self) -> None:
        """Has `sequence_told_last` be what somebody tells after this."""
        with self._lock:
            self._directory.own.told_last = None

    def hold(self, facts: bytes, state: bytes) -> None:
        """Takes in what this peer itself has just said."""
        with self._lock:
            self._directory.hold_own(facts, state, self._clock())
        self._changed()

    def records(self) -> tuple[bytes, ...]:
        """Returns the records that this peer has announced last, facts first; none if it is silent."""
        with self._lock:
            return self._directory.own_records()

    def forget_records(self) -> None:
        """Forgets this peer's own records: it leaves, and forwards itself no more."""
        with self._lock:
            self._directory.forget_own()
        self._changed()


@lru_cache(maxsize=4096)
def tag_of(peer_id: str) -> int:
    """The tag that the state of `peer_id` carries."""
    return peer_tag(public_key_of(peer_id))
