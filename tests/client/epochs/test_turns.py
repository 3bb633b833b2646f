"""Whose turn it is to ask a swarm for a circuit follows from who came first, what was refused, and what has ended."""

import math

from hypothesis import given
from hypothesis import strategies as st

from molink.client.epochs.turns import (
    LONGEST_PUT_OFF_S,
    MOST_ASKING,
    MOST_REFUSED,
    MOST_WAITING,
    PROBES,
    TurnQueue,
)


def entered(count: int, scope: bytes = b"") -> TurnQueue[int]:
    queue: TurnQueue[int] = TurnQueue()
    assert all(queue.enter(key, scope) for key in range(count))
    return queue


def full_with(begun: int, waiting: int, now_s: float = 0.0) -> TurnQueue[int]:
    """So many have a circuit, the next one was refused, and those behind it wait as well."""
    queue = entered(begun + waiting)
    for key in range(begun):
        assert key in queue.next_turns(now_s) or key < MOST_ASKING
        queue.granted(key, now_s)
    queue.next_turns(now_s)
    for key in range(begun, min(begun + waiting, begun + MOST_ASKING)):
        queue.refused(key, now_s)
    return queue


def test_all_that_come_ask_while_there_is_room_but_so_many_at_once() -> None:
    queue = entered(MOST_ASKING + 2)
    assert queue.next_turns(0.0) == list(range(MOST_ASKING))
    assert (queue.next_turns(0.0), queue.waiting) == ([], 2)
    queue.granted(3, 0.0)
    queue.set_aside(4)
    assert queue.next_turns(0.0) == [MOST_ASKING, MOST_ASKING + 1]
    assert queue.look_s == math.inf


def test_in_a_full_swarm_one_asks_for_each_that_ends_the_first_that_came_first() -> None:
    queue = full_with(begun=4, waiting=5)
    assert queue.next_turns(0.1) == []
    queue.leave(2, 0.1)
    assert queue.next_turns(0.1) == [4]
    queue.granted(4, 0.1)
    assert queue.next_turns(0.1) == [], "what has ended was made use of"
    queue.leave(0, 0.2)
    queue.leave(1, 0.2)
    assert queue.next_turns(0.2) == [5, 6]


def test_who_leaves_before_it_has_asked_passes_its_turn_on() -> None:
    queue = full_with(begun=2, waiting=3)
    queue.leave(0, 0.1)
    assert queue.next_turns(0.1) == [2]
    queue.leave(2, 0.1)
    assert queue.next_turns(0.1) == [3]
    queue.set_aside(3)
    assert queue.next_turns(0.1) == [4], "that one lacks something else than room"


def test_one_asks_a_full_swarm_now_and_then_and_ever_more_while_it_grants() -> None:
    queue = full_with(begun=1, waiting=8)
    asks_s = queue.look_s
    assert 0.0 < asks_s <= PROBES.longest_s
    assert queue.next_turns(asks_s - 0.01) == []
    assert queue.next_turns(asks_s) == [1]
    assert queue.look_s == math.inf, "it is waited for"
    queue.granted(1, asks_s)
    assert queue.next_turns(asks_s) == [2, 3]
    queue.granted(2, asks_s)
    queue.granted(3, asks_s)
    assert queue.next_turns(asks_s) == [4, 5, 6, 7, 8]


def test_probes_that_find_no_room_come_more_rarely_and_of_another_generation_each() -> None:
    queue, asked, waits_s, now_s = full_with(begun=1, waiting=3), [], [], 0.0
    for _ in range(6):
        waits_s.append(queue.look_s - now_s)
        now_s = queue.look_s
        (key,) = queue.next_turns(now_s)
        asked.append(key)
        queue.refused(key, now_s)
    assert asked == [1, 2, 3, 1, 2, 3]
    assert waits_s == sorted(waits_s)
    assert waits_s[-1] <= PROBES.longest_s * (1 + PROBES.jitter)


