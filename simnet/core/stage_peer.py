"""A peer of a simulated circuit: the product's decisions around an engine that only takes time."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.decode_watch import Iterations
from molink.peer.scheduling.microbatch import BatchLimits, MicroBatchQueue, PendingStep
from molink.peer.scheduling.prefill_window import ReceivedPrefill, SentPrefill
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
class Place:
    """Where a peer is in the circuit."""

    hop: int
    hops: int
    span: Span
    activation_bytes: int
    hand_on_s: float = 0.0
    """From when the engine is done to when its output is at the link."""


@dataclass(slots=True)
class _WaitingRow(PendingStep):
    """What the product's queue knows of a row, and the row."""

    row: SimulatedRow = field(kw_only=True)


class StagePeer:
    """Owner of one peer's queue, its engine's time and its prefill windows."""

    def __init__(
        self,
        timeline: Timeline,
        place: Place,
        sessions: Sessions,
        channels: Channels,
        compute_s: ComputeS,
        limits: BatchLimits,
    ) -> None:
        self.place = place
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
        self._sent = SentPrefill()
        self._received = ReceivedPrefill()
        self._held: deque[SimulatedFrame] = deque()
        self._iterations = Iterations()
        self._running: RunningBatch | None = None
        self._first: FirstBatch | None = None
        self._foretold: SimulatedSession | None = None
        self.next_link = self.previous_link = 0
        self.on_stepped: Callable[[Rows], None] = lambda _: None
        """The head's: what the engine has computed, before its output leaves."""
        self.on_drawn: Callable[[Rows], None] = lambda _: None
        """Where tail and head are one peer: tokens that were drawn here."""

    @property
    def waiting(self) -> int:
        """Steps that wait for the engine."""
        return len(self._queue)

    def add(self, row: SimulatedRow) -> None:
        """A step waits for the engine from now on; `pump` follows."""
        now_s, hop = self._timeline.now_s, self.place.hop
        session = self._sessions[row.key]
        if row.prefill and row.step == 0 and self._channels.heeds_due:
            session.due_s[hop] = due_s(session.stages, session.request.prompt_tokens, now_s)
        waiting = _WaitingRow(
            row.key, row.step, self._span, row.count, now_s, row.prefill, session.due_s[hop], row=row
        )
        if not self._queue.add(waiting):
            raise OverflowError(f"more steps wait at hop {hop} than a peer takes")

    def on_activations(self, frame: SimulatedFrame) -> None:
        """The previous hop's output."""
        for row in frame.rows:
            if row.prefill:
                size_bytes = row.count * self.place.activation_bytes
                if not self._received.take(row.key, row.step, size_bytes):
                    raise OverflowError(f"prefill came to hop {self.place.hop} beyond its window")
            self.add(row)
        self.pump()

    def on_stepped_there(self, frame: SimulatedFrame) -> None:
        """The next hop has stepped prefill."""
        for row in frame.rows:
            self._sent.stepped(row.key, row.step)
        self.pump()

    def forget(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._queue.discard(key)
        self._sent.forget(key)
        self._received.forget(key)
        self._iterations.forget(key)

    def pump(self) -> None:
        """Gives the engine a micro-batch, if it has none."""
        if self._begin():
            self._foretell()

    def _begin(self) -> bool:
        if self._busy or not (batch := self._queue.next(self._may_prefill)):
            return False
        self._busy = True
        rows = tuple([waiting.row for waiting in batch])
        decode, prefill = (rows, ()) if not rows[-1].prefill else _parted(rows)
        sampled = len(decode) + sum([row.sample for row in prefill]) if self._is_tail else 0
        taken_s = self._compute_s(self._work(rows), sampled)
        if not self._is_tail:
            for row in prefill:
                self._sent.sent(row.key, row.step, row.count * self.place.activation_bytes)
        if decode:
            self._foretold = self._sessions[decode[0].key]
            self._running = RunningBatch(self._timeline.now_s, len(decode))
        self._timeline.call(taken_s, partial(self._stepped, decode, prefill, taken_s))
        return True

    def _work(self, rows: Rows) -> Work:
        """What a step of these rows computes, which are in the sessions' KV caches from now on."""
        sessions, hop = self._sessions, self.place.hop
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
        return self._is_tail or (not self._held and self._sent.is_open(key))

    def _stepped(self, decode: Rows, prefill: Rows, taken_s: float) -> None:
        self._busy = False
        self.busy_s += taken_s
        self.steps += 1
        told = prefill and tuple([row for row in prefill if self._received.stepped(row.key, row.step)])
        self._running = None
        if decode and self._iterations.is_first([row.key for row in decode]):
            self._first = FirstBatch(self._timeline.now_s, len(decode))
        self.on_stepped(decode + prefill)
        if self.place.hand_on_s:
            self._timeline.call(self.place.hand_on_s, partial(self._hand_on, decode, prefill, told))
            self._begin()
        elif self._is_tail:
            self._hand_on(decode, prefill, told)
            self._begin()
        else:
            self._begin()
            self._hand_on(decode, prefill, told)
        if decode or self._running is not None:
            self._foretell()

    def _hand_on(self, decode: Rows, prefill: Rows, told: Rows) -> None:
        """What was computed is at the links."""
        if told and not self._is_head:
            self._channels.post(self.previous_link, frames.stepped(told))
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
        frame = frames.activations(rows, self.place.activation_bytes, prefill)
        if prefill:
            frame.due_s = self._sessions[rows[0].key].due_s[self.place.hop]
        if prefill and self._held:
            self._held.append(frame)
        elif not self._channels.post(self.next_link, frame):
            if not prefill:
                raise OverflowError(f"the link from hop {self.place.hop} is full of decode")
            self._held.append(frame)
            self._channels.when_room(self._has_room)

    def _has_room(self) -> None:
        while self._held and self._channels.post(self.next_link, self._held[0]):
            self._held.popleft()
        if self._held:
            self._channels.when_room(self._has_room)
        self.pump()

    def _foretell(self) -> None:
        """When decode needs the link next: section 4.2 of the transmission paper."""
        if self._foretold is None or self.place.hops == 1:
            return
        finish_s = decode_finish_s(self._foretold.circuit, self.place.hop, self._running, self._first)
        if finish_s is not None:
            self._channels.expect_decode(self.next_link, finish_s)


def _parted(rows: Rows) -> tuple[Rows, Rows]:
    """Decode, and the prefill behind it, of a micro-batch."""
    first = next(at for at, row in enumerate(rows) if row.prefill)
    return rows[:first], rows[first:]
