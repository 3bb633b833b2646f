"""Sessions of one circuit travel together, as many micro-batches as the rule allows, and nobody is kept waiting."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.properties import examples
from support.swarms.pipelines import stage

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.in_flight_limit import MOST_HELD_S, InFlightLimit
from molink.peer.scheduling.in_flight_rules import InFlightPlan, fixed
from molink.peer.scheduling.trip_load import BatchLoad, TripBegun, TripLoad
from molink.routing.cost.pipeline import STEP_OVERHEAD_MS, PipelineStage
from molink.shards.spec import Span

STAGES = [stage(10.0, 0.0, link_ms=5.0)] * 3
ITERATION_S = 3 * (10.0 + STEP_OVERHEAD_MS + 5.0) / 1000
HERE = (("a", Span(0, 2)), ("b", Span(2, 4)), ("c", Span(4, 6)))
THERE = (("a", Span(0, 3)), ("d", Span(3, 6)))


def key(session: int) -> LeaseKey:
    return LeaseKey(session.to_bytes(16), 1)


def limit_of(
    micro_batches: int, sessions: int, circuit: tuple[tuple[str, Span], ...] = HERE, guessed: int = 0
) -> InFlightLimit:
    """A limit under which so many sessions have joined, and are ready. Tokens of the first ones are guessed."""
    limit = InFlightLimit(fixed(micro_batches), 64)
    for session in range(sessions):
        limit.add_session(key(session), circuit, STAGES, guessed=session < guessed)
    for session in range(sessions):
        limit.record_return(key(session), 0.0)
    return limit


def numbers(keys: Sequence[LeaseKey]) -> list[int]:
    return [int.from_bytes(one.session) for one in keys]


def let_go(limit: InFlightLimit, now_s: float) -> list[int]:
    """Who goes now; the head computes their step at once."""
    released = limit.release_ready(now_s)
    limit.record_computed(released)
    return numbers(released)


def test_a_lone_session_never_waits() -> None:
    limit = limit_of(1, 1)
    for step in range(100):
        assert let_go(limit, step / 100) == [0]
        assert limit.due_s() is None
        limit.record_return(key(0), (step + 1) / 100)


def test_sessions_that_are_ready_go_in_micro_batches_of_an_even_share() -> None:
    limit = limit_of(2, 5)
    assert let_go(limit, 0.0) == [0, 1, 2]
    assert let_go(limit, 0.0) == [3, 4]


def test_the_next_micro_batch_goes_when_the_head_has_computed_the_one_before() -> None:
    limit = limit_of(2, 4)
    first = limit.release_ready(0.0)
    assert numbers(first) == [0, 1]
    assert limit.release_ready(0.0) == ()
    assert limit.due_s() is None
    limit.record_computed(first)
    assert numbers(limit.release_ready(0.0)) == [2, 3]


def test_a_session_waits_for_a_micro_batch_to_come_back_and_goes_with_it() -> None:
    limit = limit_of(1, 2)
    assert let_go(limit, 0.0) == [0, 1]
    limit.add_session(key(7), HERE, STAGES)
    limit.record_return(key(7), 0.01)
    assert limit.release_ready(0.01) == ()
    limit.record_return(key(0), 0.02)
    limit.record_return(key(1), 0.02)
    assert let_go(limit, 0.02) == [7, 0, 1]


@pytest.mark.parametrize(
    ("returned_s", "together"), [(0.02, [0, 1, 7]), (ITERATION_S, [7, 8, 0])], ids=["place", "patience"]
)
def test_who_begins_takes_no_place_from_who_travels_already_as_long_as_an_iteration(
    returned_s: float, together: list[int]
) -> None:
    limit = limit_of(2, 4)
    assert let_go(limit, 0.0) == [0, 1]
    assert let_go(limit, 0.0) == [2, 3]
    for session in (7, 8):
        limit.add_session(key(session), HERE, STAGES)
        limit.record_return(key(session), 0.0)
    assert let_go(limit, 0.01) == []
    for session in (0, 1):
        limit.record_return(key(session), returned_s)
    assert let_go(limit, returned_s) == together


def test_what_comes_back_in_parts_is_on_its_way_until_the_last_part() -> None:
    limit = limit_of(1, 2)
    let_go(limit, 0.0)
    limit.record_return(key(0), 0.01)
    assert limit.release_ready(0.01) == ()
    limit.record_return(key(1), 0.02)
    assert let_go(limit, 0.02) == [0, 1]


def test_nobody_waits_longer_than_an_iteration_is_predicted_to_take() -> None:
    limit = limit_of(1, 2)
    let_go(limit, 0.0)
    limit.record_return(key(0), 0.01)
    due_s = limit.due_s()
    assert due_s == pytest.approx(0.01 + ITERATION_S)
    assert limit.release_ready(math.nextafter(due_s, 0)) == ()
    assert let_go(limit, due_s) == [0]


def test_nobody_waits_longer_than_the_last_iteration_took_or_a_second() -> None:
    limit = limit_of(1, 2)
    for took_s, waits_s in ((0.5, 0.5), (30.0, MOST_HELD_S)):
        let_go(limit, 0.0)
        limit.record_return(key(0), took_s)
        limit.record_return(key(1), took_s)
        let_go(limit, 100.0)
        limit.record_return(key(0), 100.0)
        assert limit.due_s() == pytest.approx(100.0 + waits_s)
        limit.record_return(key(1), 0.0)


def test_nobody_waits_for_a_micro_batch_that_has_been_away_for_long() -> None:
    limit = limit_of(1, 2)
    let_go(limit, 0.0)
    limit.record_return(key(0), 0.01)
    assert let_go(limit, 1.9) == [0]
    limit.record_return(key(0), 2.1)
    assert let_go(limit, 2.1) == [0]


def test_circuits_do_not_wait_for_each_other() -> None:
    limit = limit_of(1, 2)
    let_go(limit, 0.0)
    limit.add_session(key(9), THERE, STAGES[:2])
    limit.record_return(key(9), 0.0)
    assert let_go(limit, 0.0) == [9]


def test_a_micro_batch_whose_sessions_have_all_ended_is_not_waited_for() -> None:
    limit = limit_of(1, 3)
    let_go(limit, 0.0)
    limit.record_return(key(0), 0.01)
    limit.forget_session(key(1))
    assert limit.release_ready(0.01) == ()
    limit.forget_session(key(2))
    assert let_go(limit, 0.01) == [0]


def test_a_session_that_ends_at_the_head_holds_up_nobody() -> None:
    limit = limit_of(2, 2)
    (first,) = limit.release_ready(0.0)
    limit.forget_session(first)
    assert let_go(limit, 0.0) == [1]


def test_a_session_that_never_joined_may_step_and_leave() -> None:
    limit = InFlightLimit(fixed(1), 64)
    limit.record_computed([key(1)])
    limit.forget_session(key(1))
    assert limit.release_ready(0.0) == ()
    assert key(1) not in limit


class Circulating(RuleBasedStateMachine):
    """Sessions of two circuits come, step, return in any order and end."""

    @initialize(micro_batches=st.integers(1, 6), max_sessions=st.integers(1, 8))
    def start(self, micro_batches: int, max_sessions: int) -> None:
        rule_ = fixed(micro_batches)

        def watched(
            stages: Sequence[PipelineStage],
            sessions: int,
            max_rows: int,
            rows_each: float = 1.0,
            planned: int = 0,
        ) -> InFlightPlan:
            assert (max_rows, rows_each) == (max_sessions, 1.0)
            return rule_(stages, sessions, max_rows, rows_each, planned)

        self.rule = watched
        self.max_sessions = max_sessions
        self.limit = InFlightLimit(watched, max_sessions)
        self.now_s = 0.0
        self.number = 0
        self.circuits: dict[LeaseKey, tuple[tuple[str, Span], ...]] = {}
        self.ready: dict[LeaseKey, float] = {}
        self.at_head: list[tuple[LeaseKey, ...]] = []
        self.out: set[LeaseKey] = set()
        self.travelled: set[LeaseKey] = set()

    @rule(here=st.booleans())
    def join(self, here: bool) -> None:
        self.number += 1
        one = key(self.number)
        self.circuits[one] = HERE if here else THERE
        self.limit.add_session(one, self.circuits[one], STAGES)
        self.limit.record_return(one, self.now_s)
        self.ready[one] = self.now_s

    @precondition(lambda self: self.at_head)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        batch = self.at_head.pop(data.draw(st.integers(0, len(self.at_head) - 1)))
        self.limit.record_computed(batch)
        self.out |= {one for one in batch if one in self.circuits}

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        for one in data.draw(st.sets(st.sampled_from(sorted(self.out, key=str)), min_size=1)):
            self.out.remove(one)
            self.limit.record_return(one, self.now_s)
            self.ready[one] = self.now_s

    @precondition(lambda self: self.circuits)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.circuits, key=str)))
        self.limit.forget_session(one)
        del self.circuits[one]
        self.ready.pop(one, None)
        self.out.discard(one)

    @rule(passed_s=st.floats(0, 0.1))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule()
    def release(self) -> None:
        released = self.limit.release_ready(self.now_s)
        for circuit in (HERE, THERE):
            batch = tuple(one for one in released if self.circuits[one] == circuit)
            assert len(batch) <= self.max_sessions
            assert set(batch) <= set(self.ready)
            for travels in (True, False):
                kind = [one for one in batch if (one in self.travelled) == travels]
                assert sorted(kind, key=lambda one: self.ready[one]) == kind
            if batch:
                self.at_head.append(batch)
        for one in released:
            del self.ready[one]
        self.travelled.update(released)
        for one, since_s in self.ready.items():
            if not self._with(one, (other for batch in self.at_head for other in batch)):
                assert self._with(one, self.out), "it waits, but nothing of its circuit is on its way"
                assert self.now_s < since_s + MOST_HELD_S or self._older(one), "it has waited too long"

    def _with(self, one: LeaseKey, others: object) -> bool:
        return any(self.circuits.get(other) == self.circuits[one] for other in others)  # type: ignore[attr-defined]

    def _older(self, one: LeaseKey) -> bool:
        same = [other for other in self.ready if self.circuits[other] == self.circuits[one]]
        return self.ready[one] > min(self.ready[other] for other in same)

    @invariant()
    def everybody_is_known(self) -> None:
        for one in getattr(self, "circuits", ()):
            assert one in self.limit


TestCirculating = Circulating.TestCase
TestCirculating.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_all_micro_batches_of_a_full_circuit_keep_circulating() -> None:
    limit = limit_of(4, 8)
    batches = [let_go(limit, 0.0) for _ in range(4)]
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for round_ in range(1, 20):
        for batch in batches:
            for session in batch:
                limit.record_return(key(session), float(round_))
            assert let_go(limit, float(round_)) == batch


def test_a_trip_is_told_of_what_shares_its_circuit_and_what_was_decided_of_that() -> None:
    limit = limit_of(2, 4, guessed=1)
    assert let_go(limit, 0.0) == [0, 1]
    assert limit.load_of(key(0)) == TripLoad(BatchLoad(1, 1), has_bystanders=True)
    limit.record_begun(key(0), TripBegun(guesses=3, tokens=2.5))
    assert limit.load_of(key(1)) == TripLoad(BatchLoad(4, 2.5, guesses=3), has_bystanders=True)
    limit.record_begun(key(1), TripBegun(guesses=0))
    assert let_go(limit, 0.01) == [2, 3]
    behind = (BatchLoad(5, 3.5, guesses=3),)
    assert limit.load_of(key(2)) == TripLoad(BatchLoad(1, 1), behind, has_bystanders=True)
    for session in (1, 2, 3):
        limit.forget_session(key(session))
    assert not limit.load_of(key(0)).has_bystanders


def test_sessions_with_guesses_count_as_their_rows_where_micro_batches_are_planned() -> None:
    planned: list[float] = []

    def watched(
        stages: Sequence[PipelineStage],
        sessions: int,
        max_rows: int,
        rows_each: float = 1.0,
        planned_before: int = 0,
    ) -> InFlightPlan:
        assert planned_before == (1 if planned else 0)
        planned.append(rows_each)
        return fixed(1)(stages, sessions, max_rows, rows_each)

    limit: InFlightLimit[LeaseKey] = InFlightLimit(watched, 64)
    limit.add_session(key(0), HERE, STAGES)
    for trip in range(60):
        limit.record_return(key(0), float(trip))
        let_go(limit, float(trip))
        limit.record_begun(key(0), TripBegun(guesses=7 if trip < 40 else 0))
    most = max(planned)
    assert planned[0] == 1
    assert 6 < most <= 8
    assert planned[: planned.index(most) + 1] == sorted(planned[: planned.index(most) + 1])
    assert planned[-1] < 2.5
    assert len(planned) < 20, "not with every trip"


def test_trips_that_take_longer_than_predicted_are_said_to_wait() -> None:
    limit = limit_of(1, 1)
    waited_ms = []
    for trip in range(20):
        let_go(limit, float(trip))
        waited_ms.append(limit.load_of(key(0)).waited_ms)
        limit.record_begun(key(0), TripBegun(2, 1.5, predicted_ms=100 if trip >= 10 else 990))
        limit.record_return(key(0), trip + 1.0)
    assert waited_ms[10] == 0
    assert waited_ms[11] > 0
    assert waited_ms == sorted(waited_ms)
    assert waited_ms[-1] < 1000 - 100


def test_trips_that_guesses_lengthen_by_more_than_was_predicted_are_said_to() -> None:
    """Guessing itself is no part of that: it comes before the rows."""
    limit = limit_of(1, 1)
    for trip in range(60):
        guesses, now_s = trip % 5, float(trip)
        let_go(limit, now_s)
        begun = TripBegun(
            guesses, 1.5, 100 + 2 * guesses, lengthened_ms=2 * guesses, guessing_ms=50 * guesses
        )
        limit.record_begun(key(0), begun)
        limit.record_return(key(0), now_s + (100 + (3 * 2 + 50) * guesses) / 1000)
    let_go(limit, 60.0)
    assert 1.7 < limit.load_of(key(0)).lengthens < 3.1
    assert limit.load_of(key(0)).waited_ms == pytest.approx(0, abs=0.1)
