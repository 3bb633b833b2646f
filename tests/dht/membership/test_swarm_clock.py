"""What time it is in the swarm: old records are old, whoever calls them new, and a wrong clock hides nobody."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.membership.directory import Accepted, Directory
from molink.dht.membership.held import Origin
from molink.dht.membership.swarm_clock import MOST_AHEAD_S, TOLERANCE_S, SwarmClock
from molink.dht.records.announcement import Reason, sign_facts, sign_state

NOW_S = 1_800_000_000.0
EIGHT_WEEKS_S = 8 * 7 * 86_400.0
skews = st.floats(-1e8, 1e8)


def clock_of(*ahead_s: float) -> SwarmClock:
    clock = SwarmClock()
    for tag, ahead in enumerate(ahead_s):
        clock.record_sequence(tag, int(1000 * (NOW_S + ahead)), now=50.0)
    return clock


@given(st.lists(skews, max_size=40))
def test_half_of_those_met_cannot_move_the_clock_beyond_the_others(lies: list[float]) -> None:
    honest = [0.0] * (len(lies) + 1)
    clock = clock_of(*lies, *honest)
    if len(lies) + len(honest) <= 32:
        assert clock.ahead_to_judge_s(50.0, NOW_S) == pytest.approx(0.0, abs=0.01)
        assert clock.ahead_to_speak_s(50.0, NOW_S) == pytest.approx(0.0, abs=0.01)


@given(st.lists(skews, max_size=40), st.floats(0.0, 1e6))
def test_who_speaks_is_never_behind_what_it_judges_by_and_never_behind_its_own_clock(
    ahead: list[float], later: float
) -> None:
    clock = clock_of(*ahead)
    speak = clock.ahead_to_speak_s(50.0 + later, NOW_S + later)
    assert 0.0 <= speak <= MOST_AHEAD_S
    assert clock.ahead_to_judge_s(50.0 + later, NOW_S + later) <= speak or speak == MOST_AHEAD_S


def test_a_machine_whose_clock_is_wrong_judges_by_that_of_others() -> None:
    clock = clock_of(86_400.0, 86_400.0, 86_401.0)
    said_now = int(1000 * (NOW_S + 86_400.0))
    assert clock.least_age_s(said_now, 50.0, NOW_S) < 0
    assert clock.least_age_s(said_now - 86_400_000, 50.0, NOW_S) > 86_400 - TOLERANCE_S - 2
    ahead = clock_of(-86_400.0, -86_400.0)
    assert ahead.least_age_s(int(1000 * (NOW_S - 86_400.0)), 50.0, NOW_S) < 0


@pytest.mark.parametrize(
    ("others", "behind"),
    [((), 0.0), ((7200.0,), 7200.0), ((-7200.0,), -7200.0), ((0.0, 7200.0), 0.0), ((7200.0, 7201.0), 7200.0)],
)
def test_how_far_a_clock_is_behind_is_told_by_the_median(others: tuple[float, ...], behind: float) -> None:
    assert clock_of(*others).behind_s(50.0, NOW_S) == pytest.approx(behind)


def test_a_clock_that_jumps_is_behind_by_as_much() -> None:
    clock = clock_of(0.0, 1.0, 2.0)
    assert clock.behind_s(60.0, NOW_S + 10.0 - 3600.0) == pytest.approx(3601.0)
    assert clock.behind_s(60.0, NOW_S + 10.0 + 3600.0) == pytest.approx(-3599.0)


def test_one_source_alone_is_given_the_benefit_of_the_doubt_and_a_clock_that_is_set_changes_nothing() -> None:
    clock = clock_of(-86_400.0)
    assert clock.least_age_s(int(1000 * (NOW_S - 86_400.0)), 50.0, NOW_S) < 0
    three = clock_of(0.0, 1.0, 2.0)
    before = three.least_age_s(int(1000 * NOW_S), 60.0, NOW_S + 10.0)
    assert three.least_age_s(int(1000 * NOW_S), 60.0, NOW_S + 10.0 - 5_000) == pytest.approx(before, abs=3)


def told(directory: Directory, identity: Identity, said_s: float, source: Identity, ttl_s: int) -> object:
    sequence = int(1000 * said_s)
    origin = Origin(source.peer_id, NOW_S)
    facts = facts_of(identity, sequence=sequence, ttl_s=ttl_s)
    directory.accept_facts(sign_facts(facts, identity), 50.0, 0.0, origin)
    state = state_of(identity, sequence=sequence + 1, facts_sequence=sequence, ttl_s=ttl_s)
    return directory.accept_state(sign_state(state, identity), 50.0, 0.0, origin)


@pytest.mark.parametrize("ttl_s", [57, 40_000])
def test_what_was_said_eight_weeks_ago_is_not_alive_though_its_bearer_calls_it_new(ttl_s: int) -> None:
    directory, bearer, dead, living = Directory(), *(Identity.generate() for _ in range(3))
    assert isinstance(told(directory, bearer, NOW_S, bearer, ttl_s), Accepted)
    assert told(directory, dead, NOW_S - EIGHT_WEEKS_S, bearer, ttl_s) in (
        Reason.EXPIRED,
        Reason.UNKNOWN_PEER,
    )
    assert isinstance(told(directory, living, NOW_S - 20.0, bearer, ttl_s), Accepted)
    assert {view.peer_id for view in directory.snapshot(50.0)} == {bearer.peer_id, living.peer_id}


def test_what_a_lone_bearer_made_believe_is_dropped_when_others_are_met() -> None:
    directory, bearer, dead, bob, eve = Directory(), *(Identity.generate() for _ in range(4))
    long_ago = NOW_S - EIGHT_WEEKS_S
    assert isinstance(told(directory, bearer, long_ago, bearer, 40_000), Accepted)
    assert isinstance(told(directory, dead, long_ago, bearer, 40_000), Accepted)
    for honest in (bob, eve):
        told(directory, honest, NOW_S, honest, 40_000)
    directory.expire(51.0, NOW_S + 1.0)
    seen = {view.peer_id for view in directory.snapshot(51.0)}
    assert dead.peer_id not in seen
    assert {bob.peer_id, eve.peer_id} <= seen


def test_a_peer_that_is_heard_itself_is_believed_whatever_its_clock_says() -> None:
    directory, slow, bob = Directory(), Identity.generate(), Identity.generate()
    assert isinstance(told(directory, slow, 1000.0, slow, 57), Accepted)
    state = state_of(slow, sequence=1_017_000, facts_sequence=1_000_000)
    heard = directory.accept_state(sign_state(state, slow), 67.0, 0.0, Origin(bob.peer_id, NOW_S + 17))
    assert isinstance(heard, Accepted)


@given(st.lists(st.integers(0, 2**53 - 1), max_size=50))
def test_no_numbers_whatever_make_a_clock_that_is_none(sequences: list[int]) -> None:
    clock = SwarmClock()
    for tag, sequence in enumerate(sequences):
        clock.record_sequence(tag, sequence, 10.0)
    assert math.isfinite(clock.ahead_to_judge_s(10.0, NOW_S))
    assert clock.ahead_to_speak_s(10.0, NOW_S) <= MOST_AHEAD_S