def test_a_client_whose_generations_end_all_the_time_still_finds_the_room_that_others_made() -> None:
    """Each that ends is followed by one that asks in its place; the swarm grants whatever is asked."""
    queue, now_s = full_with(begun=4, waiting=40 * round(LONGEST_PUT_OFF_S)), 0.0
    under_way = {*range(4)}
    while len(under_way) == 4:
        now_s += PROBES.first_s / 5
        assert now_s < 2 * LONGEST_PUT_OFF_S, "nobody else has asked"
        ended = min(under_way)
        queue.leave(ended, now_s)
        under_way.discard(ended)
        for key in queue.next_turns(now_s):
            queue.granted(key, now_s)
            under_way.add(key)
    assert len(under_way) > 4


def test_nothing_is_looked_for_while_as_many_ask_as_may() -> None:
    queue = entered(2 * MOST_ASKING + 8)
    queue.next_turns(0.0)
    queue.refused(0, 0.0)
    for key in range(1, MOST_ASKING):
        queue.granted(key, 0.0)
        queue.leave(key, 0.0)
    later_s = queue.look_s
    assert len(queue.next_turns(0.0)) == MOST_ASKING - 1
    assert queue.enter(-1, b"", at_once=True)
    assert queue.next_turns(later_s) == []
    assert queue.look_s == math.inf, "the next to answer makes place"


def test_who_needs_more_than_what_has_ended_gave_back_does_not_hold_up_the_others() -> None:
    queue = full_with(begun=8, waiting=3)
    for ended in range(MOST_REFUSED):
        queue.leave(ended, 0.1)
        assert queue.next_turns(0.1) == [8]
        queue.refused(8, 0.1)
    queue.leave(MOST_REFUSED, 0.1)
    assert queue.next_turns(0.1) == [9]


def test_whose_scope_has_the_fewest_under_way_goes_first() -> None:
    queue = full_with(begun=4, waiting=3)
    assert queue.enter(99, b"another user")
    queue.leave(0, 0.1)
    assert queue.next_turns(0.1) == [99]
    queue.leave(1, 0.1)
    assert queue.next_turns(0.1) == [4]


def test_a_swarm_that_nobody_waits_for_is_asked_by_whoever_comes_next() -> None:
    queue = full_with(begun=1, waiting=1)
    assert queue.is_full
    queue.leave(1, 0.1)
    assert not queue.is_full
    assert queue.enter(5, b"")
    assert queue.next_turns(0.1) == [5]


def test_a_held_circuit_is_asked_for_at_once_and_no_more_wait_than_may() -> None:
    queue = full_with(begun=1, waiting=MOST_WAITING - 1)
    assert queue.enter(-3, b"")
    assert not queue.enter(-1, b"")
    assert queue.enter(-2, b"", at_once=True)
    queue.granted(-2, 0.5)
    assert queue.progressed_s == 0.5
    assert queue.waiting == MOST_WAITING


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=80), st.integers(1, 4))
def test_whatever_happens_everybody_gets_a_circuit_of_a_swarm_with_room(
    happens: list[tuple[int, int]], room: int
) -> None:
    """Generations come and leave in any order; the swarm grants while it has room, and refuses else."""
    queue: TurnQueue[int] = TurnQueue()
    begun: set[int] = set()
    inside: set[int] = set()
    now_s = 0.0

    def answer() -> None:
        while turns := queue.next_turns(now_s):
            for key in turns:
                if len(begun) < room:
                    begun.add(key)
                    queue.granted(key, now_s)
                else:
                    queue.refused(key, now_s)

    for kind, key in happens:
        now_s += 0.01
        if kind and key not in inside:
            inside.add(key)
            assert queue.enter(key, bytes([key % 2]))
        elif not kind:
            inside.discard(key)
            begun.discard(key)
            queue.leave(key, now_s)
        answer()
    served = 0
    while inside:
        now_s = now_s + 0.01 if begun or queue.look_s == math.inf else max(now_s, queue.look_s)
        answer()
        for key in sorted(begun):
            served += 1
            begun.discard(key)
            inside.discard(key)
            queue.leave(key, now_s)
            answer()
        assert now_s < 1000.0, "somebody waits for ever"
    assert queue.waiting == 0
