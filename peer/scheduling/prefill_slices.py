"""Chooses the prefill slice that is computed between two decode steps of other sessions. Pure.

A part of a prompt takes many times as long as a decode step, and who waits for a token waits for both. So parts are
computed in pieces: so many tokens through so many layers, with a decode step after each. Fewer tokens alone would not
do: a piece reads all weights of its layers, and all keys and values before it, whatever its tokens, and with a long
context that alone takes longer than a decode step. Through few layers, many tokens fit the time that there is ("layered
prefill", Lee et al. 2025).

Parts that wait together are computed together: a piece holds the parts that are due first, whole, or a piece of the
first one. Of all sizes that keep decode within its limit the one is taken with which the sessions wait least in all.
Where none does, the prompts go on with the least piece, one layer of LEAST_TOKENS, and decode is as slow as that makes
it.

Pieces cost those who wait for their first token a decode step each, and save those who decode one long pause. Where
more sessions wait for a first token than for a next one, and pieces would make them wait longer in all than the pause
makes the others, the parts are computed at once (`SliceSizer.at_once`). Whoever decodes is owed for such a pause: until
it has had its share of the time again, there is no other.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from molink.peer.profiling.profile import StepWork, slice_layer_ms, slices_of
from molink.peer.profiling.step_times import StepTimes

MOST_SLOWDOWN = 1.9
"""From one token of a session to its next with a piece in between, over a decode step with nothing beside it: as it is
predicted. What it takes varies more than a decode step does, and 99 of 100 are to stay within twice those of decode."""
LEAST_SHARE = 1 / 3
"""Of the time, the prompt's, however slow decode is: somebody waits for its first token too."""
LEAST_BUDGET_MS = 4.0
"""That a piece may take however short decode steps are: each piece costs its driver some milliseconds of its own, and
prompts in shorter ones would take many times as long for a gain that is lost on the shortest line between two homes."""
LEAST_TOKENS = 16
"""Of a piece, but for the last of a part."""
TOKENS_STEP = 16
"""Pieces of one part have a multiple of so many, but for its last. A product with a number of rows that never was
before is prepared first, which takes some milliseconds of a layer: there should be few such numbers."""
RECENT = 0.3
"""Weight of the latest step in what is remembered of late ones."""

LayerTime: TypeAlias = Callable[[int, int], float]
"""Milliseconds of a layer for so many tokens of a prompt behind so many others."""


class RemainingPrefill(NamedTuple):
    """What is left to compute of a part of a prompt."""

    tokens: int
    """Those that are not through the span; 1 or more."""
    context_tokens: int
    """Those that are, with all of the sequence before them."""
    ends: bool = True
    """Whether somebody gets a first token when it is through: it is its prompt's last part."""


class SliceSize(NamedTuple):
    """The size of a slice."""

    tokens: tuple[int, ...]
    """Of the first parts in order."""
    layers: int


class SliceSizer:
    """Chooses the slices of a peer, and remembers how long decode steps and pieces take that follow each other."""

    def __init__(self, step_times: StepTimes) -> None:
        self._step_times = step_times
        self._measured = slices_of(step_times.profile)
        self._lines: dict[int, tuple[float, float]] = {}
        """By tokens: what a layer takes as measured, and what each token of context adds."""
        self._work: StepWork | None = None
        """The latest decode step."""
        self._beside_ms: float | None = None
        self._ratio = 1.0
        """Of late pieces: what they took, over what was measured at start-up."""
        self._owed_ms = 0.0
        """Decode steps that have to be computed before there is another pause."""

    def record_decode(self, work: StepWork, taken_ms: float, *, beside: bool) -> None:
        """A decode step took so long, `beside` pieces or with nothing else to do."""
        self._work = work
        self._owed_ms = max(0.0, self._owed_ms - taken_ms)
        if beside:
            last_ms = taken_ms if self._beside_ms is None else self._beside_ms
            self._beside_ms = last_ms + RECENT * (taken_ms - last_ms)

    def record_slice(self, size: SliceSize, parts: Sequence[RemainingPrefill], taken_ms: float) -> None:
        """A piece of these parts took so long."""
        surprise = taken_ms / (size.layers * together_ms(self.layer_ms, parts, size.tokens))
        if math.isfinite(surprise) and surprise > 0:
            self._ratio *= max(0.5, min(2.0, surprise)) ** RECENT

    def layer_ms(self, tokens: int, context_tokens: int) -> float:
        """What a layer of a piece takes."""
        if (line := self._lines.get(tokens)) is None:
            alone_ms = slice_layer_ms(self._measured, tokens, 0)
            behind_ms = slice_layer_ms(self._measured, tokens, 1000)
            line = self._lines[tokens] = alone_ms, (behind_ms - alone_ms) / 1000
        return self._ratio * (line[0] + line[1] * context_tokens)

    def next_slice(
        self, layers: int, parts: Sequence[RemainingPrefill], decoding: int, under_way: tuple[int, ...] = ()
    ) -> SliceSize:
        """The piece that comes next of parts, in the order in which they are due, with so many layers before them.

        Or of the tokens of each that are `under_way`, between layers, with so many left. Where nobody decodes, that
        is all there is.
        """
        if not decoding:
            return SliceSize(under_way or tuple(part.tokens for part in parts), layers)
        idle_ms, beside_ms = self._decode_ms(layers)
        most_ms = budget_ms(idle_ms, beside_ms)
        if under_way:
            layer_ms = together_ms(self.layer_ms, parts, under_way)
            return SliceSize(under_way, _layers(layers, most_ms, layer_ms))
        return next_slice(self.layer_ms, layers, parts, most_ms, beside_ms)

    def at_once(self, layers: int, parts: Sequence[RemainingPrefill], decoding: int) -> tuple[int, ...]:
        """Which of the parts, by their places, are computed whole and now while so many sessions decode: all that end
        a prompt, or none. What decode is owed for the pause is remembered."""
        ending = [place for place, part in enumerate(parts) if part.ends]
        if self._owed_ms or len(ending) <= decoding:
            return ()
        chosen = [parts[place] for place in ending]
        tokens = [part.tokens for part in chosen]
        layer_ms = together_ms(self.layer_ms, chosen, tokens)
        pause_ms, (idle_ms, beside_ms) = layers * layer_ms, self._decode_ms(layers)
        pieces = min(pause_ms / budget_ms(idle_ms, beside_ms), layers * sum(tokens) / LEAST_TOKENS)
        if decoding * pause_ms >= len(ending) * pieces * beside_ms:
            return ()
        self._owed_ms = pause_ms * decoding / len(ending)
        return tuple(ending)

    def _decode_ms(self, layers: int) -> tuple[float, float]:
        """What decode steps take alone, and what they take between pieces, as far as that is known."""
        first = StepWork(layers, starts=True, ends=True, decode_contexts=(0,))
        idle_ms = self._step_times.predicted_ms(self._work or first)
        return idle_ms, idle_ms if self._beside_ms is None else self._beside_ms


