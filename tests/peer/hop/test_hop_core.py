"""What a hop does with its sessions' steps: in order, once, within windows, and nothing is left of who has ended."""

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from support.swarms.hop_ring import CAPACITY, core_of, session_of

from molink.peer.hop import events
from molink.peer.hop.hop_core import HopCore
from molink.peer.hop.session import HopSession, HopStep
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.prefill_window import ReceiveWindow, SendWindow
from molink.peer.scheduling.prompt_gathering import MOST_WAIT_S, PromptGathering
from molink.shards.spec import Span

CIRCUIT = (("head", Span(0, 2)), ("middle", Span(2, 4)), ("tail", Span(4, 6)))
Effect = TypeVar("Effect")
Effects = Sequence[events.HopEffect[HopSession, Any]]


class Hop:
    """A core with sessions of one circuit, and what it has said last."""

    def __init__(self, hop: int, sessions: int = 1, core: HopCore[HopSession, Any] | None = None) -> None:
        self.core = core or core_of(CIRCUIT[hop][0])
        self.previous = CIRCUIT[hop - 1][0]
        self.sessions = [session_of(number, CIRCUIT, hop) for number in range(sessions)]
        self.effects: Effects = ()
        self.batch: Sequence[HopStep[HopSession, Any]] = ()
        """What the engine has been given."""
        self.now_s = 0.0
        for session in self.sessions:
            self.tell(events.SessionOpened(session))

    def tell(self, event: events.HopEvent[HopSession, Any]) -> list[str]:
        """The kinds of its effects."""
        self.effects = self.core.handle(event, self.now_s)
        if isinstance(event, events.BatchComputed):
            self.batch = ()
        for one in self.effects:
            if isinstance(one, events.ComputeBatch):
                self.batch = one.steps
        return [type(one).__name__ for one in self.effects]

    def rows(self, *rows: tuple[int, int, int, bool], peer_id: str | None = None) -> list[str]:
        """Session, step, tokens and whether it is prefill of each."""
        arrived = []
        ends: dict[int, int] = {}
        for one, step, count, prefill in rows:
            position = ends.get(one, self.sessions[one].progress.end)
            arrived.append((self.sessions[one], step, count, True, prefill, position, None))
            ends[one] = position + count
        return self.tell(events.RowsArrived(peer_id or self.previous, arrived))

    def row_at(self, number: int, step: int, position: int, count: int) -> list[str]:
        """A step of a session that begins at that position."""
        row = (self.sessions[number], step, count, True, step == 0, position, None)
        return self.tell(events.RowsArrived(self.previous, [row]))

    def start(self, number: int, tokens: int) -> list[str]:
        return self.tell(events.PromptStarted(self.sessions[number], tokens, 0, slice_of))

    def tokens(
        self, *tokens: tuple[int, int, int], peer_id: str = "tail", is_last: bool = False
    ) -> list[str]:
        """Session, step and position of each."""
        drawn = [(self.sessions[one], step, position, is_last, None, None) for one, step, position in tokens]
        return self.tell(events.TokensReturned(peer_id, drawn))

    def computed(self) -> list[str]:
        """The engine is done with what it has."""
        return self.tell(events.BatchComputed(self.batch))

    def failure(self) -> events.FailSession[HopSession]:
        (found,) = [one for one in self.effects if isinstance(one, events.FailSession)]
        return found


def slice_of(first: int, stop: int) -> range:
    return range(first, stop)


def told(hop: Hop, kind: type[Effect]) -> Effect:
    (found,) = [one for one in hop.effects if isinstance(one, kind)]
    return found


# -- steps


def test_a_row_is_computed_and_forwarded_and_the_engine_has_the_next_batch_before() -> None:
    hop = Hop(1, 2)
    assert hop.rows((0, 0, 5, True)) == ["ComputeBatch"]
    assert hop.rows((1, 0, 5, True)) == []
    assert hop.computed() == ["ComputeBatch", "ForwardRows", "RecordBatch"]
    frame = told(hop, events.ForwardRows).frames[0]
    assert (frame.peer_id, [one.session for one in frame.steps]) == ("tail", hop.sessions[:1])
    assert hop.computed() == ["ForwardRows", "RecordBatch"]


def test_a_tail_sends_its_tokens_before_the_engine_has_the_next_batch() -> None:
    hop = Hop(2, 2)
    hop.rows((0, 0, 5, True))
    hop.rows((1, 0, 5, True))
    token = (hop.sessions[0], 0, 5, False, None, None)
    assert hop.tell(events.BatchComputed(hop.batch, tokens=[token])) == [
        "SendTokens",
        "ComputeBatch",
        "RecordBatch",
    ]
    assert told(hop, events.SendTokens).peer_id == "head"


