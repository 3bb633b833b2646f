"""How a prompt is cut: chunks that follow each other through the stages of a circuit. Pure.

While a stage computes a chunk, its uplink carries the one before, and the next stage computes the one before that.
Short chunks fill the pipeline sooner; long ones waste less, for a step costs something whatever its length. The
lengths are those with the least predicted time to the first token. The head of a circuit decides by this what it
computes, and a router by the same what to expect of it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from molink.routing.arrays import IntArray
from molink.routing.cost.pipeline import COST, PipelineStage
from molink.routing.cost.prefill import PrefillPipeline

LEAST_TOKENS = 16
"""No prompt is cut into shorter chunks, but for a first and a last one of half the length."""
WORTH = 0.98
"""A finer cut must bring the predicted time down to so much of a coarser one's: it costs others something too."""
_GROWTH = 2**0.25
"""Between the lengths that are tried."""


Cut: TypeAlias = Callable[[Sequence[PipelineStage], int, int], tuple[int, ...]]
"""Of the stages of a circuit, the tokens of a prompt and the most that step at once: as `chunk_lengths`."""


def most_chunk_tokens(step_tokens: Iterable[int], decode_rows: int = COST.steps_per_batch) -> int:
    """The longest chunk, where the hops of a circuit have announced that their steps take so many tokens: it leaves
    room for the decode steps that ride along."""
    return max(1, min(step_tokens) - decode_rows)


def chunk_lengths(stages: Sequence[PipelineStage], prompt_tokens: int, most_tokens: int) -> tuple[int, ...]:
    """The lengths of the chunks, in order; their sum is `prompt_tokens`, each at most `most_tokens`.

    Equal chunks are tried in lengths from `most_tokens` down, round the best of them cuts with a first or last chunk of
    half the length (the first one wakes the other stages sooner, the last one leaves them sooner), and chunks of
    `most_tokens` with what is left: where a long context is what costs, few tokens should follow many.

    Raises:
        ValueError: a length is not positive.
    """
    if prompt_tokens < 1 or most_tokens < 1:
        raise ValueError(f"lengths must be positive, got {prompt_tokens} tokens in at most {most_tokens}")
    pipeline = PrefillPipeline(stages)
    counts = list(_counts(prompt_tokens, most_tokens))
    best = counts[0]
    if len(counts) > 1:
        predicted_ms = pipeline.equal_ms(np.array(counts), prompt_tokens).tolist()
        best_ms = predicted_ms[0]
        for count, count_ms in zip(counts, predicted_ms, strict=True):
            if count_ms < best_ms * WORTH:
                best, best_ms = count, count_ms
    shaped = (one for one in _shaped(prompt_tokens, best) if one.min() >= 1)
    cuts = [_cut(prompt_tokens, best), *(one for one in shaped if LEAST_TOKENS <= one.max() <= most_tokens)]
    if best > counts[0] or prompt_tokens % most_tokens:
        cuts.append(_longest(prompt_tokens, most_tokens))
    equal_ms, *others_ms = pipeline.prefill_ms(cuts).tolist()
    least_ms = min(others_ms, default=equal_ms)
    chosen = 1 + others_ms.index(least_ms) if least_ms < equal_ms * WORTH else 0
    return tuple(cuts[chosen].tolist())


def equal_chunks(tokens: int) -> Cut:
    """As few equal chunks as there can be of at most so many tokens, whatever is predicted.

    Raises ValueError if `tokens` is not positive.
    """
    if tokens < 1:
        raise ValueError(f"a chunk has at least 1 token, got {tokens}")

    def cut(_: Sequence[PipelineStage], prompt_tokens: int, most_tokens: int) -> tuple[int, ...]:
        return tuple(_cut(prompt_tokens, -(-prompt_tokens // min(tokens, most_tokens))).tolist())

    return cut


def _counts(prompt_tokens: int, most_tokens: int) -> Iterator[int]:
    """Numbers of chunks, ascending, from the fewest that there can be."""
    count, length = 0, float(min(prompt_tokens, most_tokens))
    while length >= LEAST_TOKENS or count == 0:
        if (more := -(-prompt_tokens // int(length))) > count:
            count = more
            yield count
        length /= _GROWTH


def _shaped(tokens: int, count: int) -> Iterator[IntArray]:
    """Cuts into so many chunks, or one more, of which the first, the last or both are half as long as the others."""
    for more in (count, count + 1):
        if more > 1:
            yield _cut(tokens, more, first=0.5)
            yield _cut(tokens, more, last=0.5)
        if more > 2:
            yield _cut(tokens, more, first=0.5, last=0.5)


def _longest(tokens: int, most_tokens: int) -> IntArray:
    whole, rest = divmod(tokens, most_tokens)
    return np.array([most_tokens] * whole + [rest] * (rest > 0))


def _cut(tokens: int, count: int, first: float = 1.0, last: float = 1.0) -> IntArray:
    """Whole lengths that add up, all alike but for the first and the last, which are such parts of the others."""
    passed = np.arange(1.0, count + 1)
    passed += first - 1.0
    passed[-1] += last - 1.0
    ends: IntArray = np.rint(tokens * passed / passed[-1]).astype(np.int64)
    ends[1:] -= ends[:-1].copy()
    return ends
