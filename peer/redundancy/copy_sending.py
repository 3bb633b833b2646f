"""Which tokens of which sessions are copied next, and how far copies lag behind. Pure: the time is an argument.

What is copied goes in portions, of as many sessions as have something new: those that lack least first, so that the
new tokens of all sessions travel in one message, and what is left of the portion is a prompt's. Of each partner so many
bytes may be on their way, or wait there, as it has not said to have kept.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PORTION_BYTES = 256 * 1024
"""Of one message: to read it from a device, and to write it there, takes less than a decode step."""
WINDOW_BYTES = 2 * 1024 * 1024
"""On the way to a partner, or waiting there. Where one token takes more, one token may be."""
GATHER_S = 0.02
"""Fewer tokens than a block wait so long for those of other sessions."""
GATHERED_TOKENS = 16
MOST_OPENINGS = 4
"""How often a partner may begin a session's copy anew: what it asks for twice, its hop sends twice."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class CopyRange(Generic[Key]):
    """Tokens [start, stop) of one session."""

    key: Key
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class CopyPortion(Generic[Key]):
    """What goes to one partner in one message."""

    partner: str
    ranges: tuple[CopyRange[Key], ...]
    is_awaited: bool = False
    """Whether sessions wait for it to go on at the partner."""


@dataclass(slots=True)
class _Progress:
    """How far a session's copy has come."""

    partner: str
    token_bytes: int
    whole: bool
    """Whether it only goes as a whole: each token changes states that the layers keep."""
    sent_tokens: int
    kept_tokens: int
    least_s: float = 0.0
    """When the tokens that wait may go, however few they are."""
    is_awaited: bool = False
    """Whether it goes before prefill: from when on nothing of it is on its way behind prefill, which it would
    overtake."""

    @property
    def unkept_bytes(self) -> int:
        return (self.sent_tokens - self.kept_tokens) * self.token_bytes