def test_a_repeat_has_no_effect() -> None:
    hop = Hop(1)
    hop.rows((0, 0, 5, True))
    hop.computed()
    assert hop.rows((0, 0, 5, True)) == []
    assert hop.rows((0, 1, 1, False)) == ["ComputeBatch", "ExpectDecode"]
    assert hop.rows((0, 1, 1, False)) == []
    assert hop.sessions[0].progress.end == 6


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ((0, 2, 1, False), "step 2 of 1 rows came when step 1 was expected"),
        ((0, 1, 0, False), "step 1 of 0 rows came when step 1 was expected"),
        ((0, 1, 10_000, True), "step 1 of 10000 rows came when step 1 was expected"),
    ],
)
def test_a_step_that_does_not_follow_ends_the_session_and_names_who_sent_it(
    row: tuple[int, int, int, bool], detail: str
) -> None:
    hop = Hop(1)
    hop.rows((0, 0, 5, True))
    hop.computed()
    assert hop.rows(row) == ["FailSession"]
    failure = hop.failure()
    assert (failure.peer_id, failure.code, failure.detail) == ("head", "protocol", detail)
    assert hop.core.is_empty


def test_a_step_beyond_what_was_reserved_ends_the_session() -> None:
    hop = Hop(1)
    hop.sessions[0].progress.end = CAPACITY
    hop.sessions[0].progress.next_step = 1
    hop.rows((0, 1, 1, False))
    assert hop.failure().detail == f"step 1 goes beyond the {CAPACITY} tokens that were reserved"


def test_rows_of_who_is_not_the_previous_hop_have_no_effect() -> None:
    hop = Hop(1)
    assert hop.rows((0, 0, 5, True), peer_id="tail") == []
    assert hop.tell(events.FaultFound(hop.sessions[0], "tail", "nonsense")) == []
    assert hop.tell(events.FaultFound(hop.sessions[0], "head", "nonsense")) == ["FailSession"]


@pytest.mark.parametrize("position", [0, 16, 20, 32])
def test_the_first_step_begins_where_the_cache_can_go_on(position: int) -> None:
    hop = Hop(1)
    hop.tell(events.SessionReady(hop.sessions[0], 32, 16))
    hop.row_at(0, 0, position, 5)
    assert hop.batch[0].position == position
    hop.computed()
    hop.rows((0, 1, 1, False))
    assert hop.batch[0].position == position + 5


@pytest.mark.parametrize("position", [1, 15, 33])
def test_a_first_step_where_the_cache_cannot_go_on_ends_the_session(position: int) -> None:
    hop = Hop(1, 2)
    hop.tell(events.SessionReady(hop.sessions[0], 32, 16))
    assert hop.row_at(0, 0, position, 5) == ["FailSession"]
    failure = hop.failure()
    assert (failure.peer_id, failure.code) == ("head", "protocol")
    assert failure.detail == f"step 0 begins at position {position}, and may at 16 to 32"
    assert hop.rows((1, 0, 5, True)) == ["ComputeBatch"]


@pytest.mark.parametrize("position", [5, 6, 8, 9])
def test_a_step_may_go_back_within_the_step_before_it(position: int) -> None:
    hop = Hop(1)
    hop.rows((0, 0, 5, True), (0, 1, 4, True))
    hop.computed()
    hop.computed()
    assert "ComputeBatch" in hop.row_at(0, 2, position, 1)
    assert hop.sessions[0].progress.end == position + 1
    assert [(one.step, one.position, one.tokens) for one in hop.batch] == [(2, position, 1)]


@pytest.mark.parametrize("position", [0, 4, 10])
def test_a_step_further_back_than_the_one_before_it_or_behind_a_gap_ends_the_session(position: int) -> None:
    hop = Hop(1)
    hop.rows((0, 0, 5, True), (0, 1, 4, True))
    assert hop.row_at(0, 2, position, 1) == ["FailSession"]
    assert hop.failure().detail == f"step 2 begins at position {position}, and may at 5 to 9"


def test_a_repeat_has_no_effect_whatever_its_position() -> None:
    hop = Hop(1)
    hop.rows((0, 0, 5, True), (0, 1, 4, True), (0, 2, 1, True))
    for position in (0, 5, 7, 9, 10, 999):
        for step in (0, 1, 2):
            assert hop.row_at(0, step, position, 1) == []
    assert hop.sessions[0].progress.end == 10


