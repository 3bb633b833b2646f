"""A peer of a simulated circuit: drives the product's hop core in virtual time, with an engine that only takes time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from molink.peer.hop import events
from molink.peer.hop.frames import OutgoingFrame
from molink.peer.hop.hop_core import HopCore
from molink.peer.hop.session import DrawnToken, HopPosition, HopSession, HopStep
from molink.peer.memory.leases import LeaseKey
from molink.peer.profiling.profile import StepWork
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.decode_forecast import DecodeForecast
from molink.peer.wire.transmission.classes import TrafficClass
from molink.shards.spec import ModelSpec, Span
from molink.simnet.core.channels import Channels
from molink.simnet.core.frames import SimulatedFrame, activations_bytes, small_frame_bytes
from molink.simnet.core.request_load import Request
from molink.simnet.core.timeline import Alarm, Timeline
from molink.simnet.devices.devices import SequenceChunk, Work, work_of

ComputeS = Callable[[Span, Work, int], float]
"""Seconds of a step: through these layers, of so much work, for so many sessions that draw a token."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """What an engine that only takes time takes."""

    compute_s: ComputeS
    hand_on_s: float = 0.0
    """From when it is done to when its output is at the link."""
    step_times: StepTimes | None = None
    """Those that the hop's core goes by; they learn from its steps."""


class SimulatedSession(HopSession):
    """A generation at one hop."""

    def __init__(self, key: LeaseKey, position: HopPosition, request: Request) -> None:
        super().__init__(key, position)
        self.request = request
        self.last_position = request.prompt_tokens + request.new_tokens - 1
        """Of a token that is drawn, in the sequence."""
        self.after = self.before = self
        """The same generation at the next hop, and at the previous one."""


_EXPECT = events.ExpectDecode
_PREFILL, _DECODE = TrafficClass.PREFILL, TrafficClass.DECODE
"""By its name, an enumeration finds a member by a call."""
_HANDED_ON = frozenset((events.ForwardRows, events.SendTokens, events.SendWindowUpdate))
Step = HopStep[SimulatedSession, None]
Event = events.HopEvent[SimulatedSession, None]


