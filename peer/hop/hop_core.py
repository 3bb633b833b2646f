"""A peer's part in its sessions' circuits as a core without input or output: `handle(event, now_s)` returns what to do.

Rows come from previous hops, tokens from tails, prompts from clients; what steps together is computed, and its output
goes on. Effects are to be done in their order: the engine has its next batch before this one's output is sent, unless
this hop is the tail, where sessions that go on step with those that wait. A peer drives this with asyncio and an
engine's thread (`peer/engine/stepping.py`), the simulator in virtual time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from molink.peer.hop.decode_reports import DecodeReports
from molink.peer.hop.events import (
    AwaitRoom,
    BatchComputed,
    ComputeBatch,
    ComputeSlice,
    DeliverTokens,
    DrawnToken,
    DropSlice,
    ExpectDecode,
    FailSession,
    FaultFound,
    ForwardRows,
    FramesRefused,
    HeldRetried,
    HopEffect,
    HopEvent,
    LinkHasRoom,
    PromptExpected,
    PromptStarted,
    RecordBatch,
    RetryHeld,
    RowsArrived,
    SendTokens,
    SendWindowUpdate,
    SessionEnded,
    SessionOpened,
    SliceComputed,
    TokensReturned,
    Undelivered,
    WakeAt,
    WindowUpdated,
    Woken,
)
from molink.peer.hop.frames import HeldFrames, frames_of
from molink.peer.hop.head import Head
from molink.peer.hop.layered_prefill import LayeredPrefill
from molink.peer.hop.session import HopSession, HopStep, Payload, Session
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.decoding_sessions import DecodingSession
from molink.peer.scheduling.in_flight_rules import Rule
from molink.peer.scheduling.microbatch import BatchLimits, MicroBatchQueue
from molink.peer.scheduling.prefill_chunks import Cut
from molink.peer.scheduling.prefill_slices import SliceSizer
from molink.peer.scheduling.prompt_gathering import PromptGathering
from molink.peer.scheduling.prompt_order import due_s


@dataclass(frozen=True, slots=True)
class HopSettings:
    """What a hop goes by as long as its peer runs."""

    peer_id: str
    activation_bytes: int
    """Of a row as the engine has it."""
    most_step_tokens: int
    """A step of more is refused."""
    limits: BatchLimits
    rule: Rule
    """Of micro-batches in flight, where the head is here."""
    cut: Cut
    """Of prompts whose head is here."""
    uses_deadlines: bool = False
    """Whether links send prompts as they are due (`prompt_order`)."""
    uses_forecasts: bool = True
    """Whether links go by when the next decode is expected: without that there is no `ExpectDecode`."""


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
        self._queue: MicroBatchQueue[HopStep[Session, Payload]] = MicroBatchQueue(settings.limits)
        self._running: Sequence[HopStep[Session, Payload]] = ()
        """The micro-batch that the engine has."""
        self._is_busy = False
        self._head: Head[Session, Payload] = Head(settings.rule, settings.cut, settings.limits, gathering)
        self._layered: LayeredPrefill[Session, Payload] | None = (
            None if sizer is None else LayeredPrefill(sizer, settings.limits)
        )
        self._held: HeldFrames[Session, Payload] = HeldFrames()
        self._reports = DecodeReports()
        self._has_news = False
        """Whether there is something to say of decode."""
        self._wake_s = float("inf")
        self._effects: list[HopEffect[Session, Payload]] = []

    @property
    def queued(self) -> int:
        """Steps, chunks and parts of prompts that wait for the engine."""
        chunks = sum(len(one.prefill.chunks) for one in self._sessions)
        return len(self._queue) + chunks + len(self._layered or ())

    @property
    def prompt_tokens_to_send(self) -> int:
        """Of prompts whose head is here, those of chunks that have not been queued and that go to another hop."""
        return sum(one.prefill.waiting_tokens for one in self._sessions if not one.is_tail)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any session."""
        return not self._sessions and not self.queued and not self._held and self._head.is_empty

    def handle(
        self, event: HopEvent[Session, Payload], now_s: float
    ) -> Sequence[HopEffect[Session, Payload]]:
        """What is to be done because of the event, in order. Times are on one clock, which never goes back."""
        self._effects = []
        if isinstance(event, BatchComputed):
            self._on_batch(event, now_s)
        elif isinstance(event, RowsArrived):
            self._on_rows(event, now_s)
        elif isinstance(event, TokensReturned):
            self._on_tokens(event, now_s)
        elif isinstance(event, SliceComputed):
            self._on_slice(event, now_s)
        elif isinstance(event, WindowUpdated):
            self._on_window_update(event, now_s)
        elif isinstance(event, SessionOpened):
            self._sessions.add(event.session)
        elif isinstance(event, SessionEnded):
            self._end(event.session)
        else:
            self._on_rare(event, now_s)
        return self._finish(now_s)

    def _finish(self, now_s: float) -> Sequence[HopEffect[Session, Payload]]:
        effects = self._effects
        if self._has_news:
            self._has_news = False
            effects.append(ExpectDecode(self._reports.computing, self._reports.first))
        if not self._head.is_empty:
            wake_s = self._head.due_s(now_s, is_idle=not self._is_busy)
            if wake_s is not None and wake_s < self._wake_s:
                self._wake_s = wake_s
                effects.append(WakeAt(wake_s))
        return effects

    # -- events

    def _on_rare(self, event: HopEvent[Session, Payload], now_s: float) -> None:
        """Those that do not come with each token."""
        if isinstance(event, PromptExpected):
            self._head.expect_prompt(event.session, event.tokens, now_s)
        elif isinstance(event, PromptStarted):
            self._on_start(event, now_s)
        elif isinstance(event, FaultFound):
            if not event.session.ended and event.session.previous_peer_id == event.peer_id:
                self._fail(event.session, event.peer_id, "protocol", event.detail)
        elif isinstance(event, FramesRefused):
            self._on_refused(event)
        elif isinstance(event, LinkHasRoom):
            if frames := self._held.of_peer(event.peer_id):
                self._effects.append(RetryHeld(event.peer_id, frames))
            else:
                self._pump(now_s)
        elif isinstance(event, HeldRetried):
            self._on_retried(event, now_s)
        elif isinstance(event, Undelivered):
            for session in event.sessions:
                self._fail(session, event.peer_id, "lost", event.detail)
        elif isinstance(event, Woken):
            self._wake_s = float("inf")
            self._begin_steps(now_s)
            self._pump(now_s)

    def _on_start(self, event: PromptStarted[Session], now_s: float) -> None:
        session = event.session
        if session.ended:
            return
        session.progress.rows = event.prefix_tokens
        session.progress.history_tokens = event.prefix_tokens + event.tokens
        session.prefill.payload_of = event.payload_of
        if self._head.add_prompt(session, event.tokens):
            self._add_chunk(session, now_s)
        self._pump(now_s)

    def _on_rows(self, event: RowsArrived[Session, Payload], now_s: float) -> None:
        for session, step, tokens, sample, prefill, prefix_tokens, payload in event.rows:
            if session.ended or session.is_head or session.previous_peer_id != event.peer_id:
                continue  # this peer is not that hop's next one, whatever the client told that hop
            if step == 0 == session.progress.next_step:
                session.progress.rows = prefix_tokens
            self._add(session, step, tokens, sample, prefill, payload, now_s)
        self._pump(now_s)

    def _on_tokens(self, event: TokensReturned[Session, Payload], now_s: float) -> None:
        drawn = []
        for token in event.tokens:
            session, step, position = token[:3]
            if session.ended or not session.is_head or session.previous_peer_id != event.peer_id:
                continue  # not the session's tail, whatever the client told it
            if session.prefill.chunks:
                self._fail(
                    session, event.peer_id, "protocol", "a token came before the whole prompt was sent"
                )
            elif position == session.progress.history_tokens and step != session.progress.next_step - 1:
                detail = f"a token of step {step} came after step {session.progress.next_step - 1}"
                self._fail(session, event.peer_id, "protocol", detail)
            else:
                drawn.append(token)
        self._advance(drawn, now_s)

    def _on_window_update(self, event: WindowUpdated[Session], now_s: float) -> None:
        for session, step in event.stepped:
            if not session.ended and not session.is_tail and session.next_peer_id == event.peer_id:
                session.prefill.send_window.apply_window_update(step)
        self._pump(now_s)

    def _on_slice(self, event: SliceComputed[Session, Payload], now_s: float) -> None:
        """With the last slice of a part it is as if all had been one step."""
        self._is_busy = False
        layered, whole = self._layered, event.whole
        if layered is None:
            raise ValueError("nobody has asked for a slice")
        if event.is_complete:
            layered.record_time(event.slice_, event.taken_s)
        over = [] if whole is None else [*whole.through, *(one for one, _ in whole.failures)]
        if layered.record_slice(over, event.left, event.layers_left):
            self._effects.append(DropSlice())
        if whole is None:
            self._pump(now_s)
        else:
            self._record_step(over, whole, now_s)

    def _on_batch(self, event: BatchComputed[Session, Payload], now_s: float) -> None:
        self._is_busy = False
        steps, self._running = self._running, ()
        self._record_step(steps, event, now_s)

    def _on_refused(self, event: FramesRefused[Session, Payload]) -> None:
        for frame in event.frames:
            if not frame.prefill:
                # decode has room of its own, and of each session only one step is on its way
                for one in frame.steps:
                    detail = "the link to the next hop is full of decode"
                    self._fail(one.session, event.peer_id, "lost", detail)
            else:
                if event.peer_id not in self._held:
                    self._effects.append(AwaitRoom(event.peer_id))
                self._held.hold(frame)

    def _on_retried(self, event: HeldRetried, now_s: float) -> None:
        self._held.drop_first(event.peer_id, event.frames)
        if event.peer_id in self._held:
            self._effects.append(AwaitRoom(event.peer_id))
        else:
            self._pump(now_s)

    # -- the engine

    def _pump(self, now_s: float) -> None:
        """Gives the engine a micro-batch or a slice of prompts, if it has none and something may be stepped."""
        if self._is_busy:
            return
        for session in self._head.prompts_ready(now_s):
            self._add_chunk(session, now_s)
        layered = self._layered
        if layered and layered.is_due:
            self._begin_slice(layered, now_s)
        elif steps := self._next_batch(now_s):
            self._is_busy = True
            self._running = steps
            if self._settings.uses_forecasts:
                self._has_news |= self._reports.record_begun(steps, now_s)
            self._effects.append(ComputeBatch(steps))
        elif layered:
            self._begin_slice(layered, now_s)

    def _next_batch(self, now_s: float) -> Sequence[HopStep[Session, Payload]]:
        """The next micro-batch, without what of it is to be computed in slices."""
        while steps := self._queue.next_batch(self._may_prefill):
            for one in steps:
                one.session.progress.queued -= 1
                if one.prefill and not one.session.is_tail:
                    size_bytes = one.tokens * self._settings.activation_bytes
                    one.session.prefill.send_window.record_sent(one.step, size_bytes)
            if self._layered is None or not (
                self._layered or steps[-1].prefill
            ):  # decode goes before prefill
                return steps
            if taken := self._layered.take_prompts(steps, self._decoding(now_s)):
                return taken
        return ()

    def _may_prefill(self, session: Session) -> bool:
        """Whether another step of the session's prompt may be computed: its next hop takes what that gives."""
        prefill = session.prefill
        if prefill.parts:
            return False
        return session.is_tail or (session.next_peer_id not in self._held and prefill.send_window.is_open)

    def _begin_slice(self, layered: LayeredPrefill[Session, Payload], now_s: float) -> None:
        self._is_busy = True
        self._effects.append(ComputeSlice(layered.next_slice(self._decoding(now_s))))

    def _decoding(self, now_s: float) -> int:
        """How many sessions wait for a decode step of this peer, that is here or on its way."""
        return sum(one.decoding is not None and one.decoding.is_near(now_s) for one in self._sessions)

    def _record_step(
        self,
        steps: Sequence[HopStep[Session, Payload]],
        event: BatchComputed[Session, Payload],
        now_s: float,
    ) -> None:
        """What the engine has computed of these."""
        self._head.record_computed([one.session for one in steps])
        self._begin_steps(now_s)
        if self._settings.uses_forecasts:
            self._has_news |= self._reports.record_computed(steps, now_s)
        self._effects += _window_updates(steps)
        if self._layered is not None:
            _record_decoding(steps, now_s)
        through = event.through
        for one, detail in event.failures:
            self._fail(one.session, self._settings.peer_id, "engine", detail)
        if event.failures:
            steps = through
            if not through:
                self._pump(now_s)
                return
        work = self._observed(event)
        for one in through:
            if one.prefill and one.session.is_head:
                self._add_chunk(one.session, now_s)
        if not through or through[0].session.is_tail:
            self._advance(self._send_tokens(event.tokens), now_s)
        else:
            self._pump(now_s)
            self._forward(event)
        tokens = sum([one.tokens for one in steps])
        self._effects.append(RecordBatch(event.compute_s, len(steps), tokens, work))

    def _observed(self, event: BatchComputed[Session, Payload]) -> StepWork | None:
        """What the step's time says something of: not of decode steps between slices, which need not be bitwise."""
        layered = self._layered
        if layered is None or event.work is None or any(one.prefill for one in event.through):
            return event.work
        layered.record_decode(event.work, event.compute_s)
        return None if layered else event.work

    # -- steps

    def _advance(self, drawn: Sequence[DrawnToken[Session, Payload]], now_s: float) -> None:
        """At the head: tokens are there. Start the next steps, together, and stream the tokens to the clients."""
        delivered = []
        for token in drawn:
            session, step, position, is_last, payload, _ = token
            progress = session.progress
            if session.ended or position != progress.history_tokens:
                continue
            progress.history_tokens += 1
            delivered.append(token)
            if is_last:
                self._head.end_decode(session)
                session.decoding = None
            elif session.is_tail:
                self._add(session, step + 1, 1, True, False, payload, now_s)
            else:
                self._head.add_return(session, step + 1, payload, now_s)
        self._begin_steps(now_s)
        self._pump(now_s)
        if delivered:
            self._effects.append(DeliverTokens(delivered))

    def _begin_steps(self, now_s: float) -> None:
        """Queues the next steps of the head's sessions, as the limit of micro-batches in flight lets them."""
        for session, step, payload in self._head.steps_ready(now_s):
            self._add(session, step, 1, True, False, payload, now_s)

    def _add_chunk(self, session: Session, now_s: float) -> None:
        """Queues the next chunk of a prompt, if there is one."""
        payload_of = session.prefill.payload_of
        if payload_of is not None and (chunk := self._head.take_chunk(session)) is not None:
            first, stop, is_last = chunk
            step = session.progress.next_step
            self._add(session, step, stop - first, is_last, True, payload_of(first, stop), now_s)

    def _add(
        self,
        session: Session,
        step: int,
        tokens: int,
        sample: bool,
        prefill: bool,
        payload: Payload,
        now_s: float,
    ) -> None:
        """Queues a step, if it is the one that comes next and keeps to what was agreed on."""
        progress, settings = session.progress, self._settings
        if step < progress.next_step:
            return  # executed or waiting already: a repeat has no effect
        if (fault := _fault_of_step(settings, session, step, tokens, prefill)) is not None:
            self._fail(session, session.previous_peer_id, "protocol", fault)
            return
        rows, due = progress.rows, session.prefill
        if prefill and step == 0 and settings.uses_deadlines:
            position = session.position
            left = max(progress.history_tokens, position.prompt_tokens) - rows
            due.due_s = due_s(position.stages, max(tokens, left), now_s)
        pending = HopStep(
            session,
            step,
            session.span,
            tokens,
            now_s,
            prefill,
            due.due_s,
            rows,
            tokens,
            sample=sample,
            payload=payload,
        )
        if not self._queue.push(pending):
            self._fail(session, settings.peer_id, "busy", "more steps wait here than this peer takes")
            return
        progress.next_step = step + 1
        progress.rows = rows + tokens
        progress.queued += 1
        if self._layered is not None and not prefill:
            if session.decoding is None:
                session.decoding = DecodingSession()
            session.decoding.waits = True

    # -- what goes out

    def _forward(self, event: BatchComputed[Session, Payload]) -> None:
        """To each next hop its rows in order. Where prompts go as they are due, each has a frame of its own."""
        frames = event.frames or frames_of(
            event.through, prompts_apart=self._settings.uses_deadlines, output=event.output
        )
        posted = (
            self._held.sorted_out(frames) if len(frames) > 1 or self._held else ((frames[0].peer_id, frames),)
        )
        self._effects += [ForwardRows(peer_id, ours) for peer_id, ours in posted]

    def _send_tokens(
        self, tokens: Sequence[DrawnToken[Session, Payload]]
    ) -> Sequence[DrawnToken[Session, Payload]]:
        """One frame to each head elsewhere; the tokens whose head is here."""
        by_head: dict[str, list[DrawnToken[Session, Payload]]] = {}
        drawn_here = []
        for token in tokens:
            session = token[0]
            if session.is_head:
                drawn_here.append(token)
            elif not session.ended:
                by_head.setdefault(session.next_peer_id, []).append(token)
        self._effects += [SendTokens(peer_id, ours) for peer_id, ours in by_head.items()]
        return drawn_here

    # -- ends

    def _fail(self, session: Session, peer_id: str, code: str, detail: str) -> None:
        """Ends the session's epoch here, and says who is blamed."""
        if not session.ended:
            self._end(session)
            self._effects.append(FailSession(session, peer_id, code, detail))

    def _end(self, session: Session) -> None:
        """The session has ended: what waits of it is dropped, and a frame that waits for it alone."""
        if session.ended:
            return
        session.ended = True
        self._sessions.discard(session)
        self._queue.forget_session(session)
        self._head.end_session(session)
        self._reports.end_session(session)
        if self._layered is not None and self._layered.end_session(session):
            self._effects.append(DropSlice())
        prefill = session.prefill
        session.progress.queued = 0
        prefill.chunks.clear()
        prefill.payload_of = session.decoding = None
        if prefill.held_frames:
            self._held.drop_ended()


