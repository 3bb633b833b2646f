"""Owner, holders and standbys of a small circuit, exhaustively: a peer is lost, or given up, at each point of a move.

Orders in which words, copies and steps arrive are bounded by delays (Emmi, Qadeer and Rakamaric, "Delay-bounded
scheduling", 2011): the order is one of two, and at one point whatever else could happen comes first instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.circuits.faulty_ring import choices, ring_of

from molink.client.epochs.patience import MOST_FRUITLESS

PROMPT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Order:
    """Which of what may happen next does."""

    latest: bool = False
    """The last of a list, not the first."""
    delayed_at: int = -1
    """The point at which another one comes first."""
    other: int = 0
    """Which, counted from the one whose turn it would be."""

    def choose(self, point: int, count: int) -> int:
        by = self.other if point == self.delayed_at else 0
        return (count - 1 - by if self.latest else by) % count


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong."""

    point: int
    peer: int
    is_lost: bool
    """Else it lives, and the client gives it up."""


def play(hops: int, order: Order, faults: tuple[Fault, ...], kind: str = "all") -> list[int]:
    """One generation that goes over to the standby of its last hop once it has a token; how many turns there were at
    each point."""
    ring, counts, stalls, left = ring_of(hops, PROMPT_TOKENS), [], 0, 1
    ring.start(ring.one)
    end = ring.one.prompt_tokens + ring.one.new_tokens
    while ring.history < end:
        for fault in faults:
            if fault.point == len(counts) and ring.fruitless < MOST_FRUITLESS - 2:
                if not fault.is_lost:
                    if ring.run is not None and ring.run.has(f"{fault.peer}"):
                        ring.suspect(fault.peer)
                elif not {fault.peer, ring.other(fault.peer)} & ring.dead:
                    ring.lose(fault.peer)
        turns = choices(ring, left)
        if not turns:
            assert ring.run is not None, "nobody can go on"
            stalls += 1
            ring.suspect(None)
            continue
        moves = [turn for turn in turns if turn == ("want_move", (hops - 1,))]
        what, which = moves[0] if moves else turns[order.choose(len(counts), len(turns))]
        counts.append(1 if moves else len(turns))
        left -= bool(moves)
        if what == "reserve":
            ring.reserve(ring.one, which, kind)
        elif what == "take_token":
            ring.take_token()
        else:
            getattr(ring, what)(which)
    assert not ring.failed
    assert stalls <= len(faults), "nobody waits in vain where nothing went wrong"
    return counts


def each_fault(hops: int, points: int) -> Iterator[Fault]:
    for point in range(points):
        for peer in range(2 * hops):
            yield Fault(point, peer, is_lost=True)
            yield Fault(point, peer, is_lost=False)


@pytest.mark.parametrize("latest", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("hops", [1, 2])
def test_a_peer_that_is_lost_or_given_up_at_any_point_costs_no_token(hops: int, latest: bool) -> None:
    order = Order(latest)
    for fault in each_fault(hops, len(play(hops, order, ()))):
        play(hops, order, (fault,))


@pytest.mark.full
@pytest.mark.parametrize("latest", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("hops", [1, 2])
def test_the_same_whatever_else_comes_first_at_one_point(hops: int, latest: bool) -> None:
    counts = play(hops, Order(latest), ())
    for delayed_at, count in enumerate(counts):
        for other in range(1, count):
            order = Order(latest, delayed_at, other)
            for fault in each_fault(hops, len(play(hops, order, ()))):
                play(hops, order, (fault,))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["all", "latest", "whole", "nothing"])
@pytest.mark.parametrize("latest", [False, True], ids=["first", "last"])
def test_two_faults_at_any_two_points_cost_no_token(latest: bool, kind: str) -> None:
    order = Order(latest)
    for first in each_fault(1, len(play(1, order, ()))):
        points = len(play(1, order, (first,), kind))
        for second in each_fault(1, points):
            if second.point >= first.point:
                play(1, order, (first, second), kind)
