"""What a draft model guesses of several sequences at once: a step of its engine has the next place of all that wait.

It has a KV cache of its own for each sequence, which goes back to what was accepted before it goes on. A sequence that
grows beyond the window is computed anew from its end, in parts, while nobody waits; until that is through nothing is
guessed of it. Used from one thread.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from molink.shards.batching.engine import Engine, Rows
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.model.stage import Stage
from molink.shards.sampling.race_leaders import race_leaders
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.spec import MOST_GUESSED_TOKENS, SamplingParams

STRENGTHS = 8
"""As `speculation.draft_drawing` has them: of guesses, in equal parts."""
LEAST_PART_TOKENS, MOST_PART_TOKENS = 16, 256
Guessed = tuple[tuple[int, int], ...]
"""Tokens place by place, and how strong guesses they are."""


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """What a sequence has more, and how many tokens are to be guessed of what comes next."""

    number: int
    """Of the sequence."""
    tokens: tuple[int, ...]
    length: int
    """Of the whole sequence, these tokens included."""
    places: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    """What the draft has of one sequence."""

    params: SamplingParams
    seed: int
    cache: SequenceCache
    tokens: list[int] = field(default_factory=list)
    """What it sees of the sequence: its end."""
    held: list[int] = field(default_factory=list)
    """What the cache has been computed of: of those tokens as far as `certain` says, then of guesses."""
    certain: int = 0
    coming: list[int] = field(default_factory=list)
    """What is to be computed next."""
    length: int = 0
    """Of the whole sequence."""
    left: int = 0
    """Places that are still to be guessed."""
    guesses: list[tuple[int, int]] = field(default_factory=list)


class DraftEngine:
    """Owns a draft model's engine, all layers of it, and what it has of each sequence."""

    def __init__(
        self,
        engine: Engine,
        load: Callable[[], Stage],
        window_tokens: int,
        vocabulary: int,
        *,
        replays: bool = False,
    ) -> None:
        """`load` gives all layers, for `wake`. It sees `window_tokens` of a sequence at most, and guesses tokens below
        `vocabulary`. `replays`: steps of few rows are recorded, so that what was accepted goes as rows of such a
        step."""
        self.engine = engine
        self._load = load
        self.part_tokens = MOST_PART_TOKENS
        """Of a sequence that nobody waits for so many are computed in a step, for which others may have to wait. One
        that lacks more is not guessed for."""
        self.window_tokens = window_tokens
        self._vocabulary = min(vocabulary, engine.spec.vocabulary_size)
        self._replays = replays
        self._sequences: dict[int, _Sequence] = {}

    def cache_bytes_of(self, sequences: int) -> int:
        """Of the KV caches of so many sequences, at most."""
        spec = self.engine.spec
        return sequences * spec.kv_bytes(spec.whole, self.window_tokens)

    def wake(self) -> None:
        """Loads the weights, and records what is recorded. Raises as `LocalModel.load`."""
        if not self.engine.held:
            self.engine.attach(self._load())
            while self.engine.record_next():
                pass

    def rest(self) -> None:
        """Holds no weights, and nothing of any sequence, until it wakes."""
        for number in list(self._sequences):
            self.close(number)
        if self.engine.held:
            self.engine.detach(self.engine.spec.whole)

    def open(self, number: int, params: SamplingParams, seed: int) -> None:
        """A sequence begins, of which nothing is known yet; not while it rests. Raises as `Engine.new_cache`."""
        if not self.engine.held:
            return
        cache = self.engine.new_cache(self.engine.spec.whole, self.window_tokens)
        self._sequences[number] = _Sequence(params, seed, cache)

    def close(self, number: int) -> None:
        """Nothing is guessed of that sequence any more. No error if there is none."""
        if (found := self._sequences.pop(number, None)) is not None:
            found.cache.close()
            self.engine.pool.collect()

    @property
    def waits(self) -> bool:
        """Whether anything is to be guessed."""
        return any(one.left for one in self._sequences.values())

    @property
    def lacks(self) -> bool:
        """Whether sequences are still to be computed of which nothing is to be guessed."""
        return any(len(one.coming) > 1 and not one.left for one in self._sequences.values())

    def take(self, order: DraftOrder) -> bool:
        """Takes an order of a sequence. Whether there is anything to wait for: not where it has been closed, while much
        of it is still to be computed, or where tokens are in it that the draft does not have."""
        if (one := self._sequences.get(order.number)) is None:
            return False
        one.tokens += order.tokens
        one.length, one.left, one.guesses = order.length, 0, []
        if len(one.tokens) + MOST_GUESSED_TOKENS > self.window_tokens:
            one.tokens = one.tokens[-(self.window_tokens // 2) :]
            self._go_back(one, 0)
        else:
            same, most = one.certain, min(len(one.held), len(one.tokens) - 1)
            while same < most and one.held[same] == one.tokens[same]:
                same += 1
            self._go_back(one, min(same, most))
        is_known = max(one.coming, default=0) < self.engine.spec.vocabulary_size
        if not is_known:
            one.coming = []
        if is_known and one.coming and len(one.coming) <= self.part_tokens:
            one.left = order.places
        return bool(one.left)

    def guess_next(self) -> list[tuple[int, int, Guessed]]:
        """Guesses the next place of all sequences that wait, in one step. Returns those that are through: number, how
        long it was, and what is guessed to come next."""
        waiting = {number: one for number, one in self._sequences.items() if one.left}
        logits = self._step(list(waiting.values()), [len(one.coming) for one in waiting.values()])
        requests = [
            SampleRequest(one.params, one.seed, one.length + len(one.guesses)) for one in waiting.values()
        ]
        through: list[tuple[int, int, Guessed]] = []
        leaders = race_leaders(logits[:, : self._vocabulary], requests)
        for (number, one), (token, sure) in zip(waiting.items(), leaders, strict=True):
            one.guesses.append((token, _strength(sure)))
            one.coming, one.left = [token], one.left - 1
            if not one.left:
                one.coming = []
                through.append((number, one.length, tuple(one.guesses)))
        return through

    def compute_next(self) -> None:
        """Computes some more of a sequence of which nothing is to be guessed, all but its last token."""
        lacking = (one for one in self._sequences.values() if len(one.coming) > 1 and not one.left)
        one = next(lacking, None)
        if one is not None:
            self._step([one], [min(self.part_tokens, len(one.coming) - 1)])
            one.certain = len(one.held)

    def _go_back(self, one: _Sequence, tokens: int) -> None:
        """The cache holds the first so many tokens; the others are to be computed."""
        if one.cache.length != tokens:
            self.engine.begin_behind(one.cache, tokens)
        del one.held[tokens:]
        one.certain, one.coming = tokens, one.tokens[tokens:]

    def _step(self, sequences: Sequence[_Sequence], counts: Sequence[int]) -> Tensor:
        """Computes the next so many tokens of each. Returns logits behind the last of them, [sequences, vocabulary]."""
        rows: list[Rows] = []
        last: list[int] = []
        for one, count in zip(sequences, counts, strict=True):
            wanted = count if self._replays and count <= 1 + MOST_GUESSED_TOKENS else 1
            rows.append(Rows(one.cache, count, tuple(one.coming[:count]), wanted))
            last.append((last[-1] if last else -1) + wanted)
        logits = self.engine.step(self.engine.spec.whole, rows, None)
        for one, count in zip(sequences, counts, strict=True):
            one.held += one.coming[:count]
            del one.coming[:count]
        return logits if len(last) == len(logits) else logits[last]


def _strength(sure: float) -> int:
    """Of a guess that is so sure; the least where the sequence has broken the draft's numbers."""
    return min(STRENGTHS - 1, int(STRENGTHS * sure)) if math.isfinite(sure) else 0
