"""Session request: what one generation asks of a swarm, and the descriptor that tells every hop of its circuits."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from molink.client.epochs.kept_leases import PlannedRoute
from molink.client.errors import InvalidRequest
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import MAX_HEADER_BYTES
from molink.shards.kv.prefix import MAX_PREFIX_BLOCKS, NAME_BYTES, block_names
from molink.shards.spec import (
    GRAMMARS,
    MOST_PROMPT_LOGPROBS_BYTES,
    PENALTIES,
    PROMPT_LOGPROBS,
    ModelSpec,
    SamplingParams,
    prompt_logprobs_bytes,
)

GUESS_SCOPE: ContextVar[bytes] = ContextVar("GUESS_SCOPE", default=b"")
"""Generations of one scope are guessed from each other: a client that asks for several users sets each user's own, of
at most 16 bytes, around the call that begins a generation."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a generation's tokens may be guessed from."""

    wanted: bool = True
    """Whether they are guessed at all. The tokens are the same."""
    prediction: Sequence[int] = ()
    """What will be generated, as far as whoever asks can tell."""
    scope: bytes = b""
    """As GUESS_SCOPE."""


SPECULATES = Speculation()


async def begin_at_once(_: PlannedRoute) -> None:
    """Waits for nobody."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """Session request: the prompt's token ids and how to go on from them."""

    prompt: Sequence[int]
    params: SamplingParams
    trace: bool = False
    """Whether each token carries the times of its hops."""
    activation_codec: str = "none"
    partners: bool = True
    """Whether other peers keep copies of its hops' KV caches, to go on from after a loss."""
    speculation: Speculation = SPECULATES
    trace_context: bytes = b""
    """Of the span that hops' spans are parts of (`molink.tracing`); empty: they write none."""
    begins_on: PlannedRoute | None = None
    """The circuit to try before another is planned."""
    stands: Callable[[PlannedRoute], Awaitable[None]] = begin_at_once
    """Told of each circuit that stands; the session begins on it when this returns."""


def describe_session(spec: ModelSpec, asked: SessionRequest, prefix_key: bytes) -> pb.SessionDescriptor:
    """Returns the descriptor of a new session, in epoch 0 and without hops.

    `prefix_key` (32 bytes): with which the client names the blocks of its prompts.

    Raises:
        InvalidRequest: prompt, prediction and new tokens together are more than a message takes.
    """
    prompt, params = asked.prompt, asked.params
    check_session(spec, asked)
    return pb.SessionDescriptor(
        session=secrets.token_bytes(16),
        epoch=0,
        model_hash=spec.model_hash,
        sampling=_sampling(spec, params),
        prompt_tokens=len(prompt),
        capacity_tokens=capacity_of(spec, asked),
        trace=asked.trace,
        trace_context=asked.trace_context,
        prefix_blocks=b"".join(block_names(prompt[:-1], prefix_key)[:MAX_PREFIX_BLOCKS]),
        activation_codec="" if asked.activation_codec == "none" else asked.activation_codec,
        speculates=asked.speculation.wanted,
    )


def check_session(spec: ModelSpec, asked: SessionRequest) -> None:
    """Raises `InvalidRequest` as `describe_session` does."""
    _require_sendable(asked, spec)
    _require_scorable(asked)


def start_of(
    template: pb.SessionDescriptor, speculation: Speculation, history: Sequence[int], position: int
) -> pb.Start:
    """Returns what a head begins the descriptor's epoch with: the sequence so far, stepped from that position on."""
    return pb.Start(
        session=template.session,
        epoch=template.epoch,
        token_ids=history,
        position=position,
        prediction=speculation.prediction if speculation.wanted else (),
        guess_scope=speculation.scope,
    )


def needs_history(sampling: pb.Sampling) -> bool:
    """Returns whether a tail has to know the tokens before those that it draws."""
    penalties = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty
    return bool(penalties) or sampling.HasField("grammar") or sampling.HasField("prompt_logprobs")


def needed_ability(sampling: pb.Sampling) -> str:
    """Returns what the tail has to announce for a session to be drawn as asked; empty: nothing."""
    if sampling.HasField("grammar"):
        return GRAMMARS
    if sampling.HasField("prompt_logprobs"):
        return PROMPT_LOGPROBS
    return PENALTIES if needs_history(sampling) or sampling.min_p or sampling.min_tokens else ""


def further_blocks(history: Sequence[int], template: pb.SessionDescriptor, prefix_key: bytes) -> bytes:
    """Returns the names of the blocks that have filled since the descriptor named the prompt's: the next prompt of a
    chat begins with them."""
    named = len(template.prefix_blocks) // NAME_BYTES
    return b"".join(block_names(history, prefix_key)[named:MAX_PREFIX_BLOCKS])


def capacity_of(spec: ModelSpec, asked: SessionRequest) -> int:
    """Returns the longest that the sequence gets, in tokens."""
    return min(len(asked.prompt) + asked.params.max_new_tokens, spec.context_length)


def _require_sendable(asked: SessionRequest, spec: ModelSpec) -> None:
    """Whoever goes on after a loss gets the whole history in one message, so all of it has to fit from the start."""
    prompt, speculation, capacity = asked.prompt, asked.speculation, capacity_of(spec, asked)
    id_bytes = max(1, -(-(spec.vocabulary_size - 1).bit_length() // 7))  # of a varint, at most
    start = start_of(pb.SessionDescriptor(session=bytes(16), epoch=2**32 - 1), speculation, prompt, 0)
    needed = start.ByteSize() + (capacity - len(prompt)) * id_bytes
    if needed > MAX_HEADER_BYTES:
        raise InvalidRequest(
            f"a prompt of {len(prompt)} tokens and {capacity - len(prompt)} new ones take {needed} bytes, and "
            f"{MAX_HEADER_BYTES} fit into a message: shorten the prompt, or ask for fewer tokens",
            "prompt",
        )


def _require_scorable(asked: SessionRequest) -> None:
    """The log-probabilities of a prompt come in one message."""
    likeliest, tokens = asked.params.prompt_logprobs, len(asked.prompt)
    if likeliest is not None and prompt_logprobs_bytes(tokens, likeliest) > MOST_PROMPT_LOGPROBS_BYTES:
        raise InvalidRequest(
            f"log-probabilities of {tokens} prompt tokens, with {likeliest} of the likeliest at each place, take more "
            f"than {MOST_PROMPT_LOGPROBS_BYTES} bytes: ask for fewer of the likeliest, or shorten the prompt",
            "prompt_logprobs",
        )


def _sampling(spec: ModelSpec, params: SamplingParams) -> pb.Sampling:
    stop_ids = params.stop_token_ids if params.ignore_eos else (*spec.stop_token_ids, *params.stop_token_ids)
    return pb.Sampling(
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed if params.seed is not None else secrets.randbits(64),
        stop_token_ids=sorted(set(stop_ids)),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logit_bias=dict(params.logit_bias),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=0.0 if params.repetition_penalty == 1 else params.repetition_penalty,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        grammar=None if params.grammar is None else pb.Grammar(**{params.grammar.kind: params.grammar.text}),
    )
