"""What goes into a step and what comes out, as values, and the headers in which it travels.

A session's fault is its own: whatever is wrong with one, the others of its micro-batch get what they would have got
without it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import torch

from molink.peer.compute.backend import StageEngine, StepResult
from molink.peer.engine.sessions import ServedSession
from molink.peer.hop.frames import OutgoingFrame, frames_of
from molink.peer.hop.session import HopStep, work_of
from molink.peer.masks.mask_worker import NextMask
from molink.peer.profiling.profile import StepWork
from molink.peer.redundancy.input_log import token_rows
from molink.peer.scheduling.prompt_gathering import PredictedTime
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards import codec
from molink.shards.batching.engine import Rows
from molink.shards.batching.partial_step import PartialStep
from molink.shards.sampling.prompt_scores import PromptScores
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import Outcome, Sampled, sample_each
from molink.shards.sampling.token_history import SeenTokens
from molink.shards.spec import Span


@dataclass(slots=True, eq=False)
class StepPayload:
    """What a step computes, on its way through this peer."""

    token_ids: tuple[int, ...] | None = None
    """At the head."""
    hidden: torch.Tensor | None = None
    """Elsewhere: [tokens, hidden_size]."""
    encoded: bytes | memoryview = b""
    """Its rows as they came, each by itself, if they are logged."""
    timings: tuple[pb.HopTiming, ...] = ()
    """What earlier hops took, if the session is traced."""
    guesses: tuple[int, ...] = ()
    """At the tail: what it knows of the step's guesses, and of what depends on them. The engine's thread sets it."""
    requests: tuple[SampleRequest, ...] = ()
    """At the tail: how the step's tokens are drawn. The engine's thread sets it when the step begins."""
    expected: tuple[int, ...] = ()
    """At the head: what its tail says that probably comes behind."""
    prompt_logprobs: bytes = b""
    """At the tail, with the first token behind a prompt whose log-probabilities are wanted. The engine's thread sets
    it."""
    partial: PartialStep | None = None
    """What the engine has of it, where it is computed in slices. The engine's thread sets it."""

    def inputs(self) -> torch.Tensor | None:
        """`hidden` as layers may write over it: a copy where the same memory is logged as it came. Copied when the
        engine comes to it, since a prompt's chunk takes milliseconds that the event loop has not got."""
        if self.hidden is None or not isinstance(self.encoded, memoryview):
            return self.hidden
        return self.hidden.clone()


StepInput: TypeAlias = HopStep[ServedSession, StepPayload]
"""One session's share of a step, waiting for the engine."""
StepFrame: TypeAlias = OutgoingFrame[ServedSession, StepPayload]
"""Rows of a step that go to one peer in one frame."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What the engine made of a micro-batch. All of it is on the host."""

    inputs: tuple[StepInput, ...]
    hidden: torch.Tensor | None
    """Where the span does not end the model and nothing is in `frames`: [sum of tokens, hidden_size], in order."""
    sampled: tuple[tuple[Sampled, ...], ...]
    """At the tail: of each input that asked, in order, what is drawn behind the row before its guesses, and behind each
    guess, should that be right."""
    positions: tuple[int, ...]
    """Where the first of these stand in their sequences."""
    started_s: float
    compute_s: float
    work: StepWork | None
    """None: nothing was computed, for every session had ended, or not at once, or more than a step's work."""
    failures: "tuple[StepFailure, ...]" = ()
    """Those of the micro-batch that are not among `inputs` because they failed, alone."""
    frames: tuple[tuple[StepFrame, torch.Tensor], ...] = ()
    """Instead of `hidden`, where that was on a device: encoded there."""

    @property
    def everyone(self) -> tuple[StepInput, ...]:
        """Whose steps these were, whatever came of them."""
        return *self.inputs, *(failure.one for failure in self.failures)


@dataclass(frozen=True, slots=True, eq=False)
class StepFailure:
    """One session's share of a step that came to nothing."""

    one: StepInput
    error: Exception


