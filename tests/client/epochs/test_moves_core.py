"""Which hops a session leaves is a matter of what it was told, when, and how often it could not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.client.epochs.moves_core import (
    BETTER_WITHIN_S,
    GONE_WITHIN_S,
    LEAST_NOTICE_S,
    MARGIN_S,
    MOST_ATTEMPTS,
    MovesCore,
    replaced_hops,
)
from molink.client.epochs.successor_core import MOST_GIVEN_UP
from molink.routing import Route, RouteHop
from molink.shards.spec import Span

PEERS = ("a", "b", "c")


def route(*hops: tuple[str, int, int]) -> Route:
    return Route(
        tuple(RouteHop(peer_id, Span(start, stop), (), 1.0, 1.0) for peer_id, start, stop in hops), 1.0, 0.0
    )


def test_a_hop_that_leaves_is_left_as_long_as_there_is_time() -> None:
    core: MovesCore[str] = MovesCore()
    assert core.is_idle
    core.note_leaving("b", now_s=10.0, within_s=5.0)
    assert not core.is_idle
    assert core.to_leave(PEERS) == {"b": None}
    assert core.deadline_s(["b"]) == 15.0 - MARGIN_S
    assert core.wants(PEERS, 14.4)
    assert not core.wants(PEERS, 14.6)
    assert not core.wants(("a", "c"), 11.0), "it is no hop"


def test_a_hop_that_has_served_for_as_long_as_it_has_said_may_go_and_one_that_fails_before_has_not_left() -> (
    None
):
    core: MovesCore[str] = MovesCore()
    core.note_leaving("b", now_s=10.0, within_s=5.0)
    assert not core.may_go("a", 15.0)
    assert not core.may_go("b", 14.4)
    assert core.may_go("b", 14.6)
    assert core.may_go("b", 14.9 + GONE_WITHIN_S)
    assert not core.may_go("b", 15.1 + GONE_WITHIN_S), "it has come back since"


@pytest.mark.parametrize("first_s", [3.0, 30.0])
def test_a_hop_that_says_twice_that_it_leaves_may_go_when_the_first_of_the_two_times_is_over(
    first_s: float,
) -> None:
    core: MovesCore[str] = MovesCore()
    core.note_leaving("b", now_s=0.0, within_s=first_s)
    core.note_leaving("b", now_s=0.0, within_s=33.0 - first_s)
    assert not core.may_go("b", 2.0)
    assert core.may_go("b", 3.0)


def test_a_hop_that_gives_no_time_to_leave_it_has_not_left() -> None:
    core: MovesCore[str] = MovesCore()
    core.note_leaving("b", now_s=0.0, within_s=0.0)
    assert not core.may_go("b", 0.1)
    assert core.may_go("b", LEAST_NOTICE_S)


def test_a_hop_that_comes_back_and_leaves_again_serves_for_as_long_as_it_says_then() -> None:
    core: MovesCore[str] = MovesCore()
    core.note_leaving("b", now_s=0.0, within_s=3.0)
    core.note_leaving("b", now_s=100.0, within_s=30.0)
    assert not core.may_go("b", 101.0)
    assert core.may_go("b", 130.0)


def test_better_peers_are_gone_over_to_together_or_only_who_goes_is_left() -> None:
    core: MovesCore[str] = MovesCore()
    core.note_better({"a": "d", "c": "e"}, now_s=0.0)
    core.note_leaving("b", now_s=0.0, within_s=100.0)
    assert core.to_leave(PEERS) == {"a": "d", "b": None, "c": "e"}
    assert core.deadline_s(PEERS) == BETTER_WITHIN_S - MARGIN_S
    assert not core.lacks_better(["c", "a"])
    assert core.lacks_better(["a", "b"])
    core.drop_better()
    assert core.to_leave(PEERS) == {"b": None}


def test_a_circuit_of_other_spans_is_given_up_when_a_hop_leaves_and_after_a_few_failures() -> None:
    core: MovesCore[str] = MovesCore(elsewhere=True)
    assert core.wants(PEERS, 0.0)
    core.note_leaving("x", 0.0, 10.0)
    assert not core.elsewhere
    for _ in range(MOST_GIVEN_UP):
        assert core.may_compute_anew
        core.elsewhere = True
        core.record_failed()
    assert not core.may_compute_anew


def test_moves_that_fail_end_the_attempts_until_one_succeeds() -> None:
    core: MovesCore[str] = MovesCore()
    core.note_leaving("a", 0.0, 1000.0)
    for _ in range(MOST_ATTEMPTS):
        assert core.wants(PEERS, 1.0)
        core.record_failed()
    assert not core.wants(PEERS, 1.0)
    core.record_moved()
    assert core.wants(PEERS, 1.0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("leaving"), st.sampled_from(PEERS), st.floats(0, 60)),
            st.tuples(st.just("better"), st.sampled_from(PEERS), st.floats(0, 60)),
            st.tuples(
                st.sampled_from(["failed", "moved", "dropped", "elsewhere"]), st.just(""), st.just(0.0)
            ),
        ),
        max_size=30,
    ),
    st.floats(0, 100),
)
def test_whatever_it_was_told_what_it_wants_can_be_named_and_has_a_deadline(
    told: list[tuple[str, str, float]], now_s: float
) -> None:
    core: MovesCore[str] = MovesCore()
    for what, peer_id, within_s in told:
        if what == "leaving":
            core.note_leaving(peer_id, 0.0, within_s)
        elif what == "better":
            core.note_better({peer_id: "d"}, 0.0, within_s)
        elif what == "elsewhere":
            core.elsewhere = True
        else:
            {"failed": core.record_failed, "moved": core.record_moved, "dropped": core.drop_better}[what]()
    left = core.to_leave(PEERS)
    if core.wants(PEERS, now_s) and not core.elsewhere:
        assert left
        assert core.deadline_s(left) <= 60 - MARGIN_S
    assert set(left) <= set(PEERS)
    assert core.is_idle <= (not left)


@pytest.mark.parametrize(
    ("better", "replaced"),
    [
        (route(("a", 0, 4), ("d", 4, 8)), {"b": "d"}),
        (route(("a", 0, 4), ("b", 4, 8)), {}),
        (route(("b", 0, 4), ("a", 4, 8)), None),
        (route(("b", 0, 4), ("d", 4, 8)), None),
        (route(("a", 0, 5), ("d", 5, 8)), None),
        (route(("d", 0, 8)), None),
    ],
)
def test_peers_are_replaced_where_spans_stay_and_nobody_becomes_another_hop(
    better: Route, replaced: dict[str, str] | None
) -> None:
    assert replaced_hops(route(("a", 0, 4), ("b", 4, 8)), better) == replaced