def test_sessions_whose_steps_fail_fail_alone() -> None:
    hop = Hop(1, 3)
    hop.rows((0, 0, 5, True), (1, 0, 5, True), (2, 0, 5, True))
    first, second, third = hop.batch
    kinds = hop.tell(events.BatchComputed((first, third), [(second, "ValueError: it broke")]))
    assert kinds == ["FailSession", "ForwardRows", "RecordBatch"]
    failure = hop.failure()
    assert (failure.peer_id, failure.code, failure.detail) == ("middle", "engine", "ValueError: it broke")
    assert failure.session is second.session


# -- the head


def test_a_prompt_is_queued_chunk_by_chunk_and_the_last_one_draws_a_token() -> None:
    hop = Hop(0, core=core_of("head", chunk_tokens=4))
    hop.start(0, 10)
    seen = []
    while hop.batch:
        seen += [(one.step, one.payload, one.draws) for one in hop.batch]
        hop.computed()
    assert seen == [(0, range(3), False), (1, range(3, 7), False), (2, range(7, 10), True)]


def test_a_token_is_the_clients_once_and_the_next_step_begins() -> None:
    hop = Hop(0)
    hop.start(0, 5)
    hop.computed()
    assert hop.tokens((0, 0, 5)) == ["ComputeBatch", "DeliverTokens", "ExpectDecode"]
    assert hop.tokens((0, 0, 5)) == []
    hop.computed()
    assert hop.tokens((0, 1, 6), is_last=True) == ["DeliverTokens"]
    assert hop.core.queued == 0


def test_tokens_that_do_not_follow_end_the_session_and_name_the_tail() -> None:
    hop = Hop(0, core=core_of("head", chunk_tokens=4))
    hop.start(0, 10)
    hop.tokens((0, 0, 10))
    assert hop.failure().detail == "a token came before the whole prompt was sent"
    hop = Hop(0)
    hop.start(0, 5)
    hop.computed()
    assert hop.tokens((0, 0, 5), peer_id="middle") == []
    hop.tokens((0, 3, 5))
    assert hop.failure().detail == "a token of step 3 came after step 0"


def test_sessions_of_a_circuit_wait_for_each_other_and_no_longer_than_the_core_asks_to_be_woken() -> None:
    hop = Hop(0, 2)
    for number in (0, 1):
        hop.start(number, 5)
        hop.computed()
    hop.tokens((0, 0, 5), (1, 0, 5))
    assert len(hop.batch) == 2
    hop.computed()
    hop.now_s = 0.001
    assert hop.tokens((0, 1, 6)) == ["DeliverTokens", "WakeAt"]
    hop.now_s = told(hop, events.WakeAt).at_s
    assert hop.tell(events.Woken()) == ["ComputeBatch", "ExpectDecode"]


def test_prompts_wait_for_those_that_are_about_to_start() -> None:
    def slow_ms(work: StepWork) -> float:
        return 1e6

    hop = Hop(0, 2, core_of("head", gathering=PromptGathering(slow_ms, 512)))
    for session in hop.sessions:
        assert hop.tell(events.PromptExpected(session, 5)) == []
    assert hop.start(0, 5) == ["WakeAt"]
    assert told(hop, events.WakeAt).at_s == pytest.approx(MOST_WAIT_S)
    assert hop.start(1, 5) == ["ComputeBatch"]
    assert len(hop.batch) == 2


def test_a_lone_peer_steps_on_with_its_own_tokens_and_with_who_waits() -> None:
    core = core_of("only")
    circuit = (("only", Span(0, 6)),)
    first, second = (session_of(number, circuit, 0) for number in (0, 1))
    effects: Effects = ()
    for session in (first, second):
        core.handle(events.SessionOpened(session), 0.0)
        effects = [*effects, *core.handle(events.PromptStarted(session, 5, 0, slice_of), 0.0)]
    (begun,) = [one for one in effects if isinstance(one, events.ComputeBatch)]
    tokens = [(first, 0, 5, False, None, None)]
    follows, delivers, *_ = core.handle(events.BatchComputed(begun.steps, tokens=tokens), 0.0)
    assert isinstance(follows, events.ComputeBatch)
    assert isinstance(delivers, events.DeliverTokens)
    assert {one.session for one in follows.steps} == {first, second}


def test_prompts_count_for_the_line_as_far_as_they_wait_and_go_to_another_hop() -> None:
    hop = Hop(0, core=core_of("head", chunk_tokens=4))
    hop.start(0, 12)
    row_bytes = hop.sessions[0].place.stages[0].sent_bytes
    assert (hop.core.prompt_bytes_to_send, hop.core.queued) == (8 * row_bytes, 2)
    assert row_bytes > 0
    hop.tell(events.SessionEnded(hop.sessions[0]))
    assert (hop.core.prompt_bytes_to_send, hop.core.queued) == (0, 0)
    alone = session_of(1, (("head", Span(0, 6)),), 0)
    hop.tell(events.SessionOpened(alone))
    hop.tell(events.PromptStarted(alone, 12, 0, slice_of))
    assert hop.core.prompt_bytes_to_send == 0