def compute(engine: StageEngine, inputs: tuple[StepInput, ...]) -> StepOutput:
    """Runs a micro-batch of one span, and draws tokens where it ends the model. On the engine's thread.

    A session that ended while it waited is left out.
    """
    started_s = time.perf_counter()
    span = inputs[0].session.span
    failures: list[StepFailure] = []
    inputs = _begun(engine, inputs, failures)
    if not inputs:
        return StepOutput((), None, (), (), started_s, 0.0, None, tuple(failures))
    work = work_of(inputs, engine.spec.layers)
    stepped, result = _step(engine, span, inputs, failures)
    if result is None:
        return StepOutput((), None, (), (), started_s, 0.0, None, tuple(failures))
    scores = any(map(scores_of, [one for one in stepped if one.prefill]))  # that takes longer than steps do
    return drawn(engine, stepped, result, started_s, None if failures or scores else work, failures)


def drawn(
    engine: StageEngine,
    inputs: tuple[StepInput, ...],
    result: StepResult,
    started_s: float,
    work: StepWork | None = None,
    failed_before: Sequence[StepFailure] = (),
) -> StepOutput:
    """What the engine gave for these, on the host, and tokens where that is logits: the step is over on the device too
    then. `work` and `failed_before` are the step's own."""
    if isinstance(result, torch.Tensor) and inputs[0].session.span.stop < engine.spec.layers:
        hidden, frames = (result, ()) if result.is_cpu else (None, _encoded(engine, inputs, result))
        taken_s = time.perf_counter() - started_s
        return StepOutput(inputs, hidden, (), (), started_s, taken_s, work, tuple(failed_before), frames)
    asked = [one for one in inputs if one.draws and one.session.cache]
    if not asked:
        engine.to_host(())
    positions = [one.session.cache.length - one.guesses for one in asked if one.session.cache]
    if isinstance(result, torch.Tensor):
        requests = [request for one in asked for request in one.payload.requests]
        drawn_rows = iter(sample_each(result, requests, recorded=engine.recorded_drawing))
    else:
        drawn_rows = iter(result)
    sampled: list[tuple[Sampled, ...]] = []
    failures: dict[int, StepFailure] = {}
    for one, at in zip(asked, positions, strict=True):
        found = _drawn_of(one, at, [*islice(drawn_rows, one.draws)])
        if isinstance(found, Exception):
            failures[id(one)] = StepFailure(one, found)
        else:
            sampled.append(found)
    if failures:
        inputs = tuple(one for one in inputs if id(one) not in failures)
        positions = [at for one, at in zip(asked, positions, strict=True) if id(one) not in failures]
    failed, taken_s = (*failed_before, *failures.values()), time.perf_counter() - started_s
    return StepOutput(inputs, None, tuple(sampled), tuple(positions), started_s, taken_s, work, failed)


def _drawn_of(one: StepInput, position: int, outcomes: Sequence[Outcome]) -> tuple[Sampled, ...] | Exception:
    """The tokens that a session's step gives from that position on, as far as they are sound, or why there are none."""
    try:
        if one.session.drawing is not None:
            one.payload.prompt_logprobs = one.session.drawing.prompt_logprobs(position)
    except ValueError as error:
        return error
    sound: list[Sampled] = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            return tuple(sound) or outcome
        sound.append(outcome)
    return tuple(sound)


def scores_of(one: StepInput) -> PromptScores | None:
    """What takes the log-probabilities of the prompt's tokens; None: nobody wants them of this step."""
    drawing = one.session.drawing
    return drawing.scores() if drawing is not None and one.prefill else None


def _begun(
    engine: StageEngine, inputs: tuple[StepInput, ...], failures: list[StepFailure]
) -> tuple[StepInput, ...]:
    """Those that have not ended, with their caches cut back to where their steps begin."""
    begun = []
    for one in inputs:
        cache = one.session.cache
        if cache is None or cache.closed:
            continue
        try:
            if cache.length != one.position:
                engine.begin_behind(cache, one.position)
            settle_draws(one)
        except Exception as error:  # noqa: BLE001 - a session's boundary: the others' steps go on without it
            failures.append(StepFailure(one, error))
        else:
            begun.append(one)
    return tuple(begun)


