"""Which waiting steps run together: limits, order and fairness."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.properties import examples

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.microbatch import BatchLimits, MicroBatchQueue, PendingStep
from molink.shards.spec import Span

FIRST, SECOND = Span(0, 4), Span(4, 8)


def key(session: int) -> LeaseKey:
    return LeaseKey(session.to_bytes(16), 1)


def decode(session: int, arrived_s: float, *, step: int = 0, span: Span = FIRST) -> PendingStep:
    return PendingStep(key(session), step, span, 1, arrived_s, prefill=False)


def prefill(session: int, arrived_s: float, tokens: int, *, step: int = 0, span: Span = FIRST) -> PendingStep:
    return PendingStep(key(session), step, span, tokens, arrived_s, prefill=True)


def fill(*steps: PendingStep, limits: BatchLimits | None = None) -> MicroBatchQueue:
    queue = MicroBatchQueue(limits or BatchLimits(max_tokens=100, max_sessions=8))
    assert all(map(queue.push, steps))
    return queue


def test_an_empty_queue_has_nothing_to_run() -> None:
    assert fill().next_batch() == ()


def test_one_session_runs_its_steps_one_at_a_time_and_in_order() -> None:
    steps = (prefill(1, 0.0, 50), prefill(1, 0.0, 20, step=1), decode(1, 0.0, step=2))
    queue = fill(*steps)
    assert [queue.next_batch() for _ in range(4)] == [(step,) for step in steps] + [()]
    assert len(queue) == 0


def test_sessions_of_one_span_run_together_decode_before_prefill() -> None:
    first, second, third = prefill(1, 0.0, 40), decode(2, 0.0), decode(3, 0.0)
    assert fill(first, second, third).next_batch() == (second, third, first)


def test_sessions_of_different_spans_do_not_run_together() -> None:
    first, second, third = decode(1, 0.0, span=SECOND), decode(2, 1.0), decode(3, 2.0, span=SECOND)
    queue = fill(first, second, third)
    assert queue.next_batch() == (first, third)
    assert queue.next_batch() == (second,)


def test_prefill_takes_only_what_decode_leaves_of_the_token_budget() -> None:
    waiting = [decode(1, 0.0), prefill(2, 0.0, 60), prefill(3, 0.0, 60), prefill(4, 0.0, 39)]
    queue = fill(*waiting)
    assert queue.next_batch() == (waiting[0], waiting[1], waiting[3])
    assert queue.next_batch() == (waiting[2],)


def test_a_step_larger_than_the_budget_runs_alone() -> None:
    large, small = prefill(1, 0.0, 500), decode(2, 1.0)
    queue = fill(large, small)
    assert queue.next_batch() == (large,)
    assert queue.next_batch() == (small,)


def test_the_number_of_sessions_is_limited() -> None:
    steps = [decode(session, 0.0) for session in range(11)]
    queue = fill(*steps)
    assert queue.next_batch() == tuple(steps[:8])
    assert queue.next_batch() == tuple(steps[8:])


@pytest.mark.parametrize(("decode_arrives_s", "prefill_first"), [(0.04, False), (0.06, True)])
def test_decode_overtakes_a_prefill_that_has_waited_less_than_its_patience(
    decode_arrives_s: float, prefill_first: bool
) -> None:
    steps = (prefill(1, 0.0, 100, span=SECOND), decode(2, decode_arrives_s, span=FIRST))
    queue = fill(*steps)
    order = (steps[0], steps[1]) if prefill_first else (steps[1], steps[0])
    assert (*queue.next_batch(), *queue.next_batch()) == order


def test_a_prefill_that_has_waited_longest_leaves_room_for_decode_beside_it() -> None:
    first, second = prefill(1, 0.0, 60), decode(2, 1.0)
    assert fill(first, second).next_batch() == (second, first)


def test_the_chunks_of_a_long_prompt_take_turns_with_decode() -> None:
    queue = fill(*(prefill(1, 0.0, 100, step=step) for step in range(5)), decode(2, 0.0))
    kinds = []
    now, decoded = 0.0, 0
    while batch := queue.next_batch():
        kinds.append("prefill" if batch[0].prefill else "decode")
        now += 0.4 if batch[0].prefill else 0.06
        if not batch[0].prefill and decoded < 8:
            decoded += 1
            queue.push(decode(2, now, step=decoded))
    assert kinds.count("prefill") == 5
    assert "prefill prefill" not in " ".join(kinds)


def test_a_prefill_gets_through_a_crowd_of_decodes_that_fills_every_micro_batch() -> None:
    limits = BatchLimits(max_tokens=8, max_sessions=8, prefill_patience_s=0.05)
    queue = fill(*(decode(session, 0.0) for session in range(16)), prefill(99, 0.0, 4), limits=limits)
    now = 0.0
    for _ in range(20):
        batch = queue.next_batch()
        if any(pending.prefill for pending in batch):
            break
        now += 0.01
        for pending in batch:
            queue.push(PendingStep(pending.session, pending.step + 1, FIRST, 1, now, prefill=False))
    assert any(pending.prefill for pending in batch)
    assert 0.05 <= now < 0.1


def test_of_prompts_the_one_that_is_due_first_goes_first_and_decode_waits_no_longer_for_it() -> None:
    steps = [replace(prefill(session, 0.0, 60), due_s=9.0 - session) for session in (1, 2, 3)]
    waiting = decode(4, 0.0)
    queue = fill(*steps, waiting)
    assert queue.next_batch() == (waiting, steps[2])
    assert queue.next_batch() == (steps[1],)
    assert queue.next_batch() == (steps[0],)


def test_a_prompt_whose_next_hop_takes_no_more_is_passed_over_though_it_is_due_first() -> None:
    first, second = (replace(prefill(session, 0.0, 60), due_s=float(session)) for session in (1, 2))
    queue = fill(second, first)
    assert queue.next_batch(lambda one: one != key(1)) == (second,)
    assert queue.next_batch(lambda one: one != key(1)) == ()
    assert queue.next_batch() == (first,)


def test_a_full_queue_sends_the_pressure_back() -> None:
    queue = MicroBatchQueue(BatchLimits(), capacity=2)
    assert queue.push(decode(1, 0.0))
    assert queue.push(decode(1, 0.0, step=1))
    assert not queue.push(decode(2, 0.0))
    assert len(queue) == 2
    queue.next_batch()
    assert queue.push(decode(2, 0.0))


def test_the_steps_of_a_closed_session_are_gone_and_others_stay() -> None:
    mine, other = decode(1, 0.0), decode(2, 0.0)
    queue = fill(mine, decode(1, 0.0, step=1), other)
    queue.forget_session(key(1))
    queue.forget_session(key(1))
    assert len(queue) == 1
    assert queue.next_batch() == (other,)
    assert queue.next_batch() == ()


def test_a_session_closed_in_mid_step_can_come_back_with_all_of_its_steps() -> None:
    queue = fill(decode(1, 0.0), decode(1, 0.0, step=1))
    queue.next_batch()
    queue.forget_session(key(1))
    again = [decode(1, 1.0, step=5), decode(1, 1.0, step=6)]
    assert all(map(queue.push, again))
    assert [queue.next_batch() for _ in range(3)] == [(again[0],), (again[1],), ()]


def test_a_step_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        fill().push(PendingStep(key(1), 0, FIRST, 0, 0.0, prefill=False))


@pytest.mark.parametrize(
    ("tokens", "sessions", "patience"), [(0, 1, 0.0), (1, 0, 0.0), (1, 1, -0.1), (1, 1, float("nan"))]
)
def test_limits_that_allow_nothing_are_refused(tokens: int, sessions: int, patience: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        BatchLimits(tokens, sessions, patience)


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 40)), max_size=60))
def test_every_step_runs_exactly_once(waiting: list[tuple[int, bool, int]]) -> None:
    steps = [
        PendingStep(key(session), number, Span(session % 2, 4), tokens, number / 100, is_prefill)
        for number, (session, is_prefill, tokens) in enumerate(waiting)
    ]
    queue = fill(*steps, limits=BatchLimits(max_tokens=30, max_sessions=3))
    run: list[PendingStep] = []
    while batch := queue.next_batch():
        run.extend(batch)
    assert Counter(run) == Counter(steps)
    for session in range(6):
        assert [step for step in run if step.session == key(session)] == [
            step for step in steps if step.session == key(session)
        ]


def drawing_rows(pending: PendingStep) -> int:
    """Rows behind which a token may be drawn: of a decode every one, of a prefill the last."""
    return 1 if pending.prefill else pending.tokens


class QueueMachine(RuleBasedStateMachine):
    """The queue beside plain lists, which say what could run and since when."""

    @initialize(
        tokens=st.integers(1, 30),
        sessions=st.integers(1, 4),
        patience=st.sampled_from([0.0, 0.05, 1.0]),
        capacity=st.integers(1, 25),
    )
    def start(self, tokens: int, sessions: int, patience: float, capacity: int) -> None:
        self.limits = BatchLimits(tokens, sessions, patience)
        self.capacity = capacity
        self.queue = MicroBatchQueue(self.limits, capacity)
        self.steps: dict[int, list[PendingStep]] = {}
        self.since: dict[int, float] = {}
        self.number = 0
        self.latest_s = 0.0

    @rule(
        session=st.integers(0, 7),
        tokens=st.one_of(st.just(1), st.integers(1, 40)),
        is_prefill=st.booleans(),
        passed_s=st.floats(-0.01, 0.1),
        second=st.booleans(),
        due_s=st.sampled_from([0.0, 1.0, 2.0]),
    )
    def add(
        self, session: int, tokens: int, is_prefill: bool, passed_s: float, second: bool, due_s: float
    ) -> None:
        self.number += 1
        arrived_s = max(0.0, self.latest_s + passed_s)
        pending = PendingStep(
            key(session), self.number, SECOND if second else FIRST, tokens, arrived_s, is_prefill, due_s
        )
        waiting = sum(map(len, self.steps.values()))
        assert self.queue.push(pending) == (waiting < self.capacity)
        if waiting < self.capacity:
            self.latest_s = max(self.latest_s, arrived_s)
            if session not in self.steps:
                self.since[session] = self.latest_s
            self.steps.setdefault(session, []).append(pending)

    @rule(session=st.integers(0, 7))
    def discard(self, session: int) -> None:
        self.queue.forget_session(key(session))
        self.steps.pop(session, None)
        self.since.pop(session, None)

    @rule()
    def run_next(self) -> None:
        for session in self.steps:
            self.since.setdefault(session, self.latest_s)
        patient_s = {
            session: self.since[session] + (self.limits.prefill_patience_s if steps[0].prefill else 0.0)
            for session, steps in self.steps.items()
        }
        batch = self.queue.next_batch()
        assert bool(batch) == bool(self.steps)
        if not batch:
            return
        chosen = [int.from_bytes(pending.session.session) for pending in batch]
        assert len(set(chosen)) == len(chosen)
        drawing = sum(map(drawing_rows, batch))
        assert drawing <= self.limits.max_sessions or len(batch) == 1
        assert {pending.span for pending in batch} == {batch[0].span}
        assert [pending.prefill for pending in batch] == sorted(pending.prefill for pending in batch)
        assert [self.steps[session][0] for session in chosen] == list(batch)
        first = [session for session in self.steps if patient_s[session] == min(patient_s.values())]
        assert any(self.goes_for(session, batch) for session in first)
        tokens = sum(pending.tokens for pending in batch)
        assert tokens <= self.limits.max_tokens or len(batch) == 1
        left = [steps[0] for session, steps in self.steps.items() if session not in chosen]
        assert all(
            one.span != batch[0].span
            or tokens + one.tokens > self.limits.max_tokens
            or drawing + drawing_rows(one) > self.limits.max_sessions
            for one in left
        )
        for session in chosen:
            del self.since[session]
            del self.steps[session][0]
            if not self.steps[session]:
                del self.steps[session]

    def goes_for(self, session: int, batch: tuple[PendingStep, ...]) -> bool:
        """Whether the batch is one that this session has waited for: with its decode, or with the prefill of its span
        that is due first."""
        step = self.steps[session][0]
        if not step.prefill:
            return step in batch
        alike = [one[0] for one in self.steps.values() if one[0].prefill and one[0].span == step.span]
        least_s = min(one.due_s for one in alike)
        return any(one in batch for one in alike if one.due_s == least_s)

    @invariant()
    def nothing_is_lost_and_nothing_is_unbounded(self) -> None:
        assert len(self.queue) == sum(map(len, self.steps.values())) <= self.capacity


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)