# -- links


def test_what_a_link_has_no_room_for_waits_in_order_and_prefill_behind_it_too() -> None:
    hop = Hop(1, 2)
    hop.rows((0, 0, 5, True), (0, 1, 5, True), (1, 0, 1, False))
    hop.computed()
    frames = told(hop, events.ForwardRows).frames
    assert [frame.prefill for frame in frames] == [False, True]
    assert hop.tell(events.FramesRefused("tail", frames[1:])) == ["AwaitRoom"]
    hop.rows((0, 2, 5, True), (1, 1, 1, False))
    hop.computed()
    assert {one.session for one in hop.batch} == {hop.sessions[1]}, "no prefill while some waits"
    hop.computed()
    assert [frame.prefill for frame in told(hop, events.ForwardRows).frames] == [False]
    assert hop.tell(events.LinkHasRoom("tail")) == ["RetryHeld"]
    held = told(hop, events.RetryHeld).frames
    assert [one.step for frame in held for one in frame.steps] == [0, 1]
    assert hop.tell(events.HeldRetried("tail", 1)) == ["AwaitRoom"]
    assert hop.tell(events.HeldRetried("tail", 1)) == ["ComputeBatch"]


def test_decode_that_a_link_has_no_room_for_fails_its_sessions() -> None:
    hop = Hop(1)
    hop.rows((0, 0, 1, False))
    hop.computed()
    hop.tell(events.FramesRefused("tail", told(hop, events.ForwardRows).frames))
    failure = hop.failure()
    assert (failure.peer_id, failure.code) == ("tail", "lost")
    assert failure.detail == "the link to the next hop is full of decode"


def test_who_cannot_be_reached_fails_the_sessions_that_had_something_for_it_once() -> None:
    hop = Hop(1, 2)
    hop.rows((0, 0, 5, True), (1, 0, 5, True))
    hop.computed()
    undelivered = events.Undelivered("tail", hop.sessions, "no open link to the next hop")
    assert hop.tell(undelivered) == ["FailSession"] * 2
    assert hop.tell(undelivered) == []
    assert hop.core.is_empty


def test_prefill_beyond_the_window_ends_the_session_and_computed_prefill_is_credited() -> None:
    hop = Hop(1)
    hop.sessions[0].prefill.receive_window = ReceiveWindow(10)
    hop.rows((0, 0, 5, True), (0, 1, 5, True))
    assert hop.computed() == ["SendWindowUpdate", "ComputeBatch", "ForwardRows", "RecordBatch"]
    assert told(hop, events.SendWindowUpdate).stepped == [(hop.sessions[0], 0)]
    hop.rows((0, 2, 5, True), (0, 3, 5, True))
    failure = hop.failure()
    assert failure.detail == "step 3 came while as much prefill waited here as may"


def test_only_the_next_hop_credits_what_it_has_computed() -> None:
    hop = Hop(0, core=core_of("head", chunk_tokens=4))
    hop.sessions[0].prefill.send_window = SendWindow(3)
    hop.start(0, 10)
    hop.computed()
    assert not hop.batch
    assert hop.tell(events.WindowUpdated("tail", [(hop.sessions[0], 0)])) == []
    assert hop.tell(events.WindowUpdated("middle", [(hop.sessions[0], 0)])) == ["ComputeBatch"]


# -- ends


def test_a_session_that_ends_leaves_nothing_wherever_it_was() -> None:
    def slow_ms(work: StepWork) -> float:
        return 1e6

    hop = Hop(0, 4, core_of("head", chunk_tokens=4, gathering=PromptGathering(slow_ms, 512)))
    for session in hop.sessions:
        hop.tell(events.PromptExpected(session, 10))
    for number in (0, 1, 2):
        hop.start(number, 10)
    for session in hop.sessions:
        hop.tell(events.SessionEnded(session))
        assert not session.waits
    assert hop.core.is_empty
    assert hop.tell(events.Woken()) == []
    middle = Hop(1, 2, core_of("middle", uses_deadlines=True))
    middle.rows((0, 0, 5, True), (1, 0, 5, True))
    middle.rows((0, 1, 5, True), (1, 1, 1, False))
    middle.computed()
    middle.tell(events.FramesRefused("tail", told(middle, events.ForwardRows).frames))
    for session in middle.sessions:
        middle.tell(events.SessionEnded(session))
    assert middle.core.is_empty
    middle.computed()
    assert middle.core.is_empty


