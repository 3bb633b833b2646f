"""What one device does with one model, as a value, and what it predicts of a step. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from molink.dht.records import LayerLatency, PrefillLatency
from molink.routing.cost import (
    CostModel,
    decode_context_ms,
    layer_ms_at,
    prefill_context_ms,
    prefill_layer_ms,
)

_COST = CostModel()


@dataclass(frozen=True, slots=True)
class PieceLatency:
    """One layer for so many tokens of a prompt, in a step that is computed in pieces."""

    tokens: int
    layer_ms: float
    """With nothing before them."""
    context_ms: float
    """What each 1000 tokens of context add to it."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured at start-up, or refined by what steps took since."""

    layer_latencies: tuple[LayerLatency, ...]
    """One layer in the middle of the model, in order of batch size, from 1 on."""
    embed_ms: float
    """What the first hop adds for one token: its embedding."""
    head_ms: float
    """What the last hop adds for one token: final norm and language-model head."""
    load_bytes_per_s: float
    """From weights on disk (or in the system's file cache) to the first step done with them."""
    prefill_latencies: tuple[PrefillLatency, ...] = ()
    """The same layer for part of a prompt, in order of tokens."""
    decode_context_ms: float = 0.0
    """What 1000 further tokens of context add to the decode step of one sequence through one layer."""
    prefill_context_ms: float = 0.0
    """What 1000 tokens of context add to one token of a prompt through one layer."""
    piece_latencies: tuple[PieceLatency, ...] = ()
    """In order of tokens; none where steps are not computed in pieces."""
    threads: int = 1
    """With so many all of it was measured, and the peer computes."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes, as far as its time depends on it."""

    layers: int
    starts: bool
    """Whether it embeds tokens."""
    ends: bool
    """Whether it makes logits."""
    decode_contexts: tuple[int, ...] = ()
    """Of each decode row: the tokens that its sequence had before."""
    prefills: tuple[tuple[int, int], ...] = ()
    """Of each part of a prompt: its rows, and the tokens that its sequence had before."""

    @property
    def rows(self) -> int:
        return len(self.decode_contexts) + sum(rows for rows, _ in self.prefills)


def predicted_ms(profile: Profile, work: StepWork) -> float:
    """The time of that step. With parts of prompts in it, all its rows count as such."""
    if work.prefills:
        layer_ms = prefill_layer_ms(profile.layer_latencies, work.rows, _COST, profile.prefill_latencies)
    else:
        layer_ms = layer_ms_at(profile.layer_latencies, work.rows)
    layer_ms += sum(decode_context_ms(profile.decode_context_ms, one) for one in work.decode_contexts)
    layer_ms += sum(prefill_context_ms(profile.prefill_context_ms, *one) for one in work.prefills)
    ends_ms = (profile.embed_ms if work.starts else 0.0) + (profile.head_ms if work.ends else 0.0)
    return work.layers * layer_ms + ends_ms


def piece_layer_ms(measured: Sequence[PieceLatency], tokens: int, context_tokens: int) -> float:
    """One layer for so many tokens behind that context: in between the measured numbers of tokens, of which there is at
    least one, and in proportion to the largest beyond."""
    largest = measured[-1]
    if tokens >= largest.tokens:
        low, high, share, scale = largest, largest, 0.0, tokens / largest.tokens
    else:
        above = next(index for index, one in enumerate(measured) if tokens < one.tokens)
        low, high, scale = measured[max(0, above - 1)], measured[above], 1.0
        share = max(0, tokens - low.tokens) / (high.tokens - low.tokens) if high is not low else 0.0

    def at(one: PieceLatency) -> float:
        return one.layer_ms + one.context_ms * context_tokens / 1000

    return scale * (at(low) + share * (at(high) - at(low)))


def at_most_the_next(measured: Sequence[LayerLatency]) -> tuple[LayerLatency, ...]:
    """The same without what only a busy moment explains: a batch cannot take longer than a larger one."""
    least_ms = math.inf
    cleaned: list[LayerLatency] = []
    for latency in reversed(measured):
        least_ms = min(least_ms, latency.layer_ms)
        cleaned.append(LayerLatency(latency.batch_size, least_ms))
    return tuple(reversed(cleaned))


def plausible_pieces(measured: Sequence[PieceLatency]) -> tuple[PieceLatency, ...]:
    """The same, in order of tokens, without what only a busy moment explains: fewer tokens take no longer than more,
    and each of them no less. Of two that disagree the one with more tokens is believed: it took longest to measure."""
    cleaned: list[PieceLatency] = []
    for one in reversed(measured):
        if cleaned:
            more = cleaned[-1]
            layer_ms, context_ms = (
                max(high_ms * one.tokens / more.tokens, min(low_ms, high_ms))
                for low_ms, high_ms in ((one.layer_ms, more.layer_ms), (one.context_ms, more.context_ms))
            )
            cleaned.append(PieceLatency(one.tokens, layer_ms, context_ms))
        else:
            cleaned.append(one)
    return tuple(reversed(cleaned))
