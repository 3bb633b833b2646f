"""The order in which frames leave: decode first, nobody starved, nothing unbounded."""

from collections import deque
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.properties import examples

from molink.peer.wire.transmission.classes import DEFAULT_SHARES, TrafficClass
from molink.peer.wire.transmission.send_queue import SendQueue
from molink.peer.wire.transmission.values import Outgoing
from molink.peer.wire.transmission.weighted_fair_queue import WeightedFairQueue

DECODE, CONTROL, PREFILL, WEIGHTS = (
    TrafficClass.DECODE,
    TrafficClass.CONTROL,
    TrafficClass.PREFILL,
    TrafficClass.WEIGHTS,
)
CLASSES = st.sampled_from(TrafficClass)


class WholeMessageQueue:
    """What waits for a line that takes whole messages: the backlog, and the shares that choose from it."""

    def __init__(
        self,
        limit_bytes: int = 64 * 1024 * 1024,
        limit_frames: int = 4096,
        shares: Mapping[TrafficClass, float] = DEFAULT_SHARES,
    ) -> None:
        self._backlog = SendQueue(limit_bytes, limit_frames)
        self._shares = WeightedFairQueue(shares)
        self._frames: dict[int, bytes] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._backlog)

    @property
    def queued_bytes(self) -> int:
        return self._backlog.queued_bytes

    def push(self, traffic_class: TrafficClass, frame: bytes) -> bool:
        self._pushed += 1
        taken = self._backlog.push(Outgoing(self._pushed, traffic_class, len(frame))) is not None
        if taken:
            self._frames[self._pushed] = frame
        return taken

    def pop(self) -> bytes | None:
        heads = self._backlog.heads
        if not heads:
            return None
        waiting = {one: queued.left_bytes for one, queued in heads.items()}
        chosen = self._shares.choose(waiting)
        self._shares.charge(chosen, waiting[chosen], waiting)
        return self._frames.pop(self._backlog.take_chunk(heads[chosen], waiting[chosen]).message)


def make_frame(traffic_class: TrafficClass, size_bytes: int) -> bytes:
    """Its first byte says what class it is of."""
    return bytes([traffic_class]) + bytes(size_bytes - 1)


def class_of(frame: bytes | None) -> TrafficClass:
    assert frame is not None
    return TrafficClass(frame[0])


def test_an_empty_queue_has_nothing_to_send() -> None:
    queue = WholeMessageQueue()
    assert queue.pop() is None
    assert len(queue) == queue.queued_bytes == 0


def test_classes_leave_in_their_order_whatever_the_order_of_arrival() -> None:
    queue = WholeMessageQueue()
    for traffic_class in reversed(TrafficClass):
        assert queue.push(traffic_class, make_frame(traffic_class, 10))
    assert [class_of(queue.pop()) for _ in TrafficClass] == list(TrafficClass)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40))
@settings(deadline=None)
def test_the_frames_of_a_class_leave_in_the_order_they_came(sizes: list[int]) -> None:
    queue = WholeMessageQueue()
    frames = [bytes([number]) * size for number, size in enumerate(sizes)]
    assert all(queue.push(PREFILL, frame) for frame in frames)
    assert queue.queued_bytes == sum(sizes)
    assert [queue.pop() for _ in frames] == frames


def test_decode_goes_first_until_prefill_has_earned_its_frame() -> None:
    queue = WholeMessageQueue()
    queue.push(PREFILL, make_frame(PREFILL, 64_000))
    sent = []
    while PREFILL not in sent:
        queue.push(DECODE, make_frame(DECODE, 8_000))
        sent.append(class_of(queue.pop()))
    decode_bytes = 8_000 * sent.count(DECODE)
    earned_bytes = 64_000 / DEFAULT_SHARES[PREFILL]
    assert earned_bytes <= decode_bytes < earned_bytes + 8_000


def test_prefill_goes_at_once_when_no_decode_waits_and_is_not_made_to_pay_for_it() -> None:
    queue = WholeMessageQueue()
    queue.push(PREFILL, make_frame(PREFILL, 10_000))
    for _ in range(50):
        queue.push(PREFILL, make_frame(PREFILL, 10_000))
        assert class_of(queue.pop()) == PREFILL
    sent = []
    while PREFILL not in sent:
        queue.push(DECODE, make_frame(DECODE, 10_000))
        sent.append(class_of(queue.pop()))
    assert sent.count(DECODE) == 7


