"""What a hop's engine computes next: a micro-batch of the steps that wait, or a slice of prompts beside those who
decode. Pure."""

from collections.abc import Collection, Iterable, Sequence
from typing import Generic

from molink.peer.hop.decode_reports import DecodeReports
from molink.peer.hop.events import BatchComputed, ComputeBatch, ComputeSlice, ExpectDecode, SliceComputed
from molink.peer.hop.frames import HeldFrames
from molink.peer.hop.layered_prefill import LayeredPrefill
from molink.peer.hop.session import HopSettings, HopStep, Payload, Session
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.decoding_sessions import DecodingSession
from molink.peer.scheduling.microbatch import MicroBatchQueue
from molink.peer.scheduling.prefill_slices import SliceSizer


class EngineTurns(Generic[Session, Payload]):
    """Owns the steps that wait for the engine, and knows what it has."""

    def __init__(
        self,
        settings: HopSettings,
        sizer: SliceSizer | None,
        sessions: Collection[Session],
        held: HeldFrames[Session, Payload],
    ) -> None:
        """Without a `sizer` prompts are computed in whole chunks. No prefill begins that goes where some is `held`."""
        self._settings = settings
        self._sessions = sessions
        self._held = held
        self._queue: MicroBatchQueue[HopStep[Session, Payload]] = MicroBatchQueue(settings.limits)
        self._layered: LayeredPrefill[Session, Payload] | None = (
            None if sizer is None else LayeredPrefill(sizer, settings.limits)
        )
        self._reports = DecodeReports()
        self._has_news = False
        """Whether there is something to say of decode."""
        self._running: Sequence[HopStep[Session, Payload]] = ()
        self.is_busy = False
        """Whether the engine has something."""

    def __len__(self) -> int:
        """Steps and parts of prompts that wait for the engine."""
        return len(self._queue) + len(self._layered or ())

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any session that is not being computed."""
        return not len(self) and self._reports.is_empty

    def add(self, step: HopStep[Session, Payload]) -> bool:
        """A step waits from now on; False: there are more than may."""
        if not self._queue.push(step):
            return False
        step.session.progress.queued += 1
        if self._layered is not None and not step.prefill:
            if step.session.decoding is None:
                step.session.decoding = DecodingSession()
            step.session.decoding.waits = True
        return True

    def most_waiting(self, arriving: Session) -> Session:
        """The session of which most waits, with the step of `arriving` that has no room; that one itself rather than
        another. So no session loses anything whose steps are fewer than its share of what may wait."""

        def steps(one: Session) -> tuple[int, bool, tuple[bytes, int]]:
            return one.progress.queued + (one is arriving), one is arriving, one.key

        return max((arriving, *self._sessions), key=steps)

    def next_turn(
        self, now_s: float
    ) -> ComputeBatch[Session, Payload] | ComputeSlice[Session, Payload] | None:
        """What the engine, which has nothing, computes from now on; None: nothing may be."""
        layered = self._layered
        if layered and layered.is_due:
            return self._next_slice(layered, now_s)
        if steps := self._next_batch(now_s):
            self.is_busy = True
            self._running = steps
            if self._settings.uses_forecasts:
                self._has_news |= self._reports.record_begun(steps, now_s)
            return ComputeBatch(steps)
        return self._next_slice(layered, now_s) if layered else None

    def end_batch(self) -> Sequence[HopStep[Session, Payload]]:
        """The engine has computed its micro-batch: these."""
        steps, self._running = self._running, ()
        self.is_busy = False
        return steps

    def end_slice(
        self, event: SliceComputed[Session, Payload]
    ) -> tuple[Sequence[HopStep[Session, Payload]], bool]:
        """The engine has computed its slice. The parts that are over, and whether nobody needs the tokens any more that
        are between layers. Raises ValueError if it had none."""
        layered, whole = self._layered, event.whole
        if layered is None or not self.is_busy:
            raise ValueError("nobody has asked for a slice")
        self.is_busy = False
        if event.is_complete:
            layered.record_time(event.slice_, event.taken_s)
        over = [] if whole is None else [*whole.through, *(one for one, _ in whole.failures)]
        return over, layered.record_slice(over, event.left, event.layers_left)

    def record_computed(self, steps: Iterable[HopStep[Session, Payload]], now_s: float) -> None:
        """These have been computed, in slices or not."""
        live = [one for one in steps if not one.session.ended]
        if self._settings.uses_forecasts:
            self._has_news |= self._reports.record_computed(live, now_s)
        if self._layered is not None:
            for one in live:
                _record_decoding(one, now_s)

    def observed(self, event: BatchComputed[Session, Payload]) -> StepWork | None:
        """What a step's time says something of: not of decode steps between slices, which need not be bitwise."""
        layered = self._layered
        if layered is None or event.work is None or any(one.prefill for one in event.through):
            return event.work
        layered.record_decode(event.work, event.compute_s)
        return None if layered else event.work

    def take_news(self) -> ExpectDecode | None:
        """What there is to say of decode, once."""
        if not self._has_news:
            return None
        self._has_news = False
        return ExpectDecode(self._reports.computing, self._reports.first)

    def end_session(self, session: Session) -> bool:
        """The session has ended. Whether nobody needs the tokens any more that are between layers."""
        session.progress.queued = 0
        self._queue.forget_session(session)
        self._reports.end_session(session)
        return self._layered is not None and self._layered.end_session(session)

    def _next_batch(self, now_s: float) -> Sequence[HopStep[Session, Payload]]:
        """The next micro-batch, without what of it is to be computed in slices."""
        while steps := self._queue.next_batch(self._may_prefill):
            for one in steps:
                session = one.session
                session.progress.queued -= 1
                if one.prefill and not session.is_tail:
                    session.prefill.send_window.record_sent(
                        one.step, one.tokens * self._settings.activation_bytes
                    )
            if self._layered is None:
                return steps
            if taken := self._layered.take_prompts(steps, lambda: self._decoding(now_s)):
                return taken
        return ()

    def _may_prefill(self, session: Session) -> bool:
        """Whether another step of the session's prompt may be computed: its next hop takes what that gives."""
        prefill = session.prefill
        if prefill.parts:
            return False
        return session.is_tail or (session.next_peer_id not in self._held and prefill.send_window.is_open)

    def _next_slice(
        self, layered: LayeredPrefill[Session, Payload], now_s: float
    ) -> ComputeSlice[Session, Payload]:
        self.is_busy = True
        return ComputeSlice(layered.next_slice(self._decoding(now_s)))

    def end_decode(self, session: Session, *, goes_over: bool) -> None:
        """The session decodes here no longer. If it goes over to another peer the copy there has yet to get what it
        lacks, between two steps: until the session has left, prompts are computed as if it decoded here."""
        if not goes_over:
            session.decoding = None
        elif session.decoding is not None:
            session.decoding.waits = True

    def _decoding(self, now_s: float) -> int:
        """How many sessions wait for a decode step of this peer, that is here or on its way."""
        return sum(one.decoding is not None and one.decoding.is_near(now_s) for one in self._sessions)


def _record_decoding(one: HopStep[Session, Payload], now_s: float) -> None:
    """A step has been computed: who decodes."""
    session = one.session
    if not one.prefill:
        if session.decoding is None:
            session.decoding = DecodingSession()
        session.decoding.record_decode(now_s)
    elif one.draws and not (session.is_head and session.is_tail):
        session.decoding = DecodingSession.after_prompt(now_s, session.place.stages)
