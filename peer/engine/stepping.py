"""Steps in, steps out: the way of a token through one peer.

frames in -> session table -> micro-batch queue -> stage engine (a thread of its own) -> frames out (`forwarding`).
Everything here runs on the event loop; `compute` runs on the engine's thread.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

import torch

from molink.dht.refusals import RefusalLog
from molink.peer.compute.backend import StageEngine
from molink.peer.engine.decode_reports import DecodeReports
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.forwarding import Forwarder
from molink.peer.engine.in_flight_microbatches import InFlightMicroBatches
from molink.peer.engine.layered_prefill import LayeredPrefill
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.engine.sessions import HopSession, SessionTable, report_failure
from molink.peer.engine.slice_executor import PrefillSlice, SliceOutput
from molink.peer.engine.starts import Starts
from molink.peer.engine.steps import (
    StepFailure,
    StepInput,
    StepOutput,
    compute,
    fault_of_rows,
    read_activations,
)
from molink.peer.memory.leases import LeaseKey
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.decode_watch import DecodeWatch
from molink.peer.scheduling.in_flight_rules import Rule
from molink.peer.scheduling.microbatch import BatchLimits, MicroBatchQueue, PendingStep
from molink.peer.scheduling.prefill_chunks import Cut
from molink.peer.scheduling.prompt_gathering import PromptGathering
from molink.peer.scheduling.prompt_order import due_s
from molink.peer.scheduling.prompts import PromptQueue
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError
from molink.peer.wire.transmission.classes import TrafficClass
from molink.shards.spec import ModelSpec

MOST_TOLD = 8
"""Kinds of engine errors that are written down in full, once each: sessions fail as often as strangers like."""
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
        layered_prefill: LayeredPrefill | None = None,
        gathering: PromptGathering | None = None,
    ) -> None:
        """Without `layered_prefill` prompts are computed in whole chunks, whoever decodes meanwhile; without
        `gathering` none waits for another."""
        self._peer_id = peer_id
        self._spec = spec
        self._engine = engine
        self._engine_thread = engine_thread
        self._sessions = sessions
        self._links = links
        self._metrics = metrics
        self._queue: MicroBatchQueue[PendingStep] = MicroBatchQueue(limits)
        self._inputs: dict[tuple[LeaseKey, int], StepInput] = {}
        self._busy = False
        self._layered_prefill = layered_prefill
        self._in_flight = InFlightMicroBatches(rule, limits.max_sessions, self._begin, self._pump)
        self._prompts = PromptQueue(cut, limits)
        self._most_step_tokens = min(spec.most_step_tokens, limits.max_tokens)
        self.starts = Starts(gathering, self._add_chunk, self._pump)
        self._decode_reports = DecodeReports(watch)
        self._refusals = RefusalLog(_log)
        self._told: set[str] = set()
        """Kinds of errors of which one was written down in full."""
        self._forwarder = Forwarder(spec, sessions, links, metrics, self._lost, self._pump)

    @property
    def queued(self) -> int:
        return len(self._queue) + len(self._prompts) + len(self._layered_prefill or ())

    @property
    def prompt_wait_s(self) -> float:
        """How long the line takes for the prompts that wait here, as far as it is known."""
        line = self._links.line_quality()
        return self._prompts.wait_s(self._spec.activation_bytes, line.uplink_bytes_per_s)

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
        if not (session.can_begin_behind(start.prefix_tokens) and start.prefix_tokens < len(tokens)):
            raise ProtocolError(f"the first {start.prefix_tokens} tokens are not all in this hop's KV cache")
        if max(tokens) >= self._spec.vocabulary_size:
            raise ProtocolError(
                f"token {max(tokens)} is beyond the vocabulary of {self._spec.vocabulary_size}"
            )
        session.history = list(tokens)
        session.rows = start.prefix_tokens
        self._prompts.add_prompt(session.key, session.plan.stages, tokens[start.prefix_tokens :])
        self.starts.add_prompt(session, len(tokens) - start.prefix_tokens)
        self._pump()

    def on_activations(self, link: Link, frame: Frame, header: pb.Activations) -> None:
        """The previous hop's output for some sessions, in the encoding that their descriptors agree on."""
        sessions = [self._sessions.get(row.session, row.epoch) for row in header.rows]
        if all(session is None or session.failed for session in sessions):
            return
        parts = read_activations(frame.payload, header, self._spec)
        for row, part, session in zip(header.rows, parts, sessions, strict=True):
            if session is None or session.failed:
                continue
            if session.is_head or session.previous_peer_id != link.peer_id:
                continue  # this peer is not that hop's next one, whatever the client told that hop
            fault = fault_of_rows(header, row, part, session)
            if fault is not None:
                self._blame(session, link.peer_id, fault)
                continue
            if row.step == session.next_step == 0:
                session.rows = row.prefix_tokens
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
            if session is None or session.failed:
                continue
            if not session.is_head or session.previous_peer_id != link.peer_id:
                continue  # not the session's tail, whatever the client told it
            fault = session.fault_of_token(token, self._spec, is_sent=session.key not in self._prompts)
            if fault is None:
                drawn.append((session, token))
            else:
                self._blame(session, link.peer_id, fault)
        self._advance(drawn)

    def on_window_update(self, link: Link, header: pb.Stepped) -> None:
        """A next hop has computed prefill that went there."""
        self._forwarder.on_window_update(link, header)

    def sessions_waiting(self) -> set[LeaseKey]:
        """Those that wait for this peer, and not it for them."""
        waiting = {key for key, _ in self._inputs} | self._prompts.keys()
        return waiting if self._layered_prefill is None else waiting | self._layered_prefill.keys()

    def forget_session(self, session: HopSession) -> None:
        """The session has ended: what waits of it is dropped."""
        self._forwarder.forget_session(session.key)
        self._queue.forget_session(session.key)
        self._prompts.forget_session(session.key)
        self.starts.forget_session(session.key)
        if self._layered_prefill is not None:
            self._layered_prefill.forget_session(session.key)
        self._decode_reports.forget_session(session.key)
        self._leave(session.key)
        self._inputs = {key: one for key, one in self._inputs.items() if key[0] != session.key}

    def _leave(self, key: LeaseKey) -> None:
        """No further decode step of the session is to come."""
        self._in_flight.forget_session(key)
        if self._layered_prefill is not None:
            self._layered_prefill.forget_decoder(key)

    # -- the engine

    def _pump(self) -> None:
        """Gives the engine a micro-batch or a piece of prompts, if it has none and something may be stepped."""
        if self._busy:
            return
        self.starts.release_ready()
        parts = self._layered_prefill
        if parts and parts.is_due:
            self._begin_slice(parts)
        elif inputs := self._next_inputs():
            self._busy = True
            self._decode_reports.record_begun(inputs)
            self._engine_thread.begin(
                lambda: compute(self._engine, inputs), lambda output: self._stepped(inputs, output)
            )
        elif parts:
            self._begin_slice(parts)

    def _next_inputs(self) -> tuple[StepInput, ...]:
        """The next micro-batch, without what of it is to be computed in pieces."""
        parts, may_prefill = self._layered_prefill, self._forwarder.may_prefill
        while True:
            batch = self._queue.next_batch(lambda key: not (parts and parts.has(key)) and may_prefill(key))
            inputs = tuple(self._inputs.pop((pending.key, pending.step)) for pending in batch)
            self._forwarder.record_begun(inputs)
            if parts is None or not inputs:
                return inputs
            if taken := parts.take_prompts(inputs):
                return taken

    def _begin_slice(self, parts: LayeredPrefill) -> None:
        self._busy = True
        slice_ = parts.next_slice()
        self._engine_thread.begin(
            lambda: parts.compute(slice_), lambda output: self._slice_computed(parts, slice_, output)
        )

    def _slice_computed(
        self, parts: LayeredPrefill, slice_: PrefillSlice, output: SliceOutput | Exception
    ) -> None:
        """The engine is done with a piece. With the last one of a part it is as if all had been one step."""
        self._busy = False
        whole = parts.record_slice(slice_, output)
        if whole is None:
            self._pump()
        else:
            self._stepped(whole.everyone, whole)

    def _stepped(self, inputs: tuple[StepInput, ...], output: StepOutput | Exception) -> None:
        """The engine is done with a micro-batch: it gets the next one before this one's output is sent. Unless this is
        the tail: where it is the head too, the sessions that go on step with those that wait."""
        self._busy = False
        self._in_flight.record_computed(one.session.key for one in inputs)
        self._decode_reports.record_computed(inputs)
        self._forwarder.send_window_updates(inputs)
        if self._layered_prefill is not None:
            self._layered_prefill.record_computed(inputs)
        if isinstance(output, Exception):
            output = StepOutput(
                (), None, (), (), 0.0, 0.0, None, tuple(StepFailure(one, output) for one in inputs)
            )
        if output.failures:
            self._failed(output.failures)
            inputs = output.inputs
            if not inputs:
                self._pump()
                return
        work = self._observed(inputs, output)
        for one in inputs:
            if one.prefill and one.session.is_head:
                self._add_chunk(one.session)
        if output.hidden is not None or output.frames:
            self._pump()
            self._forwarder.forward_activations(output)
        else:
            self._advance(self._forwarder.forward_tokens(output))
            self._pump()
        # counted once what was delivered is on its way
        rows = sum(one.count for one in inputs)
        asyncio.get_running_loop().call_soon(self._metrics.stepped, output.compute_s, len(inputs), rows, work)

    def _failed(self, failures: Sequence[StepFailure]) -> None:
        """Sessions whose step the engine could not make, each for a reason of its own."""
        for failure in failures:
            session, error = failure.one.session, failure.error
            kind = type(error).__name__
            if kind not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(kind)
                _log.error("a session's step failed; others like it are counted only", exc_info=error)
            self._refusals.refused(f"steps that the engine cannot make ({kind})", session.owner.peer_id)
            self.forget_session(session)
            self._fail([failure.one], f"{kind}: {error}")

    def _observed(self, inputs: Sequence[StepInput], output: StepOutput) -> StepWork | None:
        """What the step's time says something of: not of decode steps between pieces, which need not be bitwise."""
        if self._layered_prefill is None or output.work is None or any(one.prefill for one in inputs):
            return output.work
        self._layered_prefill.record_decode(output.work, output.compute_s)
        return None if self._layered_prefill else output.work

    def _advance(self, drawn: Sequence[tuple[HopSession, pb.Token]]) -> None:
        """At the head: tokens are there. Start the next steps, together, and stream the tokens to the clients."""
        by_client: dict[Link, list[pb.Token]] = {}
        for session, token in drawn:
            if token.position != len(session.history):
                continue
            if session.failed:
                self._leave(session.key)
                continue
            session.history.append(token.token_id)
            if session.owner.closed_because is not None:
                self._leave(session.key)
                continue  # the client is gone: its lease runs out
            by_client.setdefault(session.owner, []).append(token)
            if token.finish == pb.NOT_FINISHED:
                self._in_flight.record_return(session, token)
            else:
                self._leave(session.key)
        self._in_flight.release_ready()
        self._pump()
        self._engine_thread.let_begin()
        for owner, tokens in by_client.items():
            if not owner.post(pb.Tokens(tokens=tokens), traffic_class=TrafficClass.DECODE):
                owner.close("it does not take the tokens that it asked for")

    def _add_chunk(self, session: HopSession) -> None:
        """Queues the next chunk of a prompt, if there is one."""
        chunk = self._prompts.take_chunk(session.key)
        if chunk:
            last = session.key not in self._prompts
            step = session.next_step
            self._add(session, step, len(chunk), chunk, None, sample=last, prefill=True, timings=())

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
        if step > session.next_step or not 1 <= count <= self._most_step_tokens:
            detail = f"step {step} of {count} rows came when step {session.next_step} was expected"
            self._blame(session, session.previous_peer_id, detail)
            return
        if session.rows + count > session.plan.capacity_tokens:
            detail = f"step {step} goes beyond the {session.plan.capacity_tokens} tokens that were reserved"
            self._blame(session, session.previous_peer_id, detail)
            return
        if prefill and hidden is not None and not self._forwarder.admit_prefill(session, step, count):
            detail = f"step {step} came while as much prefill waited here as may"
            self._blame(session, session.previous_peer_id, detail)
            return
        now = time.perf_counter()
        if prefill and step == 0 and self._links.uses_deadlines:
            tokens = max(len(session.history), session.plan.prompt_tokens) - session.rows
            session.due_s = due_s(session.plan.stages, max(count, tokens), now)
        pending = PendingStep(session.key, step, session.span, count, now, prefill, session.due_s)
        if not self._queue.push(pending):
            one = StepInput(session, step, count, None, None, sample, prefill, now, ())
            self._fail([one], "more steps wait here than this peer takes", code="busy")
            return
        prefix_tokens = session.rows if step == 0 else 0
        session.next_step = step + 1
        session.rows += count
        if self._layered_prefill is not None and not prefill:
            self._layered_prefill.record_waiting(session.key)
        self._inputs[session.key, step] = StepInput(
            session, step, count, token_ids, hidden, sample, prefill, now, tuple(timings), prefix_tokens
        )

    def _blame(self, session: HopSession, peer_id: str, detail: str) -> None:
        """Ends the session's epoch here for what came from a neighbour."""
        self._refusals.refused("steps of sessions that break the protocol", peer_id)
        self.forget_session(session)
        report_failure(session, peer_id, "protocol", detail)

    def _lost(self, inputs: Sequence[StepInput], peer_id: str, detail: str) -> None:
        self._fail(inputs, detail, "lost", peer_id)

    def _fail(
        self, inputs: Sequence[StepInput], detail: str, code: str = "engine", peer_id: str = ""
    ) -> None:
        for one in inputs:
            self._leave(one.session.key)
            report_failure(one.session, peer_id or self._peer_id, code, detail)
