"""How a prompt is cut: chunks that follow each other through the stages of a circuit. Pure.

While a stage computes a chunk, its uplink carries the one before, and the next stage computes the one before that.
Short chunks fill the pipeline sooner; long ones waste less, for a step costs something whatever its length. The
lengths are those with the least predicted time to the first token.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.scheduling.pipeline import STEP_OVERHEAD_MS, PipelineStage

LEAST_TOKENS = 16
"""No prompt is cut into shorter chunks, but for a first and a last one of half the length."""
WORTH = 0.98
"""A finer cut must bring the predicted time down to so much of a coarser one's: it costs others something too."""
_GROWTH = 2**0.25
"""Between the lengths that are tried."""


Cut: TypeAlias = Callable[[Sequence[PipelineStage], int, int], tuple[int, ...]]
"""Of the stages of a circuit, the tokens of a prompt and the most that step at once: as `chunk_lengths`."""


def lengths_within(
    cut: Cut, limits: BatchLimits, stages: Sequence[PipelineStage], prompt_tokens: int
) -> tuple[int, ...]:
    """The lengths of a prompt's chunks by `cut`, none longer than what every hop takes: `limits` are the head's."""
    least = min([limits.max_tokens, *(stage.facts.step_tokens for stage in stages)])
    # a chunk leaves room for the decode steps that ride along
    return cut(stages, prompt_tokens, max(1, least - limits.max_sessions))


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
    counts = list(_counts(prompt_tokens, most_tokens))
    best = counts[0]
    best_ms = _equal_ms(stages, prompt_tokens, best)
    for count in counts[1:]:
        predicted_ms = _equal_ms(stages, prompt_tokens, count)
        if predicted_ms < best_ms * WORTH:
            best, best_ms = count, predicted_ms
    lengths = _cut(prompt_tokens, [1.0] * best)
    least_ms = prefill_ms(stages, lengths) * WORTH
    for weights in _shapes(best):
        shaped = _cut(prompt_tokens, weights)
        if (
            min(shaped) >= 1
            and LEAST_TOKENS <= max(shaped) <= most_tokens
            and (taken_ms := prefill_ms(stages, shaped)) < least_ms
        ):
            lengths, least_ms = shaped, taken_ms
    longest = _longest(prompt_tokens, most_tokens)
    return longest if prefill_ms(stages, longest) < least_ms else lengths


def equal_chunks(tokens: int) -> Cut:
    """As few equal chunks as there can be of at most so many tokens, whatever is predicted.

    Raises ValueError if `tokens` is not positive.
    """
    if tokens < 1:
        raise ValueError(f"a chunk has at least 1 token, got {tokens}")

    def cut(_: Sequence[PipelineStage], prompt_tokens: int, most_tokens: int) -> tuple[int, ...]:
        return _cut(prompt_tokens, [1.0] * -(-prompt_tokens // min(tokens, most_tokens)))

    return cut


def prefill_ms(stages: Sequence[PipelineStage], lengths: Sequence[int]) -> float:
    """Predicted milliseconds from the head's first step to the last stage's end, links included.

    A stage takes chunks one after the other, and so does an uplink. The last stage sends nothing but a token.
    """
    free_ms = [0.0] * (2 * len(stages))
    total = sum(lengths)
    known: dict[int, list[float]] = {}
    for tokens in lengths:
        done_ms = 0.0
        if tokens not in known:
            known[tokens] = _taken_ms(stages, tokens, total)
        for resource, taken_ms in enumerate(known[tokens]):
            done_ms = free_ms[resource] = max(done_ms, free_ms[resource]) + taken_ms
            if resource % 2 == 1:
                done_ms += stages[resource // 2].link_ms
    return done_ms


def _equal_ms(stages: Sequence[PipelineStage], prompt_tokens: int, count: int) -> float:
    """As `prefill_ms` for `count` chunks of one length: the first through all, the others at the slowest's pace."""
    taken_ms = _taken_ms(stages, -(-prompt_tokens // count), prompt_tokens)
    return sum(taken_ms) + (count - 1) * max(taken_ms) + sum(stage.link_ms for stage in stages)


def _taken_ms(stages: Sequence[PipelineStage], tokens: int, prompt_tokens: int) -> list[float]:
    """Of each stage in turn: how long a chunk occupies its device, and then its uplink.

    Each chunk is taken to follow half of the others: what attention adds with the context is right in sum.
    """
    context_tokens = (prompt_tokens - tokens) / 2
    taken_ms: list[float] = []
    for stage in stages:
        taken_ms += [stage.prefill_ms(tokens, context_tokens) + STEP_OVERHEAD_MS, stage.transfer_ms(tokens)]
    taken_ms[-1] = 0.0
    return taken_ms


def _counts(prompt_tokens: int, most_tokens: int) -> Iterator[int]:
    """Numbers of chunks, ascending, from the fewest that there can be."""
    count, length = 0, float(min(prompt_tokens, most_tokens))
    while length >= LEAST_TOKENS or count == 0:
        if (more := -(-prompt_tokens // int(length))) > count:
            count = more
            yield count
        length /= _GROWTH


def _shapes(count: int) -> Iterator[list[float]]:
    """Weights of chunks of which the first, the last or both are half as long as the others."""
    for more in (count, count + 1):
        if more > 1:
            yield [0.5] + [1.0] * (more - 1)
            yield [1.0] * (more - 1) + [0.5]
        if more > 2:
            yield [0.5] + [1.0] * (more - 2) + [0.5]


def _longest(prompt_tokens: int, most_tokens: int) -> tuple[int, ...]:
    whole, rest = divmod(prompt_tokens, most_tokens)
    return (most_tokens,) * whole + (rest,) * (rest > 0)


def _cut(tokens: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole lengths in proportion to the weights, that add up."""
    total, passed, cut, lengths = sum(weights), 0.0, 0, []
    for weight in weights:
        passed += weight
        end = round(tokens * passed / total)
        lengths.append(end - cut)
        cut = end
    return tuple(lengths)
