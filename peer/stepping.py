"""Steps in, steps out: the way of a token through one peer.

frames in -> session table -> micro-batch queue -> stage engine (a thread of its own) -> frames out. Everything here
runs on the event loop; `compute` runs on the engine's thread.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

import torch

from molink.peer.backend import StageEngine
from molink.peer.circulation import Rule
from molink.peer.decode_watch import DecodeBatch, DecodeWatch, Iterations
from molink.peer.engine_thread import EngineThread
from molink.peer.going_on import GoingOn
from molink.peer.leases import LeaseKey
from molink.peer.link.link import Link
from molink.peer.link.links import Links
from molink.peer.metrics import PeerMetrics
from molink.peer.microbatch import BatchLimits, MicroBatchQueue, PendingStep
from molink.peer.prefill_chunks import Cut
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import Frame, ProtocolError
from molink.peer.sessions import HopSession, SessionTable
from molink.peer.steps import StepInput, StepOutput, compute, row_header, split_by_next, token_message
from molink.peer.transmission.classes import TrafficClass
from molink.shards import codec
from molink.shards.spec import ModelSpec

_log = logging.getLogger(__name__)


class Stepper:
    """Owner of the micro-batch queue and of the engine's thread."""

    def __init__(
        self,
        peer_id: str,
        spec: ModelSpec,
        engine: StageEngine,
        engine_thread: EngineThread,
        sessions: SessionTable,
        links: Links,
        limits: BatchLimits,
        metrics: PeerMetrics,
        rule: Rule,
        cut: Cut,
        watch: DecodeWatch,
    ) -> None:
        self._peer_id = peer_id
        self._spec = spec
        self._engine = engine
        self._engine_thread = engine_thread
        self._sessions = sessions
        self._links = links
        self._limits = limits
        self._metrics = metrics
        self._queue = MicroBatchQueue(limits)
        self._inputs: dict[tuple[LeaseKey, int], StepInput] = {}
        self._busy = False
        self._going_on = GoingOn(rule, limits.max_sessions, self._begin, self._pump)
        self._cut = cut
        self._watch = watch
        self._iterations = Iterations()
        self._decode: DecodeBatch | None = None
        """The decode steps that are being computed."""
        self._first_decode: DecodeBatch | None = None
        """Those that were first in the latest iteration."""

    @property
    def queued(self) -> int:
        return len(self._queue)

    # -- frames in

    def on_start(self, link: Link, start: pb.Start) -> None:
        """The client hands the head the sequence so far: prefill it in chunks, the last of which draws a token."""
        session = self._sessions.get(start.session, start.epoch)
        if session is None:
            return
        tokens = tuple(start.token_ids)
        if session.owner is not link or not session.is_head or session.cache is None or session.next_step:
            raise ProtocolError("a start must come once, from the session's client, to its ready head")
        if not session.plan.prompt_tokens <= len(tokens) < session.plan.capacity_tokens:
            raise ProtocolError(f"a history of {len(tokens)} tokens does not fit the session")
        if max(tokens) >= self._spec.vocabulary_size:
            raise ProtocolError(
                f"token {max(tokens)} is beyond the vocabulary of {self._spec.vocabulary_size}"
            )
        session.history = list(tokens)
        # a chunk leaves room for the decode steps that ride along
        most = max(1, self._limits.max_tokens - self._limits.max_sessions)
        first = 0
        for step, length in enumerate(self._cut(session.plan.stages, len(tokens), most)):
            chunk = tokens[first : first + length]
            first += length
            last = first == len(tokens)
            self._add(session, step, length, chunk, None, sample=last, prefill=True, timings=())
        self._pump()

    def on_activations(self, link: Link, frame: Frame, header: pb.Activations) -> None:
        """The previous hop's output for some sessions, in the encoding that their descriptors agree on."""
        total = sum(row.rows for row in header.rows)
        sessions = [self._sessions.get(row.session, row.epoch) for row in header.rows]
        agreed = {session.receives_in for session in sessions if session is not None}
        if header.hidden_size != self._spec.hidden_size or not agreed <= {header.dtype}:
            raise ProtocolError(
                f"activations of {header.hidden_size} x {header.dtype} are not those of this session"
            )
        if not agreed:
            return  # all have ended
        try:
            hidden = codec.decode(
                frame.payload, total, header.hidden_size, self._spec.dtype, encoding=header.dtype
            )
        except ValueError as error:
            raise ProtocolError(f"activations: {error}") from error
        first = 0
        for row, session in zip(header.rows, sessions, strict=True):
            part = hidden[first : first + row.rows]
            first += row.rows
            if session is None:
                continue
            if session.is_head or session.previous_peer_id != link.peer_id or session.cache is None:
                raise ProtocolError(
                    "activations must come from the session's previous hop, when the lease is ready"
                )
            self._add(
                session,
                row.step,
                row.rows,
                None,
                part,
                sample=row.sample,
                prefill=row.prefill,
                timings=row.timings,
            )
        self._pump()

    def on_tokens(self, link: Link, header: pb.Tokens) -> None:
        """The tail's tokens come back to the head."""
        drawn: list[tuple[HopSession, pb.Token]] = []
        for token in header.tokens:
            session = self._sessions.get(token.session, token.epoch)
            if session is None:
                continue
            if not session.is_head or session.previous_peer_id != link.peer_id:
                raise ProtocolError("tokens must come from the session's tail, to its head")
            if token.token_id >= self._spec.vocabulary_size:
                raise ProtocolError(f"token {token.token_id} is beyond the vocabulary")
            if token.position == len(session.history) and token.step != session.next_step - 1:
                raise ProtocolError(f"a token of step {token.step} came after step {session.next_step - 1}")
            drawn.append((session, token))
        self._advance(drawn)

    def discard(self, session: HopSession) -> None:
        """The session has ended: what waits of it is dropped."""
        self._links.cancel(session.key.session)
        self._queue.discard(session.key)
        self._iterations.forget(session.key)
        self._going_on.leave(session.key)
        for key in [key for key in self._inputs if key[0] == session.key]:
            del self._inputs[key]

    # -- the engine

    def _pump(self) -> None:
        """Gives the engine a micro-batch, if it has none and something waits."""
        if self._busy:
            return
        batch = self._queue.next()
        if not batch:
            return
        inputs = tuple(self._inputs.pop((pending.key, pending.step)) for pending in batch)
        self._busy = True
        self._decode = _decode_batch(inputs)
        if self._decode is not None:
            self._tell_watch_soon()
        self._engine_thread.begin(
            lambda: compute(self._engine, inputs), lambda output: self._stepped(inputs, output)
        )

    def _stepped(self, inputs: tuple[StepInput, ...], output: StepOutput | Exception) -> None:
        """The engine is done with a micro-batch: it gets the next one before this one's output is sent.

        Unless this is the tail: where it is the head too, the sessions that go on step with those that wait.
        """
        self._busy = False
        self._going_on.stepped(one.session.key for one in inputs)
        self._decode = None
        stepped = _decode_batch(inputs)
        if stepped is not None:
            if self._iterations.is_first(one.session.key for one in inputs if not one.prefill):
                self._first_decode = stepped
            self._tell_watch_soon()
        if isinstance(output, Exception):
            self._pump()
            _log.error("a step of %d sessions failed", len(inputs), exc_info=output)
            self._fail(inputs, f"{type(output).__name__}: {output}")
            return
        if output.hidden is not None:
            self._pump()
            self._deliver_activations(output, output.hidden)
        else:
            self._deliver_tokens(output)
            self._pump()
        # counted once what was delivered is on its way
        rows = sum(one.count for one in inputs)
        asyncio.get_running_loop().call_soon(
            self._metrics.stepped, output.compute_s, len(inputs), rows, output.work
        )

    def _tell_watch_soon(self) -> None:
        """Once this step's output is on its way: what is predicted then is the one after it."""
        asyncio.get_running_loop().call_soon(self._tell_watch)

    def _tell_watch(self) -> None:
        if self._decode is not None:
            self._watch.computing(self._decode)
        elif self._first_decode is not None:
            self._watch.awaiting(self._first_decode)

    # -- frames out

    def _deliver_activations(self, output: StepOutput, hidden: torch.Tensor) -> None:
        """To each next hop its rows in order: a frame of decode rows and one of prefill rows, for each encoding.

        In one frame they would be decode traffic, and a chunk of a prompt would overtake the chunk before it.
        """
        for (peer_id, encoding), parts in split_by_next(output, hidden).items():
            for traffic_class in (TrafficClass.DECODE, TrafficClass.PREFILL):
                prefill = traffic_class is TrafficClass.PREFILL
                same = [part for part in parts if part[0].prefill == prefill]
                if same:
                    self._post_activations(peer_id, encoding, same, output, traffic_class)

    def _post_activations(
        self,
        peer_id: str,
        encoding: str,
        parts: Sequence[tuple[StepInput, torch.Tensor]],
        output: StepOutput,
        traffic_class: TrafficClass,
    ) -> None:
        header = pb.Activations(hidden_size=self._spec.hidden_size, dtype=encoding)
        header.rows.extend(row_header(one, self._timings(one, output)) for one, _ in parts)
        tensor = parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts])
        link = self._links.find(peer_id)
        payload = codec.encode(tensor, encoding)
        self._metrics.sent_activations(encoding, payload.nbytes)
        sessions = _sessions(one for one, _ in parts)
        if link is None or not link.post(header, payload, traffic_class, sessions):
            reason = (link.closed_because if link else None) or "no open link, or its queue is full"
            self._fail([one for one, _ in parts], reason, code="lost", peer_id=peer_id)

    def _deliver_tokens(self, output: StepOutput) -> None:
        """One frame to each head; a session whose head is here goes on at once."""
        asked = [one for one in output.inputs if one.sample]
        by_head: dict[str, list[tuple[StepInput, pb.Token]]] = {}
        drawn_here: list[tuple[HopSession, pb.Token]] = []
        for one, drawn, position in zip(asked, output.sampled, output.positions, strict=True):
            key = one.session.key
            session = self._sessions.get(key.session, key.epoch)
            if session is None:
                continue
            token = token_message(one, drawn, position, self._timings(one, output))
            if session.is_head:
                drawn_here.append((session, token))
            else:
                by_head.setdefault(session.next_peer_id, []).append((one, token))
        self._advance(drawn_here)
        for peer_id, drawn_tokens in by_head.items():
            link = self._links.find(peer_id)
            tokens = pb.Tokens(tokens=[token for _, token in drawn_tokens])
            asked_for = _sessions(one for one, _ in drawn_tokens)
            if link is None or not link.post(tokens, traffic_class=TrafficClass.DECODE, sessions=asked_for):
                self._fail(
                    [one for one, _ in drawn_tokens], "no open link to the head", code="lost", peer_id=peer_id
                )

    def _advance(self, drawn: Sequence[tuple[HopSession, pb.Token]]) -> None:
        """At the head: tokens are there. Start the next steps, together, and stream the tokens to the clients."""
        by_client: dict[Link, list[pb.Token]] = {}
        for session, token in drawn:
            if token.position != len(session.history):
                continue
            session.history.append(token.token_id)
            if session.owner.closed_because is not None:
                self._going_on.leave(session.key)
                continue  # the client is gone: its lease runs out
            by_client.setdefault(session.owner, []).append(token)
            if token.finish == pb.NOT_FINISHED:
                self._going_on.returned(session, token)
            else:
                self._going_on.leave(session.key)
        self._going_on.release()
        self._pump()
        self._engine_thread.let_begin()
        for owner, tokens in by_client.items():
            if not owner.post(pb.Tokens(tokens=tokens), traffic_class=TrafficClass.DECODE):
                owner.close("it does not take the tokens that it asked for")

    def _begin(self, session: HopSession, token: pb.Token) -> None:
        step = token.step + 1
        self._add(session, step, 1, (token.token_id,), None, sample=True, prefill=False, timings=())

    def _add(
        self,
        session: HopSession,
        step: int,
        count: int,
        token_ids: tuple[int, ...] | None,
        hidden: torch.Tensor | None,
        *,
        sample: bool,
        prefill: bool,
        timings: Iterable[pb.HopTiming],
    ) -> None:
        if step < session.next_step:
            return  # executed or waiting already: a repeat has no effect
        if step > session.next_step or count < 1:
            raise ProtocolError(
                f"step {step} of {count} rows came when step {session.next_step} was expected"
            )
        if session.rows + count > session.plan.capacity_tokens:
            detail = f"step {step} goes beyond the {session.plan.capacity_tokens} tokens that were reserved"
            if hidden is not None:
                raise ProtocolError(detail)
            self._going_on.leave(session.key)
            report_failure(session, session.previous_peer_id, "protocol", detail)
            return
        now = time.perf_counter()
        pending = PendingStep(session.key, step, session.span, count, now, prefill)
        if not self._queue.add(pending):
            one = StepInput(session, step, count, None, None, sample, prefill, now, ())
            self._fail([one], "more steps wait here than this peer takes", code="busy")
            return
        session.next_step = step + 1
        session.rows += count
        self._inputs[session.key, step] = StepInput(
            session, step, count, token_ids, hidden, sample, prefill, now, tuple(timings)
        )

    def _timings(self, one: StepInput, output: StepOutput) -> tuple[pb.HopTiming, ...]:
        """What the hops so far took, this one included; nothing unless the session is traced."""
        if not one.session.plan.trace:
            return ()
        link = self._links.find(one.session.next_peer_id)
        timing = pb.HopTiming(
            queue_us=max(0, round((output.started_s - one.arrived_s) * 1e6)),
            compute_us=round(output.compute_s * 1e6),
            link_rtt_us=round(link.rtt_ms * 1000) if link is not None and link.rtt_ms is not None else 0,
        )
        return (*one.timings, timing)

    def _fail(
        self, inputs: Sequence[StepInput], detail: str, code: str = "engine", peer_id: str = ""
    ) -> None:
        for one in inputs:
            self._going_on.leave(one.session.key)
            report_failure(one.session, peer_id or self._peer_id, code, detail)


def _decode_batch(inputs: Sequence[StepInput]) -> DecodeBatch | None:
    """The decode steps among these, as of now; None if there are none."""
    sessions = [one.session for one in inputs if not one.prefill]
    if not sessions:
        return None
    following = frozenset(session.next_peer_id for session in sessions)
    first = sessions[0]
    return DecodeBatch(time.perf_counter(), len(sessions), following, first.plan.stages, first.hop)


def _sessions(inputs: Iterable[StepInput]) -> tuple[bytes, ...]:
    return tuple(one.session.key.session for one in inputs)


def report_failure(session: HopSession, peer_id: str, code: str, detail: str) -> None:
    """Tells the session's client who failed it; the client decides what follows."""
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
