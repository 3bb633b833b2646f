"""What goes into a step and what comes out, as values, and the headers in which it travels."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from molink.peer.backend import StageEngine
from molink.peer.profiling.profile import StepWork
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import ProtocolError
from molink.peer.serving.sessions import HopSession
from molink.shards import codec
from molink.shards.block_allocator import PoolFull
from molink.shards.engine import Rows
from molink.shards.sampling import Sampled, SampleRequest, sample
from molink.shards.spec import ModelSpec, Span


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """One session's share of a step, waiting for the engine."""

    session: HopSession
    step: int
    count: int
    """Rows: tokens that this step adds."""
    token_ids: tuple[int, ...] | None
    """At the head."""
    hidden: torch.Tensor | None
    """Elsewhere: [count, hidden_size]."""
    sample: bool
    """The tail draws a token after the last row."""
    prefill: bool
    arrived_s: float
    timings: tuple[pb.HopTiming, ...]
    """What earlier hops took, if the session is traced."""
    prefix_tokens: int = 0
    """In step 0: what the cache holds already of the tokens before these; more that it may hold is not wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What the engine made of a micro-batch."""

    inputs: tuple[StepInput, ...]
    hidden: torch.Tensor | None
    """Where the span does not end the model: [sum of counts, hidden_size], in order."""
    sampled: tuple[Sampled, ...]
    """At the tail: one for each input that asked, in order."""
    positions: tuple[int, ...]
    """Where these stand in their sequences."""
    started_s: float
    compute_s: float
    work: StepWork | None
    """None: nothing was computed, for every session had ended, or not at once."""


def compute(engine: StageEngine, inputs: tuple[StepInput, ...]) -> StepOutput:
    """Runs a micro-batch of one span, and draws tokens where it ends the model. On the engine's thread.

    A session that ended while it waited is left out.
    """
    started_s = time.perf_counter()
    span = inputs[0].session.span
    inputs = tuple(one for one in inputs if one.session.cache is not None and not one.session.cache.closed)
    if not inputs:
        return StepOutput((), None, (), (), started_s, 0.0, None)
    for one in inputs:
        if one.step == 0 and one.session.cache is not None:
            engine.begin_behind(one.session.cache, one.prefix_tokens)
    work = _work(engine.spec, inputs)
    rows = [
        Rows(cache, one.count, one.token_ids, one.sample)
        for one in inputs
        if (cache := one.session.cache) is not None
    ]
    hidden = None
    if span.start > 0:
        parts = [one.hidden for one in inputs if one.hidden is not None]
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
    result = _step(engine, span, rows, hidden)
    output = drawn(engine.spec, inputs, result, started_s)
    return replace(output, compute_s=time.perf_counter() - started_s, work=work)


def drawn(
    spec: ModelSpec, inputs: tuple[StepInput, ...], result: torch.Tensor, started_s: float
) -> StepOutput:
    """What the engine gave for these, and tokens where that is logits."""
    if inputs[0].session.span.stop < spec.layers:
        return StepOutput(inputs, result, (), (), started_s, 0.0, None)
    asked = [
        (one.session.plan, one.session.cache.length) for one in inputs if one.sample and one.session.cache
    ]
    sampled = sample(result, [SampleRequest(plan.params, plan.seed, position) for plan, position in asked])
    positions = tuple(position for _, position in asked)
    return StepOutput(inputs, None, tuple(sampled), positions, started_s, 0.0, None)


def _step(engine: StageEngine, span: Span, rows: list[Rows], hidden: torch.Tensor | None) -> torch.Tensor:
    """All rows together if the KV cache has room for them at once, else one half after the other."""
    try:
        return engine.step(span, rows, hidden)
    except PoolFull:
        if len(rows) == 1:
            raise
    half = len(rows) // 2
    first = sum(row.count for row in rows[:half])
    parts = (None, None) if hidden is None else (hidden[:first], hidden[first:])
    for row in rows[half:]:
        row.cache.hold(held=True)
    try:
        before = _step(engine, span, rows[:half], parts[0])
    finally:
        for row in rows[half:]:
            row.cache.hold(held=False)
    return torch.cat([before, _step(engine, span, rows[half:], parts[1])])


def _work(spec: ModelSpec, inputs: Sequence[StepInput]) -> StepWork:
    """What is about to be computed, for whoever predicts such steps."""
    span = inputs[0].session.span
    before = [(one, one.session.cache.length) for one in inputs if one.session.cache is not None]
    return StepWork(
        layers=len(span),
        starts=span.start == 0,
        ends=span.stop == spec.layers,
        decode_contexts=tuple(tokens for one, tokens in before if not one.prefill),
        prefills=tuple((one.count, tokens) for one, tokens in before if one.prefill),
    )


def read_activations(payload: memoryview, header: pb.Activations, spec: ModelSpec) -> list[torch.Tensor]:
    """The rows of each session that the header lists, [its rows, hidden_size].

    Raises:
        ProtocolError: the payload is not what the header says, or of another width than the model's.
    """
    counts = [row.rows for row in header.rows]
    if header.hidden_size != spec.hidden_size:
        raise ProtocolError(f"activations of {header.hidden_size} numbers are not this model's")
    try:
        hidden = codec.decode(payload, sum(counts), header.hidden_size, spec.dtype, encoding=header.dtype)
    except ValueError as error:
        raise ProtocolError(f"activations: {error}") from error
    parts = torch.split(hidden, counts)
    if len(parts) == 1:
        return [hidden]
    # one that waits must not keep the memory of those that came with it
    return [part.clone() if row.prefill else part for row, part in zip(header.rows, parts, strict=True)]


def split_by_next(
    output: StepOutput, hidden: torch.Tensor
) -> dict[tuple[str, str], list[tuple[StepInput, torch.Tensor]]]:
    """A step's rows by the peer that they go to and the encoding that they go in, in order."""
    parts: dict[tuple[str, str], list[tuple[StepInput, torch.Tensor]]] = {}
    first = 0
    for one in output.inputs:
        way = one.session.next_peer_id, one.session.sends_in
        parts.setdefault(way, []).append((one, hidden[first : first + one.count]))
        first += one.count
    return parts


def row_header(one: StepInput, timings: Sequence[pb.HopTiming]) -> pb.ActivationRow:
    """Whose rows these are."""
    key = one.session.key
    row = pb.ActivationRow(
        session=key.session,
        epoch=key.epoch,
        step=one.step,
        rows=one.count,
        sample=one.sample,
        prefill=one.prefill,
        prefix_tokens=one.prefix_tokens,
    )
    row.timings.extend(timings)
    return row


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
