"""What has been in a session's sequence so far, as penalties count it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FIRST_ROOM = 64


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens:
    """Each token that has been in a sequence, once, in any order."""

    ids: NDArray[np.int64]
    in_sequence: NDArray[np.int32]
    """How often each of them is in the sequence, the prompt counted; 0 for one that was cut off again."""
    generated: NDArray[np.int32]
    """How often each of them was generated."""

    def copied(self) -> "SeenTokens":
        """The same, whatever the sequence becomes."""
        return SeenTokens(self.ids.copy(), self.in_sequence.copy(), self.generated.copy())

    @property
    def parts(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """All three, in the order of the fields."""
        return self.ids, self.in_sequence, self.generated


class TokenHistory:
    """Owner of one sequence's counts. They grow and shrink by what is added and cut, however long the sequence is."""

    __slots__ = ("_counts", "_ids", "_places", "_prompt_tokens", "_tokens")

    def __init__(self, prompt_tokens: int) -> None:
        """Tokens from position `prompt_tokens` on count as generated."""
        self._prompt_tokens = prompt_tokens
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}
        self._ids = np.zeros(_FIRST_ROOM, dtype=np.int64)
        self._counts = np.zeros((2, _FIRST_ROOM), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._tokens)

    def behind(self, position: int) -> tuple[int, ...]:
        """The tokens from that position on."""
        return tuple(self._tokens[position:])

    def extend(self, token_ids: Iterable[int]) -> None:
        """The sequence goes on with these."""
        for token_id in token_ids:
            self._count(self._place(token_id), 1)
            self._tokens.append(token_id)

    def cut(self, length: int) -> None:
        """The sequence has so many tokens, or fewer if it had fewer."""
        while len(self._tokens) > length:
            token_id = self._tokens.pop()
            self._count(self._places[token_id], -1)

    def seen(self) -> SeenTokens:
        """What has been in the sequence: views, that hold until it changes."""
        distinct = len(self._places)
        return SeenTokens(self._ids[:distinct], self._counts[0, :distinct], self._counts[1, :distinct])

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._ids[place] = token_id
        return place

    def _count(self, place: int, change: int) -> None:
        """Of the token at that place, at the end of the sequence as it is now, or as it was before the cut."""
        at = len(self._tokens)
        self._counts[0, place] += change
        if at >= self._prompt_tokens:
            self._counts[1, place] += change