def test_a_class_saves_up_nothing_while_it_has_nothing_to_send() -> None:
    queue = WholeMessageQueue()
    queue.push(WEIGHTS, make_frame(WEIGHTS, 100))
    for _ in range(19):
        queue.push(DECODE, make_frame(DECODE, 100))
        assert class_of(queue.pop()) == DECODE
    assert class_of(queue.pop()) == WEIGHTS
    for _ in range(100):
        queue.push(DECODE, make_frame(DECODE, 100))
        queue.pop()
    queue.push(WEIGHTS, make_frame(WEIGHTS, 100))
    queue.push(DECODE, make_frame(DECODE, 100))
    assert class_of(queue.pop()) == DECODE


@settings(deadline=None, max_examples=examples(80))
@given(
    sizes=st.dictionaries(CLASSES, st.lists(st.integers(1, 5_000), min_size=1, max_size=4), min_size=2),
    parts=st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6),
    absences=st.lists(st.tuples(CLASSES, st.integers(0, 300), st.integers(1, 60)), max_size=4),
)
def test_a_class_that_waits_gets_its_share_within_a_bounded_number_of_bytes(
    sizes: dict[TrafficClass, list[int]], parts: list[float], absences: list[tuple[TrafficClass, int, int]]
) -> None:
    shares = {one: part / max(1.0, sum(parts)) for one, part in zip(TrafficClass, parts, strict=True)}
    shares = {one: share * 0.999 for one, share in shares.items()}
    largest = {one: max(choices) for one, choices in sizes.items()}
    bound = sum(largest.values()) + max(largest.values())
    queue = WholeMessageQueue(shares=shares)
    waiting = dict.fromkeys(sizes, 0)
    pushed = dict.fromkeys(sizes, 0)
    # For each class, bytes that its share promised and it has not got since it began to wait; and the least.
    owed = dict.fromkeys(sizes, 0.0)
    least = dict.fromkeys(sizes, 0.0)
    for turn in range(400):
        away = {one for one, start, length in absences if start <= turn < start + length}
        for one in sizes:
            if waiting[one] < 2 and one not in away:
                size = sizes[one][pushed[one] % len(sizes[one])]
                assert queue.push(one, make_frame(one, size))
                waiting[one] += 1
                pushed[one] += 1
        frame = queue.pop()
        if frame is None:
            continue
        for one in sizes:
            if not waiting[one]:
                owed[one] = least[one] = 0.0
                continue
            owed[one] += shares[one] * len(frame) - (len(frame) if class_of(frame) == one else 0)
            least[one] = min(least[one], owed[one])
            assert owed[one] - least[one] <= bound + 1
        waiting[class_of(frame)] -= 1


def test_decode_keeps_what_is_not_promised_to_others_whatever_else_waits() -> None:
    queue = WholeMessageQueue()
    sent = dict.fromkeys(TrafficClass, 0)
    for one in (*TrafficClass, *TrafficClass):
        queue.push(one, make_frame(one, 1_000))
    for _ in range(5_000):
        one = class_of(queue.pop())
        sent[one] += 1_000
        queue.push(one, make_frame(one, 1_000))
    assert sent[DECODE] / sum(sent.values()) == pytest.approx(0.55, abs=0.01)
    for one, share in DEFAULT_SHARES.items():
        assert sent[one] / sum(sent.values()) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("flood", [one for one in TrafficClass if one > CONTROL])
@pytest.mark.parametrize("urgent", [DECODE, CONTROL])
def test_bulk_cannot_lock_decode_and_control_out_of_a_full_queue(
    flood: TrafficClass, urgent: TrafficClass
) -> None:
    by_bytes = WholeMessageQueue(limit_bytes=8_000)
    while by_bytes.push(flood, make_frame(flood, 100)):
        pass
    assert all(by_bytes.push(urgent, make_frame(urgent, 100)) for _ in range(10))
    by_number = WholeMessageQueue(limit_frames=80)
    while by_number.push(flood, make_frame(flood, 1)):
        pass
    assert all(by_number.push(urgent, make_frame(urgent, 1)) for _ in range(10))


