"""A peer of a simulated circuit: the product's decisions around an engine that only takes time."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.decode_watch import IterationDetector
from molink.peer.scheduling.microbatch import BatchLimits, MicroBatchQueue, PendingStep
from molink.peer.scheduling.prefill_window import ReceiveWindow, SendWindow
from molink.peer.scheduling.prompt_order import due_s
from molink.peer.wire.transmission.decode_times import FirstBatch, RunningBatch, decode_finish_s
from molink.shards.spec import Span
from molink.simnet.core import frames
from molink.simnet.core.channels import Channels
from molink.simnet.core.frames import SimulatedFrame, SimulatedRow
from molink.simnet.core.sessions import SimulatedSession
from molink.simnet.core.timeline import Timeline
from molink.simnet.devices.devices import Work

ComputeS = Callable[[Work, int], float]
"""Seconds of a step: of so much work, for so many sessions that draw a token."""
Rows = tuple[SimulatedRow, ...]
"""Of one step."""
Sessions = Mapping[LeaseKey, SimulatedSession]


@dataclass(frozen=True, slots=True)
class CircuitPosition:
    """The position of a peer in the circuit."""

    hop: int
    hops: int
    span: Span
    activation_bytes: int
    hand_on_s: float = 0.0
    """From when the engine is done to when its output is at the link."""


@dataclass(slots=True)
class _WaitingRow(PendingStep[LeaseKey]):
    """What the product's queue knows of a row, and the row."""

    row: SimulatedRow = field(kw_only=True)


