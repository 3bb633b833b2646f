"""What may come behind a sequence, as a tree: at each place several tokens, each with the chance that it is right.

The sources are the product's, and what a guess of a kind is worth is learnt as there. Beside a draft model's first
token its second and third are guesses too, of kinds of their own.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType

from molink.peer.speculation.acceptance import DRAFT, GREEDY, LOOKUP, SAMPLED, TABLE, Acceptance, GuessKind
from molink.peer.speculation.draft_drawing import STRENGTHS, DraftDrawing, first_ranked
from molink.peer.speculation.draft_model import SEEN_TOKENS, DraftCache, DraftModel
from molink.peer.speculation.lookup import TextLookup
from molink.peer.speculation.ngram_tables import NgramTable, TableLookup
from molink.peer.speculation.session_guesses import LEAST_CHANCE

BRANCHES = 3
"""Of a draft model, at each place."""
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A guessed token, and the guesses before it."""

    path: Path
    """It is the last one."""
    together: float
    """The chance that all of them are right."""


def _beforehand(*, sampled: bool) -> Mapping[GuessKind, float]:
    known = dict(SAMPLED if sampled else GREEDY)
    for rank in range(1, BRANCHES):
        known |= {(f"{DRAFT} {rank}", eighths): (eighths + 0.5) / STRENGTHS for eighths in range(STRENGTHS)}
    return MappingProxyType(known)


class Branches:
    """Owns where one session's guesses come from, and how right each kind has been in it."""

    def __init__(self, prompt: Sequence[int], draft: DraftModel | None, drawing: DraftDrawing | None) -> None:
        self._text = TextLookup()
        self._table = TableLookup(NgramTable())
        self._draft = draft
        self._acceptance = Acceptance(_beforehand(sampled=drawing is not None))
        self._drawing = drawing
        self._tokens = list(prompt)
        self._length = len(prompt)
        """Of the whole sequence; tokens that are far back are kept no more."""
        self._cache = None if draft is None else DraftCache(draft)
        self._said: dict[Path, list[tuple[GuessKind, int]]] = {}
        """What was said to come behind these guesses, until it is scored."""
        self._text.begin_with(prompt)
        self._table.begin_with(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has these tokens more, for certain."""
        path: Path = ()
        for token in tokens:
            for kind, guessed in self._said.get(path, ()):
                self._acceptance.record(kind, right=guessed == token)
            path = (*path, token)
        self._said = {}
        self._text.extend(tokens)
        self._table.extend(tokens)
        self._tokens += tokens
        self._length += len(tokens)
        draft = self._draft
        if draft is not None and len(self._tokens) + SEEN_TOKENS > draft.shape.most_positions:
            self._tokens, self._cache = self._tokens[-SEEN_TOKENS:], DraftCache(draft)

    def behind(self, path: Path) -> list[tuple[int, float]]:
        """The tokens that may come behind these guesses, likeliest first, with the chance of each."""
        said = self._said.get(path)
        if said is None:
            said = self._said[path] = [*self._looked_up(path), *self._drafted(path)]
        chances: dict[int, float] = {}
        for kind, token in said:
            chances[token] = max(chances.get(token, 0.0), self._acceptance.chance(kind))
        total = sum(chances.values())
        scale = 1 / total if total > 1 else 1.0
        return sorted(((token, scale * chance) for token, chance in chances.items()), key=lambda one: -one[1])

    def tree(self, most: int) -> list[Branch]:
        """The likeliest guesses, each behind those that it follows: at most so many."""
        order, nodes = count(), list[Branch]()
        waiting: list[tuple[float, int, Path]] = []

        def add(path: Path, together: float) -> None:
            for token, chance in self.behind(path):
                if together * chance >= LEAST_CHANCE:
                    heapq.heappush(waiting, (-together * chance, next(order), (*path, token)))

        add((), 1.0)
        while waiting and len(nodes) < most:
            negative, _, path = heapq.heappop(waiting)
            nodes.append(Branch(path, -negative))
            add(path, -negative)
        return nodes

    def _looked_up(self, path: Path) -> list[tuple[GuessKind, int]]:
        found: list[tuple[GuessKind, int]] = []
        for name, source in ((LOOKUP, self._text), (TABLE, self._table)):
            chain = source.begin()
            for token in path:
                chain.follow(token)
            if (guess := chain.guess()) is not None:
                found.append(((name, guess[1]), guess[0]))
        return found

    def _drafted(self, path: Path) -> list[tuple[GuessKind, int]]:
        if self._cache is None:
            return []
        cache, known = self._cache, len(self._tokens)
        cache.truncate(min(len(cache.tokens), known - 1))
        logits = cache.step([*self._tokens[len(cache.tokens) :], *path])
        ranked = first_ranked(self._drawing, logits, self._length + len(path), BRANCHES)
        names = (DRAFT, *(f"{DRAFT} {rank}" for rank in range(1, BRANCHES)))
        return [((name, strength), token) for name, (token, strength) in zip(names, ranked, strict=False)]
