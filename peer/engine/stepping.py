"""Steps in, steps out: the way of a token through one peer.

frames in -> checks -> `HopCore`, which says what is computed and sent -> engine (a thread of its own), frames out
(`sending`). Everything here runs on the event loop; `compute` and slices run on the engine's thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from molink.dht.refusals import RefusalLog
from molink.peer.compute.backend import StageEngine
from molink.peer.engine import arrivals
from molink.peer.engine.arrivals import step_token
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.guessing import SessionGuessing, check_hints
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.engine.sending import FrameRows, FrameSender, StepToken
from molink.peer.engine.sessions import ServedSession, SessionTable, report_failure
from molink.peer.engine.slice_executor import SliceOutput, StepSlice, slice_executor_of
from molink.peer.engine.steps import (
    StepFailure,
    StepFrame,
    StepInput,
    StepOutput,
    StepPayload,
    compute,
    expected_ms,
    log_inputs,
    trip_messages,
)
from molink.peer.engine.tail_draws import TailDraws
from molink.peer.hop import events
from molink.peer.hop.hop_core import HopCore
from molink.peer.redundancy.input_log import token_rows
from molink.peer.scheduling.decode_watch import DecodeWatch
from molink.peer.scheduling.prompt_gathering import PredictedTime
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError

MOST_TOLD = 8
"""Kinds of engine errors that are written down in full, once each: sessions fail as often as strangers like."""
_log = logging.getLogger(__name__)


class Stepper:
    """Driver of the hop's core: tells it what comes, and does what it says, with an action for each kind of effect. On
    the event loop."""

    def __init__(
        self,
        core: HopCore[ServedSession, StepPayload],
        engine: StageEngine,
        engine_thread: EngineThread,
        sessions: SessionTable,
        links: Links,
        metrics: PeerMetrics,
        watch: DecodeWatch,
    ) -> None:
        self._core = core
        self._engine = engine
        self._engine_thread = engine_thread
        self._sessions = sessions
        self._links = links
        self._watch = watch
        self._slices = slice_executor_of(engine)
        self._sender = FrameSender(engine.spec, links, metrics)
        self._alarm: asyncio.TimerHandle | None = None
        self._refusals = RefusalLog(_log)
        self._moves: Callable[[ServedSession, int, int], None] = _nothing
        self.guessing = SessionGuessing(engine.spec, lambda done: self._handle(events.GuessesReady(done)))
        """Who guesses the tokens of sessions whose head is here."""
        self.draws = TailDraws(
            lambda *known: self._handle(events.DrawsAllowed(*known)), self.fail_session, self._hand_over
        )
        """What the draws here depend on beside logits."""
        self.predicted_ms: PredictedTime | None = None
        """What a step takes, as far as it is known."""
        self._told: set[str] = set()
        """Kinds of errors of which one was written down in full."""
        self._actions: Mapping[type, Callable[[Any], None]] = {
            events.ComputeBatch: self._compute,
            events.ComputeSlice: self._compute_slice,
            events.DropSlice: lambda _: None if self._slices is None else self._slices.drop(),
            events.ForwardRows: self._forward,
            events.RetryHeld: self._retry,
            events.AwaitRoom: self._await_room,
            events.SendTokens: self._send_tokens,
            events.SendGuesses: lambda effect: self._sender.send_guesses(effect.peer_id, effect.steps),
            events.AskGuesses: self.guessing.ask,
            events.SendWindowUpdate: self._send_window_update,
            events.DeliverTokens: self._deliver,
            events.EpochOver: self._epoch_over,
            events.FailSession: self._report,
            events.WakeAt: self._wake_at,
            events.ExpectDecode: lambda effect: self._soon(self._expect_decode, effect),
            events.RecordBatch: lambda effect: self._soon(
                metrics.stepped, effect.compute_s, effect.sessions, effect.tokens, effect.work
            ),
        }

    @property
    def is_empty(self) -> bool:
        """As `HopCore.is_empty`."""
        return self._core.is_empty

    @property
    def queued(self) -> int:
        """Steps, chunks and parts of prompts that wait for the engine."""
        return self._core.queued

    @property
    def prompt_wait_s(self) -> float:
        """How long the line takes for the prompts that wait here, as far as it is known."""
        uplink_bytes_per_s = self._links.line_quality().uplink_bytes_per_s
        if uplink_bytes_per_s is None:
            return 0.0
        return self._core.prompt_bytes_to_send / uplink_bytes_per_s

    # -- sessions

    def open_session(self, session: ServedSession) -> None:
        """Its lease has been granted."""
        self._handle(events.SessionOpened(session))
        self._expect_prompt(session)

    def begin_session(self, session: ServedSession) -> None:
        """Its lease is ready: the cache holds what it is to begin behind."""
        self._handle(events.SessionReady(session, session.held_tokens, session.least_tokens))
        self._expect_prompt(session)

    def fail_session(self, session: ServedSession, peer_id: str, code: str, detail: str) -> None:
        """Ends the session here for what is known elsewhere, and tells its client whom to blame."""
        self._handle(events.SessionEnded(session))
        report_failure(session, peer_id, code, detail)

    def end_session(self, session: ServedSession) -> None:
        """The session's lease has ended: what waits of it is dropped."""
        self._links.cancel(session.key.session)
        self._handle(events.SessionEnded(session))
        self.guessing.end(session)

    # -- planned moves

    def tell_moves(self, moves: Callable[[ServedSession, int, int], None]) -> None:
        """`moves` hears of sessions whose epoch is over here, as they were asked to: with the position and the id of
        the token that the next epoch goes on with."""
        self._moves = moves

    def move_session(self, session: ServedSession) -> None:
        """With its next token this epoch of the head's session is over."""
        self._handle(events.MoveAsked(session))

    def continue_session(self, session: ServedSession, position: int, token_id: int) -> None:
        """The head's session goes on from the epoch before with that token."""
        payload = StepPayload(token_ids=(token_id,))
        self.guessing.await_sequence(session, position, token_id)
        self._handle(events.SessionContinued(session, position, payload))

    def _epoch_over(self, effect: events.EpochOver[ServedSession, StepPayload]) -> None:
        for token_id in effect.payload.token_ids or ():
            self._moves(effect.session, effect.position, token_id)

    # -- frames in

    def on_start(self, link: Link, start: pb.Start) -> None:
        """The client hands the head the sequence so far: prefill it in chunks, the last of which draws a token."""
        session = self._sessions.get(start.session, start.epoch)
        if session is None:
            return
        tokens, spec = tuple(start.token_ids), self._engine.spec
        has_begun = session.progress.next_step or session.prefill.chunks
        if session.owner is not link or not session.is_head or session.cache is None or has_begun:
            raise ProtocolError("a start must come once, from the session's client, to its ready head")
        if not session.plan.prompt_tokens <= len(tokens) < session.plan.capacity_tokens:
            raise ProtocolError(f"a history of {len(tokens)} tokens does not fit the session")
        if not (session.progress.may_begin_at(start.position) and start.position < len(tokens)):
            raise ProtocolError(f"this hop's KV cache cannot go on from position {start.position}")
        if max(tokens) >= spec.vocabulary_size:
            raise ProtocolError(f"token {max(tokens)} is beyond the vocabulary of {spec.vocabulary_size}")
        check_hints(start, spec)
        computed = tokens[start.position :]
        self.draws.learn(session, 0, tokens)
        self.guessing.begin(session, start)
        if session.inputs is not None:
            session.inputs.record(0, token_rows(tokens[: start.position]))
        self._handle(
            events.PromptStarted(
                session,
                len(computed),
                start.position,
                lambda first, stop: StepPayload(token_ids=computed[first:stop]),
            )
        )

    def on_history(self, link: Link, history: pb.History) -> None:
        """The client tells what the sequence is so far: a tail whose draws depend on it, or a head that has taken the
        session over, to guess from."""
        session = self._sessions.get(history.session, history.epoch)
        if session is None or session.ended:
            return
        if session.drawing is not None or not (session.is_head and session.plan.speculates):
            self.draws.on_history(session, link, history)
        self.guessing.on_history(session, link, history)

    def on_activations(self, link: Link, frame: Frame, header: pb.Activations) -> None:
        """The previous hop's output for some sessions, in the encoding that their descriptors agree on."""
        for event in arrivals.of_activations(link.peer_id, frame, header, self._sessions, self._engine.spec):
            self._handle(event)

    def on_tokens(self, link: Link, header: pb.Tokens) -> None:
        """The tail's tokens come back to the head."""
        for event in arrivals.of_tokens(link.peer_id, header, self._sessions):
            self._handle(event)

    def on_guesses(self, link: Link, header: pb.Guesses) -> None:
        """A head tells its tail the guesses of steps that are on their way."""
        for event in arrivals.of_guesses(link.peer_id, header, self._sessions):
            self._handle(event)

    def on_window_update(self, link: Link, header: pb.Stepped) -> None:
        """A next hop has computed prefill that went there."""
        self._handle(arrivals.of_window_update(link.peer_id, header, self._sessions))

    def _batch_computed(self, inputs: tuple[StepInput, ...], output: StepOutput | Exception) -> None:
        if isinstance(output, Exception):
            output = _failed_output(inputs, output)
        self._handle(self._computed_event(output))

    def _slice_computed(self, slice_: StepSlice, output: SliceOutput | Exception) -> None:
        if isinstance(output, Exception):
            output = SliceOutput(_failed_output(slice_.parts, output), (), 0, 0.0, is_complete=False)
        whole = None if output.whole is None else self._computed_event(output.whole)
        self._handle(
            events.SliceComputed(
                slice_, whole, output.left, output.layers_left, output.taken_s, output.is_complete
            )
        )

    def _computed_event(self, output: StepOutput) -> events.BatchComputed[ServedSession, StepPayload]:
        for frame, rows in output.frames:
            frame.output = FrameRows(output, rows)
        for one in output.inputs:
            log_inputs(one)
        return events.BatchComputed(
            through=output.inputs,
            failures=[(failure.one, self._told_failure(failure)) for failure in output.failures],
            tokens=self._drawn(output),
            output=FrameRows(output, None),
            frames=[frame for frame, _ in output.frames],
            compute_s=output.compute_s,
            work=output.work,
        )

    def _told_failure(self, failure: StepFailure) -> str:
        """What is wrong with a session's step that the engine could not make, written down and counted."""
        error = failure.error
        kind = type(error).__name__
        if kind not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(kind)
            _log.error("a session's step failed; others like it are counted only", exc_info=error)
        owner = failure.one.session.owner
        self._refusals.refused(f"steps that the engine cannot make ({kind})", owner.peer_id)
        return f"{kind}: {error}"

    def _drawn(self, output: StepOutput) -> list[StepToken]:
        if not output.sampled:
            return []
        asked = [one for one in output.inputs if one.draws]
        tokens: list[StepToken] = []
        for one, drawn, at in zip(asked, output.sampled, output.positions, strict=True):
            trip = trip_messages(one, drawn, at, self._sender.timings(one, output))
            self.draws.drew(one.session, trip)
            if not self.draws.hold(one.session, trip):
                tokens += [step_token(one.session, token) for token in trip]
        return tokens

    def _hand_over(self, session: ServedSession, tokens: Sequence[pb.Token]) -> None:
        self._handle(events.TokensDrawn([step_token(session, token) for token in tokens]))

    # -- the core

    def _expect_prompt(self, session: ServedSession) -> None:
        """If its head is here, it may start any moment."""
        tokens = max(1, session.plan.prompt_tokens - session.held_tokens)
        self._handle(events.PromptExpected(session, tokens))

    def _handle(self, event: events.HopEvent[ServedSession, StepPayload]) -> None:
        """Tells the core, and does what it says, in its order; all of it, although one thing fails: the core takes it
        for done, and an engine that was not begun would be waited for without end."""
        effects = iter(self._core.handle(event, time.perf_counter()))
        try:
            for effect in effects:
                self._actions[type(effect)](effect)
        finally:
            for effect in effects:  # those behind one that failed
                self._actions[type(effect)](effect)

    def _compute(self, effect: events.ComputeBatch[ServedSession, StepPayload]) -> None:
        inputs, layers = tuple(effect.steps), self._engine.spec.layers
        self._engine_thread.begin(
            lambda: compute(self._engine, inputs),
            lambda output: self._batch_computed(inputs, output),
            lambda: expected_ms(self.predicted_ms, inputs, layers),
        )

    def _compute_slice(self, effect: events.ComputeSlice[ServedSession, StepPayload]) -> None:
        executor, slice_, layers = self._slices, effect.slice_, self._engine.spec.layers
        if executor is None:
            raise RuntimeError("this engine computes no slices")
        self._engine_thread.begin(
            lambda: executor.compute(slice_),
            lambda output: self._slice_computed(slice_, output),
            lambda: expected_ms(self.predicted_ms, slice_.parts, layers),
        )

    def _send_tokens(self, effect: events.SendTokens[ServedSession, StepPayload]) -> None:
        if not self._sender.send_tokens(effect.peer_id, effect.tokens):
            sessions = [token[0] for token in effect.tokens]
            self._undelivered(effect.peer_id, sessions, "no open link to the head")

    def _send_window_update(self, effect: events.SendWindowUpdate[ServedSession]) -> None:
        if not self._sender.send_window_update(effect.peer_id, effect.stepped):
            sessions = [session for session, _ in effect.stepped]
            self._undelivered(effect.peer_id, sessions, "no open link to the previous hop")

    def _deliver(self, effect: events.DeliverTokens[ServedSession, StepPayload]) -> None:
        self._engine_thread.let_begin()
        self._sender.deliver_tokens(effect.tokens)

    def _forward(self, effect: events.ForwardRows[ServedSession, StepPayload]) -> None:
        peer_id, frames = effect.peer_id, effect.frames
        link = self._links.find(peer_id)
        if link is None:
            self._no_next_hop(peer_id, frames)
        elif refused := self._sender.post_frames(link, frames):
            self._handle(events.FramesRefused(peer_id, refused))

    def _retry(self, effect: events.RetryHeld[ServedSession, StepPayload]) -> None:
        peer_id, frames = effect.peer_id, effect.frames
        link, refused = self._links.find(peer_id), 0
        if link is None:
            self._no_next_hop(peer_id, frames)
        else:
            refused = len(self._sender.post_frames(link, frames, stops=True))
        self._handle(events.HeldRetried(peer_id, len(frames) - refused))

    def _no_next_hop(self, peer_id: str, frames: Sequence[StepFrame]) -> None:
        sessions = [one.session for frame in frames for one in frame.steps]
        self._undelivered(peer_id, sessions, "no open link to the next hop")

    def _undelivered(self, peer_id: str, sessions: Sequence[ServedSession], detail: str) -> None:
        self._handle(events.Undelivered(peer_id, sessions, detail))

    def _await_room(self, effect: events.AwaitRoom) -> None:
        def has_room() -> None:
            self._handle(events.LinkHasRoom(effect.peer_id))

        link = self._links.find(effect.peer_id)
        if link is None:
            self._soon(has_room)
        else:
            link.when_room(has_room)

    def _wake_at(self, effect: events.WakeAt) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        delay_s = max(0.0, effect.at_s - time.perf_counter())
        self._alarm = asyncio.get_running_loop().call_later(delay_s, self._handle, events.Woken())

    def _report(self, effect: events.FailSession[ServedSession]) -> None:
        session = effect.session
        if effect.code == "protocol":
            self._refusals.refused("steps of sessions that break the protocol", effect.peer_id)
        self._links.cancel(session.key.session)
        report_failure(session, effect.peer_id, effect.code, effect.detail)

    def _soon(self, action: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_soon(action, *arguments)

    def _expect_decode(self, effect: events.ExpectDecode) -> None:
        """Once the output of the step before is on its way: what is predicted then is the one after it."""
        if effect.computing is not None:
            self._watch.computing(effect.computing)
        elif effect.first is not None:
            self._watch.awaiting(effect.first)


def _nothing(_: ServedSession, __: int, ___: int) -> None:
    return None


def _failed_output(inputs: Sequence[StepInput], error: Exception) -> StepOutput:
    """All of it has failed for one reason."""
    return StepOutput((), None, (), (), 0.0, 0.0, None, tuple(StepFailure(one, error) for one in inputs))
