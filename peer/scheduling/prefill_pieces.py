"""How much of a prompt is computed between two decode steps of other sessions. Pure.

A part of a prompt takes many times as long as a decode step, and who waits for a token waits for both. So it is
computed in pieces: so many tokens through so many layers, with a decode step after each. Fewer tokens alone would not
do: a piece reads all weights of its layers, and all keys and values before it, whatever its tokens, and with a long
context that alone takes longer than a decode step. Through few layers, many tokens fit the time that there is ("layered
prefill", Lee et al. 2025).

Of all sizes that keep decode within its limit the one is taken with which the prompt gets on fastest. Where none does,
the prompt goes on with the least piece, one layer of LEAST_TOKENS, and decode is as slow as that makes it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from molink.peer.profiling.profile import StepWork, piece_layer_ms
from molink.peer.profiling.step_times import StepTimes

MOST_SLOWDOWN = 1.9
"""From one token of a session to its next with a piece in between, over a decode step with nothing beside it: as it is
predicted. What it takes varies more than a decode step does, and 99 of 100 are to stay within twice those of decode."""
LEAST_SHARE = 1 / 3
"""Of the time, the prompt's, however slow decode is: somebody waits for its first token too."""
LEAST_TOKENS = 16
"""Of a piece, but for the last of a part."""
TOKENS_STEP = 16
"""Pieces have a multiple of so many, but for the last of a part. A product with a number of rows that never was before
is prepared first, which takes some milliseconds of a layer: there should be few such numbers."""
RECENT = 0.3
"""Weight of the latest step in what is remembered of late ones."""

LayerTime: TypeAlias = Callable[[int, int], float]
"""Milliseconds of a layer for so many tokens of a prompt behind so many others."""


@dataclass(frozen=True, slots=True)
class PieceSize:
    """What is computed at once of a prompt's part."""

    tokens: int
    layers: int


@dataclass(frozen=True, slots=True)
class PartLeft:
    """What there is to compute of a part of a prompt."""

    layers: int
    """Of the span."""
    tokens: int
    """Those that are not through the span; 1 or more."""
    context_tokens: int
    """Those that are, with all of the sequence before them."""
    under_way: PieceSize | None = None
    """The tokens that are between layers now, and the layers before them."""


class PieceSizes:
    """Chooses the pieces of a peer, and remembers how long decode steps and pieces take that follow each other."""

    def __init__(self, step_times: StepTimes) -> None:
        """Their profile has to know the times of pieces."""
        self._step_times = step_times
        self._measured = step_times.profile.piece_latencies
        self._work = StepWork(1, starts=False, ends=False, decode_contexts=(0,))
        """The latest decode step."""
        self._beside_ms: float | None = None
        self._ratio = 1.0
        """Of late pieces: what they took, over what was measured at start-up."""

    def decoded(self, work: StepWork, taken_ms: float, *, beside: bool) -> None:
        """A decode step took so long, `beside` pieces or with nothing else to do."""
        self._work = work
        if beside:
            last_ms = taken_ms if self._beside_ms is None else self._beside_ms
            self._beside_ms = last_ms + RECENT * (taken_ms - last_ms)

    def computed(self, size: PieceSize, context_tokens: int, taken_ms: float) -> None:
        """A piece behind that context took so long."""
        surprise = taken_ms / (size.layers * self.layer_ms(size.tokens, context_tokens))
        if math.isfinite(surprise) and surprise > 0:
            self._ratio *= max(0.5, min(2.0, surprise)) ** RECENT

    def layer_ms(self, tokens: int, context_tokens: int) -> float:
        """What a layer of a piece takes."""
        return self._ratio * piece_layer_ms(self._measured, tokens, context_tokens)

    def next(self, part: PartLeft) -> PieceSize:
        """The piece that comes next."""
        idle_ms = self._step_times.predicted_ms(self._work)
        beside_ms = idle_ms if self._beside_ms is None else self._beside_ms
        return next_piece(self.layer_ms, part, budget_ms(idle_ms, beside_ms), beside_ms)


def budget_ms(idle_ms: float, beside_ms: float) -> float:
    """What a piece may take, where decode steps take `idle_ms` alone and `beside_ms` between pieces."""
    return max(MOST_SLOWDOWN * idle_ms - beside_ms, beside_ms * LEAST_SHARE / (1 - LEAST_SHARE))


def next_piece(layer_time: LayerTime, part: PartLeft, most_ms: float, beside_ms: float) -> PieceSize:
    """The piece that comes next, of at most `most_ms` where that can be, with decode steps of `beside_ms` around it."""
    if part.under_way is not None:
        tokens, left = part.under_way.tokens, part.under_way.layers
        return PieceSize(tokens, _layers(left, most_ms, layer_time(tokens, part.context_tokens)))
    best = PieceSize(min(part.tokens, LEAST_TOKENS), 1)
    least_ms = math.inf

    def through_ms(layer_ms: float) -> float:
        """Of tokens through all layers, with decode steps in between."""
        pieces = -(-part.layers // _layers(part.layers, most_ms, layer_ms))
        return pieces * beside_ms + part.layers * layer_ms

    for tokens in _sizes(part.tokens):
        layer_ms = layer_time(tokens, part.context_tokens)
        if layer_ms > most_ms:
            continue
        groups, rest = divmod(part.tokens, tokens)
        whole_ms = groups * through_ms(layer_ms)
        if rest:
            whole_ms += through_ms(layer_time(rest, part.context_tokens))
        if whole_ms < least_ms:
            best, least_ms = PieceSize(tokens, _layers(part.layers, most_ms, layer_ms)), whole_ms
    return best


def _layers(left: int, most_ms: float, layer_ms: float) -> int:
    """As many as fit, 1 at least, in pieces of about one size."""
    most = min(left, max(1, int(most_ms / layer_ms)))
    return -(-left // -(-left // most))


def _sizes(tokens: int) -> Iterator[int]:
    """How many of the tokens may go through the layers together."""
    yield from range(LEAST_TOKENS, tokens, TOKENS_STEP)
    yield tokens