def budget_ms(idle_ms: float, beside_ms: float) -> float:
    """What a piece may take, where decode steps take `idle_ms` alone and `beside_ms` between pieces."""
    share_ms = beside_ms * LEAST_SHARE / (1 - LEAST_SHARE)
    return max(MOST_SLOWDOWN * idle_ms - beside_ms, share_ms, LEAST_BUDGET_MS)


def together_ms(layer_time: LayerTime, parts: Sequence[RemainingPrefill], tokens: Sequence[int]) -> float:
    """One layer of so many tokens of each of the parts: each attends to its own sequence only."""
    if len(tokens) == 1:
        return layer_time(tokens[0], parts[0].context_tokens)
    own_ms = [_attention_ms(layer_time, part, count) for part, count in zip(parts, tokens, strict=True)]
    return layer_time(sum(tokens), 0) + sum(own_ms)


def next_slice(
    layer_time: LayerTime, layers: int, parts: Sequence[RemainingPrefill], most_ms: float, beside_ms: float
) -> SliceSize:
    """The piece that comes next, of at most `most_ms` where that can be, with decode steps of `beside_ms` around it."""

    def through_ms(layer_ms: float) -> float:
        """Of tokens through all layers, with decode steps in between."""
        pieces = -(-layers // _layers(layers, most_ms, layer_ms))
        return pieces * beside_ms + layers * layer_ms

    first, all_tokens = parts[0], sum(part.tokens for part in parts)
    found: list[tuple[tuple[int, ...], float, float, int]] = []
    """Tokens of each part, what a layer of them takes, when the parts are through that they belong to, of how many
    tokens these are."""
    for tokens in _sizes(first.tokens):
        layer_ms = layer_time(tokens, first.context_tokens)
        if layer_ms > most_ms:
            continue
        groups, rest = divmod(first.tokens, tokens)
        whole_ms = groups * through_ms(layer_ms)
        if rest:
            whole_ms += through_ms(layer_time(rest, first.context_tokens))
        found.append(((tokens,), layer_ms, whole_ms, first.tokens))
    counts = tuple(part.tokens for part in parts)
    own_ms = accumulate(_attention_ms(layer_time, part, part.tokens) for part in parts)
    for joined, (tokens, attention_ms) in enumerate(zip(accumulate(counts), own_ms, strict=True), 1):
        layer_ms = layer_time(tokens, 0) + attention_ms
        if joined > 1 and layer_ms <= most_ms:
            found.append((counts[:joined], layer_ms, through_ms(layer_ms), tokens))
    if not found:
        return SliceSize((min(first.tokens, LEAST_TOKENS),), 1)
    token_ms = min(whole_ms / tokens for _, _, whole_ms, tokens in found)
    least_ms = min(whole_ms for _, _, whole_ms, _ in found)

    def waits_ms(one: tuple[tuple[int, ...], float, float, int]) -> float:
        """What all sessions wait, if the others follow as fast as any may."""
        sizes, _, whole_ms, tokens = one
        later_ms = max(least_ms, (all_tokens - tokens) * token_ms)
        return len(parts) * whole_ms + (len(parts) - len(sizes)) * later_ms

    sizes, layer_ms, _, _ = min(found, key=waits_ms)
    return SliceSize(sizes, _layers(layers, most_ms, layer_ms))


def _attention_ms(layer_time: LayerTime, part: RemainingPrefill, tokens: int) -> float:
    """What a layer takes longer for so many tokens of the part than without what comes before them."""
    if not part.context_tokens:
        return 0.0
    return layer_time(tokens, part.context_tokens) - layer_time(tokens, 0)


def _layers(left: int, most_ms: float, layer_ms: float) -> int:
    """As many as fit, 1 at least, in pieces of about one size."""
    most = min(left, max(1, int(most_ms / layer_ms)))
    return -(-left // -(-left // most))


def _sizes(tokens: int) -> Iterator[int]:
    """How many of the tokens may go through the layers together."""
    yield from range(LEAST_TOKENS, tokens, TOKENS_STEP)
    yield tokens
