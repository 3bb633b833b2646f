"""A text's suffix automaton, and in it the longest end of a text that has come before. Pure.

The automaton (Blumer et al. 1985) has a state for each set of substrings that end at the same places, at most two for
each token, and grows by a token in constant time on average. Nearly all states have one transition, which is in arrays;
the others' further ones are in dictionaries: some 120 bytes for each token of a text.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

NOWHERE = -1
ROOT = 0


@dataclass(frozen=True, slots=True)
class Match:
    """A string of tokens that a text contains."""

    state: int = ROOT
    length: int = 0
    """Tokens; 0 for the empty string, which is everywhere."""


NO_MATCH = Match()


class SuffixAutomaton:
    """Owns the automaton of a text that only grows."""

    def __init__(self) -> None:
        self.text = array("i")
        self._length = array("i", [0])
        """By state: of its longest string. Its shortest is one longer than its link's longest."""
        self._link = array("i", [NOWHERE])
        """By state: that of the longest suffix which ends at more places."""
        self._end = array("i", [NOWHERE])
        """By state: a place where its strings end."""
        self._token = array("i", [NOWHERE])
        self._target = array("i", [NOWHERE])
        """By state: its first transition."""
        self._further: dict[int, dict[int, int]] = {}
        """Of states with more than one transition: the others."""
        self._last = ROOT

    def __len__(self) -> int:
        return len(self.text)

    @property
    def states(self) -> int:
        """At most two for each token, and one."""
        return len(self._length)

    def append(self, token: int) -> None:
        """The text has this token more."""
        new = self._add_state(len(self.text) + 1, len(self.text))
        self.text.append(token)
        state = self._last
        while state != NOWHERE and self._next(state, token) == NOWHERE:
            self._set_next(state, token, new)
            state = self._link[state]
        self._last = new
        if state == NOWHERE:
            self._link[new] = ROOT
            return
        following = self._next(state, token)
        if self._length[following] != self._length[state] + 1:
            following = self._split(state, token, following)
        self._link[new] = following

    def extend(self, tokens: Iterable[int]) -> None:
        """The text has these tokens more."""
        for token in tokens:
            self.append(token)

    def follow(self, match: Match, token: int) -> Match:
        """The longest end of the matched string and this token that the text contains."""
        state, length = match.state, match.length
        following = self._next(state, token)
        while following == NOWHERE:
            state = self._link[state]
            if state == NOWHERE:
                return NO_MATCH
            length = self._length[state]
            following = self._next(state, token)
        return Match(following, length + 1)

    def settle(self, match: Match) -> Match:
        """The same string after the text has grown: its state may have been split."""
        state = match.state
        while state != ROOT and match.length <= self._length[self._link[state]]:
            state = self._link[state]
        return match if state == match.state else Match(state, match.length)

    def end_of(self, match: Match) -> int:
        """A place in the text where the string ends: that of its last token. -1 for the empty string."""
        return self._end[match.state]

    def remember_end(self, match: Match, end: int) -> None:
        """The string ends there too, which is to be what `end_of` says from now on."""
        if match.state != ROOT:
            self._end[match.state] = end

    def _split(self, state: int, token: int, following: int) -> int:
        """A state of its own for the shorter strings of `following`, which end at one more place now."""
        shorter = self._add_state(self._length[state] + 1, self._end[following])
        self._token[shorter], self._target[shorter] = self._token[following], self._target[following]
        if (further := self._further.get(following)) is not None:
            self._further[shorter] = dict(further)
        self._link[shorter] = self._link[following]
        self._link[following] = shorter
        while state != NOWHERE and self._next(state, token) == following:
            self._set_next(state, token, shorter)
            state = self._link[state]
        return shorter

    def _add_state(self, length: int, end: int) -> int:
        self._length.append(length)
        self._link.append(NOWHERE)
        self._end.append(end)
        self._token.append(NOWHERE)
        self._target.append(NOWHERE)
        return len(self._length) - 1

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        further = self._further.get(state)
        return NOWHERE if further is None else further.get(token, NOWHERE)

    def _set_next(self, state: int, token: int, target: int) -> None:
        if self._target[state] == NOWHERE or self._token[state] == token:
            self._token[state], self._target[state] = token, target
        else:
            self._further.setdefault(state, {})[token] = target