def _record_decoding(steps: Iterable[HopStep[Session, Payload]], now_s: float) -> None:
    """These have been computed, in slices or not: who decodes."""
    for one in steps:
        session = one.session
        if session.ended:
            continue
        if not one.prefill:
            if session.decoding is None:
                session.decoding = DecodingSession()
            session.decoding.record_decode(now_s)
        elif one.sample and not (session.is_head and session.is_tail):
            session.decoding = DecodingSession.after_prompt(now_s, session.position.stages)


def _window_updates(steps: Iterable[HopStep[Session, Payload]]) -> list[SendWindowUpdate[Session]]:
    """These have been computed: previous hops may send more, and are told when that is worth a frame."""
    told: dict[str, list[tuple[Session, int]]] = {}
    for one in steps:
        session = one.session
        if not one.prefill or session.is_head or session.ended:
            continue
        if session.prefill.receive_window.record_computed(one.step):
            told.setdefault(session.previous_peer_id, []).append((session, one.step))
    return [SendWindowUpdate(peer_id, ours) for peer_id, ours in told.items()]


def _fault_of_step(
    settings: HopSettings, session: HopSession, step: int, tokens: int, prefill: bool
) -> str | None:
    """What is wrong with a step that is not a repeat; None: nothing, and if it is prefill of another hop it counts in
    the window."""
    progress, position = session.progress, session.position
    if step != progress.next_step or not 1 <= tokens <= settings.most_step_tokens:
        return f"step {step} of {tokens} rows came when step {progress.next_step} was expected"
    if progress.rows + tokens > position.capacity_tokens:
        return f"step {step} goes beyond the {position.capacity_tokens} tokens that were reserved"
    if not prefill or session.is_head:
        return None
    if session.prefill.receive_window.admit(step, tokens * settings.activation_bytes):
        return None
    return f"step {step} came while as much prefill waited here as may"
