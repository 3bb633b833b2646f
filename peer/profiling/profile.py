"""What one device does with one model, as a value, and what it predicts of a step. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.routing.cost.cost import (
    CostModel,
    decode_context_ms,
    layer_ms_at,
    prefill_context_ms,
    prefill_layer_ms,
)

_COST = CostModel()
FLOOR_MS = 1e-4
"""No measurement is below this, so that nobody divides by zero."""
WARMING = 2.0
"""A step that takes so many times as long as the next one was not yet warm."""
PIECE_TOKENS = (16, 32, 64, 128, 256, 512)
"""Tokens of the pieces whose time is measured, or found from that of parts of prompts."""
_COMPILED = 4.0, 100.0
"""A first step of so many times the others' and so many milliseconds more was, or read, what the others found."""


@dataclass(frozen=True, slots=True)
class SliceLatency:
    """One layer for so many tokens of a prompt, in a step that is computed in slices."""

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
    slice_latencies: tuple[SliceLatency, ...] = ()
    """As measured, in order of tokens; none where there was no time for it, or steps are not computed in pieces."""
    threads: int = 1
    """With so many all of it was measured, and the peer computes."""
    step_ms: float = 0.0
    """What a step takes however many layers it goes through; 0 where the model has too few to tell it apart."""
    steady: bool = True
    """Whether steps had stopped getting faster when they were measured: before that they compile, or read weights."""


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
        return len(self.decode_contexts) + sum([rows for rows, _ in self.prefills])


def predicted_ms(profile: Profile, work: StepWork) -> float:
    """The time of that step. With parts of prompts in it, all its rows count as such."""
    rows = work.rows
    if work.prefills:
        layer_ms = prefill_layer_ms(profile.layer_latencies, rows, _COST, profile.prefill_latencies)
    else:
        layer_ms = layer_ms_at(profile.layer_latencies, rows)
    if profile.decode_context_ms:
        layer_ms += sum([decode_context_ms(profile.decode_context_ms, one) for one in work.decode_contexts])
    if profile.prefill_context_ms:
        layer_ms += sum([prefill_context_ms(profile.prefill_context_ms, *one) for one in work.prefills])
    ends_ms = profile.embed_ms if work.starts else 0.0
    if work.ends:
        sessions = len(work.decode_contexts) + len(work.prefills)
        ends_ms += profile.head_ms * _growth(profile.layer_latencies, sessions)
    return profile.step_ms + work.layers * layer_ms + ends_ms


def _growth(latencies: Sequence[LayerLatency], rows: int) -> float:
    """How many times as long so many rows take as one: in the head, a product as a layer's are, as in a layer."""
    return max(1.0, layer_ms_at(latencies, rows) / layer_ms_at(latencies, 1))


def separated(
    one: Mapping[int, float], several: Mapping[int, float], layers: int
) -> tuple[dict[int, float], float]:
    """What one layer takes by batch size, and what a step takes beside its layers.

    `several` are the times of steps through `layers` layers by batch size, that of 1 among them; `one` those through
    one of them, for some of these sizes, or for none where that is all there is. A layer is what each further one adds;
    at least FLOOR_MS. What remains of the step of one session is not the layer's, and as much is taken off where only
    steps through several were measured.
    """
    added = {size: (several[size] - taken_ms) / (layers - 1) for size, taken_ms in one.items()}
    step_ms = max(0.0, one[1] - max(FLOOR_MS, added[1])) if 1 in added else 0.0
    rest = {size: (taken_ms - step_ms) / layers for size, taken_ms in several.items()}
    return {size: max(FLOOR_MS, (rest | added)[size]) for size in several}, step_ms


def still_warming(times_ms: Sequence[float]) -> bool:
    """Whether the first step took what nothing but compiling, or reading weights, explains."""
    if len(times_ms) < 2:
        return False
    usual_ms, (times, more_ms) = statistics.median(times_ms[1:]), _COMPILED
    return times_ms[0] > max(times * usual_ms, usual_ms + more_ms)


def slices_of(profile: Profile) -> tuple[SliceLatency, ...]:
    """The times of pieces, in order of tokens: as measured, or where none was, those of steps of one layer with as many
    rows of a prompt. What pieces take when they are computed corrects either."""
    if profile.slice_latencies:
        return profile.slice_latencies
    return tuple(
        SliceLatency(
            tokens,
            profile.step_ms
            + prefill_layer_ms(profile.layer_latencies, tokens, _COST, profile.prefill_latencies),
            prefill_context_ms(profile.prefill_context_ms, tokens, 1000),
        )
        for tokens in PIECE_TOKENS
    )


def slice_layer_ms(measured: Sequence[SliceLatency], tokens: int, context_tokens: int) -> float:
    """One layer for so many tokens behind that context: in between the measured numbers of tokens, of which there is at
    least one, and in proportion to the largest beyond."""
    largest = measured[-1]
    if tokens >= largest.tokens:
        low, high, share, scale = largest, largest, 0.0, tokens / largest.tokens
    else:
        above = next(index for index, one in enumerate(measured) if tokens < one.tokens)
        low, high, scale = measured[max(0, above - 1)], measured[above], 1.0
        share = max(0, tokens - low.tokens) / (high.tokens - low.tokens) if high is not low else 0.0

    def at(one: SliceLatency) -> float:
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


def plausible_slices(measured: Sequence[SliceLatency]) -> tuple[SliceLatency, ...]:
    """The same, in order of tokens, without what only a busy moment explains: fewer tokens take no longer than more,
    and each of them no less. Of two that disagree the one with more tokens is believed: it took longest to measure."""
    cleaned: list[SliceLatency] = []
    for one in reversed(measured):
        if cleaned:
            more = cleaned[-1]
            layer_ms, context_ms = (
                max(high_ms * one.tokens / more.tokens, min(low_ms, high_ms))
                for low_ms, high_ms in ((one.layer_ms, more.layer_ms), (one.context_ms, more.context_ms))
            )
            cleaned.append(SliceLatency(one.tokens, layer_ms, context_ms))
        else:
            cleaned.append(one)
    return tuple(reversed(cleaned))