def _known_guesses(one: StepInput) -> tuple[int, ...]:
    """The step's guesses, as far as its tail knows them: of those that have not come nothing is accepted."""
    if one.payload.token_ids is not None:
        return one.payload.token_ids[-one.guesses :]
    step, guesses = one.session.progress.told_guesses
    return guesses if step == one.step else ()


def _step(
    engine: StageEngine, span: Span, inputs: tuple[StepInput, ...], failures: list[StepFailure]
) -> tuple[tuple[StepInput, ...], StepResult | None]:
    """Who has been stepped, and the result; None where that is nobody.

    All rows together if that can be, else one half after the other: the KV cache may have no room for all at once, and
    what is wrong with one session is found so. A step that fails leaves caches as they were, or they are cut back.
    """
    rows = [
        Rows(
            cache,
            one.tokens,
            one.payload.token_ids,
            one.draws,
            one.payload.requests,
            scores_of(one) if one.prefill else None,
        )
        for one in inputs
        if (cache := one.session.cache) is not None
    ]
    lengths = [row.cache.length for row in rows]
    hidden = None
    if span.start > 0:
        parts = [one.payload.hidden for one in inputs if one.payload.hidden is not None]
        hidden = inputs[0].payload.inputs() if len(inputs) == 1 else torch.cat(parts)
    try:
        return inputs, engine.step(span, rows, hidden)
    except Exception as error:  # noqa: BLE001 - a session's boundary: who it is, is found by trying again
        if len(inputs) == 1:
            failures.append(StepFailure(inputs[0], error))
            return (), None
    inputs = _cut_back(inputs, lengths, failures)
    half = max(1, len(inputs) // 2)
    later = [one.session.cache for one in inputs[half:] if one.session.cache is not None]
    for cache in later:
        cache.hold(held=True)
    try:
        stepped, result = _step(engine, span, inputs[:half], failures) if inputs else ((), None)
    finally:
        for cache in later:
            cache.hold(held=False)
    if not later:
        return stepped, result
    others, behind = _step(engine, span, inputs[half:], failures)
    if result is None or behind is None:
        return stepped + others, behind if result is None else result
    return stepped + others, _joined(result, behind)


def settle_draws(one: StepInput) -> None:
    """A step begins: how its tokens are drawn, if it draws here, is settled now, since the client may say more of the
    sequence while the step is computed. Raises ValueError where that is not known."""
    if not one.draws or not one.session.is_tail:
        return
    payload, drawing, position = one.payload, one.session.drawing, one.position + one.tokens - one.guesses
    if one.draws > 1:
        payload.guesses = _known_guesses(one)
    if drawing is None:
        payload.requests = tuple([_request(one, position + at) for at in range(one.draws)])
        return
    known = drawing.drawn_by(position, payload.guesses)
    payload.guesses = payload.guesses[: len(known) - 1]
    requests = [_request(one, position + at, *by) for at, by in enumerate(known)]
    # behind guesses that are not known nothing is accepted
    payload.requests = (*requests[: one.draws], *requests[-1:] * (one.draws - len(requests)))


def _request(
    one: StepInput, position: int, seen: SeenTokens | None = None, mask: NextMask | None = None
) -> SampleRequest:
    """How the session's token at that position is chosen."""
    plan = one.session.plan
    left_out = plan.params.stop_token_ids if position < plan.prompt_tokens + plan.params.min_tokens else ()
    if mask is None:
        return SampleRequest(plan.params, plan.seed, position, seen, left_out)
    return SampleRequest(plan.params, plan.seed, position, seen, () if mask.ends else left_out, mask.allowed)


def _joined(first: StepResult, behind: StepResult) -> StepResult:
    if isinstance(first, torch.Tensor) and isinstance(behind, torch.Tensor):
        return torch.cat([first, behind])
    return [*first, *behind]


def _cut_back(
    inputs: tuple[StepInput, ...], lengths: Sequence[int], failures: list[StepFailure]
) -> tuple[StepInput, ...]:
    """Those whose cache is as it was before the step that failed."""
    kept = []
    for one, length in zip(inputs, lengths, strict=True):
        cache = one.session.cache
        try:
            if cache is not None and cache.length > length:
                cache.truncate(length, same_tokens=True)
        except Exception as error:  # noqa: BLE001 - a session's boundary, as above
            failures.append(StepFailure(one, error))
        else:
            kept.append(one)
    return tuple(kept)


def expected_ms(predicted_ms: PredictedTime | None, inputs: Sequence[StepInput], layers: int) -> float | None:
    """What computing these should take in a model of so many layers, and a slice of them at most; None: not known."""
    if predicted_ms is None or any(map(scores_of, inputs)):
        return None
    return predicted_ms(work_of(inputs, layers))


def log_inputs(one: StepInput) -> None:
    """The step has been computed: what came in for it is kept for copies, if copies are made."""
    log, payload = one.session.inputs, one.payload
    if log is not None:
        rows = payload.encoded if payload.token_ids is None else token_rows(payload.token_ids)
        log.record(one.position, rows, one.guesses)


def rows_of(frame: StepFrame, hidden: torch.Tensor) -> torch.Tensor:
    """The frame's rows of a micro-batch's output."""
    parts = [hidden[first : first + one.tokens] for one, first in zip(frame.steps, frame.firsts, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _encoded(
    engine: StageEngine, inputs: tuple[StepInput, ...], hidden: torch.Tensor
) -> tuple[tuple[StepFrame, torch.Tensor], ...]:
    """Rows on a device as they go out, on the host, so that nobody else has to touch it."""
    frames = frames_of(inputs, prompts_apart=True)
    there = engine.to_host([codec.encoded(rows_of(frame, hidden), frame.encoding) for frame in frames])
    return tuple(zip(frames, there, strict=True))


def row_header(one: StepInput, timings: Sequence[pb.HopTiming]) -> pb.ActivationRow:
    """Whose rows these are."""
    key = one.session.key
    row = pb.ActivationRow(
        session=key.session,
        epoch=key.epoch,
        step=one.step,
        rows=one.tokens,
        sample=one.draws > 0,
        guesses=one.guesses,
        prefill=one.prefill,
        position=one.position,
    )
    row.timings.extend(timings)
    return row


def trip_messages(
    one: StepInput, drawn: Sequence[Sampled], position: int, timings: Sequence[pb.HopTiming]
) -> list[pb.Token]:
    """The tokens that a step gives: as long as the guess is what was drawn, the one behind it counts too."""
    tokens: list[pb.Token] = []
    guesses = one.payload.guesses
    for place, token in enumerate(drawn):
        tokens.append(token_message(one, token, position + place, () if place else timings))
        goes_on = place < len(guesses) and guesses[place] == token.token_id
        if not goes_on or tokens[-1].finish != pb.NOT_FINISHED:
            break
    tokens[0].guessed = one.guesses
    tokens[0].prompt_logprobs = one.payload.prompt_logprobs
    return tokens


def token_message(one: StepInput, drawn: Sampled, position: int, timings: Sequence[pb.HopTiming]) -> pb.Token:
    """A drawn token, and whether the generation ends with it."""
    plan = one.session.plan
    finish = pb.NOT_FINISHED
    if drawn.token_id in plan.params.stop_token_ids:
        finish = pb.STOP
    elif (
        position + 1 - plan.prompt_tokens >= plan.params.max_new_tokens
        or position + 1 >= plan.capacity_tokens
    ):
        finish = pb.LENGTH
    token = pb.Token(
        session=plan.key.session,
        epoch=plan.key.epoch,
        step=one.step,
        position=position,
        token_id=drawn.token_id,
        finish=finish,
        logprob=drawn.logprob,
    )
    token.top.extend(pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in drawn.top)
    token.timings.extend(timings)
    return token
