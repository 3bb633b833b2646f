"""A peer of a simulated circuit: drives the product's hop core in virtual time, with an engine that only takes time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from molink.peer.hop import events
from molink.peer.hop.hop_core import HopCore
from molink.peer.hop.session import DrawnToken, HopStep
from molink.peer.profiling.profile import StepWork
from molink.peer.profiling.step_times import StepTimes
from molink.shards.spec import ModelSpec, Span
from molink.simnet.core.channels import Channels
from molink.simnet.core.simulated_sender import Event, SimulatedSender, SimulatedSession
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


_EXPECT = events.ExpectDecode
_HANDED_ON = frozenset((events.ForwardRows, events.SendTokens, events.SendWindowUpdate))
Step = HopStep[SimulatedSession, None]


class SimulatedPeer:
    """Driver of one hop's core: owns its engine's time; what is sent is its sender's."""

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
        self.sender = sender = SimulatedSender(peer_id, spec.activation_bytes, channels, self.handle)
        self._timeline = timeline
        self._layers = spec.layers
        self._core = core
        self._engine = engine
        self._alarm = Alarm(timeline, partial(self.handle, events.Woken()))
        self._actions: Mapping[type, Callable[[Any], None]] = {
            events.ComputeBatch: self._compute,
            events.ComputeSlice: self._compute_slice,
            events.DropSlice: lambda _: None,
            events.ForwardRows: sender.forward,
            events.RetryHeld: sender.retry,
            events.AwaitRoom: sender.await_room,
            events.SendTokens: sender.send_tokens,
            events.SendGuesses: sender.send_guesses,
            events.SendWindowUpdate: sender.send_window_update,
            events.DeliverTokens: lambda effect: deliver(effect.tokens),
            events.FailSession: _fail,
            events.WakeAt: lambda effect: self._alarm.move(effect.at_s),
            events.ExpectDecode: sender.expect_decode,
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

    def _compute(self, effect: events.ComputeBatch[SimulatedSession, None]) -> None:
        steps = effect.steps
        rows = tokens = attended = sampled = 0
        for one in steps:
            count = one.tokens
            tokens += one.position + count
            rows += count
            attended += count * one.position + count * (count + 1) // 2
            sampled += one.draws
        session = steps[0].session
        taken_s = self._engine.compute_s(
            session.span, Work(rows, tokens, attended), sampled if session.is_tail else 0
        )
        taken_s += sum([one.session.drafted_s for one in steps if one.guesses])
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
            tuple([one.position + at for one in steps if not one.prefill for at in range(one.tokens)]),
            tuple([(one.tokens, one.position) for one in steps if one.prefill]),
        )

    def _record_batch(self, effect: events.RecordBatch) -> None:
        if self._engine.step_times is not None and effect.work is not None:
            self._engine.step_times.observe(effect.work, effect.compute_s * 1000)

    def _hand_on(self, effects: Sequence[object]) -> None:
        """The engine's output is at the links."""
        for effect in effects:
            self._actions[type(effect)](effect)


def _drawn(steps: Sequence[Step]) -> list[DrawnToken[SimulatedSession, None]]:
    """The tokens of these steps, where they end the model."""
    if not steps or not steps[0].session.is_tail:
        return []
    return [
        (one.session, one.step, position, position >= one.session.last_position, None, None)
        for one in steps
        for position in _drawn_positions(one)
    ]


def _drawn_positions(one: Step) -> range:
    """Of the tokens that the tail draws after a step: one, and one more for each guess that is right."""
    first = one.position + one.tokens - one.guesses
    right = one.session.right_guesses if one.guesses else 0
    return range(first, first + 1 + right if one.draws else first)


def _fail(effect: events.FailSession[SimulatedSession]) -> None:
    raise OverflowError(f"a session failed at hop {effect.session.place.hop}: {effect.detail}")
