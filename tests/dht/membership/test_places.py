"""A crowd of names pushes out nobody whom a peer knows, and one neighbour tells of so many only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.membership.directory import Accepted, Directory
from molink.dht.membership.held import LOCAL, Origin
from molink.dht.membership.places import (
    MOST_MET,
    NEWCOMERS_AT_ONCE,
    NEWCOMERS_PER_MINUTE,
    EvictionOrder,
    NewcomerBudget,
)
from molink.dht.records.announcement import Reason, sign_facts, sign_state

CAPACITY = 40
CROWD = [Identity.generate() for _ in range(120)]
HONEST = [Identity.generate() for _ in range(20)]


def tell(directory: Directory, identity: Identity, now: float, origin: Origin = LOCAL) -> Accepted | Reason:
    outcome = directory.accept_facts(sign_facts(facts_of(identity), identity), now, 0.0, origin)
    directory.accept_state(sign_state(state_of(identity, ttl_s=10_000), identity), now, 0.0, origin)
    return outcome


def seen(directory: Directory, now: float) -> set[str]:
    return {view.peer_id for view in directory.snapshot(now)}


def test_a_crowd_that_talks_pushes_out_nobody_who_was_known_before() -> None:
    directory = Directory(capacity=CAPACITY)
    for identity in HONEST:
        tell(directory, identity, 0.0)
    for at, identity in enumerate(CROWD * 2):
        tell(directory, identity, 1.0 + at)
    assert {identity.peer_id for identity in HONEST} <= seen(directory, 300.0)
    assert len(directory.entries) == CAPACITY


def test_whoever_is_heard_itself_gets_in_beside_a_crowd_and_stays() -> None:
    directory = Directory(capacity=CAPACITY)
    for identity in CROWD[:CAPACITY]:
        tell(directory, identity, 0.0)
    newcomer = HONEST[0]
    assert isinstance(tell(directory, newcomer, 1.0, Origin(newcomer.peer_id)), Accepted)
    for identity in CROWD[CAPACITY:]:
        tell(directory, identity, 2.0)
    assert newcomer.peer_id in seen(directory, 3.0)


def test_the_gone_make_room_before_the_living() -> None:
    directory = Directory(capacity=2)
    gone, living, newcomer = HONEST[:3]
    directory.accept_facts(sign_facts(facts_of(gone), gone), 0.0)
    directory.accept_state(sign_state(state_of(gone, ttl_s=10), gone), 0.0)
    tell(directory, living, 0.0)
    directory.expire(11.0)
    tell(directory, newcomer, 12.0)
    assert seen(directory, 12.0) == {living.peer_id, newcomer.peer_id}


def test_one_neighbour_tells_of_so_many_newcomers_and_another_one_is_still_heard() -> None:
    budget = NEWCOMERS_AT_ONCE
    told = Origin("somebody", None, settled=True)
    spent = NewcomerBudget()
    assert sum(spent.spend("somebody", 0.0, 10) for _ in range(2 * budget)) == budget
    assert spent.spend("another", 0.0, 10)
    assert sum(spent.spend("somebody", 60.0, 10) for _ in range(budget)) == NEWCOMERS_PER_MINUTE
    directory = Directory(budget=spent)
    assert tell(directory, CROWD[0], 60.0, told) is Reason.CROWDED
    assert isinstance(tell(directory, CROWD[0], 60.0, Origin("another", None, settled=True)), Accepted)


def test_a_part_of_the_swarm_as_large_as_what_is_known_may_come_at_once() -> None:
    budget = NewcomerBudget()
    assert sum(budget.spend("somebody", 0.0, 5_000) for _ in range(6_000)) == 5_000


STEPS = ["add_peer", "record_contact", "mark_gone", "mark_alive", "remove_peer"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9))))
def test_whoever_makes_room_is_there_and_was_not_heard_itself(steps: list[tuple[str, int]]) -> None:
    places, known = EvictionOrder(10), set[str]()
    met = set[str]()
    for step, number in steps:
        name = str(number)
        if step == "add_peer":
            if name in known:
                continue
            known.add(name)
        elif name not in known:
            continue
        getattr(places, step)(name)
        met = met | {name} if step == "record_contact" else met
        if step == "remove_peer":
            known.discard(name)
            met.discard(name)
        leaves = places.first_to_go()
        assert (leaves is None) == (known <= met)
        assert leaves is None or leaves in known - met
        assert places.full == (len(known) >= 10)


@pytest.mark.parametrize("more", [1, 5])
def test_those_who_were_heard_themselves_are_bounded_too(more: int) -> None:
    places = EvictionOrder(10_000)
    for number in range(MOST_MET + more):
        places.add_peer(str(number))
        places.record_contact(str(number))
    assert [number for number in range(MOST_MET + more) if not places.was_contacted(str(number))] == list(
        range(more)
    )