@pytest.mark.parametrize("apart", [True, False])
def test_a_next_hop_never_sees_a_chunk_without_the_one_before_it_whenever_the_session_ends(
    apart: bool,
) -> None:
    hop = Hop(1, 1, core_of("middle", uses_deadlines=apart))
    hop.rows((0, 0, 5, True), (0, 1, 5, True))
    (first,) = hop.batch
    hop.batch = ()
    hop.rows((0, 2, 5, True))
    hop.tell(events.BatchComputed([first], tokens=[]))
    hop.tell(events.FramesRefused("tail", told(hop, events.ForwardRows).frames))
    hop.tell(events.SessionEnded(hop.sessions[0]))
    hop.computed()
    assert not [one for one in hop.effects if isinstance(one, events.ForwardRows)]
    hop.tell(events.LinkHasRoom("tail"))
    retried = [one for one in hop.effects if isinstance(one, events.RetryHeld)]
    steps = [one.step for effect in retried for frame in effect.frames for one in frame.steps]
    assert steps == list(range(len(steps)))
    assert hop.core.is_empty == apart


def test_short_prompts_that_were_computed_together_go_on_in_one_frame_and_long_ones_as_they_are_due() -> None:
    hop = Hop(1, 4, core_of("middle", uses_deadlines=True))
    hop.rows((0, 0, 8, True), (1, 0, 40, True), (2, 0, 16, True), (3, 0, 17, True))
    hop.computed()
    sent = told(hop, events.ForwardRows).frames
    whose = [[hop.sessions.index(one.session) for one in frame.steps] for frame in sent]
    assert sorted(whose) == [[0, 2], [1], [3]]
    (shared,) = [frame for frame in sent if len(frame.steps) == 2]
    assert [frame for frame in sent if frame.is_short] == [shared]


def test_a_frame_that_waits_goes_on_for_those_who_have_not_ended() -> None:
    hop = Hop(1, 2)
    hop.rows((0, 0, 5, True), (1, 0, 5, True))
    hop.computed()
    hop.tell(events.FramesRefused("tail", told(hop, events.ForwardRows).frames))
    hop.tell(events.SessionEnded(hop.sessions[0]))
    assert hop.tell(events.LinkHasRoom("tail")) == ["RetryHeld"]


def test_what_a_session_that_has_ended_still_gets_has_no_effect() -> None:
    hop = Hop(1)
    hop.tell(events.SessionEnded(hop.sessions[0]))
    assert hop.rows((0, 0, 5, True)) == []
    assert hop.tell(events.WindowUpdated("tail", [(hop.sessions[0], 3)])) == []
    assert hop.tell(events.Undelivered("tail", hop.sessions, "gone")) == []
    assert hop.tell(events.SessionEnded(hop.sessions[0])) == []


# -- draws that depend on the tokens before


def test_a_step_that_draws_beyond_what_is_known_waits_and_nothing_else_does() -> None:
    hop = Hop(2, 2)
    hop.tell(events.DrawsAllowed(hop.sessions[0], 0))
    assert hop.rows((0, 0, 5, True)) == []
    assert hop.rows((1, 0, 5, True)) == ["ComputeBatch"]
    hop.computed()
    assert hop.tell(events.DrawsAllowed(hop.sessions[0], 5)) == ["ComputeBatch"]
    hop.computed()
    assert hop.rows((0, 1, 1, False)) == []
    assert hop.tell(events.DrawsAllowed(hop.sessions[0], 6))[0] == "ComputeBatch"


def test_a_step_that_waited_is_computed_once_however_often_it_came() -> None:
    hop = Hop(2)
    hop.tell(events.DrawsAllowed(hop.sessions[0], 0))
    assert hop.rows((0, 0, 5, True)) == hop.rows((0, 0, 5, True)) == []
    assert hop.tell(events.DrawsAllowed(hop.sessions[0], 5)) == ["ComputeBatch"]
    assert [one.step for one in hop.batch] == [0]
    assert hop.rows((0, 0, 5, True)) == []


def test_nothing_is_left_of_a_step_that_waits_when_its_session_ends() -> None:
    hop = Hop(2)
    hop.tell(events.DrawsAllowed(hop.sessions[0], 0))
    hop.rows((0, 0, 5, True))
    hop.tell(events.SessionEnded(hop.sessions[0]))
    assert hop.core.is_empty
    assert hop.tell(events.DrawsAllowed(hop.sessions[0], 5)) == []
