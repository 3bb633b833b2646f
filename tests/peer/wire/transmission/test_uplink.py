"""The scheduler of an uplink: nothing lost, nothing doubled, nothing unbounded, whatever the policy."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.properties import examples

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.just_in_time import MOST_DECODE_BYTES
from molink.peer.wire.transmission.policies import POLICIES
from molink.peer.wire.transmission.uplink import Uplink
from molink.peer.wire.transmission.values import MAX_CHUNK_BYTES, AckError, Outgoing, Send, Wait

DECODE, PREFILL, WEIGHTS = TrafficClass.DECODE, TrafficClass.PREFILL, TrafficClass.WEIGHTS
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)
MIB = 1024 * 1024
LINKS = (1, 2, 3)


def opened(policy: str = "molink", *links: int, **limits: int) -> Uplink:
    uplink = Uplink(policy, **limits)
    for link in links or (1,):
        uplink.open(link, 0.0)
    return uplink


def sends(uplink: Uplink, link: int, now_s: float) -> list[Send]:
    found = []
    while isinstance(decided := uplink.next(link, now_s), Send):
        found.append(decided)
    return found


@EVERY_POLICY
def test_an_idle_link_waits_until_something_is_pushed_and_is_woken_then(policy: str) -> None:
    uplink = opened(policy)
    assert uplink.next(1, 0.0) == Wait(math.inf)
    assert uplink.wake() == ()
    assert uplink.push(1, Outgoing(1, DECODE, 1000), 1.0)
    assert uplink.wake() == (1,)
    assert uplink.wake() == ()
    assert uplink.next(1, 1.0) == Send(1, 0, 1000, True)


@EVERY_POLICY
def test_the_first_prefill_does_not_fill_the_line_before_anything_is_known_of_it(policy: str) -> None:
    uplink = opened(policy)
    uplink.push(1, Outgoing(1, PREFILL, 16 * MIB), 0.0)
    parts = sends(uplink, 1, 0.0)
    assert 0 < sum(part.size_bytes for part in parts) <= MAX_CHUNK_BYTES
    uplink.acked(1, 1, [(1, 5.0)], 0.03)
    assert uplink.wake() == (1,)
    assert sends(uplink, 1, 0.03)


def test_a_decode_overtakes_a_prefill_and_needs_no_window() -> None:
    uplink = opened()
    uplink.push(1, Outgoing(1, PREFILL, 16 * MIB), 0.0)
    sends(uplink, 1, 0.0)
    uplink.push(1, Outgoing(2, DECODE, 32 * 1024), 0.001)
    assert uplink.next(1, 0.001) == Send(2, 0, 32 * 1024, True)


def test_a_prefill_that_nobody_acknowledges_waits_for_an_acknowledgement_and_not_for_time() -> None:
    uplink = opened()
    uplink.push(1, Outgoing(1, PREFILL, 32 * MIB), 0.0)
    now_s = free_s = 0.0
    sequence = 0
    while uplink.estimate(1).bandwidth_bytes_per_s is None or now_s < 0.5:
        parts = sends(uplink, 1, now_s)
        arrivals = []
        for part in parts:
            sequence += 1
            free_s = max(free_s, now_s) + part.size_bytes / 10e6
            arrivals.append((sequence, free_s + 0.01))
        now_s = max(now_s + 0.001, free_s + 0.02 if parts else 0.0)
        uplink.acked(1, sequence, arrivals, now_s)
    waits = 0
    while (decided := uplink.next(1, now_s)) != Wait(math.inf):
        if isinstance(decided, Wait):
            waits += 1
            now_s = decided.until_s
        else:
            sequence += 1
        assert waits < 100, "it waits for time alone"
    uplink.acked(1, sequence, [(sequence, now_s)], now_s)
    assert uplink.wake() == (1,)
    assert isinstance(uplink.next(1, now_s), Send)


def test_decodes_that_nobody_acknowledges_stop_at_a_bound() -> None:
    uplink = opened("molink", 1, limit_bytes=64 * MIB)
    for number in range(1, 600):
        uplink.push(1, Outgoing(number, DECODE, 32 * 1024), 0.0)
        sends(uplink, 1, 0.0)
    assert uplink.estimate(1).in_flight_bytes == MOST_DECODE_BYTES
    assert uplink.next(1, 1000.0) == Wait(math.inf)
    uplink.acked(1, 2, (), 1001.0)
    assert len(sends(uplink, 1, 1001.0)) == 2


@EVERY_POLICY
def test_a_cancelled_message_leaves_at_once_and_is_named(policy: str) -> None:
    uplink = opened(policy, 1, 2)
    uplink.push(1, Outgoing(1, PREFILL, MIB, (b"a",)), 0.0)
    uplink.push(1, Outgoing(2, PREFILL, MIB, (b"b", b"a")), 0.0)
    uplink.push(2, Outgoing(1, PREFILL, MIB, (b"a",)), 0.0)
    assert isinstance(uplink.next(1, 0.0), Send)
    uplink.acked(1, 1, (), 0.1)
    assert set(uplink.cancel(b"a", 0.1)) == {(1, 1), (2, 1)}
    assert uplink.next(2, 0.2) == Wait(math.inf)
    assert {part.message for part in sends(uplink, 1, 0.2)} == {2}
    assert uplink.cancel(b"b", 0.3) == ((1, 2),)
    assert uplink.next(1, 0.4) == Wait(math.inf)
    assert uplink.cancel(b"b", 0.5) == ()


def test_an_ack_of_what_was_never_sent_is_refused() -> None:
    uplink = opened()
    with pytest.raises(AckError, match="last sent"):
        uplink.acked(1, 1, (), 0.0)


@EVERY_POLICY
@given(
    messages=st.lists(
        st.tuples(
            st.sampled_from([DECODE, PREFILL]),
            st.one_of(st.integers(1, 1000), st.integers(1, 512 * 1024)),
            st.sets(st.sampled_from([b"a", b"b", b"c"]), max_size=3),
        ),
        min_size=2,
        max_size=12,
    ),
    pushed_first=st.integers(1, 12),
    cancelled=st.none() | st.sampled_from([b"a", b"b", b"c"]),
)
def test_messages_of_one_session_and_class_are_complete_in_the_order_of_their_pushes(
    policy: str,
    messages: list[tuple[TrafficClass, int, set[bytes]]],
    pushed_first: int,
    cancelled: bytes | None,
) -> None:
    uplink = opened(policy)
    waiting = [
        Outgoing(number, traffic_class, size_bytes, tuple(sessions))
        for number, (traffic_class, size_bytes, sessions) in enumerate(messages, 1)
    ]
    parts: list[Send] = []
    for batch in (waiting[:pushed_first], waiting[pushed_first:]):
        for outgoing in batch:
            assert uplink.push(1, outgoing, 0.0)
        parts += sends(uplink, 1, 0.0)
    dropped = {message for _, message in uplink.cancel(cancelled, 0.0)} if cancelled else set()
    now_s, left = 0.0, {outgoing.number for outgoing in waiting} - dropped
    while left - {part.message for part in parts if part.last}:
        now_s += 0.05
        uplink.acked(1, len(parts), (), now_s)
        parts += sends(uplink, 1, now_s)
        assert now_s < 60.0
    complete = [part.message for part in parts if part.last]
    for earlier, later in itertools.combinations((one for one in waiting if one.number in complete), 2):
        shares = set(earlier.sessions or [b""]) & set(later.sessions or [b""])
        if earlier.traffic_class is later.traffic_class and shares:
            assert complete.index(earlier.number) < complete.index(later.number)


def test_sessions_that_wait_take_turns_under_concurrent_and_a_session_has_one_turn_a_round() -> None:
    uplink = opened("concurrent")
    for number, session in enumerate((b"a", b"a", b"b"), 1):
        uplink.push(1, Outgoing(number, PREFILL, MIB, (session,)), 0.0)
    parts = sends(uplink, 1, 0.0)
    for _ in range(10):
        uplink.acked(1, len(parts), (), 1.0)
        parts += sends(uplink, 1, 1.0)
    order = [part.message for part in parts]
    assert order[:4] == [1, 3, 1, 3]
    assert sum(part.size_bytes for part in parts) == 3 * MIB


@EVERY_POLICY
def test_a_suspended_link_sends_nothing_and_goes_on_with_what_had_not_arrived(policy: str) -> None:
    uplink = opened(policy)
    uplink.push(1, Outgoing(1, PREFILL, MIB), 0.0)
    parts = sends(uplink, 1, 0.0)
    while len(parts) < 2:
        uplink.acked(1, len(parts), (), 1.0)
        parts += sends(uplink, 1, 1.0)
    uplink.suspend(1, 2.0)
    assert uplink.next(1, 2.0) == Wait(math.inf)
    in_flight_bytes = uplink.estimate(1).in_flight_bytes
    before_bytes = sum(part.size_bytes for part in parts)
    uplink.resume(1, len(parts) - 1, 3.0)
    assert uplink.wake() == (1,)
    assert uplink.estimate(1).in_flight_bytes == parts[-1].size_bytes <= in_flight_bytes
    uplink.acked(1, len(parts), (), 3.1)
    assert uplink.estimate(1).in_flight_bytes == 0
    assert sends(uplink, 1, 3.1)[0].offset == before_bytes


@EVERY_POLICY
def test_a_link_that_closes_takes_its_messages_along_sent_in_part_or_not_and_holds_up_no_other(
    policy: str,
) -> None:
    uplink = opened(policy, 1, 2)
    for link in (1, 2):
        for number, session in enumerate((b"a", b"b"), 1):
            uplink.push(link, Outgoing(number, PREFILL, MIB, (session,)), 0.0)
    assert isinstance(uplink.next(1, 0.0), Send)
    sent = int(isinstance(uplink.next(2, 0.0), Send))
    uplink.close(1)
    assert 1 not in uplink.wake()
    with pytest.raises(KeyError):
        uplink.next(1, 0.1)
    assert uplink.cancel(b"a", 0.1) == ((2, 1),)
    now_s, finished = 0.1, False
    while not finished:
        now_s += 0.05
        uplink.acked(2, sent, (), now_s)
        parts = sends(uplink, 2, now_s)
        sent += len(parts)
        finished = any(part.last and part.message == 2 for part in parts)
        assert now_s < 60.0
    assert not any(map(uplink.links_waiting, TrafficClass))
    assert uplink.links_waiting() == 0
    uplink.open(1, now_s)
    assert uplink.estimate(1).in_flight_bytes == 0
    uplink.push(1, Outgoing(1, DECODE, 10, ()), now_s + 5.0)
    assert uplink.next(1, now_s + 5.0) == Send(1, 0, 10, True)


def test_a_policy_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="molink, paper"):
        Uplink("best")


class UplinkMachine(RuleBasedStateMachine):
    """Any calls in any order, beside a plain account of what must be."""

    @initialize(policy=st.sampled_from(list(POLICIES)))
    def start(self, policy: str) -> None:
        self.policy = policy
        self.uplink = Uplink(policy, limit_bytes=4 * MIB, limit_messages=64)
        self.now_s = 0.0
        self.numbers = dict.fromkeys(LINKS, 0)
        self.left: dict[int, dict[int, tuple[Outgoing, int]]] = {link: {} for link in LINKS}
        self.flight: dict[int, list[int]] = {link: [] for link in LINKS}
        self.sequence = dict.fromkeys(LINKS, 0)
        self.suspended: set[int] = set()
        self.live: dict[tuple[int, int], set[bytes]] = {}
        for link in LINKS:
            self.uplink.open(link, 0.0)

    @rule(
        link=st.sampled_from(LINKS),
        traffic_class=st.sampled_from(TrafficClass),
        size_bytes=st.one_of(st.integers(1, 40_000), st.integers(1, 2 * MIB)),
        sessions=st.lists(st.sampled_from([b"a", b"b", b"c"]), unique=True, max_size=2),
        deadline_s=st.floats(-1.0, 1.0),
    )
    def push(
        self,
        link: int,
        traffic_class: TrafficClass,
        size_bytes: int,
        sessions: list[bytes],
        deadline_s: float,
    ) -> None:
        self.numbers[link] += 1
        if traffic_class is not PREFILL or not self.uplink.uses_deadlines:
            deadline_s = 0.0
        outgoing = Outgoing(self.numbers[link], traffic_class, size_bytes, tuple(sessions), deadline_s)
        if self.uplink.push(link, outgoing, self.now_s):
            self.left[link][outgoing.number] = (outgoing, 0)
            self.live[link, outgoing.number] = set(sessions)

    @rule(link=st.sampled_from(LINKS), passed_s=st.floats(0.0, 0.05))
    def ask(self, link: int, passed_s: float) -> None:
        self.now_s += passed_s
        decided = self.uplink.next(link, self.now_s)
        if isinstance(decided, Wait):
            assert decided.until_s > self.now_s
            # Nobody waits for ever while something could go and no ack is to come.
            if decided.until_s == math.inf and link not in self.suspended:
                assert not self.left[link] or self.flight[link]
            return
        assert link not in self.suspended
        outgoing, offset = self.left[link][decided.message]
        assert decided.offset == offset
        assert 1 <= decided.size_bytes <= MAX_CHUNK_BYTES
        assert decided.last == (offset + decided.size_bytes == outgoing.size_bytes)
        if decided.last:
            del self.left[link][decided.message]
        else:
            self.left[link][decided.message] = (outgoing, offset + decided.size_bytes)
        for number, (one, _) in self.left[link].items():
            if number < decided.message and one.traffic_class is outgoing.traffic_class:
                # One session's messages of one class leave in order; another's overtake if they are due earlier, or
                # with `concurrent`.
                assert outgoing.deadline_s < one.deadline_s or self.policy == "concurrent"
                assert not set(one.sessions or [b""]) & set(outgoing.sessions or [b""])
        self.sequence[link] += 1
        self.flight[link].append(decided.size_bytes)

    @precondition(lambda self: any(self.flight.values()))
    @rule(data=st.data(), stamped=st.booleans(), way_s=st.floats(0.0, 0.2))
    def ack(self, data: st.DataObject, stamped: bool, way_s: float) -> None:
        link = data.draw(st.sampled_from([one for one in LINKS if self.flight[one]]))
        count = data.draw(st.integers(1, len(self.flight[link])))
        first = self.sequence[link] - len(self.flight[link]) + 1
        arrivals = [(first + n, self.now_s - 7.0 + way_s) for n in range(count)] if stamped else []
        self.now_s += 0.001
        if link in self.suspended:
            self.suspended.discard(link)
            self.uplink.resume(link, first + count - 1, self.now_s)
        else:
            self.uplink.acked(link, first + count - 1, arrivals, self.now_s)
        del self.flight[link][:count]

    @rule(session=st.sampled_from([b"a", b"b", b"c"]))
    def cancel(self, session: bytes) -> None:
        dropped = set()
        for (link, number), live in self.live.items():
            if session in live and number in self.left[link]:
                live.discard(session)
                if not live:
                    del self.left[link][number]
                    dropped.add((link, number))
        assert set(self.uplink.cancel(session, self.now_s)) == dropped

    @rule(link=st.sampled_from(LINKS))
    def suspend(self, link: int) -> None:
        self.suspended.add(link)
        self.uplink.suspend(link, self.now_s)

    @rule(link=st.sampled_from(LINKS), ahead_s=st.one_of(st.none(), st.floats(-1.0, 1.0)))
    def expect(self, link: int, ahead_s: float | None) -> None:
        self.uplink.expect_decode(link, None if ahead_s is None else self.now_s + ahead_s)

    @rule()
    def everything_leaves_in_the_end(self) -> None:
        for link in LINKS:
            if link in self.suspended:
                self.suspended.discard(link)
                self.uplink.resume(link, self.sequence[link], self.now_s)
                self.flight[link].clear()
        for _ in range(5_000):
            for link in LINKS:
                self.ask(link, 0.0)
                if self.flight[link]:
                    self.uplink.acked(link, self.sequence[link], (), self.now_s)
                    self.flight[link].clear()
            self.now_s += 0.01
            if not any(self.left.values()):
                return
        raise AssertionError(f"left: {self.left}")

    @invariant()
    def what_is_in_flight_and_what_waits_is_counted_right(self) -> None:
        for link in LINKS:
            estimate = self.uplink.estimate(link)
            assert estimate.in_flight_bytes == sum(self.flight[link])
            assert math.isfinite(estimate.queueing_s)
            for bytes_per_s in (estimate.bandwidth_bytes_per_s, self.uplink.uplink_bytes_per_s):
                assert bytes_per_s is None or 0 < bytes_per_s < math.inf
            messages, waiting_bytes = self.uplink.waiting(link)
            unfinished_bytes = sum(one.size_bytes for one, _ in self.left[link].values())
            assert waiting_bytes == unfinished_bytes <= 4 * MIB
            assert messages == len(self.left[link]) <= 64
        for traffic_class in TrafficClass:
            assert self.uplink.links_waiting(traffic_class) == sum(
                any(one.traffic_class is traffic_class for one, _ in self.left[link].values())
                for link in LINKS
            )


TestUplinkMachine = UplinkMachine.TestCase
TestUplinkMachine.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
