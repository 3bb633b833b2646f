"""The session table: what this peer knows of each generation that passes through it."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Protocol

from molink.dht.records.announcement import AnnouncementError, verify_facts
from molink.dht.records.records import PeerFacts
from molink.peer.engine.tail_drawing import TailDrawing
from molink.peer.hop.session import HopPlace, HopSession
from molink.peer.memory.leases import LeaseKey
from molink.peer.redundancy.input_log import InputLog
from molink.peer.scheduling.in_flight_limit import Circuit
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError
from molink.routing.cost.encodings import encodings_of_circuit
from molink.routing.cost.pipeline import PipelineStage, stage_of
from molink.routing.routes.copy_forms import CopyForm, form_of
from molink.shards.grammar import Grammar
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.prefix import MAX_PREFIX_BLOCKS, split_names
from molink.shards.spec import (
    KV_BLOCK_TOKENS,
    MOST_PROMPT_LOGPROBS_BYTES,
    ModelSpec,
    SamplingParams,
    Span,
    prompt_logprobs_bytes,
)
from molink.tracing import TraceContext

MAX_HOPS = 256
MAX_LINK_MS = 60_000.0
MIN_UPLINK_MBPS, MAX_UPLINK_MBPS = 1e-3, 1e6
"""What predictions take; a hop that claims more or less is refused."""


@dataclass(frozen=True, slots=True)
class HopPlan:
    """One hop of a session's circuit, checked."""

    peer_id: str
    span: Span
    facts: PeerFacts
    standby: PeerFacts | None = None
    """Who keeps a second copy of the hop's KV cache, and takes its place."""
    standby_form: CopyForm = CopyForm.KEYS_AND_VALUES
    """In which that copy is to go."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """A session's descriptor, checked: who serves what, and how the tail samples."""

    key: LeaseKey
    hops: tuple[HopPlan, ...]
    params: SamplingParams
    seed: int
    prompt_tokens: int
    capacity_tokens: int
    vocabulary: int
    """Token ids are below."""
    trace: bool
    """Whether hops report their times."""
    trace_context: TraceContext | None
    """Of the span that hops' spans are parts of; None: they write none."""
    prefix: tuple[bytes, ...]
    """Names of the prompt's leading blocks, as the client chose them."""
    encodings: tuple[str, ...]
    """How activations travel out of each hop (see `codecs.py`)."""
    stages: tuple[PipelineStage, ...]
    """The circuit for predictions."""
    speculates: bool = False
    """Whether its head may guess tokens."""

    @property
    def circuit(self) -> Circuit:
        """What two sessions have in common that may travel together."""
        return tuple((hop.peer_id, hop.span) for hop in self.hops)

    def span_of(self, hop: int) -> Span:
        return self.hops[hop].span

    def neighbours_of(self, hop: int) -> list[PeerFacts]:
        """Whom that hop has to reach: the next hop, and the previous one if only this end can dial."""
        if len(self.hops) == 1:
            return []
        following = self.hops[(hop + 1) % len(self.hops)].facts
        previous = self.hops[hop - 1].facts
        return [following, previous] if previous.grpc_addresses else [following]