class SimulatedPeer:
    """Driver of one hop's core: owns its engine's time and its links."""

    def __init__(
        self,
        timeline: Timeline,
        spec: ModelSpec,
        peer_id: str,
        core: HopCore[SimulatedSession, None],
        channels: Channels,
        engine: SimulatedEngine,
        deliver: Callable[[Sequence[DrawnToken[SimulatedSession, None]]], None],
    ) -> None:
        """`deliver` takes tokens at the head."""
        self.busy_s = 0.0
        self.steps = 0
        self.links: dict[str, int] = {}
        """Numbers of the links, by who is at the other end."""
        self._timeline = timeline
        self._activation_bytes = spec.activation_bytes
        self._layers = spec.layers
        self._peer_id = peer_id
        self._core = core
        self._channels = channels
        self._engine = engine
        self._awaits_room = False
        self._alarm = Alarm(timeline, partial(self.handle, events.Woken()))
        self._watch = DecodeForecast(self._expect, clock=float)
        self._actions: Mapping[type, Callable[[Any], None]] = {
            events.ComputeBatch: self._compute,
            events.ComputeSlice: self._compute_slice,
            events.DropSlice: lambda _: None,
            events.ForwardRows: self._forward,
            events.RetryHeld: self._retry,
            events.AwaitRoom: self._await_room,
            events.SendTokens: self._send_tokens,
            events.SendWindowUpdate: self._send_window_update,
            events.DeliverTokens: lambda effect: deliver(effect.tokens),
            events.FailSession: _fail,
            events.WakeAt: lambda effect: self._alarm.move(effect.at_s),
            events.ExpectDecode: self._expect_decode,
            events.RecordBatch: self._record_batch,
        }

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any session."""
        return self._core.is_empty

    def handle(self, event: Event) -> None:
        """Tells the core, and does what it says, in its order."""
        actions, handed_on = self._actions, None
        for effect in self._core.handle(event, self._timeline.now_s):
            kind = type(effect)
            if kind in _HANDED_ON and self._engine.hand_on_s:
                handed_on = [effect] if handed_on is None else [*handed_on, effect]
            elif handed_on is not None and kind is _EXPECT:
                handed_on.append(effect)  # a link forgets what it expects when a decode comes to it
            else:
                actions[kind](effect)
        if handed_on is not None:
            self._timeline.call(self._engine.hand_on_s, partial(self._hand_on, handed_on))

    # -- the engine

    def _compute(self, effect: events.ComputeBatch[SimulatedSession, None]) -> None:
        steps = effect.steps
        rows = tokens = attended = sampled = 0
        for one in steps:
            after = one.context_tokens + one.tokens
            tokens += after
            if one.prefill:
                count = one.tokens
                rows += count
                attended += count * one.context_tokens + count * (count + 1) // 2
                sampled += one.sample
            else:
                rows += 1
                attended += after
                sampled += 1
        session = steps[0].session
        taken_s = self._engine.compute_s(
            session.span, Work(rows, tokens, attended), sampled if session.is_tail else 0
        )
        self._timeline.call(taken_s, partial(self._computed, steps, taken_s))

    def _computed(self, steps: Sequence[Step], taken_s: float) -> None:
        self.busy_s += taken_s
        self.steps += 1
        work = None if self._engine.step_times is None else self._work(steps)
        self.handle(events.BatchComputed(steps, tokens=_drawn(steps), compute_s=taken_s, work=work))

    def _compute_slice(self, effect: events.ComputeSlice[SimulatedSession, None]) -> None:
        slice_ = effect.slice_
        span = slice_.parts[0].span
        first = span.stop - slice_.layers_left
        chunks = [
            SequenceChunk(count, left.context_tokens)
            for count, left in zip(slice_.size.tokens, slice_.left, strict=True)
        ]
        through, left, layers_left = slice_.advanced()
        drawn = _drawn(through)
        taken_s = self._engine.compute_s(Span(first, first + slice_.size.layers), work_of(chunks), len(drawn))
        whole = events.BatchComputed(through, tokens=drawn, compute_s=taken_s) if through else None
        answer = events.SliceComputed(slice_, whole, left, layers_left, taken_s, is_complete=True)
        self._timeline.call(taken_s, partial(self._slice_computed, answer))

    def _slice_computed(self, answer: events.SliceComputed[SimulatedSession, None]) -> None:
        self.busy_s += answer.taken_s
        self.steps += 1
        self.handle(answer)

    def _work(self, steps: Sequence[Step]) -> StepWork:
        span = steps[0].span
        return StepWork(
            len(span),
            span.start == 0,
            span.stop == self._layers,
            tuple([one.context_tokens for one in steps if not one.prefill]),
            tuple([(one.tokens, one.context_tokens) for one in steps if one.prefill]),
        )

    def _record_batch(self, effect: events.RecordBatch) -> None:
        if self._engine.step_times is not None and effect.work is not None:
            self._engine.step_times.observe(effect.work, effect.compute_s * 1000)

    # -- links

    def _hand_on(self, effects: Sequence[object]) -> None:
        """The engine's output is at the links."""
        for effect in effects:
            self._actions[type(effect)](effect)

    def _forward(self, effect: events.ForwardRows[SimulatedSession, None]) -> None:
        """What finds no room comes back, and prefill behind other prefill that waits: the core may have sent it on
        before that was refused."""
        refused: list[OutgoingFrame[SimulatedSession, None]] = []
        for frame in effect.frames:
            waits = frame.prefill and (self._awaits_room or refused)
            if waits or not self._post(frame):
                refused.append(frame)
        if refused:
            self.handle(events.FramesRefused(effect.peer_id, refused))

    def _retry(self, effect: events.RetryHeld[SimulatedSession, None]) -> None:
        self._awaits_room = False
        posted = 0
        for frame in effect.frames:
            if not self._post(frame):
                break
            posted += 1
        self.handle(events.HeldRetried(effect.peer_id, posted))

    def _await_room(self, effect: events.AwaitRoom) -> None:
        self._awaits_room = True
        self._channels.when_room(partial(self.handle, events.LinkHasRoom(effect.peer_id)))

    def _post(self, frame: OutgoingFrame[SimulatedSession, None]) -> bool:
        steps = frame.steps
        if prefill := steps[0].prefill:
            traffic_class, due_s, tokens = _PREFILL, frame.due_s, sum([one.tokens for one in steps])
        else:
            traffic_class, due_s, tokens = _DECODE, 0.0, len(steps)
        rows = [(one.session.after, one.step, one.tokens, one.sample, prefill, 0, None) for one in steps]
        size_bytes = activations_bytes(len(steps), tokens, self._activation_bytes)
        whose = tuple([one.session.key.session for one in steps])
        arrives = events.RowsArrived(self._peer_id, rows)
        return self._channels.post(
            self.links[frame.peer_id], SimulatedFrame(traffic_class, size_bytes, whose, arrives, due_s)
        )

    def _send_tokens(self, effect: events.SendTokens[SimulatedSession, None]) -> None:
        tokens = [(token[0].after, *token[1:]) for token in effect.tokens]
        arrives = events.TokensReturned(self._peer_id, tokens)
        self._send(effect.peer_id, _DECODE, [token[0] for token in tokens], arrives)

    def _send_window_update(self, effect: events.SendWindowUpdate[SimulatedSession]) -> None:
        stepped = [(session.before, step) for session, step in effect.stepped]
        arrives = events.WindowUpdated(self._peer_id, stepped)
        self._send(effect.peer_id, TrafficClass.CONTROL, [session for session, _ in stepped], arrives)

    def _send(
        self, peer_id: str, traffic_class: TrafficClass, sessions: Sequence[SimulatedSession], content: Event
    ) -> None:
        size_bytes = small_frame_bytes(len(sessions))
        whose = tuple([session.key.session for session in sessions])
        frame = SimulatedFrame(traffic_class, size_bytes, whose, content)
        if not self._channels.post(self.links[peer_id], frame):
            raise OverflowError(f"the link from hop {self._peer_id} is full of decode")

    # -- decode to come

    def _expect_decode(self, effect: events.ExpectDecode) -> None:
        if not self.links:
            return
        if effect.computing is not None:
            self._watch.computing(effect.computing)
        elif effect.first is not None:
            self._watch.awaiting(effect.first)

    def _expect(self, peer_id: str, at_s: float) -> None:
        self._channels.expect_decode(self.links[peer_id], at_s)


def _drawn(steps: Sequence[Step]) -> list[DrawnToken[SimulatedSession, None]]:
    """The tokens of these steps, where they end the model."""
    if not steps or not steps[0].session.is_tail:
        return []
    drawn = []
    for one in steps:
        if one.sample:
            session, position = one.session, one.context_tokens + one.tokens
            drawn.append((session, one.step, position, position >= session.last_position, None, None))
    return drawn


def _fail(effect: events.FailSession[SimulatedSession]) -> None:
    raise OverflowError(f"a session failed at hop {effect.session.position.hop}: {effect.detail}")
