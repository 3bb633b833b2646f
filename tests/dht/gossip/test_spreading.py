"""Records reach every peer once, over links that only offer them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.dht.gossip.iwants import FIRST_ALLOWANCE, IWANT_TIMEOUT_S
from molink.dht.gossip.spreading import (
    MAX_GONE,
    MAX_RECORD_IDS,
    RECORD_ID_BYTES,
    LazyPush,
    parse_record_ids,
    record_id,
)


class Net:
    """Peers whose links deliver at once; each record that is carried counts."""

    def __init__(self, links: set[tuple[int, int]], peers: int) -> None:
        self.peers = [LazyPush() for _ in range(peers)]
        self.held: list[set[bytes]] = [set() for _ in range(peers)]
        self.carried = 0
        self.links = [[b if a == at else a for a, b in sorted(links) if at in (a, b)] for at in range(peers)]
        for one, other in links:
            self.peers[one].open_link(str(other))
            self.peers[other].open_link(str(one))

    def say(self, at: int, record: bytes) -> None:
        self.held[at].add(record)
        for to in self.peers[at].forward(record, None, push=True):
            self._arrive(int(to), at, record)

    def tick(self) -> None:
        for at, peer in enumerate(self.peers):
            for to in self.links[at]:
                for names in peer.take_ihaves(str(to)):
                    asked = self.peers[to].receive_ihave(str(at), names, 0.0)
                    for record in peer.receive_iwant(str(to), asked):
                        self._arrive(to, at, record)

    def _arrive(self, to: int, source: int, record: bytes) -> None:
        self.carried += 1
        self.peers[to].record_seen(record, str(source))
        if record not in self.held[to]:
            self.held[to].add(record)
            self.peers[to].forward(record, str(source), push=False)


@given(st.integers(3, 40), st.integers(0, 2**32))
def test_every_peer_of_a_connected_swarm_gets_every_record_and_those_beyond_the_first_hop_once(
    peers: int, seed: int
) -> None:
    chance = random.Random(seed)
    links = {(chance.randrange(at), at) for at in range(1, peers)}
    links |= {(a, b) for a, b in (sorted(chance.sample(range(peers), 2)) for _ in range(2 * peers))}
    net = Net(links, peers)
    net.say(0, b"one")
    net.say(peers - 1, b"two")
    pushed = net.carried
    for _ in range(peers):
        net.tick()
    assert all(held == {b"one", b"two"} for held in net.held)
    assert net.carried - pushed <= 2 * peers


def test_what_a_neighbour_does_not_send_another_is_asked_for() -> None:
    peer = LazyPush()
    for link in ("slow", "other"):
        peer.open_link(link)
    name = record_id(b"record")
    assert peer.receive_ihave("slow", [name], 0.0) == (name,)
    assert peer.receive_ihave("other", [name], 1.0) == ()
    assert peer.retry_iwants(IWANT_TIMEOUT_S - 1) == {}
    assert peer.retry_iwants(IWANT_TIMEOUT_S) == {"other": [name]}
    peer.record_seen(b"record", "other")
    assert peer.retry_iwants(10 * IWANT_TIMEOUT_S) == {}
    assert peer.receive_ihave("slow", [name], 0.0) == ()


def test_what_only_a_lost_neighbour_had_may_be_offered_again() -> None:
    peer = LazyPush()
    peer.open_link("gone")
    peer.receive_ihave("gone", [b"12345678"], 0.0)
    peer.close_link("gone")
    assert peer.retry_iwants(0.0) == {}
    peer.open_link("new")
    assert peer.receive_ihave("new", [b"12345678"], 0.0) == (b"12345678",)


def test_a_neighbour_that_offers_without_end_is_asked_for_a_bounded_number() -> None:
    peer = LazyPush()
    peer.open_link("liar")
    asked = sum(
        len(peer.receive_ihave("liar", [at.to_bytes(8) for at in range(first, first + 128)], 0.0))
        for first in range(0, 128 * 100, 128)
    )
    assert asked == FIRST_ALLOWANCE


def test_nothing_is_handed_out_that_was_not_taken_in() -> None:
    peer = LazyPush()
    peer.open_link("neighbour")
    peer.record_seen(b"false", "source")
    peer.forward(b"true", None, push=False)
    assert list(peer.take_ihaves("neighbour")) == [(record_id(b"true"),)]
    asked = [record_id(b"false"), record_id(b"true"), b"whatever"]
    assert peer.receive_iwant("neighbour", asked) == (b"true",)


def test_what_a_neighbour_was_told_of_it_is_sent_once_however_often_it_asks() -> None:
    peer, names = LazyPush(), [record_id(word) for word in (b"before", b"pushed", b"it has that", b"told")]
    peer.forward(b"before", None, push=False)
    for link in ("neighbour", "other"):
        peer.open_link(link)
    peer.forward(b"pushed", None, push=True)
    for word in (b"it has that", b"told"):
        peer.forward(word, None, push=False)
    for link in ("neighbour", "other"):
        assert list(peer.take_ihaves(link)) == [tuple(names[2:])]
    peer.receive_ihave("neighbour", names[2:3], 0.0)
    assert peer.receive_iwant("neighbour", [*names, *names]) == (b"told",)
    assert peer.receive_iwant("neighbour", names) == ()
    assert peer.receive_iwant("other", names) == (b"it has that", b"told")
    assert peer.receive_iwant("nobody", names) == ()


@given(st.binary(max_size=MAX_RECORD_IDS * RECORD_ID_BYTES + 16))
def test_names_are_parsed_or_refused(body: bytes) -> None:
    if body and len(body) % RECORD_ID_BYTES == 0 and len(body) <= MAX_RECORD_IDS * RECORD_ID_BYTES:
        assert b"".join(parse_record_ids(body)) == body
    else:
        with pytest.raises(ValueError, match="names"):
            parse_record_ids(body)


def test_a_new_link_is_told_the_latest_that_are_gone_and_nothing_else_of_before() -> None:
    peer = LazyPush()
    words = [bytes([number]) for number in range(MAX_GONE + 3)]
    for word in words:
        peer.forward(word, "source", push=False, gone=True)
    peer.forward(b"a state", "source", push=False)
    peer.open_link("newcomer")
    assert list(peer.take_ihaves("newcomer")) == [tuple(record_id(word) for word in words[3:])]
    assert list(peer.take_ihaves("nobody")) == []


def test_what_says_who_is_there_is_announced_alone_where_the_rest_waits() -> None:
    peer, words = LazyPush(), tuple(bytes([number]) for number in range(4))
    peer.open_link("neighbour")
    for word in words[:2]:
        peer.forward(word, "source", push=False)
    peer.forward(words[2], "source", push=False, urgent=True)
    peer.forward(words[3], "source", push=False, gone=True)
    assert list(peer.take_ihaves("neighbour", urgent=True)) == [tuple(record_id(word) for word in words[2:])]
    assert list(peer.take_ihaves("neighbour", urgent=True)) == []
    assert list(peer.take_ihaves("neighbour")) == [tuple(record_id(word) for word in words[:2])]
