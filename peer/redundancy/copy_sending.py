"""Which tokens of which sessions are copied next, and how far copies lag behind. Pure: the time is an argument.

What is copied goes in portions, of as many sessions as have something new: those that lack least first, so that the
new tokens of all sessions travel in one message, and what is left of the portion is a prompt's. Of each partner so many
bytes may be on their way, or wait there, as it has not said to have kept. What a partner computes from goes where the
hop still has it, and keys and values where it does not, as long as these can be copied.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from molink.routing.routes.copy_forms import GATHERED_TOKENS, CopyForm

PORTION_BYTES = 256 * 1024
"""Of one message: to read it from a device, and to write it there, takes less than a decode step."""
WINDOW_BYTES = 2 * 1024 * 1024
"""On the way to a partner, or waiting there. Where one token takes more, one token may be."""
GATHER_S = 0.5
"""Fewer than GATHERED_TOKENS, which a partner computes in one step, and than fill a portion, wait so long for more, and
for those of other sessions: messages, with their acknowledgements and answers, cost a hop more than their bytes."""
MOST_OPENINGS = 4
"""How often a partner may begin a session's copy anew: what it asks for twice, its hop sends twice."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class CopyRange(Generic[Key]):
    """Tokens [start, stop) of one session, in one form."""

    key: Key
    start: int
    stop: int
    form: CopyForm = CopyForm.KEYS_AND_VALUES


@dataclass(frozen=True, slots=True)
class CopyPortion(Generic[Key]):
    """What goes to one partner in one message."""

    partner: str
    ranges: tuple[CopyRange[Key], ...]
    is_awaited: bool = False
    """Whether sessions wait for it to go on at the partner."""
    size_bytes: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Progress:
    """How far a session's copy has come."""

    partner: str
    token_bytes: Mapping[CopyForm, int]
    """Of each form in which it may go."""
    sent_tokens: int
    kept_tokens: int
    least_s: float = 0.0
    """When the tokens that wait may go, however few they are."""
    on_demand: bool = False
    """Whether it goes only once somebody waits for it."""
    sent: list[tuple[int, int]] = field(default_factory=list)
    """Of what is not kept: up to which token, and the bytes of each."""
    is_awaited: bool = False
    """Whether it goes before prefill: from when on nothing of it is on its way behind prefill, which it would
    overtake."""

    @property
    def unkept_bytes(self) -> int:
        total, at = 0, self.kept_tokens
        for stop, token_bytes in self.sent:
            total += max(0, stop - at) * token_bytes
            at = max(at, stop)
        return total

    def stretch(self, held_tokens: int, inputs_from: int | None) -> tuple[CopyForm, int] | None:
        """In which form it goes on, and up to which token in that form; None: in none."""
        computed = max(self.token_bytes)
        if computed is not CopyForm.KEYS_AND_VALUES and inputs_from is not None:
            if inputs_from <= self.sent_tokens:
                return computed, held_tokens
            held_tokens = min(held_tokens, inputs_from)
        if CopyForm.KEYS_AND_VALUES in self.token_bytes:
            return CopyForm.KEYS_AND_VALUES, held_tokens
        return None

    def send(self, tokens: int, token_bytes: int) -> None:
        """So many more are on their way."""
        self.sent_tokens += tokens
        self.least_s = 0.0
        if self.sent and self.sent[-1][1] == token_bytes:
            self.sent.pop()
        self.sent.append((self.sent_tokens, token_bytes))

    def take_back(self, start: int) -> None:
        """Nothing from that token on is on its way."""
        self.sent_tokens = start
        self.sent = [(min(stop, start), token_bytes) for stop, token_bytes in self.sent]

    def keep(self, tokens: int) -> None:
        """The partner has so many."""
        self.kept_tokens = tokens
        self.sent = [one for one in self.sent if one[0] > tokens]


