"""What waits at a hop is bounded session by session, whatever the hop before it sends."""

from collections.abc import Sequence
from typing import Any

import pytest
from support.swarms.hop_ring import core_of, session_of

from molink.dht.records.records import LayerLatency
from molink.peer.hop import events
from molink.peer.hop.hop_core import HopCore
from molink.peer.hop.session import HopSession
from molink.peer.profiling.profile import Profile, SliceLatency
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.microbatch import QUEUED_STEPS
from molink.peer.scheduling.prefill_slices import SliceSizer
from molink.peer.scheduling.prefill_window import WINDOW_STEPS
from molink.shards.spec import Span

CIRCUIT = (("head", Span(0, 2)), ("middle", Span(2, 4)), ("tail", Span(4, 6)))
SLOW = Profile((LayerLatency(1, 0.001),), 0.001, 0.001, 1e9, slice_latencies=(SliceLatency(16, 1e3, 1e3),))
Effects = Sequence[events.HopEffect[HopSession, Any]]


class Hop:
    """A hop's core with sessions of one circuit, whose first rows begin at the sequence's beginning."""

    def __init__(self, hop: int, sessions: int, sizer: SliceSizer | None = None) -> None:
        self.core: HopCore[HopSession, Any] = core_of(CIRCUIT[hop][0], sizer=sizer)
        self.previous = CIRCUIT[hop - 1][0]
        self.sessions = [session_of(number, CIRCUIT, hop) for number in range(sessions)]
        for session in self.sessions:
            self.tell(events.SessionOpened(session))

    def tell(self, event: events.HopEvent[HopSession, Any]) -> Effects:
        return self.core.handle(event, 0.0)

    def rows(self, number: int, step: int, *, prefill: bool = False, tokens: int = 1) -> Effects:
        """A step of that session, which begins where the one before did."""
        row = (self.sessions[number], step, tokens, True, prefill, 0, None)
        return self.tell(events.RowsArrived(self.previous, [row]))

    def computed(self, effects: Effects) -> Effects:
        """The engine is done with the micro-batch that it was given then."""
        (batch,) = [one.steps for one in effects if isinstance(one, events.ComputeBatch)]
        return self.tell(events.BatchComputed(batch))


def failure_in(effects: Effects) -> events.FailSession[HopSession]:
    (found,) = [one for one in effects if isinstance(one, events.FailSession)]
    return found


@pytest.mark.parametrize("hop", [1, 2])
@pytest.mark.parametrize("prefill", [False, True])
def test_no_decode_step_of_a_session_waits_behind_another_step_and_the_steps_of_others_have_their_room(
    hop: int, *, prefill: bool
) -> None:
    """The token of an honest one was drawn from the step before, which every hop had computed by then."""
    peer = Hop(hop, 2)
    given = peer.rows(0, 0, prefill=True)
    peer.rows(1, 0, prefill=prefill)
    failure = failure_in(peer.rows(1, 1))
    assert (failure.session, failure.peer_id, failure.code) == (peer.sessions[1], peer.previous, "protocol")
    assert failure.detail == "decode step 1 came while an earlier step waited here"
    assert peer.core.queued == 0
    given = peer.computed(given)
    for step in range(1, 5):
        given = peer.rows(0, step)
        peer.computed(given)
    assert not peer.sessions[0].ended


def test_no_decode_step_waits_behind_one_whose_token_cannot_be_drawn_yet() -> None:
    tail = Hop(2, 1)
    tail.sessions[0].progress.draws_to = 0
    tail.rows(0, 0)
    assert len(tail.sessions[0].progress.waiting) == 1
    assert failure_in(tail.rows(0, 1)).peer_id == "middle"
    assert tail.core.is_empty
    assert not tail.sessions[0].progress.waiting


def test_no_decode_step_waits_behind_a_part_of_its_prompt_that_is_computed_in_slices() -> None:
    middle = Hop(1, 2, SliceSizer(StepTimes(SLOW)))
    middle.computed(middle.rows(0, 0, prefill=True))
    decoding = middle.rows(0, 1)
    middle.rows(1, 0, prefill=True, tokens=40)
    (sliced,) = [one for one in middle.computed(decoding) if isinstance(one, events.ComputeSlice)]
    assert [one.session for one in sliced.slice_.parts] == [middle.sessions[1]]
    assert failure_in(middle.rows(1, 1)).session is middle.sessions[1]


def test_steps_of_more_sessions_than_a_peer_takes_are_refused_as_busy() -> None:
    middle = Hop(1, QUEUED_STEPS + 2)
    for number in range(QUEUED_STEPS + 1):
        middle.rows(number, 0)
    assert middle.core.queued == QUEUED_STEPS
    failure = failure_in(middle.rows(QUEUED_STEPS + 1, 0))
    assert (failure.code, failure.detail) == ("busy", "more steps wait here than this peer takes")
    assert failure.session is middle.sessions[-1]


@pytest.mark.parametrize("prefill", [False, True])
def test_where_no_more_may_wait_that_session_ends_of_which_most_does_and_one_within_its_share_is_computed(
    *, prefill: bool
) -> None:
    crowd = QUEUED_STEPS // WINDOW_STEPS + 1
    middle = Hop(1, crowd + 1)
    given = middle.rows(0, 0, prefill=True)
    for number in range(crowd):
        for step in range(number == 0, WINDOW_STEPS):
            if middle.core.queued < QUEUED_STEPS:
                middle.rows(number, step, prefill=True)
    assert middle.core.queued == QUEUED_STEPS
    honest = middle.sessions[crowd]
    failure = failure_in(middle.rows(crowd, 0, prefill=prefill))
    assert failure.session is not honest
    assert (failure.code, failure.peer_id) == ("busy", "middle")
    assert not honest.ended
    assert [one for one in middle.sessions if one.ended] == [failure.session]
    assert middle.core.queued <= QUEUED_STEPS
    computed = set[HopSession]()
    while honest not in computed:
        (batch,) = [one.steps for one in given if isinstance(one, events.ComputeBatch)]
        computed |= {one.session for one in batch}
        given = middle.tell(events.BatchComputed(batch))
    assert failure.session not in computed - {middle.sessions[0]}