class SimulatedPeer:
    """Simulates one peer: owns its queue, its engine's time and its prefill windows."""

    def __init__(
        self,
        timeline: Timeline,
        place: CircuitPosition,
        sessions: Sessions,
        channels: Channels,
        compute_s: ComputeS,
        limits: BatchLimits,
    ) -> None:
        self.position = place
        self._is_head, self._is_tail = place.hop == 0, place.hop == place.hops - 1
        self._span = place.span
        self.busy_s = 0.0
        self.steps = 0
        self._timeline = timeline
        self._sessions = sessions
        self._channels = channels
        self._compute_s = compute_s
        self._queue: MicroBatchQueue[_WaitingRow] = MicroBatchQueue(limits)
        self._busy = False
        self._send_windows: defaultdict[LeaseKey, SendWindow] = defaultdict(SendWindow)
        self._receive_windows: defaultdict[LeaseKey, ReceiveWindow] = defaultdict(ReceiveWindow)
        self._held_frames: deque[SimulatedFrame] = deque()
        self._iterations: IterationDetector[LeaseKey] = IterationDetector()
        self._running_batch: RunningBatch | None = None
        self._first_batch: FirstBatch | None = None
        self._forecast_session: SimulatedSession | None = None
        self.next_link = self.previous_link = 0
        self.on_computed: Callable[[Rows], None] = lambda _: None
        """The head's: what the engine has computed, before its output leaves."""
        self.on_drawn: Callable[[Rows], None] = lambda _: None
        """Where tail and head are one peer: tokens that were drawn here."""

    @property
    def waiting(self) -> int:
        """Steps that wait for the engine."""
        return len(self._queue)

    def add_step(self, row: SimulatedRow) -> None:
        """A step waits for the engine from now on; `pump` follows."""
        now_s, hop = self._timeline.now_s, self.position.hop
        session = self._sessions[row.key]
        if row.prefill and row.step == 0 and self._channels.heeds_due:
            session.due_s[hop] = due_s(session.stages, session.request.prompt_tokens, now_s)
        waiting = _WaitingRow(
            row.key, row.step, self._span, row.count, now_s, row.prefill, session.due_s[hop], row=row
        )
        if not self._queue.push(waiting):
            raise OverflowError(f"more steps wait at hop {hop} than a peer takes")

    def on_activations(self, frame: SimulatedFrame) -> None:
        """The previous hop's output."""
        for row in frame.rows:
            if row.prefill:
                size_bytes = row.count * self.position.activation_bytes
                if not self._receive_windows[row.key].admit(row.step, size_bytes):
                    raise OverflowError(f"prefill came to hop {self.position.hop} beyond its window")
            self.add_step(row)
        self.pump()

    def on_window_update(self, frame: SimulatedFrame) -> None:
        """The next hop has stepped prefill."""
        for row in frame.rows:
            self._send_windows[row.key].apply_window_update(row.step)
        self.pump()

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._queue.forget_session(key)
        self._send_windows.pop(key, None)
        self._receive_windows.pop(key, None)
        self._iterations.forget_session(key)

    def pump(self) -> None:
        """Gives the engine a micro-batch, if it has none."""
        if self._begin():
            self._forecast_decode()

    def _begin(self) -> bool:
        if self._busy or not (batch := self._queue.next_batch(self._may_prefill)):
            return False
        self._busy = True
        rows = tuple([waiting.row for waiting in batch])
        decode, prefill = (rows, ()) if not rows[-1].prefill else _parted(rows)
        sampled = len(decode) + sum([row.sample for row in prefill]) if self._is_tail else 0
        taken_s = self._compute_s(self._work(rows), sampled)
        if not self._is_tail:
            for row in prefill:
                size_bytes = row.count * self.position.activation_bytes
                self._send_windows[row.key].record_sent(row.step, size_bytes)
        if decode:
            self._forecast_session = self._sessions[decode[0].key]
            self._running_batch = RunningBatch(self._timeline.now_s, len(decode))
        self._timeline.call(taken_s, partial(self._stepped, decode, prefill, taken_s))
        return True

    def _work(self, rows: Rows) -> Work:
        """What a step of these rows computes, which are in the sessions' KV caches from now on."""
        sessions, hop = self._sessions, self.position.hop
        computed = tokens = attended = 0
        for row in rows:
            count, known = row.count, sessions[row.key].rows
            context = known[hop]
            known[hop] = after = context + count
            computed += count
            tokens += after
            attended += count * context + count * (count + 1) // 2
        return Work(computed, tokens, attended)

    def _may_prefill(self, key: LeaseKey) -> bool:
        return self._is_tail or (not self._held_frames and self._send_windows[key].is_open)

    def _stepped(self, decode: Rows, prefill: Rows, taken_s: float) -> None:
        self._busy = False
        self.busy_s += taken_s
        self.steps += 1
        told = prefill and tuple(
            [row for row in prefill if self._receive_windows[row.key].record_computed(row.step)]
        )
        self._running_batch = None
        if decode and self._iterations.is_first([row.key for row in decode]):
            self._first_batch = FirstBatch(self._timeline.now_s, len(decode))
        self.on_computed(decode + prefill)
        if self.position.hand_on_s:
            self._timeline.call(self.position.hand_on_s, partial(self._hand_on, decode, prefill, told))
            self._begin()
        elif self._is_tail:
            self._hand_on(decode, prefill, told)
            self._begin()
        else:
            self._begin()
            self._hand_on(decode, prefill, told)
        if decode or self._running_batch is not None:
            self._forecast_decode()

    def _hand_on(self, decode: Rows, prefill: Rows, told: Rows) -> None:
        """What was computed is at the links."""
        if told and not self._is_head:
            self._channels.post(self.previous_link, frames.window_update(told))
        if self._is_tail:
            self._draw(decode + tuple([row for row in prefill if row.sample]))
        else:
            self._forward(decode, prefill=False)
            for rows in [(row,) for row in prefill] if self._channels.heeds_due else [prefill]:
                self._forward(rows, prefill=True)

    def _draw(self, sampled: Rows) -> None:
        if sampled and self._is_head:
            self.on_drawn(sampled)
        elif sampled:
            self._channels.post(self.next_link, frames.tokens(sampled))

    def _forward(self, rows: Rows, *, prefill: bool) -> None:
        if not rows:
            return
        frame = frames.activations(rows, self.position.activation_bytes, prefill)
        if prefill:
            frame.due_s = self._sessions[rows[0].key].due_s[self.position.hop]
        if prefill and self._held_frames:
            self._held_frames.append(frame)
        elif not self._channels.post(self.next_link, frame):
            if not prefill:
                raise OverflowError(f"the link from hop {self.position.hop} is full of decode")
            self._held_frames.append(frame)
            self._channels.when_room(self._has_room)

    def _has_room(self) -> None:
        while self._held_frames and self._channels.post(self.next_link, self._held_frames[0]):
            self._held_frames.popleft()
        if self._held_frames:
            self._channels.when_room(self._has_room)
        self.pump()

    def _forecast_decode(self) -> None:
        """When decode needs the link next: section 4.2 of the transmission paper."""
        if self._forecast_session is None or self.position.hops == 1:
            return
        finish_s = decode_finish_s(
            self._forecast_session.circuit, self.position.hop, self._running_batch, self._first_batch
        )
        if finish_s is not None:
            self._channels.expect_decode(self.next_link, finish_s)


def _parted(rows: Rows) -> tuple[Rows, Rows]:
    """Decode, and the prefill behind it, of a micro-batch."""
    first = next(at for at, row in enumerate(rows) if row.prefill)
    return rows[:first], rows[first:]