def test_weights_and_replication_leave_room_for_what_a_user_waits_for() -> None:
    queue = WholeMessageQueue(limit_bytes=8_000)
    while queue.push(WEIGHTS, make_frame(WEIGHTS, 100)) and queue.push(
        TrafficClass.REPLICATION, make_frame(TrafficClass.REPLICATION, 100)
    ):
        pass
    assert queue.queued_bytes == 4_000
    for one in (PREFILL, TrafficClass.HANDOVER, CONTROL, DECODE):
        assert all(queue.push(one, make_frame(one, 100)) for _ in range(10))
    assert queue.queued_bytes == 8_000
    assert not any(queue.push(one, make_frame(one, 1)) for one in TrafficClass)


def test_a_frame_that_did_not_fit_fits_when_others_have_left() -> None:
    queue = WholeMessageQueue(limit_frames=1)
    assert queue.push(WEIGHTS, b"a")
    assert not queue.push(WEIGHTS, b"b")
    assert queue.pop() == b"a"
    assert queue.push(WEIGHTS, b"b")


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        WholeMessageQueue().push(DECODE, b"")


@pytest.mark.parametrize(
    "shares",
    [{PREFILL: 0.7, WEIGHTS: 0.4}, {PREFILL: -0.1}, {PREFILL: float("nan")}, {PREFILL: float("inf")}],
)
def test_shares_that_cannot_be_kept_are_refused(shares: dict[TrafficClass, float]) -> None:
    with pytest.raises(ValueError, match="byte shares"):
        WeightedFairQueue(shares)


@pytest.mark.parametrize(("limit_bytes", "limit_frames"), [(0, 10), (10, 0)])
def test_a_queue_without_room_is_refused(limit_bytes: int, limit_frames: int) -> None:
    with pytest.raises(ValueError, match="needs room"):
        WholeMessageQueue(limit_bytes, limit_frames)


def test_classes_are_numbered_in_the_order_in_which_they_go() -> None:
    assert [one.name for one in TrafficClass] == [
        "DECODE",
        "CONTROL",
        "HANDOVER",
        "PREFILL",
        "REPLICATION",
        "WEIGHTS",
    ]
    assert all(before < after for before, after in pairwise(TrafficClass))


class SendMachine(RuleBasedStateMachine):
    """The queue beside one plain list for each class."""

    @initialize(limit_bytes=st.integers(1, 2_000), limit_frames=st.integers(1, 40))
    def start(self, limit_bytes: int, limit_frames: int) -> None:
        self.limit_bytes, self.limit_frames = limit_bytes, limit_frames
        self.queue = WholeMessageQueue(limit_bytes, limit_frames)
        self.frames: dict[TrafficClass, deque[bytes]] = {one: deque() for one in TrafficClass}
        self.number = 0

    @rule(traffic_class=CLASSES, size_bytes=st.one_of(st.integers(5, 30), st.integers(5, 2_500)))
    def push(self, traffic_class: TrafficClass, size_bytes: int) -> None:
        self.number += 1
        frame = bytes([traffic_class]) + self.number.to_bytes(4) + bytes(size_bytes - 5)
        own = self.frames[traffic_class]
        has_own_room = traffic_class in {DECODE, CONTROL, TrafficClass.HANDOVER, PREFILL}
        fits_own_room = (
            has_own_room
            and sum(map(len, own)) + size_bytes <= self.limit_bytes // 8
            and len(own) + 1 <= self.limit_frames // 8
        )
        was_empty = not len(self.queue)
        taken = self.queue.push(traffic_class, frame)
        assert taken or not fits_own_room
        assert taken or not was_empty or size_bytes > self.limit_bytes // 2
        if taken:
            own.append(frame)

    @rule()
    def pop(self) -> None:
        frame = self.queue.pop()
        if frame is None:
            assert not any(self.frames.values())
        else:
            assert frame == self.frames[class_of(frame)].popleft()

    @rule()
    def pop_all(self) -> None:
        while frame := self.queue.pop():
            assert frame == self.frames[class_of(frame)].popleft()
        assert not any(self.frames.values())

    @invariant()
    def the_queue_is_bounded_and_counts_right(self) -> None:
        assert len(self.queue) == sum(map(len, self.frames.values())) <= self.limit_frames
        waiting_bytes = sum(len(frame) for frames in self.frames.values() for frame in frames)
        assert self.queue.queued_bytes == waiting_bytes <= self.limit_bytes


TestSendMachine = SendMachine.TestCase
TestSendMachine.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