class ServedSession(HopSession):
    """What this peer has of one session, beside what the core knows of it (`peer/hop/session.py`): its plan, its
    client and its KV cache."""

    def __init__(self, plan: SessionPlan, hop: int, owner: Link) -> None:
        """`owner` is the client's link."""
        place = HopPlace(
            plan.circuit, hop, plan.stages, plan.prompt_tokens, plan.capacity_tokens, plan.encodings[hop],
            plan.prompt_tokens + plan.params.max_new_tokens,
        )  # fmt: skip
        super().__init__(plan.key, place)
        self.plan = plan
        self.owner = owner
        self.cache: SequenceCache | None = None
        """Set when the lease is ready."""
        self.standby_peer_id = ""
        """Who keeps a second copy of the cache; empty: nobody."""
        self.standby_form = CopyForm.KEYS_AND_VALUES
        """In which that copy is to go."""
        self.shares = True
        """Whether its blocks may be shared under names: not what came from another peer, nor what is computed upon
        that."""
        self.kept_cache: SequenceCache | None = None
        """That of the epoch before, until the lease is ready."""
        self.held_tokens = 0
        """Tokens of the sequence that the cache held from the start."""
        self.least_tokens = 0
        """The session can begin behind any number of them from this one on, or behind none."""
        self.inputs: InputLog | None = None
        """What its cache was computed from; None where no copies are made."""
        self.drawing: TailDrawing | None = None
        """At the tail: what draws depend on beside the logits; None: nothing."""
        if self.is_tail and plan.params.needs_sequence:
            self.drawing = TailDrawing(plan.params, plan.prompt_tokens, plan.vocabulary)
            self.progress.draws_to, self.progress.scores = 0, plan.params.prompt_logprobs is not None
        self.counted_step = 0
        """Its `next_step` when the lease book was last told that it steps."""

    @property
    def before(self) -> tuple[tuple[str, Span, str], ...]:
        """The hops whose rows its cache is computed from, and in which encodings these travel."""
        hops = zip(self.plan.circuit, self.plan.encodings, strict=True)
        return tuple((*hop, encoding) for hop, encoding in islice(hops, self.place.hop))

    @property
    def receives_in(self) -> str:
        """The encoding of the activations that come from the previous hop."""
        return self.plan.encodings[self.place.hop - 1]


class SessionWatch(Protocol):
    """Hears of sessions as they come and go."""

    def begin(self, session: ServedSession) -> None: ...

    def end(self, session: ServedSession) -> None: ...


class SessionTable:
    """Every session of this peer, at most one epoch of each."""

    def __init__(self, watch: SessionWatch | None = None) -> None:
        self._sessions: dict[bytes, ServedSession] = {}
        self._watch = watch
        self._present = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ServedSession]:
        return iter(tuple(self._sessions.values()))

    def add(self, session: ServedSession) -> None:
        self._sessions[session.key.session] = session
        self._present.set()
        if self._watch is not None:
            self._watch.begin(session)

    def get(self, session: bytes, epoch: int) -> ServedSession | None:
        """The session, if it is still in that epoch: what belongs to an old one is dropped by the caller."""
        found = self._sessions.get(session)
        return found if found is not None and found.key.epoch == epoch else None

    def find(self, session: bytes) -> ServedSession | None:
        """The session, in whatever epoch it is."""
        return self._sessions.get(session)

    async def any_present(self) -> None:
        """Returns when there is a session."""
        await self._present.wait()

    def remove(self, key: LeaseKey) -> ServedSession | None:
        found = self.get(key.session, key.epoch)
        if found is not None:
            del self._sessions[key.session]
            if not self._sessions:
                self._present.clear()
            if self._watch is not None:
                self._watch.end(found)
        return found


def report_failure(session: ServedSession, peer_id: str, code: str, detail: str) -> None:
    """Tells the session's client who failed it; the client decides what follows, in another epoch."""
    span = next((hop.span for hop in session.plan.hops if hop.peer_id == peer_id), session.span)
    session.owner.post(
        pb.Failed(
            session=session.key.session,
            epoch=session.key.epoch,
            peer_id=peer_id,
            start=span.start,
            stop=span.stop,
            code=code,
            detail=detail[:500],
        )
    )