@dataclass(slots=True)
class CopySending(Generic[Key]):
    """Owns the progress of every copy that a peer has made of its sessions."""

    always_awaited: bool = False
    """Whether copies are made beside sessions that always step, too."""
    _copies: dict[Key, _Progress] = field(default_factory=dict)
    _openings: dict[Key, int] = field(default_factory=dict)
    _hastened: set[Key] = field(default_factory=set)
    _full: set[str] = field(default_factory=set)
    """Partners to which a link has no room."""

    def __contains__(self, key: Key) -> bool:
        return key in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    def open(
        self,
        key: Key,
        partner: str,
        kept_tokens: int,
        token_bytes: Mapping[CopyForm, int],
        *,
        on_demand: bool = False,
    ) -> bool:
        """The partner has a copy of the session that covers so many tokens; it takes the forms of which a token's bytes
        are given, and that from which it computes where the hop has it. `on_demand`: nothing goes before somebody waits
        for it. False: it has begun too often."""
        self._openings[key] = self._openings.get(key, 0) + 1
        if self._openings[key] > MOST_OPENINGS:
            self._copies.pop(key, None)
            return False
        self._copies[key] = _Progress(partner, token_bytes, kept_tokens, kept_tokens, on_demand=on_demand)
        return True

    def kept_tokens(self, key: Key) -> int:
        """Of the session, so many tokens are known to be kept."""
        return self._copies[key].kept_tokens

    def record_kept(self, key: Key, tokens: int) -> bool:
        """The partner says how many tokens it has now. False: that cannot be."""
        copy = self._copies[key]
        if not copy.kept_tokens <= tokens <= copy.sent_tokens:
            return False
        copy.keep(tokens)
        return True

    def record_refused(self, portion: CopyPortion[Key]) -> None:
        """The link had no room for it: it goes later, after `record_room`."""
        self._full.add(portion.partner)
        for one in portion.ranges:
            copy = self._copies.get(one.key)
            if copy is not None and copy.partner == portion.partner and copy.sent_tokens == one.stop:
                copy.take_back(one.start)

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

    @property
    def is_awaited(self) -> bool:
        """Whether copies are made beside sessions that always step."""
        return self.is_hastened or (self.always_awaited and bool(self._copies))

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
        self, held: Mapping[Key, int], now_s: float, inputs_from: Mapping[Key, int] | None = None
    ) -> CopyPortion[Key] | float:
        """What goes next, which counts as sent from now on; or when to ask again even if nothing happens, infinite for
        never. `held` says how many tokens the hop has of each session, `inputs_from` from which one on it has also
        what a partner computes them from."""
        due_s, inputs_from = math.inf, inputs_from or {}
        for partner in self._partners():
            if partner in self._full:
                continue
            lacking = self._lacking(partner, held, inputs_from)
            if not lacking:
                continue
            wait_s = self._gathering_s(lacking, held, now_s)
            if wait_s > now_s:
                due_s = min(due_s, wait_s)
                continue
            ranges, size_bytes = self._ranges(partner, lacking)
            if ranges:
                return CopyPortion(partner, ranges, self._copies[ranges[0].key].is_awaited, size_bytes)
        return due_s

    def _partners(self) -> tuple[str, ...]:
        """In the order in which they were served last."""
        return tuple(dict.fromkeys(copy.partner for copy in self._copies.values()))

    def _lacking(
        self, partner: str, held: Mapping[Key, int], inputs_from: Mapping[Key, int]
    ) -> dict[Key, tuple[CopyForm, int]]:
        """Sessions whose copies there lack something that can go, those that lack least first; if some are awaited,
        these alone. Of each its form, and up to which token."""
        found = {}
        for key, copy in self._copies.items():
            if copy.partner == partner and held.get(key, 0) > copy.sent_tokens and self._may_go(key, copy):
                stretch = copy.stretch(held[key], inputs_from.get(key))
                if stretch is not None:
                    found[key] = stretch
        awaited = {key: stretch for key, stretch in found.items() if self._copies[key].is_awaited}
        chosen = awaited or found
        return {
            key: chosen[key]
            for key in sorted(chosen, key=lambda key: held[key] - self._copies[key].sent_tokens)
        }

    def _may_go(self, key: Key, copy: _Progress) -> bool:
        if key in self._hastened and not copy.is_awaited:
            copy.is_awaited = copy.sent_tokens == copy.kept_tokens
        return copy.is_awaited if key in self._hastened else not copy.on_demand

    def _gathering_s(
        self, lacking: Mapping[Key, tuple[CopyForm, int]], held: Mapping[Key, int], now_s: float
    ) -> float:
        """When these may go: at once if there are enough tokens of one, else once the first has waited."""
        least_s = math.inf
        for key, (form, _) in lacking.items():
            copy = self._copies[key]
            tokens = held[key] - copy.sent_tokens
            is_enough = tokens >= GATHERED_TOKENS or tokens * copy.token_bytes[form] >= PORTION_BYTES
            if is_enough or key in self._hastened:
                return now_s
            copy.least_s = copy.least_s or now_s + GATHER_S
            least_s = min(least_s, copy.least_s)
        return least_s

    def _ranges(
        self, partner: str, lacking: Mapping[Key, tuple[CopyForm, int]]
    ) -> tuple[tuple[CopyRange[Key], ...], int]:
        unkept_bytes = sum(copy.unkept_bytes for copy in self._copies.values() if copy.partner == partner)
        room_bytes = min(PORTION_BYTES, WINDOW_BYTES - unkept_bytes)
        ranges: list[CopyRange[Key]] = []
        size_bytes = 0
        for key, (form, stop) in lacking.items():
            copy = self._copies[key]
            token_bytes = max(1, copy.token_bytes[form])
            tokens = min(stop - copy.sent_tokens, room_bytes // token_bytes)
            if not unkept_bytes and not ranges:
                tokens = max(1, tokens)
            if tokens < 1:
                continue
            ranges.append(CopyRange(key, copy.sent_tokens, copy.sent_tokens + tokens, form))
            room_bytes -= tokens * token_bytes
            size_bytes += tokens * token_bytes
            copy.send(tokens, token_bytes)
            self._copies[key] = self._copies.pop(key)
        return tuple(ranges), size_bytes
