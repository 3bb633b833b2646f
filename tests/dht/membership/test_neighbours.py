"""Whom a peer dials, and who makes room for whom: no network takes all links."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.membership.neighbours import (
    GRACE_S,
    MAX_INCOMING,
    MOST_INCOMING,
    NETWORKS,
    REDIAL_SPREAD_S,
    SHARE_KEPT,
    UNDIALABLE_DEGREE,
    LinkCounts,
    Neighbour,
    link_counts,
    network_at,
    redial_spread_s,
    to_dial,
    to_hand_over,
    to_make_room,
    worth_remembering,
)
from molink.dht.membership.timing import DEGREE

networks = st.sampled_from(["a", "b", "c", "d"])
candidates = st.lists(networks, max_size=12).map(
    lambda found: [Neighbour(f"peer {number}", network) for number, network in enumerate(found)]
)
incoming = st.lists(st.tuples(networks, st.floats(0.0, 500.0), st.floats(0.0, 500.0)), max_size=12).map(
    lambda found: [Neighbour(f"peer {number}", *link) for number, link in enumerate(found)]
)


def test_where_all_can_be_dialled_each_dials_four_and_admits_eight() -> None:
    living = [facts_of(Identity.generate()) for _ in range(20)]
    assert link_counts(living, living[0].peer_id) == LinkCounts(DEGREE, MAX_INCOMING)
    assert link_counts((), "nobody") == LinkCounts(DEGREE, MAX_INCOMING)


@pytest.mark.parametrize(("dialable", "undialable"), [(1, 12), (3, 24), (3, 60), (5, 95), (50, 450)])
def test_where_few_can_be_dialled_they_have_a_place_for_every_link_of_the_others(
    dialable: int, undialable: int
) -> None:
    there = [facts_of(Identity.generate()) for _ in range(dialable)]
    hidden = [replace(facts_of(Identity.generate()), addresses=()) for _ in range(undialable)]
    ours, theirs = (link_counts((*there, *hidden), one.peer_id) for one in (there[0], hidden[0]))
    assert (ours.to_dial, theirs.to_dial) == (DEGREE, UNDIALABLE_DEGREE)
    assert ours.copies == theirs.copies == (dialable + undialable) / dialable
    assert dialable * ours.incoming >= undialable * theirs.to_dial + dialable * min(dialable - 1, DEGREE)
    assert ours.incoming <= MOST_INCOMING
    assert ours.share == undialable * UNDIALABLE_DEGREE / dialable


@given(incoming, st.floats(0.0, 12.0), st.floats(0.0, 600.0))
def test_who_has_more_than_its_share_hands_over_an_old_link_and_nobody_else_does(
    links: list[Neighbour], share: float, now: float
) -> None:
    leaves = to_hand_over(links, share, now)
    if len(links) <= SHARE_KEPT * share + 1:
        assert leaves is None
    elif leaves is None:
        assert all(now - link.since < GRACE_S for link in links)
    else:
        assert now - leaves.since >= GRACE_S
    assert to_hand_over(links, link_counts((), "nobody").share, now) is None


@settings(max_examples=10, deadline=None)
@given(st.integers(3, 8), st.integers(20, 60), st.integers(0, 2**32))
def test_links_go_over_to_who_comes_in_the_place_of_one_that_is_gone(
    dialable: int, undialable: int, seed: int
) -> None:
    chance, share = random.Random(seed), undialable * UNDIALABLE_DEGREE / dialable
    links = {name: dict.fromkeys(chance.sample(range(dialable - 1), 2), 0.0) for name in range(undialable)}
    for moment in range(6 * undialable):
        full, now = moment % dialable, GRACE_S + moment
        here = [Neighbour(str(name), "", ends[full]) for name, ends in links.items() if full in ends]
        if (leaves := to_hand_over(here, share, now)) is not None:
            ends = links[int(leaves.peer_id)]
            to = chance.choice([one for one in range(dialable) if one not in ends])
            del ends[full]
            ends[to] = now
    most = Counter(end for ends in links.values() for end in ends).most_common(1)[0][1]
    assert most <= SHARE_KEPT * share + 2


def test_missing_links_are_dialled_at_once_where_all_can_be_dialled_and_over_some_time_where_few_can() -> (
    None
):
    assert redial_spread_s(1.0) == 0.0
    assert 0.9 * REDIAL_SPREAD_S < redial_spread_s(21.0) < REDIAL_SPREAD_S


@given(candidates, st.lists(networks, max_size=3), st.integers(0, 4))
def test_as_many_are_dialled_as_there_is_room_for_each_once(
    known: list[Neighbour], dialled: list[str], room: int
) -> None:
    chosen = to_dial(known, dialled, room)
    assert len(chosen) == min(room, len(known)) == len(set(chosen))
    assert set(chosen) <= set(known)


@given(candidates, st.integers(1, 4))
def test_links_lead_to_several_networks_where_several_are_known(known: list[Neighbour], room: int) -> None:
    reached = {one.network for one in to_dial(known, (), room)}
    assert len(reached) >= min(NETWORKS, room, len({one.network for one in known}))


@given(incoming, networks)
def test_who_makes_room_is_of_a_network_that_has_most(links: list[Neighbour], network: str) -> None:
    leaves = to_make_room(links, network, 500.0)
    if leaves is None:
        assert all(500.0 - link.since < GRACE_S for link in links if link.network == network)
        return
    shares = Counter(link.network for link in links)
    shares[network] += 1
    assert shares[leaves.network] == max(shares.values())


def test_a_newcomer_of_another_network_gets_in_at_once_and_one_of_the_same_after_a_minute() -> None:
    crowd = [Neighbour(str(number), "crowd", 100.0, 100.0 + number) for number in range(MAX_INCOMING)]
    leaves = to_make_room(crowd, "elsewhere", 100.0)
    assert leaves is not None
    assert leaves.peer_id == "0"
    assert to_make_room(crowd, "crowd", 100.0 + GRACE_S - 1) is None
    assert to_make_room(crowd, "crowd", 100.0 + GRACE_S) == leaves


@given(st.integers(0, MAX_INCOMING - 1), st.integers(1, 300))
def test_whoever_has_one_network_fills_its_places_only(honest: int, dials: int) -> None:
    links = [Neighbour(f"honest {number}", f"home {number}", 0.0, 0.0) for number in range(honest)]
    for number in range(dials):
        now = float(number)
        newcomer = Neighbour(f"attacker {number}", "attacker", now, now)
        if len(links) == MAX_INCOMING:
            leaves = to_make_room(links, newcomer.network, now)
            if leaves is None:
                continue
            links.remove(leaves)
        links.append(newcomer)
    assert sum(link.network != "attacker" for link in links) == honest


def test_the_network_of_an_address_is_that_of_its_host() -> None:
    assert network_at("/ip4/203.0.113.7/tcp/1/p2p/x") == network_at("/ip4/203.0.113.99/tcp/2/p2p/y")
    assert network_at("/ip4/203.0.113.7/tcp/1/p2p/x") != network_at("/ip4/203.0.114.7/tcp/1/p2p/x")
    assert network_at("/dns4/peer.example.org/tcp/1") == "peer.example.org"
    assert [network_at(text) for text in ("", "/foo", "/ip4//tcp")] == ["", "", ""]


def test_neighbours_and_many_networks_are_remembered_first() -> None:
    living = [
        replace(facts_of(Identity.generate()), addresses=(f"/ip4/198.51.{network}.{host}/tcp/1/p2p/x",))
        for network in range(40)
        for host in (1, 2)
    ]
    near = living[79]
    chosen = worth_remembering(living, (near.peer_id,), 32)
    assert len(chosen) == 32
    assert chosen[0] == near.addresses[0]
    assert len({network_at(address) for address in chosen}) == 32
    assert worth_remembering([replace(living[0], addresses=())], (), 32) == ()