def read_plan(descriptor: pb.SessionDescriptor, spec: ModelSpec) -> SessionPlan:
    """The descriptor as a checked value.

    Raises:
        ProtocolError: it does not describe a session that `spec` could serve.
    """
    if len(descriptor.session) != 16 or descriptor.epoch < 1:
        raise ProtocolError("a session needs an id of 16 bytes and an epoch of 1 or more")
    if descriptor.model_hash != spec.model_hash:
        raise ProtocolError(f"this peer serves {spec.model_hash[:12]}, not {descriptor.model_hash[:12]}")
    if not 1 <= descriptor.prompt_tokens < descriptor.capacity_tokens <= spec.context_length:
        raise ProtocolError(
            f"{descriptor.prompt_tokens} prompt tokens and {descriptor.capacity_tokens} in all do not fit "
            f"the model's context of {spec.context_length}"
        )
    sampling = descriptor.sampling
    told_bytes = prompt_logprobs_bytes(descriptor.prompt_tokens, sampling.prompt_logprobs)
    if sampling.HasField("prompt_logprobs") and told_bytes > MOST_PROMPT_LOGPROBS_BYTES:
        raise ProtocolError(f"log-probabilities of {descriptor.prompt_tokens} prompt tokens are too many")
    hops = _read_hops(descriptor, spec)
    announced = [hop.facts.activation_codecs for hop in hops]
    encodings = encodings_of_circuit(descriptor.activation_codec, spec.dtype, announced)
    return SessionPlan(
        key=LeaseKey(bytes(descriptor.session), descriptor.epoch),
        hops=hops,
        params=_read_params(descriptor.sampling, spec),
        seed=descriptor.sampling.seed,
        prompt_tokens=descriptor.prompt_tokens,
        capacity_tokens=descriptor.capacity_tokens,
        vocabulary=spec.vocabulary_size,
        trace=descriptor.trace,
        trace_context=_read_trace_context(descriptor),
        speculates=descriptor.speculates,
        prefix=_read_prefix(descriptor),
        encodings=encodings,
        stages=tuple(
            _read_stage(
                hop, plan, spec, (descriptor.prompt_tokens + descriptor.capacity_tokens) / 2, encoding
            )
            for hop, plan, encoding in zip(descriptor.hops, hops, encodings, strict=True)
        ),
    )


