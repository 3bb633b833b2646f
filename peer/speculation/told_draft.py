"""A draft that somebody else computes, as a session knows it: what it has been told, and what asking it takes. Pure."""

from collections.abc import Callable, Sequence
from typing import Protocol

MOST_SLOWNESS, LEAST_SLOWNESS = 50.0, 0.02
TIMES_WEIGHT = 0.2
"""Of the latest answer in how much longer answers take than was measured beforehand."""


class DraftTimes:
    """Owns what places of a draft take: as measured beforehand, and as answers took of late."""

    def __init__(self, alone_ms: float, further_ms: float = 0.0) -> None:
        """A place of one sequence takes so long, and so much longer for each further sequence beside."""
        self.alone_ms = alone_ms
        self.further_ms = further_ms
        self.slowness = 1.0
        """By how many times answers of late took longer than that."""
        self.is_late = False
        """Whether an answer is overdue: nobody waits for another one until there is a sign of life."""
        self.is_resting = False
        """Whether its memory is the volunteer's for now."""
        self.is_waking = False
        """Whether that is about to end."""
        self.is_left_out = False
        """Whether the draft has failed, so that nobody waits for it again."""

    @property
    def answers(self) -> bool:
        """Whether it is worth asking."""
        return not (self.is_late or self.is_resting or self.is_left_out)

    def place_ms(self, sequences: int) -> float:
        """What one place of so many sequences takes together."""
        return self.slowness * (self.alone_ms + self.further_ms * (sequences - 1))

    def share_ms(self, sequences: int) -> float:
        """What a guess takes where so many sequences are guessed together: shares add up to what all wait for."""
        return self.place_ms(sequences) / sequences

    def record(self, sequences: int, places: int, taken_ms: float) -> None:
        """An answer of so many places took so long beside the others'."""
        expected_ms = places * (self.alone_ms + self.further_ms * (sequences - 1))
        if expected_ms > 0:
            seen = min(MOST_SLOWNESS, max(LEAST_SLOWNESS, taken_ms / expected_ms))
            self.slowness += TIMES_WEIGHT * (seen - self.slowness)


class Drafts(Protocol):
    """Who computes the draft's guesses, of many sequences."""

    def feed(self, told: "ToldDraft") -> None:
        """The sequence has more, which may be computed before anything is asked."""

    def ask(self, told: "ToldDraft", places: int, done: Callable[[], None]) -> None:
        """So many tokens are to be guessed of what comes next. `done` is called once and before long; what was guessed
        has been told then, if anything was."""

    def close(self, number: int) -> None:
        """Nothing is asked of that sequence any more. Again has no effect."""


class ToldDraft:
    """Owns what a session knows of its sequence at a draft: a `GuessSource` of what that has answered."""

    def __init__(self, drafts: Drafts, number: int, times: DraftTimes, seen_tokens: int) -> None:
        """`number` is the sequence's at the draft, which sees the last `seen_tokens` of it at most."""
        self._drafts = drafts
        self.number = number
        self.times = times
        self.is_closed = False
        """Whether the session has ended: nothing is asked any more, though it may go on."""
        self.unasked_trips = 0
        """In a row: the latest ones, for which nothing was asked."""
        self.spent_ms = 0.0
        """What was waited for the guesses of the trip that comes next."""
        self.is_unanswered = False
        """Whether it was asked for these, and has said nothing: the sequence is still to be computed there, say."""
        self.length = 0
        """Of the whole sequence."""
        self._seen_tokens = seen_tokens
        self._new: list[int] = []
        self._told: tuple[tuple[int, int], ...] = ()

    def share_ms(self, sequences: int) -> float:
        """As `DraftTimes.share_ms`."""
        return self.times.share_ms(sequences)

    def begin_with(self, tokens: Sequence[int]) -> None:
        """The sequence begins with these."""
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has these tokens more. What has been told was of what came before."""
        self.length += len(tokens)
        self._new += tokens[-self._seen_tokens :]
        if len(self._new) > 2 * self._seen_tokens:
            del self._new[: -self._seen_tokens]
        self._told, self.spent_ms, self.is_unanswered = (), 0.0, False

    def feed(self) -> None:
        """The draft may compute what the sequence has more."""
        self._drafts.feed(self)

    def ask(self, places: int, done: Callable[[], None]) -> None:
        """As `Drafts.ask`."""
        self._drafts.ask(self, places, done)

    def close(self) -> None:
        """The session has ended."""
        self.is_closed = True
        self._drafts.close(self.number)

    def take_new(self) -> tuple[int, ...]:
        """What the sequence has more since this was asked last, as far as the draft sees it."""
        new, self._new = tuple(self._new[-self._seen_tokens :]), []
        return new

    def tell(self, guesses: Sequence[tuple[int, int]]) -> None:
        """What comes next, place by place: tokens, and how strong guesses they are."""
        self._told = tuple(guesses)
        self.is_unanswered = not guesses

    def begin(self) -> "ToldChain":
        """Guesses of what comes behind the sequence."""
        return ToldChain(self._told)


class ToldChain:
    """A row of guesses that are known already, up to where another token is taken."""

    def __init__(self, told: Sequence[tuple[int, int]]) -> None:
        self._told = told
        self._place = 0

    def guess(self) -> tuple[int, int] | None:
        """The next token, and how strong a guess it is; None: nothing has been told of what comes here."""
        return self._told[self._place] if self._place < len(self._told) else None

    def follow(self, token: int) -> None:
        """The sequence goes on with this token, whoever guessed it."""
        goes_on = self._place < len(self._told) and self._told[self._place][0] == token
        self._place = self._place + 1 if goes_on else len(self._told)
