"""Parts of prompts are computed slice by slice beside those who decode, and how far each has come is the core's."""

from collections.abc import Sequence
from typing import Any

from support.swarms.hop_ring import core_of, session_of

from molink.dht.records.records import LayerLatency
from molink.peer.hop import events
from molink.peer.hop.layered_prefill import PrefillSlice
from molink.peer.hop.session import HopSession, HopStep
from molink.peer.profiling.profile import Profile, SliceLatency, StepWork
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.prefill_slices import LEAST_TOKENS, SliceSizer
from molink.shards.spec import Span

SLOW = Profile((LayerLatency(1, 0.001),), 0.001, 0.001, 1e9, slice_latencies=(SliceLatency(16, 1e3, 1e3),))
"""Slices are the smallest there are: LEAST_TOKENS through a layer."""
LAYERS = 2
CIRCUIT = (("head", Span(0, LAYERS)), ("middle", Span(LAYERS, 4)), ("tail", Span(4, 6)))
DECODE = StepWork(LAYERS, starts=False, ends=False, decode_contexts=(5,))
Effects = Sequence[events.HopEffect[HopSession, Any]]


class Hop:
    """A middle hop at which the first of its sessions decodes."""

    def __init__(self, sessions: int = 2) -> None:
        self.core = core_of("middle", sizer=SliceSizer(StepTimes(SLOW)))
        self.sessions = [session_of(number, CIRCUIT, 1) for number in range(sessions)]
        self.batch: Sequence[HopStep[HopSession, Any]] = ()
        """What the engine was given last."""
        for session in self.sessions:
            self.tell(events.SessionOpened(session))
        self.rows(0, 0, 5, prefill=True)
        self.computed()
        self.rows(0, 1, 1)

    def tell(self, event: events.HopEvent[HopSession, Any]) -> Effects:
        effects = self.core.handle(event, 0.0)
        for one in effects:
            if isinstance(one, events.ComputeBatch):
                self.batch = one.steps
        return effects

    def rows(self, session: int, step: int, tokens: int, *, prefill: bool = False) -> Effects:
        row = (self.sessions[session], step, tokens, True, prefill, 0, None)
        return self.tell(events.RowsArrived("head", [row]))

    def computed(self) -> Effects:
        """The engine is done with its micro-batch."""
        steps = self.batch
        work = None if any(one.prefill for one in steps) else DECODE
        return self.tell(events.BatchComputed(steps, compute_s=1e-6, work=work))

    def sliced(self, slice_: PrefillSlice[HopSession, Any]) -> Effects:
        """The engine is done with its slice."""
        through, left, layers_left = slice_.advanced()
        whole = events.BatchComputed(through) if through else None
        return self.tell(events.SliceComputed(slice_, whole, left, layers_left, 1.0, is_complete=True))


def slice_in(effects: Effects) -> PrefillSlice[HopSession, Any]:
    (found,) = [one.slice_ for one in effects if isinstance(one, events.ComputeSlice)]
    return found


def test_a_prompt_goes_through_in_slices_and_is_forwarded_whole() -> None:
    hop = Hop()
    hop.rows(1, 0, 2 * LEAST_TOKENS, prefill=True)
    slice_, progress = slice_in(hop.computed()), []
    while True:
        (part,) = slice_.parts
        progress.append((slice_.begins, slice_.size.tokens, slice_.layers_left, part.left_tokens))
        effects = hop.sliced(slice_)
        if any(isinstance(one, events.ForwardRows) for one in effects):
            break
        slice_ = slice_in(effects)
    assert progress == [
        (True, (LEAST_TOKENS,), 2, 2 * LEAST_TOKENS),
        (False, (LEAST_TOKENS,), 1, 2 * LEAST_TOKENS),
        (True, (LEAST_TOKENS,), 2, LEAST_TOKENS),
        (False, (LEAST_TOKENS,), 1, LEAST_TOKENS),
    ]
    (forwarded,) = [one for one in effects if isinstance(one, events.ForwardRows)]
    assert [step.tokens for frame in forwarded.frames for step in frame.steps] == [2 * LEAST_TOKENS]
    assert not hop.sessions[1].waits


