"""Which instance decodes which sequence, where several hold its keys and values. Pure.

Section 4.1.3 of the redundancy paper (AcceLLM): instances that decode have about equally many sequences, and about
equally many tokens in them. A sequence can go only to an instance that holds all of its keys and values, so nothing
is copied for it; but whoever changes loses a little time, so no more of them change than balance needs.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from types import MappingProxyType

UNEVEN_PART = 0.1
"""Of an even share of tokens: what totals may differ by before sequences are exchanged for it."""


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A sequence that decodes."""

    number: int
    tokens: int
    """With keys and values, up to now."""
    room_tokens: int
    """What it may grow to: what an instance that holds it sets aside."""
    home: int
    """The instance that decodes it now."""
    holders: tuple[int, ...]
    """Instances with all of its keys and values; `home` is one of them."""

    def __post_init__(self) -> None:
        if self.home not in self.holders or not 0 <= self.tokens <= self.room_tokens:
            raise ValueError(f"a sequence is at home where it is held, in the room set aside for it: {self}")


def balanced(sequences: Sequence[HeldSequence], decoding: Collection[int]) -> Mapping[int, int]:
    """The instance that decodes each sequence from now on, by the sequence's number.

    `decoding` are the instances that decode. A sequence that none of them holds stays where it is, and waits.
    """
    shares = _Shares(sequences, sorted(decoding))
    shares.even_counts()
    shares.even_tokens()
    return MappingProxyType({number: one.home for number, one in shares.placed.items()})


def is_balanced(loads: Sequence[tuple[int, int]]) -> bool:
    """Whether nothing would change between instances that all decode, by the sequences of each and the tokens in them:
    what `balanced` would find, without a look at each sequence."""
    counts, tokens = zip(*loads, strict=True)
    return max(counts) - min(counts) < 2 and not _is_uneven(max(tokens), min(tokens))


def _is_uneven(most: int, least: int) -> bool:
    return most - least > UNEVEN_PART * (most + least) / 2


@dataclass(frozen=True, slots=True)
class _Placed:
    tokens: int
    holders: tuple[int, ...]
    home: int


class _Shares:
    """Who decodes what while it is worked out."""

    def __init__(self, sequences: Sequence[HeldSequence], decoding: Sequence[int]) -> None:
        self.placed: dict[int, _Placed] = {}
        self._decoding = decoding
        self._numbers: dict[int, dict[int, None]] = {instance: {} for instance in decoding}
        self._tokens = dict.fromkeys(decoding, 0)
        homeless = []
        for one in sequences:
            if one.home in self._tokens:
                self._put(one.number, _Placed(one.tokens, one.holders, one.home))
            else:
                homeless.append(one)
        for one in homeless:
            there = [holder for holder in one.holders if holder in self._tokens]
            home = min(there, key=self._load, default=one.home)
            self._put(one.number, _Placed(one.tokens, one.holders, home))

    def even_counts(self) -> None:
        """While an instance has two sequences more than another that holds one of them, that one goes there."""
        while any(self._gave(giver, taker) for giver, taker in permutations(self._decoding, 2)):
            pass

    def even_tokens(self) -> None:
        """Exchanges sequences, one for one, as long as that makes totals more equal."""
        for giver, taker in permutations(self._decoding, 2):
            for _ in range(len(self._numbers[giver])):
                if not self._exchanged(giver, taker):
                    break

    def _gave(self, giver: int, taker: int) -> bool:
        if len(self._numbers[giver]) - len(self._numbers[taker]) < 2:
            return False
        half = (self._tokens[giver] - self._tokens[taker]) / 2
        movable = self._movable(giver, taker)
        best = min(movable, key=lambda at: (abs(self.placed[at].tokens - half), at), default=None)
        if best is None:
            return False
        self._move(best, giver, taker)
        return True

    def _exchanged(self, giver: int, taker: int) -> bool:
        excess = self._tokens[giver] - self._tokens[taker]
        if not _is_uneven(self._tokens[giver], self._tokens[taker]):
            return False
        back = sorted((self.placed[at].tokens, at) for at in self._movable(taker, giver))
        best: tuple[float, int, int] | None = None
        for at in self._movable(giver, taker):
            wanted = self.placed[at].tokens - excess / 2
            place = bisect_left(back, (wanted, -1))
            for tokens, other in back[max(0, place - 1) : place + 1]:
                left = abs(excess - 2 * (self.placed[at].tokens - tokens))
                best = min(best or (float("inf"), 0, 0), (left, at, other))
        if best is None or best[0] >= excess:
            return False
        self._move(best[1], giver, taker)
        self._move(best[2], taker, giver)
        return True

    def _movable(self, giver: int, taker: int) -> Iterator[int]:
        return (number for number in self._numbers[giver] if taker in self.placed[number].holders)

    def _load(self, instance: int) -> tuple[int, int, int]:
        return len(self._numbers[instance]), self._tokens[instance], instance

    def _put(self, number: int, placed: _Placed) -> None:
        self.placed[number] = placed
        if placed.home in self._tokens:
            self._numbers[placed.home][number] = None
            self._tokens[placed.home] += placed.tokens

    def _move(self, number: int, giver: int, taker: int) -> None:
        was = self.placed[number]
        del self._numbers[giver][number]
        self._tokens[giver] -= was.tokens
        self._put(number, _Placed(was.tokens, was.holders, taker))
