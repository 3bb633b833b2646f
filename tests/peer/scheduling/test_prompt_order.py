"""Whose prompt goes first: the shorter ones, but nobody starves, and nothing but prompts changes places."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.links.data_plane import End, asynchronous, soon
from support.swarms.pipelines import pipelines, stage

from molink.peer.scheduling.prompt_order import PATIENCE, due_s
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import expect
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.policies import POLICIES
from molink.peer.wire.transmission.send_queue import SendQueue
from molink.peer.wire.transmission.uplink import Uplink
from molink.peer.wire.transmission.values import Outgoing, Send
from molink.routing.cost.pipeline import PipelineStage

DECODE, PREFILL = TrafficClass.DECODE, TrafficClass.PREFILL


@given(pipelines(), st.integers(1, 4000), st.integers(1, 4000), st.floats(0, 1e6))
def test_a_longer_prompt_is_due_no_earlier_and_none_before_it_comes(
    stages: list[PipelineStage], one: int, other: int, arrived_s: float
) -> None:
    shorter, longer = sorted((one, other))
    assert arrived_s <= due_s(stages, shorter, arrived_s) <= due_s(stages, longer, arrived_s)


def test_a_prompt_is_due_when_it_has_waited_several_times_as_long_as_its_slowest_part_takes() -> None:
    line = stage(fixed_ms=1.0, row_ms=0.0, uplink_mbps=8.0, sent_bytes=1000)
    engine = stage(fixed_ms=0.0, row_ms=2.0)
    assert due_s((line,), 500, 3.0) == pytest.approx(3.0 + PATIENCE * 0.5)
    assert due_s((line, engine, line), 500, 3.0) == pytest.approx(3.0 + PATIENCE * 1.0)
    assert due_s((), 500, 3.0) == 3.0


prompts = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 2000), st.integers(1, 4)), min_size=1, max_size=20
)
"""Of each: how long after the one before it comes, its tokens, and in how many chunks it is pushed."""


@settings(deadline=None)
@given(prompts, st.lists(st.integers(0, 3), max_size=80))
def test_nothing_overtakes_a_prompt_that_comes_after_it_was_due(
    coming: list[tuple[float, int, int]], taken: list[int]
) -> None:
    stages = (stage(fixed_ms=0.0, row_ms=0.1),)
    backlog, numbers = SendQueue(1 << 30, 4096), count(1)
    arrived_s, came_s, due = 0.0, {}, {}
    waiting: list[Outgoing] = []
    takes = iter(taken)
    for session, (after_s, tokens, chunks) in enumerate(coming):
        arrived_s += after_s
        came_s[session], due[session] = arrived_s, due_s(stages, tokens, arrived_s)
        for _ in range(chunks):
            one = Outgoing(next(numbers), PREFILL, tokens, (session.to_bytes(1),), due[session])
            assert backlog.push(one) is not None
            waiting.append(one)
        for _ in range(next(takes, 0)):
            leave(backlog, waiting, came_s, due)
    while waiting:
        leave(backlog, waiting, came_s, due)
    assert len(backlog) == backlog.queued_bytes == 0


def leave(
    backlog: SendQueue, waiting: list[Outgoing], came_s: dict[int, float], due: dict[int, float]
) -> None:
    """The next message leaves, if there is one: in order within its session, and unfair to nobody."""
    if not waiting:
        return
    queued = backlog.heads[PREFILL]
    assert backlog.take_chunk(queued, queued.left_bytes).last
    gone = queued.outgoing
    session = int.from_bytes(gone.sessions[0])
    assert gone == next(one for one in waiting if one.sessions == gone.sessions)
    waiting.remove(gone)
    for other in waiting:
        passed = int.from_bytes(other.sessions[0])
        if other.number < gone.number:
            assert came_s[session] < due[passed]
        if due[passed] < due[session]:
            raise AssertionError("a prompt that is due earlier waits for one that is due later")


def next_chunks(uplink: Uplink, chunks: int) -> list[Send]:
    """What leaves a link whose other end acknowledges everything at once."""
    sent = []
    for number in range(1, chunks + 1):
        decided = uplink.next(1, number * 1.0)
        assert isinstance(decided, Send)
        sent.append(decided)
        uplink.acked(1, number, (), number * 1.0)
    return sent


def test_a_short_prompt_overtakes_what_is_left_of_a_long_one_and_decode_overtakes_both() -> None:
    uplink = Uplink("molink")
    uplink.open(1, 0.0)
    uplink.push(1, Outgoing(1, PREFILL, 40_000, (b"long",), 20.0), 0.0)
    uplink.push(1, Outgoing(2, PREFILL, 10_000, (b"long",), 20.0), 0.0)
    [first] = next_chunks(uplink, 1)
    assert (first.message, first.last) == (1, False)
    uplink.push(1, Outgoing(3, PREFILL, 10_000, (b"short",), 5.0), 0.1)
    uplink.push(1, Outgoing(4, DECODE, 100, (b"other",)), 0.1)
    order = []
    while isinstance(decided := uplink.next(1, 2.0), Send):
        order.append(decided.message)
        uplink.acked(1, len(order) + 1, (), 2.0)
    assert uplink.waiting(1) == (0, 0)
    assert list(dict.fromkeys(order)) == [4, 3, 1, 2]


def test_the_chunks_of_one_session_stay_in_order_whenever_they_are_due_and_whoever_shares_them() -> None:
    backlog = SendQueue(1 << 20, 100)
    pushed = [
        Outgoing(1, PREFILL, 10, (b"a", b"b"), 9.0),
        Outgoing(2, PREFILL, 10, (b"c",), 8.0),
        Outgoing(3, PREFILL, 10, (b"b",), 1.0),
        Outgoing(4, PREFILL, 10, (), 7.0),
        Outgoing(5, PREFILL, 10, (), 0.0),
    ]
    for one in pushed:
        backlog.push(one)
    left = []
    while backlog.heads:
        queued = backlog.heads[PREFILL]
        left.append(backlog.take_chunk(queued, 10).message)
    assert left == [2, 1, 3, 4, 5]


@asynchronous
async def test_over_a_real_link_a_prompt_that_is_due_first_arrives_first_and_decode_before_it() -> None:
    async with End() as a, End() as b:
        link = await a.links.to(b.facts)
        assert a.links.uses_deadlines
        posted = (
            (1, PREFILL, b"long", 20.0),
            (2, PREFILL, b"long", 20.0),
            (3, PREFILL, b"short", 5.0),
            (4, DECODE, b"other", 0.0),
        )
        for number, traffic_class, session, at_s in posted:
            header = pb.Activations(hidden_size=number)
            assert link.post(header, bytes(400_000), traffic_class, (session,), at_s)
        arrived = [expect((await soon(b.handler.frames.get()))[1], pb.Activations) for _ in posted]
    assert [header.hidden_size for header in arrived] == [4, 3, 1, 2]


def test_only_ours_heeds_when_prompts_are_due() -> None:
    assert [name for name in POLICIES if Uplink(name).uses_deadlines] == ["molink"]
