"""Quarantine of peers that failed: they are left out of circuits for a while. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from molink.dht.records.records import PeerFacts, PeerView

SHUN_S = 2.0
"""For so long it is left out in any case."""
LEAVES_WITHIN_S = 40.0
"""A peer that drains has left all of a client's sessions by then, whatever became of their moves."""
MOST_LEFT = 256
"""Peers of which it is remembered that they have left."""


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """Quarantine of one peer, and why. Times are seconds of the caller's clock."""

    since_s: float
    shun_s: float
    """Until when it is left out in any case."""
    avoid_s: float
    """Until when it is left out if others can take its place."""
    sequence: int
    """Of its facts when it failed."""
    reason: str
    """What it said when it refused; empty if it failed without a word."""
    is_full: bool = False
    """Whether it only lacked room."""


@dataclass(slots=True)
class Quarantine:
    """Quarantine: peers to leave out of circuits after a failure, until new facts come or the time is over."""

    entries: dict[str, QuarantineEntry] = field(default_factory=dict)
    """By peer id."""
    left: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By peer id, the sequence of the facts under which it has left, and when; the latest last."""
    is_eligible: Callable[[PeerView], bool] = lambda _: True
    """Whether a peer may be on circuits at all; who may not is never taken back."""

    def quarantine_peer(
        self,
        facts: PeerFacts,
        now_s: float,
        seconds: float,
        reason: str = "",
        *,
        certain: bool = True,
        is_full: bool = False,
    ) -> None:
        """Puts a peer into quarantine for `seconds` from `now_s` on.

        If it is not `certain` that it failed, it is left out only where others can take its place. `is_full`: it only
        lacked room.
        """
        self.entries = {peer_id: entry for peer_id, entry in self.entries.items() if now_s < entry.avoid_s}
        shun_s = now_s + min(seconds, SHUN_S) if certain else now_s
        self.entries[facts.peer_id] = QuarantineEntry(
            now_s, shun_s, now_s + seconds, facts.sequence, reason, is_full
        )

    def excuse_leaving(self, facts: PeerFacts, now_s: float, seconds: float) -> bool:
        """Excuses a peer that leaves as it has said: it is left out for `seconds` where others can take its place.

        False, and nothing done, if it has left before and never been gone: who comes back announces new facts.
        """
        sequence, left_s = self.left.get(facts.peer_id, (-1, now_s))
        if facts.sequence > sequence:
            self.left.pop(facts.peer_id, None)
            self.left[facts.peer_id] = facts.sequence, now_s
        elif now_s >= left_s + LEAVES_WITHIN_S:
            return False
        for peer_id in tuple(self.left)[:-MOST_LEFT]:
            del self.left[peer_id]
        self.quarantine_peer(facts, now_s, seconds, certain=False)
        return True

    def release_peer(self, peer_id: str) -> None:
        """Releases a peer that did not fail after all."""
        self.entries.pop(peer_id, None)

    def since_s(self, peer_id: str) -> float:
        """Since when that peer is left out; 0 if it is not."""
        entry = self.entries.get(peer_id)
        return 0.0 if entry is None else entry.since_s

    def excluded_peers(
        self, peers: Sequence[PeerView], now_s: float
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Returns those of `peers` that are better left out at `now_s`, and those among them that must be."""
        avoided = {
            view.peer_id: entry
            for view in peers
            if (entry := self.entries.get(view.peer_id)) is not None
            and now_s < entry.avoid_s
            and view.facts.sequence <= entry.sequence
        }
        shunned = frozenset(peer_id for peer_id, entry in avoided.items() if now_s < entry.shun_s)
        barred = frozenset(view.peer_id for view in peers if not self.is_eligible(view))
        return frozenset(avoided) | barred, shunned | barred

    @property
    def full_peers(self) -> frozenset[str]:
        """Who refused since it had no room."""
        return frozenset(peer_id for peer_id, entry in self.entries.items() if entry.is_full)

    def release_full_peers(self) -> None:
        """Releases those that only lacked room: there is some."""
        for peer_id in self.full_peers:
            self.release_peer(peer_id)

    def last_refusal(self, among: frozenset[str]) -> tuple[str, str] | None:
        """Which of these peers refused last, and what it said."""
        said = {peer_id: one for peer_id, one in self.entries.items() if peer_id in among and one.reason}
        last = max(said, key=lambda peer_id: said[peer_id].since_s, default=None)
        return None if last is None else (last, said[last].reason)
