"""A peer's part in its sessions' circuits as a core without input or output: `handle(event, now_s)` returns what to do.

Rows come from previous hops, tokens from tails, prompts from clients; what steps together is computed, and its output
goes on. Effects are to be done in their order: the engine has its next batch before this one's output is sent, unless
this hop is the tail, where sessions that go on step with those that wait. A peer drives this with asyncio and an
engine's thread (`peer/engine/stepping.py`), the simulator in virtual time.
"""

import math
from collections.abc import Sequence
from typing import Generic

from molink.peer.hop import events
from molink.peer.hop.engine_turns import EngineTurns
from molink.peer.hop.frames import HeldFrames, OutgoingFrame, credits_by_hop, frames_of, tokens_by_head
from molink.peer.hop.head import Head
from molink.peer.hop.session import (
    NONE_AWAITED,
    ArrivedRows,
    DrawnToken,
    HopSettings,
    HopStep,
    Payload,
    Session,
    due_of_prompt,
)
from molink.peer.hop.speculation import fault_of_guesses, fault_of_trip, trips_of
from molink.peer.scheduling.prefill_slices import SliceSizer
from molink.peer.scheduling.prompt_gathering import PromptGathering


class HopCore(Generic[Session, Payload]):
    """Owns what a hop knows of its sessions, and decides what it does next. One event after the other."""

    def __init__(
        self,
        settings: HopSettings,
        sizer: SliceSizer | None = None,
        gathering: PromptGathering[Session] | None = None,
    ) -> None:
        """Without a `sizer` prompts are computed in whole chunks, whoever decodes meanwhile; without `gathering` none
        waits for another."""
        self._settings = settings
        self._sessions: set[Session] = set()
        self._held: HeldFrames[Session, Payload] = HeldFrames()
        self._turns: EngineTurns[Session, Payload] = EngineTurns(settings, sizer, self._sessions, self._held)
        self._head: Head[Session, Payload] = Head(settings, gathering)
        self._wake_s = math.inf
        """When `Woken` is to come."""
        self._effects: list[events.HopEffect[Session, Payload]] = []

    @property
    def queued(self) -> int:
        """Steps, chunks and parts of prompts that wait for the engine."""
        return len(self._turns) + sum(len(one.prefill.chunks) for one in self._sessions)

    @property
    def prompt_bytes_to_send(self) -> int:
        """Of prompts whose head is here, what chunks that have not been queued will send to the next hop."""
        waiting = (one for one in self._sessions if one.prefill.chunks and not one.is_tail)
        return sum(sum(one.prefill.chunks) * one.place.stages[0].sent_bytes for one in waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any session, but for what is being computed."""
        return not self._sessions and not self._held and self._turns.is_empty and self._head.is_empty

    def held_for(self, peer_id: str) -> Sequence[OutgoingFrame[Session, Payload]]:
        """Prefill for which the link to that peer has no room, in order."""
        return self._held.of_peer(peer_id)

    def handle(
        self, event: events.HopEvent[Session, Payload], now_s: float
    ) -> Sequence[events.HopEffect[Session, Payload]]:
        """What is to be done because of the event, in order. Times are on one clock, which never goes back. While an
        effect is done, other events may be told, and their effects done."""
        effects = self._effects = []
        if isinstance(event, events.BatchComputed):
            self._record_step(self._turns.end_batch(), event, now_s)
        elif isinstance(event, events.RowsArrived):
            self._on_rows(event, now_s)
        elif isinstance(event, events.TokensReturned):
            self._on_tokens(event, now_s)
        elif isinstance(event, events.SliceComputed):
            self._on_slice(event, now_s)
        else:
            self._on_rare(event, now_s)
        if self._head.has_guessed:
            effects += [events.SendGuesses(peer_id, steps) for peer_id, steps in self._head.take_guessed()]
        if self._head.asked:
            effects.append(events.AskGuesses(self._head.take_asked()))
        if (news := self._turns.take_news()) is not None:
            effects.append(news)
        if self._head.has_waiting:
            wake_s = self._head.due_s(now_s, is_idle=not self._turns.is_busy)
            if wake_s is not None and wake_s < self._wake_s:
                self._wake_s = wake_s
                effects.append(events.WakeAt(wake_s))
        return effects

    def _on_rare(self, event: events.HopEvent[Session, Payload], now_s: float) -> None:
        """What does not come with each token."""
        if isinstance(event, events.SessionOpened):
            self._sessions.add(event.session)
        elif isinstance(event, events.SessionEnded):
            self._end(event.session)
        elif isinstance(event, events.SessionReady | events.PromptExpected | events.PromptStarted):
            self._on_begin(event, now_s)
        elif isinstance(event, events.MoveAsked):
            event.session.progress.moves = True
        elif isinstance(event, events.SessionContinued | events.GuessesReady):
            self._on_step_there(event, now_s)
        elif isinstance(event, events.DrawsAllowed):
            self._on_draws_allowed(event, now_s)
        elif isinstance(event, events.TokensDrawn):
            self._hand_over(event.tokens, now_s)
        elif isinstance(event, events.FaultFound | events.Undelivered):
            self._on_fault(event)
        elif isinstance(event, events.Woken):
            self._wake_s = math.inf
            self._begin_steps(now_s)
            self._pump(now_s)
        else:
            self._on_room(event, now_s)

    def _on_fault(self, event: events.FaultFound[Session] | events.Undelivered[Session]) -> None:
        if isinstance(event, events.Undelivered):
            for one in event.sessions:
                self._fail(one, event.peer_id, "lost", event.detail)
        elif event.peer_id in event.session.feeding_peer_ids:
            self._fail(event.session, event.peer_id, "protocol", event.detail)

    def _on_room(self, event: events.HopEvent[Session, Payload], now_s: float) -> None:
        """What says whether a next hop, or the link to it, takes more prefill."""
        if isinstance(event, events.FramesRefused):
            self._on_refused(event)
            return
        if isinstance(event, events.WindowUpdated):
            for session, step in event.stepped:
                if not session.ended and not session.is_tail and session.next_peer_id == event.peer_id:
                    session.prefill.send_window.apply_window_update(step)
        elif isinstance(event, events.LinkHasRoom):
            if frames := self._held.of_peer(event.peer_id):
                self._effects.append(events.RetryHeld(event.peer_id, frames))
                return
        elif isinstance(event, events.HeldRetried):
            self._held.drop_first(event.peer_id, event.frames)
            if event.peer_id in self._held:
                self._effects.append(events.AwaitRoom(event.peer_id))
                return
        self._pump(now_s)

    def _on_begin(
        self,
        event: events.SessionReady[Session] | events.PromptExpected[Session] | events.PromptStarted[Session],
        now_s: float,
    ) -> None:
        """What comes before a session's first step."""
        session, progress = event.session, event.session.progress
        if isinstance(event, events.SessionReady):
            progress.end, progress.least_position = event.held_tokens, event.least_tokens
            return
        if isinstance(event, events.PromptExpected):
            self._head.expect_prompt(session, event.tokens, now_s)
            return
        if session.ended:
            return
        progress.end = event.position
        progress.history_tokens = event.position + event.tokens
        session.prefill.payload_of = event.payload_of
        if self._head.add_prompt(session, event.tokens):
            self._add_chunk(session, now_s)
        self._pump(now_s)

    def _on_step_there(
        self, event: events.SessionContinued[Session, Payload] | events.GuessesReady[Session], now_s: float
    ) -> None:
        """The first step of the next epoch is a decode step, as the next one would have been in the epoch before."""
        if isinstance(event, events.GuessesReady):
            for session, step, payload in self._head.take_awaiting(event.sessions):
                self._go_on(session, step, payload, now_s)
        elif not (session := event.session).ended and not (progress := session.progress).next_step:
            progress.end, progress.history_tokens = event.position, event.position + 1
            self._go_on(session, 0, event.payload, now_s)
        self._begin_steps(now_s)
        self._pump(now_s)

    def _on_draws_allowed(self, event: events.DrawsAllowed[Session], now_s: float) -> None:
        for pending in event.session.progress.allow_draws(event.position):
            self._queue(pending)
        self._pump(now_s)

    def _on_rows(self, event: events.RowsArrived[Session, Payload], now_s: float) -> None:
        for one in event.rows:
            session = one[0]
            if session.ended or session.is_head or session.previous_peer_id != event.peer_id:
                continue  # this peer is not that hop's next one, whatever the client told that hop
            self._add(one, now_s)
        self._pump(now_s)

    def _on_tokens(self, event: events.TokensReturned[Session, Payload], now_s: float) -> None:
        drawn = []
        for trip in trips_of(event.tokens):
            session = trip[0][0]
            if session.ended or not session.is_head or session.previous_peer_id != event.peer_id:
                continue  # not the session's tail, whatever the client told it
            if (fault := fault_of_trip(trip)) is not None:
                self._fail(session, event.peer_id, "protocol", fault)
            else:
                drawn += trip
        self._advance(drawn, now_s)

    def _on_slice(self, event: events.SliceComputed[Session, Payload], now_s: float) -> None:
        """With the last slice of a part it is as if all had been one step."""
        over, is_dropped = self._turns.end_slice(event)
        if is_dropped:
            self._effects.append(events.DropSlice())
        if event.whole is None:
            self._pump(now_s)
        else:
            self._record_step(over, event.whole, now_s)

    def _on_refused(self, event: events.FramesRefused[Session, Payload]) -> None:
        for frame in event.frames:
            if not frame.prefill:
                # decode has room of its own, and of each session only one step is on its way
                for one in frame.steps:
                    detail = "the link to the next hop is full of decode"
                    self._fail(one.session, event.peer_id, "lost", detail)
            else:
                if event.peer_id not in self._held:
                    self._effects.append(events.AwaitRoom(event.peer_id))
                self._held.hold(frame)

    def _pump(self, now_s: float) -> None:
        """Gives the engine a micro-batch or a slice of prompts, if it has none and something may be stepped."""
        if self._turns.is_busy:
            return
        for session in self._head.prompts_ready(now_s):
            self._add_chunk(session, now_s)
        if (turn := self._turns.next_turn(now_s)) is not None:
            self._effects.append(turn)

    def _record_step(
        self,
        steps: Sequence[HopStep[Session, Payload]],
        event: events.BatchComputed[Session, Payload],
        now_s: float,
    ) -> None:
        """What the engine has computed of these."""
        self._head.record_computed([one.session for one in steps])
        self._begin_steps(now_s)
        self._turns.record_computed(steps, now_s)
        self._effects += [events.SendWindowUpdate(*credited) for credited in credits_by_hop(steps).items()]
        through = event.through
        for one, detail in event.failures:
            self._fail(one.session, self._settings.peer_id, "engine", detail)
        if event.failures:
            steps = through
            if not through:
                self._pump(now_s)
                return
        work = self._turns.observed(event)
        for one in through:
            if one.prefill and one.session.is_head:
                self._add_chunk(one.session, now_s)
        if not through or through[0].session.is_tail:
            self._hand_over(event.tokens, now_s)
        else:
            self._pump(now_s)
            self._forward(event)
        tokens = sum([one.tokens for one in steps])
        self._effects.append(events.RecordBatch(event.compute_s, len(steps), tokens, work))

    def _hand_over(self, drawn: Sequence[DrawnToken[Session, Payload]], now_s: float) -> None:
        """At the tail: tokens go to their heads."""
        elsewhere, drawn_here = tokens_by_head(drawn)
        self._effects += [events.SendTokens(peer_id, tokens) for peer_id, tokens in elsewhere.items()]
        self._advance(drawn_here, now_s)

    def _advance(self, drawn: Sequence[DrawnToken[Session, Payload]], now_s: float) -> None:
        """At the head: tokens are there. Start the next steps, together, and stream the tokens to the clients."""
        delivered: list[DrawnToken[Session, Payload]] = []
        over: list[events.EpochOver[Session, Payload]] = []
        for trip in trips_of(drawn):
            session, step, position, is_last, payload, _ = trip[-1]
            progress = session.progress
            if session.ended or trip[0][2] != progress.history_tokens:
                continue
            guessed, progress.guesses = progress.guesses, NONE_AWAITED
            progress.history_tokens += len(trip)
            delivered += trip
            if progress.guesser is not None:
                progress.guesser.record_trip([token[4] for token in trip], guessed)
            if is_last or (progress.moves and not guessed):
                self._head.end_decode(session)
                self._turns.end_decode(session, goes_over=not is_last)
                over += [] if is_last else [events.EpochOver(session, position, payload)]
            elif not self._head.awaits_guesses(session, step + 1, payload):
                self._go_on(session, step + 1, payload, now_s)
        self._begin_steps(now_s)
        self._pump(now_s)
        if delivered:
            self._effects.append(events.DeliverTokens(delivered))
        self._effects += over

    def _go_on(self, session: Session, step: int, payload: Payload, now_s: float) -> None:
        """The next decode step of the head's session is there."""
        if session.is_tail:
            self._begin_step(session, step, payload, now_s)
        else:
            self._head.add_return(session, step, payload, now_s)

    def _begin_steps(self, now_s: float) -> None:
        """Queues the next steps of the head's sessions, as the limit of micro-batches in flight lets them."""
        for session, step, payload in self._head.steps_ready(now_s):
            self._begin_step(session, step, payload, now_s)

    def _begin_step(self, session: Session, step: int, payload: Payload, now_s: float) -> None:
        """Queues a decode step: a token, and guesses."""
        payload = self._head.begin_step(session, step, payload)
        progress, tokens = session.progress, 1 + session.progress.guesses
        self._add((session, step, tokens, tokens, False, progress.history_tokens - 1, payload), now_s)

    def _add_chunk(self, session: Session, now_s: float) -> None:
        """Queues the next chunk of a prompt, if there is one."""
        payload_of = session.prefill.payload_of
        if payload_of is not None and (chunk := self._head.take_chunk(session)) is not None:
            first, stop, is_last = chunk
            if is_last:
                session.prefill.payload_of = None
            step, position = session.progress.next_step, session.progress.end
            payload = payload_of(first, stop)
            self._add((session, step, stop - first, is_last, True, position, payload), now_s)

    def _add(self, rows: ArrivedRows[Session, Payload], now_s: float) -> None:
        """Queues a step, if it is the one that comes next and keeps to what was agreed on."""
        session, step, tokens, draws, prefill, position, payload = rows
        progress, settings, due = session.progress, self._settings, session.prefill
        if step < progress.next_step:
            return  # executed or waiting already: a repeat has no effect
        fault = fault_of_guesses(tokens, draws, prefill=prefill) if tokens > 1 or draws > 1 else None
        fault = fault or settings.fault_of_step(session, step, position, tokens, prefill=prefill)
        if fault is not None:
            self._fail(session, session.previous_peer_id, "protocol", fault)
            return
        if prefill and step == 0 and settings.uses_deadlines:
            due.due_s = due_of_prompt(session, position, tokens, now_s)
        pending = HopStep(
            session, step, session.span, tokens, now_s, prefill, due.due_s, position, tokens,
            draws=draws, payload=payload,
        )  # fmt: skip
        progress.next_step, progress.least_position, progress.end = step + 1, position, position + tokens
        if session.is_tail and progress.must_wait(position, tokens, draws):
            progress.waiting.append(pending)
        else:
            self._queue(pending)

    def _queue(self, step: HopStep[Session, Payload]) -> None:
        """The engine is to have the step. Where no more may wait, sessions end of which most does."""
        while not step.session.ended and not self._turns.add(step):
            most = self._turns.most_waiting(step.session)
            self._fail(most, self._settings.peer_id, "busy", "more steps wait here than this peer takes")

    def _forward(self, event: events.BatchComputed[Session, Payload]) -> None:
        """To each next hop its rows in order. Where prompts go as they are due, long ones have a frame each, and what
        was computed of one after its session ended goes nowhere: the chunk before it may have been dropped."""
        apart = self._settings.uses_deadlines
        frames = event.frames or frames_of(event.through, prompts_apart=apart, output=event.output)
        if apart:
            frames = [one for one in frames if not (one.prefill and one.is_over)]
        if len(frames) == 1 and not self._held:
            self._effects.append(events.ForwardRows(frames[0].peer_id, frames))
            return
        self._effects += [
            events.ForwardRows(peer_id, ours) for peer_id, ours in self._held.sorted_out(frames)
        ]

    def _fail(self, session: Session, peer_id: str, code: str, detail: str) -> None:
        """Ends the session's epoch here, and says who is blamed."""
        if not session.ended:
            self._end(session)
            self._effects.append(events.FailSession(session, peer_id, code, detail))

    def _end(self, session: Session) -> None:
        """The session has ended: what waits of it is dropped, and frames of its own that wait for a link."""
        if session.ended:
            return
        session.ended = True
        self._sessions.discard(session)
        self._head.end_session(session)
        if self._turns.end_session(session):
            self._effects.append(events.DropSlice())
        prefill = session.prefill
        session.progress.waiting.clear()
        prefill.chunks.clear()
        prefill.payload_of = session.decoding = None
        if prefill.held_frames and self._settings.uses_deadlines:
            self._held.drop_ended()  # elsewhere a frame is shared, and the next hop is to see no gap before its rows