def test_a_decode_step_comes_between_slices_and_a_slice_between_decode_steps() -> None:
    hop = Hop()
    hop.rows(1, 0, 4 * LEAST_TOKENS, prefill=True)
    slice_, seen = slice_in(hop.computed()), []
    for step in range(2, 5):
        hop.rows(0, step, 1)
        seen += [type(one).__name__ for one in hop.sliced(slice_) if isinstance(one, events.ComputeBatch)]
        hop.rows(1, step - 1, LEAST_TOKENS, prefill=True)
        slice_ = slice_in(hop.computed())
    assert seen == ["ComputeBatch"] * 3


def test_a_session_that_ends_while_its_slice_is_computed_leaves_nothing() -> None:
    hop = Hop()
    hop.rows(1, 0, 2 * LEAST_TOKENS, prefill=True)
    slice_ = slice_in(hop.computed())
    assert hop.tell(events.SessionEnded(hop.sessions[1])) == []
    assert [type(one).__name__ for one in hop.sliced(slice_)] == ["DropSlice"]
    hop.tell(events.SessionEnded(hop.sessions[0]))
    assert hop.core.is_empty


def test_a_session_that_ends_with_its_tokens_between_layers_leaves_nothing() -> None:
    hop = Hop()
    hop.rows(1, 0, 2 * LEAST_TOKENS, prefill=True)
    slice_ = slice_in(hop.computed())
    hop.rows(0, 2, 1)
    hop.sliced(slice_)
    assert [type(one).__name__ for one in hop.tell(events.SessionEnded(hop.sessions[1]))] == ["DropSlice"]
    assert not any(isinstance(one, events.ComputeSlice) for one in hop.computed())
    hop.tell(events.SessionEnded(hop.sessions[0]))
    assert hop.core.is_empty


def test_a_part_that_fails_in_a_slice_fails_alone_and_the_others_go_on() -> None:
    hop = Hop(3)
    for session in (1, 2):
        hop.rows(session, 0, 8, prefill=True)
    slice_ = slice_in(hop.computed())
    (failing,) = slice_.parts
    whole = events.BatchComputed((), [(failing, "RuntimeError: it broke")])
    effects = hop.tell(events.SliceComputed(slice_, whole, (), 0, 1.0, is_complete=False))
    (failure,) = [one for one in effects if isinstance(one, events.FailSession)]
    assert failure.session is failing.session
    assert slice_in(effects).parts[0].session is not failing.session


def test_parts_that_the_engine_has_left_out_come_later() -> None:
    hop = Hop(3)
    hop.rows(1, 0, 8, prefill=True)
    hop.rows(2, 0, 8, prefill=True)
    slice_ = slice_in(hop.computed())
    effects = hop.tell(events.SliceComputed(slice_, None, (), 0, 1.0, is_complete=False))
    assert slice_in(effects).parts == slice_.parts


def test_until_a_session_that_goes_over_has_left_prompts_leave_room_for_the_rest_of_its_copy() -> None:
    circuit = (("only", Span(0, LAYERS)),)
    core = core_of("only", sizer=SliceSizer(StepTimes(SLOW)))
    leaving, prompted = (session_of(number, circuit, 0) for number in (0, 1))
    for session in (leaving, prompted):
        core.handle(events.SessionOpened(session), 0.0)
    effects = core.handle(events.PromptStarted(leaving, 5, 0, range), 0.0)
    for step in range(2):
        (batch,) = [one for one in effects if isinstance(one, events.ComputeBatch)]
        if step:
            core.handle(events.MoveAsked(leaving), 0.0)
        token = (leaving, step, 5 + step, False, None, None)
        effects = core.handle(events.BatchComputed(batch.steps, tokens=[token], work=DECODE), 0.0)
    assert [one for one in effects if isinstance(one, events.EpochOver)]
    slice_ = slice_in(core.handle(events.PromptStarted(prompted, 4 * LEAST_TOKENS, 0, range), 60.0))
    assert slice_.size.tokens == (LEAST_TOKENS,)
    core.handle(events.SessionEnded(leaving), 60.0)
    through, left, layers_left = slice_.advanced()
    whole = events.BatchComputed(through) if through else None
    computed = events.SliceComputed(slice_, whole, left, layers_left, 1.0, is_complete=True)
    assert slice_in(core.handle(computed, 60.0)).size.layers == layers_left, "all that is left at once"