def _read_trace_context(descriptor: pb.SessionDescriptor) -> TraceContext | None:
    try:
        return TraceContext.from_bytes(descriptor.trace_context)
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def _read_prefix(descriptor: pb.SessionDescriptor) -> tuple[bytes, ...]:
    return _read_names(descriptor.prefix_blocks, descriptor.prompt_tokens // KV_BLOCK_TOKENS)


def read_further_blocks(release: pb.Release, plan: SessionPlan) -> tuple[bytes, ...]:
    """Names of the blocks behind those that the descriptor named. Raises ProtocolError."""
    return _read_names(release.further_blocks, plan.capacity_tokens // KV_BLOCK_TOKENS, len(plan.prefix))


def _read_names(joined: bytes, blocks: int, known: int = 0) -> tuple[bytes, ...]:
    try:
        return split_names(joined, max(0, min(MAX_PREFIX_BLOCKS, blocks) - known))
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def _read_hops(descriptor: pb.SessionDescriptor, spec: ModelSpec) -> tuple[HopPlan, ...]:
    if not 1 <= len(descriptor.hops) <= MAX_HOPS:
        raise ProtocolError(f"a circuit has 1 to {MAX_HOPS} hops, not {len(descriptor.hops)}")
    hops: list[HopPlan] = []
    start = 0
    for hop in descriptor.hops:
        if hop.start != start or not hop.start < hop.stop <= spec.layers:
            raise ProtocolError(
                f"hop [{hop.start}, {hop.stop}) does not continue the circuit at layer {start}"
            )
        if hop.quantization != spec.quantization:
            raise ProtocolError(f"a hop in {hop.quantization!r} does not mix with {spec.quantization!r}")
        start, span = hop.stop, Span(hop.start, hop.stop)
        standby = _read_standby(hop, span, spec)
        form = _read_form(hop, span, spec) if standby is not None else CopyForm.KEYS_AND_VALUES
        hops.append(HopPlan(hop.peer_id, span, _read_facts(hop), standby, form))
    if start != spec.layers:
        raise ProtocolError(f"the circuit ends at layer {start} of {spec.layers}")
    if len({hop.peer_id for hop in hops}) != len(hops):
        raise ProtocolError("a peer appears twice in the circuit")
    _check_standbys(hops)
    return tuple(hops)


def _check_standbys(hops: Sequence[HopPlan]) -> None:
    """A peer has one lease of a session, or one copy."""
    taken = {hop.peer_id: f"is that of {hop.span}" for hop in hops}
    for hop in hops:
        if hop.standby is None:
            continue
        other = taken.get(hop.standby.peer_id)
        if other is not None:
            raise ProtocolError(f"the standby of hop {hop.span}, {hop.standby.peer_id}, {other} too")
        taken[hop.standby.peer_id] = f"is the standby of {hop.span}"


_opened = lru_cache(maxsize=512)(verify_facts)
"""Clients send the same facts with each session, and checking a signature takes long."""


def _read_standby(hop: pb.Hop, span: Span, spec: ModelSpec) -> PeerFacts | None:
    if not hop.standby_facts:
        return None
    try:
        facts = _opened(hop.standby_facts)
    except AnnouncementError as error:
        raise ProtocolError(f"the facts of the standby of hop {span}: {error}") from error
    if facts.model.model_hash != spec.model_hash:
        raise ProtocolError(
            f"the standby of hop {span} serves {facts.model.model_hash[:12]}, not {spec.model_hash[:12]}"
        )
    if facts.span_limit is not None and not facts.span_limit.covers(span):
        raise ProtocolError(f"the standby of hop {span} serves {facts.span_limit} only")
    return facts


def _read_form(hop: pb.Hop, span: Span, spec: ModelSpec) -> CopyForm:
    form = form_of(hop.standby_form, spec, span)
    if form is None:
        raise ProtocolError(f"the copy of hop {span} cannot go in form {hop.standby_form}")
    return form


def _read_facts(hop: pb.Hop) -> PeerFacts:
    try:
        facts = _opened(hop.facts)
    except AnnouncementError as error:
        raise ProtocolError(f"the facts of hop {hop.peer_id}: {error}") from error
    if facts.peer_id != hop.peer_id:
        raise ProtocolError(f"the facts of hop {hop.peer_id} are those of {facts.peer_id}")
    return facts


def _read_stage(
    hop: pb.Hop, plan: HopPlan, spec: ModelSpec, context_tokens: float, encoding: str
) -> PipelineStage:
    link_ms, uplink_mbps = hop.predicted_link_ms, hop.uplink_mbps
    if not (math.isfinite(link_ms) and 0 <= link_ms <= MAX_LINK_MS):
        raise ProtocolError(f"a link takes 0 to {MAX_LINK_MS:g} ms, not {link_ms}")
    if uplink_mbps != 0 and not MIN_UPLINK_MBPS <= uplink_mbps <= MAX_UPLINK_MBPS:
        raise ProtocolError(
            f"an uplink has {MIN_UPLINK_MBPS:g} to {MAX_UPLINK_MBPS:g} Mbps, not {uplink_mbps}"
        )
    return stage_of(plan.facts, plan.span, spec, link_ms, uplink_mbps or None, context_tokens, encoding)


def _read_grammar(sampling: pb.Sampling) -> Grammar | None:
    """Raises ValueError."""
    if not sampling.HasField("grammar"):
        return None
    kind = sampling.grammar.WhichOneof("of") or ""
    return Grammar(kind, getattr(sampling.grammar, kind, ""))


def _read_params(sampling: pb.Sampling, spec: ModelSpec) -> SamplingParams:
    ids = (*sampling.stop_token_ids, *sampling.logit_bias)
    if any(token_id >= spec.vocabulary_size for token_id in ids):
        raise ProtocolError(f"a token id is beyond the vocabulary of {spec.vocabulary_size}")
    try:
        return SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=tuple(sampling.stop_token_ids),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            logit_bias=tuple(sampling.logit_bias.items()),
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            min_p=sampling.min_p,
            min_tokens=sampling.min_tokens,
            grammar=_read_grammar(sampling),
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        )
    except ValueError as error:
        raise ProtocolError(f"sampling: {error}") from error
