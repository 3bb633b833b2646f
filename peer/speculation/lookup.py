"""Guesses from texts: what came after the longest end of the sequence where that end stood before. Pure.

`TextLookup` looks in the sequence itself, as prompt lookup does (Saxena 2023), with matches of any length and a
constant time for each token, as a suffix automaton has them (SAM decoding, arXiv 2411.10666). `PredictionLookup` looks
in a text that the client predicts.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from molink.peer.speculation.suffix_automaton import NO_MATCH, Match, SuffixAutomaton

MOST_TEXT_TOKENS = 16_384
"""Of a sequence that is longer only the end is looked in."""
MOST_READ_TOKENS = 512
"""How many tokens are read before a chain begins: a millisecond's work. A long prompt is read in several."""
STRONGEST = 5
"""The strength of matches of 16 tokens and more; shorter ones have the number of bits of their length."""
RESUMED = 0
"""The strength of a guess that goes on in a prediction behind a token that differed."""
SURE_LENGTH = 4
"""A match of so many tokens elsewhere in a prediction counts more than to go on behind a token that differed."""


class LookupChain:
    """A row of guesses from a text, one after the other. What was guessed beyond the text's end counts as of it, so
    that a text which repeats itself goes on to do so."""

    def __init__(self, automaton: SuffixAutomaton, match: Match, place: int, *, resumes: bool) -> None:
        """`match` is the longest end of the sequence that the text has, `place` where it ends there. A chain that
        `resumes` goes on where it was behind a token that differs."""
        self._automaton = automaton
        self._match = match
        self._place = place
        self._resumes = resumes
        self._length = match.length
        """Of the match at that place."""
        self._beyond: list[int] = []
        """The tokens of the chain so far, which follow the text."""

    def copy(self) -> "LookupChain":
        """A chain that goes on by itself."""
        copied = LookupChain(self._automaton, self._match, self._place, resumes=self._resumes)
        copied._length = self._length
        return copied

    def settle(self) -> None:
        """The text has grown."""
        self._match = self._automaton.settle(self._match)

    def guess(self) -> tuple[int, int] | None:
        """The next token, and how strong a guess it is; None: the text says nothing."""
        text, place = self._automaton.text, self._place + 1
        if not (self._length or self._resumes):
            return None
        if place < len(text):
            return text[place], min(self._length.bit_length(), STRONGEST)
        if self._resumes or place - len(text) >= len(self._beyond):
            return None
        return self._beyond[place - len(text)], min(self._length.bit_length(), STRONGEST)

    def follow(self, token: int) -> None:
        """The sequence goes on with this token, whoever guessed it."""
        guessed = self.guess()
        self._match = match = self._automaton.follow(self._match, token)
        self._beyond.append(token)
        if guessed is not None and guessed[0] == token:
            self._place += 1
            self._length += 1
        elif self._resumes and match.length < (SURE_LENGTH if self._length else 2):
            self._place += 1
            self._length = 0
        else:
            self._place, self._length = self._automaton.end_of(match), match.length


class TextLookup:
    """Owns what is known of the sequence's own text."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()
        self._match = NO_MATCH
        """The longest end of the text that it also has before."""
        self._unread: deque[int] = deque()

    def begin_with(self, tokens: Iterable[int]) -> None:
        """The sequence begins with these."""
        self._unread.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The sequence has these tokens more."""
        self._unread.extend(tokens)

    def begin(self) -> LookupChain:
        """Guesses of what comes behind the sequence; none as long as it has not been read to its end."""
        self._read()
        match = NO_MATCH if self._unread else self._match
        return LookupChain(self._automaton, match, self._automaton.end_of(match), resumes=False)

    def _read(self) -> None:
        for _ in range(min(len(self._unread), MOST_READ_TOKENS)):
            if len(self._automaton) == MOST_TEXT_TOKENS:
                self._unread.extendleft(reversed(self._automaton.text[MOST_TEXT_TOKENS // 2 :]))
                self._automaton, self._match = SuffixAutomaton(), NO_MATCH
            automaton, token = self._automaton, self._unread.popleft()
            automaton.remember_end(self._match, len(automaton) - 1)
            match = automaton.follow(self._match, token)
            automaton.append(token)
            self._match = automaton.settle(match)


class PredictionLookup:
    """Owns what is known of a predicted text, and where in it the sequence is."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._automaton = SuffixAutomaton()
        self._unread = deque(token_ids)
        self._chain = LookupChain(self._automaton, NO_MATCH, -1, resumes=True)

    def begin_with(self, tokens: Iterable[int]) -> None:
        """The sequence begins with these, which are no part of what is predicted."""

    def extend(self, tokens: Iterable[int]) -> None:
        """What is generated has these tokens more."""
        for token in tokens:
            self._chain.follow(token)

    def begin(self) -> LookupChain:
        """Guesses of what comes behind the sequence, as far as the prediction has been read."""
        for _ in range(min(len(self._unread), MOST_READ_TOKENS)):
            self._automaton.append(self._unread.popleft())
            self._chain.settle()
        return self._chain.copy()