@dataclass(slots=True)
class CopySending(Generic[Key]):
    """Owns the progress of every copy that a peer has made of its sessions."""

    _copies: dict[Key, _Progress] = field(default_factory=dict)
    _openings: dict[Key, int] = field(default_factory=dict)
    _hastened: set[Key] = field(default_factory=set)
    _full: set[str] = field(default_factory=set)
    """Partners to which a link has no room."""

    def __contains__(self, key: Key) -> bool:
        return key in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    def open(self, key: Key, partner: str, kept_tokens: int, token_bytes: int, *, whole: bool) -> bool:
        """The partner has a copy of the session that covers so many tokens. False: it has begun too often."""
        self._openings[key] = self._openings.get(key, 0) + 1
        if self._openings[key] > MOST_OPENINGS:
            self._copies.pop(key, None)
            return False
        self._copies[key] = _Progress(partner, max(1, token_bytes), whole, kept_tokens, kept_tokens)
        return True

    def partner_of(self, key: Key) -> str | None:
        """Who keeps the session's copy; None: nobody."""
        copy = self._copies.get(key)
        return None if copy is None else copy.partner

    def kept_tokens(self, key: Key) -> int:
        """Of the session, so many tokens are known to be kept."""
        return self._copies[key].kept_tokens

    def record_kept(self, key: Key, tokens: int) -> bool:
        """The partner says how many tokens it has now. False: that cannot be."""
        copy = self._copies[key]
        if not copy.kept_tokens <= tokens <= copy.sent_tokens:
            return False
        copy.kept_tokens = tokens
        return True

    def record_refused(self, portion: CopyPortion[Key]) -> None:
        """The link had no room for it: it goes later, after `record_room`."""
        self._full.add(portion.partner)
        for one in portion.ranges:
            copy = self._copies.get(one.key)
            if copy is not None and copy.partner == portion.partner and copy.sent_tokens == one.stop:
                copy.sent_tokens = one.start

    def record_room(self, partner: str) -> None:
        """There may be room on the link to that partner again."""
        self._full.discard(partner)

    def hasten(self, key: Key) -> None:
        """The session is about to go on at its partner: none of its tokens waits for others from now on."""
        self._hastened.add(key)

    @property
    def is_hastened(self) -> bool:
        """Whether somebody waits for one of the copies."""
        return any(key in self._copies for key in self._hastened)

    def stop(self, key: Key) -> None:
        """No more of the session is copied, unless a partner begins anew."""
        self._copies.pop(key, None)

    def end(self, key: Key) -> None:
        """The session has ended here."""
        self._copies.pop(key, None)
        self._openings.pop(key, None)
        self._hastened.discard(key)

    def end_partner(self, partner: str) -> tuple[Key, ...]:
        """The partner is gone; returns the sessions whose copies it kept."""
        self._full.discard(partner)
        gone = tuple(key for key, copy in self._copies.items() if copy.partner == partner)
        for key in gone:
            self.stop(key)
        return gone

    def next_portion(
        self, held: Mapping[Key, int], now_s: float, most_tokens: Mapping[Key, int] | None = None
    ) -> CopyPortion[Key] | float:
        """What goes next, which counts as sent from now on; or when to ask again even if nothing happens, infinite for
        never. `held` says how many tokens the hop has of each session, `most_tokens` how many a session's part may
        have."""
        due_s = math.inf
        for partner in self._partners():
            if partner in self._full:
                continue
            lacking = self._lacking(partner, held)
            if not lacking:
                continue
            wait_s = self._gathering_s(lacking, held, now_s)
            if wait_s > now_s:
                due_s = min(due_s, wait_s)
                continue
            ranges = self._ranges(partner, lacking, held, most_tokens or {})
            if ranges:
                return CopyPortion(partner, ranges, self._copies[ranges[0].key].is_awaited)
        return due_s

    def _partners(self) -> tuple[str, ...]:
        """In the order in which they were served last."""
        return tuple(dict.fromkeys(copy.partner for copy in self._copies.values()))

    def _lacking(self, partner: str, held: Mapping[Key, int]) -> list[Key]:
        """Sessions whose copies there lack something, those that lack least first; if some are awaited, these alone."""
        lacks = {
            key: held[key] - copy.sent_tokens
            for key, copy in self._copies.items()
            if copy.partner == partner and held.get(key, 0) > copy.sent_tokens and self._may_go(key, copy)
        }
        awaited = [key for key in lacks if self._copies[key].is_awaited]
        return sorted(awaited or lacks, key=lambda key: lacks[key])

    def _may_go(self, key: Key, copy: _Progress) -> bool:
        if key in self._hastened and not copy.is_awaited:
            copy.is_awaited = copy.sent_tokens == copy.kept_tokens
            return copy.is_awaited
        return True

    def _gathering_s(self, lacking: list[Key], held: Mapping[Key, int], now_s: float) -> float:
        """When these may go: at once if there are enough tokens of one, else once the first has waited."""
        least_s = math.inf
        for key in lacking:
            copy = self._copies[key]
            if held[key] - copy.sent_tokens >= GATHERED_TOKENS or key in self._hastened:
                return now_s
            copy.least_s = copy.least_s or now_s + GATHER_S
            least_s = min(least_s, copy.least_s)
        return least_s

    def _ranges(
        self, partner: str, lacking: list[Key], held: Mapping[Key, int], most_tokens: Mapping[Key, int]
    ) -> tuple[CopyRange[Key], ...]:
        unkept_bytes = sum(copy.unkept_bytes for copy in self._copies.values() if copy.partner == partner)
        room_bytes = min(PORTION_BYTES, WINDOW_BYTES - unkept_bytes)
        ranges: list[CopyRange[Key]] = []
        for key in lacking:
            copy = self._copies[key]
            left = held[key] - copy.sent_tokens
            tokens = min(left, room_bytes // copy.token_bytes, most_tokens.get(key, left))
            if copy.whole or (not unkept_bytes and not ranges):
                tokens = left if copy.whole else max(1, tokens)
                if copy.whole and (unkept_bytes or ranges):
                    continue
            if tokens < 1:
                continue
            ranges.append(CopyRange(key, copy.sent_tokens, copy.sent_tokens + tokens))
            room_bytes -= tokens * copy.token_bytes
            copy.sent_tokens += tokens
            copy.least_s = 0.0
            self._copies[key] = self._copies.pop(key)
        return tuple(ranges)
